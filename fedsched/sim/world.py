"""A federation in virtual time: jobs come, are routed to clusters, and each runs the agent's own core and loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from fedsched.core.decision import Policy
from fedsched.core.ids import ClusterName
from fedsched.core.job import JobPhase, JobStatus
from fedsched.errors import InvalidInput
from fedsched.learn.learner import ClusterLearner
from fedsched.runtime.loop import Observer
from fedsched.sim.clock import ARRIVAL, VirtualClock
from fedsched.sim.cluster import Rules, Setup, SimulatedCluster, Transcript
from fedsched.sim.faults import Faults
from fedsched.sim.ports import SimulatedJob, TrueSpeeds
from fedsched.sim.routing import Router
from fedsched.sim.speed import SPEEDS
from fedsched.sim.speeds.analytic import AnalyticSpeeds
from fedsched.sim.speeds.costs import Costs
from fedsched.sim.workload import Scenario

if TYPE_CHECKING:
    from fedsched.sim.federation import Federation

CLUSTER = ClusterName("simulated")
"""The only one of a drawn scenario."""
USUAL_COSTS = Costs("free", fixed={"start_s": 1.0, "scale_s": 0.2, "stop_s": 0.5})
"""Of small jobs whose processes are at hand."""

Over = Callable[[SimulatedJob, JobStatus], None]


class World:
    """Clusters and the jobs that come to them.

    Args:
        clusters: at least one; names are unique.
        jobs: in order of arrival; taken one by one, so there may be millions.
        speeds: how fast jobs really train.
        routing: to which cluster a job goes; see `Router`.
        transfer_gib_per_s: how fast a job's data moves to another cluster than its origin; it waits for that.
        check: look at all of the scheduler's invariants after every event.
        transcribe: keep a digest of everything that happens.
        over: hears of every job that has ended.

    Raises:
        InvalidInput: jobs do not come in order of arrival, or name a cluster that is not there.
    """

    def __init__(
        self,
        clusters: Sequence[Setup],
        jobs: Iterable[SimulatedJob],
        speeds: TrueSpeeds,
        rules: Rules,
        *,
        routing: Literal["best", "origin", "two_choices"] = "best",
        transfer_gib_per_s: float = 1.0,
        seed: int = 0,
        check: bool = False,
        transcribe: bool = False,
        over: Over | None = None,
    ) -> None:
        self.clock = VirtualClock()
        self._jobs: Iterator[SimulatedJob] = iter(jobs)
        self._transfer_gib_per_s = transfer_gib_per_s
        self._over = over
        self._journal = Transcript() if transcribe else None
        self.clusters: dict[ClusterName, SimulatedCluster] = {
            setup.name: SimulatedCluster(
                self.clock, setup, rules, speeds, self._end, journal=self._journal, check=check
            )
            for setup in clusters
        }
        self._router = Router(self.clusters, routing, seed)
        self.arrived = 0
        self.ended = 0
        self.federations: list[Federation] = []
        """Who learns together here; they join before the world runs."""

    def run(self) -> None:
        """From the first arrival until nothing happens any more. Jobs that can never run are left as they are."""
        for name in sorted(self.clusters):
            self.clusters[name].open()
        self._plan_arrival()
        self.clock.run()
        for name in sorted(self.clusters):
            scheduler = self.clusters[name].scheduler
            if scheduler is not None:
                scheduler.verify()

    @property
    def digest(self) -> str:
        """Of the run's whole story, event by event: equal digests, equal runs. Empty without a transcript."""
        return self._journal.digest if self._journal is not None else ""

    @property
    def slots(self) -> int:
        """Decisions that were called for, over all clusters."""
        return sum(cluster.slots for cluster in self.clusters.values())

    @property
    def fallbacks(self) -> int:
        """Slots that a fallback decided because the policy's answer could not be used."""
        return sum(cluster.policy.fallbacks for cluster in self.clusters.values())

    def _plan_arrival(self) -> None:
        job = next(self._jobs, None)
        if job is None:
            return
        arrives_s = job.spec.submitted_s
        if arrives_s < self.clock.now_s:
            raise InvalidInput(
                f"job {job.spec.job_id} arrives at {arrives_s:g} s, before the one ahead of it", "sort jobs by arrival"
            )
        self.clock.at(arrives_s, self._arrive, job, rank=ARRIVAL)

    def _arrive(self, job: SimulatedJob) -> None:
        self.arrived += 1
        cluster = self.clusters[self._router.choose(job)]
        if job.origin and job.origin != cluster.name and job.data_gib:
            self.clock.after(job.data_gib / self._transfer_gib_per_s, cluster.assign, job, rank=ARRIVAL)
        else:
            cluster.assign(job)
        self._plan_arrival()

    def _end(self, job: SimulatedJob, status: JobStatus) -> None:
        self.ended += 1
        if self._over is not None:
            self._over(job, status)


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """What became of one job."""

    job: SimulatedJob
    status: JobStatus
    """Its last."""

    @property
    def jct_s(self) -> float:
        """Finish minus submission, queueing included."""
        assert self.status.finished_s is not None
        return self.status.finished_s - self.job.spec.submitted_s


@dataclass(frozen=True, slots=True)
class Result:
    """What a small world came to."""

    outcomes: tuple[JobOutcome, ...]
    """Of the jobs that are over, in the order of arrival."""
    jobs: int
    slots: int
    digest: str
    fallbacks: int

    @property
    def complete(self) -> bool:
        """Whether every job succeeded."""
        done = [outcome for outcome in self.outcomes if outcome.status.phase is JobPhase.SUCCEEDED]
        return len(done) == self.jobs

    @property
    def average_jct_s(self) -> float:
        """Seconds, mean over the jobs that are over; NaN where none is."""
        times_s = [outcome.jct_s for outcome in self.outcomes]
        return sum(times_s) / len(times_s) if times_s else float("nan")


def run(
    clusters: Sequence[Setup],
    jobs: Sequence[SimulatedJob],
    speeds: TrueSpeeds,
    rules: Rules,
    *,
    check: bool = False,
    transcribe: bool = False,
) -> Result:
    """Run a world that is small enough to keep every job's end."""
    ended: dict[str, JobOutcome] = {}
    world = World(
        clusters,
        jobs,
        speeds,
        rules,
        check=check,
        transcribe=transcribe,
        over=lambda job, status: ended.update({job.spec.job_id: JobOutcome(job, status)}),
    )
    world.run()
    outcomes = tuple(ended[job.spec.job_id] for job in jobs if job.spec.job_id in ended)
    return Result(outcomes, len(jobs), world.slots, world.digest, world.fallbacks)


def run_scenario(
    scenario: Scenario,
    policy: Policy,
    fallback: Policy,
    *,
    learner: ClusterLearner | None = None,
    rules: Rules | None = None,
    check: bool = False,
    observers: Sequence[Observer] = (),
    faults: Faults | None = None,
) -> Result:
    """Run a drawn cluster and its jobs, each of which trains as fast as jobs of its type do and as long as it says."""
    return run(
        [Setup(CLUSTER, scenario.nodes, policy, fallback, learner, faults, tuple(observers))],
        [SimulatedJob(spec, spec.epochs) for spec in scenario.jobs],
        AnalyticSpeeds(SPEEDS),
        rules or Rules(scenario.slot_length_s, costs=USUAL_COSTS),
        check=check,
        transcribe=True,
    )
