"""`fedsched train supervised`, on a scale that takes seconds."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedsched.cli.teaching import Place
from fedsched.cli.train import app
from fedsched.errors import InvalidInput
from fedsched.learn.supervised import Fit
from fedsched.policy import checkpoint
from fedsched.sim.training import labels_digest


def test_the_command_writes_weights_that_load_and_says_how_good_they_are(tmp_path: Path) -> None:
    """The one command with which anybody can make the shipped weights anew."""
    path = tmp_path / "new.safetensors"
    options = "--teacher fifo --seed 3 --steps 5 --scenarios 1 --held-out 1 -o json"
    done = CliRunner().invoke(app, ["supervised", *options.split(), str(path)], catch_exceptions=False)

    assert done.exit_code == 0
    told = json.loads(done.stdout)
    made = checkpoint.load(path)
    assert told["digest"] == made.digest
    assert told["teacher_jct_s"] > 0 < told["student_jct_s"]
    assert made.made["command"] == (
        "fedsched train supervised --teacher fifo --seed 3 --steps 5 --scenarios 1 --held-out 1 FILE"
    )


QUICK = ["--teacher", "fifo", "--seed", "3", "--steps", "45", "--scenarios", "1", "--held-out", "1", "-o", "json"]


def test_a_training_that_was_stopped_and_goes_on_makes_the_same_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trainings are killed all the time; going on must cost nothing and change nothing."""
    for folder in ("whole", "stopped"):
        (tmp_path / folder).mkdir()
    whole, stopped = (Place(tmp_path / folder / "w.safetensors") for folder in ("whole", "stopped"))
    CliRunner().invoke(app, ["supervised", *QUICK, str(whole.file)], catch_exceptions=False)

    run = Fit.run

    def until_20(fit: Fit, until: int) -> None:
        run(fit, until)
        if until == 20:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Fit, "run", until_20)
        CliRunner().invoke(app, ["supervised", *QUICK, str(stopped.file)])
    assert not stopped.file.exists()
    assert stopped.log.read_text().splitlines()[-1].startswith("19,")
    with pytest.raises(InvalidInput, match="--resume goes on with it"):
        CliRunner().invoke(app, ["supervised", *QUICK, str(stopped.file)], catch_exceptions=False)
    other_teacher = ["supervised", *QUICK, str(stopped.file), "--resume", "--teacher", "srtf"]
    with pytest.raises(InvalidInput, match="teacher is 'srtf' now and was 'fifo'"):
        CliRunner().invoke(app, other_teacher, catch_exceptions=False)
    CliRunner().invoke(app, ["supervised", *QUICK, str(stopped.file), "--resume"], catch_exceptions=False)

    for one, other in ((whole.file, stopped.file), (whole.log, stopped.log), (whole.state, stopped.state)):
        assert one.read_bytes() == other.read_bytes()
    rows = list(csv.DictReader(whole.log.read_text().splitlines()))
    assert [int(row["step"]) for row in rows] == list(range(1, 46))
    assert float(rows[-1]["loss"]) < float(rows[0]["loss"])


def test_a_directory_that_is_not_there_is_noticed_before_the_work(tmp_path: Path) -> None:
    """Nobody wants to learn that after a minute of training."""
    missing = tmp_path / "nowhere" / "new.safetensors"
    with pytest.raises(InvalidInput, match="there is no folder"):
        CliRunner().invoke(app, ["supervised", str(missing)], catch_exceptions=False)


def test_the_shipped_weights_can_still_be_made() -> None:
    """After a change of what the teacher decides, its command makes other weights than those that ship.

    Then make them anew: fedsched train supervised fedsched/policy/checkpoints/dl2-v1.safetensors
    """
    made = checkpoint.load(checkpoint.BUILTIN).made
    watched = labels_digest(str(made["teacher"]), int(made["seed"]), int(made["scenarios"]))
    assert made["labels_digest"] == watched
