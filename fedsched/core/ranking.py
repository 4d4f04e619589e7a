"""Keeps jobs in the order of their ranks and finds out who may start and who must make room.

For disciplines that order jobs (systems such as Tiresias, Helios or Kubernetes' queues) over jobs of fixed size. One
pass costs about the logarithm of the queue: jobs that wait are kept sorted per demand, and when the first job of a
demand does not fit, no other job of that demand does. Running jobs are looked at only from the first waiting job's rank
on, since those before it stay in any case.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable

from fedsched.core.choosing import Gang, Rooms
from fedsched.core.decision import Ranking
from fedsched.core.ids import JobId
from fedsched.core.job import JobPhase, JobSpec, Placement
from fedsched.core.state import LiveJob

Key = tuple[float, ...]
Entry = tuple[int, Key, int, LiveJob]
"""Minus priority, key, number of arrival, job: entries sort by rank, jobs of higher priority first.

No two jobs have the same number, so jobs themselves are never compared.
"""
LAST: Key = (float("inf"),)
"""The key of a job that the discipline has not ranked yet."""
_DISPATCHED, _RUNNING = JobPhase.DISPATCHED, JobPhase.RUNNING
_STANDS = frozenset({_DISPATCHED, _RUNNING})
"""Phases in which a job may stand in a queue."""


class _Line:
    """Jobs of one demand that wait, by rank. They fit in the same places."""

    __slots__ = ("entries", "gang")

    def __init__(self, gang: Gang) -> None:
        self.gang = gang
        self.entries: list[Entry] = []


Head = tuple[Entry, int, _Line]
"""The next job of a line that may start, and how many of its line are ahead of it."""


class _Standing:
    """Where one job stands."""

    __slots__ = ("cools_down", "entry", "key", "line", "queue")

    def __init__(self, line: _Line, cooldown_s: float) -> None:
        self.line = line
        """Where it waits whenever it does."""
        self.cools_down = cooldown_s > 0
        """Whether it must stay as it is for a while after a change."""
        self.key: Key | None = None
        """None until the discipline has ranked it."""
        self.queue: list[Entry] | None = None
        """Its line's entries, or the running jobs; None while it is in neither."""
        self.entry: Entry | None = None
        """What it is in there as."""


