"""Spends a slot's budget by marginal value: the jump that speeds a job up most for what it takes comes first.

From nothing, or from what it must keep, a job jumps to any larger allocation: speeds are not concave in workers and
parameter servers, so single steps stall (the loss of Optimus's rule). A jump is worth

    (rate after - rate before) / best rate  *  weight  /  dominant share of what it takes,

and of one job's jumps the best ones form a staircase that does not depend on other jobs and hardly changes from slot to
slot. So the steps of all staircases are sorted, and counted out against what the cluster has as a whole; then each job
is granted at once what came of that. Where there is no room for a step, on the whole or on any node, the job takes the
best smaller one that there is room for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fedsched.core.decision import Budget, JobView
from fedsched.core.job import Allocation, allocation_of
from fedsched.core.resources import Resources

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

STEPS_MAX = 8
"""Steps of a staircase; the last ones are hardly worth anything."""
TRIES_MAX = 3
"""How often a job that found no places asks for less."""
SHARE_MIN = 1e-9
"""A jump that takes nothing the cluster has is still not infinitely good."""

SHORT_FIRST = 0.3
"""To this power of the remaining time a share of the best rate is worth less."""
LEFT_SLOTS_MIN = 0.5
"""A job that is nearly done does not become infinitely urgent."""
LEFT_MIN = 0.02
"""Of its declared length a job always has so much left: declarations are wrong."""
HORIZONS_SLOTS = (10, 5, 2, 1)
"""An allocation is expected to last for the largest of these numbers of slots that the job still needs: few numbers, so
that steps need not be reckoned anew in every slot."""

NOTHING = Allocation()
Cell = tuple[int, int]
"""Workers and parameter servers."""


def amounts(resources: Resources) -> tuple[float, float, float]:
    """The resources as numbers, in one order."""
    return (float(resources.cpu_milli), float(resources.memory_mib), float(resources.gpu_milli))


def _known(resources: Resources, known: dict[Resources, tuple[float, float, float]]) -> tuple[float, float, float]:
    found = known.get(resources)
    if found is None:
        found = known[resources] = amounts(resources)
    return found


def per_unit(demand: Resources, capacity: Resources) -> Floats:
    """The fraction of each resource of the cluster that one task takes; of one that is not there, nothing."""
    whole = amounts(capacity)
    return np.array([part / total if total else 0.0 for part, total in zip(amounts(demand), whole, strict=True)])


def urgency(left_slots: float) -> float:
    """How much a share of its best rate is worth to a job that would take so many slots more at that."""
    return float(max(LEFT_SLOTS_MIN, left_slots) ** -SHORT_FIRST)


def pause(resize_s: float, slot_s: float, left_slots: float) -> float:
    """What a change costs, as a fraction of the training that the job does before the next one."""
    lasts = next((slots for slots in HORIZONS_SLOTS if left_slots >= slots), HORIZONS_SLOTS[-1])
    return resize_s / (slot_s * lasts)


@dataclass(eq=False)
class Curve:
    """How fast jobs of one kind train with each allocation that they may have.

    Args:
        workers: of each allocation.
        ps: of each allocation.
        rates: epochs per second with each.
        worker_share: what a worker takes of each of the cluster's resources; `ps_share` likewise.
    """

    workers: Ints
    ps: Ints
    rates: Floats
    worker_share: Floats
    ps_share: Floats
    best: float = field(init=False)
    """The highest rate."""
    stairs: tuple[tuple[int, int, float], ...] = field(init=False)
    """Workers, parameter servers and rate of the allocations on the staircase from nothing."""

    def __post_init__(self) -> None:
        self.best = float(self.rates.max())
        self._found: dict[Cell, int] = {}
        self._shares = [
            (worker, ps)
            for worker, ps in zip(self.worker_share.tolist(), self.ps_share.tolist(), strict=True)
            if worker or ps
        ]
        self.stairs = self._climb()

    def index(self, cell: Cell) -> int:
        """Where the allocation is in the arrays; the nearest one if it is not there."""
        index = self._found.get(cell)
        if index is None:
            index = self._found[cell] = self._nearest(cell)
        return index

    def _nearest(self, cell: Cell) -> int:
        distance = np.abs(np.log2((self.workers + 1) / (cell[0] + 1))) + np.abs(np.log2((self.ps + 1) / (cell[1] + 1)))
        return int(np.argmin(distance))

    def taken(self, workers: Ints, ps: Ints) -> Floats:
        """Dominant share of so many tasks."""
        most = np.full(len(workers), SHARE_MIN)
        for worker_share, ps_share in self._shares:
            np.maximum(most, workers * worker_share + ps * ps_share, out=most)
        return most

    def share(self, workers: int, ps: int) -> float:
        """The same of one allocation."""
        most = SHARE_MIN
        for worker_share, ps_share in self._shares:
            most = max(most, workers * worker_share + ps * ps_share)
        return most

    def _climb(self) -> tuple[tuple[int, int, float], ...]:
        workers, ps, rate = 0, 0, 0.0
        found: list[tuple[int, int, float]] = []
        while len(found) < STEPS_MAX:
            above = (self.workers >= workers) & (self.ps >= ps) & (self.rates > rate)
            if not above.any():
                break
            value = np.where(above, self.rates - rate, 0.0) / self.taken(self.workers - workers, self.ps - ps)
            step = int(np.argmax(value))
            workers, ps, rate = int(self.workers[step]), int(self.ps[step]), float(self.rates[step])
            found.append((workers, ps, rate))
        return tuple(found)


Step = tuple[float, int, int]
"""What it is worth for each share of the cluster, relative to the job's best rate; workers and servers after it."""


