"""Says how much work an experiment offers its clusters, in the resource that is the scarcest."""

from __future__ import annotations

from dataclasses import dataclass

from fedsched.core.ids import JobId
from fedsched.core.job import Allocation
from fedsched.core.resources import Resources, total
from fedsched.core.routing import fits
from fedsched.sim.experiment import ExperimentConfig
from fedsched.sim.ports import Setting, SimulatedJob, TrueSpeeds

KINDS = ("GPU", "core", "GiB")
"""What a load can be scarce of."""


@dataclass(frozen=True, slots=True)
class OfferedLoad:
    """How much work comes, if every job ran at its minimum without ever waiting."""

    jobs: int
    arrivals_s: float
    """From the first arrival to the last."""
    resource: str
    """The scarcest: `GPU`, `core` or `GiB`."""
    wanted: float
    """Amount of it times hours."""
    offered: float
    """Amount of it on all nodes."""
    homeless: int = 0
    """Jobs whose minimum no cluster could hold, were it empty."""
    first_homeless: str = ""

    @property
    def ratio(self) -> float | None:
        """Work that comes while jobs arrive, relative to what the nodes could do; None where all come at once."""
        return self.wanted / (self.offered * self.arrivals_s / 3600) if self.arrivals_s and self.offered else None

    def __str__(self) -> str:
        jobs = f"{self.jobs:,} job{'s' if self.jobs != 1 else ''}"
        what = f"{jobs}, {_digits(self.wanted)} {self.resource}-hours of work"
        there = f"{self.offered:,g} {self.resource}{'s' if self.resource != 'GiB' and self.offered != 1 else ''}"
        if self.ratio is None:
            return f"{what}, come at once to {there}"
        return f"offered load {self.ratio:.2f}: {what}, come within {_length(self.arrivals_s)} to {there}"


def _digits(amount: float) -> str:
    """Three at least, and no exponent."""
    return f"{amount:,.0f}" if amount >= 100 else f"{amount:.3g}"


def _length(length_s: float) -> str:
    return f"{length_s:,.3g} s" if length_s < 600 else f"{_digits(length_s / 3600)} h"


def load_of(experiment: ExperimentConfig) -> OfferedLoad:
    """The load of the first seed's jobs, by the resource of which they want the largest share.

    Raises:
        FedschedError: a file that the jobs or their speeds need is not there or cannot be used.
    """
    speeds = experiment.speed_model(experiment.seed)
    jobs, first_s, last_s = 0, 0.0, 0.0
    nodes = [cluster.all_nodes() for cluster in experiment.clusters]
    held: dict[tuple[object, ...], bool] = {}
    homeless: list[JobId] = []
    wanted = [0.0] * len(KINDS)
    for job in experiment.jobs().draw(experiment.seed):
        last_s = job.spec.submitted_s
        first_s = last_s if jobs == 0 else first_s
        jobs += 1
        spec = job.spec
        demand = (spec.worker_demand, spec.ps_demand, spec.minimum, spec.accelerators)
        if demand not in held:
            held[demand] = any(fits(cluster, spec, spec.minimum) for cluster in nodes)
        if not held[demand]:
            homeless.append(spec.job_id)
        alone_s = _alone_s(job, speeds)
        for kind, amount in enumerate(_amounts(job.spec.demand_of(job.spec.minimum))):
            wanted[kind] += amount * alone_s
    capacity = total([node.capacity for cluster in nodes for node in cluster])
    offered = _amounts(capacity)
    most = max(range(len(KINDS)), key=lambda kind: wanted[kind] / offered[kind] if offered[kind] else 0.0)
    first = homeless[0] if homeless else ""
    return OfferedLoad(jobs, last_s - first_s, KINDS[most], wanted[most] / 3600, offered[most], len(homeless), first)


def _amounts(resources: Resources) -> tuple[float, float, float]:
    """In the order of `KINDS`."""
    return resources.gpu_milli / 1000, resources.cpu_milli / 1000, resources.memory_mib / 1024


def _alone_s(job: SimulatedJob, speeds: TrueSpeeds) -> float:
    """How long the job takes at its minimum; 0 where it cannot train with that."""
    least = job.spec.minimum
    # Without parameter servers most models know no speed; those that need none have none at most either.
    least = Allocation(least.workers, max(least.ps, min(1, job.spec.ps.maximum)))
    pace = speeds.epochs(job, Setting(least), 1.0)
    return job.epochs / pace if pace > 0 else 0.0
