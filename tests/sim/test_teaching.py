"""`fedsched train online` and `fedsched train federated`: repeatable, resumable, and honest about what is wrong."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from fedsched.cli.teaching import Place, curve
from fedsched.cli.train import app
from fedsched.config import LearningConfig, parse
from fedsched.errors import CorruptCheckpoint, FedschedError, InvalidConfiguration, InvalidInput
from fedsched.learn.kinds import first_weights
from fedsched.policy import checkpoint
from fedsched.policy.dl2 import Dl2Shape, initial
from fedsched.sim.experiment import ExperimentConfig
from fedsched.sim.teaching import Recipe, Training, TrainingState
from fedsched.sim.teaching_state import kept as kept_of
from fedsched.sim.teaching_state import load

ONE: dict[str, Any] = {
    "clusters": [{"name": "east", "nodes": [{"name": "node", "cpus": 8, "memory_gb": 8, "count": 2}]}],
    "workload": {"jobs": 8, "gap_s": 5},
    "policies": {"dl2": {"name": "dl2"}, "drf": {"name": "drf"}},
}
THREE: dict[str, Any] = {
    **ONE,
    "clusters": [
        {"name": name, "nodes": [{"name": "node", "cpus": 8, "memory_gb": 8}]} for name in ("east", "north", "west")
    ],
    "workload": {"jobs": 18, "gap_s": 3},
    "federation": {
        "interval_s": 30,
        "deadline_s": 10,
        "batch_size": 32,
        "samples_min": 8,
        "learning_rate": 0.001,
        "link": {"jitter_s": 2, "loss": 0.1, "twice": 0.1},
        "members": {"west": {"spoils": {"kind": "noise", "share": 0.3}}},
    },
}
QUICK = "--episodes 4 --validate-every 2 --validation-seeds 1 --batch-size 32 --samples-min 16 --learning-rate 0.001"


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Digest of the weights after one run with every switch as it is by default."""
    folder = tmp_path_factory.mktemp("usual")
    train("online", write(folder, ONE), folder / "w.safetensors", *QUICK.split(), "--episodes", 1)
    return checkpoint.load(folder / "w.safetensors").digest


def write(tmp_path: Path, plain: dict[str, Any], name: str = "one.yaml") -> Path:
    file = tmp_path / name
    file.write_text(yaml.safe_dump(plain))
    return file


