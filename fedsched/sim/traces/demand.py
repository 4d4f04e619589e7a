"""How much a trace asks of a cluster: jobs, span, GPU-hours and offered load."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from fedsched.sim.traces.record import TraceJob
from fedsched.sim.traces.shaping import GangShape, held_gpus

HOUR_S = 3600.0


@dataclass(slots=True)
class Demand:
    """Sums over the jobs of a workload."""

    jobs: int = 0
    first_submit_s: float = math.inf
    last_submit_s: float = -math.inf
    gpu_seconds: float = 0.0
    """GPUs held times time, over all jobs."""
    gpus_max: float = 0.0
    """The largest job."""

    def add(self, submit_s: float, duration_s: float, gpus: float) -> None:
        """Count one job in."""
        self.jobs += 1
        self.first_submit_s = min(self.first_submit_s, submit_s)
        self.last_submit_s = max(self.last_submit_s, submit_s)
        self.gpu_seconds += duration_s * gpus
        self.gpus_max = max(self.gpus_max, gpus)

    @property
    def span_s(self) -> float:
        """From the first submission to the last."""
        return max(0.0, self.last_submit_s - self.first_submit_s)

    @property
    def gpu_hours(self) -> float:
        """GPUs held times time, in hours."""
        return self.gpu_seconds / HOUR_S

    @property
    def gpus(self) -> float | None:
        """GPU-seconds wanted per second of the span; None where all jobs come at once."""
        return self.gpu_seconds / self.span_s if self.span_s > 0 else None

    def load(self, capacity_gpus: float) -> float | None:
        """The offered load: GPU-seconds wanted per second over `capacity_gpus`; above 1 the queue grows without end."""
        return None if self.gpus is None else self.gpus / capacity_gpus


def counted(jobs: Iterable[TraceJob], demand: Demand, shape: GangShape | None = None) -> Iterator[TraceJob]:
    """The same jobs, counted in as they pass; with a shape, by what they hold instead of what they asked for."""
    for job in jobs:
        demand.add(job.submit_s, job.duration_s, job.num_gpu if shape is None else held_gpus(job.num_gpu, shape))
        yield job
