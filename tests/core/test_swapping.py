"""Jobs that stand in each other's places on a full cluster change them: stopped, and started again, in order."""

from __future__ import annotations

from dataclasses import dataclass

import hypothesis.strategies as st
from hypothesis import given, settings

from fedsched.core.cluster import Node
from fedsched.core.commands import ScaleJob, StartJob, StopJob
from fedsched.core.decision import Decision
from fedsched.core.events import JobAssigned, NodeChanged, PolicyDecided, SlotStarted
from fedsched.core.explain import explain
from fedsched.core.ids import JobId, NodeName
from fedsched.core.job import Allocation, JobPhase, JobStatus, Reason
from fedsched.core.resources import Resources
from fedsched.core.views import Job
from tests.core.world import World, dispatched, spec

KINDS = ("k80", "p100", "v100")


def gpu_node(name: str, gpus: int) -> Node:
    return Node(NodeName(name), Resources(gpu_milli=gpus * 1000), name.partition("-")[0])


@dataclass
class Types(World):
    """A cluster with accelerator types, whose policy says which job belongs on which."""

    keep_running: bool = False
    slot: int = 0

    def assign(self, name: str, gpus: int) -> None:
        job = spec(name, workers=(gpus, gpus), ps=(0, 0), worker_demand=Resources(gpu_milli=1000))
        self.specs[job.job_id] = job
        self.tell(JobAssigned(self.now_s, job, dispatched(job)))

    def put(self, **kinds: str) -> None:
        """The next slot's decision: each of these jobs, with its minimum, on this type."""
        self.slot += 1
        self.now_s += 10.0
        self.tell(SlotStarted(self.now_s, self.slot))
        question = self.questions.pop()
        sizes = {view.job_id: view.minimum.workers for view in question.observation.jobs}
        allocations = tuple(
            (JobId(name), Allocation(sizes[JobId(name)])) for name in sorted(kinds) if JobId(name) in sizes
        )
        accelerators = tuple((JobId(name), kind) for name, kind in sorted(kinds.items()) if JobId(name) in sizes)
        decision = Decision(self.slot, allocations, "gavel_maxmin", accelerators=accelerators)
        self.tell(PolicyDecided(self.now_s, decision))

    def where(self) -> dict[str, str]:
        """Types under what really runs."""
        return {
            str(job_id): "+".join(sorted({entry.node.partition("-")[0] for entry in attempt.tasks}))
            for job_id, attempt in sorted(self.running.items())
        }

    def status(self, name: str) -> JobStatus:
        return self.statuses[JobId(name)]


def test_two_rigid_jobs_swap_types_on_a_full_cluster() -> None:
    """Without that a round-based policy's shares are a promise that nobody keeps once the cluster is full."""
    world = Types((gpu_node("k80", 2), gpu_node("v100", 2)))
    world.assign("a", 2)
    world.assign("b", 2)
    world.put(a="k80", b="v100")
    world.settle()
    assert world.where() == {"a": "k80", "b": "v100"}

    world.put(a="v100", b="k80")
    assert [type(order) for order in world.inbox] == [StopJob, StopJob]
    assert all(order.checkpoint and order.reason is Reason.PREEMPTED for order in world.inbox)  # type: ignore[union-attr]
    world.carry_out()
    assert [type(order) for order in world.inbox] == [StopJob], "a's new place is not free yet"
    said = world.status("a")
    assert (said.phase, said.reason) == (JobPhase.DISPATCHED, Reason.PREEMPTED)
    assert said.message == "moves to v100, where others leave for its own place; it starts again there"
    told = explain(Job(world.specs[JobId("a")], said), [], [], world.now_s)
    assert (told.reason, told.next_step) == (
        Reason.PREEMPTED,
        "nothing: it goes on from its checkpoint as soon as it has its place",
    )
    world.carry_out()
    assert [type(order) for order in world.inbox] == [StartJob, StartJob]
    world.settle()
    assert world.where() == {"a": "v100", "b": "k80"}
    assert [world.status(name).attempt for name in "ab"] == [2, 2]
    assert [world.status(name).failures for name in "ab"] == [0, 0]
    assert [entry.task for entry in world.status("a").placement] == ["worker-0", "worker-1"]


