"""Spends a slot's budget by marginal value: the jump that speeds a job up most for what it takes comes first.

From nothing, or from what it must keep, a job jumps to any larger allocation: speeds are not concave in workers and
parameter servers, so single steps stall (the loss of Optimus's rule). A jump is worth

    (rate after - rate before) / best rate  *  weight  /  dominant share of what it takes,

and of one job's jumps the best ones form a staircase that does not depend on other jobs. So all staircases are computed
at once, their steps are sorted, and each step is one grant. Where there is no room for a step the job takes the best
smaller one that fits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fedsched.core.decision import Budget, JobView
from fedsched.core.job import Allocation
from fedsched.core.resources import Resources

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

STEPS_MAX = 12
"""Steps of a staircase; the last ones are hardly worth anything."""
TRIES_MAX = 3
"""How often a job that was refused a step asks for a smaller one."""
SHARE_MIN = 1e-9
"""A jump that takes nothing the cluster has is still not infinitely good."""

SHORT_FIRST = 0.3
"""To this power of the remaining time a share of the best rate is worth less."""
LEFT_SLOTS_MIN = 0.5
"""A job that is nearly done does not become infinitely urgent."""
LEFT_MIN = 0.02
"""Of its declared length a job always has so much left: declarations are wrong."""
HORIZON_SLOTS = 10
"""An allocation is expected to last for so many slots, or as long as the job."""

Cell = tuple[int, int]
"""Workers and parameter servers."""


def amounts(resources: Resources) -> tuple[float, float, float]:
    """The resources as numbers, in one order."""
    return (float(resources.cpu_milli), float(resources.memory_mib), float(resources.gpu_milli))


def per_unit(demand: Resources, capacity: Resources) -> Floats:
    """The fraction of each resource of the cluster that one task takes; of one that is not there, nothing."""
    whole = amounts(capacity)
    return np.array([part / total if total else 0.0 for part, total in zip(amounts(demand), whole, strict=True)])


def urgency(left_slots: float) -> float:
    """How much a share of its best rate is worth to a job that would take so many slots more at that."""
    return float(max(LEFT_SLOTS_MIN, left_slots) ** -SHORT_FIRST)


def pause(resize_s: float, slot_s: float, left_slots: float) -> float:
    """What a change costs, as a fraction of the training that the job does before the next one."""
    return resize_s / (slot_s * max(1.0, min(HORIZON_SLOTS, left_slots)))


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
    stairs: tuple[int, ...] = field(init=False)
    """Indices of the allocations that lie on the staircase from nothing."""

    def __post_init__(self) -> None:
        self.best = float(self.rates.max())
        self._found: dict[Cell, int] = {}
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
        shares = np.multiply.outer(workers, self.worker_share) + np.multiply.outer(ps, self.ps_share)
        found: Floats = np.maximum(shares.max(axis=-1), SHARE_MIN)
        return found

    def _climb(self) -> tuple[int, ...]:
        workers, ps, rate = 0, 0, 0.0
        found: list[int] = []
        while len(found) < STEPS_MAX:
            above = (self.workers >= workers) & (self.ps >= ps) & (self.rates > rate)
            if not above.any():
                break
            value = np.where(above, self.rates - rate, 0.0) / self.taken(self.workers - workers, self.ps - ps)
            step = int(np.argmax(value))
            found.append(step)
            workers, ps, rate = int(self.workers[step]), int(self.ps[step]), float(self.rates[step])
        return tuple(found)


@dataclass(frozen=True, slots=True, eq=False)
class Wish:
    """What a job would make of the cluster."""

    view: JobView
    curve: Curve
    weight: float
    """How much a share of its best rate is worth, against other jobs."""
    own: Mapping[Cell, float]
    """Rates that are known, or reckoned, of this very job: they stand for those of the curve."""
    scale: float = 1.0
    """How fast the job is relative to the curve, where nothing is known of it."""


def spend(wishes: Sequence[Wish], capacity: Resources, budget: Budget) -> None:
    """Grant steps in the order of their worth. Jobs that got nothing get their minimum at last, if there is room."""
    if not wishes:
        return
    room = _Room(capacity, wishes, budget)
    for number, workers, ps in _ordered(wishes, budget):
        room.step(number, workers, ps)
    for number in range(len(wishes)):
        room.start(number)


class _Room:
    """Grants to wishes, and what is left."""

    def __init__(self, capacity: Resources, wishes: Sequence[Wish], budget: Budget) -> None:
        self._capacity = capacity
        self._wishes = wishes
        self._budget = budget
        self._have = [budget.allocation(wish.view.job_id) for wish in wishes]
        self._closed = [False] * len(wishes)

    def step(self, number: int, workers: int, ps: int) -> None:
        """Raise a job to so many tasks, or as near to them as there is room."""
        if self._closed[number]:
            return
        if not self._raise(number, workers, ps):
            self._closed[number] = True
            self._squeeze(number, workers, ps)

    def start(self, number: int) -> None:
        """Give a job that has less than its minimum that."""
        view, have = self._wishes[number].view, self._have[number]
        least = view.minimum
        if have.workers < least.workers or have.ps < least.ps:
            self._raise(number, max(have.workers, least.workers), max(have.ps, least.ps))

    def _raise(self, number: int, workers: int, ps: int) -> bool:
        have, job_id = self._have[number], self._wishes[number].view.job_id
        more = (max(0, workers - have.workers), max(0, ps - have.ps))
        if more == (0, 0):
            return True
        if not self._budget.grant(job_id, *more):
            return False
        self._have[number] = have + Allocation(*more)
        return True

    def _squeeze(self, number: int, workers: int, ps: int) -> None:
        """The best of what is smaller than a step that was refused; room only shrinks, so no larger one is tried."""
        wish, have = self._wishes[number], self._have[number]
        curve = wish.curve
        rate = _rate(wish, (have.workers, have.ps)) if have else 0.0
        rates = curve.rates * wish.scale
        fit = (curve.workers >= have.workers) & (curve.ps >= have.ps) & (rates > rate)
        fit &= (curve.workers <= workers) & (curve.ps <= ps)
        for _ in range(TRIES_MAX):
            fit &= (curve.workers < workers) | (curve.ps < ps)
            if not fit.any():
                return
            taken = curve.taken(curve.workers - have.workers, curve.ps - have.ps)
            best = int(np.argmax(np.where(fit, rates - rate, 0.0) / taken))
            workers, ps = int(curve.workers[best]), int(curve.ps[best])
            if self._raise(number, workers, ps):
                return
            fit &= ~((curve.workers >= workers) & (curve.ps >= ps))


def _rate(wish: Wish, cell: Cell) -> float:
    known = wish.own.get(cell)
    return known if known is not None else float(wish.curve.rates[wish.curve.index(cell)]) * wish.scale


def _ordered(wishes: Sequence[Wish], budget: Budget) -> list[tuple[int, int, int]]:
    """All jobs' steps, the most valuable first: number of the wish, workers and parameter servers after the step."""
    width = max(len(wish.curve.stairs) + len(wish.own) for wish in wishes)
    count = len(wishes)
    cells = np.zeros((2, count, width))
    rates = np.zeros((count, width))
    shares = np.zeros((2, count, 3))
    held = np.zeros((2, count))
    now = np.zeros(count)
    worth = np.zeros(count)
    for number, wish in enumerate(wishes):
        curve = wish.curve
        stairs = list(curve.stairs)
        end = len(stairs)
        cells[0, number, :end] = curve.workers[stairs]
        cells[1, number, :end] = curve.ps[stairs]
        rates[number, :end] = curve.rates[stairs] * wish.scale
        for (workers, ps), rate in wish.own.items():
            same = (cells[0, number, :end] == workers) & (cells[1, number, :end] == ps)
            rates[number, :end][same] = rate
            cells[0, number, end], cells[1, number, end], rates[number, end] = workers, ps, rate
            end += 1
        shares[0, number], shares[1, number] = curve.worker_share, curve.ps_share
        have = budget.allocation(wish.view.job_id)
        held[0, number], held[1, number] = have.workers, have.ps
        now[number] = _rate(wish, (have.workers, have.ps)) if have.workers else 0.0
        worth[number] = wish.weight / max(float(rates[number].max()), 1e-300)
    return _sorted(wishes, cells, rates, shares, held, now, worth)


