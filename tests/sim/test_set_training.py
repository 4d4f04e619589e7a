"""Training of the set policy, on a scale that takes seconds."""

from __future__ import annotations

import csv
import itertools
import json
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedsched.cli.train import app
from fedsched.core.resources import Resources
from fedsched.errors import CorruptCheckpoint, InvalidConfiguration, InvalidInput
from fedsched.policy import checkpoint, plugins
from fedsched.policy.learnable import Arrays
from fedsched.policy.oracle_greedy import OracleGreedy
from fedsched.policy.set import SetOptions
from fedsched.sim import training_state
from fedsched.sim.dl2_workload import Dl2Workload, Dl2WorkloadConfig
from fedsched.sim.set_training import Ground, Hyperparameters, Trained, speed_teacher, train
from fedsched.sim.speeds.config import AnalyticConfig
from fedsched.sim.speeds.oracle import oracle

GROUND = Ground(
    "small",
    Resources(cpu_milli=8000 * 40, gpu_milli=2000 * 40),
    Dl2Workload(Dl2WorkloadConfig(jobs=6, slot_length_s=1200.0, epochs_max=3000)),
    AnalyticConfig(form="analytic", coefficients="dl2_fitted").model(0),
    1200.0,
)
TINY = Hyperparameters(
    seed=1, environments=2, slots=12, lessons=2, passes=1, last_passes=3, improvements=4, check_every=2, value_warm_up=1
)


def tiny(plan: Hyperparameters = TINY, first: Arrays | None = None) -> Trained:
    teacher = (lambda ground: plugins.make("drf", {})) if first is None else None
    return train([GROUND], plan, teacher=teacher, options=SetOptions(), command="here", first=first)


def test_the_same_plan_gives_the_same_checkpoint_byte_for_byte() -> None:
    """A shipped checkpoint that nobody can make again would have to be believed."""
    one, other = tiny(), tiny()
    assert one.checkpoint.to_bytes() == other.checkpoint.to_bytes()
    assert not [name for name in one.checkpoint.made if name.endswith("_s")], "no two runs take the same time"
    assert [mark.stage for mark in one.curve][:2] == ["imitation", "improvement 2"]
    assert one.checkpoint.made["command"] == "here"


def test_imitation_now_and_improvement_later_is_the_same_as_both_at_once() -> None:
    """Imitation is half of the work; who was interrupted after it need not do it again."""
    imitated = tiny(replace(TINY, improvements=0))
    assert tiny(TINY, first=imitated.checkpoint.arrays).checkpoint.digest == tiny().checkpoint.digest


def test_only_what_other_clusters_say_is_better_is_kept() -> None:
    """At a rate that ruins any network, what was learned from the teacher must survive."""
    calm = replace(TINY, lessons=3, slots=40, passes=8, last_passes=24, improvements=0)
    wild = replace(calm, improvements=4, improvement_rate=3.0)
    teacher, told = speed_teacher([GROUND]), list[str]()
    taught = train([GROUND], calm, teacher=teacher, options=SetOptions(), command="here")
    result = train([GROUND], wild, teacher=teacher, options=SetOptions(), command="here", tell=told.append)
    first, ruined, kept, _, last = result.curve
    assert ruined.score > first.score
    assert first == kept == last
    assert result.checkpoint.digest == taught.checkpoint.digest
    assert sum("no better" in line for line in told) == 2


def test_the_last_weights_are_never_worse_than_any_before() -> None:
    """Whoever picks the best of many checkpoints afterwards fools himself; here there is nothing to pick."""
    curve = tiny(replace(TINY, improvements=10)).curve
    assert curve[-1].score == min(mark.score for mark in curve)


