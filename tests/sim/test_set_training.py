"""Training of the set policy, on a scale that takes seconds."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedsched.cli.train import app
from fedsched.core.resources import Resources
from fedsched.errors import InvalidConfiguration, InvalidInput
from fedsched.policy import checkpoint, plugins
from fedsched.policy.learnable import Arrays
from fedsched.policy.set import SetOptions
from fedsched.sim import set_training
from fedsched.sim.dl2_workload import Dl2Workload, Dl2WorkloadConfig
from fedsched.sim.fluid import Fluid
from fedsched.sim.set_training import Ground, Plan, Trained, informed_teacher, speed_teacher, train
from fedsched.sim.speeds.config import AnalyticConfig

GROUND = Ground(
    Resources(cpu_milli=8000 * 40, gpu_milli=2000 * 40),
    Dl2Workload(Dl2WorkloadConfig(jobs=6, slot_length_s=1200.0, epochs_max=3000)),
    AnalyticConfig(form="analytic", coefficients="dl2_fitted").model(0),
    1200.0,
)
TINY = Plan(seed=1, environments=2, slots=12, lessons=2, passes=1, improvements=4, check_every=2, value_warm_up=1)


def tiny(plan: Plan = TINY, first: Arrays | None = None) -> Trained:
    teacher = (lambda jobs: plugins.make("drf", {})) if first is None else None
    return train(GROUND, plan, teacher=teacher, options=SetOptions(), command="here", first=first)


def test_the_same_plan_gives_the_same_checkpoint_byte_for_byte() -> None:
    """A shipped checkpoint that nobody can make again would have to be believed."""
    one, other = tiny(), tiny()
    assert one.last.to_bytes() == other.last.to_bytes()
    assert one.best.to_bytes() == other.best.to_bytes()
    assert not [name for name in one.last.made if name.endswith("_s")], "no two runs take the same time"
    assert [mark.stage for mark in one.curve][:2] == ["imitation", "improvement 2"]
    assert one.last.made["command"] == "here"


def test_imitation_now_and_improvement_later_is_the_same_as_both_at_once() -> None:
    """Imitation is half of the work; who was interrupted after it need not do it again."""
    imitated = tiny(replace(TINY, improvements=0))
    assert tiny(TINY, first=imitated.last.arrays).last.digest == tiny().last.digest


def test_an_improvement_that_does_harm_is_undone() -> None:
    """At a rate that ruins any network, what was learned from the teacher must survive."""
    wild = replace(TINY, lessons=3, slots=40, passes=8, improvements=2, improvement_rate=3.0)
    told: list[str] = []
    result = train(
        GROUND, wild, teacher=informed_teacher(GROUND), options=SetOptions(), command="here", tell=told.append
    )
    first, ruined, last = result.curve
    assert ruined.score > first.score * (1 + set_training.HARM)
    assert last == first
    assert result.last.digest == result.best.digest
    assert any("worse than before" in line for line in told)


def test_a_teacher_has_learned_the_speeds_before_it_teaches() -> None:
    """Its lessons are worth what it knows."""
    jobs = list(GROUND.workload.draw(5))
    taught_s = Fluid(GROUND.part(1.0), jobs, GROUND.speeds, 1200.0).run(speed_teacher(GROUND)(jobs))
    informed_s = Fluid(GROUND.part(1.0), jobs, GROUND.speeds, 1200.0).run(informed_teacher(GROUND)(jobs))
    drf_s = Fluid(GROUND.part(1.0), GROUND.workload.draw(5), GROUND.speeds, 1200.0).run(plugins.make("drf", {}))
    assert informed_s <= taught_s * 1.01
    assert taught_s < drf_s


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


def test_the_command_writes_weights_that_load_the_best_ones_and_the_curve(tmp_path: Path) -> None:
    """The one command with which anybody can make the shipped weights anew."""
    (tmp_path / "small.yaml").write_text(EXPERIMENT)
    file, best, curve = tmp_path / "set.safetensors", tmp_path / "best.safetensors", tmp_path / "curve.csv"
    options = ["--teacher", "drf", "--lessons", "1", "--improvements", "1", "--best", str(best), "--curve", str(curve)]
    told = run(str(tmp_path / "small.yaml"), str(file), *options)
    made = checkpoint.load(file)
    assert told["digest"] == made.digest
    assert told["best_digest"] == checkpoint.load(best).digest
    assert made.made["command"] == (
        "fedsched train set small.yaml FILE --teacher drf --teacher-checkpoint scratch --seed 0 "
        "--lessons 1 --improvements 1"
    )
    rows = list(csv.DictReader(curve.read_text().splitlines()))
    assert [row["stage"] for row in rows][:2] == ["imitation", "improvement 1"]
    assert float(rows[0]["jct_slots_at_1"]) > 0


def test_mistakes_are_told_before_the_work(tmp_path: Path) -> None:
    """Nobody wants to learn of a typing error after minutes of training."""
    (tmp_path / "small.yaml").write_text(EXPERIMENT)
    with pytest.raises(InvalidInput, match="there is no folder"):
        run(str(tmp_path / "small.yaml"), str(tmp_path / "nowhere" / "set.safetensors"))
    with pytest.raises(InvalidConfiguration, match="there is no policy 'dfr'"):
        run(str(tmp_path / "small.yaml"), str(tmp_path / "set.safetensors"), "--teacher", "dfr")
