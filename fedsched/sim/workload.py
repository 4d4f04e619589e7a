"""Draws jobs, and clusters for training, from a seed: from the size of the demo to a few dozen nodes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, TypeVar

from pydantic import AfterValidator, Field, model_validator

from fedsched.config import Tree
from fedsched.core.cluster import Node
from fedsched.core.ids import JobId, NodeName, stream
from fedsched.core.job import LENGTH_MAX_S, Allocation, JobSpec, Range
from fedsched.core.resources import Resources
from fedsched.sim.ports import SimulatedJob
from fedsched.sim.speed import SPEEDS

T = TypeVar("T")

JOBS_MAX = 10_000_000
MEMORY_MIB = 512
"""What every simulated task takes; CPUs are what is scarce here."""


def _is_known(job_type: str) -> str:
    if job_type not in SPEEDS:
        raise ValueError(f"no speed is known for job type {job_type}; known are {', '.join(sorted(SPEEDS))}")
    return job_type


JobType = Annotated[str, AfterValidator(_is_known)]
Cpus = Annotated[float, Field(ge=0.001)]
Count = Annotated[int, Field(ge=1)]


class JobMix(Tree):
    """What jobs are drawn from. Options are equally likely; one that is named twice is twice as likely.

    The defaults are the mix that `fedsched train supervised` watches its teacher on: other defaults would change the
    weights that it makes, and these must stay what ships.
    """

    job_types: tuple[JobType, ...] = Field(default=tuple(sorted(SPEEDS)), min_length=1)
    worker_cpus: tuple[Cpus, ...] = Field(default=(0.5, 1.0, 1.0, 2.0), min_length=1)
    ps_cpus: tuple[Cpus, ...] = Field(default=(0.5, 1.0), min_length=1)
    workers_max: int = Field(default=8, ge=1)
    """A job's own maximum is drawn from 1 to this; its minimum is 1."""
    ps_max: tuple[Count, ...] = Field(default=(1, 2, 2, 4), min_length=1)
    """A job's own maximum is one of these; its minimum is 1."""
    alone_s_min: float = Field(default=20.0, gt=0)
    """Lengths at one worker and one parameter server are log-uniform from this."""
    alone_s_max: float = Field(default=400.0, gt=0)
    """To this."""

    @model_validator(mode="after")
    def _lengths_are_ordered(self) -> JobMix:
        if self.alone_s_min > self.alone_s_max:
            raise ValueError(
                f"alone_s_min is {self.alone_s_min}; it must not be above alone_s_max ({self.alone_s_max})"
            )
        return self

    @property
    def largest_tasks(self) -> tuple[Resources, Resources]:
        """The most that one worker and one parameter server may need."""
        return _task(max(self.worker_cpus)), _task(max(self.ps_cpus))


class WorkloadConfig(JobMix):
    """A workload file: how many jobs of which mix come how fast."""

    kind: Literal["mix"] = "mix"
    jobs: int = Field(default=16, ge=1, le=JOBS_MAX)
    gap_s: float = Field(ge=0, le=LENGTH_MAX_S)
    """Mean time between arrivals, which are a Poisson process; 0: all at once."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """A cluster and the jobs that come to it; `submitted_s` of each is its arrival in virtual seconds."""

    nodes: tuple[Node, ...]
    jobs: tuple[JobSpec, ...]
    slot_length_s: float


def draw_jobs(workload: WorkloadConfig, seed: int) -> tuple[JobSpec, ...]:
    """The jobs of a declared workload, in order of arrival; the first comes at once."""
    gaps, draw = stream(seed, "workload/gaps").random, stream(seed, "workload/jobs").random
    arrived_s, specs = 0.0, []
    for index in range(workload.jobs):
        spec, _ = _job(index, arrived_s, workload, draw)
        specs.append(spec)
        arrived_s += -math.log(1 - gaps()) * workload.gap_s
    return tuple(specs)


class Mix:
    """The jobs of a declared mix, as a simulated world takes them: each is as long as it declares."""

    def __init__(self, config: WorkloadConfig) -> None:
        self._config = config

    def draw(self, seed: int) -> Iterator[SimulatedJob]:
        """The jobs of one run, in order of arrival."""
        return (SimulatedJob(spec, spec.epochs) for spec in draw_jobs(self._config, seed))


def draw_scenario(seed: int, *, jobs: int = 16) -> Scenario:
    """A cluster of 2 to 12 nodes under a load from light to twice what it can serve, all drawn from the seed."""
    cluster = stream(seed, "scenario/cluster").random
    node_count = int(2 * 6 ** cluster())  # log-uniform: small clusters as often as large ones
    cpus = _pick((4, 4, 8, 16), cluster)
    nodes = tuple(_node(index, cpus) for index in range(node_count))
    load = 0.4 + 1.6 * cluster()
    draw = stream(seed, "scenario/jobs").random
    arrived_s, specs, mix = 0.0, [], JobMix()
    for index in range(jobs):
        spec, cpu_s = _job(index, arrived_s, mix, draw)
        specs.append(spec)
        arrived_s += -math.log(1 - draw()) * cpu_s / (node_count * cpus * load)
    return Scenario(nodes, tuple(specs), slot_length_s=10.0)


def _node(index: int, cpus: int) -> Node:
    return Node(NodeName(f"node-{index:03d}"), Resources(cpus * 1000, cpus * 2 * MEMORY_MIB))


def _task(cpus: float) -> Resources:
    return Resources(round(cpus * 1000), MEMORY_MIB)


def _job(index: int, arrived_s: float, mix: JobMix, draw: Callable[[], float]) -> tuple[JobSpec, float]:
    """One job and the CPU seconds that it takes at one worker and one parameter server."""
    job_type = _pick(mix.job_types, draw)
    worker, ps = _task(_pick(mix.worker_cpus, draw)), _task(_pick(mix.ps_cpus, draw))
    ps_max = _pick(mix.ps_max, draw)
    workers = Range(1, 1 + int(draw() * mix.workers_max))
    alone_s = mix.alone_s_min * (mix.alone_s_max / mix.alone_s_min) ** draw()
    spec = JobSpec(
        job_id=JobId(f"job-{index:04d}"),
        name=f"{job_type}-{index}",
        run="simulated",
        workers=workers,
        ps=Range(1, ps_max),
        worker_demand=worker,
        ps_demand=ps,
        epochs=max(1.0, round(alone_s * SPEEDS[job_type](Allocation(1, 1)))),
        job_type=job_type,
        submitted_s=arrived_s,
    )
    return spec, alone_s * (worker.cpu_milli + ps.cpu_milli) / 1000


def _pick(options: Sequence[T], draw: Callable[[], float]) -> T:
    return options[int(draw() * len(options))]
