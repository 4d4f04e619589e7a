"""One simulated cluster: the scheduler and loop that the agent runs, between virtual edges."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fedsched.core.commands import AskPolicy, Command, RewardSlot, SaveJob
from fedsched.core.decision import Policy
from fedsched.core.events import Event, JobAssigned, PolicyDecided, SlotStarted, TermTaken
from fedsched.core.ids import ClusterName, JobId
from fedsched.core.job import TERMINAL, JobPhase, JobSpec, JobStatus
from fedsched.core.resources import total
from fedsched.core.scheduler import Scheduler
from fedsched.core.state import SchedulerConfig
from fedsched.learn.actor_critic import Learner
from fedsched.policy import guardrail
from fedsched.policy.dl2 import DL2
from fedsched.runtime.loop import Loop, Observer
from fedsched.runtime.ports import Post
from fedsched.sim.clock import VirtualClock
from fedsched.sim.executor import SimulatedExecutor, VerbCosts
from fedsched.sim.speed import SPEEDS
from fedsched.sim.workload import Scenario

CLUSTER = ClusterName("simulated")


class SimulatedPolicy:
    """The policy's port without a thread: it answers at once, in virtual time, through the same guardrail.

    With a learner, DL2's choices and their rewards are recorded as the agent records them.
    """

    def __init__(
        self, clock: VirtualClock, post: Post, policy: Policy, fallback: Policy, learner: Learner | None = None
    ) -> None:
        self._clock = clock
        self._post = post
        self._policy = policy
        self._fallback = fallback
        self._learner = learner
        self.fallbacks = 0
        """Slots that the fallback decided because the policy's answer could not be used."""

    def ask(self, question: AskPolicy) -> None:
        """Decide now; the answer is the next event."""
        decision = guardrail.decide(question, self._policy, self._fallback)
        self.fallbacks += bool(decision.fallback)
        if self._learner is not None and isinstance(self._policy, DL2) and not decision.fallback:
            self._learner.record(question.observation.slot, self._policy.last_trace())
        self._post(PolicyDecided(self._clock.now_s, decision))

    def reward(self, reward: RewardSlot) -> None:
        """Pass it to the learner."""
        if self._learner is not None:
            self._learner.reward(reward)


class _MemoryLedger:
    """Keeps the newest status of each job and confirms in virtual time, as a store would after a round trip."""

    def __init__(self, clock: VirtualClock, store_s: float) -> None:
        self._clock = clock
        self._store_s = store_s
        self.loop: Loop
        self.statuses: dict[JobId, JobStatus] = {}

    def save(self, ticket: int, records: Sequence[SaveJob]) -> None:
        """Write all of it."""
        for record in records:
            self.statuses[record.status.job_id] = record.status
        self._clock.after(self._store_s, lambda: self.loop.confirm(ticket))


class _Transcript:
    """A running digest over everything that was told and ordered: same seed, same digest."""

    def __init__(self) -> None:
        self._sha = hashlib.sha256()

    def append(self, event: Event, commands: Sequence[Command]) -> None:
        """Add one step."""
        self._sha.update(f"{event!r} {commands!r}\n".encode())

    @property
    def digest(self) -> str:
        """Of all steps so far."""
        return self._sha.hexdigest()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one job."""

    job_id: JobId
    name: str
    phase: JobPhase
    arrived_s: float
    finished_s: float | None
    resizes: int

    @property
    def jct_s(self) -> float | None:
        """Finish minus submission, queueing included; None while it is not over."""
        return None if self.finished_s is None else self.finished_s - self.arrived_s


@dataclass(frozen=True, slots=True)
class Result:
    """A whole run."""

    outcomes: tuple[Outcome, ...]
    slots: int
    digest: str
    """Of the run's whole story, event by event: equal digests, equal runs."""
    fallbacks: int
    """Slots that the fallback decided because the policy's answer could not be used."""
    cpu_utilisation: float
    """Share of the cluster's CPUs that tasks held, from the first arrival to the last end."""

    @property
    def complete(self) -> bool:
        """Whether every job succeeded."""
        return all(outcome.phase is JobPhase.SUCCEEDED for outcome in self.outcomes)

    @property
    def average_jct_s(self) -> float:
        """Mean over the jobs that are over."""
        times_s = [outcome.jct_s for outcome in self.outcomes if outcome.jct_s is not None]
        return sum(times_s) / len(times_s) if times_s else float("nan")

    @property
    def makespan_s(self) -> float:
        """From the first arrival to the last end."""
        return _makespan_s(self.outcomes)

    @property
    def resizes(self) -> int:
        """Of all jobs."""
        return sum(outcome.resizes for outcome in self.outcomes)


