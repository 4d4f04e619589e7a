"""Gavel: its program against brute force, its rounds by hand, and its results against its own simulator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from fedsched.core.cluster import Node
from fedsched.core.commands import AskPolicy
from fedsched.core.decision import Decision, JobView, Observation, SpeedSample
from fedsched.core.ids import JobId, NodeName
from fedsched.core.job import Allocation, Range, Role, TaskPlacement, task_name
from fedsched.core.placement import TentativePlacement
from fedsched.core.resources import Resources
from fedsched.policy import guardrail
from fedsched.policy.gavel import Array, Gavel, GavelMakespan, GavelMaxmin, GavelOptions, greatest_least
from tests.policy import gavel_rounds

KINDS = ("k80", "p100", "v100")
ONE_EACH = np.ones((6, 1))
"""What jobs of one GPU take."""


def job(name: str, speeds: dict[str, float], *, gpus: int = 1, **fields: object) -> JobView:
    """A rigid all-reduce job whose speed on each type is known."""
    given: dict[str, object] = {
        "job_id": JobId(name),
        "job_type": name,
        "workers": Range(gpus, gpus),
        "ps": Range(0, 0),
        "worker_demand": Resources(gpu_milli=1000),
        "ps_demand": Resources(),
        "epochs": 100.0,
        "progress_epochs": 0.0,
        "arrived_s": 0.0,
        "waited_slots": 0,
        "speeds": tuple(SpeedSample(gpus, 0, speed, kind) for kind, speed in speeds.items()),
        **fields,
    }
    return JobView(**given)  # type: ignore[arg-type]


def cluster(jobs: list[JobView], slot: int = 0, **gpus: int) -> Observation:
    """One node of each type."""
    nodes = tuple(Node(NodeName(kind), Resources(gpu_milli=1000 * count), kind) for kind, count in gpus.items())
    ordered = tuple(sorted(jobs, key=lambda view: (view.arrived_s, view.job_id)))
    return Observation(slot, 360.0, nodes, ordered, slot * 360.0)


def decide(policy: Gavel, seen: Observation, *, keep_running: bool = False) -> Decision:
    return policy.decide(seen, TentativePlacement(seen, keep_running))


def kinds(decision: Decision) -> dict[str, str]:
    return {str(job_id): kind for job_id, kind in decision.accelerators}


# The program.


def every_share(jobs: int, types: int, steps: int) -> Iterator[Array]:
    """All shares of time in whole steps."""
    rows = [row for row in product(range(steps + 1), repeat=types) if sum(row) <= steps]
    for shares in product(rows, repeat=jobs):
        yield np.array(shares, dtype=np.float64) / steps


@settings(max_examples=20)
@given(
    worth=st.lists(st.lists(st.integers(1, 9), min_size=2, max_size=2), min_size=2, max_size=3),
    gangs=st.lists(st.integers(1, 2), min_size=3, max_size=3),
    rooms=st.lists(st.integers(2, 3), min_size=2, max_size=2),
)
def test_no_shares_are_better_than_those_of_the_program(
    worth: list[list[int]], gangs: list[int], rooms: list[int]
) -> None:
    """Against all shares in sixths: none gives the worst job more, and what was found can really be had."""
    worths = np.array(worth, dtype=np.float64)
    loads, room = np.array(gangs[: len(worth)], dtype=np.float64)[:, None], np.array(rooms, dtype=np.float64)[:, None]
    fractions = loads[:, None, :] / room[None]
    found = greatest_least(worths, loads, room, np.ones(worths.shape, dtype=np.bool_))

    assert found.min() >= 0
    assert found.sum(axis=1).max() <= 1 + 1e-9
    assert (fractions[:, :, 0] * found).sum(axis=0).max() <= 1 + 1e-9
    reached = (worths * found).sum(axis=1).min()
    for shares in every_share(len(worth), 2, 6 if len(worth) == 2 else 3):
        if (fractions[:, :, 0] * shares).sum(axis=0).max() <= 1 + 1e-9:
            assert (worths * shares).sum(axis=1).min() <= reached * (1 + 1e-5)


def test_the_fairest_shares_of_two_jobs_worked_out_by_hand() -> None:
    """One fast and one slow accelerator, a job that runs four times as fast on the fast one and one that does not care.

    With x of the fast one for the first and the rest for the second, the first reaches `(4x + 1 - x) / 2.5` of its
    equal share and the second, which always runs, 1: all of the fast one goes to the first, which then reaches 1.6.
    """
    worth = np.array([[4.0, 1.0], [1.0, 1.0]]) / np.array([[2.5], [1.0]])
    shares = greatest_least(worth, ONE_EACH[:2], np.ones((2, 1)), np.ones((2, 2), dtype=np.bool_))
    assert (worth * shares).sum(axis=1).min() == pytest.approx(1.0, rel=1e-4)
    # Both want all the time there is; where three share two accelerators, z falls to what can be had.
    three = np.vstack([worth, worth[1]])
    shares = greatest_least(three, ONE_EACH[:3], np.ones((2, 1)), np.ones((3, 2), dtype=np.bool_))
    # The first takes x of the fast one and nothing else: 1.6 x = z, and the others share 2 - x: (2 - x) / 2 = z.
    assert (three * shares).sum(axis=1) == pytest.approx(np.full(3, 1.6 * 2 / 4.2), rel=1e-3)
    assert shares[0] == pytest.approx([2 / 4.2, 0.0], abs=1e-3)


def test_equal_jobs_get_equal_shares() -> None:
    """A corner of the optimal face is as fair by the objective, and starves one of two twins of the fast type."""
    worth = np.array([[4.0, 1.0]] * 4 + [[1.0, 1.0]] * 2)
    shares = greatest_least(worth, ONE_EACH, np.full((2, 1), 2.0), np.ones((6, 2), dtype=np.bool_))
    assert np.ptp(shares[:4], axis=0).max() < 1e-6
    assert np.ptp(shares[4:], axis=0).max() < 1e-6


def test_the_last_job_ends_as_early_as_can_be() -> None:
    """Makespan: 90 and 10 epochs on one accelerator of speed 1 take 100 s, so the long one needs nine tenths."""
    policy = GavelMakespan()
    long, short = job("a", {"k80": 1.0}, epochs=90.0), job("b", {"k80": 1.0}, epochs=10.0)
    rounds = run_rounds(policy, [long, short], {"k80": 1}, 20)
    assert rounds["a"]["k80"] == 18
    assert rounds["b"]["k80"] == 2


# The rounds.


def run_rounds(policy: Gavel, jobs: list[JobView], gpus: dict[str, int], rounds: int) -> dict[str, dict[str, int]]:
    """How many rounds each job ran on each type; nobody makes progress, so the plan stands."""
    counts: dict[str, dict[str, int]] = {str(view.job_id): {} for view in jobs}
    for slot in range(rounds):
        views = [
            replaced(view, tuple((kind, 360.0 * n * view.workers.minimum) for kind, n in sorted(had.items())))
            for view in jobs
            for had in [counts[str(view.job_id)]]
        ]
        for name, kind in kinds(decide(policy, cluster(views, slot, **gpus))).items():
            counts[name][kind] = counts[name].get(kind, 0) + 1
    return counts


def replaced(view: JobView, attained_by: tuple[tuple[str, float], ...]) -> JobView:
    fields = {name: getattr(view, name) for name in view.__struct_fields__}
    return JobView(**{**fields, "attained_by": attained_by})


def test_rounds_realise_the_shares() -> None:
    """A share is a promise about time: over many rounds each job must have it, give or take one round."""
    gang = job("a", {"k80": 1.0, "v100": 4.0}, gpus=2)
    singles = [job(name, {"k80": 1.0, "v100": 1.5}) for name in "bcd"]
    counts = run_rounds(GavelMaxmin(), [gang, *singles], {"k80": 2, "v100": 2}, 60)
    received = [counts[name].get("v100", 0) * 1.5 + counts[name].get("k80", 0) for name in "bcd"]
    assert max(received) - min(received) <= 2.5, "twins are served alike"
    equal = np.array([(4 + 1) / 2, *[(1.5 + 1) / 2] * 3])
    reached = np.array([2 * (counts["a"].get("v100", 0) * 4 + counts["a"].get("k80", 0)), *received]) / 60 / equal
    # Measured: 0.93. Whole rounds, and a gang that waits until both fast ones are free, cost the rest.
    assert reached.min() >= 0.9 * reached.max()


def test_the_fast_type_goes_to_whom_it_helps() -> None:
    """Heterogeneity awareness is the point; the baseline that lacks it gives everybody as much of each."""
    jobs = [job("a", {"k80": 1.0, "v100": 10.0}), *(job(name, {"k80": 1.0, "v100": 1.0}) for name in "bc")]
    aware = run_rounds(GavelMaxmin(), jobs, {"k80": 1, "v100": 1}, 40)
    assert aware["a"].get("k80", 0) == 0
    blind = run_rounds(GavelMaxmin(GavelOptions(aware=False)), jobs, {"k80": 1, "v100": 1}, 40)
    assert blind["a"]["k80"] >= 8
    assert aware["b"] != blind["b"]


def test_nobody_runs_where_it_may_not_or_cannot() -> None:
    """A gang that is larger than a type, or a type that the user ruled out, must not get a share to wait for."""
    large = job("a", {"k80": 1.0}, gpus=3)
    picky = job("b", {"k80": 1.0, "v100": 9.0}, accelerators=("k80",))
    found = kinds(decide(GavelMaxmin(), cluster([large, picky], k80=4, v100=2)))
    assert found == {"a": "k80", "b": "k80"}


def test_a_newcomer_gets_what_is_left_and_its_share_with_the_next_plan() -> None:
    """It must not stand beside idle accelerators until then, nor push out who has a share."""
    policy, first = GavelMaxmin(GavelOptions(replan_slots=3)), job("a", {"k80": 1.0})
    newcomer = job("b", {"k80": 1.0}, arrived_s=1.0)
    assert kinds(decide(policy, cluster([first], 0, k80=1))) == {"a": "k80"}
    late = replaced(first, (("k80", 360.0),))
    assert kinds(decide(policy, cluster([late, newcomer], 1, k80=2))) == {"a": "k80", "b": "k80"}
    assert kinds(decide(policy, cluster([late, newcomer], 2, k80=1))) == {"a": "k80"}
    later = replaced(first, (("k80", 1080.0),))
    assert kinds(decide(policy, cluster([later, newcomer], 3, k80=1))) == {"a": "k80"}, "both start from nothing now"
    last = replaced(first, (("k80", 1440.0),))
    assert kinds(decide(policy, cluster([last, newcomer], 4, k80=1))) == {"b": "k80"}


def test_a_job_that_must_keep_running_stays_on_its_type() -> None:
    """Where the scheduler does not preempt, the minimum is held where it is, and is not moved by growing."""
    running = job("a", {"k80": 1.0, "v100": 9.0})
    fields = {name: getattr(running, name) for name in running.__struct_fields__}
    place = (TaskPlacement(task_name(Role.WORKER, 0), NodeName("k80")),)
    elastic = JobView(**{**fields, "placement": place, "workers": Range(1, 4)})
    decision = decide(GavelMaxmin(), cluster([elastic], k80=2, v100=2), keep_running=True)
    assert decision.allocations == ((JobId("a"), Allocation(2)),)
    assert kinds(decision) == {"a": "k80"}


@st.composite
def typed_observations(draw: st.DrawFn) -> Observation:
    """Up to three types of accelerators, and jobs that may be choosy, elastic, or have been seen here or there."""
    rooms = draw(st.dictionaries(st.sampled_from(["", *KINDS]), st.integers(1, 4), min_size=1))
    jobs = []
    for index in range(draw(st.integers(0, 6))):
        gpus = draw(st.integers(1, 3))
        speeds = draw(st.dictionaries(st.sampled_from(KINDS), st.floats(0.0, 10.0), max_size=3))
        had = draw(st.dictionaries(st.sampled_from(KINDS), st.floats(0.0, 1e4), max_size=3))
        jobs.append(
            job(
                f"job-{index}",
                speeds,
                gpus=gpus,
                workers=Range(gpus, gpus + draw(st.integers(0, 2))),
                accelerators=tuple(draw(st.lists(st.sampled_from(KINDS), max_size=2, unique=True))),
                attained_by=tuple(sorted(had.items())),
                arrived_s=float(draw(st.integers(0, 2))),
                job_type=draw(st.sampled_from(["cnn", "vgg"])),
                progress_epochs=draw(st.floats(0.0, 120.0)),
                priority=draw(st.sampled_from([50, 50, 90])),
            )
        )
    return cluster(jobs, **rooms)


@pytest.mark.parametrize("kind", [GavelMaxmin, GavelMakespan])
@settings(max_examples=40)
@given(seen=typed_observations(), aware=st.booleans())
def test_gangs_stay_on_one_type_and_no_type_idles_beside_a_job_that_fits(
    kind: Callable[[GavelOptions], Gavel], seen: Observation, aware: bool
) -> None:
    """What the paper promises: allocations by type that fit, and work conservation in every round."""
    policy, budget = kind(GavelOptions(aware=aware)), TentativePlacement(seen, keep_running=False)
    decision = policy.decide(seen, budget)
    assert guardrail.judge(AskPolicy(seen, False), decision) is None
    assert policy.decide(seen, TentativePlacement(seen, keep_running=False)) == decision
    chosen = dict(decision.accelerators)
    nodes = {node.name: node.accelerator for node in seen.nodes}
    for view in seen.jobs:
        places = budget.placement(view.job_id)
        if view.job_id in chosen:
            assert {nodes[entry.node] for entry in places} == {chosen[view.job_id]}
        if not places:
            for accelerator in {node.accelerator for node in seen.nodes} - {""}:
                assert not budget.grant(view.job_id, view.workers.minimum, accelerator=accelerator)


# Gavel's own simulator, by its own clock; tests/sim/test_gavel.py has the product's.


@pytest.mark.parametrize(
    ("aware", "average", "median", "equal"),
    [
        # Measured: average 0.14 %, median of the jobs' differences 0, and 62 of 96 jobs equal to the last digit. The
        # others differ because of ties: jobs of equal shares and histories, whom rounding puts in some order there.
        (True, 0.004, 1e-6, 50),
        # Blind to types, all jobs of one size have equal shares, so ties are everywhere. Measured: average 0.07 %,
        # median 2.3 %, 6 jobs equal.
        (False, 0.01, 0.04, 0),
    ],
)
def test_completion_times_are_those_of_gavels_simulator(
    golden_dir: Path, data_dir: Path, aware: bool, average: float, median: float, equal: int
) -> None:
    """Whoever compares with published numbers of Gavel needs this Gavel to be that one."""
    speeds = gavel_rounds.read_speeds(data_dir / "gavel" / "simulation_throughputs.json.gz")
    jobs = gavel_rounds.read_trace(golden_dir / "gavel" / "max_min_fairness.trace")
    found = gavel_rounds.run(gavel_rounds.AsThere(speeds, aware=aware), jobs, speeds)
    difference = gavel_rounds.compare(found, golden_dir, aware)
    assert abs(difference.average) <= average
    assert difference.median <= median
    assert difference.equal >= equal
    assert difference.correlation >= 0.97


# What earlier plans owe.


def test_of_equal_claims_the_one_goes_first_that_got_less_than_it_was_promised() -> None:
    """Twins must not be served in the order of their names, plan after plan."""
    policy = GavelMaxmin(GavelOptions(replan_slots=3))
    twins = [job("a", {"k80": 1.0}), job("b", {"k80": 1.0})]
    ran = []
    received = {"a": 0.0, "b": 0.0}
    for slot in range(12):
        views = [replaced(view, (("k80", received[str(view.job_id)]),) if received[str(view.job_id)] else ())
                 for view in twins]  # fmt: skip
        guest = [job(f"guest-{slot}", {"k80": 1e-6}, arrived_s=9.0)]  # somebody else comes, so that it plans anew
        (name,) = kinds(decide(policy, cluster([*views, *guest], slot, k80=1)))
        if name in received:
            received[name] += 360.0
        ran.append(name)
    assert abs(ran.count("a") - ran.count("b")) <= 1


def test_one_that_comes_between_plans_waits_for_the_next_if_that_is_wanted() -> None:
    """As Gavel's simulator has it; by default it gets what the others leave."""
    policy, first = GavelMaxmin(GavelOptions(replan_slots=3, wait_for_plan=True)), job("a", {"k80": 1.0})
    newcomer = job("b", {"k80": 1.0}, arrived_s=1.0)
    found = []
    for slot in range(4):
        seen = [replaced(first, (("k80", 360.0 * slot),) if slot else ()), *([newcomer] if slot else [])]
        found.append(kinds(decide(policy, cluster(seen, slot, k80=2))))
    assert found == [{"a": "k80"}, {"a": "k80"}, {"a": "k80"}, {"a": "k80", "b": "k80"}]
