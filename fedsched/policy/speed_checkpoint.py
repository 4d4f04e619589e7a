"""Statistics of speeds as one safetensors file that says how they were made and proves that it is whole."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedsched.core.speeds import UNIT, SpeedCell, SpeedStatistics, SpeedSums, problem_with
from fedsched.errors import CorruptCheckpoint
from fedsched.files import write_whole
from fedsched.policy.checkpoint import MALFORMED, Made, contents, seal, unsealed

FORMAT = "fedsched/learned_speed/1"
BUILTIN = Path(__file__).parent / "checkpoints" / "learned_speed-v1.safetensors"
"""What ships with the package."""
HINT = "restore it from a backup, use what ships (checkpoint: builtin), or run: fedsched train speeds"

COLUMNS = ("job_type", "accelerator", "workers", "ps", "period", "count", "total", "squares")
"""Of the table of cells; the first two are indices into the card's lists of names."""


@dataclass(frozen=True, slots=True, eq=False)
class SpeedCheckpoint:
    """Statistics and their story."""

    statistics: SpeedStatistics
    made: Made

    @property
    def digest(self) -> str:
        """SHA-256 of the statistics, whatever their story: equal statistics, equal digest."""
        return _digest(*_table(self.statistics))

    def to_bytes(self) -> bytes:
        """The file's contents; the same checkpoint always gives the same bytes."""
        job_types, accelerators, table = _table(self.statistics)
        card = {
            "format": FORMAT,
            "unit": UNIT,
            "job_types": job_types,
            "accelerators": accelerators,
            "digest": _digest(job_types, accelerators, table),
            "made": dict(self.made),
        }
        return seal({"cells": table}, card)

    def save(self, path: Path) -> None:
        """Write the file so that a reader never sees a part of it."""
        write_whole(path, self.to_bytes())


def load(path: Path) -> SpeedCheckpoint:
    """Read and verify a file of statistics.

    Raises:
        CorruptCheckpoint: it cannot be read, is damaged, is not one of ours, or holds what nobody can have observed.
    """
    return from_bytes(contents(path, "statistics", HINT), str(path))


def from_bytes(data: bytes, origin: str = "received statistics") -> SpeedCheckpoint:
    """Verify a file's contents; `origin` names them in errors.

    Raises:
        CorruptCheckpoint: see `load`.
    """
    try:
        arrays, card = unsealed(data)
        table = arrays["cells"]
        if card["format"] != FORMAT or card["unit"] != UNIT:
            raise ValueError(f"made for {card['format']} with {card['unit']} units to a logarithm")
        job_types = [str(name) for name in card["job_types"]]
        accelerators = [str(name) for name in card["accelerators"]]
        statistics = _statistics(job_types, accelerators, table)
        made, promised = dict(card["made"]), str(card["digest"])
    except MALFORMED as problem:
        raise CorruptCheckpoint(
            f"{origin} is no whole file of statistics ({type(problem).__name__}: {problem}); "
            f"expected a safetensors file of format {FORMAT}",
            HINT,
        ) from problem
    wrong = problem_with(statistics)
    if wrong:
        raise CorruptCheckpoint(f"{origin} holds what nobody can have observed: {wrong}", HINT)
    actual = _digest(job_types, accelerators, table)
    if actual != promised:
        raise CorruptCheckpoint(f"{origin} is damaged: its cells have digest {actual}; expected {promised}", HINT)
    return SpeedCheckpoint(statistics, made)


def _table(statistics: SpeedStatistics) -> tuple[list[str], list[str], NDArray[np.int64]]:
    cells = list(statistics)
    job_types = sorted({cell.job_type for cell, _ in cells})
    accelerators = sorted({cell.accelerator for cell, _ in cells})
    # Whoever sends statistics may name as many types as it likes.
    type_number = {name: number for number, name in enumerate(job_types)}
    accelerator_number = {name: number for number, name in enumerate(accelerators)}
    rows = [
        (
            type_number[cell.job_type],
            accelerator_number[cell.accelerator],
            cell.workers,
            cell.ps,
            cell.period,
            sums.count,
            sums.total,
            sums.squares,
        )
        for cell, sums in cells
    ]
    return job_types, accelerators, np.array(rows, dtype=np.int64).reshape(len(rows), len(COLUMNS))


def _statistics(job_types: list[str], accelerators: list[str], table: NDArray[np.int64]) -> SpeedStatistics:
    if table.dtype != np.int64 or table.ndim != 2 or table.shape[1] != len(COLUMNS):
        raise ValueError(
            f"cells are {table.dtype} of shape {list(table.shape)}; int64 of {len(COLUMNS)} columns expected"
        )
    found: dict[SpeedCell, SpeedSums] = {}
    for job_type, accelerator, workers, ps, period, count, summed, squares in table.tolist():
        if not (0 <= job_type < len(job_types) and 0 <= accelerator < len(accelerators)):
            raise ValueError(f"a cell is of job type number {job_type}; there are {len(job_types)} names")
        cell = SpeedCell(job_types[job_type], accelerators[accelerator], workers, ps, period)
        if cell in found:
            raise ValueError(f"a cell is there twice: {cell}")
        found[cell] = SpeedSums(count, summed, squares)
    return SpeedStatistics(found.items())


def _digest(job_types: list[str], accelerators: list[str], table: NDArray[np.int64]) -> str:
    sha = hashlib.sha256(json.dumps([job_types, accelerators]).encode())
    sha.update(np.ascontiguousarray(table).tobytes())
    return sha.hexdigest()
