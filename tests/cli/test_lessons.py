"""What `sim compare` says of policies that are taught first: every training is told, and none costs another one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedsched.sim import lessons
from fedsched.sim.lessons import Lesson, Taught, teach
from tests.cli.conftest import Run
from tests.sim.test_lessons import TRAINING
from tests.sim.test_teaching import ONE, THREE


@pytest.fixture
def file(tmp_path: Path) -> str:
    plain: dict[str, Any] = {**ONE, "seeds": 2}
    plain["policies"] = {"dl2": {"name": "dl2"}, "same": {"name": "dl2"}, "drf": {"name": "drf"}}
    plain["training"] = {**TRAINING, "quality_jct_slots": 1e6, "policies": {"dl2": {}, "same": {"runs": 0}}}
    path = tmp_path / "taught.yaml"
    path.write_text(yaml.safe_dump(plain, sort_keys=False))
    return str(path)


def test_programs_get_every_training_and_every_pair_of_training_and_workload(run: Run, file: str) -> None:
    done = run("sim", "compare", file, "--workers", "1", "--check", "-o", "json")
    assert done.code == 0, done.err
    assert "4 trainings come first" in done.err
    told = json.loads(done.out)
    pairs = [(run["policy"], run.get("training_seed"), run["seed"]) for run in told["results"]]
    expected = [(label, training, seed) for label in ("dl2", "same") for training in (1, 2) for seed in (0, 1)]
    assert pairs == [*expected, ("drf", None, 0), ("drf", None, 1)]
    assert [(row["policy"], row["trainings"], row["seeds"]) for row in told["summary"]] == [
        ("dl2", 2, 2),
        ("same", 2, 2),
        ("drf", 0, 2),
    ]
    assert [len(one["looks"]) for one in told["training"]] == [2, 2, 1, 1]
    assert {one["slots_to_quality"] for one in told["training"]} == {0.0}
    assert [(one["policy"], one["slots_to_quality"], one["slots_for_good"]) for one in told["progress"]] == [
        ("dl2", [0.0, 0.0], [0.0, 0.0]),
        ("same", [0.0, 0.0], [0.0, 0.0]),
    ]
    assert {one["looks"][-1]["slots"] > 0 for one in told["training"] if one["policy"] == "dl2"} == {True}


def test_people_see_how_the_lessons_went(run: Run, file: str) -> None:
    done = run("sim", "compare", file, "--workers", "1", "--seeds", "1", "--policies", "same,drf")
    assert done.code == 0, done.err
    assert "while they were taught, JCT in slots on further held-out jobs:" in done.out
    head = next(line for line in done.out.splitlines() if line.startswith("POLICY") and "START" in line)
    needed = "GOOD ENOUGH AFTER TO THE FIRST FOR GOOD AFTER TO THE FIRST"
    assert head.split() == ["POLICY", "TRAININGS", "SLOTS", "START", "LOWEST", "LAST", *needed.split()]


def test_what_a_cluster_gains_by_the_others_is_told_cluster_by_cluster(run: Run, tmp_path: Path) -> None:
    """A mean over clusters would hide the one that would be better off alone."""
    plain: dict[str, Any] = {**THREE, "seeds": 1, "policies": {"alone": {"name": "dl2"}, "all": {"name": "dl2"}}}
    lessons = {**TRAINING, "window": 5, "policies": {"alone": {"together": 1, "runs": 0}, "all": {}}}
    plain["training"] = {**lessons, "seeds": 1}
    path = tmp_path / "taught.yaml"
    path.write_text(yaml.safe_dump(plain, sort_keys=False))
    done = run("sim", "compare", str(path), "--workers", "1")
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    at = lines.index("JCT in slots by cluster, less than with alone below 0, with 95 % intervals:")
    assert lines[at + 1].split() == ["CLUSTER", "ALL"]
    assert [line.split()[0] for line in lines[at + 2 : at + 5]] == ["east", "north", "west"]
    assert all(line.split()[1][0] in "+-" for line in lines[at + 2 : at + 5])


def test_a_lesson_that_fails_costs_its_own_rows_only(
    run: Run,
    file: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An hour of trainings must not be lost to one."""

    def failing(lesson: Lesson, progress: Any) -> Taught:
        return lessons.untaught(lesson, "the sky fell") if lesson.policy == "dl2" else teach(lesson, progress)

    monkeypatch.setattr("fedsched.cli.lessons.teach", failing)
    done = run("sim", "compare", file, "--workers", "1", "--seeds", "1", "-o", "json")
    assert done.code == 1
    assert "it was not taught, training 1: the sky fell" in done.err
    told = json.loads(done.out)
    assert [row["partial"] for row in told["summary"]] == [True, False, False]
