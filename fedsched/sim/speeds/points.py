"""Reads measured training speeds from CSV: samples per second by model, parameter servers and workers."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from fedsched.errors import InvalidInput, NotFound
from fedsched.yamlfile import shown

Points = dict[tuple[int, int], float]
"""Samples per second by (parameter servers, workers)."""

LAYOUTS = (
    ("model", "num_ps", "num_worker", "total_speed_batches_per_s"),
    ("model", "ps", "worker", "samples_per_sec"),
)
"""Columns of a table of measurements, as `fedsched trace import dl2` writes it, and of a grid of interpolated speeds.

The first is named for batches by the publisher, but the numbers are samples."""
TASKS_MAX = 10_000


def read_points(path: Path) -> dict[str, Points]:
    """All measurements in a file, by model.

    Raises:
        NotFound: there is no such file.
        InvalidInput: the file or a row cannot be used; the message names line and column.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as problem:
        raise NotFound(f"there is no table of speeds {path}", "check the path") from problem
    except (OSError, UnicodeDecodeError) as problem:
        raise InvalidInput(f"cannot read {path}: {problem}", "a CSV file in UTF-8 was expected") from problem
    rows = csv.reader(text.splitlines())
    columns = _columns(path, next(rows, []))
    points: dict[str, Points] = {}
    for model, at, speed, line in _rows(path, rows, columns):
        if at in points.setdefault(model, {}):
            raise InvalidInput(
                f"{path}:{line}: {model} with {at[0]} parameter servers and {at[1]} workers was measured before",
                "keep one row of each",
            )
        points[model][at] = speed
    if not points:
        raise InvalidInput(f"{path} holds no measurement", "at least one row below the header was expected")
    return points


def _columns(path: Path, header: Sequence[str]) -> tuple[tuple[int, str], ...]:
    """Index and name of the four columns that are read."""
    names = [name.strip() for name in header]
    for layout in LAYOUTS:
        if set(layout) <= set(names):
            return tuple((names.index(name), name) for name in layout)
    expected = " or ".join(", ".join(layout) for layout in LAYOUTS)
    raise InvalidInput(
        f"{path}:1: the header is {shown(','.join(names))}; columns {expected} were expected",
        "`fedsched trace import dl2 config_speed.txt OUT` writes such a table from DL2's original",
    )


def _rows(
    path: Path, rows: Iterator[Sequence[str]], columns: tuple[tuple[int, str], ...]
) -> Iterator[tuple[str, tuple[int, int], float, int]]:
    (model_at, _), ps_column, worker_column, (speed_at, speed_name) = columns
    for line, row in enumerate(rows, start=2):
        if not row:
            continue
        if len(row) <= max(index for index, _ in columns):
            raise InvalidInput(f"{path}:{line}: the row has {len(row)} fields; the header has more", "check the row")
        try:
            speed = float(row[speed_at])
        except ValueError:
            speed = math.nan
        if not 0 <= speed < math.inf:
            problem = f"{speed_name} is {shown(row[speed_at])}; samples per second were expected"
            raise InvalidInput(f"{path}:{line}: {problem}", "a measurement that failed is written as 0, or left out")
        at = (_count(path, line, row, ps_column), _count(path, line, row, worker_column))
        yield row[model_at].strip(), at, speed, line


def _count(path: Path, line: int, row: Sequence[str], column: tuple[int, str]) -> int:
    index, name = column
    text = row[index].strip()
    if not text.isascii() or not text.isdigit() or len(text) > len(str(TASKS_MAX)) or not 1 <= int(text) <= TASKS_MAX:
        raise InvalidInput(
            f"{path}:{line}: {name} is {shown(text)}; a whole number from 1 to {TASKS_MAX} was expected",
            "jobs without parameter servers do not belong in this table",
        )
    return int(text)
