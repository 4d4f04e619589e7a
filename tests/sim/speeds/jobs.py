"""Jobs and settings to ask speed models about."""

from __future__ import annotations

from fedsched.core.ids import JobId
from fedsched.core.job import Allocation, JobSpec, Range
from fedsched.core.resources import Resources
from fedsched.sim.ports import Setting, SimulatedJob


def job(kind: str = "any", *, name: str = "a", workers: int = 16, gpus: float = 0, ps_least: int = 1) -> SimulatedJob:
    """A job of so many workers at most, each with so many GPUs."""
    spec = JobSpec(
        job_id=JobId(name),
        name=name,
        run="simulated",
        workers=Range(1, workers),
        ps=Range(ps_least, 16),
        worker_demand=Resources(1000, 0, round(gpus * 1000)),
        ps_demand=Resources(1000),
        epochs=10.0,
        job_type=kind,
    )
    return SimulatedJob(spec, 10.0)


def at(workers: int, ps: int = 1, *, on: str = "", nodes: int = 1, neighbours: int = 0) -> Setting:
    """A setting."""
    return Setting(Allocation(workers, ps), on, nodes, neighbours)
