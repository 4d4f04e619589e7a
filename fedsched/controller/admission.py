"""Takes jobs in and ends them: the two things that users order."""

from __future__ import annotations

import difflib
import re
import threading
import time
import uuid
from collections.abc import Callable

from msgspec.structs import replace

from fedsched import tracing
from fedsched.controller.cache import Cache
from fedsched.controller.history import History
from fedsched.core.cluster import Assignment
from fedsched.core.ids import NAME_PATTERN, JobId
from fedsched.core.job import (
    EPOCHS_MAX,
    LENGTH_MAX_S,
    TASKS_MAX,
    TERMINAL,
    JobPhase,
    JobSpec,
    JobStatus,
    Reason,
    Transition,
    Trigger,
    next_phase,
)
from fedsched.core.routing import CandidateCluster, Routing, impossible, largest, route
from fedsched.core.views import Job, Submission
from fedsched.errors import Conflict, ImpossibleJob, InvalidInput, NotFound, StoreUnavailable, Unreachable
from fedsched.runtime import codec, keys, stored
from fedsched.runtime.ports import Put, RevisionIs, Store

ATTEMPTS_MAX = 32
"""How often a write is tried again when others write the same keys."""
SPEC_BYTES_MAX = 64 * 1024
"""Of a job's specification as it is stored."""
CACHE_S = 5.0
"""Longest wait until the own write is seen in the cache."""

_NAME = re.compile(NAME_PATTERN)
_KEY = re.compile(r"[\x21-\x7e]{1,200}")


