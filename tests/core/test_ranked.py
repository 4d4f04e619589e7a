"""A scheduler that keeps jobs in a discipline's order, with all that users of a live cluster expect of it."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from fedsched.core.cluster import Node
from fedsched.core.commands import AskPolicy, Command, SaveJob
from fedsched.core.events import CancelRequested, JobAssigned, PolicyDecided, SlotStarted, TermTaken
from fedsched.core.ids import ClusterName, JobId, NodeName
from fedsched.core.job import JobPhase, JobStatus, Reason
from fedsched.core.resources import Resources
from fedsched.core.scheduler import Scheduler
from fedsched.core.state import SchedulerConfig
from fedsched.policy import guardrail, plugins
from tests.core.world import World, dispatched, node, spec


@dataclass
class Ranked(World):
    """A world whose scheduler asks a discipline for ranks; the answer is that of a real policy."""

    policy: str = "fifo"
    options: dict[str, object] = field(default_factory=dict)
    slot: int = 0
    ranks: dict[JobId, tuple[float, ...]] = field(default_factory=dict)
    """Of the newest answer."""

    def restart(self) -> None:
        self.discipline = plugins.make(self.policy, self.options)
        config = SchedulerConfig(ClusterName("east"), 10.0, keep_running=self.keep_running, ranked=True)
        self.scheduler = Scheduler(config, self.nodes, check=True)
        self.term += 1
        self.tell(TermTaken(self.now_s, self.term, ()))

    def assign(self, name: str, tasks: int = 1, **changes: object) -> None:
        job = spec(name, workers=(tasks, tasks), ps=(0, 0), submitted_s=self.now_s, **changes)
        self.specs[job.job_id] = job
        self.tell(JobAssigned(self.now_s, job, dispatched(job)))

    def next_slot(self, *, answer: bool = True) -> list[Command]:
        self.slot += 1
        self.now_s += 10.0
        commands = self.tell(SlotStarted(self.now_s, self.slot))
        asked = [command for command in commands if isinstance(command, AskPolicy)]
        if not asked:
            return commands
        assert asked[0].ranks
        fallback = plugins.make("drf", {})
        if answer:
            decision = guardrail.decide(asked[0], self.discipline, fallback)
        else:
            decision = guardrail.fall_back(asked[0], fallback, "fifo did not answer in time")
        if decision.ranking is not None:
            self.ranks = dict(decision.ranking.ranks)
        return self.tell(PolicyDecided(self.now_s, decision))

    def status(self, name: str) -> JobStatus:
        return self.statuses[JobId(name)]

    def running_now(self) -> set[str]:
        return {str(job_id) for job_id in self.running}


def test_a_job_that_waits_is_told_what_it_needs_and_what_is_free() -> None:
    """`queue` and `explain` have nothing else to show; a job without a reason looks forgotten."""
    world = Ranked((node("n1", 4),))
    world.assign("a", 3)
    world.assign("b", 2)
    world.next_slot()
    world.settle()
    assert world.running_now() == {"a"}
    said = world.status("b")
    assert said.reason is Reason.WAITING_FOR_CAPACITY
    assert said.message == "needs 2 cpu, 0 MiB for 2w+0ps; free: 1 cpu, 0 MiB"


def test_a_job_for_which_no_node_has_room_is_told_so() -> None:
    world = Ranked((node("n1", 2), node("n2", 2)))
    world.assign("a")
    world.assign("b")
    world.next_slot()
    world.settle()
    world.assign("c", 1, worker_demand=Resources(cpu_milli=2000))
    world.next_slot()
    assert world.status("c").reason is Reason.FRAGMENTED


def test_whom_nobody_may_pass_holds_up_those_behind_and_they_are_told() -> None:
    """Head of line: the small job would fit, and its user must not search for a fault."""
    world = Ranked((node("n1", 4),), options={"blocking": True})
    world.assign("a", 3)
    world.assign("b", 4)
    world.assign("c", 1)
    world.next_slot()
    world.settle()
    assert world.running_now() == {"a"}
    assert world.status("b").reason is Reason.WAITING_FOR_CAPACITY
    assert world.status("c").reason is Reason.POLICY_DEFERRED
    assert "lets nobody pass" in world.status("c").message


def test_a_job_whose_place_is_being_left_is_told_where_it_will_go() -> None:
    world = Ranked((node("n1", 2),), keep_running=False, policy="srtf")
    world.assign("a", 2, expected_s=1000.0)
    world.next_slot()
    world.settle()
    world.assign("b", 1, expected_s=10.0)
    world.next_slot()
    assert world.status("a").phase is JobPhase.PREEMPTING
    assert world.status("b").message == "planned on n1; tasks there are still leaving"
    world.settle()
    assert world.running_now() == {"b"}
    world.next_slot()
    assert world.status("a").reason is Reason.WAITING_FOR_CAPACITY


def test_a_reason_is_written_once_and_not_in_every_slot() -> None:
    """Each write is a transaction; a queue of thousands would keep the store busy with nothing."""
    world = Ranked((node("n1", 1),))
    world.assign("a")
    for name in "bcd":
        world.assign(name)
    world.next_slot()
    world.settle()
    written = [len([c for c in world.next_slot() if isinstance(c, SaveJob)]) for _ in range(3)]
    assert written == [0, 0, 0]


def test_jobs_of_higher_priority_come_first_whatever_their_key() -> None:
    """As under every other policy: the order of the discipline holds among jobs of one priority."""
    world = Ranked((node("n1", 1),))
    world.assign("a", priority=50)
    world.now_s += 1
    world.assign("b", priority=90)
    world.next_slot()
    world.settle()
    assert world.running_now() == {"b"}


@pytest.mark.parametrize(("policy", "running"), [("srtf", {"a"}), ("srsf", {"a"}), ("las", {"a"})])
def test_a_job_of_lower_priority_never_stops_one_of_higher(policy: str, running: set[str]) -> None:
    world = Ranked((node("n1", 1),), keep_running=False, policy=policy)
    world.assign("a", priority=90, expected_s=1000.0)
    world.next_slot()
    world.settle()
    world.assign("b", priority=50, expected_s=10.0)
    for _ in range(3):
        world.next_slot()
        world.settle()
    assert world.running_now() == running


def test_a_job_in_its_cooldown_is_not_stopped() -> None:
    """Its user has said how long it shall be left in peace after a start."""
    world = Ranked((node("n1", 1),), keep_running=False, policy="srtf")
    world.assign("a", resize_cooldown_s=25.0, expected_s=1000.0)
    world.next_slot()
    world.settle()
    world.assign("b", expected_s=10.0)
    world.next_slot()
    world.settle()
    assert world.running_now() == {"a"}
    for _ in range(2):
        world.next_slot()
        world.settle()
    assert world.running_now() == {"b"}


def test_accelerators_are_taken_in_the_order_in_which_the_user_names_them() -> None:
    nodes = tuple(Node(NodeName(kind), Resources(cpu_milli=2000), kind) for kind in ("k80", "p100", "v100"))
    world = Ranked(nodes)
    for name in "abc":
        world.assign(name, 2, accelerators=("v100", "k80"))
    world.next_slot()
    world.settle()
    places = {name: world.status(name).placement for name in "abc"}
    assert [entry.node for entry in places["a"]] == ["v100", "v100"]
    assert [entry.node for entry in places["b"]] == ["k80", "k80"]
    assert world.running_now() == {"a", "b"}, "p100 will not do"


def test_where_no_ranks_come_in_time_jobs_start_in_the_order_of_arrival_and_are_asked_about_again() -> None:
    """A policy that hangs must not stop the cluster."""
    world = Ranked((node("n1", 1),), policy="sjf")
    world.assign("a", expected_s=1000.0)
    world.assign("b", expected_s=10.0)
    world.assign("c", expected_s=5.0)
    world.next_slot(answer=False)
    world.settle()
    assert world.running_now() == {"a"}
    world.finish(JobId("a"))
    world.next_slot()
    world.settle()
    assert world.running_now() == {"c"}


def test_jobs_that_start_or_stop_keep_their_queue_of_las2d() -> None:
    """Live, a start takes longer than a slot: a job that is not asked about meanwhile would begin anew at the top."""
    world = Ranked((node("n1", 1),), keep_running=False, policy="las2d", options={"limits": [5.0, 15.0]})
    world.assign("a")
    world.assign("z", 9)  # fits nowhere; the policy is asked about it in every slot
    world.next_slot()
    world.settle()
    for _ in range(4):
        world.next_slot()
    assert world.ranks[JobId("a")][0] == 2
    world.assign("b")
    world.next_slot()
    world.next_slot()
    world.settle()
    world.tell(CancelRequested(world.now_s, JobId("b")))
    world.settle()
    world.next_slot()
    assert world.ranks[JobId("a")][0] == 2, "it was stopped while others were asked about"
    world.next_slot()
    assert world.status("a").phase is JobPhase.STARTING
    world.settle()
    world.next_slot()
    assert world.ranks[JobId("a")][0] == 2


def test_an_elastic_job_turns_ranks_into_allocations_and_back() -> None:
    """Disciplines admit and grow where jobs can grow; the order stays the same."""
    world = Ranked((node("n1", 4),), keep_running=False)
    world.assign("a", 1)
    elastic = spec("e", workers=(1, 4), ps=(0, 0), submitted_s=world.now_s)
    world.specs[elastic.job_id] = elastic
    world.tell(JobAssigned(world.now_s, elastic, dispatched(elastic)))
    world.now_s += 10.0
    world.slot += 1
    asked = [c for c in world.tell(SlotStarted(world.now_s, world.slot)) if isinstance(c, AskPolicy)]
    assert not asked[0].ranks
    world.tell(PolicyDecided(world.now_s, guardrail.decide(asked[0], world.discipline, plugins.make("drf", {}))))
    world.settle()
    assert str(world.status("e").allocation) == "3w+0ps"
    world.finish(JobId("e"))
    world.assign("b", 3)
    world.next_slot()
    world.settle()
    assert world.running_now() == {"a", "b"}
