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
from fedsched.core.job import NO_TASKS, Allocation
from fedsched.core.record import Record
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
    for lasts in HORIZONS_SLOTS:
        if left_slots >= lasts:
            break
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
        self.shares = [
            (worker, ps)
            for worker, ps in zip(self.worker_share.tolist(), self.ps_share.tolist(), strict=True)
            if worker or ps
        ]
        """Of each resource that it needs, what a worker and a parameter server take."""
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
        for worker_share, ps_share in self.shares:
            np.maximum(most, workers * worker_share + ps * ps_share, out=most)
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


class Staircase:
    """The steps of a job from an allocation, each worth no more than the one before."""

    __slots__ = ("steps", "table")

    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps = steps
        self.table = np.array(steps, dtype=np.float64).reshape(-1, 3)
        """The same, a row each: most staircases serve for many slots."""


def staircase(curve: Curve, own: Mapping[Cell, float], scale: float = 1.0, start: Cell = (0, 0)) -> Staircase:
    """The steps that a job would take from an allocation.

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
    shares = curve.shares
    while True:
        value, chosen = 0.0, None
        # What is no improvement now is none after the next step either.
        cells = [cell for cell in cells if cell[2] > rate and cell[0] >= workers and cell[1] >= ps]
        for cell in cells:
            w, p, after = cell
            # The dominant share, written out: most jobs of a slot have their staircases reckoned anew.
            share = SHARE_MIN
            for worker_share, ps_share in shares:
                taken = (w - workers) * worker_share + (p - ps) * ps_share
                if taken > share:
                    share = taken
            worth = (after - rate) / share
            if worth > value:
                value, chosen = worth, cell
        if chosen is None:
            return Staircase(steps)
        workers, ps, rate = chosen
        ceiling = min(ceiling, value / best)
        steps.append((ceiling, workers, ps))


class Claim(Record, frozen=True, eq=False):
    """What a job would make of the cluster."""

    view: JobView
    curve: Curve
    weight: float
    """How much a share of its best rate is worth, against other jobs."""
    stairs: Staircase
    """From what the budget holds for it already."""
    held: Allocation
    """What it runs with."""


def spend(wishes: Sequence[Claim], views: Sequence[JobView], capacity: Resources, budget: Budget) -> None:
    """Grant steps in the order of their worth. Jobs that got nothing get their minimum at last, if there is room.

    Args:
        views: all jobs of the slot; those without a wish keep what the budget holds for them.
        capacity: of the cluster.
    """
    if not wishes:
        return
    room = _Room(wishes, views, capacity, budget)
    room.count_out()
    room.grant_all()


class _Steps:
    """The steps of all jobs, the most valuable first. A job of higher priority than others starts before them.

    Most of them are granted, so the first many are counted out all at once.
    """

    def __init__(self, wishes: Sequence[Claim]) -> None:
        counts = [len(wish.stairs.steps) for wish in wishes]
        self.wish = np.repeat(np.arange(len(wishes)), counts)
        """Whose step it is, for each step by job and, at first, not yet in order."""
        worth, self.workers, self.ps = np.concatenate([wish.stairs.table for wish in wishes]).T
        value = -worth * np.repeat([wish.weight for wish in wishes], counts)
        self.first = np.cumsum([0, *counts])[:-1][np.array(counts, dtype=bool)]
        """Indices of the first steps, of jobs that have any."""
        priorities = [wish.view.priority for wish in wishes]
        if min(priorities) == max(priorities):
            self.order = np.argsort(value, kind="stable")
        else:
            rank = np.zeros(len(value))
            rank[self.first] = min(priorities) - np.array(priorities)[self.wish[self.first]]
            self.order = np.lexsort((value, rank))

    def taken(self, count: Floats, have: Sequence[int]) -> Floats:
        """How many more tasks of a role each step takes, in order.

        Args:
            count: after each step, not in order.
            have: what each job has before its first.
        """
        more = np.diff(count, prepend=0.0)
        more[self.first] = count[self.first] - np.array(have)[self.wish[self.first]]
        return more[self.order]


class _Room:
    """Counts out what there is, then grants it."""

    def __init__(self, wishes: Sequence[Claim], views: Sequence[JobView], capacity: Resources, budget: Budget) -> None:
        self._wishes = wishes
        self._budget = budget
        self._have: list[Cell] = []
        self._goals: list[Cell] = []
        self._turns: dict[int, None] = {}
        """Numbers of the jobs that get something, by their first step."""
        self._left = list(amounts(capacity))
        known: dict[Resources, tuple[float, float, float]] = {}
        self._demands = [
            (_known(wish.view.worker_demand, known), _known(wish.view.ps_demand, known)) for wish in wishes
        ]
        held = dict(budget.allocations())
        for wish in wishes:
            have = held.pop(wish.view.job_id, NO_TASKS)
            self._have.append((have.workers, have.ps))
        self._goals = list(self._have)
        for number, (workers, ps) in enumerate(self._have):
            if workers or ps:
                self._take(number, workers, ps)
        for view in views:
            if view.job_id in held:
                size = held[view.job_id]
                taken = amounts(view.worker_demand * size.workers + view.ps_demand * size.ps)
                self._left = [left - part for left, part in zip(self._left, taken, strict=True)]

    def count_out(self) -> None:
        """Raise goals step by step, as far as there is room for all of them together."""
        wishes, goals = self._wishes, self._goals
        steps = _Steps(wishes)
        numbers = steps.wish[steps.order]
        turns = numbers.tolist()
        self._turns = dict.fromkeys(turns)
        begun = self._take_first(steps, numbers)
        granted = np.bincount(numbers[:begun], minlength=len(wishes)).tolist()
        for number, count in enumerate(granted):
            if count:
                _, workers, ps = wishes[number].stairs.steps[count - 1]
                goals[number] = (workers, ps)
        closed = [False] * len(wishes)
        for number in turns[begun:]:
            if closed[number]:
                continue
            _, workers, ps = wishes[number].stairs.steps[granted[number]]
            granted[number] += 1
            have = goals[number]
            if self._fits(number, workers - have[0], ps - have[1]):
                self._take(number, workers - have[0], ps - have[1])
                goals[number] = (workers, ps)
            else:
                closed[number] = True
                self._squeeze(number, workers, ps)

    def _take_first(self, steps: _Steps, numbers: Ints) -> int:
        """Take as many of the first steps as there is room for, one after the other; returns how many."""
        workers = steps.taken(steps.workers, [have[0] for have in self._goals])
        ps = steps.taken(steps.ps, [have[1] for have in self._goals])
        demands = np.array(self._demands)[numbers]
        takes = workers[:, None] * demands[:, 0] + ps[:, None] * demands[:, 1]
        whole = takes.cumsum(axis=0)
        over = ((whole > self._left) & (takes > 0)).any(axis=1)
        count = int(over.argmax()) if over.any() else len(over)
        if count:
            self._left = [left - part for left, part in zip(self._left, whole[count - 1].tolist(), strict=True)]
        return count

    def _fits(self, number: int, workers: int, ps: int) -> bool:
        """Whether there is room for these, on the whole; what they take nothing of may be overdrawn."""
        for one, other, left in zip(*self._demands[number], self._left, strict=True):
            taken = workers * one + ps * other
            if taken > left and taken:
                return False
        return True

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
        growing = []
        for number in self._turns:
            workers, ps = self._goals[number]
            held = self._wishes[number].held
            if workers <= held.workers and ps <= held.ps:
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
