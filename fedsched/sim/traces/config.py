"""Workloads of a scenario that come from a trace or from parameters fitted to one: configuration and jobs."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import msgspec
from pydantic import Field, model_validator

from fedsched.config import Tree
from fedsched.errors import InvalidTrace, NotFound
from fedsched.sim import datafiles, fit_drawing, trace_fit
from fedsched.sim.ports import SimulatedJob
from fedsched.sim.traces import gavel
from fedsched.sim.traces.formats import read
from fedsched.sim.traces.names import TraceFormat
from fedsched.sim.traces.record import Refusals, TraceJob
from fedsched.sim.traces.shaping import Elasticity, GangShape, jobs_of

COPIES_MAX = 10_000


class ElasticConfig(Tree):
    """Lets a job run on fewer and more workers than it had in the trace."""

    workers_min: int = Field(default=1, ge=1)
    grow: float = Field(default=2.0, ge=1)
    """At most this multiple of the workers that it had."""
    exponent: float = Field(default=1.0, gt=0, le=1)
    """So many workers train in proportion to their number to this power; 1 is linear."""


class ShapeConfig(Tree):
    """How a number of GPUs becomes a gang of workers."""

    gpus_per_node: int | None = Field(default=8, ge=1)
    """A job that needs more gets whole nodes of so many; null keeps any job one worker, for pooled clusters."""
    cpus_per_gpu: float = Field(default=0.0, ge=0)
    memory_gib_per_gpu: float = Field(default=0.0, ge=0)
    data_gib: float = Field(default=0.0, ge=0)
    """What must be moved before a job can start in another cluster than its own."""
    elastic: ElasticConfig | None = None
    """Without it every job stays as large as it was."""

    def shape(self) -> GangShape:
        """The shape as the code that makes jobs knows it."""
        elastic = None if self.elastic is None else Elasticity(**self.elastic.model_dump())
        return GangShape(**{**dict(self), "elastic": elastic})


class WindowConfig(Tree):
    """A part of a trace, in its own time."""

    start_s: float = Field(default=0.0, ge=0)
    end_s: float = Field(gt=0)
    """Jobs submitted at this moment or later are left out."""

    @model_validator(mode="after")
    def _is_in_order(self) -> WindowConfig:
        if self.end_s <= self.start_s:
            raise ValueError(f"end_s is {self.end_s:g}; it must be above start_s ({self.start_s:g})")
        return self


class TraceWorkloadConfig(Tree):
    """Jobs of a trace, as they came."""

    kind: Literal["trace"] = "trace"
    file: str = Field(min_length=1)
    """A path, or `data:<folder>/<file>` for public data in the folder that FEDSCHED_DATA names."""
    format: TraceFormat = TraceFormat.CSV
    shape: ShapeConfig = ShapeConfig()
    window: WindowConfig | None = None
    """Without it the whole trace, from its first submission."""
    jobs_max: int | None = Field(default=None, ge=1)
    """So many of the first jobs."""
    rate: float = Field(default=1.0, gt=0)
    """Jobs come so many times as fast after each other."""
    cluster: str = ""
    """Where jobs were submitted that name no cluster themselves."""
    throughputs: str = ""
    """For the format gavel: the table of throughputs; else it is looked for beside the trace."""
    worker_type: str = gavel.WORKER_TYPE
    """For the format gavel: whose throughputs turn steps into seconds."""

    @model_validator(mode="after")
    def _throughputs_are_of_use(self) -> TraceWorkloadConfig:
        wrong = gavel.problem_for(self.format, self.throughputs, self.worker_type)
        if wrong:
            raise ValueError(wrong)
        return self

    def workload(self, base: Path = Path()) -> TraceWorkload:
        """The workload; nothing is read before jobs are drawn.

        Args:
            base: folder that relative paths start from.

        Raises:
            NotFound: a file is not there; the message says how to get it.
        """
        throughputs = datafiles.resolve(self.throughputs, base) if self.throughputs else None
        return TraceWorkload(self, datafiles.resolve(self.file, base), throughputs)


@dataclass
class TraceWorkload:
    """Jobs of a trace, the same for every seed. The file is read once, when the first job is asked for."""

    config: TraceWorkloadConfig
    path: Path
    throughputs: Path | None = None

    @property
    def shape(self) -> GangShape:
        """How GPUs become tasks."""
        return self.config.shape.shape()

    @cached_property
    def _read(self) -> tuple[list[TraceJob], Refusals]:
        refused = Refusals()
        form, worker_type = self.config.format, self.config.worker_type
        jobs = list(read(self.path, form, refused, throughputs=self.throughputs, worker_type=worker_type))
        if refused.first_malformed is not None:
            raise InvalidTrace(
                f"{refused.first_malformed}; {refused.malformed} row(s) of {self.path} cannot be read",
                f"leave them out with `fedsched trace import {form} {self.path} OUT.csv`, and use that",
            )
        return jobs, refused

    @property
    def left_out(self) -> Refusals:
        """Rows of the file that are as they should be and yet make no GPU job."""
        return self._read[1]

    @cached_property
    def records(self) -> list[TraceJob]:
        """The jobs in order of arrival, in the time of the workload.

        Raises:
            InvalidTrace: a row is malformed; the message names the first. Or no job is left.
        """
        window = self.config.window
        start_s, end_s = (window.start_s, window.end_s) if window is not None else (0.0, math.inf)
        jobs = sorted((job for job in self._read[0] if start_s <= job.submit_s < end_s), key=lambda job: job.submit_s)[
            : self.config.jobs_max
        ]
        if not jobs:
            raise self._empty()
        begin_s = start_s if window is not None else jobs[0].submit_s
        return [self._moved(job, begin_s) for job in jobs]

    def _empty(self) -> InvalidTrace:
        found, refused = self._read
        window = self.config.window
        if window is not None and found:
            within = f"between {window.start_s:g} s and {window.end_s:g} s"
            return InvalidTrace(f"none of the {len(found)} jobs of {self.path} comes {within}", "check the window")
        if refused.total:
            return InvalidTrace(f"none of the {refused.total} rows of {self.path} is a GPU job", "check the file")
        return InvalidTrace(f"{self.path} has no rows", "check the file: jobs were expected, one a row")

    def _moved(self, job: TraceJob, begin_s: float) -> TraceJob:
        submit_s = (job.submit_s - begin_s) / self.config.rate
        # A job keeps the time that it has until its deadline, however fast others come.
        deadline_s = None if job.deadline_s is None else submit_s + (job.deadline_s - job.submit_s)
        cluster = job.cluster or self.config.cluster
        return msgspec.structs.replace(job, submit_s=submit_s, deadline_s=deadline_s, cluster=cluster)

    def draw(self, seed: int) -> Iterator[SimulatedJob]:
        """The jobs, in order of arrival; the same for any seed.

        Raises:
            InvalidTrace: a row is malformed, or no job is left.
        """
        return jobs_of(self.records, self.shape)


class FittedWorkloadConfig(Tree):
    """Jobs drawn from parameters that were fitted to a trace."""

    kind: Literal["fitted"] = "fitted"
    fit: str = Field(min_length=1)
    """Name of parameters that come with the package, or a YAML file of `fedsched trace fit`."""
    days: float | None = Field(default=None, gt=0)
    jobs: int | None = Field(default=None, ge=1)
    """How many; the run ends with the days or the jobs, whichever is reached first."""
    rate: float = Field(default=1.0, gt=0)
    """Jobs come so many times as often as in the trace."""
    clusters: tuple[str, ...] = ()
    """Only these of the fit's clusters; none named means all."""
    copies: int = Field(default=1, ge=1, le=COPIES_MAX)
    """Each cluster is there so many times, with jobs of its own, under names that end in -1, -2 and so on."""
    pooled: bool = False
    """Jobs of all clusters come to one place, so they have no origin."""
    shape: ShapeConfig = ShapeConfig()

    @model_validator(mode="after")
    def _ends(self) -> FittedWorkloadConfig:
        if self.days is None and self.jobs is None:
            raise ValueError("days or jobs must say where it ends")
        return self

    def workload(self, base: Path = Path()) -> FittedWorkload:
        """The workload; nothing is drawn yet.

        Args:
            base: folder that relative paths start from.

        Raises:
            NotFound: there are no such parameters, or no such cluster in them.
            InvalidConfiguration: the parameters have problems.
        """
        fit = trace_fit.load_fit(self.fit, base)
        names = [cluster.name for cluster in fit.clusters]
        for name in self.clusters:
            if name not in names:
                raise NotFound(f"the fit {self.fit} has no cluster {name}", f"its clusters are {', '.join(names)}")
        chosen = [cluster for cluster in fit.clusters if not self.clusters or cluster.name in self.clusters]
        return FittedWorkload(self, tuple(copy for cluster in chosen for copy in _copies(cluster, self.copies)))


