"""Which of the other clusters' statistics a cluster uses, class by class, and how much of them.

Nothing but its name says that a class of one cluster is that of another (`type` in the job's file). Where the name is
the same and the models are not, or where a cluster sends what nobody can tell from speeds, sums of all would mislead
everybody. So a class is believed per cluster:

* What a cluster has seen itself is compared, allocation by allocation, with what each of the others says of the class.
  Where they are further apart than chance and different machines explain (`LIKE`), that part of the class is left out.
* What has no allocation in common with that is compared with those that agree with it. A class of which the cluster has
  seen nothing is judged by the median over the others; of two that contradict each other neither is used.
* Of what is used each part counts as if its cluster were off by `APART` of its own: however many jobs it has seen, it
  says no more than that allows. What was seen here counts in full, so in the end it decides.

All of it follows from the statistics alone, in whatever order they came.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from fedsched.core.speeds import NONE, UNIT, SpeedCell, SpeedStatistics, SpeedSums
from fedsched.policy.speed_model import NOISE, NOISE_WEIGHT, Kind

LIKE = 0.15
"""Standard deviation, in logarithms, between clusters whose jobs are of one class."""
APART = 0.05
"""How far a cluster's speeds of a class are off as a whole, for the weight of what it says."""
FAR = 4.0
"""Mean squared difference, relative to what is expected, from which on two are not of one class."""
NOISE_MAX = 0.5

_Where = tuple[int, int]
"""Workers and parameter servers."""


@dataclass(frozen=True, slots=True)
class _Mean:
    log: float
    count: float


_Class = dict[_Where, _Mean]


def trusted(own: SpeedStatistics, parts: Sequence[SpeedStatistics], period_last: int) -> SpeedStatistics:
    """What a cluster takes over from the others.

    Args:
        own: what it has seen itself.
        parts: what the others have; one each.
        period_last: cells of later periods are left out: somebody's calendar is wrong, and what is newest would make
            all the rest forgotten.
    """
    mine, theirs = _by_kind(own), [_by_kind(part) for part in parts]
    result = SpeedStatistics()
    for kind in sorted({kind for part in theirs for kind in part}):
        cells = [part.get(kind, []) for part in theirs]
        here = mine.get(kind, [])
        noise = _noise([*cells, here])
        for index in _agreeing(_means(here), [_means(one) for one in cells], noise):
            for cell, sums in cells[index]:
                if cell.period <= period_last:
                    result.add(cell, _discounted(sums, noise))
    return result


_Cells = list[tuple[SpeedCell, SpeedSums]]
"""Of one class in one cluster, sorted."""


def _by_kind(statistics: SpeedStatistics) -> dict[Kind, _Cells]:
    kinds: dict[Kind, _Cells] = {}
    for cell, sums in statistics:
        kinds.setdefault((cell.job_type, cell.accelerator), []).append((cell, sums))
    return kinds


def _means(cells: _Cells) -> _Class:
    """Over all periods."""
    sums: dict[_Where, SpeedSums] = {}
    for cell, one in cells:
        where = (cell.workers, cell.ps)
        sums[where] = sums.get(where, NONE) + one
    return {where: _Mean(one.total / one.count / UNIT, one.count) for where, one in sums.items()}


def _noise(classes: Sequence[_Cells]) -> float:
    """Standard deviation between jobs with the same allocation in the same cluster."""
    spare, free = NOISE_WEIGHT * NOISE**2, NOISE_WEIGHT
    for cells in classes:
        # However much a cluster claims to have seen, it says no more of the noise than a few jobs would.
        for one in (one for _, one in cells if one.count > 1):
            mean = one.total / one.count / UNIT
            spare += min(NOISE_MAX**2, max(0.0, one.squares / one.count / UNIT**2 - mean**2))
            free += 1 - 1 / one.count
    return float(min(NOISE_MAX, (spare / free) ** 0.5))


def _agreeing(own: _Class, parts: Sequence[_Class], noise: float) -> list[int]:
    """Which parts are of the same class as what was seen here, or as most of them where nothing was."""
    told = {index: _apart(own, part, noise) for index, part in enumerate(parts) if part}
    good = [index for index, apart in told.items() if apart is not None and apart <= FAR]
    unknown = [index for index, apart in told.items() if apart is None]
    middle = _middle([own, *(parts[index] for index in good or unknown)])
    for index in unknown:
        apart = _apart(middle, parts[index], noise)
        if apart is None or apart <= FAR:
            good.append(index)
    return sorted(good)


def _middle(classes: Sequence[_Class]) -> _Class:
    """The median over clusters by allocation: a minority cannot move it far."""
    by_where: dict[_Where, list[_Mean]] = {}
    for one in classes:
        for where, mean in one.items():
            by_where.setdefault(where, []).append(mean)
    return {
        where: _Mean(median(mean.log for mean in means), median(mean.count for mean in means))
        for where, means in by_where.items()
    }


def _apart(one: _Class, other: _Class, noise: float) -> float | None:
    """Mean squared difference relative to what is expected of one class; None where they have nothing in common."""
    both = one.keys() & other.keys()
    if not both:
        return None
    return sum(
        (one[where].log - other[where].log) ** 2
        / (LIKE**2 + noise**2 * (1 / one[where].count + 1 / other[where].count))
        for where in sorted(both)
    ) / len(both)


def _discounted(sums: SpeedSums, noise: float) -> SpeedSums:
    """The same mean and spread, of so many jobs as say as much as these do of another cluster."""
    count = max(1, round(sums.count / (1 + sums.count * (APART / noise) ** 2)))
    if count >= sums.count:
        return sums
    total = round(sums.total * count / sums.count)
    # Rounded up: no sum of squares is below what the mean alone makes of it.
    return SpeedSums(count, total, max(-(-sums.squares * count // sums.count), -(-(total**2) // count)))