def staircase(
    curve: Curve, own: Mapping[Cell, float], scale: float = 1.0, start: Cell = (0, 0)
) -> tuple[float, tuple[Step, ...]]:
    """The best rate of a job, and its steps from an allocation, each worth no more than the one before.

    Args:
        own: rates that are known, or reckoned, of this very job: they stand for those of the curve.
        scale: how fast the job is relative to the curve, where nothing is known of it.
    """
    cells = [(w, p, own[w, p] if (w, p) in own else rate * scale) for w, p, rate in curve.stairs]
    listed = {(w, p) for w, p, _ in cells}
    cells += [(w, p, rate) for (w, p), rate in own.items() if (w, p) not in listed]
    best = max(rate for _, _, rate in cells) or 1.0
    workers, ps = start
    rate = 0.0
    if workers:
        rate = own[start] if start in own else float(curve.rates[curve.index(start)]) * scale
    steps: list[Step] = []
    ceiling = float("inf")
    while True:
        value, chosen = 0.0, None
        for cell in cells:
            w, p, after = cell
            if after > rate and w >= workers and p >= ps:
                worth = (after - rate) / curve.share(w - workers, p - ps)
                if worth > value:
                    value, chosen = worth, cell
        if chosen is None:
            return best, tuple(steps)
        workers, ps, rate = chosen
        ceiling = min(ceiling, value / best)
        steps.append((ceiling, workers, ps))


@dataclass(frozen=True, slots=True, eq=False)
class Wish:
    """What a job would make of the cluster."""

    view: JobView
    curve: Curve
    weight: float
    """How much a share of its best rate is worth, against other jobs."""
    steps: tuple[Step, ...]
    """From what the budget holds for it already."""


def spend(wishes: Sequence[Wish], views: Sequence[JobView], capacity: Resources, budget: Budget) -> None:
    """Grant steps in the order of their worth. Jobs that got nothing get their minimum at last, if there is room.

    Args:
        views: all jobs of the slot; those without a wish keep what the budget holds for them.
        capacity: of the cluster.
    """
    if not wishes:
        return
    room = _Room(wishes, views, capacity, budget)
    room.count_out(_ordered(wishes))
    room.grant_all()


def _ordered(wishes: Sequence[Wish]) -> list[tuple[int, int, int]]:
    """All jobs' steps, the most valuable first: number of the wish, workers and parameter servers after the step.

    A job of higher priority than others starts before them.
    """
    lowest = min(wish.view.priority for wish in wishes)
    found = []
    for number, wish in enumerate(wishes):
        rank = lowest - wish.view.priority
        for worth, workers, ps in wish.steps:
            found.append((rank, -worth * wish.weight, number, workers, ps))
            rank = 0
    found.sort()
    return [(number, workers, ps) for _, _, number, workers, ps in found]