def train(*arguments: object) -> dict[str, Any]:
    done = CliRunner().invoke(app, [*map(str, arguments), "-o", "json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def made(place: Place) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (place.file, place.best, place.log, place.state)}


def test_training_writes_weights_the_best_ones_and_a_log(tmp_path: Path) -> None:
    scenario, place = write(tmp_path, ONE), Place(tmp_path / "a.safetensors")

    told = train("online", scenario, place.file, *QUICK.split())

    rows = list(csv.DictReader(place.log.read_text().splitlines()))
    assert [row["episode"] for row in rows] == ["0", "1", "2", "3", "4"]
    assert [bool(row["jct_slots.all"]) for row in rows] == [True, False, True, False, True]
    assert int(rows[-1]["decisions"]) == told["decisions"] > 100
    assert int(rows[-1]["version"]) == told["version"] > 20
    last, best = checkpoint.load(place.file), checkpoint.load(place.best)
    assert last.digest != checkpoint.load(checkpoint.BUILTIN).digest
    assert last.made["version"] == told["version"]
    assert float(best.made["best_jct_slots"]) == min(
        round(float(row["jct_slots.all"]), 3) for row in rows if row["jct_slots.all"]
    )
    assert "--replay prioritised" in str(last.made["command"])


@pytest.mark.parametrize(("mode", "plain"), [("online", ONE), ("federated", THREE)])
def test_training_twice_makes_the_same_bytes_and_another_seed_others(
    tmp_path: Path, mode: str, plain: dict[str, Any]
) -> None:
    """A result that cannot be made again is none; the log holds no wall times for that reason."""
    scenario = write(tmp_path, plain)
    files = []
    for folder, seed in (("a", 3), ("b", 3), ("c", 4)):
        (tmp_path / folder).mkdir()
        place = Place(tmp_path / folder / "w.safetensors")
        train(mode, scenario, place.file, *QUICK.split(), "--episodes", 1, "--seed", seed)
        files.append(made(place))

    assert files[0] == files[1]
    assert files[0]["w.safetensors"] != files[2]["w.safetensors"]


@pytest.mark.parametrize(("mode", "plain"), [("online", ONE), ("federated", THREE)])
def test_a_training_killed_half_way_and_resumed_makes_the_same_bytes(
    tmp_path: Path, mode: str, plain: dict[str, Any]
) -> None:
    """Trainings of an hour are killed all the time; going on must cost nothing and change nothing."""
    scenario = write(tmp_path, plain)
    whole, killed = Place(tmp_path / "whole.safetensors"), Place(tmp_path / "killed.safetensors")
    train(mode, scenario, whole.file, *QUICK.split())

    # With many more runs than are needed, so that it never ends before it is killed; how many are wanted is no part of
    # the recipe.
    command = [mode, str(scenario), str(killed.file), *QUICK.split(), "--episodes", "100000"]
    process = subprocess.Popen(
        [sys.executable, "-m", "fedsched.cli.main", "train", *command],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONHASHSEED": "77"},
    )
    try:
        limit_s = time.monotonic() + 150
        while not (killed.log.exists() and killed.log.read_text().count("\n") >= 3):  # the head, and two looks
            assert process.poll() is None, "it ended by itself"
            assert time.monotonic() < limit_s
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
    done = load(killed.state, _recipe_of(mode, scenario)).state.episodes
    assert done <= 4, "more runs were over before the kill than are wanted"
    train(mode, scenario, killed.file, *QUICK.split(), "--resume")

    assert [data for _, data in sorted(made(whole).items(), key=lambda item: item[0].removeprefix("whole"))] == [
        data for _, data in sorted(made(killed).items(), key=lambda item: item[0].removeprefix("killed"))
    ]


def _recipe_of(mode: str, scenario: Path) -> Recipe:
    return Recipe(
        scenario.stem,
        parse(ExperimentConfig, yaml.safe_load(scenario.read_text()), "it"),
        "dl2",
        mode,  # type: ignore[arg-type]
        validate_every=2,
        validation_seeds=1,
        batch_size=32,
        samples_min=16,
        learning_rate=0.001,
    )


@pytest.mark.parametrize("changes", [{}, {"half_after": 5}], ids=["as usual", "half"])
def test_an_interrupted_run_leaves_the_state_of_the_one_before(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Ctrl-C in the middle of a run: that run is done again, none of it has leaked into what is kept."""
    training = Training(replace(_recipe_of("online", write(tmp_path, ONE)), **changes))
    kept: list[bytes] = []

    def stop(row: dict[str, Any], state: TrainingState) -> None:
        kept_of(training).save(tmp_path / "s.state")
        kept.append(kept_of(training).to_bytes())
        if state.episodes == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        training.run(4, stop)
    again = load(tmp_path / "s.state", training.recipe)
    assert kept_of(again).to_bytes() == kept[-1]

    whole = Training(training.recipe)
    whole.run(4, lambda row, state: None)
    again.run(4, lambda row, state: None)
    assert kept_of(again).to_bytes() == kept_of(whole).to_bytes()


@pytest.mark.parametrize(
    "switch",
    [
        "--no-exploration",
        "--half-after 2",
        "--replay plain",
        "--replay off",
        "--baseline mean",
        "--entropy-weight 3",
        "--reward job",
        "--discount 0.5",
        "--memory 40",
        "--from scratch",
        "--from scratch --window 5",
    ],
)
def test_every_switch_changes_what_is_learnt(tmp_path: Path, usual: str, switch: str) -> None:
    """A switch that does nothing compares a setting with itself, as happened in the reference."""
    scenario, place = write(tmp_path, ONE), Place(tmp_path / "other.safetensors")
    train("online", scenario, place.file, *QUICK.split(), "--episodes", 1, *switch.split())

    assert checkpoint.load(place.file).digest != usual


def test_without_the_value_network_its_weights_stay(tmp_path: Path) -> None:
    scenario, place = write(tmp_path, ONE), Place(tmp_path / "a.safetensors")
    train("online", scenario, place.file, *QUICK.split(), "--episodes", 1, "--baseline", "mean")

    first, last = checkpoint.load(checkpoint.BUILTIN).arrays, checkpoint.load(place.file).arrays
    same = {name for name in first if np.array_equal(first[name], last[name])}
    assert same == {name for name in first if name.startswith("value.")}


def test_clusters_that_learn_alone_leave_weights_of_their_own(tmp_path: Path) -> None:
    scenario, place = write(tmp_path, THREE), Place(tmp_path / "a.safetensors")
    train("federated", scenario, place.file, *QUICK.split(), "--episodes", 1, "--together", 1)

    weights = [checkpoint.load(place.of(index, 3)).digest for index in range(3)]
    assert len(set(weights)) == 3
    rows = list(csv.DictReader(place.log.read_text().splitlines()))
    assert all(float(rows[-1][f"jct_slots.{name}"]) > 0 for name in ("east", "north", "west"))


@pytest.mark.parametrize(
    ("arguments", "plain", "problem"),
    [
        ("online S F", THREE, "has 3 clusters; training on line is about one"),
        ("federated S F", ONE, "has no section `federation`"),
        ("online S F --policy drf", ONE, "policy drf has no weights to teach"),
        ("online S F --policy dl3", ONE, "there is no policy dl3"),
        ("online S F --from nowhere.safetensors", ONE, "cannot read checkpoint nowhere.safetensors"),
        ("online S F --resume", ONE, "there is no training to go on with"),
        ("online S F --resume --restart", ONE, "were both given"),
        ("online S nowhere/w.safetensors", ONE, "there is no folder nowhere"),
        ("online S S", ONE, "would be written over"),
        ("online S .", ONE, "is a folder; a file to write was expected"),
        ("online S F --window 5", ONE, "those of builtin see as many as they were made for"),
        ("federated S F --window 5 --from mine", THREE, "those of mine see as many as they were made for"),
        ("online missing.yaml F", ONE, "missing.yaml"),
    ],
)
def test_what_cannot_be_meant_is_said_before_any_run(
    tmp_path: Path, arguments: str, plain: dict[str, Any], problem: str
) -> None:
    scenario = write(tmp_path, plain)
    places = {"S": str(scenario), "F": str(tmp_path / "f.safetensors")}
    words = [places.get(word, word) for word in arguments.split()]
    with pytest.raises(FedschedError, match=problem):
        CliRunner().invoke(app, words, catch_exceptions=False)


def test_a_state_of_another_recipe_is_not_gone_on_from(tmp_path: Path) -> None:
    """Half of a training with one step size and half with another is neither."""
    scenario, place = write(tmp_path, ONE), Place(tmp_path / "f.safetensors")
    train("online", scenario, place.file, *QUICK.split(), "--episodes", 1)

    with pytest.raises(InvalidInput, match="the state of a training that was begun before"):
        train("online", scenario, place.file, *QUICK.split())
    with pytest.raises(InvalidInput, match=r"learning_rate is 0.01 now and was 0.001"):
        train("online", scenario, place.file, *QUICK.split(), "--resume", "--learning-rate", 0.01)
    write(tmp_path, {**ONE, "workload": {"jobs": 9, "gap_s": 5}})
    with pytest.raises(InvalidInput, match="the experiment's files have changed since"):
        train("online", scenario, place.file, *QUICK.split(), "--resume")
    assert train("online", scenario, place.file, *QUICK.split(), "--episodes", 1, "--restart")["episodes"] == 1


def test_first_weights_that_were_written_over_since_are_noticed(tmp_path: Path) -> None:
    """The path is the same; what a resumed training would end with is not. Moved weights are still the same ones."""
    scenario, place = write(tmp_path, ONE), Place(tmp_path / "f.safetensors")
    first, moved = tmp_path / "first.safetensors", tmp_path / "moved.safetensors"
    first.write_bytes(checkpoint.BUILTIN.read_bytes())
    moved.write_bytes(checkpoint.BUILTIN.read_bytes())
    train("online", scenario, place.file, *QUICK.split(), "--episodes", 1, "--from", first)
    train("online", scenario, place.file, *QUICK.split(), "--episodes", 1, "--from", moved, "--resume")

    built_in = checkpoint.load(checkpoint.BUILTIN)
    built_in.replaced(initial(built_in.shape, 1), {}).save(first)
    with pytest.raises(InvalidInput, match=r"digest of the first weights is .* now and was"):
        train("online", scenario, place.file, *QUICK.split(), "--episodes", 1, "--from", first, "--resume")


def test_a_damaged_state_is_noticed_wherever_it_is_damaged(tmp_path: Path) -> None:
    training = Training(_recipe_of("online", write(tmp_path, ONE)))
    good = kept_of(training).to_bytes()
    file = tmp_path / "s.state"
    for data in (b"", good[:-7], good[: len(good) // 2], good[:400] + b"x" + good[401:], good[:-3] + b"abc"):
        file.write_bytes(data)
        with pytest.raises(CorruptCheckpoint, match="no whole state of a training"):
            load(file, training.recipe)


def test_the_learning_section_names_its_switches() -> None:
    with pytest.raises(InvalidConfiguration, match="did you mean exploration"):
        parse(LearningConfig, {"explorations": True}, "it")


def test_the_curve_shows_first_lowest_and_last() -> None:
    rows = [{"jct_slots.all": value} for value in (9.0, 2.0, 5.0)]
    assert curve([*rows, {"episode": 4}], "jct_slots.all") == "█▁▄  first 9, lowest 2, last 5"


def test_fresh_weights_have_the_references_width() -> None:
    assert first_weights("dl2", "scratch", 3, 5).shape == Dl2Shape(5, (20, 20))
    assert first_weights("dl2", "scratch", 3).digest == checkpoint.digest(initial(Dl2Shape(), 3))
