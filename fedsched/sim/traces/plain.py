"""The plain CSV form, which is also the normal form: what `fedsched trace import` writes and every workload reads.

Columns job_id, num_gpu, submit_s and duration_s must be there, in any order; those of `COLUMNS` may be, and any
others are ignored. Submissions count from the trace's beginning; rows may come in any order.
"""

from __future__ import annotations

import csv
import gzip
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from fedsched.files import whole
from fedsched.sim.traces import reading
from fedsched.sim.traces.reading import Column, Header
from fedsched.sim.traces.record import Refusals, TraceJob

COLUMNS = (
    "job_id",
    "num_gpu",
    "submit_s",
    "duration_s",
    "cluster",
    "vc",
    "user",
    "model",
    "batch_size",
    "deadline_s",
    "weight",
    "cpus",
    "memory_gib",
    "accelerators",
)
BETWEEN_ACCELERATORS = "|"
CPUS_MAX, MEMORY_MAX_GIB, WEIGHT_MAX, BATCH_MAX = 1e6, 1e9, 1e9, 1e12


@dataclass(frozen=True, slots=True)
class Extras:
    """Columns that a trace may have beside the four that it must have; a reader of them for one header."""

    cluster: Column | None = None
    vc: Column | None = None
    user: Column | None = None
    model: Column | None = None
    batch_size: Column | None = None
    deadline_s: Column | None = None
    weight: Column | None = None
    cpus: Column | None = None
    memory_gib: Column | None = None
    accelerators: Column | None = None

    @property
    def any(self) -> bool:
        """Whether there is any such column."""
        return any(getattr(self, name) is not None for name in COLUMNS[4:])

    def job(self, row: Sequence[str], job_id: str, submit_s: float, duration_s: float, num_gpu: float) -> TraceJob:
        """The job with these four fields and what the row says beside."""
        batch_size = _number(self.batch_size, row, BATCH_MAX)
        weight = _number(self.weight, row, WEIGHT_MAX)
        types = _text(self.accelerators, row)
        return TraceJob(
            job_id,
            submit_s,
            duration_s,
            num_gpu,
            cluster=_text(self.cluster, row),
            vc=_text(self.vc, row),
            user=_text(self.user, row),
            model=_text(self.model, row),
            batch_size=None if batch_size is None else int(batch_size),
            deadline_s=_number(self.deadline_s, row, reading.SUBMIT_MAX_S),
            weight=1.0 if weight is None else weight,
            cpus=_number(self.cpus, row, CPUS_MAX) or 0.0,
            memory_gib=_number(self.memory_gib, row, MEMORY_MAX_GIB) or 0.0,
            accelerators=tuple(types.split(BETWEEN_ACCELERATORS)) if types else (),
        )


def _text(column: Column | None, row: Sequence[str]) -> str:
    return "" if column is None else column.text(row)


def _number(column: Column | None, row: Sequence[str], maximum: float) -> float | None:
    """A number that may be left out."""
    text = _text(column, row)
    return reading.number(text, column.name, maximum) if column is not None and text else None


def builder(
    job_id: Column, num_gpu: Column, submit_s: Column, duration_s: Column, extras: Extras
) -> Callable[[int, str], TraceJob]:
    """What makes a job of a line, for any table with the four columns."""
    make = extras.job if extras.any else _bare

    def build(_: int, line: str) -> TraceJob:
        row = reading.split(line)
        return make(row, job_id.name_of(row), submit_s.submit_s(row), duration_s.duration_s(row), num_gpu.gpus(row))

    return build


def _bare(row: Sequence[str], job_id: str, submit_s: float, duration_s: float, num_gpu: float) -> TraceJob:
    return TraceJob(job_id, submit_s, duration_s, num_gpu)


def read(path: Path, refused: Refusals) -> Iterator[TraceJob]:
    """The jobs of a plain CSV file, in its order.

    Raises:
        NotFound: there is no such file.
        InvalidTrace: its header is not of this form.
    """
    with reading.table(path) as (header, numbered):
        job_id, num_gpu, submit_s, duration_s = (header.column(name) for name in COLUMNS[:4])
        build = builder(job_id, num_gpu, submit_s, duration_s, _extras(header))
        yield from reading.jobs(path, numbered, build, refused)


def _extras(header: Header) -> Extras:
    return Extras(**{name: header.optional(name) for name in COLUMNS[4:]})


def write(path: Path, jobs: Iterable[TraceJob]) -> int:
    """Write the normal form as the jobs come; the file is there when all are, packed if its name ends in .gz.

    Returns:
        How many jobs there were. Without any, nothing is written.

    Raises:
        OSError: it could not be written; what was there before is still there.
    """
    coming = iter(jobs)
    first = next(coming, None)
    if first is None:
        return 0
    count = 1
    with whole(path) as raw, _packed(path, raw) as stream, io.TextIOWrapper(stream, "utf-8", newline="") as text:
        rows = csv.writer(text, lineterminator="\n")
        rows.writerow(COLUMNS)
        rows.writerow(_row(first))
        for count, job in enumerate(coming, 2):  # noqa: B007 - counts to the last one
            rows.writerow(_row(job))
    return count


def _packed(path: Path, raw: BinaryIO) -> BinaryIO:
    # Without a time stamp in it, the same jobs make the same bytes.
    return cast(BinaryIO, gzip.GzipFile(filename="", fileobj=raw, mode="wb", mtime=0)) if path.suffix == ".gz" else raw


def _row(job: TraceJob) -> tuple[object, ...]:
    return (
        job.job_id,
        _short(job.num_gpu),
        _short(job.submit_s),
        _short(job.duration_s),
        job.cluster,
        job.vc,
        job.user,
        job.model,
        "" if job.batch_size is None else job.batch_size,
        "" if job.deadline_s is None else _short(job.deadline_s),
        _short(job.weight),
        _short(job.cpus),
        _short(job.memory_gib),
        BETWEEN_ACCELERATORS.join(job.accelerators),
    )


def _short(value: float) -> str:
    """The shortest text that reads as the same number."""
    return str(int(value)) if float(value).is_integer() else repr(float(value))
