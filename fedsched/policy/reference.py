"""DRF, FIFO, SRTF, Tetris and Optimus as DL2's public research code has them, faults included.

They exist to be equal to that code, job by job, and so to carry its published numbers over; the policies of the same
names without `dl2_` are what one would run. All five start every slot from an empty cluster and leave the choice of
nodes to the `Rebuilding` budget, whose first refusal ends the slot. Their oddities are kept:

* SRTF orders by the remaining fraction, not by the remaining time;
* Tetris favours jobs with more work left, where the paper (Grandl et al., SIGCOMM 2014) favours those with less;
* Optimus knows the true speeds, where the paper (Peng et al., EuroSys 2018) fits observed ones; it stops at the first
  job that gains nothing more, and drops a job whose better role is at its maximum even if the other could grow;
* priorities are unknown, and jobs get one worker and one parameter server at a time whatever their minima are.

The code breaks ties by memory address; here the key decides, then the arrival, then the job id.
"""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, repeat
from typing import ClassVar, Literal, Protocol, runtime_checkable

from fedsched.core.decision import Budget, Decision, JobView, Observation
from fedsched.core.ids import JobId
from fedsched.core.rebuilding import Rebuilding
from fedsched.core.resources import Resources
from fedsched.errors import InvalidInput

Oracle = Callable[[JobView, int, int, float], float]
"""The true speeds: epochs that a job would train with so many workers and parameter servers in so many seconds."""


@runtime_checkable
class Informed(Protocol):
    """A policy that is told true speeds, so it can decide in simulations only."""

    knows_jobs: bool
    """Whether it is also told by how much each job is off its type."""
    unbounded: bool
    """Whether it only says what is possible: on a cluster with room for all, where nothing but training takes time."""

    def consult(self, oracle: Oracle) -> None:
        """Ask this for speeds."""


class _Reference(ABC):
    """A policy without memory that fills an empty cluster."""

    name: ClassVar[str]
    version: ClassVar[int] = 0
    rebuilds: ClassVar[bool] = True
    """It needs clusters that are filled anew every slot."""

    def decide(self, observation: Observation, budget: Budget) -> Decision:
        """Spend the slot by the algorithm's rule.

        Raises:
            InvalidInput: the budget is not one that rebuilds every slot.
        """
        if not isinstance(budget, Rebuilding):
            raise InvalidInput(
                f"policy {self.name} decides on clusters that are filled anew every slot, and this one keeps tasks"
                " where they run",
                f"have every slot rebuilt, or choose {self.name.removeprefix('dl2_')}",
            )
        # Observations come sorted by arrival and id, which is how ties are settled: a job's index is its rank.
        self._spend(observation, [view for view in observation.jobs if not view.pinned], budget)
        return Decision(observation.slot, budget.allocations(), self.name)

    @abstractmethod
    def _spend(self, observation: Observation, views: Sequence[JobView], budget: Rebuilding) -> None:
        """Grant by the rule; `views` come by arrival and id, without the pinned ones."""


def _remaining_fraction(view: JobView) -> float:
    """Of the declared length; below zero where a job was declared too short."""
    return 1 - view.progress_epochs / view.epochs


def _bundles_max(view: JobView) -> int:
    return min(view.workers.maximum, view.ps.maximum)


def _all_at_once(views: Iterable[JobView]) -> Iterator[JobId]:
    """Every job's bundles up to its maximum, one job after the other."""
    return chain.from_iterable(repeat(view.job_id, _bundles_max(view)) for view in views)


class Dl2Fifo(_Reference):
    """First come, first served: each job in turn gets all that it can use."""

    name = "dl2_fifo"

    def _spend(self, observation: Observation, views: Sequence[JobView], budget: Rebuilding) -> None:
        budget.fill(_all_at_once(views))


class Dl2Srtf(_Reference):
    """As FIFO, but the job with the smallest remaining fraction comes first."""

    name = "dl2_srtf"

    def _spend(self, observation: Observation, views: Sequence[JobView], budget: Rebuilding) -> None:
        budget.fill(_all_at_once(sorted(views, key=_remaining_fraction)))


class Dl2Drf(_Reference):
    """Dominant resource fairness: the next bundle goes to the job with the smallest dominant share.

    A job's share depends on nothing but its own bundles, so the order of all grants is known before the first one is
    made: all (job, number of bundles) sorted by share, then rank. That spares a heap of shares.
    """

    name = "dl2_drf"

    def _spend(self, observation: Observation, views: Sequence[JobView], budget: Rebuilding) -> None:
        alike: dict[tuple[Resources, int], list[int]] = {}
        for rank, view in enumerate(views):
            alike.setdefault((view.worker_demand + view.ps_demand, _bundles_max(view)), []).append(rank)
        levels: dict[float, list[int]] = {}
        """By share: which of `alike` reach it; one that stays on it with several bundles is there as often."""
        for kind, (bundle, bundles_max) in enumerate(alike):
            for bundles in range(bundles_max):
                levels.setdefault((bundle * bundles).dominant_share(budget.capacity), []).append(kind)
        ranks, ids = list(alike.values()), [view.job_id for view in views]
        merged: dict[tuple[int, ...], list[JobId]] = {}

        def of_level(share: float) -> list[JobId]:
            kinds = tuple(levels[share])
            if kinds not in merged:
                merged[kinds] = [ids[rank] for rank in sorted(chain.from_iterable(ranks[kind] for kind in kinds))]
            return merged[kinds]

        budget.fill(chain.from_iterable(map(of_level, sorted(levels))))


