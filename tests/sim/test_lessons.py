"""What experiments teach before they judge: held-out jobs stay held out, and intervals are honest."""

from __future__ import annotations

import copy
import importlib
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from fedsched.config import LearningConfig, parse
from fedsched.core.ids import ClusterName
from fedsched.core.speeds import SpeedStatistics
from fedsched.core.versions import OWN
from fedsched.errors import InvalidConfiguration
from fedsched.learn.kinds import first_weights
from fedsched.policy import registry
from fedsched.policy.speed_checkpoint import SpeedCheckpoint
from fedsched.sim.comparing import Arm, crossed, interval
from fedsched.sim.experiment import ExperimentConfig, load_experiment
from fedsched.sim.federating import Album
from fedsched.sim.lessons import Look, Ratio, Taught, lessons_of, progress_of, recipe_of, teach
from fedsched.sim.running import Request, perform
from fedsched.sim.teaching import Training
from fedsched.sim.teaching_state import kept, load
from tests.sim.test_teaching import ONE, THREE

TRAINING: dict[str, Any] = {
    "seeds": 2,
    "runs": 1,
    "start": "scratch",
    "window": 5,
    "learning_rate": 0.01,
    "batch_size": 32,
    "samples_min": 8,
    "learning": {"memory": 64},
    "policies": {"dl2": {}, "plain": {"learning": {"replay": "plain"}}, "same": {"runs": 0}},
}


def experiment(base: dict[str, Any] = ONE, **training: Any) -> ExperimentConfig:
    plain = copy.deepcopy(base)
    plain["policies"] = {label: {"name": "dl2"} for label in ("dl2", "plain", "same")} | {"drf": {"name": "drf"}}
    plain["seeds"] = 2
    plain["training"] = {**TRAINING, **training}
    return parse(ExperimentConfig, plain, "the experiment")


def test_what_is_said_for_all_holds_for_each_that_says_nothing_else() -> None:
    """An ablation's rows must differ in one thing only."""
    section = experiment().training
    assert section is not None
    assert section.policies["dl2"].learning == LearningConfig(memory=64)
    assert section.policies["plain"].learning == LearningConfig(memory=64, replay="plain")
    assert (section.policies["same"].runs, section.policies["same"].window) == (0, 5)


def test_a_lesson_in_a_federation_goes_by_its_rounds_where_nothing_else_is_said() -> None:
    plain = {"seeds": 1, "policies": {"dl2": {"together": 2}, "plain": {"learning_rate": 0.5, "half_after": 6}}}
    whole = copy.deepcopy(THREE)
    whole["policies"] = {"dl2": {"name": "dl2"}, "plain": {"name": "dl2"}}
    whole["training"] = plain
    config = parse(ExperimentConfig, whole, "the experiment")
    first, second = (recipe_of(lesson) for lesson in lessons_of("x", config, ["dl2", "plain"]))
    assert (first.mode, first.together, first.learning_rate, first.batch_size) == ("federated", 2, 0.001, 32)
    assert (first.section().half_after, second.section().half_after) == (None, 6.0)
    assert (second.together, second.learning_rate, second.samples_min) == (None, 0.5, 8)


