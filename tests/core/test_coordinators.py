"""Where a cluster counts coordinators, each of them has a place, as any task has."""

from __future__ import annotations

import itertools
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsched.core.choosing import Gang, Rooms, Rule, footprint_of
from fedsched.core.cluster import Node
from fedsched.core.events import JobAssigned, NodeChanged, NodeLost, SlotStarted
from fedsched.core.ids import JobId, NodeName
from fedsched.core.job import COORDINATOR, JobPhase, JobStatus, Reason, coordinator_of, members_of
from fedsched.core.resources import Resources, amount_of, resources_of
from tests.core.test_ranked import Ranked
from tests.core.world import CPU, World, dispatched, node, spec


def assign(world: World, *names: str, **changes: Any) -> None:
    for name in names:
        world.now_s += 0.001
        job = spec(name, submitted_s=world.now_s, coordinator_demand=CPU, **changes)
        world.specs[job.job_id] = job
        world.tell(JobAssigned(world.now_s, job, dispatched(job)))


def slot(world: World, number: int, allocations: dict[str, tuple[int, int]] | None = None) -> None:
    world.now_s += 10.0
    world.tell(SlotStarted(world.now_s, number))
    world.decide(allocations)
    world.settle()


def status(world: World, name: str) -> JobStatus:
    return world.statuses[JobId(name)]


def test_a_full_cluster_has_room_for_the_coordinators_of_all_jobs_that_it_starts() -> None:
    """Slurm gives a coordinator a processor of its own: a job whose tasks alone fit would wait there, half started."""
    world = World((node("n1", 4), node("n2", 4)))
    assign(world, "a", "b", "c", workers=(1, 1), ps=(1, 1))

    slot(world, 1)

    assert [status(world, name).phase for name in "abc"] == [JobPhase.RUNNING, JobPhase.RUNNING, JobPhase.DISPATCHED]
    assert status(world, "c").reason is Reason.WAITING_FOR_CAPACITY
    assert "needs 3 cpu" in status(world, "c").message
    for name in "ab":
        assert [entry.task for entry in coordinator_of(status(world, name).placement)] == [COORDINATOR]
        assert status(world, name).allocation.workers == status(world, name).allocation.ps == 1


@pytest.mark.parametrize("world", [World((node("n1", 4), node("n2", 4))), Ranked((node("n1", 4), node("n2", 4)))])
def test_a_coordinator_is_on_a_node_of_its_job_where_there_is_room(world: World) -> None:
    """A job that is on two nodes where one would do is lost with either of them."""
    for number, name in enumerate("abc", start=1):
        assign(world, name, workers=(1, 1), ps=(0, 0))
        if isinstance(world, Ranked):
            world.next_slot()
            world.settle()
        else:
            slot(world, number)
        assert len({entry.node for entry in status(world, name).placement}) == 1


def test_a_job_is_resized_around_its_coordinator_which_stays() -> None:
    """A coordinator that moved would take the whole job down."""
    world = World((node("n1", 4), node("n2", 4)))
    assign(world, "a")
    slot(world, 1, {"a": (1, 1)})
    where = coordinator_of(status(world, "a").placement)
    for number, size in enumerate([(4, 1), (1, 2), (3, 1)], start=2):
        slot(world, number, {"a": size})
        assert coordinator_of(status(world, "a").placement) == where
        assert (status(world, "a").allocation.workers, status(world, "a").allocation.ps) == size


def test_a_job_whose_coordinator_loses_its_node_goes_elsewhere() -> None:
    """Its tasks cannot train on without it."""
    world = World((node("n1", 1), node("n2", 2), node("n3", 3)))
    assign(world, "a", workers=(1, 1), ps=(1, 1))
    slot(world, 1)
    ((_, name),) = [(entry.task, entry.node) for entry in coordinator_of(status(world, "a").placement)]

    world.tell(NodeLost(world.now_s, name))
    world.settle()
    slot(world, 2)

    assert status(world, "a").attempt == 2
    assert status(world, "a").failures == 0
    assert name not in {entry.node for entry in status(world, "a").placement}


