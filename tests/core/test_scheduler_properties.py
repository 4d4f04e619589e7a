"""Whatever happens, in whatever order, the scheduler keeps its promises."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fedsched.core.events import (
    CancelRequested,
    Event,
    JobAdopted,
    JobAssigned,
    JobExited,
    JobScaled,
    JobStarted,
    LeaseLost,
    LeaseRegained,
    NodeChanged,
    NodeLost,
    PolicyDecided,
    ProgressReported,
    ScaleFailed,
    SlotStarted,
    TermTaken,
)
from fedsched.core.ids import NodeName
from fedsched.core.job import LIFECYCLE, TERMINAL, JobPhase, Progress, Reason
from fedsched.core.resources import Resources
from tests.core.world import World, dispatched, node, spec

NODES = ("n1", "n2", "n3")
ENDS = (Reason.FINISHED, Reason.USER_ERROR, Reason.TASK_KILLED, Reason.LOST, Reason.OUT_OF_MEMORY)
EXERCISED: frozenset[type] = frozenset(
    {
        CancelRequested,
        JobAdopted,
        JobAssigned,
        JobExited,
        JobScaled,
        JobStarted,
        LeaseLost,
        LeaseRegained,
        NodeChanged,
        NodeLost,
        PolicyDecided,
        ProgressReported,
        ScaleFailed,
        SlotStarted,
        TermTaken,
    }
)


def test_every_event_takes_part() -> None:
    """A new event that no property test draws is an event that nobody has thought about."""
    assert frozenset(Event.__args__) == EXERCISED


class Cluster(RuleBasedStateMachine):
    """One cluster under a hostile schedule: late, failing and repeated answers, restarts, lost nodes, lost leases."""

    @initialize(keep_running=st.booleans())
    def build(self, keep_running: bool) -> None:
        self.world = World((node("n1", 4), node("n2", 3)), keep_running=keep_running)
        self.slot = 0
        self.next_job = 0

    @rule(
        least=st.integers(1, 3),
        more=st.integers(0, 4),
        ps=st.integers(0, 2),
        cooldown_s=st.sampled_from([0.0, 15.0]),
        limit_s=st.sampled_from([None, 40.0]),
        attempts=st.integers(1, 3),
        coordinator=st.sampled_from([0, 0, 500, 1000]),
    )
    def submit(
        self,
        least: int,
        more: int,
        ps: int,
        cooldown_s: float,
        limit_s: float | None,
        attempts: int,
        coordinator: int,
    ) -> None:
        job = spec(
            f"job-{self.next_job}",
            workers=(least, least + more),
            ps=(min(ps, 1), ps),
            resize_cooldown_s=cooldown_s,
            max_runtime_s=limit_s,
            max_attempts=attempts,
            submitted_s=self.world.now_s,
            coordinator_demand=Resources(cpu_milli=coordinator),
        )
        self.next_job += 1
        self.world.specs[job.job_id] = job
        self.world.statuses[job.job_id] = dispatched(job)
        self.world.tell(JobAssigned(self.world.now_s, job, self.world.statuses[job.job_id]))

    @rule(elapsed_s=st.sampled_from([1.0, 10.0]))
    def start_slot(self, elapsed_s: float) -> None:
        self.world.now_s += elapsed_s
        self.slot += 1
        self.world.tell(SlotStarted(self.world.now_s, self.slot))

    @precondition(lambda self: self.world.questions)
    @rule()
    def decide_all_that_fits(self) -> None:
        self.world.decide()

    @precondition(lambda self: self.world.questions)
    @rule(data=st.data())
    def decide_anything(self, data: st.DataObject) -> None:
        """A policy may answer nonsense: counts that do not fit, jobs that it left out."""
        views = self.world.questions[0].observation.jobs
        sizes = st.tuples(st.integers(0, 9), st.integers(0, 3))
        answer = {str(view.job_id): data.draw(sizes) for view in views if data.draw(st.booleans())}
        self.world.decide(answer)

    @precondition(lambda self: self.world.inbox)
    @rule(data=st.data(), well=st.booleans())
    def carry_out(self, data: st.DataObject, well: bool) -> None:
        """Orders of different jobs may be done in any order; those of one job are done in turn."""
        first: dict[str, int] = {}
        for index, order in enumerate(self.world.inbox):
            name = order.spec.job_id if hasattr(order, "spec") else getattr(order, "job_id", "adopt")
            first.setdefault(name, index)
        adoption_waits = first.get("adopt")
        choices = sorted(first.values()) if adoption_waits is None else [adoption_waits]
        self.world.carry_out(data.draw(st.sampled_from(choices)), well=well)

    @precondition(lambda self: self.world.running)
    @rule(data=st.data(), reason=st.sampled_from(ENDS), epochs=st.none() | st.floats(0, 20))
    def end(self, data: st.DataObject, reason: Reason, epochs: float | None) -> None:
        job_id = data.draw(st.sampled_from(sorted(self.world.running)))
        self.world.finish(job_id, reason, None if epochs is None else Progress(epochs=epochs))

    @precondition(lambda self: self.world.running)
    @rule(data=st.data(), epochs=st.floats(0, 20))
    def report(self, data: st.DataObject, epochs: float) -> None:
        job_id = data.draw(st.sampled_from(sorted(self.world.running)))
        attempt = self.world.running[job_id].number
        self.world.tell(ProgressReported(self.world.now_s, job_id, attempt, Progress(epochs=epochs)))

    @precondition(lambda self: self.world.statuses)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        job_id = data.draw(st.sampled_from(sorted(self.world.statuses)))
        self.world.tell(CancelRequested(self.world.now_s, job_id))

    @precondition(lambda self: self.world.statuses)
    @rule(data=st.data(), kind=st.sampled_from(["started", "scaled", "failed", "exited", "adopted"]))
    def repeat_old_news(self, data: st.DataObject, kind: str) -> None:
        """News of the attempt before may come at any time."""
        job_id = data.draw(st.sampled_from(sorted(self.world.statuses)))
        old = self.world.statuses[job_id].attempt - 1
        now_s = self.world.now_s
        events: dict[str, Event] = {
            "started": JobStarted(now_s, job_id, old),
            "scaled": JobScaled(now_s, job_id, old, (), 0.0),
            "failed": ScaleFailed(now_s, job_id, old, (), ""),
            "exited": JobExited(now_s, job_id, old, Reason.FINISHED, ""),
            "adopted": JobAdopted(now_s, job_id, old, ()),
        }
        before = dict(self.world.statuses)
        self.world.tell(events[kind])
        assert self.world.statuses == before

    @rule(name=st.sampled_from(NODES), cpus=st.integers(0, 5), schedulable=st.booleans())
    def change_node(self, name: str, cpus: int, schedulable: bool) -> None:
        self.world.tell(NodeChanged(self.world.now_s, node(name, cpus, schedulable=schedulable)))

    @rule(name=st.sampled_from(NODES))
    def lose_node(self, name: str) -> None:
        self.world.tell(NodeLost(self.world.now_s, NodeName(name)))

    @rule()
    def lose_lease(self) -> None:
        self.world.tell(LeaseLost(self.world.now_s))

    @rule()
    def regain_lease(self) -> None:
        self.world.tell(LeaseRegained(self.world.now_s))

    @rule()
    def restart(self) -> None:
        self.world.nodes = tuple(self.world.scheduler.state.nodes.values())
        self.world.restart()

    @invariant()
    def every_live_job_is_known_and_every_task_belongs_to_one(self) -> None:
        live = {job_id for job_id, status in self.world.statuses.items() if status.phase not in TERMINAL}
        assert live == set(self.world.scheduler.state.jobs)
        adopting = any(job.adopting for job in self.world.scheduler.state.jobs.values())
        if not adopting and not self.world.inbox:
            assert set(self.world.running) <= live

    def teardown(self) -> None:
        """Once the world behaves, every job comes to an end: nothing is stuck for good."""
        if not hasattr(self, "world"):
            return
        world = self.world
        world.tell(LeaseRegained(world.now_s))
        for name in NODES:
            world.tell(NodeChanged(world.now_s, node(name, 5)))
        for _ in range(4 * len(world.statuses) + 4):
            world.settle()
            for job_id in sorted(world.running):
                world.finish(job_id)
            self.start_slot(50.0)
            if world.questions:
                world.decide()
        assert [job_id for job_id, status in world.statuses.items() if status.phase not in TERMINAL] == []
        for step in world.transitions:
            assert step.source is not None
            assert step.target in [to for (source, _), to in LIFECYCLE.items() if source is step.source]


Cluster.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
TestCluster = Cluster.TestCase


def test_terminal_phases_absorb() -> None:
    """A finished job that runs again is the worst thing a scheduler can do."""
    assert not [move for move in LIFECYCLE if move[0] in TERMINAL]


def test_every_phase_is_reached_and_can_be_left_for_an_end() -> None:
    """A phase that leads nowhere would hold a job for ever."""
    reachable = {JobPhase.QUEUED}
    while True:
        more = reachable | {to for (source, _), to in LIFECYCLE.items() if source in reachable}
        if more == reachable:
            break
        reachable = more
    stored = set(JobPhase) - {JobPhase.UNREACHABLE}
    assert reachable == stored
    for phase in stored - TERMINAL:
        seen = {phase}
        while not seen & TERMINAL:
            more = seen | {to for (source, _), to in LIFECYCLE.items() if source in seen}
            assert more != seen, f"{phase} never ends"
            seen = more
