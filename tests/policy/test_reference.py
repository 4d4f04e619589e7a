"""DL2's own schedulers against what its own code computed, job by job."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from fedsched.core.decision import Decision, JobView, Observation
from fedsched.core.ids import JobId
from fedsched.core.job import Allocation
from fedsched.core.placement import TentativePlacement
from fedsched.core.rebuilding import EmptyCluster, Rebuilding
from fedsched.core.resources import Resources, total
from fedsched.errors import InvalidInput
from fedsched.policy.reference import Dl2Drf, Dl2Fifo, Dl2Optimus, Dl2Srtf, Dl2Tetris, Oracle
from fedsched.sim.dl2_workload import EPOCH_SAMPLES
from fedsched.sim.ports import SimulatedJob
from tests.policy.observations import job, node, observation
from tests.sim import dl2_golden

SCHEDULERS = ("DRF", "FIFO", "SRTF", "Tetris", "Optimus")
Grid = dict[tuple[str, int, int], float]


@dataclass(frozen=True)
class Slot:
    """What happened in one slot."""

    decision: Decision
    budget: Rebuilding
    ends: dict[JobId, float]
    """Of the jobs that finished in it: slots from the start to where in it they did, less one."""


def policy_of(name: str, grid: Grid) -> Dl2Drf | Dl2Fifo | Dl2Srtf | Dl2Tetris | Dl2Optimus:
    def oracle(view: JobView, workers: int, ps: int, elapsed_s: float) -> float:
        return grid[view.job_type, ps, workers] * elapsed_s / EPOCH_SAMPLES[view.job_type]

    simple = {"DRF": Dl2Drf, "FIFO": Dl2Fifo, "SRTF": Dl2Srtf, "Tetris": Dl2Tetris}
    return Dl2Optimus(oracle) if name == "Optimus" else simple[name]()


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


def play(golden: dl2_golden.Golden, name: str, grid: Grid) -> Iterator[Slot]:
    """The reference's slot loop: decide on an empty cluster, then let everything train for a slot."""
    policy, length_s = policy_of(name, grid), golden.slot_length_s
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
            kind = live[one].spec.job_type
            epochs = grid[kind, allocation.ps, allocation.workers] * length_s / EPOCH_SAMPLES[kind]
            if progress[one] + epochs > live[one].epochs:
                ends[one] = slot - 1 + (live.pop(one).epochs - progress[one]) / epochs
            else:
                progress[one] += epochs
        yield Slot(decision, budget, ends)
        slot += 1


def differences(golden: dl2_golden.Golden, name: str, grid: Grid) -> list[str]:
    """What is not as the reference has it: allocations of the slots that it recorded, and every job's end."""
    expected = golden.results[name]
    ends = {one: (slot, end) for one, slot, end in expected["completion"]}
    found = []
    slots = 0
    for slot, happened in enumerate(play(golden, name, grid)):
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
def grid(golden_dir: Path) -> Grid:
    return dl2_golden.speed_grid(golden_dir)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize(
    "workload",
    [
        "default500Poisson_seed1",
        "default500Uniform_seed1",
        "default500_seed1",
        "default500_seed2",
        "default500e3k_seed1",
        "small48e3k_seed1",
        "small48e3k_seed2",
        "small48e3k_seed3",
        "small48e3k_seed4",
        "small48e3k_seed5",
        "template48_seed1",
        "testbed6_seed1",
        "testbed6_seed2",
        "testbed6_seed3",
    ],
)
def test_every_job_ends_when_the_reference_says(golden_dir: Path, grid: Grid, workload: str, scheduler: str) -> None:
    """Whoever compares with the paper's numbers compares with these schedulers; a near miss would be another one."""
    golden = dl2_golden.load(golden_dir / "dl2" / f"{workload}.json")
    assert differences(golden, scheduler, grid) == []
