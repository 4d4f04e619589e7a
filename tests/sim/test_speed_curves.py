"""What sharing is worth: slots until clusters know enough, and whether anyone pays for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedsched.errors import InvalidInput
from fedsched.sim.comparing import Interval
from fedsched.sim.experiment import ExperimentConfig, load_experiment
from fedsched.sim.running import Request, perform
from fedsched.sim.speed_curves import MARKS, LearningCurve, curves, summary

SHIPPED = Path(__file__).parents[2] / "simulations" / "experiments" / "federated_speeds.yaml"


def curve(cluster: str, together: int, seed: int, *excess: float) -> LearningCurve:
    """The last value holds until the end."""
    return LearningCurve(cluster, together, seed, (*excess, *[excess[-1]] * (len(MARKS) - len(excess))))


def test_a_cluster_has_learned_enough_once_it_stays_good() -> None:
    """A lucky slot in the middle of exploration is no quality."""
    assert curve("c1", 1, 0, 0.5, 0.02, 0.4, 0.01).slots_to(0.1) == MARKS[3]
    assert curve("c1", 1, 0, 0.02).slots_to(0.1) == MARKS[0]
    assert curve("c1", 1, 0, 0.02, 0.5).slots_to(0.1) is None


def test_who_ends_worse_than_alone_is_named_and_who_never_learns_counts() -> None:
    """Means over clusters would hide the one that pays for the others."""
    found = [
        *(curve("c1", 1, seed, 0.5, 0.05) for seed in range(2)),
        *(curve("c2", 1, seed, 0.5, 0.05) for seed in range(2)),
        *(curve("c1", 2, seed, 0.05, 0.01) for seed in range(2)),
        *(curve("c2", 2, seed, 0.5, 0.25) for seed in range(2)),
    ]
    alone, pair = summary(found, 0.1)
    assert alone.slots == Interval(MARKS[1], 0.0)
    assert alone.worst.mean == 0
    assert pair.slots.mean == (MARKS[0] + 2 * MARKS[-1]) / 2
    assert pair.reached == 0.5
    assert pair.to_alone == Interval(pair.slots.mean / MARKS[1], 0.0)
    assert alone.to_alone == Interval(1.0, 0.0)
    assert pair.worst_cluster == "c2"
    assert pair.worst.mean == pytest.approx(0.2)


def small(clusters: int) -> ExperimentConfig:
    shipped = load_experiment(SHIPPED)
    plain = shipped.model_dump(mode="json", exclude_unset=True)
    workload = {"kind": "dl2", "jobs": 8, "arrivals_max": 1, "epochs_max": 1500, "classes": 2}
    names = [f"c{number}" for number in range(1, clusters + 1)]
    plain["clusters"] = [{"name": name, "nodes": [{"name": "n", "cpus": 8, "gpus": 2, "count": 8}]} for name in names]
    plain["workload"] = {"kind": "local", "clusters": dict.fromkeys(names, workload)}
    plain["federation"]["members"] = {"c2": {"spoils": {"kind": "reversed"}}}
    return ExperimentConfig.model_validate(plain)


def test_judges_see_nothing_wrong_in_a_federation_with_a_liar_and_every_run_is_the_same() -> None:
    """The simulator's rounds are the live ones: what comes of them must follow from the seed alone."""
    experiment = small(3)
    runs = [perform(Request("test", experiment, "eight", 0, check=True)) for _ in range(2)]
    assert not runs[0].partial
    assert runs[0].digest == runs[1].digest
    (federation,) = runs[0].federations
    assert federation.combined > 3
    assert all(cluster.counted for cluster in federation.clusters), "a lie that no check finds counts, and is not used"
    assert federation.digest == runs[1].federations[0].digest


def test_curves_begin_with_nothing_and_end_near_the_greedy() -> None:
    found = curves(small(2), "alone", sizes=(1, 2), seeds=(0,), held_out=1, slots=16)
    assert len(found) == 4
    assert {one.last for one in found} == {16}
    for one in found:
        assert one.excess[-1] < 0.2
        assert one.excess[-1] < one.excess[0]


def test_an_experiment_without_a_federation_is_one_clear_error() -> None:
    experiment = small(2).model_copy(update={"federation": None})
    with pytest.raises(InvalidInput, match="no learned_speed that learns together with others"):
        curves(experiment, "alone", sizes=(1,), seeds=(0,), held_out=1)