def _copies(cluster: trace_fit.ClusterFit, count: int) -> list[trace_fit.ClusterFit]:
    if count == 1:
        return [cluster]
    return [cluster.model_copy(update={"name": f"{cluster.name}-{number}"}) for number in range(1, count + 1)]


@dataclass(frozen=True)
class FittedWorkload:
    """Jobs drawn from fitted parameters: others for each seed, and no more of them in memory than a chunk."""

    config: FittedWorkloadConfig
    clusters: tuple[trace_fit.ClusterFit, ...]

    @property
    def shape(self) -> GangShape:
        """How GPUs become tasks."""
        return self.config.shape.shape()

    def chunks(self, seed: int) -> Iterator[fit_drawing.Drawn]:
        """The jobs as columns, in order of arrival."""
        days = math.inf if self.config.days is None else self.config.days
        left = math.inf if self.config.jobs is None else self.config.jobs
        for chunk in fit_drawing.draw(self.clusters, seed, rate=self.config.rate, days=days):
            if len(chunk) >= left:
                yield chunk.first(int(left))
                return
            left -= len(chunk)
            yield chunk

    def records(self, seed: int) -> Iterator[TraceJob]:
        """The jobs one by one, in order of arrival; ids sort as they arrive."""
        names = [("" if self.config.pooled else cluster.name) for cluster in self.clusters]
        prefix = re.sub(r"\W+", "-", Path(self.config.fit).stem)
        before = 0
        for chunk in self.chunks(seed):
            columns = (chunk.submit_s, chunk.duration_s, chunk.gpus, chunk.cluster)
            rows = zip(*(column.tolist() for column in columns), strict=True)
            for number, (submit_s, duration_s, gpus, cluster) in enumerate(rows, before + 1):
                yield TraceJob(f"{prefix}-{number:08d}", submit_s, duration_s, gpus, cluster=names[cluster])
            before += len(chunk)

    def draw(self, seed: int) -> Iterator[SimulatedJob]:
        """The jobs of one run in order of arrival, the same for the same seed; made as they are asked for."""
        return jobs_of(self.records(seed), self.shape)
