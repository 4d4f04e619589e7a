"""`fedsched train supervised`, on a scale that takes seconds."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedsched.cli.teaching import Place
from fedsched.cli.train import app
from fedsched.core.decision import Policy
from fedsched.errors import InvalidInput
from fedsched.learn.supervised import Fit
from fedsched.policy import checkpoint
from fedsched.policy.registry import heuristic
from fedsched.sim.experiment import load_experiment
from fedsched.sim.running import Request, whole_jct_slots
from fedsched.sim.training import labels_digest
from fedsched.sim.warm_up_grounds import Declared
from tests.sim.test_teaching import ONE, THREE, write


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


def test_a_teacher_may_be_watched_on_an_experiments_own_clusters(tmp_path: Path) -> None:
    """A cluster's users want a policy that begins as good as what they have, on their jobs, not on drawn ones."""
    experiment, place = write(tmp_path, ONE), Place(tmp_path / "w.safetensors")
    options = ["--on", str(experiment), "--scenarios", "6", "--held-out", "2", "--steps", "300", "-o", "json"]
    done = CliRunner().invoke(app, ["supervised", *options, str(place.file)], catch_exceptions=False)

    told, made = json.loads(done.stdout), checkpoint.load(place.file).made
    assert made["data"] == "6 runs of one.yaml, from seed 1000003 on"
    assert made["held_out"] == "2 runs of one.yaml, from seed 500000000 on"
    assert f"--on {experiment}" in str(made["command"])
    assert told["agreement"] > 0.4, "of some twenty choices that are possible"
    assert told["student_jct_s"] == pytest.approx(told["teacher_jct_s"], rel=0.1)

    write(tmp_path, {**ONE, "workload": {"jobs": 9, "gap_s": 5}})
    with pytest.raises(InvalidInput, match="the experiment's files have changed since"):
        CliRunner().invoke(app, ["supervised", *options, str(place.file), "--resume"], catch_exceptions=False)
    with pytest.raises(InvalidInput, match="fewer experiments are named now than were"):
        CliRunner().invoke(app, ["supervised", *options[2:], str(place.file), "--resume"], catch_exceptions=False)


def test_what_a_teacher_reaches_on_an_experiment_is_what_a_simulation_of_it_reaches(tmp_path: Path) -> None:
    """With policies of its own for each cluster, and without the rounds of a federation."""
    experiment = load_experiment(write(tmp_path, THREE))
    made: list[str] = []

    def drf() -> Policy:
        made.append("drf")
        return heuristic("drf")

    reached_s = Declared("one", experiment, seed=0).jct_s(drf, 2, held_out=True)
    assert len(made) == 2 * len(experiment.clusters)
    alone = experiment.model_copy(update={"federation": None})
    runs = [whole_jct_slots(Request("one", alone, "drf", 500_000_000 + number)) for number in range(2)]
    assert reached_s == pytest.approx(sum(runs) / 2 * experiment.slot_length_s)


def test_jobs_that_never_grow_teach_nothing_and_that_is_said(tmp_path: Path) -> None:
    """A trace of gangs: every job has all its workers or none."""
    (tmp_path / "jobs.csv").write_text("job_id,num_gpu,submit_s,duration_s\na,1,0,600\nb,2,60,900\n")
    plain = {
        **ONE,
        "clusters": [{"name": "east", "nodes": [{"name": "node", "cpus": 8, "memory_gb": 64, "gpus": 4}]}],
        "workload": {"kind": "trace", "file": "jobs.csv", "format": "csv"},
    }
    options = ["--on", str(write(tmp_path, plain)), "--scenarios", "1", str(tmp_path / "w.safetensors")]
    with pytest.raises(InvalidInput, match="drf never gave a job more than its minimum"):
        CliRunner().invoke(app, ["supervised", *options], catch_exceptions=False)
    assert not list(tmp_path.glob("w.*"))


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
