"""Which of the other clusters' statistics a cluster uses, class by class, and how much of them.

Nothing but its name says that a class of one cluster is that of another (`type` in the job's file). Where the name is
the same and the models are not, or where a cluster sends what nobody can tell from speeds, sums of all would mislead
everybody. So a class is believed per cluster:

* What a cluster has seen itself is compared with what each of the others says of the class, each allocation with the
  nearest. Where they are further apart than chance, different machines (`LIKE`) and the distance (`STEEP`) explain,
  that cluster's part of the class is left out.
* A class of which the cluster has seen nothing is judged by the median over the others, without what only one of them
  has seen. Of two that contradict each other neither is used.
* Where there is nothing to compare a class with, its cluster is believed.
* But who contradicts the rest, us above all, in more classes than it agrees with them is not heard at all: not about
  what nobody else has seen, nor as a witness against the only other one that has seen a class. (When a liar was left
  out only class by class, each class that it and one honest cluster had seen was lost at first: eight clusters took 8.2
  slots to come within 5 % of the best instead of 5.5; without a liar they take 5.4.)
* Of what is used each part counts as if its cluster were off by `APART` of its own: however many jobs it has seen, it
  says no more than that allows. What was seen here counts in full, so in the end it decides.

All of it follows from the statistics alone, in whatever order they came.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log2
from statistics import median

import numpy as np

from fedsched.core.speeds import NONE, UNIT, SpeedCell, SpeedStatistics, SpeedSums
from fedsched.policy.speed_model import NOISE, NOISE_WEIGHT, Floats, Kind, place

LIKE = 0.15
"""Standard deviation, in logarithms, between clusters whose jobs are of one class."""
STEEP = 0.5
"""Standard deviation of what a doubling of either role does to the logarithm of a class's speed."""
APART = 0.05
"""How far a cluster's speeds of a class are off as a whole, for the weight of what it says."""
FAR = 4.0
"""Mean squared difference, relative to what is expected, from which on two are not of one class."""
NOISE_MAX = 0.5
OWN_WORDS = 2
"""What was seen here counts as much as what so many others have seen, when it is asked who contradicts the rest."""
AGAINST = -1
"""Who contradicts in so many classes more than it agrees in is still heard: it may be the other one who is wrong."""

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
    kinds = sorted({kind for part in theirs for kind in part})
    noises = {kind: _noise([*(part.get(kind, []) for part in theirs), mine.get(kind, [])]) for kind in kinds}
    here = {kind: _means(cells) for kind, cells in mine.items()}
    there = [{kind: _means(cells) for kind, cells in part.items()} for part in theirs]
    believed = _believed(here, there, noises)
    result = SpeedStatistics()
    for kind in kinds:
        # Who contradicts the rest does not contradict one honest witness of a class either.
        shown = [there[index].get(kind, {}) if index in believed else {} for index in range(len(parts))]
        for index, right in _verdicts(here.get(kind, {}), shown, noises[kind]).items():
            if right is False:
                continue
            for cell, sums in theirs[index][kind]:
                if cell.period <= period_last:
                    result.add(cell, _discounted(sums, noises[kind]))
    return result


def _believed(
    here: Mapping[Kind, _Class], there: Sequence[Mapping[Kind, _Class]], noises: Mapping[Kind, float]
) -> set[int]:
    """Parts that do not contradict the rest more often than they agree with it.

    Every class that two have seen is one word for or against both. One after the other who is contradicted most is
    left out, and with it all that it says of the others.
    """
    words = _words(here, there, noises)
    left = set(range(len(there)))
    while left:
        standing = {index: words[index][index] + sum(words[index][other] for other in left - {index}) for index in left}
        worst = min(standing.values())
        if worst >= AGAINST:
            break
        left -= {index for index in left if standing[index] == worst}
    return left


def _words(
    here: Mapping[Kind, _Class], there: Sequence[Mapping[Kind, _Class]], noises: Mapping[Kind, float]
) -> list[list[int]]:
    """By two parts, classes in which they agree less those in which they do not; of a part with itself: with us."""
    words = [[0] * len(there) for _ in there]
    for kind, noise in noises.items():
        own = here.get(kind)
        seen = [(index, part[kind]) for index, part in enumerate(there) if kind in part]
        for number, (index, one) in enumerate(seen):
            if own:
                words[index][index] += OWN_WORDS * _word(own, one, noise)
            for other, another in seen[number + 1 :]:
                word = _word(one, another, noise)
                words[index][other] += word
                words[other][index] += word
    return words


def _word(one: _Class, other: _Class, noise: float) -> int:
    """1 where two that saw a class agree about it, -1 where they contradict each other, 0 where nobody can tell."""
    shared = sorted(one.keys() & other.keys())
    if not shared:
        return -1 if _apart(one, other, noise) > FAR else 0
    apart = [
        (one[at].log - other[at].log) ** 2 / (LIKE**2 + noise**2 * (1 / one[at].count + 1 / other[at].count))
        for at in shared
    ]
    return 1 if sum(apart) / len(apart) <= FAR else -1


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


def _verdicts(own: _Class, parts: Sequence[_Class], noise: float) -> dict[int, bool | None]:
    """Whether each part is of the same class as what was seen here, or as most of them where nothing was.

    None: there is nothing to compare it with.
    """
    there = [index for index, part in enumerate(parts) if part]
    if own:
        like = [index for index in there if _apart(own, parts[index], noise) <= FAR]
        # Who has tried the same as we have says what to think of those who have tried something else.
        friends = [index for index in like if own.keys() & parts[index].keys()]
        known = _middle([own, *(parts[index] for index in friends)])
        return {
            index: index in friends or (index in like and _apart(known, parts[index], noise) <= FAR) for index in there
        }
    middle = _middle([parts[index] for index in there])
    seen = Counter(where for index in there for where in parts[index])
    verdicts: dict[int, bool | None] = {}
    for index in there:
        # What only one has seen is no witness for it.
        others = {at: mean for at, mean in middle.items() if at not in parts[index] or seen[at] > 1}
        verdicts[index] = _apart(others, parts[index], noise) <= FAR if others else None
    return verdicts


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


def _apart(one: _Class, other: _Class, noise: float) -> float:
    """Mean squared difference relative to what is expected of one class, between allocations that are nearest."""
    here, there = _table(one), _table(other)
    distance = np.abs(there[:, None, :2] - here[None, :, :2]).sum(axis=2)
    nearest = here[distance.argmin(axis=1)]
    expected = LIKE**2 + (STEEP * distance.min(axis=1)) ** 2 + noise**2 * (1 / nearest[:, 3] + 1 / there[:, 3])
    return float(((there[:, 2] - nearest[:, 2]) ** 2 / expected).mean())


def _table(one: _Class) -> Floats:
    """By allocation, sorted: where it lies in doublings, mean and count."""
    return np.array([[log2(at[0]), place(at[1]), mean.log, mean.count] for at, mean in sorted(one.items())])


def _discounted(sums: SpeedSums, noise: float) -> SpeedSums:
    """The same mean and spread, of so many jobs as say as much as these do of another cluster."""
    count = max(1, round(sums.count / (1 + sums.count * (APART / noise) ** 2)))
    if count >= sums.count:
        return sums
    total = round(sums.total * count / sums.count)
    # Rounded up: no sum of squares is below what the mean alone makes of it.
    return SpeedSums(count, total, max(-(-sums.squares * count // sums.count), -(-(total**2) // count)))
