"""One simulated cluster: the scheduler and loop that the agent runs, between virtual edges."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from msgspec import structs

from fedsched.core.choosing import Rule
from fedsched.core.cluster import Node
from fedsched.core.commands import AskPolicy, Command, RewardSlot, SaveJob
from fedsched.core.decision import Policy
from fedsched.core.events import (
    CancelRequested,
    Event,
    JobAssigned,
    JobExited,
    JobScaled,
    JobStarted,
    NodeChanged,
    NodeLost,
    PolicyDecided,
    ScaleFailed,
    SlotStarted,
    TermTaken,
)
from fedsched.core.ids import ClusterName, JobId
from fedsched.core.job import TERMINAL, JobPhase, JobSpec, JobStatus, Reason
from fedsched.core.scheduler import Scheduler
from fedsched.core.state import SchedulerConfig
from fedsched.learn.learner import ClusterLearner
from fedsched.policy import guardrail
from fedsched.policy.disciplines import ranks
from fedsched.policy.learnable import Learnable
from fedsched.runtime.loop import Loop, Observer, Recorder
from fedsched.runtime.ports import Post
from fedsched.sim.clock import ARRIVAL, TICK, VirtualClock
from fedsched.sim.executor import SimulatedExecutor
from fedsched.sim.faults import Faults, Planned
from fedsched.sim.ports import SimulatedJob, TrueSpeeds
from fedsched.sim.speeds.costs import Costs


@dataclass(frozen=True, slots=True)
class Rules:
    """How time passes in a world, and what things take."""

    slot_length_s: float = 10.0
    clock: Literal["slots", "exact"] = "slots"
    """Decisions at the start of every slot, or whenever something has happened."""
    slots_max: int = 5_000
    """With slots: decide nothing after as many; what runs then runs on as it is, what waits never ends."""
    store_s: float = 0.01
    """How long the store takes to confirm a write; orders wait for it."""
    costs: Costs = field(default_factory=lambda: Costs("free"))
    keep_running: bool = True
    """A running job keeps at least its minimum."""
    placement: Rule = "spread"
    rebuild: bool = False
    """Every slot is placed anew on an empty cluster."""
    crowded: bool = False
    """Speeds depend on who else is on a job's nodes."""
    explain: bool = False
    """Note with every job that waits why it does."""


@dataclass(frozen=True, slots=True)
class Setup:
    """A cluster to be simulated."""

    name: ClusterName
    nodes: tuple[Node, ...]
    policy: Policy
    fallback: Policy
    learner: ClusterLearner | None = None
    """Records the choices of a policy that can be taught, and their rewards."""
    faults: Faults | None = None
    observers: tuple[Observer, ...] = ()
    """See every step after it was handled; what one raises ends the run."""
    restarted: Callable[[], None] | None = None
    """Hears that a new agent took the place of one that died, before it takes its term."""


