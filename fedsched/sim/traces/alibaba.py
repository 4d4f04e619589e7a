"""Imports Alibaba's GPU-sharing trace of 2023 (FGD, ATC'23): alibaba/clusterdata, cluster-trace-gpu-v2023.

Layout read: openb_pod_list_default.csv and its gpuspec variants: name, cpu_milli, memory_mib, num_gpu, gpu_milli,
gpu_spec, qos, pod_phase, creation_time, deletion_time, scheduled_time; seconds from the beginning. Lists that were
sampled for a mix of sizes (multigpu*, cpu*, gpushare*) have no times and are no traces.

A pod is a job of one node. It ran from scheduled_time to deletion_time whatever its phase; pods that were never
scheduled and those without a GPU are refused. `gpu_milli` is the share of a GPU where num_gpu is 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from fedsched.sim.traces import plain, reading
from fedsched.sim.traces.record import BadRow, Refusals, SkipReason, TraceJob

MILLI = 1000.0
MIB_PER_GIB = 1024.0
NO_SPEC = ("", "nan")


def read(path: Path, refused: Refusals) -> Iterator[TraceJob]:
    """The pods of an openb list, in its order.

    Raises:
        NotFound: there is no such file.
        InvalidTrace: it has not the columns of this layout.
    """
    with reading.table(path) as (header, numbered):
        name, num_gpu = header.column("name"), header.column("num_gpu")
        share = header.column("gpu_milli", per_unit=MILLI)
        created, deleted = header.column("creation_time"), header.column("deletion_time")
        scheduled, spec = header.column("scheduled_time"), header.optional("gpu_spec")
        cpu, memory = header.column("cpu_milli", per_unit=MILLI), header.column("memory_mib", per_unit=MIB_PER_GIB)

        def build(_: int, line: str) -> TraceJob:
            row = reading.split(line)
            gpus = num_gpu.gpus(row)
            if not scheduled.text(row):
                raise BadRow(SkipReason.NEVER_RAN, scheduled.name, "is empty; the pod never ran")
            length_s = deleted.submit_s(row) - scheduled.submit_s(row)
            if length_s < 0:
                raise BadRow(
                    SkipReason.END_BEFORE_START, deleted.name, f"is {deleted.text(row)}, before it was scheduled"
                )
            types = "" if spec is None else spec.text(row)
            return TraceJob(
                name.name_of(row),
                created.submit_s(row),
                reading.positive(length_s, deleted.name),
                share.gpus(row) if gpus == 1 else gpus,
                cpus=cpu.number(row, plain.CPUS_MAX),
                memory_gib=memory.number(row, plain.MEMORY_MAX_GIB),
                accelerators=() if types in NO_SPEC else tuple(types.split("|")),
            )

        yield from reading.jobs(path, numbered, build, refused)
