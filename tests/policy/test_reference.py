"""DL2's own schedulers against what its own code computed, job by job."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from msgspec.structs import replace

from fedsched.core.cluster import Node
from fedsched.core.decision import Decision, JobView, Observation, Policy
from fedsched.core.ids import JobId, NodeName
from fedsched.core.job import Range
from fedsched.core.placement import TentativePlacement
from fedsched.core.rebuilding import EmptyCluster, Rebuilding
from fedsched.core.resources import Resources
from fedsched.errors import InvalidInput
from fedsched.policy.reference import Dl2Drf, Dl2Fifo, Dl2Optimus, Dl2Srtf, Dl2Tetris
from fedsched.sim.dl2_workload import EPOCH_SAMPLES, NODE
from fedsched.sim.ports import Setting, SimulatedJob, SpeedModel
from fedsched.sim.speeds.oracle import oracle
from fedsched.sim.speeds.points import read_points
from fedsched.sim.speeds.table import MeasuredSpeeds
from tests.sim import dl2_golden

SCHEDULERS = ("DRF", "FIFO", "SRTF", "Tetris", "Optimus")


@dataclass(frozen=True)
class Slot:
    """What happened in one slot."""

    decision: Decision
    budget: Rebuilding
    ends: dict[JobId, float]
    """Of the jobs that finished in it: slots from the start to where in it they did, less one."""


def policy_of(name: str, golden: dl2_golden.Golden, speeds: SpeedModel) -> Policy:
    policies: dict[str, Policy] = {
        "DRF": Dl2Drf(),
        "FIFO": Dl2Fifo(),
        "SRTF": Dl2Srtf(),
        "Tetris": Dl2Tetris(),
        "Optimus": Dl2Optimus(oracle(speeds, {one.spec.job_id: one for one in golden.jobs})),
    }
    return policies[name]


def view_of(simulated: SimulatedJob, progress: float) -> JobView:
    spec = simulated.spec
    return JobView(
        job_id=spec.job_id,
        job_type=spec.job_type,
        workers=spec.workers,
        ps=spec.ps,
        worker_demand=spec.worker_demand,
        ps_demand=spec.ps_demand,
        epochs=spec.epochs,
        progress_epochs=progress,
        arrived_s=spec.submitted_s,
        waited_slots=0,
    )


def play(golden: dl2_golden.Golden, name: str, speeds: SpeedModel) -> Iterator[Slot]:
    """The reference's slot loop: decide on an empty cluster, then let everything train for a slot."""
    policy, length_s = policy_of(name, golden, speeds), golden.slot_length_s
    waiting, live, progress = list(reversed(golden.jobs)), dict[JobId, SimulatedJob](), dict[JobId, float]()
    slot, empty = 0, EmptyCluster(golden.nodes)
    while waiting or live:
        while waiting and waiting[-1].spec.submitted_s <= slot * length_s:
            come = waiting.pop()
            live[come.spec.job_id], progress[come.spec.job_id] = come, 0.0
        seen = Observation(
            slot, length_s, golden.nodes, tuple(view_of(live[one], progress[one]) for one in sorted(live))
        )
        budget = Rebuilding(seen, empty)
        decision = policy.decide(seen, budget)
        ends = {}
        for one, allocation in decision.allocations:
            epochs = speeds.epochs(live[one], Setting(allocation), length_s)
            if progress[one] + epochs > live[one].epochs:
                ends[one] = slot - 1 + (live.pop(one).epochs - progress[one]) / epochs
            else:
                progress[one] += epochs
        yield Slot(decision, budget, ends)
        slot += 1


def differences(golden: dl2_golden.Golden, name: str, speeds: SpeedModel) -> list[str]:
    """What is not as the reference has it: allocations of the slots that it recorded, and every job's end."""
    expected = golden.results[name]
    ends = {one: (slot, end) for one, slot, end in expected["completion"]}
    found = []
    slots = 0
    for slot, happened in enumerate(play(golden, name, speeds)):
        slots += 1
        if slot < len(expected["alloc_per_slot"]):
            have = [
                [dl2_golden.number_of(one), allocation.workers, allocation.ps]
                for one, allocation in happened.decision.allocations
            ]
            if have != sorted(expected["alloc_per_slot"][slot]):
                found.append(f"slot {slot}: {have} instead of {expected['alloc_per_slot'][slot]}")
        for one, end in happened.ends.items():
            expected_slot, expected_end = ends.pop(dl2_golden.number_of(one))
            if slot != expected_slot or abs(end - expected_end) > 1e-9:
                found.append(f"{one} ends at {end} in slot {slot}, not at {expected_end} in slot {expected_slot}")
    if ends or slots != expected["slots"]:
        found.append(f"jobs that never ended: {sorted(ends)}; {slots} slots instead of {expected['slots']}")
    return found


@pytest.fixture(scope="module")
def speeds(golden_dir: Path) -> SpeedModel:
    return MeasuredSpeeds(read_points(golden_dir / "dl2" / "speed_grid.csv"), EPOCH_SAMPLES)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("workload", dl2_golden.WORKLOADS)
def test_every_job_ends_when_the_reference_says(
    golden_dir: Path, speeds: SpeedModel, workload: str, scheduler: str
) -> None:
    """Whoever compares with the paper's numbers compares with these schedulers; a near miss would be another one."""
    golden = dl2_golden.load(golden_dir / "dl2" / f"{workload}.json")
    assert differences(golden, scheduler, speeds) == []


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
