"""Imports traces of Tiresias's simulator (NSDI'19), repository SymbioticLab/Tiresias, and of Muri (SIGCOMM'22).

Layouts read, told apart by their columns:
- Tiresias: job_id, num_gpu, submit_time, iterations, model_name, duration, interval; times in seconds
- Muri: these and batch_size, iteration_time, resource_time_*, priority; times in milliseconds
- golden traces: job_id, num_gpu, submit_s, duration_s
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from fedsched.sim.traces import plain, reading
from fedsched.sim.traces.record import Refusals, TraceJob

MURI_MARK = "resource_time_0"
MURI_PER_SECOND = 1000.0


def read(path: Path, refused: Refusals) -> Iterator[TraceJob]:
    """The jobs of a Tiresias or Muri trace, in its order.

    Raises:
        NotFound: there is no such file.
        InvalidTrace: its header is of none of these layouts.
    """
    with reading.table(path) as (header, numbered):
        per_second = MURI_PER_SECOND if header.has(MURI_MARK) else 1.0
        build = plain.builder(
            header.column("job_id"),
            header.column("num_gpu"),
            header.column("submit_time", "submit_s", per_unit=per_second),
            header.column("duration", "duration_s", per_unit=per_second),
            plain.Extras(model=header.optional("model_name"), batch_size=header.optional("batch_size")),
        )
        yield from reading.jobs(path, numbered, build, refused)
