"""Imports SenseTime Helios traces (SC'21), repository S-Lab-System-Group/HeliosData.

Layouts read, told apart by their columns:
- published cluster_log.csv: job_id, user, vc, gpu_num, cpu_num, node_num, state, submit_time, start_time, end_time,
  duration, queue; dates and times without a zone
- normalised tables: job_id, vc, submit_s, duration_s, num_gpu, perhaps user_hash

Submissions of the published layout count from the earliest one in the file. Whatever state a job ended in, it held
its GPUs as long as `duration` says, so every state is a job. About half of the published rows are CPU jobs; those are
refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from fedsched.sim.traces import plain, reading
from fedsched.sim.traces.reading import Header
from fedsched.sim.traces.record import BadRow, Refusals, SkipReason, TraceJob


def read(path: Path, refused: Refusals) -> Iterator[TraceJob]:
    """The jobs of a Helios trace, in its order.

    Raises:
        NotFound: there is no such file.
        InvalidTrace: its header is of none of these layouts.
    """
    with reading.table(path) as (header, numbered):
        if header.has("submit_time"):
            yield from _published(path, header, numbered, refused)
            return
        build = plain.builder(
            header.column("job_id"),
            header.column("num_gpu"),
            header.column("submit_s"),
            header.column("duration_s"),
            plain.Extras(vc=header.optional("vc"), user=header.optional("user_hash", "user")),
        )
        yield from reading.jobs(path, numbered, build, refused)


def _published(
    path: Path, header: Header, numbered: Iterator[tuple[int, str]], refused: Refusals
) -> Iterator[TraceJob]:
    job_id, user, vc = (header.column(name) for name in ("job_id", "user", "vc"))
    gpu_num, duration = header.column("gpu_num"), header.column("duration")
    submit_time, start_time, end_time = (header.column(name) for name in ("submit_time", "start_time", "end_time"))
    with reading.table(path) as (_, once):
        begin_s = reading.earliest(once, submit_time)

    def build(_: int, line: str) -> TraceJob:
        row = reading.split(line)
        gpus = gpu_num.gpus(row)
        if end_time.unix_s(row) < start_time.unix_s(row):
            raise BadRow(SkipReason.END_BEFORE_START, end_time.name, f"is {end_time.text(row)}, before it started")
        return TraceJob(
            job_id.name_of(row),
            submit_time.unix_s(row) - begin_s,
            duration.duration_s(row),
            gpus,
            vc=vc.text(row),
            user=user.text(row),
        )

    yield from reading.jobs(path, numbered, build, refused)
