"""Workloads of single clusters side by side: each has a mix of its own, and its jobs are submitted there."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from msgspec import structs
from pydantic import Discriminator, Field, Tag

from fedsched.config import Name, Tree
from fedsched.core.ids import JobId
from fedsched.problems import KIND, kind_or
from fedsched.sim.dl2_workload import Dl2Workload, Dl2WorkloadConfig
from fedsched.sim.ports import SimulatedJob, Workload
from fedsched.sim.seeds import apart
from fedsched.sim.workload import Mix, WorkloadConfig


class LocalDl2Config(Dl2WorkloadConfig):
    """One cluster's jobs by DL2's generator."""

    kind: Literal["dl2"]


LocalWorkload = Annotated[
    Annotated[WorkloadConfig, Tag(f"{KIND}mix")] | Annotated[LocalDl2Config, Tag(f"{KIND}dl2")],
    Discriminator(
        kind_or("mix"),
        custom_error_type="unknown_kind",
        custom_error_message="there is no such kind of local workload; dl2 or mix (or no kind) was expected",
    ),
]


class LocalWorkloadsConfig(Tree):
    """A workload file with a part per cluster; `routing: origin` leaves the jobs where they were submitted."""

    kind: Literal["local"]
    clusters: dict[Name, LocalWorkload] = Field(min_length=1)
    """By the name of the cluster."""

    def workload(self, base: Path = Path()) -> Workload:
        """The workload; it needs no files."""
        return LocalWorkloads(self)


class LocalWorkloads:
    """Draws all clusters' jobs in one order of arrival."""

    def __init__(self, config: LocalWorkloadsConfig) -> None:
        self._config = config

    def draw(self, seed: int) -> Iterator[SimulatedJob]:
        """The jobs of one run. Those of a cluster depend on its own mix and place only."""
        own = [
            self._of(name, config, apart(seed, index))
            for index, (name, config) in enumerate(sorted(self._config.clusters.items()))
        ]
        return heapq.merge(*own, key=lambda job: (job.spec.submitted_s, job.spec.job_id))

    def _of(self, cluster: str, config: WorkloadConfig | LocalDl2Config, seed: int) -> Iterator[SimulatedJob]:
        source = Mix(config) if isinstance(config, WorkloadConfig) else Dl2Workload(config)
        for job in source.draw(seed):
            job_id = JobId(f"{cluster}-{job.spec.job_id}")
            yield structs.replace(job, spec=structs.replace(job.spec, job_id=job_id), origin=cluster)