def test_a_gang_changes_places_with_several_small_jobs() -> None:
    world = Types((gpu_node("k80", 2), gpu_node("v100", 2)))
    world.assign("a", 2)
    world.assign("b", 1)
    world.assign("c", 1)
    world.put(a="k80", b="v100", c="v100")
    world.settle()
    world.put(a="v100", b="k80", c="k80")
    world.settle()
    assert world.where() == {"a": "v100", "b": "k80", "c": "k80"}


def test_who_only_waits_for_another_that_is_on_its_way_is_not_stopped() -> None:
    """A stop costs a job its processes; b's place is about to be left without one."""
    world = Types((gpu_node("k80", 1), gpu_node("p100", 1), gpu_node("v100", 1)))
    world.assign("a", 1)
    world.assign("b", 1)
    world.put(a="k80", b="p100")
    world.settle()
    world.put(a="p100", b="v100")
    assert [type(order) for order in world.inbox] == [ScaleJob]
    world.settle()
    assert world.where() == {"a": "p100", "b": "v100"}
    assert [world.status(name).attempt for name in "ab"] == [1, 1]


def test_nobody_is_stopped_where_the_scheduler_keeps_what_runs() -> None:
    world = Types((gpu_node("k80", 1), gpu_node("v100", 1)), keep_running=True)
    world.assign("a", 1)
    world.assign("b", 1)
    world.put(a="k80", b="v100")
    world.settle()
    world.put(a="v100", b="k80")
    assert world.inbox == []
    assert world.where() == {"a": "k80", "b": "v100"}


def test_nobody_is_stopped_for_a_place_that_is_gone_meanwhile() -> None:
    """A node that was closed between decision and move would leave the job with nothing."""
    world = Types((gpu_node("k80", 1), gpu_node("p100", 1), gpu_node("v100", 1)))
    for name in "abc":
        world.assign(name, 1)
    world.put(a="k80", b="p100", c="v100")
    world.settle()
    for job_id in "ab":
        job = world.scheduler.state.jobs[JobId(job_id)]
        other = world.scheduler.state.jobs[JobId("b" if job_id == "a" else "a")]
        job.target = tuple(entry for entry in other.status.placement)
    world.scheduler.state.unsettled |= {JobId("a"), JobId("b")}
    closed = Node(NodeName("k80"), Resources(gpu_milli=1000), "k80", schedulable=False)
    world.tell(NodeChanged(world.now_s, closed))
    assert world.inbox == []


@settings(max_examples=150)
@given(data=st.data())
def test_whatever_moves_are_decided_every_job_comes_to_its_type_and_no_node_is_overrun(data: st.DataObject) -> None:
    """Any number of swaps, cycles and chains over three types, with orders carried out in any order."""
    sizes = {kind: data.draw(st.integers(1, 4), label=kind) for kind in KINDS}
    world = Types(tuple(gpu_node(f"{kind}-{n}", 1) for kind in KINDS for n in range(sizes[kind])))
    jobs = {f"job-{n}": data.draw(st.integers(1, 3), label="gang") for n in range(data.draw(st.integers(1, 6)))}
    world.settle()
    for name, gpus in jobs.items():
        world.assign(name, gpus)
    for _ in range(data.draw(st.integers(1, 4), label="slots")):
        free = dict(sizes)
        wanted = {}
        for name in data.draw(st.permutations(sorted(jobs))):
            kind = data.draw(st.sampled_from(KINDS))
            if jobs[name] <= free[kind]:
                free[kind] -= jobs[name]
                wanted[name] = kind
        world.put(**wanted)
        while world.inbox:
            world.carry_out(data.draw(st.integers(0, len(world.inbox) - 1)))
            world.judge()
        assert world.where() == wanted