class RankedQueue:
    """All jobs of a cluster by rank."""

    def __init__(self) -> None:
        self.rules = Ranking(())
        """The newest answer: how the order is used."""
        self.unranked: dict[JobId, None] = {}
        """Jobs to ask about, in order of arrival."""
        self._lines: dict[tuple[object, ...], _Line] = {}
        self._running: list[Entry] = []
        self._standings: dict[JobId, _Standing] = {}
        self._cooldowns = 0
        """Jobs that must stay as they are for a while after a change."""

    def learn(self, ranking: Ranking, jobs: dict[JobId, LiveJob], time_s: float) -> None:
        """Take new ranks over; jobs that have left meanwhile are passed over."""
        self.rules = ranking
        for job_id, key in ranking.ranks:
            job = jobs.get(job_id)
            if job is None:
                continue
            self.unranked.pop(job_id, None)
            standing = self._standings[job_id]
            if standing.queue is not None:
                self._remove(standing, time_s)
            standing.key = key
            self._follow(job, standing, time_s)

    def follow(self, job: LiveJob, time_s: float) -> None:
        """Note where the job is in its life now."""
        standing = self._standings.get(job.spec.job_id)
        if standing is None:
            standing = self._standings[job.spec.job_id] = _Standing(self._line_of(job.spec), job.spec.resize_cooldown_s)
            self._cooldowns += standing.cools_down
        elif standing.queue is not None:
            self._remove(standing, time_s)
        if job.status.phase in _STANDS:
            self._follow(job, standing, time_s)

    def _follow(self, job: LiveJob, standing: _Standing, time_s: float) -> None:
        phase, key = job.status.phase, standing.key
        if job.status.retry_s is not None:
            self.unranked.pop(job.spec.job_id, None)  # as if it were not here until its time has come
        elif phase is _DISPATCHED:
            if key is None:
                self.unranked[job.spec.job_id] = None
                return
            if job.status.attempt and self.rules.rerank != "none":
                self.unranked[job.spec.job_id] = None
            self._insert(standing.line.entries, job, standing, key)
        elif phase is _RUNNING and job.in_flight is None and not job.adopting:
            if key is None:
                self.unranked[job.spec.job_id] = None
            else:
                self._insert(self._running, job, standing, _shifted(key, time_s) if self.rules.drifting else key)

    def forget(self, job_id: JobId, time_s: float) -> None:
        """The job has left the cluster."""
        standing = self._standings.pop(job_id, None)
        if standing is not None:
            if standing.queue is not None:
                self._remove(standing, time_s)
            self._cooldowns -= standing.cools_down
        self.unranked.pop(job_id, None)

    def gang_of(self, job: LiveJob) -> Gang:
        """What the job needs; the same object for jobs that need the same."""
        return self._standings[job.spec.job_id].line.gang

    def to_ask(self) -> list[JobId]:
        """Jobs whose ranks are wanted; none if the order stands."""
        rerank = self.rules.rerank
        if rerank == "none":
            return list(self.unranked)
        again: Iterable[JobId]
        if rerank == "all":
            # Those that start or stop just now too: who is not asked about is taken for gone.
            again = [job_id for job_id, standing in self._standings.items() if standing.key is not None]
        else:
            again = [job.spec.job_id for _, _, _, job in self._running]
        return list(dict.fromkeys([*self.unranked, *again]))

    def heads(self, jobs: dict[JobId, LiveJob]) -> list[Head]:
        """Who may start next of each demand, by rank; empty if nobody waits."""
        if self.unranked:
            self._put_last(jobs)
        return sorted([(line.entries[0], 0, line) for line in self._lines.values() if line.entries])

    def pass_over(
        self, heads: list[Head], rooms: Rooms, time_s: float, *, preempt: bool
    ) -> tuple[list[tuple[LiveJob, Placement]], list[LiveJob]]:
        """Who starts where, and who stops to make that possible.

        Args:
            heads: as they are now; they are used up.
            rooms: what is free; it is used up.
            preempt: whether running jobs may be stopped at all.
        """
        if preempt and self.rules.preemptive and self._running:
            return self._with_preemption(heads, rooms, time_s)
        return self._without_preemption(heads, rooms), []

    def _put_last(self, jobs: dict[JobId, LiveJob]) -> None:
        """Jobs that nobody has ranked come after all others: the discipline failed, and is asked again."""
        for job_id in self.unranked:
            job, standing = jobs[job_id], self._standings[job_id]
            if standing.queue is not None:
                continue
            if job.status.phase is _DISPATCHED:
                self._insert(standing.line.entries, job, standing, LAST)
            elif job.status.phase is _RUNNING and job.in_flight is None and not job.adopting:
                self._insert(self._running, job, standing, LAST)

    def _without_preemption(self, heads: list[Head], rooms: Rooms) -> list[tuple[LiveJob, Placement]]:
        starts: list[tuple[LiveJob, Placement]] = []
        while heads:
            entry, index, line = heads.pop(0)
            places = rooms.gang(line.gang)
            if places is None:
                if self.rules.blocking:
                    break
                continue  # nor does any other job of the same demand fit
            starts.append((entry[3], places))
            _step_up(heads, line, index)
        return starts

    def _with_preemption(
        self, heads: list[Head], rooms: Rooms, time_s: float
    ) -> tuple[list[tuple[LiveJob, Placement]], list[LiveJob]]:
        """Jobs by rank, those that run and those that wait: each gets its places if they are left.

        What runs is given up from the first head on, and kept again as its turn comes.
        """
        starts, stops = list[tuple[LiveJob, Placement]](), list[LiveJob]()
        shift = time_s if self.rules.drifting else 0.0
        running = self._running[bisect_left(self._running, _moved(heads[0][0], shift)) :]
        if self._cooldowns:
            running = [entry for entry in running if not entry[3].cools_down(time_s)]
        rooms.give([job.footprint for _, _, _, job in running])
        after = 0
        while heads:
            entry, index, line = heads.pop(0)
            until = bisect_left(running, _moved(entry, shift), lo=after)
            if until > after:
                stops += _cannot_stay(running[after:until], rooms)
                after = until
            places = rooms.gang(line.gang)
            if places is not None:
                starts.append((entry[3], places))
                _step_up(heads, line, index)
            elif self.rules.blocking:
                break
        if starts:
            stops += _cannot_stay(running[after:], rooms)
        return starts, stops

    def _line_of(self, spec: JobSpec) -> _Line:
        size = (spec.workers.maximum, spec.ps.maximum)
        demand = (spec.worker_demand, spec.ps_demand, *size, spec.accelerators, spec.coordinator_demand)
        line = self._lines.get(demand)
        if line is None:
            line = self._lines[demand] = _Line(Gang(spec))
        return line

    def _insert(self, queue: list[Entry], job: LiveJob, standing: _Standing, key: Key) -> None:
        standing.queue, standing.entry = queue, (-job.spec.priority, key, job.number, job)
        insort(queue, standing.entry)

    def _remove(self, standing: _Standing, time_s: float) -> None:
        queue, entry = standing.queue, standing.entry
        if queue is None or entry is None:
            return
        standing.queue = standing.entry = None
        del queue[0 if queue[0] is entry else bisect_left(queue, entry)]
        if queue is self._running and self.rules.drifting and standing.key is not None:
            standing.key = _shifted(entry[1], -time_s)


def _cannot_stay(some: list[Entry], rooms: Rooms) -> list[LiveJob]:
    """Those of some running jobs, by rank, whose places are gone; the others keep theirs."""
    if rooms.take([job.footprint for _, _, _, job in some]):
        return []
    return [job for _, _, _, job in some if not rooms.take((job.footprint,))]


def _step_up(heads: list[Head], line: _Line, index: int) -> None:
    """The next of the line is its head now."""
    if index + 1 < len(line.entries):
        insort(heads, (line.entries[index + 1], index + 1, line))


def _shifted(key: Key, by_s: float) -> Key:
    return (key[0] + by_s, *key[1:])


def _moved(entry: Entry, by_s: float) -> Entry:
    return (entry[0], _shifted(entry[1], by_s), *entry[2:]) if by_s else entry