class Admission:
    """Writes submissions and cancellations to the store, each in one guarded transaction.

    Args:
        actor: who is named in the transitions.
        clock: unix time.
    """

    def __init__(
        self, store: Store, cache: Cache, history: History, actor: str, clock: Callable[[], float] = time.time
    ) -> None:
        self._store = store
        self._cache = cache
        self._history = history
        self._actor = actor
        self._clock = clock
        self._numbering = threading.Lock()
        """Held by the one submission that takes the next number: hundreds at once would go on taking it from each other
        until most of them had given up. Only other controllers are raced."""

    def submit(self, wanted: JobSpec, idempotency_key: str, dry_run: bool) -> Submission:
        """Admit a job, or say what would happen.

        Raises:
            InvalidInput: the specification cannot be used.
            ImpossibleJob: no known cluster could ever hold it.
            Conflict: the idempotency key was used for another job.
            CorruptRecord: what is kept under that key cannot be read, or the number of the last job.
        """
        if idempotency_key and not _KEY.fullmatch(idempotency_key):
            raise InvalidInput(
                f"idempotency key {idempotency_key!r} cannot be used; 1 to 200 printable characters were expected",
                "take a name or a UUID",
            )
        spec = replace(
            wanted,
            job_id=JobId(""),
            submitted_s=self._clock(),
            traceparent=wanted.traceparent or tracing.traceparent(),
        )
        check(spec)
        known = self._known(spec, idempotency_key) if idempotency_key else None
        if known is not None:
            return Submission(known, route(known.spec, self._cache.candidates()), False)
        states = self._cache.candidates()
        routing = route(spec, states)
        if impossible(routing):
            raise ImpossibleJob(*refusal(spec, routing, states))
        if dry_run:
            return Submission(Job(spec, JobStatus(JobId(""))), routing, False)
        with self._numbering:
            job, created = self._create(spec, idempotency_key or uuid.uuid4().hex)
        self._cache.wait_for_job(job.spec.job_id, job.status.seq, CACHE_S)
        return Submission(job, routing, created)

    def cancel(self, job_id: JobId) -> None:
        """Order the job's end. One that is over stays as it is.

        A waiting job ends here; one that was dispatched is ended by its cluster's agent, as soon as it is connected.

        Raises:
            NotFound: there is no such job.
            CorruptRecord: what etcd holds of it cannot be read.
        """
        for _ in range(ATTEMPTS_MAX):
            entry = self._store.get(keys.job_status(job_id))
            if entry is None:
                if self._history.get(job_id) is None:
                    raise no_such_job(job_id)
                return
            status = stored.record(JobStatus, entry)
            if status.phase in TERMINAL:
                return
            if status.phase in (JobPhase.QUEUED, JobPhase.HELD):
                done = self._cancel_waiting(status, entry.mod_revision)
            else:
                done = self._cancel_dispatched(status)
            if done:
                return
        raise Conflict(f"job {job_id} changes too fast to be cancelled", "try again")

    def _known(self, spec: JobSpec, idempotency_key: str) -> Job | None:
        """The job that was submitted with this key, if its contents are the same."""
        entry = self._store.get(keys.idempotency(idempotency_key))
        job = self._history.by_key(idempotency_key) if entry is None else self.read(JobId(stored.text(entry)))
        if job is not None and _contents(job.spec) != _contents(spec):
            raise Conflict(
                f"idempotency key {idempotency_key!r} was used for job {job.spec.job_id}, which has other contents",
                "submit with another key, or with the file as it was",
            )
        return job

    def read(self, job_id: JobId) -> Job | None:
        """The job as it is shown, from wherever it is known.

        Raises:
            CorruptRecord: what is kept of it cannot be read.
        """
        job = self._cache.job(job_id)
        if job is not None:
            return job
        spec, status = self._store.get(keys.job_spec(job_id)), self._store.get(keys.job_status(job_id))
        if spec is not None and status is not None:
            return Job(stored.record(JobSpec, spec), stored.record(JobStatus, status))
        return self._history.get(job_id)

    def _create(self, spec: JobSpec, key: str) -> tuple[Job, bool]:
        for _ in range(ATTEMPTS_MAX):
            counter = self._store.get(keys.JOB_COUNTER)
            number = stored.number(counter) + 1 if counter is not None else 1
            job = Job(replace(spec, job_id=JobId(str(number))), JobStatus(JobId(str(number)), seq=1))
            guards = (
                RevisionIs(keys.JOB_COUNTER, counter.mod_revision if counter else 0),
                RevisionIs(keys.idempotency(key), 0),
            )
            writes = (
                Put(keys.JOB_COUNTER, str(number).encode()),
                Put(keys.idempotency(key), job.spec.job_id.encode()),
                Put(keys.job_spec(job.spec.job_id), codec.dumps(job.spec)),
                Put(keys.job_status(job.spec.job_id), codec.dumps(job.status)),
                Put(keys.job_transition(job.spec.job_id, 1), codec.dumps(_created(job, self._actor))),
            )
            try:
                committed = self._store.commit(guards, writes)
            except StoreUnavailable as problem:
                raise Unreachable(
                    f"{problem.message}; whether the job was taken is not known",
                    f"submit again with --idempotency-key {key}: it is then taken exactly once",
                ) from problem
            if committed.ok:
                return job, True
            known = self._known(spec, key)
            if known is not None:
                return known, False
        raise Conflict("too many submissions at once", "try again")

    def _cancel_waiting(self, status: JobStatus, revision: int) -> bool:
        now_s = self._clock()
        after = replace(
            status,
            phase=next_phase(status.job_id, status.phase, Trigger.CANCELLED),
            reason=Reason.CANCELLED_BY_USER,
            message="cancelled before it was dispatched",
            seq=status.seq + 1,
            finished_s=now_s,
        )
        step = transition(status, after, now_s, self._actor)
        job_id = status.job_id
        return self._store.commit(
            (RevisionIs(keys.job_status(job_id), revision),),
            (
                Put(keys.job_status(job_id), codec.dumps(after)),
                Put(keys.job_transition(job_id, after.seq), codec.dumps(step)),
            ),
        ).ok

    def _cancel_dispatched(self, status: JobStatus) -> bool:
        assert status.cluster is not None, f"job {status.job_id} is {status.phase.value} without a cluster"
        key = keys.assignment(status.cluster, status.job_id)
        entry = self._store.get(key)
        if entry is None:
            # The agent removed it with the job's terminal status, which the next look will show.
            return False
        if stored.record(Assignment, entry).cancel:
            return True
        order = Put(key, codec.dumps(Assignment(status.job_id, cancel=True)))
        return self._store.commit((RevisionIs(key, entry.mod_revision),), (order,)).ok


def no_such_job(job_id: JobId) -> NotFound:
    """The error for an id that nobody knows."""
    return NotFound(f"there is no job {job_id}", "list them with `fedsched queue --all`")


def transition(before: JobStatus, after: JobStatus, time_s: float, actor: str, traceparent: str = "") -> Transition:
    """The step from one status to the next."""
    return Transition(
        seq=after.seq,
        time_s=time_s,
        actor=actor,
        job_id=after.job_id,
        attempt=after.attempt,
        term=after.term,
        source=before.phase,
        target=after.phase,
        reason=after.reason,
        message=after.message,
        allocation=after.allocation,
        traceparent=traceparent,
    )


