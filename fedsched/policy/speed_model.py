"""How fast jobs of a class train with any allocation, learned from the speeds of a few: one Gaussian process a class.

The process is over (log2 workers, log2 parameter servers) and predicts the logarithm of epochs per second. What it is
given of a cell is the mean over the jobs that were seen there, with the variance that this many of them leave; that is
exact, so sums by cell (`fedsched.core.speeds`) are all that needs to be kept, shared and merged.

Details that matter:

* Prior mean: more is faster, until something is known; then what other classes look like (`_Shapes`), a class without
  parameter servers like those without, one with them like those with. Their differences from each other join the
  prior's covariance, so that a class that resembles one of them is recognised from few observations.
* The level of a class is free (a wide constant), as classes differ by orders of magnitude.
* Noise between jobs in the same cell is estimated over all cells of a class.
* Forgetting: a period's observations count half as much as those of the period after it. Periods are counted back from
  the last one in which the class was seen, so what was learned in simulations, whose calendar begins anew, stands until
  the first job of the class is seen for real.
* A grid of allocations, fine up to 16 tasks and then 19 % apart, so that kernels are computed once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_factor, cho_solve

from fedsched.core.job import TASKS_MAX
from fedsched.core.record import Record
from fedsched.core.speeds import UNIT, SpeedCell, SpeedStatistics, SpeedSums

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

LENGTH = 1.5
"""Of the kernel, in doublings."""
SPREAD = 0.7
"""Standard deviation of a class's shape from the prior mean."""
LEVEL_SPREAD = 4.0
"""Of a class's level."""
ROUGHNESS = 0.08
"""Of what is peculiar to single allocations: measured speeds have peaks that no smooth curve shows."""
NOISE = 0.05
"""Between jobs in the same cell, before anything is known of it."""
NOISE_WEIGHT = 4.0
"""How many observations that guess is worth."""
SLOPE = 0.3
"""Before any class is known: by how much a doubling of either role raises the logarithm of the speed."""
SLOPE_ALONE = 0.5
"""The same for workers of jobs without parameter servers."""
KNOWN_CELLS = 8
"""From so many cells on, a class's shape says something about classes that are unknown."""
PRIOR_CLASSES = 1.0
"""How many known classes the prior mean from before is worth."""
HALF_LIFE_PERIODS = 1.0
FORGOTTEN = 8
"""Periods after which nothing is left of an observation."""

FEW = 3
"""A cell that so many jobs were seen in, or fewer, is news whenever another one is."""
NEWS = 2.0
"""Of other cells so many must be touched for each that the class has before it is brought up to date."""

SURFACES_KEPT = 500
"""What is believed is remembered for so many classes; of one beyond them it is worked out anew when it is asked for."""

TIERS = (16, 64, 256, 1024, TASKS_MAX)


