"""Imports Microsoft ITP traces as published for ElasticFlow (ASPLOS'23), repository microsoft/elasticflow-traces.

Layouts read, told apart by their columns:
- published raw trace: job_id, submission_time, duration, num_gpu
- published ElasticFlow trace: these and num_iteration, model_name, deadline, batch_size, all drawn at random by its
  authors
- ElasticFlow's own simulator input: job_id, submit_time, ..., model_name, ddl, batch_size, num_gpu, duration
- normalised tables: job_id, submit_s, duration_s, num_gpu, perhaps cluster, and the drawn columns under names with
  syn_

Times are seconds from the beginning of the collection, deadlines moments in the same count.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from fedsched.sim.traces import plain, reading
from fedsched.sim.traces.record import Refusals, TraceJob


def read(path: Path, refused: Refusals) -> Iterator[TraceJob]:
    """The jobs of an ITP trace, in its order.

    Raises:
        NotFound: there is no such file.
        InvalidTrace: its header is of none of these layouts.
    """
    with reading.table(path) as (header, numbered):
        build = plain.builder(
            header.column("job_id"),
            header.column("num_gpu"),
            header.column("submission_time", "submit_time", "submit_s"),
            header.column("duration", "duration_s"),
            plain.Extras(
                cluster=header.optional("cluster"),
                model=header.optional("model_name", "syn_model"),
                batch_size=header.optional("batch_size", "syn_batch_size"),
                deadline_s=header.optional("deadline", "ddl", "syn_deadline_s"),
            ),
        )
        yield from reading.jobs(path, numbered, build, refused)