def test_a_node_that_shrinks_below_a_coordinator_gives_the_whole_job_back() -> None:
    """Tasks can be taken off one by one, a coordinator cannot."""
    world = World((node("n1", 6),))
    assign(world, "a", workers=(1, 4), ps=(0, 0))
    slot(world, 1)
    assert status(world, "a").allocation.workers == 4

    world.tell(NodeChanged(world.now_s, node("n1", 2)))
    world.settle()
    assert (status(world, "a").phase, status(world, "a").allocation.workers) == (JobPhase.RUNNING, 1)
    world.tell(NodeChanged(world.now_s, node("n1", 0)))
    world.settle()

    assert status(world, "a").phase is JobPhase.DISPATCHED
    assert not status(world, "a").placement


def test_a_job_that_was_started_without_a_place_for_its_coordinator_goes_on_without() -> None:
    """The agent was upgraded, or begins to count coordinators: what runs must not be touched for that."""
    world = World((node("n1", 4),))
    job = spec("a", workers=(1, 3), ps=(0, 0), submitted_s=world.now_s)
    world.specs[job.job_id] = job
    world.tell(JobAssigned(world.now_s, job, dispatched(job)))
    slot(world, 1, {"a": (2, 0)})
    world.specs[job.job_id] = spec("a", workers=(1, 3), ps=(0, 0), submitted_s=job.submitted_s, coordinator_demand=CPU)
    world.restart()
    world.settle()

    slot(world, 2, {"a": (3, 0)})

    assert status(world, "a").attempt == 1
    assert [entry.task for entry in status(world, "a").placement] == ["worker-0", "worker-1", "worker-2"]


@pytest.mark.parametrize("policy", ["fifo", "srtf"])
def test_disciplines_that_rank_jobs_of_fixed_size_place_coordinators_too(policy: str) -> None:
    """They choose nodes by another way than policies that allocate."""
    world = Ranked((node("n1", 4), node("n2", 3)), policy=policy)
    for name in "abc":
        world.assign(name, 2, coordinator_demand=CPU)
    world.next_slot()
    world.settle()

    assert len(world.running) == 2
    for name in world.running:
        assert len(coordinator_of(world.statuses[name].placement)) == 1


@given(
    nodes=st.lists(st.tuples(st.integers(0, 4), st.sampled_from(["", "V100"])), min_size=1, max_size=3),
    worker=st.integers(1, 3),
    ps=st.integers(1, 2),
    size=st.tuples(st.integers(1, 3), st.integers(0, 2)),
    coordinator=st.integers(0, 2),
    accelerators=st.sampled_from([(), ("V100",)]),
    rule=st.sampled_from(["spread", "pack", "consolidate"]),
)
def test_a_gang_and_its_coordinator_are_placed_whenever_they_fit_in_any_way(
    nodes: list[tuple[int, str]],
    worker: int,
    ps: int,
    size: tuple[int, int],
    coordinator: int,
    accelerators: tuple[str, ...],
    rule: Rule,
) -> None:
    """The controller admits what can be packed; what the cluster then never places waits for ever."""
    machines = {
        NodeName(f"n{i}"): Node(NodeName(f"n{i}"), Resources(cpus * 1000), kind) for i, (cpus, kind) in enumerate(nodes)
    }
    job = spec(
        "a",
        workers=(size[0], size[0]),
        ps=(size[1], size[1]),
        worker_demand=Resources(worker * 1000),
        ps_demand=Resources(ps * 1000),
        coordinator_demand=Resources(coordinator * 1000),
        accelerators=accelerators,
    )
    gang = Gang(job)
    rooms = Rooms(machines, {name: amount_of(machine.capacity) for name, machine in machines.items()}, rule, Random(1))
    before = rooms.left()

    places = rooms.gang(gang)

    allowed = [i for i, (_, kind) in enumerate(nodes) if not accelerators or kind in accelerators]
    tasks = [worker] * size[0] + [ps] * size[1] + [coordinator]
    fits = any(
        all(sum(c for c, at in zip(tasks, way, strict=True) if at == i) <= cpus for i, (cpus, _) in enumerate(nodes))
        for way in itertools.product(*[allowed] * (len(tasks) - 1), range(len(nodes)))
    )
    assert (places is not None) == fits
    if places is None:
        assert rooms.left() == before
        return
    assert len(coordinator_of(places)) == bool(coordinator)
    assert all(not accelerators or machines[entry.node].accelerator in accelerators for entry in members_of(places))
    for name, amount in footprint_of(places, gang.worker, gang.ps, gang.coordinator):
        assert amount <= amount_of(machines[name].capacity)
    assert before - rooms.left() == resources_of(gang.whole)
