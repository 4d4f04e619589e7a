"""What goes wrong around a simulated cluster: plans that are drawn from a seed, and how they reach a world.

A plan is data. Nodes are lost and return, the agent dies and comes back under a new term with what the store holds,
resizes fail, the executor's answers are late or come twice, the store is slow, users cancel, the policy misbehaves.
Answers are lost only with the agent that they were meant for: while it is down nobody hears them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from fedsched.core.cluster import Node
from fedsched.core.decision import Budget, Decision, Observation, Policy
from fedsched.core.events import (
    CancelRequested,
    Event,
    JobAdopted,
    JobExited,
    JobScaled,
    JobStarted,
    NodeChanged,
    NodeLost,
    ProgressReported,
    ScaleFailed,
)
from fedsched.core.ids import JobId, stream
from fedsched.core.job import Allocation, JobSpec
from fedsched.federation.source import Arrays
from fedsched.policy.learnable import Learnable

Planned = NodeLost | NodeChanged | CancelRequested
"""What happens to a cluster from outside."""
Answer = JobStarted | JobScaled | ScaleFailed | ProgressReported | JobExited | JobAdopted


class BadAnswer(StrEnum):
    """What a policy does instead of deciding."""

    THROWS = "throws"
    NAN = "nan"
    OVER_ALLOCATES = "over-allocates"
    STALE = "stale"
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True)
class Outage:
    """The agent is dead from one moment to another."""

    down_s: float
    up_s: float


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """Everything that goes wrong with one cluster in one run."""

    seed: int
    events: tuple[Planned, ...] = ()
    """In order of time."""
    outages: tuple[Outage, ...] = ()
    """In order of time, without overlap."""
    late: float = 0.0
    """Probability of an answer of the executor to be late."""
    late_s_max: float = 0.0
    twice: float = 0.0
    """Probability of an answer to come a second time, later."""
    store_s_max: float = 0.0
    """Writes take from nothing to so long."""
    bad_answers: tuple[tuple[int, BadAnswer], ...] = ()
    """By slot."""
    resizes_fail: float = 0.0
    """Probability of a resize to be rolled back."""

    def __str__(self) -> str:
        bad = ", ".join(f"slot {slot} {kind.value}" for slot, kind in self.bad_answers)
        events = ", ".join(f"{type(event).__name__} at {event.time_s:.1f} s" for event in self.events)
        down = ", ".join(f"{outage.down_s:.1f} to {outage.up_s:.1f} s" for outage in self.outages)
        return (
            f"agent down: {down or 'never'}; {events or 'no events'}; policy: {bad or 'well'}; "
            f"answers: {self.late:.0%} up to {self.late_s_max:.1f} s late, {self.twice:.0%} twice; "
            f"writes take up to {self.store_s_max:.1f} s; {self.resizes_fail:.0%} of the resizes fail"
        )


def draw_plan(seed: int, nodes: Sequence[Node], jobs: Sequence[JobSpec], until_s: float) -> FaultPlan:
    """A plan for a run of about `until_s`; every lost node returns, so every job can still be run.

    Args:
        nodes: of the cluster.
        jobs: of the run, some of which are cancelled.
    """
    draw = stream(seed, "faults").random
    events: list[Planned] = []
    for node in nodes:
        if draw() < 0.3:
            lost_s = draw() * until_s
            events.append(NodeLost(lost_s, node.name))
            events.append(NodeChanged(lost_s + 1 + draw() * until_s / 4, node))
    events += [CancelRequested(job.submitted_s + draw() * until_s / 2, job.job_id) for job in jobs if draw() < 0.15]
    events.sort(key=lambda event: event.time_s)
    outages: list[Outage] = []
    at_s = 0.0
    while draw() < 0.6 and len(outages) < 5:
        at_s += 0.5 + draw() * until_s / 3
        outages.append(Outage(at_s, at_s := at_s + 0.1 + draw() * 30))
    kinds, often = list(BadAnswer), 0.1 if draw() < 0.6 else 0.0
    bad = tuple((slot, kinds[int(draw() * len(kinds))]) for slot in range(round(until_s / 10)) if draw() < often)
    return FaultPlan(
        seed=seed,
        events=tuple(events),
        outages=tuple(outages),
        late=draw() * 0.5,
        late_s_max=draw() * 15,
        twice=draw() * 0.3,
        store_s_max=draw() * 3,
        bad_answers=bad,
        resizes_fail=draw() * 0.5,
    )


class Faults:
    """A plan at work on one run: each draw is made when it is needed, from a stream of its own."""

    def __init__(self, plan: FaultPlan) -> None:
        self.plan = plan
        self._answers = stream(plan.seed, "faults/answers").random
        self._store = stream(plan.seed, "faults/store").random
        self._resizes = stream(plan.seed, "faults/resizes").random
        self._last_s: dict[JobId, float] = {}

    def arrivals_s(self, now_s: float, answer: Event) -> tuple[float, ...]:
        """When the executor's answer of `now_s` reaches the agent: once or twice.

        Answers about one job keep their order, as over one connection; the second copy comes in order too.
        """
        assert isinstance(answer, Answer)
        delay_s = self._answers() * self.plan.late_s_max if self._answers() < self.plan.late else 0.0
        arrival_s = max(now_s + delay_s, self._last_s.get(answer.job_id, 0.0))
        times_s: tuple[float, ...] = (arrival_s,)
        if self._answers() < self.plan.twice:
            times_s = (arrival_s, arrival_s + self._answers() * 2)
        self._last_s[answer.job_id] = times_s[-1]
        return times_s

    def resize_fails(self) -> bool:
        """Whether the resize that begins now is rolled back in the end."""
        return self._resizes() < self.plan.resizes_fail

    def store_s(self) -> float:
        """How long the next write takes."""
        return self._store() * self.plan.store_s_max


class FaultyPolicy:
    """A policy that decides like another one, but for the slots in which the plan has it misbehave."""

    def __init__(self, policy: Policy, plan: FaultPlan) -> None:
        self._policy = policy
        self._bad = dict(plan.bad_answers)
        self._decided = False
        """Whether the last decision was the policy's own."""

    @property
    def name(self) -> str:
        """The name of the policy that it stands for."""
        return self._policy.name

    @property
    def version(self) -> int:
        """Its version."""
        return self._policy.version

    def decide(self, observation: Observation, budget: Budget) -> Decision:
        """Decide, or do what the plan says.

        Raises:
            ArithmeticError: the plan says so.
        """
        self._decided = observation.slot not in self._bad
        match self._bad.get(observation.slot):
            case None:
                return self._policy.decide(observation, budget)
            case BadAnswer.THROWS:
                raise ArithmeticError("the fault plan has the policy fail here")
            case BadAnswer.NAN:
                return self._all(observation, Allocation(math.nan, math.nan))  # type: ignore[arg-type]
            case BadAnswer.OVER_ALLOCATES:
                return self._all(observation, Allocation(10_000, 10_000))
            case BadAnswer.STALE:
                return Decision(observation.slot - 1, (), self.name)
            case BadAnswer.NOTHING:
                return Decision(observation.slot, (), self.name)

    @property
    def shape(self) -> Any:
        """The policy's, where it can be taught."""
        return self._policy.shape if isinstance(self._policy, Learnable) else None

    @property
    def weights(self) -> Arrays:
        """The policy's, where it can be taught."""
        return self._policy.weights if isinstance(self._policy, Learnable) else {}

    def load(self, version: int, arrays: Arrays) -> None:
        """Give the weights to the policy, where it can be taught."""
        if isinstance(self._policy, Learnable):
            self._policy.load(version, arrays)

    def last_trace(self) -> Sequence[Any]:
        """The policy's, where it was the policy that decided."""
        return self._policy.last_trace() if self._decided and isinstance(self._policy, Learnable) else ()

    def _all(self, observation: Observation, size: Allocation) -> Decision:
        return Decision(observation.slot, tuple((view.job_id, size) for view in observation.jobs), self.name)