def _makespan_s(outcomes: Sequence[Outcome]) -> float:
    ends_s = [outcome.finished_s for outcome in outcomes if outcome.finished_s is not None]
    return max(ends_s, default=0.0) - min((outcome.arrived_s for outcome in outcomes), default=0.0)


class World:
    """A scenario under a policy. Slot k starts at k times the slot's length; jobs finish at exact times in between.

    Args:
        learner: records DL2's choices and rewards.
        check: look at all invariants after every event.
        slots_max: decide nothing after as many slots; what runs then runs on as it is, what waits never ends.
        observers: see every step after it was handled; what one raises ends the run.
    """

    def __init__(
        self,
        scenario: Scenario,
        policy: Policy,
        fallback: Policy,
        *,
        learner: Learner | None = None,
        costs: VerbCosts | None = None,
        store_s: float = 0.01,
        check: bool = False,
        slots_max: int = 5_000,
        observers: Sequence[Observer] = (),
    ) -> None:
        self._scenario = scenario
        self._slots_max = slots_max
        self._slot = 0
        self._clock = VirtualClock()
        self._ledger = _MemoryLedger(self._clock, store_s)
        self._executor = SimulatedExecutor(self._clock, self._post, SPEEDS, costs)
        self._policy = SimulatedPolicy(self._clock, self._post, policy, fallback, learner)
        self._transcript = _Transcript()
        config = SchedulerConfig(CLUSTER, scenario.slot_length_s)
        self._loop = Loop(
            Scheduler(config, scenario.nodes, check=check),
            self._ledger,
            self._executor,
            self._policy,
            self._transcript,
            observers,
        )
        self._ledger.loop = self._loop

    def run(self) -> Result:
        """From the first arrival until every job is over."""
        self._post(TermTaken(0.0, 1))
        for spec in self._scenario.jobs:
            self._clock.after(spec.submitted_s, self._assign(spec))
        self._clock.after(0.0, self._start_slot)
        while self._clock.step():
            pass
        outcomes = tuple(self._outcome(spec) for spec in self._scenario.jobs)
        cpus = total([node.capacity for node in self._scenario.nodes]).cpu_milli / 1000
        offered_cpu_s = cpus * _makespan_s(outcomes)
        utilisation = self._executor.held_cpu_s / offered_cpu_s if offered_cpu_s else 0.0
        return Result(outcomes, self._slot, self._transcript.digest, self._policy.fallbacks, utilisation)

    def _outcome(self, spec: JobSpec) -> Outcome:
        status = self._ledger.statuses.get(spec.job_id, JobStatus(spec.job_id))
        return Outcome(spec.job_id, spec.name, status.phase, spec.submitted_s, status.finished_s, status.resizes)

    def _post(self, event: Event) -> None:
        self._clock.after(0.0, lambda: self._loop.step(event))

    def _assign(self, spec: JobSpec) -> Callable[[], None]:
        status = JobStatus(
            spec.job_id, phase=JobPhase.DISPATCHED, cluster=CLUSTER, dispatched_s=spec.submitted_s, term=0
        )
        return lambda: self._loop.step(JobAssigned(self._clock.now_s, spec, status))

    def _start_slot(self) -> None:
        self._executor.report()
        self._post(SlotStarted(self._clock.now_s, self._slot))
        # The start that follows the last job's end closes, and so rewards, that job's last slot.
        if not self._over() and self._slot < self._slots_max:
            self._slot += 1
            self._clock.after(self._scenario.slot_length_s, self._start_slot)

    def _over(self) -> bool:
        statuses = self._ledger.statuses
        return all(spec.job_id in statuses and statuses[spec.job_id].phase in TERMINAL for spec in self._scenario.jobs)