def levels(most: int) -> Ints:
    """Numbers of tasks that are told apart, up to the tier that `most` belongs to."""
    tier = next(tier for tier in TIERS if most <= tier)
    fine = list(range(1, 17))
    while fine[-1] < tier:
        fine.append(min(tier, round(fine[-1] * 2**0.25)))
    return np.array(fine, dtype=np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """Allocations that a class is predicted for."""

    workers_max: int
    ps_max: int
    workers: Ints
    ps: Ints
    kernel: Floats
    """Between all of them."""
    base: Floats
    """The prior mean before any class is known."""
    found: dict[tuple[int, int], int] = field(default_factory=dict)
    """What `nearest` was asked before."""

    def nearest(self, workers: int, ps: int) -> int:
        """The index of the allocation that stands for this one."""
        index = self.found.get((workers, ps))
        if index is None:
            index = self.found[workers, ps] = self._nearest(workers, ps)
        return index

    def _nearest(self, workers: int, ps: int) -> int:
        gap = np.abs(np.log2(self.workers / workers)) + np.abs(_places(self.ps) - place(ps))
        return int(np.argmin(gap))


def place(ps: int) -> float:
    """Where a number of parameter servers lies: none is a doubling before one."""
    return float(np.log2(ps)) if ps else -1.0


def _places(ps: Ints) -> Floats:
    return np.where(ps > 0, np.log2(np.maximum(ps, 1)), -1.0)


@lru_cache(maxsize=16)
def grid(workers_max: int, ps_max: int) -> Grid:
    """The grid for classes whose jobs have at most so many tasks; `ps_max` 0: they have no parameter servers."""
    by_workers = levels(workers_max)
    by_ps = np.concatenate([[0], levels(ps_max)]) if ps_max else np.array([0])
    workers, ps = (axis.ravel() for axis in np.meshgrid(by_workers, by_ps, indexing="ij"))
    x, y = np.log2(workers), _places(ps)
    distance = np.hypot(x[:, None] - x[None], y[:, None] - y[None]) * (5**0.5 / LENGTH)
    kernel = (1 + distance + distance**2 / 3) * np.exp(-distance)
    base = SLOPE * (x + y) if ps_max else SLOPE_ALONE * x
    return Grid(workers_max, ps_max, workers, ps, kernel, base)


def tier_of(most: int) -> int:
    """What of a maximum a grid depends on."""
    return next(tier for tier in TIERS if most <= tier) if most else 0


Kind = tuple[str, str]
"""Job type and accelerator type."""


@dataclass(frozen=True, slots=True, eq=False)
class Surface:
    """What is believed about a class on its grid, in logarithms of epochs per second."""

    grid: Grid
    mean: Floats
    deviation: Floats
    noise: float
    """Standard deviation between jobs in the same cell."""
    cells: int
    """In which something was observed."""

    def rates(self, beta: float | Floats) -> Floats:
        """Epochs per second, so many standard deviations above the mean."""
        rates: Floats = np.exp(self.mean + beta * self.deviation)
        return rates


@dataclass(slots=True)
class _Cell:
    weight: float = 0.0
    total: float = 0.0
    squares: float = 0.0

    def add(self, sums: SpeedSums, factor: float) -> None:
        self.weight += factor * sums.count
        self.total += factor * sums.total / UNIT
        self.squares += factor * sums.squares / UNIT**2


class _SavedSurface(Record, frozen=True):
    kind: Kind
    workers_max: int
    ps_max: int
    mean: bytes
    deviation: bytes
    noise: float
    cells: int


class Belief(Record, frozen=True):
    """What a model believes beyond what follows from the statistics: classes wait for their turn to be brought up to
    date, and meanwhile what is believed of them rests on what was known before.
    """

    surfaces: tuple[_SavedSurface, ...]
    shapes: tuple[tuple[Kind, bool, bytes], ...]
    stale: tuple[tuple[Kind, int], ...]
    news: tuple[tuple[Kind, float], ...]
    newest: tuple[tuple[Kind, int], ...]
    touches: int


class SpeedModel:
    """All classes' surfaces, brought up to date bit by bit.

    Args:
        statistics: what is known; whoever changes them says so by `touch`.
        belief: what a model of the same statistics believed, to go on from; None: what follows from them.

    Raises:
        ValueError: the belief is that of another kind of model.
    """

    def __init__(self, statistics: SpeedStatistics, belief: Belief | None = None) -> None:
        self._cells: dict[Kind, dict[tuple[int, int], dict[int, SpeedSums]]] = {}
        self._surfaces: dict[tuple[Kind, int, int], Surface] = {}
        self._shapes = _Shapes()
        self._stale: dict[Kind, int] = {}
        self._news: dict[Kind, float] = {}
        """How much was touched of a class since it was brought up to date; from 1 on it is stale."""
        self._touches = 0
        self.changes = 0
        """Grows whenever a surface that was given is not what is believed any more."""
        self._newest: dict[Kind, int] = {}
        """The last period in which anything was seen of a class."""
        for cell, sums in statistics:
            self.touch(cell, sums)
        if belief is not None:
            self._restore(belief)
            return
        # Those with most cells first: their shapes are the others' prior.
        known = sorted(self._cells, key=lambda kind: (-len(self._cells[kind]), kind))
        for kind in known:
            self._teach(kind)
        self._stale.clear()
        self._news.clear()

    @property
    def belief(self) -> Belief:
        """What a model that takes this one's place needs to know besides the statistics."""
        surfaces = tuple(
            _SavedSurface(kind, on[0], on[1], one.mean.tobytes(), one.deviation.tobytes(), one.noise, one.cells)
            for (kind, *on), one in self._surfaces.items()
        )
        return Belief(
            surfaces,
            self._shapes.saved(),
            tuple(self._stale.items()),
            tuple(self._news.items()),
            tuple(self._newest.items()),
            self._touches,
        )

    def _restore(self, belief: Belief) -> None:
        for saved in belief.surfaces:
            on = grid(saved.workers_max, saved.ps_max)
            mean, deviation = (np.frombuffer(data, np.float64) for data in (saved.mean, saved.deviation))
            if len(mean) != len(on.base) or len(deviation) != len(on.base):
                raise ValueError(f"class {saved.kind[0]!r} has {len(mean)} speeds; {len(on.base)} were expected")
            surface = Surface(on, mean, deviation, saved.noise, saved.cells)
            self._surfaces[saved.kind, saved.workers_max, saved.ps_max] = surface
        self._shapes.restore(belief.shapes)
        self._stale, self._news = dict(belief.stale), dict(belief.news)
        self._newest, self._touches = dict(belief.newest), belief.touches

    @property
    def kinds(self) -> list[Kind]:
        """Those of which something is known, sorted."""
        return sorted(self._cells)

    def touch(self, cell: SpeedCell, sums: SpeedSums) -> None:
        """A cell's sums are these now."""
        kind = (cell.job_type, cell.accelerator)
        periods = self._cells.setdefault(kind, {}).setdefault((cell.workers, cell.ps), {})
        if sums.count:
            periods[cell.period] = sums
        else:
            periods.pop(cell.period, None)
            if not periods:
                del self._cells[kind][cell.workers, cell.ps]
            if not self._cells[kind]:
                del self._cells[kind]
        self._newest[kind] = max(self._newest.get(kind, 0), cell.period)
        self._touches += 1
        # A class whose cells are well known does not change by one more job.
        news = self._news.get(kind, 0.0) + (1.0 if sums.count <= FEW else 1 / (NEWS * len(self._cells[kind])))
        self._news[kind] = news
        if news >= 1:
            self._stale.setdefault(kind, self._touches)

    def refresh(self, most: int) -> None:
        """Bring up to date what has waited longest, at most so many classes; the others follow with later calls."""
        for kind in sorted(self._stale, key=lambda kind: (self._stale[kind], kind))[:most]:
            del self._stale[kind], self._news[kind]
            self.changes += 1
            for key in [key for key in self._surfaces if key[0] == kind]:
                del self._surfaces[key]
            self._teach(kind)

    def surface(self, kind: Kind, workers_max: int, ps_max: int) -> Surface:
        """What is believed about this class."""
        key = (kind, tier_of(workers_max), tier_of(ps_max))
        found = self._surfaces.get(key)
        if found is None:
            found = self._surfaces[key] = self._fit(kind, grid(key[1], key[2]), alone=not key[2])
            if len(self._surfaces) > SURFACES_KEPT:
                self.changes += 1
                del self._surfaces[next(iter(self._surfaces))]
        return found

    def _teach(self, kind: Kind) -> None:
        """Let other classes know what this one looks like."""
        for alone in (True, False):
            cells = [cell for cell in self._cells.get(kind, {}) if (cell[1] == 0) == alone]
            if len(cells) >= (KNOWN_CELLS if not alone else KNOWN_CELLS // 2):
                fitted = self.surface(kind, TIERS[0], 0 if alone else TIERS[0])
                self._shapes.learn(kind, alone, fitted.mean)

    def _observations(self, kind: Kind, on: Grid, alone: bool) -> tuple[Ints, Floats, Floats, float, int]:
        """Where, mean, how many, noise and number of cells."""
        pooled: dict[int, _Cell] = {}
        spare, free = NOISE_WEIGHT * NOISE**2, NOISE_WEIGHT
        for (workers, ps), periods in sorted(self._cells.get(kind, {}).items()):
            if (ps == 0) != alone and alone:
                continue
            cell = pooled.setdefault(on.nearest(workers, ps), _Cell())
            for period, sums in sorted(periods.items()):
                age = self._newest[kind] - period
                if age < FORGOTTEN:
                    cell.add(sums, 0.5 ** (age / HALF_LIFE_PERIODS))
        seen = {index: cell for index, cell in pooled.items() if cell.weight > 0}
        for cell in seen.values():
            if cell.weight > 1:
                spare += max(0.0, cell.squares - cell.total**2 / cell.weight)
                free += cell.weight - 1
        where = np.array(sorted(seen), dtype=np.int64)
        weight = np.array([seen[index].weight for index in where.tolist()])
        mean = np.array([seen[index].total / seen[index].weight for index in where.tolist()])
        return where, mean, weight, float((spare / free) ** 0.5), len(seen)

    def _fit(self, kind: Kind, on: Grid, alone: bool) -> Surface:
        where, seen, weight, noise, cells = self._observations(kind, on, alone)
        prior, directions, spread = self._shapes.prior(kind, alone, on)
        directions = np.concatenate([directions, np.full((1, len(prior)), LEVEL_SPREAD)])
        variance = spread**2 + ROUGHNESS**2 + (directions**2).sum(axis=0)
        if not cells:
            # Nothing is known of the level; what differs between allocations is all that matters.
            between = np.sqrt(np.maximum(variance - LEVEL_SPREAD**2, 0.0))
            return Surface(on, prior, between, noise, 0)
        here = directions[:, where]
        among = spread**2 * on.kernel[np.ix_(where, where)] + here.T @ here
        among[np.diag_indices_from(among)] += ROUGHNESS**2 + noise**2 / weight
        across = spread**2 * on.kernel[:, where] + directions.T @ here
        across[where, np.arange(len(where))] += ROUGHNESS**2
        factor = cho_factor(among, lower=True, check_finite=False)
        solved = cho_solve(factor, across.T, check_finite=False)
        mean = prior + (seen - prior[where]) @ solved
        left = variance - np.einsum("ij,ji->i", across, solved)
        return Surface(on, mean, np.sqrt(np.maximum(left, 0.0)), noise, cells)


class _Shapes:
    """What known classes look like, apart from their levels: the prior of the others."""

    def __init__(self) -> None:
        self._known: dict[bool, dict[Kind, Floats]] = {True: {}, False: {}}

    def learn(self, kind: Kind, alone: bool, mean: Floats) -> None:
        """A class's belief on the smallest grid."""
        self._known[alone][kind] = mean - mean.mean()

    def saved(self) -> tuple[tuple[Kind, bool, bytes], ...]:
        """All that is known."""
        return tuple((kind, alone, shape.tobytes()) for alone in (True, False) for kind, shape in self._of(alone))

    def restore(self, saved: Iterable[tuple[Kind, bool, bytes]]) -> None:
        """Know what `saved` gave.

        Raises:
            ValueError: shapes are of another size.
        """
        for kind, alone, data in saved:
            shape = np.frombuffer(data, np.float64)
            if len(shape) != len(grid(TIERS[0], 0 if alone else TIERS[0]).base):
                raise ValueError(f"the shape of class {kind[0]!r} has {len(shape)} speeds")
            self._known[alone][kind] = shape

    def _of(self, alone: bool) -> list[tuple[Kind, Floats]]:
        return sorted(self._known[alone].items(), key=lambda known: known[0])

    def prior(self, kind: Kind, alone: bool, on: Grid) -> tuple[Floats, Floats, float]:
        """Mean, directions in which classes differ from it, and the spread around these."""
        small = grid(TIERS[0], 0 if alone else TIERS[0])
        others = [shape for name, shape in self._of(alone) if name != kind]
        base = small.base - small.base.mean()
        if not others:
            return on.base, np.zeros((0, len(on.base))), SPREAD
        shapes = np.array(others)
        mean = (PRIOR_CLASSES * base + shapes.sum(axis=0)) / (PRIOR_CLASSES + len(shapes))
        differences = (shapes - mean) / (len(shapes) + PRIOR_CLASSES) ** 0.5
        # With every class the rest that none of them explains becomes smaller.
        spread = SPREAD / (1 + 0.25 * min(len(shapes), 8)) ** 0.5
        index = _onto(on.workers_max, on.ps_max)
        beyond = on.base - small.base[index]
        return mean[index] + beyond, differences[:, index], spread


@lru_cache(maxsize=16)
def _onto(workers_max: int, ps_max: int) -> Ints:
    """For each allocation of a grid the nearest one of the smallest."""
    on, small = grid(workers_max, ps_max), grid(TIERS[0], min(TIERS[0], ps_max))
    most = TIERS[0]
    tasks = zip(np.minimum(on.workers, most).tolist(), np.minimum(on.ps, most).tolist(), strict=True)
    return np.array([small.nearest(workers, ps) for workers, ps in tasks])
