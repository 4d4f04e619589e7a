"""Turns jobs of a trace, which held so many GPUs for so long, into jobs of a simulation, which are made of tasks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from fedsched.core.ids import ClusterName, JobId
from fedsched.core.job import TASKS_MAX, JobSpec, Range
from fedsched.core.resources import NOTHING, Resources
from fedsched.errors import InvalidTrace
from fedsched.sim.ports import Setting, SimulatedJob
from fedsched.sim.traces.record import TraceJob

RIGID, ELASTIC = "rigid", "elastic"
MILLI = 1000
MIB_PER_GIB = 1024
NO_PS = Range(0, 0)


@dataclass(frozen=True, slots=True)
class Elasticity:
    """Lets a job run on fewer and more workers than it had in the trace."""

    workers_min: int = 1
    grow: float = 2.0
    """At most this multiple of the workers that it had."""
    exponent: float = 1.0
    """So many workers train in proportion to their number to this power; 1 is linear."""


@dataclass(frozen=True, slots=True)
class GangShape:
    """How a number of GPUs becomes a gang of workers."""

    gpus_per_node: int | None = 8
    """A job that needs more gets whole nodes of so many; None keeps any job one worker, for pooled clusters."""
    cpus_per_gpu: float = 0.0
    """Cores of a worker for each GPU, where the trace names none."""
    memory_gib_per_gpu: float = 0.0
    """Memory of a worker for each GPU, where the trace names none."""
    data_gib: float = 0.0
    """What must be moved before a job can start in another cluster than its own."""
    elastic: Elasticity | None = None
    """None keeps every job as large as it was."""


def jobs_of(trace: Iterable[TraceJob], shape: GangShape) -> Iterator[SimulatedJob]:
    """The simulated jobs of a trace, one by one in its order, under its ids.

    A rigid job is a gang of equal workers with as many epochs as it ran seconds, and `RigidSpeed` is the truth about
    it. An elastic one has as many epochs more as its workers are worth under `ElasticSpeed` of the same exponent, so
    that on as many workers as in the trace it takes as long as it did. Both declare their true length, and have no
    parameter servers.

    Raises:
        InvalidTrace: a job would have more tasks than any job may.
    """
    for job in trace:
        yield simulated(job, shape)


def simulated(job: TraceJob, shape: GangShape) -> SimulatedJob:
    """The simulated job of one job of a trace; see `jobs_of`."""
    count, gpus = gang(job.num_gpu, shape.gpus_per_node)
    if count > TASKS_MAX:
        raise InvalidTrace(
            f"job {job.job_id} of {job.num_gpu:g} GPUs would have {count} workers; at most {TASKS_MAX} were expected",
            "give the shape more GPUs for each node",
        )
    elastic = shape.elastic
    workers = _range(count, elastic)
    epochs, expected_s = job.duration_s, job.duration_s
    if elastic is not None:
        epochs = job.duration_s * count**elastic.exponent
        expected_s = epochs / workers.minimum**elastic.exponent
    spec = JobSpec(
        job_id=JobId(job.job_id),
        name=job.job_id,
        run=RIGID if elastic is None else ELASTIC,
        workers=workers,
        ps=NO_PS,
        worker_demand=_demand(gpus, _each(job.cpus, count), _each(job.memory_gib, count), shape),
        ps_demand=NOTHING,
        epochs=epochs,
        job_type=RIGID if elastic is None else ELASTIC,
        queue=job.vc or "default",
        user=job.user,
        accelerators=job.accelerators,
        expected_s=expected_s,
        deadline_s=job.deadline_s,
        submitted_s=job.submit_s,
    )
    return SimulatedJob(spec, epochs, ClusterName(job.cluster), shape.data_gib)


def gang(num_gpu: float, gpus_per_node: int | None) -> tuple[int, float]:
    """How many workers hold `num_gpu` GPUs, and how many each.

    More than a node has become whole nodes, as in Philly and Helios; so a job may hold some more than it asked for.
    """
    if gpus_per_node is None:
        return 1, num_gpu
    return math.ceil(num_gpu / gpus_per_node), min(num_gpu, gpus_per_node)


def held_gpus(num_gpu: float, shape: GangShape) -> float:
    """GPUs that a job of the trace really takes in this shape."""
    count, gpus = gang(num_gpu, shape.gpus_per_node)
    return count * gpus


def _each(amount: float, count: int) -> float:
    return amount / count if amount else 0.0


@lru_cache(maxsize=1024)
def _range(count: int, elastic: Elasticity | None) -> Range:
    if elastic is None:
        return Range(count, count)
    return Range(min(elastic.workers_min, count), min(TASKS_MAX, max(count, math.floor(count * elastic.grow))))


@lru_cache(maxsize=4096)
def _demand(gpus: float, cpus: float, memory_gib: float, shape: GangShape) -> Resources:
    return Resources(
        cpu_milli=round((cpus or gpus * shape.cpus_per_gpu) * MILLI),
        memory_mib=round((memory_gib or gpus * shape.memory_gib_per_gpu) * MIB_PER_GIB),
        gpu_milli=round(gpus * MILLI),
    )


@dataclass(frozen=True, slots=True)
class RigidSpeed:
    """The truth about rigid jobs: an epoch a second while the whole gang is there, nothing with less."""

    def epochs(self, job: SimulatedJob, setting: Setting, elapsed_s: float) -> float:
        """As many as there are seconds, if the job holds all its workers."""
        return elapsed_s if setting.allocation.workers >= job.spec.workers.minimum else 0.0


@dataclass(frozen=True, slots=True)
class ElasticSpeed:
    """The truth about elastic jobs of a trace: the number of workers to a power, in epochs a second."""

    exponent: float = 1.0
    """The same as that of the elasticity by which the jobs were shaped."""

    def epochs(self, job: SimulatedJob, setting: Setting, elapsed_s: float) -> float:
        """None below the fewest workers, and for those above the most no more than for these."""
        workers = min(setting.allocation.workers, job.spec.workers.maximum)
        return elapsed_s * workers**self.exponent if workers >= job.spec.minimum.workers else 0.0