def test_no_policy_is_judged_on_jobs_that_it_was_taught_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the comparison would praise what was learnt by heart."""
    drawn: list[int] = []

    def noted(request: Request, **options: Any) -> Any:
        drawn.append(request.seed)
        return perform(request, **options)

    monkeypatch.setattr("fedsched.sim.teaching.perform", noted)
    config = experiment(policies={"dl2": {}})
    for lesson in lessons_of("x", config, ["dl2"]):
        assert not teach(lesson).problem
    judged = set(range(config.seed, config.seed + config.seeds))
    assert len(drawn) == 6, "two trainings of one run, each with a look before and after"
    assert not judged & set(drawn)


def test_the_same_lesson_gives_the_same_weights_and_another_training_gives_others() -> None:
    first, other = lessons_of("x", experiment(), ["dl2"])
    east = ClusterName("east")
    weights = [teach(lesson).weights[east].digest for lesson in (first, first, other)]
    assert weights[0] == weights[1] != weights[2]


def test_a_policy_runs_with_what_it_was_taught_and_learns_no_more() -> None:
    lesson = lessons_of("x", experiment(), ["dl2"])[0]
    taught = teach(lesson)
    plain = perform(Request("x", lesson.experiment, "dl2", 0))
    with_it = [perform(Request("x", lesson.experiment, "dl2", 0, 0, True, 1, taught.weights)) for _ in range(2)]
    assert with_it[0].digest == with_it[1].digest != plain.digest
    assert with_it[0].plain()["training_seed"] == 1
    assert not with_it[0].partial


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"policies": {"nobody": {}}}, "training.policies names nobody; policies are dl2, plain, same, drf"),
        ({"policies": {"drf": {}}}, "training.policies names drf, which is drf and learns nothing; dl2, learned_speed"),
        ({"start": "builtin"}, "`start: scratch` was expected with it"),
        ({"policies": {"dl2": {"together": 2}}}, "together is given, and there is no section `federation`"),
        ({"policies": {}}, "at least 1 item"),
        ({"policies": {"dl2": {"lerning": {}}}}, "lerning"),
        ({"policies": {"dl2": 5}}, "training.policies.dl2"),
    ],
)
def test_what_cannot_be_taught_is_told_before_anything_runs(changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(InvalidConfiguration) as refused:
        experiment(**changes)
    assert expected in str(refused.value)


def test_clusters_that_cannot_learn_together_are_told() -> None:
    several = {name: part for name, part in THREE.items() if name != "federation"}
    with pytest.raises(InvalidConfiguration, match="a section `federation` was expected"):
        experiment(several)


@pytest.mark.parametrize("together", [1, 2, 3, 4, 5, 8])
def test_a_cluster_decides_with_the_weights_of_its_own_federation(together: int) -> None:
    """Five of eight clusters leave three for the second federation, not four."""
    plain = copy.deepcopy(THREE)
    plain["clusters"] = [{"name": f"c{n}", "nodes": [{"name": "n", "cpus": 4}]} for n in range(8)]
    plain["federation"]["members"] = {}
    plain["training"] = {"policies": {"dl2": {"together": together, "start": "scratch"}}}
    training = Training(recipe_of(lessons_of("x", parse(ExperimentConfig, plain, "x"), ["dl2"])[0]))
    groups = [{"number": index} for index in range(training.recipe.groups)]
    found = training.by_cluster(groups)  # type: ignore[arg-type]
    assert [found[ClusterName(f"c{n}")].arrays["number"] for n in range(8)] == [n // together for n in range(8)]


# --- How long it took ----------------------------------------------------------------------------------------------


def taught(*jct_slots: float, seed: int = 1) -> Taught:
    arm = Arm("x", "dl2")
    return Taught(arm, seed, tuple(Look(n, 10.0 * n, jct, ()) for n, jct in enumerate(jct_slots)))


def test_the_first_look_that_is_good_enough_counts_also_where_it_gets_worse_again() -> None:
    assert taught(5, 4, 3, 4).slots_to(4) == 10
    assert taught(5, 4, 3, 4).slots_to(3.5) == 20
    assert taught(5, 4).slots_to(1) is None


def test_a_mean_over_trainings_that_got_there_hides_no_training_that_did_not() -> None:
    (found,) = progress_of([taught(5, 4, 3), taught(5, 5, 4.5, seed=2)], {"x": 4.0})
    assert found.to_quality is not None
    assert (found.to_quality.reached, found.trainings, found.to_quality.mean) == (1, 2, None)
    assert found.last.mean == 3.75
    (found,) = progress_of([taught(5, 4, 3), taught(5, 5, 4, seed=2)], {"x": 4.0})
    assert found.to_quality is not None
    assert found.to_quality.mean is not None
    assert found.to_quality.mean.mean == 15


def test_good_for_a_moment_is_not_good_for_good() -> None:
    """Who learns on line cannot stop at the best look, which nobody knows before."""
    assert taught(5, 4, 3, 4).slots_for_good(3.5) is None
    assert taught(5, 3, 4, 3, 2).slots_for_good(3.5) == 30
    assert taught(3, 3).slots_for_good(3.5) == 0


def beside(one: list[Taught], other: list[Taught]) -> Ratio | None:
    """How long the other needed to 4 slots, beside the one."""
    others = [Taught(Arm("x", "other"), item.seed, item.looks) for item in other]
    first, second = progress_of([*one, *others], {"x": 4.0})
    assert first.ratio is None
    return second.ratio


def test_how_long_it_took_is_told_beside_the_first_policy_training_by_training() -> None:
    """Worked by hand: a half and an eighth are a quarter in the mean of the logarithms."""
    slow = [taught(*[5] * 8, 4), taught(*[5] * 8, 4, seed=2)]
    ratio = beside(slow, [taught(5, 5, 5, 5, 4), taught(5, 4, seed=2)])
    assert ratio is not None
    assert ratio.mean == pytest.approx(1 / 4)
    assert ratio.bound == ""
    assert ratio.low is not None
    assert ratio.high is not None
    assert ratio.low * ratio.high == pytest.approx(1 / 16)


def test_who_never_got_there_bounds_the_ratio_and_it_says_so() -> None:
    """All its slots stand in: it would have needed more of them."""
    never, at_once = [taught(5, 5, 5, 5, 5)], [taught(5, 4)]
    ratio = beside(never, at_once)
    assert ratio is not None
    assert ratio.mean == pytest.approx(1 / 4)
    assert (ratio.low, ratio.bound) == (None, "at most")
    ratio = beside(at_once, never)
    assert ratio is not None
    assert ratio.mean == pytest.approx(4)
    assert ratio.bound == "at least"
    assert beside(never, never) is None


# --- Intervals over trainings and workloads ------------------------------------------------------------------------


def test_one_training_has_the_interval_over_workloads() -> None:
    values = [3.0, 5.0, 4.0, 9.0]
    alone = crossed({(None, seed): value for seed, value in enumerate(values)})
    assert (alone.mean, alone.half) == pytest.approx((interval(values).mean, interval(values).half))


def test_chance_of_both_kinds_widens_the_interval() -> None:
    """Worked by hand: trainings' means 2 and 4, workloads' means 2.5 and 3.5; variances 1 and 0.25, freedom 1.47."""
    figure = crossed({(1, 0): 1.5, (1, 1): 2.5, (2, 0): 3.5, (2, 1): 4.5})
    from scipy import stats

    freedom = 1.25**2 / (1**2 + 0.25**2)
    assert figure.mean == 3.0
    assert figure.half == pytest.approx(stats.t.ppf(0.975, freedom) * math.sqrt(1.25))


def test_no_spread_at_all_is_no_width_and_a_single_run_has_none() -> None:
    assert crossed({(1, 0): 2.0, (2, 0): 2.0}).half == 0.0
    assert crossed({(1, 0): 2.0}).half is None


# --- Looks within the first run ------------------------------------------------------------------------------------


def weights(number: float) -> dict[str, Any]:
    return {"w": np.full(1, number, np.float32)}


def test_an_album_holds_what_was_in_force_at_each_moment() -> None:
    """Whoever looks at slot 10 must not see what was only made of slot 12."""
    album = Album([10.0, 20.0, 30.0])
    album.keep(weights(1), 10.0)  # until exactly then: what comes next is in force at the moment
    assert album.kept == []
    album.keep(weights(2), 25.0)
    album.keep(weights(3), math.inf)
    assert [arrays["w"][0] for arrays in album.kept] == [2, 2, 3]


@pytest.mark.parametrize("accept", ["at_once", "own_track"])
def test_looks_within_runs_lie_where_they_were_asked_for_and_change_nothing(accept: str) -> None:
    plain = copy.deepcopy(THREE)
    plain["federation"]["promotion"] = {"accept": accept}
    plain["training"] = {**TRAINING, "runs": 2, "look_slots": [1, 4, 40, 10_000], "policies": {"dl2": {"together": 2}}}
    lesson = lessons_of("x", parse(ExperimentConfig, plain, "x"), ["dl2"])[0]
    taught_so = teach(lesson)
    assert not taught_so.problem
    assert [look.runs for look in taught_so.looks] == [0, 0, 0, 1, 1, 2]
    assert [look.slots for look in taught_so.looks[:3]] == [0, 1, 4]
    assert taught_so.looks[3].slots < taught_so.looks[4].slots < taught_so.looks[5].slots, "the third in the second run"
    assert taught_so.looks[4].slots == pytest.approx(40, abs=3), "clusters' runs differ in length"
    without = {**plain["training"], "look_slots": []}
    (again, *_) = lessons_of("x", parse(ExperimentConfig, {**plain, "training": without}, "x"), ["dl2"])
    assert teach(again).looks[-1] == taught_so.looks[-1], "looking changes nothing"


@pytest.mark.parametrize("slots", [[5, 5], [3, 2], [0, 1]])
def test_looks_that_do_not_follow_each_other_are_told(slots: list[int]) -> None:
    with pytest.raises(InvalidConfiguration, match="growing numbers above 0"):
        experiment(look_slots=slots)


def test_who_learns_alone_is_neither_cut_off_nor_spoilt() -> None:
    """Else what a cluster gains by the others would be compared with what nobody would do to himself."""
    plain = copy.deepcopy(THREE)
    plain["federation"]["link"] = {}
    plain["training"] = {**TRAINING, "seeds": 1, "policies": {"dl2": {"together": 1}}}
    bad = {"west": {"spoils": {"kind": "reversed"}}, "east": {"away": {"for_s": 1e6}}}
    digests = []
    for members in ({}, bad):
        plain["federation"]["members"] = members
        taught_so = teach(lessons_of("x", parse(ExperimentConfig, plain, "x"), ["dl2"])[0])
        assert not taught_so.problem
        digests.append([weights.digest for _, weights in sorted(taught_so.weights.items())])
    assert digests[0] == digests[1]
    assert len(set(digests[0])) == 3


# --- Clusters that look before they take a version -------------------------------------------------------------------

LOOKS_FIRST = {"accept": "shadow", "slots_min": 10}


OWN_TRACK = {
    "accept": "own_track",
    "slots_min": 4,
    "slots_max": 8,
    "margin": 0.0,
    "own": {"batch_size": 32, "samples_min": 8, "learning_rate": 0.001},
}


def gated(**lesson: Any) -> ExperimentConfig:
    plain = copy.deepcopy(THREE)
    lesson = {**TRAINING, "runs": 3, "seeds": 1, "policies": {"dl2": {"promotion": LOOKS_FIRST, **lesson}}}
    return parse(ExperimentConfig, {**plain, "training": lesson}, "x")


@pytest.mark.parametrize(
    ("promotion", "learning_rate"), [(LOOKS_FIRST, 0.01), (OWN_TRACK, 30.0)], ids=["shadow", "own track"]
)
def test_each_cluster_keeps_what_it_let_decide_also_through_an_interruption(
    tmp_path: Path, promotion: dict[str, Any], learning_rate: float
) -> None:
    """A version that a cluster has refused must not come in with the next run, or with a restart of the training."""
    recipe = recipe_of(lessons_of("x", gated(promotion=promotion, learning_rate=learning_rate), ["dl2"])[0])
    whole = Training(recipe)
    whole.run(3, lambda row, state: None)
    begun = Training(recipe)
    begun.run(2, lambda row, state: None)
    kept(begun).save(tmp_path / "state")
    resumed = load(tmp_path / "state", recipe)
    assert digests(resumed) == digests(begun)
    resumed.run(3, lambda row, state: None)
    assert digests(resumed) == digests(whole)
    offered = whole.state.standings[0].active.checkpoint.digest
    assert set(digests(whole).values()) - {offered, whole.first.digest}, "some let an earlier version decide"


def test_a_cluster_ends_with_what_it_learned_alone_where_the_federation_does_harm() -> None:
    """Rounds whose steps are far too long make versions that nobody should decide with, one after the other.

    Four runs: each cluster has slots enough for several comparisons.
    """
    looks = {}
    for accept in ("at_once", "own_track"):
        promotion = {**OWN_TRACK, "accept": accept, "slots_max": 40}
        training = Training(recipe_of(lessons_of("x", gated(promotion=promotion, learning_rate=30.0), ["dl2"])[0]))
        training.run(4, lambda row, state: None)
        looks[accept] = training.state.rows[-1]["jct_slots.all"]
    assert {weights.made.get("track") for weights in training.state.deciding.values()} == {OWN}
    assert looks["own_track"] < looks["at_once"]


def digests(training: Training) -> dict[str, str]:
    return {name: weights.digest for name, weights in sorted(training.deciding().items())}


def test_a_cluster_that_takes_all_versions_at_once_decides_with_the_federations() -> None:
    training = Training(recipe_of(lessons_of("x", gated(promotion={"accept": "at_once"}), ["dl2"])[0]))
    training.run(1, lambda row, state: None)
    assert set(digests(training).values()) == {training.state.standings[0].active.checkpoint.digest}
    assert training.state.deciding == {}


def test_promotion_is_about_federations() -> None:
    with pytest.raises(InvalidConfiguration, match=r"dl2\.promotion is given, and there is no section `federation`"):
        experiment(policies={"dl2": {"promotion": LOOKS_FIRST}})


# --- learned_speed: sums instead of weights ------------------------------------------------------------------------


def listening(**training: Any) -> ExperimentConfig:
    plain = copy.deepcopy(ONE)
    plain["policies"] = {"learned": {"name": "learned_speed", "explore": False}, "drf": {"name": "drf"}}
    plain["training"] = {"seeds": 2, "runs": 2, "start": "scratch", "policies": {"learned": {}}, **training}
    return parse(ExperimentConfig, plain, "the experiment")


def test_learned_speed_is_taught_by_what_it_sees_and_each_training_sees_other_jobs() -> None:
    first, other = lessons_of("x", listening(), ["learned"])
    east = ClusterName("east")
    once, again, elsewhere = (teach(lesson) for lesson in (first, first, other))
    assert not once.problem
    assert [look.runs for look in once.looks] == [0, 1, 2]
    assert 0 == once.looks[0].slots < once.looks[1].slots < once.looks[2].slots
    sums = []
    for one in (once, again, elsewhere):
        learnt = one.weights[east]
        assert isinstance(learnt, SpeedStatistics)
        sums.append(list(learnt))
    assert sums[0] == sums[1] != sums[2]
    assert once.looks == again.looks


def test_learned_speed_decides_with_what_it_was_taught() -> None:
    (lesson, _) = lessons_of("x", listening(), ["learned"])
    taught = teach(lesson)
    before = perform(Request("x", lesson.experiment, "learned", 0, taught={ClusterName("east"): SpeedStatistics()}))
    after = [perform(Request("x", lesson.experiment, "learned", 0, 0, True, 1, taught.weights)) for _ in range(2)]
    assert after[0].digest == after[1].digest != before.digest
    assert not after[0].partial


def test_no_jobs_that_learned_speed_saw_are_jobs_that_it_is_judged_or_looked_at_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn: dict[str, set[int]] = {
        "fedsched.sim.lessons.whole_jct_slots": set(),
        "fedsched.sim.speed_training.build": set(),
    }
    for name, seeds in drawn.items():
        module, function = name.rsplit(".", 1)
        real = getattr(importlib.import_module(module), function)

        def noted(request: Request, *rest: Any, real: Any = real, seeds: set[int] = seeds, **options: Any) -> Any:
            seeds.add(request.seed)
            return real(request, *rest, **options)

        monkeypatch.setattr(name, noted)
    config = listening(look_seeds=2)
    for lesson in lessons_of("x", config, ["learned"]):
        assert not teach(lesson).problem
    looked, seen = drawn.values()
    judged = set(range(config.seed, config.seed + config.seeds))
    assert (len(looked), len(seen)) == (2, 4)
    assert not judged & (seen | looked)
    assert not seen & looked


def test_each_training_may_begin_with_a_file_of_its_own(tmp_path: Path) -> None:
    """Weights that take long to make are made once, and judged under many conditions."""
    for seed in (1, 2):
        dl2 = first_weights("dl2", "scratch", seed, 5)
        dl2.save(tmp_path / f"dl2-{seed}.safetensors")
        taught = teach(lessons_of("x", listening(runs=1), ["learned"])[seed - 1]).weights[ClusterName("east")]
        assert isinstance(taught, SpeedStatistics)
        SpeedCheckpoint(taught, {}).save(tmp_path / f"speeds-{seed}.safetensors")
    plain: dict[str, Any] = {
        **ONE,
        "policies": {"dl2": {"name": "dl2"}, "learned": {"name": "learned_speed"}},
        "training": {
            "seeds": 3,
            "runs": 0,
            "policies": {
                "dl2": {"start": "dl2-{seed}.safetensors"},
                "learned": {"start": "speeds-{seed}.safetensors"},
            },
        },
    }
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(plain))
    config = load_experiment(tmp_path / "x.yaml")
    for label in ("dl2", "learned"):
        *found, missing = (teach(lesson) for lesson in lessons_of("x", config, [label]))
        assert "-3.safetensors" in missing.problem
        for seed, one in enumerate(found, start=1):
            weights = one.weights[ClusterName("east")]
            if isinstance(weights, SpeedStatistics):
                assert list(weights) == list(registry.statistics(str(tmp_path / f"speeds-{seed}.safetensors")))
            else:
                assert weights.digest == registry.weights("dl2", str(tmp_path / f"dl2-{seed}.safetensors")).digest


def test_learned_speed_is_not_taught_beside_a_federation() -> None:
    """There it learns in the runs themselves; a section that does nothing would be believed."""
    plain = copy.deepcopy(THREE)
    plain["policies"] = {"learned": {"name": "learned_speed"}}
    plain["training"] = {"policies": {"learned": {}}}
    with pytest.raises(InvalidConfiguration, match="learns within the federation's runs"):
        parse(ExperimentConfig, plain, "the experiment")
