"""Imports DL2's measured speeds (config_speed.txt of repository pengyanghua/DL2) as a table that the speed models read.

Each line of the original is a Python tuple: model, synchronisation mode, total batch size, parameter servers,
workers, speed of each worker, CPU use of each parameter server, CPU use of each worker. The table has the sum of the
workers' speeds, which is what DL2 reads, and means of the others. Failed measurements, which are zeros, are kept: DL2
interpolates through them.
"""

from __future__ import annotations

import ast
import csv
import io
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedsched.errors import InvalidTrace
from fedsched.files import write_whole
from fedsched.sim.traces import reading
from fedsched.sim.traces.record import BadRow, Refusal, Refusals, SkipReason
from fedsched.yamlfile import shown

COLUMNS = (
    "model",
    "sync_mode",
    "total_batch_size",
    "num_ps",
    "num_worker",
    "total_speed_batches_per_s",
    "mean_worker_speed",
    "mean_ps_cpu",
    "mean_worker_cpu",
)
DIGITS = 6
FIELDS = 8


def import_table(path: Path, out: Path, refused: Refusals) -> int:
    """Write the table of the original `path` to `out`.

    Returns:
        How many measurements it has.

    Raises:
        NotFound: there is no such file.
        InvalidTrace: no line of it can be used; nothing is written.
        OSError: it could not be written.
    """
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(COLUMNS)
    count = 0
    for row in _rows(path, refused):
        rows.writerow(row)
        count += 1
    if not count:
        why = f"; {refused.kept[0]}" if refused.kept else ""
        raise InvalidTrace(f"{path} holds no measurement{why}", "the original is config_speed.txt of pengyanghua/DL2")
    write_whole(out, text.getvalue().encode())
    return count


def _rows(path: Path, refused: Refusals) -> Iterator[tuple[Any, ...]]:
    seen: set[tuple[Any, ...]] = set()
    with reading.opened(path) as text:
        for line, source in reading.lines(text):
            try:
                row = _row(source)
                key = (row[0], row[1], row[3], row[4])
                if key in seen:
                    raise BadRow(
                        SkipReason.REPEATED_ID, "", f"{row[0]} with {row[3]} ps and {row[4]} workers was there before"
                    )
            except BadRow as bad:
                refused.add(Refusal(path, line, bad.field, bad.reason, bad.problem))
                continue
            seen.add(key)
            yield row


def _row(source: str) -> tuple[Any, ...]:
    if len(source) > reading.LINE_MAX_CHARS:
        raise BadRow(SkipReason.UNREADABLE, "", f"is longer than {reading.LINE_MAX_CHARS} characters")
    try:
        fields = ast.literal_eval(source.strip())
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError) as problem:
        raise BadRow(SkipReason.UNREADABLE, "", "is no tuple of values") from problem
    if not isinstance(fields, tuple) or len(fields) != FIELDS:
        raise BadRow(SkipReason.MISSING, "", f"is {shown(fields)}; a tuple of {FIELDS} was expected")
    model, mode, *rest = fields
    batch, ps, workers = (_count(value, name) for value, name in zip(rest[:3], COLUMNS[2:5], strict=True))
    for value, name in ((model, "model"), (mode, "sync_mode")):
        if not isinstance(value, str) or not value or not value.isprintable():
            raise BadRow(SkipReason.MISSING, name, f"is {shown(value)}; a name was expected")
    speeds = _numbers(rest[3], workers, "worker speeds")
    ps_cpu = _numbers(rest[4], ps, "ps cpu use")
    worker_cpu = _numbers(rest[5], workers, "worker cpu use")
    total = math.fsum(speeds)
    means = (math.fsum(values) / len(values) for values in (speeds, ps_cpu, worker_cpu))
    return (model, mode, batch, ps, workers, _short(total), *(_short(mean) for mean in means))


def _count(value: object, name: str) -> int:
    if not isinstance(value, int) or not 1 <= value <= reading.GPUS_MAX:
        raise BadRow(SkipReason.NOT_A_NUMBER, name, f"is {shown(value)}; a whole number from 1 was expected")
    return value


def _numbers(values: object, length: int, name: str) -> list[float]:
    if not isinstance(values, list) or len(values) != length:
        raise BadRow(SkipReason.MISSING, name, f"is {shown(values)}; a list of {length} was expected")
    for value in values:
        if not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise BadRow(SkipReason.NOT_A_NUMBER, name, f"has {shown(value)}; a number from 0 was expected")
    return values


def _short(value: float) -> str:
    return repr(round(value, DIGITS))
