"""Gavel's trace on the product's own world: its core, loop and clock of rounds; only speeds are Gavel's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from fedsched.core.commands import Command, StopJob
from fedsched.core.events import Event
from fedsched.core.ids import ClusterName, JobId
from fedsched.core.job import JobSpec, Range
from fedsched.core.resources import Resources
from fedsched.policy.gavel import Gavel
from fedsched.policy.plugins import make
from fedsched.sim import world
from fedsched.sim.cluster import Rules, Setup
from fedsched.sim.ports import Setting, SimulatedJob
from fedsched.sim.speeds.costs import Costs
from tests.policy.gavel_rounds import ROUND_S, Speeds, TraceJob, nodes


class WholeSteps:
    """Gavel's speeds, in whole steps a round: what is left of it is idle."""

    def __init__(self, speeds: Speeds) -> None:
        self._speeds = speeds

    def epochs(self, job: SimulatedJob, setting: Setting, elapsed_s: float) -> float:
        """Steps; an epoch is one here."""
        speed = self._speeds[setting.accelerator, job.spec.job_type, setting.allocation.workers]
        rounds, rest_s = divmod(elapsed_s, ROUND_S)
        return rounds * int(speed * ROUND_S) + min(speed * rest_s, int(speed * ROUND_S))


@dataclass
class Run:
    """What came of it."""

    jct_s: dict[int, float] = field(default_factory=dict)
    stops: int = 0
    """Jobs that were stopped to make room or to change places."""
    slots: int = 0
    fallbacks: int = 0

    def see(self, event: Event, commands: Sequence[Command]) -> None:
        """Count stops."""
        self.stops += sum(isinstance(command, StopJob) for command in commands)


def run(policy: Gavel, jobs: list[TraceJob], speeds: Speeds, *, check: bool = False) -> Run:
    """Run all jobs to their ends under the policy."""
    found = Run()
    cluster = Setup(ClusterName("gavel"), nodes(), policy, make("fifo", {}), observers=(found.see,))
    rules = Rules(ROUND_S, store_s=0.0, costs=Costs("free"), keep_running=False, placement="pack")
    result = world.run([cluster], [_job(job, speeds) for job in jobs], WholeSteps(speeds), rules, check=check)
    assert result.complete
    found.jct_s = {int(outcome.job.spec.job_id): outcome.jct_s for outcome in result.outcomes}
    found.slots, found.fallbacks = result.slots, result.fallbacks
    return found


def _job(job: TraceJob, speeds: Speeds) -> SimulatedJob:
    spec = JobSpec(
        job_id=JobId(f"{job.number:04}"),
        name=str(job.number),
        run="",
        workers=Range(job.gpus, job.gpus),
        ps=Range(0, 0),
        worker_demand=Resources(gpu_milli=1000),
        ps_demand=Resources(),
        epochs=float(job.steps),
        job_type=job.job_type,
        accelerators=job.kinds(speeds),
        submitted_s=job.arrived_s,
    )
    return SimulatedJob(spec, float(job.steps))
