"""A policy that names an accelerator type gets nodes of that type, tentatively and for good."""

from __future__ import annotations

from fedsched.core.cluster import Node
from fedsched.core.decision import JobView, Observation
from fedsched.core.ids import JobId, NodeName
from fedsched.core.job import Allocation, Range, Role, TaskPlacement, task_name
from fedsched.core.placement import TentativePlacement, place
from fedsched.core.resources import Resources

JOB = JobId("a")
NODES = tuple(
    Node(NodeName(f"{kind}-{index}"), Resources(gpu_milli=2000), kind) for kind in ("k80", "v100") for index in (0, 1)
)


def job(placement: tuple[TaskPlacement, ...] = (), accelerators: tuple[str, ...] = ()) -> JobView:
    return JobView(
        job_id=JOB,
        job_type="t",
        workers=Range(2, 4),
        ps=Range(0, 0),
        worker_demand=Resources(gpu_milli=1000),
        ps_demand=Resources(),
        epochs=1.0,
        progress_epochs=0.0,
        arrived_s=0.0,
        waited_slots=0,
        placement=placement,
        accelerators=accelerators,
    )


def running_on(node: str) -> tuple[TaskPlacement, ...]:
    return tuple(TaskPlacement(task_name(Role.WORKER, index), NodeName(node)) for index in (0, 1))


def kinds(budget: TentativePlacement) -> set[str]:
    return {entry.node.partition("-")[0] for entry in budget.placement(JOB)}


def test_tasks_go_on_the_type_that_is_asked_for_and_on_no_other() -> None:
    """Gavel's share of a V100 spent on a K80 would be a broken promise; so would a gang over both."""
    budget = TentativePlacement(Observation(0, 1.0, NODES, (job(),)))
    assert budget.grant(JOB, 2, accelerator="v100")
    assert budget.grant(JOB, 2, accelerator="v100")
    assert kinds(budget) == {"v100"}

    small = tuple(node for node in NODES if node.name != "v100-1")
    budget = TentativePlacement(Observation(0, 1.0, small, (job(),)))
    assert budget.grant(JOB, 2, accelerator="v100")
    assert not budget.grant(JOB, 1, accelerator="v100"), "there is room, but of the other type"
    assert budget.grant(JOB, 1)


def test_a_type_that_the_job_does_not_take_is_refused() -> None:
    """The user's list of accelerators stands above any policy."""
    budget = TentativePlacement(Observation(0, 1.0, NODES, (job(accelerators=("k80",)),)))
    assert not budget.grant(JOB, 2, accelerator="v100")
    assert budget.grant(JOB, 2, accelerator="k80")


def test_a_running_job_moves_to_the_type_that_was_decided_and_stays_where_it_is_of_that_type() -> None:
    """Rounds move jobs between types; a job whose type is the same must not pay for a move."""
    wanted = [(JOB, Allocation(2))]
    before = running_on("k80-1")
    seen = Observation(0, 1.0, NODES, (job(before),))
    assert kinds(place(seen, wanted, False, [(JOB, "v100")])) == {"v100"}
    assert place(seen, wanted, False, [(JOB, "k80")]).placement(JOB) == before
    assert place(seen, wanted, False).placement(JOB) == before
