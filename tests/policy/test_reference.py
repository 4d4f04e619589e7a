"""The oddities of DL2's own schedulers; whole runs of theirs are compared in tests/sim/test_equality.py."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from fedsched.core.cluster import Node
from fedsched.core.decision import JobView, Observation, Policy
from fedsched.core.ids import JobId, NodeName
from fedsched.core.job import Range
from fedsched.core.placement import TentativePlacement
from fedsched.core.rebuilding import Rebuilding
from fedsched.core.resources import Resources
from fedsched.errors import InvalidInput
from fedsched.policy.reference import Dl2Drf, Dl2Fifo, Dl2Optimus, Dl2Srtf, Dl2Tetris
from fedsched.sim.dl2_workload import NODE


def decide(policy: Policy, *views: JobView, count: int = 2) -> list[tuple[str, int, int]]:
    """Allocations on so many of the reference's machines."""
    machines = tuple(Node(NodeName(f"n{index}"), NODE) for index in range(count))
    seen = Observation(1, 1200.0, machines, views)
    return [(one, size.workers, size.ps) for one, size in policy.decide(seen, Rebuilding(seen)).allocations]


def view(name: str, *, epochs: float = 100.0, progress: float = 0.0, most: int = 16, gpu: int = 1000) -> JobView:
    return JobView(
        job_id=JobId(name),
        job_type="any",
        workers=Range(1, most),
        ps=Range(1, most),
        worker_demand=Resources(2000, 0, gpu),
        ps_demand=Resources(2000),
        epochs=epochs,
        progress_epochs=progress,
        arrived_s=0.0,
        waited_slots=0,
    )


def test_on_a_cluster_that_keeps_its_tasks_they_say_that_it_is_the_wrong_one() -> None:
    """What they would decide there is neither the reference's result nor a sensible one."""
    seen = Observation(1, 1200.0, (Node(NodeName("n0"), NODE),), (view("a"),))
    with pytest.raises(InvalidInput, match="dl2_fifo decides on clusters that are filled anew"):
        Dl2Fifo().decide(seen, TentativePlacement(seen))


def test_fifo_and_srtf_give_one_job_all_that_it_can_use_before_the_next() -> None:
    """SRTF goes by the fraction that remains: a long job nearly done comes before a short one that just began."""
    long_job, short_job = view("a", epochs=1000, progress=100, most=3), view("b", epochs=10, progress=5, most=3)
    assert decide(Dl2Fifo(), long_job, short_job) == [("a", 3, 3), ("b", 1, 1)]
    assert decide(Dl2Srtf(), long_job, short_job) == [("a", 1, 1), ("b", 3, 3)]


def test_drf_gives_the_next_bundle_to_the_smallest_share() -> None:
    """Jobs with smaller tasks hold more of them when shares are equal."""
    small = view("b", gpu=0)
    assert decide(Dl2Drf(), view("a"), view("c")) == [("a", 2, 2), ("c", 2, 2)]
    assert decide(Dl2Drf(), view("a", gpu=2000), small, count=4) == [("a", 2, 2), ("b", 4, 4)]


def test_drf_lets_jobs_without_demand_have_their_fill_first() -> None:
    """Their share stays 0, so nothing ever comes before them."""
    nothing = replace(view("a", most=3), worker_demand=Resources(), ps_demand=Resources())
    assert decide(Dl2Drf(), nothing, view("b"), count=1) == [("a", 3, 3), ("b", 2, 2)]


def test_tetris_prefers_the_job_with_more_work_left() -> None:
    """Against the paper, but so is the code whose results are to be met."""
    assert decide(Dl2Tetris(), view("a", progress=90, most=3), view("b", most=3)) == [("a", 1, 1), ("b", 3, 3)]
    assert decide(Dl2Tetris(), view("a", progress=100)) == []


def test_optimus_stops_at_the_first_job_that_gains_nothing() -> None:
    """Every job gets what it cannot train without; more only as long as it saves time."""

    def true_speeds(view: JobView, workers: int, ps: int, elapsed_s: float) -> float:
        return elapsed_s * min(workers, 2) * (1.0 if ps < 3 else 1.1)

    assert decide(Dl2Optimus(true_speeds), view("a"), view("b"), count=4) == [("a", 2, 1), ("b", 2, 1)]
    assert decide(Dl2Optimus(true_speeds), view("a", progress=101), count=4) == [("a", 1, 1)]
    assert decide(Dl2Optimus(lambda *_: 0.0), view("a"), count=4) == [("a", 1, 1)]


def test_optimus_without_an_oracle_says_so_and_can_be_given_one() -> None:
    """A live cluster has no truth to tell; a simulated one has it only once its jobs are drawn."""
    policy = Dl2Optimus()
    with pytest.raises(InvalidInput, match="dl2_optimus must be told the true speeds"):
        decide(policy, view("a"))
    policy.consult(lambda view, workers, ps, elapsed_s: elapsed_s)
    assert decide(policy, view("a")) == [("a", 1, 1)]
