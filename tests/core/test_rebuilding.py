"""The budget of DL2's reference: what a slot that is rebuilt from nothing gives, and when it ends."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsched.core.cluster import Node
from fedsched.core.decision import JobView, Observation
from fedsched.core.ids import JobId, NodeName, TaskName
from fedsched.core.job import Allocation, Range, Role, TaskPlacement, allocation_of
from fedsched.core.rebuilding import Rebuilding
from fedsched.core.resources import Resources, total

CPU, GPU = Resources(cpu_milli=2000), Resources(cpu_milli=2000, gpu_milli=1000)


def nodes(count: int, *, accelerator: str = "") -> list[Node]:
    """Machines of 8 CPUs and 2 GPUs, as the reference has them."""
    return [Node(NodeName(f"n{index}"), Resources(8000, 0, 2000), accelerator) for index in range(count)]


def view(name: str, worker: Resources = GPU, *, most: int = 16, least: int = 1, **fields: object) -> JobView:
    return JobView(
        job_id=JobId(name),
        job_type="any",
        workers=Range(least, most),
        ps=Range(1, most),
        worker_demand=worker,
        ps_demand=CPU,
        epochs=10.0,
        progress_epochs=0.0,
        arrived_s=0.0,
        waited_slots=0,
        **fields,  # type: ignore[arg-type]
    )


def budget(machines: Sequence[Node], *views: JobView) -> Rebuilding:
    return Rebuilding(Observation(1, 1200.0, tuple(machines), views))


def names(*of: str) -> list[JobId]:
    return [JobId(name) for name in of]


def test_the_least_loaded_node_is_next_and_the_first_among_equals() -> None:
    """Equality with the reference hangs on every single placement."""
    spent = budget(nodes(3), view("a"), view("b", CPU))
    spent.fill(names("b", "a", "b", "b"))
    # b: 4 CPUs on n0; a: 4 CPUs and a GPU, which counts for 4 more, on n1; then n2, then n0, which has less than n1.
    assert [entry.node for entry in spent.placement(JobId("b")) if entry.role is Role.WORKER] == ["n0", "n2", "n0"]
    assert {entry.node for entry in spent.placement(JobId("a"))} == {"n1"}


def test_one_request_without_room_ends_the_slot_for_everybody() -> None:
    """The reference strands capacity so; who compares with it must strand the same."""
    spent = budget(nodes(2), view("a"), view("b", CPU))
    spent.fill(names("b", "b", "b", "b", "a"))
    assert spent.allocation(JobId("a")) == Allocation()
    spent = budget(nodes(2), view("big", Resources(cpu_milli=7000)), view("small", CPU))
    assert not spent.grant(JobId("big"), 1, 1)
    assert not spent.grant(JobId("small"), 1, 1)
    assert not spent.would_fit(JobId("small"))
    assert spent.free() == Resources(16_000, 0, 4000)


def test_a_refusal_that_is_not_for_want_of_room_ends_nothing() -> None:
    """A job at its maximum must not cost the others the rest of the slot."""
    spent = budget(nodes(4), view("a", most=1), view("b"))
    spent.fill(names("a", "a", "b"))
    assert not spent.grant(JobId("a"), workers=1)
    assert not spent.grant(JobId("nobody"), 1, 1)
    assert not spent.grant(JobId("b"), -1, 2)
    assert spent.grant(JobId("b"), ps=1)
    assert spent.allocations() == ((JobId("a"), Allocation(1, 1)), (JobId("b"), Allocation(1, 2)))


def test_single_tasks_may_come_first_but_count_only_from_the_minimum_on() -> None:
    """The reference's Optimus grants task by task; a job that got a worker and no server cannot train."""
    spent = budget(nodes(2), view("a"), view("b", least=2))
    assert spent.grant(JobId("a"), workers=1)
    assert spent.grant(JobId("b"), 1, 1)
    assert spent.allocations() == ()
    assert spent.placement(JobId("a")) == spent.placement(JobId("b")) == ()
    assert spent.grant(JobId("a"), ps=1)
    assert spent.allocations() == ((JobId("a"), Allocation(1, 1)),)
    assert allocation_of(spent.placement(JobId("a"))) == Allocation(1, 1)


