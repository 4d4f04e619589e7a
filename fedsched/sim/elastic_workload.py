"""Jobs of two kinds that scale unlike each other: some with parameter servers, some that reduce among their workers.

Arrivals, durations and sizes are drawn from parameters that were fitted to a trace. A job draws its model; its work is
what that model, by its own curve, does in the drawn duration: with the drawn number of GPUs, or on one worker and one
parameter server. So short and long jobs are mixed as in the trace, while workers matter for some models (up to ten
times as fast on sixteen), parameter servers for others, and neither for the rest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import Field

from fedsched.config import Tree
from fedsched.core.ids import JobId, stream
from fedsched.core.job import Allocation, JobSpec, Range
from fedsched.core.resources import NOTHING, Resources
from fedsched.policy.optimus import SpeedCurve
from fedsched.sim.dl2_workload import CLASSES, job_of
from fedsched.sim.ports import Setting, SimulatedJob
from fedsched.sim.speeds.analytic import AnalyticSpeeds
from fedsched.sim.speeds.coefficients import load_analytic, load_scaling, shipped
from fedsched.sim.speeds.scaling import ScalingCurve, ScalingSpeeds
from fedsched.sim.traces.config import FittedWorkloadConfig
from fedsched.sim.traces.record import TraceJob

ACCELERATOR = "A100"
GPUS_PER_NODE = 8
ONE_EACH = Allocation(1, 1)
WORKER = Resources(cpu_milli=4000, gpu_milli=1000)


class ElasticWorkloadConfig(Tree):
    """The workload."""

    kind: Literal["elastic"]
    fit: str = Field(default="itp", min_length=1)
    """Name of parameters that come with the package, or a YAML file of `fedsched trace fit`."""
    clusters: tuple[str, ...] = ()
    """Only these of the fit's clusters; none named means all."""
    jobs: int = Field(default=200, ge=1)
    rate: float = Field(default=1.0, gt=0)
    """Jobs come so many times as often as in the trace."""
    servers_share: float = Field(default=0.5, ge=0, le=1)
    """Of jobs with parameter servers."""
    tasks_max: int = Field(default=16, ge=1, le=1000)
    """Of the workers, and of the parameter servers, of such a job."""
    workers_max: int = Field(default=32, ge=1, le=1000)
    """Of the workers of the others."""

    def workload(self, base: Path = Path()) -> ElasticWorkload:
        """The workload.

        Args:
            base: folder that relative paths start from.

        Raises:
            NotFound, InvalidConfiguration: see `FittedWorkloadConfig.workload`.
        """
        return ElasticWorkload(self, base)


class ElasticWorkload:
    """Draws the jobs."""

    def __init__(self, config: ElasticWorkloadConfig, base: Path) -> None:
        self._config = config
        self._arrivals = FittedWorkloadConfig(
            fit=config.fit, clusters=config.clusters, jobs=config.jobs, rate=config.rate, pooled=True
        ).workload(base)
        self._served, self._reducing = served_curves(), reducing_curves()

    def draw(self, seed: int) -> Iterator[SimulatedJob]:
        """The jobs of one run in order of arrival."""
        chance = stream(seed, "elastic").random
        for number, record in enumerate(self._arrivals.records(seed), start=1):
            served, at = chance() < self._config.servers_share, chance()
            yield self._with_servers(number, record, at) if served else self._without(record, at)

    def _with_servers(self, number: int, record: TraceJob, at: float) -> SimulatedJob:
        job_class = CLASSES[int(at * len(CLASSES))]
        epochs = max(1, round(record.duration_s * self._served[job_class.model](ONE_EACH)))
        return job_of(number, job_class, record.submit_s, epochs, epochs, self._config.tasks_max)

    def _without(self, record: TraceJob, at: float) -> SimulatedJob:
        models = sorted(self._reducing)
        model = models[int(at * len(models))]
        gpus = max(1, min(self._config.workers_max, round(record.num_gpu)))
        epochs = record.duration_s * self._reducing[model](gpus, math.ceil(gpus / GPUS_PER_NODE))
        spec = JobSpec(
            job_id=JobId(record.job_id),
            name=record.job_id,
            run="simulated",
            workers=Range(1, self._config.workers_max),
            ps=Range(0, 0),
            worker_demand=WORKER,
            ps_demand=NOTHING,
            epochs=epochs,
            job_type=model,
            submitted_s=record.submit_s,
        )
        return SimulatedJob(spec, epochs)


def served_curves() -> dict[str, SpeedCurve]:
    """Of the models with parameter servers, fitted to DL2's measurements."""
    return load_analytic(shipped("dl2_fitted"))


def reducing_curves() -> dict[str, ScalingCurve]:
    """Of the others, fitted to ElasticFlow's measurements on A100; an iteration is an epoch."""
    return load_scaling(shipped("scaling_fitted"))[ACCELERATOR]


class ElasticSpeeds:
    """The truth about such jobs, on any cluster."""

    def __init__(self) -> None:
        self._served = AnalyticSpeeds(served_curves())
        self._reducing = ScalingSpeeds({"": reducing_curves()})

    def epochs(self, job: SimulatedJob, setting: Setting, elapsed_s: float) -> float:
        """Epochs in `elapsed_s`, as if all GPUs were those that were measured."""
        if job.spec.ps.maximum:
            return self._served.epochs(job, setting, elapsed_s)
        alike = Setting(setting.allocation, "", setting.nodes, setting.neighbours)
        return self._reducing.epochs(job, alike, elapsed_s)
