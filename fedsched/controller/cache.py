"""What the store holds, as this controller last saw it; changes are numbered, so that streams can wait for more."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from msgspec.structs import replace

from fedsched.core.cluster import ClusterRecord
from fedsched.core.explain import arrival, candidates
from fedsched.core.ids import ClusterName, JobId
from fedsched.core.job import TERMINAL, JobPhase, JobSpec, JobStatus, Transition
from fedsched.core.rounds import PolicyRecord, RoundRecord
from fedsched.core.routing import CandidateCluster
from fedsched.core.views import ClusterView, Job, PolicyVersion
from fedsched.runtime import codec, keys
from fedsched.runtime.ports import Entry, KeyChanged, Snapshot, Store, Watch

K = TypeVar("K")
T = TypeVar("T")

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Tracked:
    """A job in the store. It is shown once both its specification and its status have come."""

    spec: JobSpec | None = None
    status: JobStatus | None = None
    status_revision: int = 0
    """Store revision of the status, the guard of its next write."""
    transitions: dict[int, tuple[int, Transition]] = field(default_factory=dict)
    """By seq, each with the change that brought it."""
    change: int = 0
    """Number of the last change to what `job` shows."""
    ended_s: float | None = None
    """Monotonic time at which this controller first saw the job finished."""


@dataclass(slots=True)
class _Cluster:
    record: ClusterRecord | None = None
    reachable: bool = False
    seen_s: float = 0.0


class Cache:
    """A copy of the store that follows it by one watch. Safe from any thread; it never raises on bad values."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._condition = threading.Condition()
        self._change = 0
        self._loaded = False
        self._revisions: dict[str, int] = {}
        self._jobs: dict[JobId, Tracked] = {}
        self._clusters: dict[ClusterName, _Cluster] = {}
        self._keys: dict[JobId, str] = {}
        self._rounds: dict[int, RoundRecord] = {}
        self._policies: dict[tuple[str, int], PolicyRecord] = {}
        self._active: dict[str, int] = {}

    def follow(self, store: Store) -> Watch:
        """Start to follow `store`; the caller closes the watch."""
        return store.watch(keys.ROOT, self._take_snapshot, self._take_change)

    @property
    def loaded(self) -> bool:
        """Whether the store's contents have come once."""
        return self._loaded

    @property
    def change(self) -> int:
        """Number of the newest change."""
        return self._change

    def wait(self, after: int, timeout_s: float) -> int:
        """The number of the newest change, once it is above `after` or the time is up."""
        with self._condition:
            self._condition.wait_for(lambda: self._change > after, timeout_s)
            return self._change

    def wait_for_job(self, job_id: JobId, seq: int, timeout_s: float) -> bool:
        """Whether the job has been seen with at least this many transitions before the time was up."""
        with self._condition:
            return self._condition.wait_for(lambda: self._seq(job_id) >= seq, timeout_s)

    def jobs(self, after: int = 0) -> list[Job]:
        """Jobs that changed after this change, in the order of submission; by default all."""
        with self._condition:
            found = [self._shown(tracked) for tracked in self._jobs.values() if tracked.change > after]
        return sorted((job for job in found if job is not None), key=lambda job: arrival(job.spec))

    def job(self, job_id: JobId) -> Job | None:
        """The job as it is shown: its phase is Unreachable while its cluster is."""
        with self._condition:
            tracked = self._jobs.get(job_id)
            return self._shown(tracked) if tracked is not None else None

    def tracked(self) -> list[Tracked]:
        """All complete jobs as they are stored, in the order of submission."""
        with self._condition:
            found = [
                (tracked.spec, dataclasses.replace(tracked, transitions=dict(tracked.transitions)))
                for tracked in self._jobs.values()
                if tracked.spec is not None and tracked.status is not None
            ]
        return [tracked for _, tracked in sorted(found, key=lambda item: arrival(item[0]))]

    def transitions(self, job_id: JobId | None = None, after: int = 0) -> list[Transition]:
        """Transitions that came after this change, oldest first."""
        with self._condition:
            found = [
                (change if after else 0, step.time_s, step.job_id, step.seq, step)
                for key, tracked in self._jobs.items()
                if job_id is None or key == job_id
                for change, step in tracked.transitions.values()
                if change > after
            ]
        return [item[-1] for item in sorted(found, key=lambda item: item[:-1])]

    def clusters(self) -> list[ClusterView]:
        """All clusters that were ever there, by name."""
        now_s = self._monotonic()
        with self._condition:
            return [
                ClusterView(name, known.reachable, max(0.0, now_s - known.seen_s), known.record)
                for name, known in sorted(self._clusters.items())
            ]

    def candidates(self) -> list[CandidateCluster]:
        """The clusters as `route` wants them."""
        views = [CandidateCluster(view.name, view.record, view.reachable) for view in self.clusters()]
        return candidates(views, self.jobs())

    def idempotency_key(self, job_id: JobId) -> str:
        """The key that the job was submitted with."""
        with self._condition:
            return self._keys.get(job_id, "")

    def rounds(self) -> list[RoundRecord]:
        """Round records, oldest first."""
        with self._condition:
            return [record for _, record in sorted(self._rounds.items())]

    def policies(self) -> list[PolicyVersion]:
        """All policy versions, sorted."""
        with self._condition:
            return [
                PolicyVersion(name, version, self._active.get(name) == version, record)
                for (name, version), record in sorted(self._policies.items())
            ]

    def _seq(self, job_id: JobId) -> int:
        tracked = self._jobs.get(job_id)
        if tracked is None or tracked.spec is None or tracked.status is None:
            return -1
        return tracked.status.seq

    def _shown(self, tracked: Tracked) -> Job | None:
        spec, status = tracked.spec, tracked.status
        if spec is None or status is None:
            return None
        if status.cluster is not None and status.phase not in TERMINAL:
            cluster = self._clusters.get(status.cluster)
            if cluster is None or not cluster.reachable:
                status = replace(status, phase=JobPhase.UNREACHABLE)
        return Job(spec, status)

    def _take_snapshot(self, snapshot: Snapshot) -> None:
        with self._condition:
            present = {entry.key for entry in snapshot.entries}
            for key in sorted(set(self._revisions) - present):
                self._apply(key, None)
            for entry in snapshot.entries:
                if self._revisions.get(entry.key) != entry.mod_revision:
                    self._apply(entry.key, entry)
            self._loaded = True
            self._change += 1
            self._condition.notify_all()

    def _take_change(self, change: KeyChanged) -> None:
        with self._condition:
            self._apply(change.key, change.entry)
            self._condition.notify_all()

    def _apply(self, key: str, entry: Entry | None) -> None:
        self._change += 1
        if entry is None:
            self._revisions.pop(key, None)
        else:
            self._revisions[key] = entry.mod_revision
        for prefix, take in (
            (keys.JOBS, self._apply_job),
            (keys.CLUSTERS, self._apply_cluster),
            (keys.TERMS, self._apply_term),
            (keys.IDEMPOTENCY, self._apply_key),
            (keys.ROUNDS, self._apply_round),
            (keys.POLICIES, self._apply_policy),
        ):
            if key.startswith(prefix):
                try:
                    take(key.removeprefix(prefix), entry)
                except ValueError as problem:
                    _log.error("ignoring %s: %s", key, problem)

    def _apply_job(self, path: str, entry: Entry | None) -> None:
        name, _, part = path.partition("/")
        job_id = JobId(name)
        tracked = self._jobs.setdefault(job_id, Tracked())
        if part == "spec":
            tracked.spec = codec.loads(JobSpec, entry.value) if entry else None
            tracked.change = self._change
        elif part == "status":
            tracked.status = codec.loads(JobStatus, entry.value) if entry else None
            tracked.status_revision = entry.mod_revision if entry else 0
            tracked.change = self._change
            if tracked.status is not None and tracked.status.phase in TERMINAL and tracked.ended_s is None:
                tracked.ended_s = self._monotonic()
        elif part.startswith("transitions/"):
            seq = int(part.removeprefix("transitions/"))
            if entry is None:
                tracked.transitions.pop(seq, None)
            else:
                tracked.transitions[seq] = (self._change, codec.loads(Transition, entry.value))
        if tracked.spec is None and tracked.status is None and not tracked.transitions:
            del self._jobs[job_id]

    def _apply_cluster(self, path: str, entry: Entry | None) -> None:
        name = ClusterName(path)
        known = self._clusters.setdefault(name, _Cluster())
        was_reachable = known.reachable
        known.seen_s = self._monotonic()
        known.reachable = entry is not None
        if entry is not None:
            known.record = codec.loads(ClusterRecord, entry.value)
        if was_reachable is not known.reachable:
            for tracked in self._jobs.values():
                if tracked.status is not None and tracked.status.cluster == name:
                    tracked.change = self._change

    def _apply_term(self, path: str, entry: Entry | None) -> None:
        if entry is not None:
            self._clusters.setdefault(ClusterName(path), _Cluster(seen_s=self._monotonic()))

    def _apply_key(self, path: str, entry: Entry | None) -> None:
        if entry is not None:
            self._keys[JobId(entry.value.decode())] = path
        else:
            self._keys = {job_id: key for job_id, key in self._keys.items() if key != path}

    def _apply_round(self, path: str, entry: Entry | None) -> None:
        _keep(self._rounds, RoundRecord, int(path), entry)

    def _apply_policy(self, path: str, entry: Entry | None) -> None:
        name, _, part = path.rpartition("/")
        if part != "active":
            _keep(self._policies, PolicyRecord, (name, int(part)), entry)
        elif entry is None:
            self._active.pop(name, None)
        else:
            self._active[name] = int(entry.value)


def _keep(records: dict[K, T], kind: type[T], key: K, entry: Entry | None) -> None:
    if entry is None:
        records.pop(key, None)
    else:
        records[key] = codec.loads(kind, entry.value)