def test_experiments_that_judge_have_no_say_and_tell_of_the_weights_that_count() -> None:
    """Jobs that chose the weights could not show what these are worth on others."""
    wild = replace(TINY, improvements=6, improvement_rate=0.3)
    teacher, count = (lambda ground: plugins.make("drf", {})), itertools.count(1)
    judged = train(
        [GROUND],
        wild,
        teacher=teacher,
        options=SetOptions(),
        command="here",
        judge=lambda arrays: (1 / next(count),),
    )
    assert judged.checkpoint.digest == tiny(wild).checkpoint.digest
    looked = [mark.held_out_jct_slots for mark in judged.curve]
    assert len(set(looked)) == 4, "each look asks once, also those that are taken back"
    assert judged.in_use[-1].score == judged.curve[-1].score == min(mark.score for mark in judged.curve)
    scores = [mark.score for mark in judged.in_use]
    assert scores == sorted(scores, reverse=True)


def test_a_teacher_has_learned_the_speeds_before_it_teaches() -> None:
    """Its lessons are worth what it knows."""
    taught = GROUND.jct_slots(1.0, 5, speed_teacher([GROUND])(GROUND))
    greedy = OracleGreedy()
    greedy.consult(oracle(GROUND.speeds, {job.spec.job_id: job for job in GROUND.workload.draw(5)}))
    assert taught < 1.01 * GROUND.jct_slots(1.0, 5, greedy)
    assert taught < GROUND.jct_slots(1.0, 5, plugins.make("drf", {}))


def test_several_workloads_are_trained_on_in_turn_and_each_is_judged_at_its_own_sizes() -> None:
    """One policy for clusters that are not alike must have seen them all."""
    other = replace(GROUND, name="crowded", sizes=(0.5, 0.25))
    drf = lambda ground: plugins.make("drf", {})  # noqa: E731
    result = train([GROUND, other], TINY, teacher=drf, options=SetOptions(), command="here")
    assert result.cases == ("small at 1", "small at 0.16", "small at 0.08", "crowded at 0.5", "crowded at 0.25")
    *_, half, quarter = result.curve[-1].jct_slots
    assert half < quarter
    told = str(result.checkpoint.made["validation_jct_slots"])
    assert told.endswith(f"crowded at 0.5: {half:.2f}, crowded at 0.25: {quarter:.2f}")


def test_a_training_goes_on_from_every_place_where_it_was_kept_to_the_same_bytes() -> None:
    """It may have been killed anywhere; an hour of work must not be lost, and what comes out must not depend on it."""
    plan, drf = replace(TINY, improvements=5, environments=3), lambda ground: plugins.make("drf", {})
    kept: list[bytes] = []
    whole = train(
        [GROUND],
        plan,
        teacher=drf,
        options=SetOptions(),
        command="here",
        recipe=asdict(plan),
        keep=lambda state, curve: kept.append(state.to_bytes()),
    )
    assert len(kept) == 4, "after imitation and after each look"
    with tempfile.TemporaryDirectory() as folder:
        for number, data in enumerate(kept):
            file = Path(folder) / "state"
            file.write_bytes(data)
            begun = training_state.load(file, asdict(plan))
            told: list[str] = []
            again = train(
                [GROUND],
                plan,
                teacher=None,
                options=SetOptions(),
                command="here",
                recipe=asdict(plan),
                begun=begun,
                tell=told.append,
            )
            assert again.checkpoint.to_bytes() == whole.checkpoint.to_bytes()
            looks = [(mark.stage, mark.slots, mark.jct_slots) for mark in again.curve]
            assert looks == [(mark.stage, mark.slots, mark.jct_slots) for mark in whole.curve]
            assert sum(line.startswith("improvement") for line in told) == 3 - number


EXPERIMENT = """
clusters: [{name: small, nodes: [{name: n, cpus: 8, gpus: 2, count: 20}]}]
workload: {kind: dl2, jobs: 5, epochs_max: 2000}
policies: {drf: {name: drf}}
slot_length_s: 1200
"""


def run(*options: str) -> dict[str, object]:
    done = CliRunner().invoke(app, ["set", *options, "-o", "json"], catch_exceptions=False)
    assert done.exit_code == 0
    result: dict[str, object] = json.loads(done.stdout)
    return result