def _sorted(
    wishes: Sequence[Wish], cells: Floats, rates: Floats, shares: Floats, held: Floats, now: Floats, worth: Floats
) -> list[tuple[int, int, int]]:
    lowest = min(wish.view.priority for wish in wishes)
    starting = held[0] == 0
    ceiling = np.full(len(wishes), np.inf)
    found: list[tuple[int, float, int, int, int]] = []
    rows = np.arange(len(wishes))
    for turn in range(STEPS_MAX):
        more = cells - held[:, :, None]
        taken = (more[0][:, :, None] * shares[0][:, None, :] + more[1][:, :, None] * shares[1][:, None, :]).max(axis=2)
        gain = rates - now[:, None]
        possible = (more >= 0).all(axis=0) & (gain > 0)
        value = np.where(possible, gain / np.maximum(taken, SHARE_MIN), -1.0)
        chosen = value.argmax(axis=1)
        best = value[rows, chosen]
        going = best > 0
        if not going.any():
            break
        # A step never comes before the one that it starts from.
        ceiling = np.where(going, np.minimum(ceiling, best * worth), ceiling)
        held = np.where(going, cells[:, rows, chosen], held)
        now = np.where(going, rates[rows, chosen], now)
        for number in np.flatnonzero(going).tolist():
            first = not turn and bool(starting[number])
            rank = lowest - wishes[number].view.priority if first else 0
            found.append((rank, -float(ceiling[number]), number, int(held[0, number]), int(held[1, number])))
    found.sort(key=lambda step: step[:3])
    return [(number, workers, ps) for _, _, number, workers, ps in found]
