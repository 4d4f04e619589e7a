"""The leader's work: gives queued jobs to clusters in the order of submission, moves finished ones to the history."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

from msgspec.structs import replace

from fedsched import tracing
from fedsched.controller.admission import CACHE_S, transition
from fedsched.controller.cache import Cache, Tracked
from fedsched.controller.history import History, Past
from fedsched.core.cluster import Assignment
from fedsched.core.ids import ClusterName
from fedsched.core.job import TERMINAL, JobPhase, JobSpec, JobStatus, Reason, Trigger, next_phase
from fedsched.core.routing import CandidateCluster, Routing, least_of, route
from fedsched.core.views import Job
from fedsched.errors import Failed, StoreUnavailable
from fedsched.runtime import codec, keys
from fedsched.runtime.backoff import Backoff
from fedsched.runtime.ports import Delete, Guard, Put, RevisionIs, Store

IDLE_S = 1.0
"""A pass is made at least this often, for what time alone brings."""
BACKOFF_S = (0.5, 4.0)
"""First and longest pause after a pass that failed: the store did not answer, mostly."""
HISTORY_PAUSE_S = 5.0
"""Pause after the history could not be written: each try may wait for it, and dispatching with it."""
DELETES_MAX = 100
"""Keys removed in one transaction; etcd allows 128."""

_log = logging.getLogger(__name__)


class Leadership(Protocol):
    """An election, as the dispatcher sees it."""

    @property
    def leading(self) -> bool:
        """Whether this controller leads, as far as it knows."""

    def guard(self) -> Guard:
        """Makes a transaction fail when this controller does not lead."""


class Dispatcher:
    """One thread that works whenever jobs or clusters change. It never ends because of the store."""

    def __init__(
        self,
        store: Store,
        cache: Cache,
        history: History,
        leadership: Leadership,
        actor: str,
        history_after_s: float,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._cache = cache
        self._history = history
        self._leadership = leadership
        self._actor = actor
        self._history_after_s = history_after_s
        self._clock = clock
        self._monotonic = monotonic
        self._stop = threading.Event()
        self._recorded: set[str] = set()
        self._history_failed_s: float | None = None
        """When the history could not be written, the last time, unless it could since."""
        self._thread = threading.Thread(target=self._run, name="dispatcher", daemon=True)

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()

    def close(self) -> None:
        """Stop; waits for the write that is on its way."""
        self._stop.set()
        self._thread.join(10.0)

    def _run(self) -> None:
        seen, away, backoff = 0, False, Backoff(*BACKOFF_S)
        while not self._stop.is_set():
            # Short, so that `close` and a change of the leader are noticed soon.
            seen = self._cache.wait(seen, IDLE_S / 4)
            if not self._cache.loaded:
                continue
            try:
                self.work()
                away = False
                backoff.reset()
            except StoreUnavailable as problem:
                if not away:
                    _log.warning("etcd does not answer, dispatching waits: %s", problem.message)
                away = True
                self._stop.wait(backoff.pause_s())
            except Exception:
                # A fault of ours in one job must not stop the others' dispatch for good.
                _log.exception("a dispatch pass failed")
                self._stop.wait(backoff.pause_s())

    def work(self) -> None:
        """One pass: while leading, dispatch; write finished jobs down; while leading, tidy up."""
        tracked = self._cache.tracked()
        guard = self._leadership.guard() if self._leadership.leading else None
        if guard is not None:
            self._dispatch_all(tracked, guard)
        self._record_all(tracked)
        if guard is not None:
            self._remove_old(tracked, guard)

    def _dispatch_all(self, tracked: list[Tracked], guard: Guard) -> None:
        states = {state.name: state for state in self._cache.candidates()}
        for job in tracked:
            assert job.spec is not None
            assert job.status is not None
            if job.status.phase is not JobPhase.QUEUED:
                continue
            routing = route(job.spec, states.values())
            if routing.choice is None:
                self._say_why(job.status, job.status_revision, routing, guard)
            elif self._dispatch(job.spec, job.status, job.status_revision, routing.choice, guard):
                states[routing.choice] = _with_promise(states[routing.choice], job.spec)

    def _dispatch(self, spec: JobSpec, status: JobStatus, revision: int, cluster: ClusterName, guard: Guard) -> bool:
        """Hand the job over in one transaction; False when it changed meanwhile or another controller leads."""
        now_s = self._clock()
        with tracing.span(
            "dispatch", parent=spec.traceparent, attributes={"job": spec.job_id, "cluster": cluster}
        ) as span:
            after = replace(
                status,
                phase=next_phase(spec.job_id, status.phase, Trigger.DISPATCHED),
                reason=Reason.PENDING_EVALUATION,
                message=f"given to {cluster}",
                cluster=cluster,
                seq=status.seq + 1,
                dispatched_s=now_s,
            )
            step = transition(status, after, now_s, self._actor, tracing.traceparent(span) or spec.traceparent)
            committed = self._store.commit(
                (RevisionIs(keys.job_status(spec.job_id), revision), guard),
                (
                    Put(keys.job_status(spec.job_id), codec.dumps(after)),
                    Put(keys.job_transition(spec.job_id, after.seq), codec.dumps(step)),
                    Put(keys.assignment(cluster, spec.job_id), codec.dumps(Assignment(spec.job_id))),
                ),
            )
        if committed.ok:
            _log.info("job %s goes to %s", spec.job_id, cluster)
            # The next pass must count this job's promise, and not try it again.
            self._cache.wait_for_job(spec.job_id, after.seq, CACHE_S)
        return committed.ok

    def _say_why(self, status: JobStatus, revision: int, routing: Routing, guard: Guard) -> None:
        if (status.reason, status.message) == (routing.reason, routing.message):
            return
        after = replace(status, reason=routing.reason, message=routing.message)
        key = keys.job_status(status.job_id)
        self._store.commit((RevisionIs(key, revision), guard), (Put(key, codec.dumps(after)),))

    def _record_all(self, tracked: list[Tracked]) -> None:
        """Write finished jobs down. A history that cannot be written costs no other job its dispatch."""
        failed_s = self._history_failed_s
        if failed_s is not None and self._monotonic() - failed_s < HISTORY_PAUSE_S:
            return
        try:
            for job in tracked:
                self._record(job)
        except Failed as problem:
            if failed_s is None:
                _log.error("%s", problem.message)
            self._history_failed_s = self._monotonic()
        else:
            self._history_failed_s = None

    def _record(self, job: Tracked) -> None:
        spec, status = job.spec, job.status
        assert spec is not None
        assert status is not None
        if status.phase not in TERMINAL or spec.job_id in self._recorded or status.seq not in job.transitions:
            return
        steps = tuple(step for _, (_, step) in sorted(job.transitions.items()))
        self._history.add(Past(Job(spec, status), self._cache.idempotency_key(spec.job_id), steps))
        self._recorded.add(spec.job_id)

    def _remove_old(self, tracked: list[Tracked], guard: Guard) -> None:
        """Remove finished jobs from the store: steps that are too many for one transaction first, the last ones, by
        which a controller knows that it has seen all, together with the status. Who finds a rest goes on with it."""
        now_s = self._monotonic()
        for job in tracked:
            assert job.spec is not None
            if job.spec.job_id not in self._recorded or job.ended_s is None:
                continue
            if now_s - job.ended_s < self._history_after_s:
                continue
            job_id = job.spec.job_id
            steps = [Delete(keys.job_transition(job_id, seq)) for seq in sorted(job.transitions)]
            last = [Delete(keys.job_status(job_id)), Delete(keys.job_spec(job_id))]
            key = self._cache.idempotency_key(job_id)
            if key:
                last.append(Delete(keys.idempotency(key)))
            while len(steps) > DELETES_MAX:
                self._store.commit((guard,), tuple(steps[:DELETES_MAX]))
                del steps[:DELETES_MAX]
            self._store.commit((guard,), (*steps, *last))


def _with_promise(state: CandidateCluster, spec: JobSpec) -> CandidateCluster:
    return replace(state, promised=state.promised + least_of(spec, state.record), queued=state.queued + 1)
