"""Tiresias's discretised two-dimensional LAS (Gu et al., NSDI 2019, section 3.3): queues by attained service.

A job begins in the first queue and falls into the next one when its GPU-seconds reach that queue's limit, one queue at
a time. Queues are served one after the other. Within a queue those that run stay ahead of those that wait, whoever
starts joins the end of the former, and whoever is stopped the front of the latter, as in the authors' simulator. A job
that has waited `promote_knob` times as long as it has run begins anew.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar, Literal

import msgspec
from pydantic import Field, model_validator

from fedsched.core.decision import JobView, Observation
from fedsched.core.ids import JobId
from fedsched.core.record import Record
from fedsched.policy.disciplines import Discipline, DisciplineOptions, Key, attained, devices
from fedsched.policy.heuristics import by_arrival
from fedsched.policy.remembering import recall


class Las2dOptions(DisciplineOptions):
    """Options of las2d."""

    limits: tuple[float, ...] = (3250.0, 7200.0)
    """GPU-seconds at which a job leaves each queue but the last; ascending."""
    promote_knob: float = Field(default=0.0, ge=0)
    """0: nobody is promoted."""

    @model_validator(mode="after")
    def _limits_ascend(self) -> Las2dOptions:
        if list(self.limits) != sorted(set(self.limits)) or any(limit <= 0 for limit in self.limits):
            raise ValueError(f"limits are {self.limits}; they must be above 0 and ascend")
        return self


class QueueMemory(Record, frozen=True):
    """What `las2d` remembers."""

    queues: tuple[tuple[tuple[JobId, bool], ...], ...]
    """From the most urgent queue: its jobs in order, with whether they ran when last seen."""
    discount: tuple[tuple[JobId, float], ...]
    """GPU-seconds of service that a promotion has wiped out."""
    waiting_since_s: tuple[tuple[JobId, float], ...]
    asked_s: float
    """When it was asked last; it moves nobody twice at one time."""


class Las2d(Discipline):
    """Queues by attained service."""

    name = "las2d"
    Options: ClassVar[type[DisciplineOptions]] = Las2dOptions
    preemptive = True
    rerank: ClassVar[Literal["none", "running", "all"]] = "all"

    def __init__(self, options: Las2dOptions | None = None) -> None:
        chosen = options or Las2dOptions()
        super().__init__(chosen)
        self._limits = chosen.limits
        self._knob = chosen.promote_knob
        self._queues: list[dict[JobId, bool]] = [{} for _ in range(len(self._limits) + 1)]
        """Jobs in order, with whether they ran when last seen."""
        self._level: dict[JobId, int] = {}
        self._discount: dict[JobId, float] = {}
        """Service that a promotion has wiped out."""
        self._waiting_since_s: dict[JobId, float] = {}
        self._asked_s = -math.inf

    def state(self) -> bytes:
        """All that its next ranks depend on, besides its options."""
        return msgspec.msgpack.encode(self._memory())

    def restore(self, state: bytes) -> None:
        """Go on from what `state` gave.

        Raises:
            ValueError: it is no state of this policy with as many queues; nothing has changed.
        """
        self._recall(recall(state, QueueMemory))

    def _memory(self) -> QueueMemory:
        return QueueMemory(
            tuple(tuple(queue.items()) for queue in self._queues),
            tuple(self._discount.items()),
            tuple(self._waiting_since_s.items()),
            self._asked_s,
        )

    def _recall(self, memory: QueueMemory) -> None:
        if len(memory.queues) != len(self._queues):
            raise ValueError(f"it has {len(memory.queues)} queues; {len(self._queues)} were expected")
        self._queues = [dict(queue) for queue in memory.queues]
        self._level = {job_id: level for level, queue in enumerate(self._queues) for job_id in queue}
        self._discount, self._waiting_since_s = dict(memory.discount), dict(memory.waiting_since_s)
        self._asked_s = memory.asked_s

    def _keys(self, observation: Observation) -> list[Key]:
        views = {view.job_id: view for view in by_arrival(observation.jobs)}
        later = observation.time_s > self._asked_s  # asked twice at one time, nothing moves twice
        self._asked_s = observation.time_s
        if later:
            self._follow(views)
        for view in views.values():
            if view.job_id not in self._level:
                self._put(view.job_id, 0, bool(view.placement))
        if later:
            for view in views.values():
                self._move(view, observation.time_s)
        self._arrange(views)
        return self._places(observation.jobs)

    def _arrange(self, views: dict[JobId, JobView]) -> None:
        """Order each queue anew; here they stay as they are."""

    def _places(self, jobs: Sequence[JobView]) -> list[Key]:
        """Queue and place in it."""
        place = {job_id: at for queue in self._queues for at, job_id in enumerate(queue)}
        return [(float(self._level[view.job_id]), float(place[view.job_id])) for view in jobs]

    def _follow(self, views: dict[JobId, JobView]) -> None:
        """Drop who has left; in every queue, those that run now before those that wait."""
        for level, queue in enumerate(self._queues):
            present = [job_id for job_id in queue if job_id in views]
            for gone in queue.keys() - views.keys():
                del self._level[gone]
                self._discount.pop(gone, None)
                self._waiting_since_s.pop(gone, None)
            ahead = [job_id for job_id in present if views[job_id].placement]
            behind = [job_id for job_id in present if not views[job_id].placement]
            self._queues[level] = {job_id: bool(views[job_id].placement) for job_id in (*ahead, *behind)}

    def _move(self, view: JobView, now_s: float) -> None:
        level = self._level[view.job_id]
        if view.placement:
            self._waiting_since_s.pop(view.job_id, None)
            if level < len(self._limits) and self._service(view) >= self._limits[level]:
                self._put(view.job_id, level + 1, running=True)
        elif self._knob and level:
            since_s = self._waiting_since_s.setdefault(view.job_id, now_s)
            if now_s - since_s >= self._knob * self._service(view) / devices(view):
                self._discount[view.job_id] = attained(view)
                self._put(view.job_id, 0, running=False)

    def _put(self, job_id: JobId, level: int, running: bool) -> None:
        before = self._level.get(job_id)
        if before is not None:
            del self._queues[before][job_id]
        self._level[job_id] = level
        self._queues[level][job_id] = running

    def _service(self, view: JobView) -> float:
        return attained(view) - self._discount.get(view.job_id, 0.0)

    def _review_s(self, observation: Observation) -> float | None:
        """When the next running job may reach its limit.

        The authors' simulator divides the limit less the seconds run, not the GPU-seconds, by the job's GPUs: it looks
        early, and again. Looking at other times gives other schedules, so this is kept.
        """
        times_s = []
        for view in observation.jobs:
            level = self._level[view.job_id]
            if view.placement and level < len(self._limits):
                ran_s = self._service(view) / devices(view)
                times_s.append(observation.time_s + max(1, math.floor((self._limits[level] - ran_s) / devices(view))))
        return min(times_s, default=None)