def check(spec: JobSpec) -> None:
    """Refuse what no client should send; the job file's own checks name the lines of the file.

    Raises:
        InvalidInput: there are problems; all of them are listed.
    """
    rules = (
        (bool(_NAME.fullmatch(spec.name)), f"name {spec.name!r} must be lower-case letters, digits and dashes"),
        (bool(spec.run.strip()), "run is empty; a command was expected"),
        (spec.workers.maximum >= 1, f"workers is {spec.workers}; at least 1 must be allowed"),
        (spec.ps.minimum >= 1 or spec.ps.maximum == 0, f"ps is {spec.ps}; a job has servers, at least 1, or none: 0"),
        (max(spec.workers.maximum, spec.ps.maximum) <= TASKS_MAX, f"at most {TASKS_MAX} tasks of a role can be had"),
        (spec.worker_demand.cpu_milli > 0, "a worker must need some cpu"),
        (not spec.worker_demand.is_negative(), f"the resources of a worker are negative: {spec.worker_demand}"),
        (not spec.ps_demand.is_negative(), f"the resources of a parameter server are negative: {spec.ps_demand}"),
        (0 < spec.epochs < EPOCHS_MAX, f"epochs is {spec.epochs}; it must be above 0 and below {EPOCHS_MAX:g}"),
        (_are_lengths(spec), f"a time is negative, no number or above {LENGTH_MAX_S:g} s"),
        (_can_be_told(spec), "run, workdir and env must not hold a zero byte: no process can be given one"),
        (spec.max_attempts >= 1, f"max_attempts is {spec.max_attempts}; at least 1 is needed"),
        (0 <= spec.priority <= 100, f"priority is {spec.priority}; 0 to 100 was expected"),
        (len(codec.dumps(spec)) <= SPEC_BYTES_MAX, f"the job is larger than {SPEC_BYTES_MAX} bytes"),
    )
    broken = [message for holds, message in rules if not holds]
    if broken:
        raise InvalidInput(
            f"the job has {len(broken)} problem(s):\n" + "\n".join(f"  - {line}" for line in broken),
            "correct the lines above",
        )


def _are_lengths(spec: JobSpec) -> bool:
    lengths_s = (spec.checkpoint_every_s, spec.resize_cooldown_s, spec.grace_s, spec.max_runtime_s or 0.0)
    return all(0 <= length_s <= LENGTH_MAX_S for length_s in lengths_s)


def _can_be_told(spec: JobSpec) -> bool:
    return "\0" not in "".join((spec.run, spec.workdir, *(part for pair in spec.env for part in pair)))


def refusal(spec: JobSpec, routing: Routing, states: list[CandidateCluster]) -> tuple[str, str]:
    """Message and hint for a job that no cluster can ever hold: what it needs, the largest cluster, what is missing."""
    if routing.reason is Reason.NO_MATCHING_CLUSTER:
        known = [state.name for state in states]
        near = [match for name in spec.clusters for match in difflib.get_close_matches(name, known, n=1)]
        return routing.message, f"did you mean {near[0]}?" if near else "correct placement in the job file"
    if routing.reason is Reason.NO_MATCHING_ACCELERATOR:
        return (
            f"no cluster has {' or '.join(spec.accelerators)}: {routing.message}",
            "ask for an accelerator that `fedsched info -o json` lists",
        )
    biggest = largest(states)
    verdict = next(verdict for verdict in routing.verdicts if verdict.cluster == biggest.name)
    minimum = spec.minimum
    return (
        f"no cluster can ever hold the job: its minimum of {minimum.workers} worker(s) and {minimum.ps} parameter "
        f"server(s) needs {spec.demand_of(minimum)}, and the largest cluster, {biggest.name}, {verdict.message}",
        "lower the minimum of elastic.workers or the resources of one task",
    )


def _contents(spec: JobSpec) -> JobSpec:
    """What the user wrote, without what each submission adds."""
    return replace(spec, job_id=JobId(""), submitted_s=0.0, traceparent="")


def _created(job: Job, actor: str) -> Transition:
    return Transition(
        seq=1,
        time_s=job.spec.submitted_s,
        actor=actor,
        job_id=job.spec.job_id,
        attempt=0,
        term=0,
        source=None,
        target=JobPhase.QUEUED,
        reason=Reason.PENDING_EVALUATION,
        message="submitted",
        traceparent=job.spec.traceparent,
    )
