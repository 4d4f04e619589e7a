"""What clusters know of training speeds, as sums: exact to add, in any order, with no job and no time of day in them.

A cell is one job type on one accelerator type with so many workers and parameter servers, in one period of the
calendar. It holds how many jobs were seen there, and the sum and the sum of squares of the logarithms of their epochs
per second. Logarithms are whole numbers (2**16 to one of the natural logarithm), so a merge of statistics is a sum of
whole numbers: the same for every order and every split.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator

import msgspec

from fedsched.core.job import TASKS_MAX
from fedsched.core.record import Record

UNIT = 1 << 16
"""One of the natural logarithm."""
LOG_MAX = 40 * UNIT
"""No speed is further from an epoch a second than by this, either way."""
COUNT_MAX = 1_000_000
"""Jobs in a cell: so many that their sum of squares still fits into 64 bits."""


class SpeedCell(Record, frozen=True, order=True):
    """Where a speed was observed."""

    job_type: str
    accelerator: str
    workers: int
    ps: int
    period: int
    """Which stretch of the calendar; its length is the policy's."""


class SpeedSums(Record, frozen=True):
    """What was observed in a cell."""

    count: int
    total: int
    """Sum of logarithms, in units."""
    squares: int
    """Sum of their squares."""

    def __add__(self, other: SpeedSums) -> SpeedSums:
        return SpeedSums(self.count + other.count, self.total + other.total, self.squares + other.squares)

    def __sub__(self, other: SpeedSums) -> SpeedSums:
        return SpeedSums(self.count - other.count, self.total - other.total, self.squares - other.squares)


NONE = SpeedSums(0, 0, 0)


def observed(epochs_per_s: float) -> SpeedSums:
    """The sums of one observation; the speed is above 0."""
    log = round(math.log(epochs_per_s) * UNIT)
    log = max(-LOG_MAX, min(LOG_MAX, log))
    return SpeedSums(1, log, log * log)


class SpeedStatistics:
    """Sums by cell."""

    def __init__(self, sums: Iterable[tuple[SpeedCell, SpeedSums]] = ()) -> None:
        self._sums = dict(sums)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SpeedStatistics) and self._sums == other._sums

    __hash__ = None  # type: ignore[assignment]

    def __len__(self) -> int:
        return len(self._sums)

    def __iter__(self) -> Iterator[tuple[SpeedCell, SpeedSums]]:
        """All cells, sorted."""
        return iter(sorted(self._sums.items()))

    def at(self, cell: SpeedCell) -> SpeedSums:
        """The sums of a cell; zeros where nothing was observed."""
        return self._sums.get(cell, NONE)

    def add(self, cell: SpeedCell, sums: SpeedSums) -> None:
        """Count these observations too."""
        self._set(cell, self.at(cell) + sums)

    def replace(self, cell: SpeedCell, before: SpeedSums, after: SpeedSums) -> None:
        """Something that was counted is known better now."""
        self._set(cell, self.at(cell) - before + after)

    def merged(self, others: Iterable[SpeedStatistics]) -> SpeedStatistics:
        """All of it together, in a new object."""
        result = SpeedStatistics(self._sums.items())
        for other in others:
            for cell, sums in other._sums.items():
                result.add(cell, sums)
        return result

    def _set(self, cell: SpeedCell, sums: SpeedSums) -> None:
        if sums.count:
            self._sums[cell] = sums
        else:
            self._sums.pop(cell, None)

    @property
    def digest(self) -> str:
        """SHA-256 over all cells: equal statistics, equal digest."""
        return hashlib.sha256(msgspec.msgpack.encode(list(self))).hexdigest()

    @property
    def observations(self) -> int:
        """Jobs counted, over all cells."""
        return sum(sums.count for sums in self._sums.values())


def problem_with(statistics: SpeedStatistics) -> str:
    """What no honest observer could have summed up: one sentence, empty if there is nothing."""
    for cell, sums in statistics:
        where = f"job type {cell.job_type!r} with {cell.workers} workers and {cell.ps} parameter servers"
        if not 1 <= cell.workers <= TASKS_MAX or not 0 <= cell.ps <= TASKS_MAX:
            return f"{where}: 1 to {TASKS_MAX} workers and 0 to {TASKS_MAX} parameter servers were expected"
        if cell.period < 0:
            return f"{where}: period {cell.period} is before the first, 0"
        if not 1 <= sums.count <= COUNT_MAX:
            return f"{where}: {sums.count} observations; 1 to {COUNT_MAX} were expected"
        if abs(sums.total) > sums.count * LOG_MAX:
            mean = sums.total / sums.count / UNIT
            return f"{where}: the mean logarithm of its speed is {mean:g}; {LOG_MAX // UNIT} at most was expected"
        # A mean square is never below the square of the mean, and no square is above that of the largest logarithm.
        if not sums.total**2 <= sums.count * sums.squares or sums.squares > sums.count * LOG_MAX**2:
            return f"{where}: its sum of squares, {sums.squares}, does not go with its sum, {sums.total}"
    return ""