def test_pinned_jobs_stay_where_they_are_and_count() -> None:
    """A job in the middle of a resize holds its nodes; to place others there would break a promise."""
    stays = (TaskPlacement(TaskName("ps-0"), NodeName("n0")), TaskPlacement(TaskName("worker-0"), NodeName("n0")))
    spent = budget(nodes(2), view("a", pinned=True, placement=stays), view("b"))
    assert spent.grant(JobId("b"), 1, 1)
    assert {entry.node for entry in spent.placement(JobId("b"))} == {"n1"}
    assert not spent.grant(JobId("a"), workers=1)
    assert spent.placement(JobId("a")) == stays
    assert spent.allocations() == ((JobId("a"), Allocation(1, 1)), (JobId("b"), Allocation(1, 1)))


def test_cordoned_nodes_and_wrong_accelerators_take_nothing() -> None:
    """What is granted must really be placeable there."""
    machines = [*nodes(1, accelerator="k80"), Node(NodeName("x"), Resources(8000, 0, 2000), "v100", schedulable=False)]
    spent = budget(machines, view("a", accelerators=("v100",)), view("b"))
    assert spent.would_fit(JobId("b"))
    assert not spent.would_fit(JobId("a"))
    assert not spent.grant(JobId("b"), 1, 1, accelerator="v100")
    assert budget(machines, view("b")).grant(JobId("b"), 1, 1, accelerator="k80")
    assert not budget([], view("b")).grant(JobId("b"), 1, 1)


def test_memory_is_no_load_but_must_fit() -> None:
    """The reference knows no memory; real nodes do."""
    machine = Node(NodeName("n0"), Resources(8000, 1000, 0))
    hungry = Resources(cpu_milli=1000, memory_mib=600)
    spent = budget([machine], view("a", hungry))
    assert spent.grant(JobId("a"), 1, 1)
    assert spent.room(0) == Resources(5000, 400, 0)
    assert not spent.grant(JobId("a"), workers=1)


demands = st.builds(
    Resources,
    cpu_milli=st.sampled_from([1000, 2000, 3000]),
    memory_mib=st.sampled_from([0, 100]),
    gpu_milli=st.sampled_from([0, 500, 1000]),
)


@given(
    machines=st.lists(
        st.builds(Resources, st.sampled_from([4000, 8000]), st.just(500), st.sampled_from([0, 2000])), max_size=4
    ),
    workers=st.lists(demands, min_size=1, max_size=4),
    order=st.lists(st.integers(0, 3), max_size=30),
    most=st.integers(1, 6),
)
def test_filling_is_granting_in_turn_and_never_overfills_a_node(
    machines: list[Resources], workers: list[Resources], order: list[int], most: int
) -> None:
    """The fast way must give what the slow way gives, and neither may promise a CPU twice."""
    cluster = [Node(NodeName(f"n{index}"), capacity) for index, capacity in enumerate(machines)]
    views = [view(f"j{index}", worker, most=most) for index, worker in enumerate(workers)]
    turns = [views[turn % len(views)].job_id for turn in order]
    fast, slow = budget(cluster, *views), budget(cluster, *views)
    fast.fill(turns)
    for turn in turns:
        if slow.allocation(turn).workers < most and not slow.grant(turn, 1, 1):
            break
    assert fast.allocations() == slow.allocations()
    placed = {one.job_id: fast.placement(one.job_id) for one in views}
    assert placed == {one.job_id: slow.placement(one.job_id) for one in views}
    for index, node in enumerate(cluster):
        held = total(
            [
                one.worker_demand if entry.role is Role.WORKER else one.ps_demand
                for one in views
                for entry in placed[one.job_id]
                if entry.node == node.name
            ]
        )
        assert fast.room(index) + held == node.capacity
    assert all(list(placement) == sorted(placement) for placement in placed.values())


def test_what_one_slot_granted_is_not_missing_in_the_next() -> None:
    """Half of a slot's time would go into reading 500 nodes, so the empty cluster is kept while they are the same."""
    seen = Observation(1, 1200.0, tuple(nodes(3)), (view("a"),))
    for _ in range(2):
        spent = Rebuilding(seen)
        spent.fill(names("a", "a"))
        assert {entry.node for entry in spent.placement(JobId("a"))} == {"n0", "n1"}
        assert spent.free() == Resources(16_000, 0, 4000)


def test_filling_with_an_unknown_job_is_a_fault() -> None:
    """A policy that makes up jobs must be noticed, not served."""
    with pytest.raises(KeyError):
        budget(nodes(1), view("a")).fill(names("b"))