class _Room:
    """Counts out what there is, then grants it."""

    def __init__(self, wishes: Sequence[Wish], views: Sequence[JobView], capacity: Resources, budget: Budget) -> None:
        self._wishes = wishes
        self._budget = budget
        self._have: list[Cell] = []
        self._goals: list[Cell] = []
        self._turns: dict[int, None] = {}
        """Numbers of the jobs that get something, by their first step."""
        self._closed = [False] * len(wishes)
        self._left = list(amounts(capacity))
        known: dict[Resources, tuple[float, float, float]] = {}
        self._demands = [
            (_known(wish.view.worker_demand, known), _known(wish.view.ps_demand, known)) for wish in wishes
        ]
        held = dict(budget.allocations())
        for wish in wishes:
            have = held.pop(wish.view.job_id, NOTHING)
            self._have.append((have.workers, have.ps))
        self._goals = list(self._have)
        for number, (workers, ps) in enumerate(self._have):
            self._take(number, workers, ps)
        for view in views:
            if view.job_id in held:
                size = held[view.job_id]
                taken = amounts(view.worker_demand * size.workers + view.ps_demand * size.ps)
                self._left = [left - part for left, part in zip(self._left, taken, strict=True)]

    def count_out(self, steps: Sequence[tuple[int, int, int]]) -> None:
        """Raise goals step by step, as far as there is room for all of them together."""
        goals, demands, left, closed = self._goals, self._demands, self._left, self._closed
        for number, workers, ps in steps:
            if closed[number]:
                continue
            have = goals[number]
            more_workers, more_ps = workers - have[0], ps - have[1]
            # Written out for the three resources: this is what a decision on a large cluster spends its time on.
            (cpu, memory, gpu), (ps_cpu, ps_memory, ps_gpu) = demands[number]
            cpu = more_workers * cpu + more_ps * ps_cpu
            memory = more_workers * memory + more_ps * ps_memory
            gpu = more_workers * gpu + more_ps * ps_gpu
            self._turns[number] = None
            if (cpu <= left[0] or not cpu) and (memory <= left[1] or not memory) and (gpu <= left[2] or not gpu):
                left[0] -= cpu
                left[1] -= memory
                left[2] -= gpu
                goals[number] = (workers, ps)
            else:
                closed[number] = True
                self._squeeze(number, workers, ps)

    def _fits(self, number: int, workers: int, ps: int) -> bool:
        worker_demand, ps_demand = self._demands[number]
        return all(
            workers * one + ps * other <= left
            for one, other, left in zip(worker_demand, ps_demand, self._left, strict=True)
            if one or other
        )

    def _take(self, number: int, workers: int, ps: int) -> None:
        worker_demand, ps_demand = self._demands[number]
        for kind in range(len(self._left)):
            self._left[kind] -= workers * worker_demand[kind] + ps * ps_demand[kind]

    def _squeeze(self, number: int, workers: int, ps: int) -> None:
        """The best of what is smaller than a step that there is no room for."""
        have = self._goals[number]
        least = self._wishes[number].view.minimum
        if have == (0, 0):
            if not self._fits(number, least.workers, least.ps):
                return
        elif not self._fits(number, 1, 0) and not self._fits(number, 0, 1):
            return
        best = self._best_within(number, have, (workers, ps))
        if best is not None:
            self._take(number, best[0] - have[0], best[1] - have[1])
            self._goals[number] = best

    def _best_within(self, number: int, have: Cell, limit: Cell) -> Cell | None:
        """The most valuable allocation between two that there is room for, on the whole."""
        curve = self._wishes[number].curve
        more_workers, more_ps = curve.workers - have[0], curve.ps - have[1]
        rate = float(curve.rates[curve.index(have)]) if have[0] else 0.0
        fit = (more_workers >= 0) & (more_ps >= 0) & (curve.rates > rate)
        fit &= (curve.workers <= limit[0]) & (curve.ps <= limit[1])
        for one, other, left in zip(*self._demands[number], self._left, strict=True):
            if one or other:
                fit &= more_workers * one + more_ps * other <= left
        if not fit.any():
            return None
        best = int(np.argmax(np.where(fit, curve.rates - rate, 0.0) / curve.taken(more_workers, more_ps)))
        return int(curve.workers[best]), int(curve.ps[best])

    def grant_all(self) -> None:
        """Have the budget find places; what it finds none for is tried again, smaller.

        Who keeps what it has, or a part of that, comes first, so that nobody's new tasks push it from its places.
        """
        held = [allocation_of(wish.view.placement) for wish in self._wishes]
        growing = []
        for number in self._turns:
            workers, ps = self._goals[number]
            if workers <= held[number].workers and ps <= held[number].ps:
                self._grant(number)
            else:
                growing.append(number)
        for number in growing:
            self._grant(number)
        for number, wish in enumerate(self._wishes):
            least, have = wish.view.minimum, self._have[number]
            if have[0] < least.workers or have[1] < least.ps:
                self._raise(number, (max(have[0], least.workers), max(have[1], least.ps)))

    def _grant(self, number: int) -> None:
        goal = self._goals[number]
        if self._raise(number, goal):
            return
        # There is room for all of it together, and not for some task on any node: nearly as much may still fit.
        before = self._left
        self._left = [float("inf")] * len(before)
        for _ in range(TRIES_MAX):
            have = self._have[number]
            ratio = (goal[0] - 1, goal[1]) if goal[0] - have[0] > goal[1] - have[1] else (goal[0], goal[1] - 1)
            best = self._best_within(number, have, ratio)
            if best is None or self._raise(number, best):
                break
            goal = best
        self._left = before
        have = self._have[number]
        self._take(number, have[0] - self._goals[number][0], have[1] - self._goals[number][1])

    def _raise(self, number: int, goal: Cell) -> bool:
        have, wish = self._have[number], self._wishes[number]
        more = (goal[0] - have[0], goal[1] - have[1])
        if more == (0, 0):
            return True
        if not self._budget.grant(wish.view.job_id, *more):
            return False
        self._have[number] = goal
        return True
