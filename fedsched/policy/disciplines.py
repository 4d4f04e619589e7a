"""Disciplines: policies that only order jobs, by a key.

Jobs of fixed size get what they need in that order; the scheduler keeps the order and does the rest. Where jobs are
elastic, each gets its minimum in the order of the keys, then the first grows as far as it goes, then the next. Whoever
does not fit is passed over unless the discipline is told to block (head of line).

A key rests on what every agent sees: arrival, the user's own estimate of the run time (`expected_s`), attained
service, progress. Sources: SRSF, LAS and their two-dimensional forms from Tiresias (Gu et al., NSDI 2019).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Literal

from fedsched.config import Tree
from fedsched.core.decision import Budget, JobView, Observation, Policy, Ranking
from fedsched.core.resources import Resources
from fedsched.policy.heuristics import Heuristic, bundle, remaining_times_s

Key = tuple[float, ...]


class DisciplineOptions(Tree):
    """Options of every discipline."""

    blocking: bool = False
    """Nobody passes a job that does not fit."""


class Discipline(Heuristic):
    """An order of jobs."""

    Options: ClassVar[type[DisciplineOptions]] = DisciplineOptions
    preemptive: ClassVar[bool] = False
    drifting: ClassVar[bool] = False
    """Keys begin with the remaining time."""
    rerank: ClassVar[Literal["none", "running", "all"]] = "none"

    def __init__(self, options: DisciplineOptions | None = None) -> None:
        self._blocking = (options or DisciplineOptions()).blocking

    def rank(self, observation: Observation) -> Ranking:
        """The key of every job of the observation; for a running one of a drifting discipline, when it would end."""
        keys = self._keys(observation)
        if self.drifting:
            now_s = observation.time_s
            keys = [
                (key[0] + now_s, *key[1:]) if view.placement else key
                for view, key in zip(observation.jobs, keys, strict=True)
            ]
        ranks = tuple(zip([view.job_id for view in observation.jobs], keys, strict=True))
        review_s = self._review_s(observation)
        return Ranking(ranks, self._blocking, self.preemptive, self.drifting, self.rerank, review_s)

    @abstractmethod
    def _keys(self, observation: Observation) -> list[Key]:
        """One key per job, in the observation's order; smallest first, ties by arrival."""

    def _review_s(self, observation: Observation) -> float | None:
        """When keys change though nothing happens."""
        return None

    def _order(self, observation: Observation, views: Sequence[JobView]) -> Sequence[JobView]:
        keys = dict(zip((view.job_id for view in observation.jobs), self._keys(observation), strict=True))
        return sorted(views, key=lambda view: (keys[view.job_id], view.arrived_s, view.job_id))

    def _grow(self, observation: Observation, admitted: Sequence[JobView], budget: Budget) -> None:
        """The first job as far as it goes, then the next."""
        for view in admitted:
            step = bundle(view, budget.allocation(view.job_id))
            while step and budget.grant(view.job_id, step.workers, step.ps):
                step = bundle(view, budget.allocation(view.job_id))


def ranks(policy: Policy) -> bool:
    """Whether the scheduler is to ask this policy for ranks, where it can."""
    return isinstance(policy, Discipline)


class Fifo(Discipline):
    """First come, first served."""

    name = "fifo"

    def _keys(self, observation: Observation) -> list[Key]:
        return [(view.arrived_s,) for view in observation.jobs]


class Sjf(Discipline):
    """Shortest job first: by the expected time of the whole job, which is never interrupted."""

    name = "sjf"

    def _keys(self, observation: Observation) -> list[Key]:
        return [(whole_s,) for whole_s in whole_times_s(observation)]


class SmallestFirst(Discipline):
    """The job that needs fewest GPUs first; running jobs make room."""

    name = "smallest"
    preemptive = True

    def _keys(self, observation: Observation) -> list[Key]:
        return [devices_of(view) for view in observation.jobs]


class Srtf(Discipline):
    """Shortest remaining time first; running jobs make room."""

    name = "srtf"
    preemptive = True
    drifting = True

    def _keys(self, observation: Observation) -> list[Key]:
        return [(left_s,) for left_s in left_times_s(observation)]


class Srsf(Discipline):
    """Shortest remaining service first: remaining time times GPUs."""

    name = "srsf"
    preemptive = True
    rerank = "running"

    def _keys(self, observation: Observation) -> list[Key]:
        left = zip(left_times_s(observation), observation.jobs, strict=True)
        return [(left_s * devices(view), devices(view) if view.placement else 0.0) for left_s, view in left]


class Las(Discipline):
    """Least attained service first, in GPU-seconds: needs to know nothing about jobs."""

    name = "las"
    preemptive = True
    rerank = "running"

    def _keys(self, observation: Observation) -> list[Key]:
        return [(attained(view),) for view in observation.jobs]


class Edf(Discipline):
    """Earliest deadline first; jobs without one come last, in the order of arrival."""

    name = "edf"
    preemptive = True

    def _keys(self, observation: Observation) -> list[Key]:
        never = float("inf")
        return [(never if view.deadline_s is None else view.deadline_s, view.arrived_s) for view in observation.jobs]


def whole_times_s(observation: Observation) -> list[float]:
    """How long each job trains in all: as its user expects, or else by the speeds that were observed."""
    left_s = remaining_times_s(observation) if any(view.expected_s is None for view in observation.jobs) else {}
    return [
        view.expected_s
        if view.expected_s is not None
        else left_s[view.job_id] * view.epochs / max(view.remaining_epochs, 1e-9)
        for view in observation.jobs
    ]


def left_times_s(observation: Observation) -> list[float]:
    """How long each job still trains: as its user expects, less what it has done, or else by observed speeds."""
    left_s = remaining_times_s(observation) if any(view.expected_s is None for view in observation.jobs) else {}
    return [
        max(0.0, view.expected_s - view.progress_epochs * view.expected_s / view.epochs - view.unreported_s)
        if view.expected_s is not None
        else left_s[view.job_id]
        for view in observation.jobs
    ]


def devices(view: JobView) -> float:
    """GPUs of the job at its minimum; tasks where it needs none."""
    return _count(view.worker_demand, view.minimum.workers) + _count(view.ps_demand, view.minimum.ps)


def devices_of(view: JobView) -> Key:
    """The same as a key."""
    return (devices(view),)


def attained(view: JobView) -> float:
    """GPU-seconds received; task-seconds where the job needs no GPU."""
    tasks = view.minimum.workers + view.minimum.ps
    return view.attained_s * devices(view) / tasks


def _count(demand: Resources, tasks: int) -> float:
    return demand.gpu_milli * tasks / 1000 if demand.gpu_milli else float(tasks)
