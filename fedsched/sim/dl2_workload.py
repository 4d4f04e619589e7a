"""The workload generator of DL2's public research code: eight classes of jobs that come slot by slot.

A seed gives the same jobs there and here, because all draws come from numpy's legacy generator in the same order:

1. pattern `poisson` only: one hundred draws of its counts;
2. where in the pattern the run starts, 0 to 4;
3. per job: its class; with `lengths_vary` its percentage of the class's length; the error of its declared length, which
   is drawn even where no error is wanted.

The lists behind the original's `Google_Trace` arrivals are not ours to ship. `uneven` is a pattern of our own that
stands for them: the same mean and extremes as those lists have once capped. Who has the lists gives one as `counts`.
The original's `Ali_Trace` has no data at all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, model_validator

from fedsched.config import Tree
from fedsched.core.ids import JobId, stream
from fedsched.core.job import JobSpec, Range
from fedsched.core.resources import Resources
from fedsched.sim.ports import SimulatedJob

NODE = Resources(cpu_milli=8000, gpu_milli=2000)
"""One machine of the reference's cluster. It knows no memory."""

_PS = Resources(cpu_milli=2000)
_GPU_WORKER = Resources(cpu_milli=2000, gpu_milli=1000)
_CPU_WORKER = Resources(cpu_milli=2000)

PATTERN_SLOTS = 100
"""After as many slots the patterns `uniform` and `poisson` begin again."""
UNEVEN_SLOTS = 75
STARTS = 5
"""A run starts at one of the first so many slots of its pattern."""
DAY_S = 86_400.0
NIGHT = 0.2
"""Arrivals at the quietest hour of the pattern `diurnal`, as a fraction of the busiest."""


@dataclass(frozen=True, slots=True)
class JobClass:
    """One kind of job."""

    model: str
    """The model that it trains: its `job_type`."""
    length: float
    """Its epochs, as a fraction of the workload's `epochs_max`."""
    epoch_samples: int
    """Samples in what the reference calls an epoch."""
    worker_demand: Resources = _GPU_WORKER
    ps_demand: Resources = _PS


CLASSES = (
    JobClass("resnet-50", 0.30, 115),
    JobClass("vgg-16", 0.96, 115),
    JobClass("resnext-110", 0.05, 390),
    JobClass("inception-bn", 0.54, 120),
    JobClass("seq2seq", 0.95, 780),
    JobClass("cnn-text-classification", 0.46, 193, worker_demand=_CPU_WORKER),
    JobClass("dssm", 0.33, 349, worker_demand=_CPU_WORKER),
    JobClass("wlm", 0.23, 165),
)
"""In the reference's order; its type 1 is the first."""

EPOCH_SAMPLES = {job_class.model: job_class.epoch_samples for job_class in CLASSES}
"""Samples in an epoch, by job type."""


class Dl2WorkloadConfig(Tree):
    """What the reference calls its parameters; the defaults are those of its large setting, the paper's scale."""

    pattern: Literal["uniform", "poisson", "uneven", "diurnal"] = "uneven"
    """Jobs that arrive per slot: always `arrivals_max`; Poisson with that mean, capped at it; on average 60 % of it; or
    by the time of day."""
    counts: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """A pattern of your own in place of `pattern`: jobs per slot, capped at `arrivals_max`, over and over."""
    jobs: int = Field(default=200, ge=1)
    arrivals_max: int = Field(default=10, ge=1)
    """Per slot."""
    epochs_max: int = Field(default=30_000, ge=20)
    """The longest class has nearly as many epochs, the shortest a twentieth."""
    tasks_max: int = Field(default=16, ge=1, le=10_000)
    """Of a job's workers, and of its parameter servers."""
    slot_length_s: float = Field(default=1200.0, gt=0)
    """What the reference calls a slot; arrivals fall on its starts."""
    classes: int = Field(default=len(CLASSES), ge=1, le=len(CLASSES))
    """Only the first so many classes occur."""
    lengths_vary: bool = False
    """Whether jobs of one class have 90 to 109 % of its length, instead of all the same."""
    length_error: float = Field(default=0.0, ge=0, lt=1)
    """How far the true length may be from the declared one, either way, as a fraction of it."""

    @model_validator(mode="after")
    def _something_arrives(self) -> Dl2WorkloadConfig:
        if self.counts and not any(self.counts):
            raise ValueError("counts are all 0; at least one slot must bring a job")
        return self


class Dl2Workload:
    """Draws the generator's jobs."""

    def __init__(self, config: Dl2WorkloadConfig) -> None:
        self._config = config

    def draw(self, seed: int) -> Iterator[SimulatedJob]:
        """The jobs of one run in order of arrival, one by one.

        Args:
            seed: 0 to 2**32 - 1, of numpy's legacy generator.
        """
        random = np.random.RandomState(seed)
        counts = _counts(self._config, random)
        start = int(random.randint(STARTS))
        number, slot = 0, 0
        while number < self._config.jobs:
            arrivals = min(self._config.arrivals_max, counts[(slot + start) % len(counts)])
            for _ in range(min(arrivals, self._config.jobs - number)):
                number += 1
                yield _job(self._config, number, slot, random)
            slot += 1


def _counts(config: Dl2WorkloadConfig, random: np.random.RandomState) -> Sequence[int]:
    """Jobs per slot before they are capped."""
    most = config.arrivals_max
    if config.counts:
        return config.counts
    match config.pattern:
        case "uniform":
            return [most] * PATTERN_SLOTS
        case "poisson":
            return [int(count) for count in random.poisson(most, PATTERN_SLOTS)]
        case "uneven":
            draw = stream(most, "dl2/uneven").random
            return [math.ceil(most * (0.3 + 0.6 * draw())) for _ in range(UNEVEN_SLOTS)]
        case "diurnal":
            slots = max(1, round(DAY_S / config.slot_length_s))
            return [max(1, round(most * _busy(slot / slots))) for slot in range(slots)]


def _busy(day: float) -> float:
    """Arrivals at this point of the day (0 to 1), as a fraction of those at its busiest, the afternoon."""
    return NIGHT + (1 - NIGHT) * (1 - math.cos(2 * math.pi * (day - 4 / 24))) / 2


def _job(config: Dl2WorkloadConfig, number: int, slot: int, random: np.random.RandomState) -> SimulatedJob:
    job_class = CLASSES[int(random.randint(0, config.classes))]
    declared = int(job_class.length * config.epochs_max)
    if config.lengths_vary:
        declared = max(1, int(declared * int(random.randint(90, 110)) / 100))
    error = config.length_error * (2 * float(random.rand()) - 1)
    return job_of(number, job_class, slot * config.slot_length_s, declared, (1 + error) * declared, config.tasks_max)


def job_of(
    number: int, job_class: JobClass, arrives_s: float, declared: int, true: float, tasks_max: int
) -> SimulatedJob:
    """The `number`-th job, with 1 to `tasks_max` workers and as many parameter servers."""
    tasks = Range(1, tasks_max)
    spec = JobSpec(
        job_id=job_id(number),
        name=f"{job_class.model}-{number}",
        run="simulated",
        workers=tasks,
        ps=tasks,
        worker_demand=job_class.worker_demand,
        ps_demand=job_class.ps_demand,
        epochs=float(declared),
        job_type=job_class.model,
        submitted_s=arrives_s,
    )
    return SimulatedJob(spec, true)


def job_id(number: int) -> JobId:
    """The id of the `number`-th job, counted from 1; ids sort like numbers."""
    return JobId(f"dl2-{number:06d}")