def test_the_command_writes_weights_that_load_and_the_curve(tmp_path: Path) -> None:
    """The one command with which anybody can make the shipped weights anew."""
    (tmp_path / "small.yaml").write_text(EXPERIMENT)
    file, log = tmp_path / "set.safetensors", tmp_path / "set.csv"
    (tmp_path / "other.yaml").write_text(EXPERIMENT.replace("drf: {name: drf}", "net: {name: set}") + "seeds: 2\n")
    options = ["--teacher", "drf", "--lessons", "1", "--improvements", "1", "--sizes", "1,0.3"]
    options += ["--judge", str(tmp_path / "other.yaml")]
    told = run(str(tmp_path / "small.yaml"), str(file), *options)
    made = checkpoint.load(file)
    assert told["digest"] == made.digest
    assert told["judged_on"] == ["small at 1", "small at 0.3"]
    assert made.made["command"] == (
        "fedsched train set small.yaml FILE --sizes 1,0.3 --teacher drf --teacher-checkpoint scratch --seed 0 "
        "--lessons 1 --improvements 1"
    )
    rows = list(csv.DictReader(log.read_text().splitlines()))
    assert [row["stage"] for row in rows][:2] == ["imitation", "improvement 1"]
    assert float(rows[0]["jct_slots_small_at_1"]) > 0
    assert told["other_first_jct_slots"] == pytest.approx(float(rows[0]["held_out_other"]), abs=1e-3)
    assert told["other_lowest_jct_slots"] <= told["other_last_jct_slots"]  # type: ignore[operator]


def test_mistakes_are_told_before_the_work(tmp_path: Path) -> None:
    """Nobody wants to learn of a typing error after minutes of training."""
    (tmp_path / "small.yaml").write_text(EXPERIMENT)
    with pytest.raises(InvalidInput, match="there is no folder"):
        run(str(tmp_path / "small.yaml"), str(tmp_path / "nowhere" / "set.safetensors"))
    with pytest.raises(InvalidConfiguration, match="there is no policy 'dfr'"):
        run(str(tmp_path / "small.yaml"), str(tmp_path / "set.safetensors"), "--teacher", "dfr")
    (tmp_path / "scratch-2.st").write_bytes(b"damaged")
    known = ["--teacher", "learned_speed", "--teacher-checkpoint", str(tmp_path / "scratch-2.st")]
    with pytest.raises(CorruptCheckpoint, match=r"/scratch-2\.st is no whole file of statistics"):
        run(str(tmp_path / "small.yaml"), str(tmp_path / "set.safetensors"), *known)
    judge = ["--judge", str(tmp_path / "small.yaml")]
    with pytest.raises(InvalidInput, match="small has no policy set to judge"):
        run(str(tmp_path / "small.yaml"), str(tmp_path / "set.safetensors"), *judge)


@pytest.mark.parametrize(
    ("sizes", "problem"),
    [
        (["1,two"], "--sizes is '1,two'; numbers above 0"),
        (["1,0"], "--sizes is '1,0'; numbers above 0"),
        (["nan"], "--sizes is 'nan'; numbers above 0"),
        ([""], "--sizes is ''; numbers above 0"),
        (["1", "1,2"], "--sizes is given 2 times for 1 experiments"),
    ],
)
def test_sizes_that_make_no_clusters_are_refused(tmp_path: Path, sizes: list[str], problem: str) -> None:
    (tmp_path / "small.yaml").write_text(EXPERIMENT)
    options = [part for text in sizes for part in ("--sizes", text)]
    with pytest.raises(InvalidInput, match=problem):
        run(str(tmp_path / "small.yaml"), str(tmp_path / "set.safetensors"), *options)


def test_clusters_too_small_for_the_jobs_are_refused_before_the_work(tmp_path: Path) -> None:
    """A job that fits on no part of a cluster waits for ever, and so did who trained on it."""
    (tmp_path / "small.yaml").write_text(EXPERIMENT)
    with pytest.raises(InvalidInput, match=r"needs .* at least; a cluster to train on has .*"):
        run(str(tmp_path / "small.yaml"), str(tmp_path / "set.safetensors"), "--sizes", "1,0.001")


def test_an_experiment_without_a_file_to_write_is_refused(tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(EXPERIMENT)
    with pytest.raises(InvalidInput, match="an experiment, or several, and a file to write were expected"):
        run(str(tmp_path / "small.yaml"))