class Dl2Tetris(_Reference):
    """Fills node after node with the jobs that match its free resources best and have most work left.

    A job's score on a node is `a + m r`: `a` the dot product of the node's free resources and the demand of a bundle,
    `r` the sum of that demand times the job's remaining fraction, `m` the mean `a` over the mean `r` of all jobs.
    Resources count as fractions of a node, as in the paper. The best job below its maximum gets a bundle; if that does
    not fit, or `m` is 0, the next node is filled.
    """

    name = "dl2_tetris"

    def _spend(self, observation: Observation, views: Sequence[JobView], budget: Rebuilding) -> None:
        left = [_bundles_max(view) for view in views]
        demands = [view.worker_demand + view.ps_demand for view in views]
        fractions = [_remaining_fraction(view) for view in views]
        # Scores depend on nothing but how much room a node has, and most nodes are alike.
        rankings: dict[tuple[int, Resources], list[int]] = {}
        for index, node in enumerate(budget.nodes):
            while True:
                key = (budget.room_key(index), node.capacity)
                if key not in rankings:
                    room = budget.room(index)
                    rankings[key] = _best_last(room, node.capacity, demands, fractions)
                ranking = rankings[key]
                while ranking and not left[ranking[-1]]:
                    ranking.pop()
                if not ranking or not budget.grant_bundle_on(index, views[ranking[-1]].job_id):
                    break
                left[ranking[-1]] -= 1


def _best_last(room: Resources, node: Resources, demands: Sequence[Resources], fractions: Sequence[float]) -> list[int]:
    """Ranks of the jobs, the one with the highest score last; empty where the mean `a` or the mean `r` is 0."""
    free_cpu, free_gpu = _shares(room, node)
    alignments, works = [], []
    for demand, fraction in zip(demands, fractions, strict=True):
        cpu, gpu = _shares(demand, node)
        alignments.append(free_cpu * cpu + free_gpu * gpu)
        works.append((cpu + gpu) * fraction)
    if not works or not sum(works) or not sum(alignments):
        return []
    weight = (sum(alignments) / len(alignments)) / (sum(works) / len(works))
    scores = [alignment + weight * work for alignment, work in zip(alignments, works, strict=True)]
    return sorted(range(len(scores)), key=lambda rank: (scores[rank], -rank))


def _shares(amount: Resources, node: Resources) -> tuple[float, float]:
    """CPUs and GPUs as fractions of what a node has."""
    return (
        amount.cpu_milli / node.cpu_milli if node.cpu_milli else 0.0,
        amount.gpu_milli / node.gpu_milli if node.gpu_milli else 0.0,
    )


_Role = Literal["ps", "worker"]
_FIRST_OF_ALL = math.inf
"""Gain of a task that a job cannot train without."""


class Dl2Optimus(_Reference):
    """The task that saves most slots comes next, by true speeds and single tasks.

    Args:
        oracle: the true speeds. Policies are made before anything else, so a world may bring them later: `consult`.
    """

    name = "dl2_optimus"
    knows_jobs = True
    unbounded = False

    def __init__(self, oracle: Oracle | None = None) -> None:
        self._oracle: Oracle = oracle or _nobody_knows

    def consult(self, oracle: Oracle) -> None:
        """Take the true speeds from `oracle` from now on."""
        self._oracle = oracle

    def _spend(self, observation: Observation, views: Sequence[JobView], budget: Rebuilding) -> None:
        have = [[0, 0] for _ in views]
        queue: list[tuple[float, int, _Role]] = [(-_FIRST_OF_ALL, rank, "worker") for rank in range(len(views))]
        while queue:
            loss, rank, role = heapq.heappop(queue)
            if loss >= 0:
                return
            view, counts = views[rank], have[rank]
            if counts[role == "ps"] >= (view.ps if role == "ps" else view.workers).maximum:
                continue
            if not budget.grant(view.job_id, int(role == "worker"), int(role == "ps")):
                return
            counts[role == "ps"] += 1
            gain, role = self._best(view, counts[0], counts[1], observation.slot_length_s)
            heapq.heappush(queue, (-gain, rank, role))

    def _best(self, view: JobView, workers: int, ps: int, slot_length_s: float) -> tuple[float, _Role]:
        """The larger gain in slots and its role; equal gains go to the parameter server."""
        if not workers:
            return _FIRST_OF_ALL, "worker"
        if not ps:
            return _FIRST_OF_ALL, "ps"
        remaining = view.epochs - view.progress_epochs

        def slots(more_workers: int, more_ps: int) -> float:
            rate = self._oracle(view, workers + more_workers, ps + more_ps, slot_length_s)
            return remaining / rate if rate > 0 else math.inf

        now = slots(0, 0)
        gain_worker, gain_ps = _saved(now, slots(1, 0)), _saved(now, slots(0, 1))
        return (gain_ps, "ps") if gain_ps >= gain_worker else (gain_worker, "worker")


def _nobody_knows(view: JobView, workers: int, ps: int, elapsed_s: float) -> float:
    raise InvalidInput(
        f"policy {Dl2Optimus.name} must be told the true speeds, and outside a simulation nobody knows them",
        f"choose {Dl2Optimus.name.removeprefix('dl2_')}, which learns them from what it observes",
    )


def _saved(now: float, after: float) -> float:
    """Slots saved; a job that stands still either way gains nothing, although both would take for ever."""
    return 0.0 if now == after else now - after
