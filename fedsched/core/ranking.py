"""Keeps jobs in the order of their ranks and finds out who may start and who must make room.

For disciplines that order jobs (systems such as Tiresias, Helios or Kubernetes' queues) over jobs of fixed size. One
pass costs about the logarithm of the queue: jobs that wait are kept sorted per demand, and when the first job of a
demand does not fit, no other job of that demand does. Running jobs are looked at only from the first waiting job's rank
on, since those before it stay in any case.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable

from fedsched.core.choosing import Rooms
from fedsched.core.decision import Ranking
from fedsched.core.ids import JobId
from fedsched.core.job import JobPhase, Placement
from fedsched.core.state import LiveJob

Entry = tuple[int, tuple[float, ...], int, JobId]
"""Minus priority, key, number of arrival, job: entries sort by rank, jobs of higher priority first."""
LAST: tuple[float, ...] = (float("inf"),)
"""The key of a job that the discipline has not ranked yet."""


class RankedQueue:
    """All jobs of a cluster by rank."""

    def __init__(self) -> None:
        self.rules = Ranking(())
        """The newest answer: how the order is used."""
        self.unranked: dict[JobId, None] = {}
        """Jobs to ask about, in order of arrival."""
        self._keys: dict[JobId, tuple[float, ...]] = {}
        self._waiting: dict[tuple[object, ...], list[Entry]] = {}
        self._running: list[Entry] = []
        self._where: dict[JobId, tuple[list[Entry], Entry]] = {}

    def learn(self, ranking: Ranking, jobs: dict[JobId, LiveJob], time_s: float) -> None:
        """Take new ranks over; jobs that have left meanwhile are passed over."""
        self.rules = ranking
        for job_id, key in ranking.ranks:
            job = jobs.get(job_id)
            if job is None:
                continue
            self.unranked.pop(job_id, None)
            self._remove(job_id, time_s)
            self._keys[job_id] = key
            self.follow(job, time_s)

    def follow(self, job: LiveJob, time_s: float) -> None:
        """Note where the job is in its life now."""
        job_id = job.spec.job_id
        self._remove(job_id, time_s)
        phase = job.status.phase
        if phase is JobPhase.DISPATCHED:
            if job_id not in self._keys or (job.status.attempt and self.rules.rerank != "none"):
                self.unranked[job_id] = None
            self._insert(self._waiting.setdefault(demand_of(job), []), job, self._keys.get(job_id, LAST))
        elif phase is JobPhase.RUNNING and job.in_flight is None and not job.adopting:
            key = self._keys.get(job_id, LAST)
            if job_id not in self._keys:
                self.unranked[job_id] = None
            self._insert(self._running, job, _shifted(key, time_s) if self.rules.drifting else key)

    def forget(self, job_id: JobId, time_s: float) -> None:
        """The job has left the cluster."""
        self._remove(job_id, time_s)
        self._keys.pop(job_id, None)
        self.unranked.pop(job_id, None)

    def to_ask(self) -> list[JobId]:
        """Jobs whose ranks are wanted; none if the order stands."""
        again: Iterable[JobId] = ()
        if self.rules.rerank == "all":
            again = self._keys  # those that start or stop just now too: who is not asked about is taken for gone
        elif self.rules.rerank == "running":
            again = [job_id for _, _, _, job_id in self._running]
        return list(dict.fromkeys([*self.unranked, *again]))

    def pass_over(
        self, jobs: dict[JobId, LiveJob], rooms: Rooms, time_s: float, *, preempt: bool
    ) -> tuple[list[tuple[LiveJob, Placement]], list[LiveJob]]:
        """Who starts where, and who stops to make that possible.

        Args:
            rooms: what is free; it is used up.
            preempt: whether running jobs may be stopped at all.
        """
        heads = [(queue[0], 0, queue) for queue in self._waiting.values() if queue]
        if not heads:
            return [], []
        heads.sort()
        if preempt and self.rules.preemptive and self._running:
            return self._with_preemption(heads, jobs, rooms, time_s)
        return self._without_preemption(heads, jobs, rooms), []

    def _without_preemption(
        self, heads: list[tuple[Entry, int, list[Entry]]], jobs: dict[JobId, LiveJob], rooms: Rooms
    ) -> list[tuple[LiveJob, Placement]]:
        starts: list[tuple[LiveJob, Placement]] = []
        while heads:
            entry, index, queue = heads.pop(0)
            job = jobs[entry[3]]
            places = rooms.gang(job.spec)
            if places is None:
                if self.rules.blocking:
                    break
                continue  # nor does any other job of the same demand fit
            starts.append((job, places))
            if index + 1 < len(queue):
                insort(heads, (queue[index + 1], index + 1, queue))
        return starts

    def _with_preemption(
        self, heads: list[tuple[Entry, int, list[Entry]]], jobs: dict[JobId, LiveJob], rooms: Rooms, time_s: float
    ) -> tuple[list[tuple[LiveJob, Placement]], list[LiveJob]]:
        shift = time_s if self.rules.drifting else 0.0
        after = bisect_left(self._running, _moved(heads[0][0], shift))
        staying = set()
        for _, _, _, job_id in self._running[after:]:
            job = jobs[job_id]
            if job.spec.resize_cooldown_s and job.cools_down(time_s):
                staying.add(job_id)
            else:
                rooms.give(job.settled, job.spec)
        starts: list[tuple[LiveJob, Placement]] = []
        stops: list[LiveJob] = []
        while heads or (starts and after < len(self._running)):
            if after < len(self._running) and (not heads or self._running[after] < _moved(heads[0][0], shift)):
                job = jobs[self._running[after][3]]
                after += 1
                if job.spec.job_id not in staying and not rooms.take(job.settled, job.spec):
                    stops.append(job)
                continue
            entry, index, queue = heads.pop(0)
            job = jobs[entry[3]]
            places = rooms.gang(job.spec)
            if places is None:
                if self.rules.blocking:
                    heads.clear()
                continue
            starts.append((job, places))
            if index + 1 < len(queue):
                insort(heads, (queue[index + 1], index + 1, queue))
        return starts, stops

    def _insert(self, queue: list[Entry], job: LiveJob, key: tuple[float, ...]) -> None:
        entry = (-job.spec.priority, key, job.number, job.spec.job_id)
        insort(queue, entry)
        self._where[job.spec.job_id] = (queue, entry)

    def _remove(self, job_id: JobId, time_s: float) -> None:
        queue, entry = self._where.pop(job_id, (None, None))
        if queue is None or entry is None:
            return
        del queue[bisect_left(queue, entry)]
        if queue is self._running and self.rules.drifting and job_id in self._keys:
            self._keys[job_id] = _shifted(entry[1], -time_s)


def _shifted(key: tuple[float, ...], by_s: float) -> tuple[float, ...]:
    return (key[0] + by_s, *key[1:])


def _moved(entry: Entry, by_s: float) -> Entry:
    return (entry[0], _shifted(entry[1], by_s), *entry[2:]) if by_s else entry


def demand_of(job: LiveJob) -> tuple[object, ...]:
    """Jobs of one demand fit in the same places."""
    spec = job.spec
    return (spec.worker_demand, spec.ps_demand, spec.workers.maximum, spec.ps.maximum, spec.accelerators)