class SimulatedPolicy:
    """The policy's port without a thread: it answers at once, in virtual time, through the same guardrail.

    With a learner, the policy's choices and their rewards are recorded as the agent records them.
    """

    def __init__(
        self, clock: VirtualClock, post: Post, policy: Policy, fallback: Policy, learner: ClusterLearner | None = None
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
        if self._learner is not None and isinstance(self._policy, Learnable) and not decision.fallback:
            self._learner.record(question.observation.slot, self._policy.last_trace())
        self._post(PolicyDecided(self._clock.now_s, decision))

    def reward(self, reward: RewardSlot) -> None:
        """Pass it to the learner."""
        if self._learner is not None:
            self._learner.reward(reward)


class MemoryLedger:
    """Keeps the newest status of each job and confirms in virtual time, as a store would after a round trip.

    With faults a write takes as long as they say, and is lost with the agent that dies before it reaches the store.

    Args:
        over: hears of each job whose terminal status was written; it is kept no longer.
    """

    def __init__(
        self, clock: VirtualClock, store_s: float, faults: Faults | None, over: Callable[[JobStatus], None]
    ) -> None:
        self._clock = clock
        self._store_s = store_s
        self._faults = faults
        self._over = over
        self._busy_until_s = 0.0
        self.loop: Loop | None = None
        """Whose writes count; None while no agent lives."""
        self.jobs: dict[JobId, tuple[JobSpec, JobStatus]] = {}
        """What the store holds of jobs that are not over."""

    def save(self, ticket: int, records: Sequence[SaveJob]) -> bool:
        """Write all of it; where that takes no time, it is done at once."""
        loop = self.loop
        assert loop is not None
        if self._faults is None:
            self._write(records)
            if self._store_s:
                self._clock.after(self._store_s, loop.confirm, ticket)
            return not self._store_s
        # One after the other, as over one connection.
        way_s = self._faults.store_s() / 2
        written_s = self._busy_until_s = max(self._clock.now_s + way_s, self._busy_until_s)
        self._clock.at(written_s, self._arrive, loop, ticket, records, way_s)
        return False

    def _arrive(self, loop: Loop, ticket: int, records: Sequence[SaveJob], way_s: float) -> None:
        if self.loop is loop:
            self._write(records)
            self._clock.after(way_s, self._confirm, loop, ticket)

    def _confirm(self, loop: Loop, ticket: int) -> None:
        if self.loop is loop:
            loop.confirm(ticket)

    def _write(self, records: Sequence[SaveJob]) -> None:
        jobs = self.jobs
        for record in records:
            status = record.status
            job_id = status.job_id
            if status.phase in TERMINAL:
                if jobs.pop(job_id, None) is not None:
                    self._over(status)
            elif job_id in jobs:
                jobs[job_id] = (jobs[job_id][0], status)


class Transcript:
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


_PLANNED_ENDS = (Reason.FINISHED, Reason.PREEMPTED)
"""The one calls for a decision when it is written, the other follows from a decision."""


class SimulatedCluster:
    """A cluster under its policy.

    Args:
        over: hears of each job that has ended.
        journal: of every step; a digest costs as much as the run itself, so None where nobody compares runs.
        check: look at all invariants after every event.
    """

    def __init__(
        self,
        clock: VirtualClock,
        setup: Setup,
        rules: Rules,
        speeds: TrueSpeeds,
        over: Callable[[SimulatedJob, JobStatus], None],
        *,
        journal: Recorder | None,
        check: bool = False,
    ) -> None:
        self.name = setup.name
        self._clock = clock
        self._setup = setup
        self._rules = rules
        self._exact = rules.clock == "exact"
        self._watched = _WATCHED if self._exact else {}
        self._over = over
        self._journal = journal
        self._check = check
        self._truth: dict[JobId, SimulatedJob] = {}
        self._post: Post = partial(clock.soon, self._tell)
        self._term = 0
        self._nodes = setup.nodes
        """As the agent that died last knew them."""
        self._missed: list[Planned] = []
        """What happened while no agent lived."""
        self._ranked = ranks(setup.policy)
        self._hears_of_starts = not self._ranked
        """Whether a job's start calls for a decision; for most disciplines it follows from the one before."""
        self._review_s: float | None = None
        """When the policy wants to be asked again though nothing happens."""
        self._tick_s: float | None = None
        """When the next decision is planned."""
        self._ticks = 0
        self.slots = 0
        self._ledger = MemoryLedger(clock, rules.store_s, setup.faults, self._end)
        self._executor = SimulatedExecutor(
            clock,
            self._post if setup.faults is None else partial(self._answer, setup.faults),
            self._truth,
            speeds,
            {node.name: node for node in setup.nodes},
            costs=rules.costs,
            pace_s=rules.slot_length_s if rules.clock == "slots" else 1.0,
            crowded=rules.crowded,
            resize_fails=setup.faults.resize_fails if setup.faults is not None else None,
        )
        self.policy = SimulatedPolicy(clock, self._post, setup.policy, setup.fallback, setup.learner)
        self._loop: Loop | None = self._begin(setup.nodes)

    def _begin(self, nodes: tuple[Node, ...]) -> Loop:
        """A new agent's scheduler and loop."""
        rules = self._rules
        config = SchedulerConfig(
            self.name,
            rules.slot_length_s,
            keep_running=rules.keep_running,
            ranked=self._ranked,
            placement=rules.placement,
            rebuild=rules.rebuild,
            explain=rules.explain,
        )
        scheduler = Scheduler(config, nodes, check=self._check)
        loop = Loop(scheduler, self._ledger, self._executor, self.policy, self._journal, self._setup.observers)
        self._ledger.loop = loop
        return loop

    @property
    def live(self) -> int:
        """Jobs that are here and not over."""
        return len(self._truth)

    @property
    def term(self) -> int:
        """Of the agent that lives, or lived last."""
        return self._term

    @property
    def scheduler(self) -> Scheduler | None:
        """The living agent's scheduler."""
        return self._loop.scheduler if self._loop is not None else None

    def open(self) -> None:
        """Take the first term, and plan what will go wrong."""
        self._take_term()
        faults = self._setup.faults
        if faults is None:
            return
        for event in faults.plan.events:
            self._clock.at(event.time_s, self._happen, event, rank=ARRIVAL)
        for outage in faults.plan.outages:
            self._clock.at(outage.down_s, self._die, rank=ARRIVAL)
            self._clock.at(outage.up_s, self._return, rank=ARRIVAL)

    def assign(self, job: SimulatedJob) -> None:
        """The controller gives the cluster a job now."""
        spec, now_s = job.spec, self._clock.now_s
        status = JobStatus(spec.job_id, JobPhase.DISPATCHED, cluster=self.name, dispatched_s=now_s)
        self._truth[spec.job_id] = job
        self._ledger.jobs[spec.job_id] = (spec, status)
        self._tell(JobAssigned(now_s, spec, status))
        if not self._exact:
            self._call_slot()

    # --- time

    def _call_slot(self) -> None:
        """Have the next slot start at its time; slots in which nobody is here are left out."""
        length_s = self._rules.slot_length_s
        number = max(self._ticks, math.ceil(self._clock.now_s / length_s))
        if self._tick_s is None and number < self._rules.slots_max:
            self._ticks = number
            self._tick_s = number * length_s
            self._clock.at(self._tick_s, self._start_slot, rank=TICK)

    def _start_slot(self) -> None:
        """A slot of fixed length begins; the one after a last job's end closes, and rewards, its last slot."""
        self._tick_s = None
        live = self.live
        for report in self._executor.report():
            self._tell(report)
        self._tell(SlotStarted(self._clock.now_s, self._ticks))
        self._ticks += 1
        self.slots += 1
        if live:
            self._call_slot()

    def _call_decision(self, time_s: float) -> None:
        """With the exact clock: have a slot start at this time, or earlier."""
        if self._tick_s is None or time_s < self._tick_s:
            self._tick_s = time_s
            self._clock.at(time_s, self._decide, time_s, rank=TICK)

    def _decide(self, planned_s: float) -> None:
        if self._tick_s != planned_s:
            return  # an earlier one came in between and has asked anew
        self._tick_s = None
        self._tell(SlotStarted(self._clock.now_s, self._ticks))
        self._ticks += 1
        self.slots += 1
        retry_s = self._loop.scheduler.state.next_retry_s() if self._loop is not None else None
        if retry_s is not None:
            self._call_decision(max(retry_s, self._clock.now_s))

    def _review(self, planned_s: float) -> None:
        if self._review_s == planned_s:  # else a later answer has named another time
            self._call_decision(planned_s)

    # --- events

    def _tell(self, event: Event) -> None:
        if self._loop is None:
            return
        self._loop.step(event)
        watch = self._watched.get(type(event))
        if watch is not None:
            watch(self, event)

    def _watch_answer(self, event: PolicyDecided) -> None:
        ranking = event.decision.ranking
        if ranking is None:
            return
        self._hears_of_starts = ranking.rerank == "all"
        self._review_s = None
        if ranking.review_s is not None:
            # The answer may have been under way for longer than that.
            self._review_s = max(ranking.review_s, self._clock.now_s)
            self._clock.at(self._review_s, self._review, self._review_s, rank=ARRIVAL)

    def _watch_change(self, event: Event) -> None:
        self._call_decision(self._clock.now_s)

    def _watch_settling(self, event: JobStarted | JobScaled | ScaleFailed) -> None:
        if self._hears_of_starts:
            self._call_decision(self._clock.now_s)

    def _watch_end(self, event: JobExited) -> None:
        if event.reason not in _PLANNED_ENDS:
            self._call_decision(self._clock.now_s)

    def _answer(self, faults: Faults, event: Event) -> None:
        """An answer of the executor, which comes late, or twice, or out of order."""
        for arrival_s in faults.arrivals_s(self._clock.now_s, event):
            self._clock.at(arrival_s, self._tell_now, event)

    def _tell_now(self, event: Event) -> None:
        self._tell(structs.replace(event, time_s=self._clock.now_s))

    def _end(self, status: JobStatus) -> None:
        """The store has a job's terminal status."""
        job = self._truth.pop(status.job_id)
        self._executor.forget(status.job_id)
        self._over(job, status)
        if self._exact:
            self._call_decision(self._clock.now_s)

    # --- faults

    def _take_term(self) -> None:
        self._term += 1
        self._tell(TermTaken(self._clock.now_s, self._term, tuple(self._ledger.jobs.values())))

    def _happen(self, event: Planned) -> None:
        if self._loop is None:
            self._missed.append(event)
        else:
            self._tell(event)

    def _die(self) -> None:
        """The agent dies with what it knew; tasks run on."""
        assert self._loop is not None
        self._nodes = tuple(self._loop.scheduler.state.nodes.values())
        self._loop = self._ledger.loop = None

    def _return(self) -> None:
        """A new agent sees the nodes as they are now, takes the next term, and hears what users asked for meanwhile."""
        self._loop = self._begin(self._nodes)
        missed, self._missed = self._missed, []
        for event in missed:
            if isinstance(event, NodeLost | NodeChanged):
                self._tell_now(event)
        if self._setup.restarted is not None:
            self._setup.restarted()
        self._take_term()
        for event in missed:
            if isinstance(event, CancelRequested):
                self._tell_now(event)
        if self._exact:
            self._call_decision(self._clock.now_s)


_WATCHED: dict[type[Event], Callable[[SimulatedCluster, Any], None]] = {
    PolicyDecided: SimulatedCluster._watch_answer,
    JobAssigned: SimulatedCluster._watch_change,
    CancelRequested: SimulatedCluster._watch_change,
    NodeChanged: SimulatedCluster._watch_change,
    NodeLost: SimulatedCluster._watch_change,
    JobStarted: SimulatedCluster._watch_settling,
    JobScaled: SimulatedCluster._watch_settling,
    ScaleFailed: SimulatedCluster._watch_settling,
    JobExited: SimulatedCluster._watch_end,
}
"""With the exact clock: which events call for a decision, or say when the next one is due."""
