"""Where commands write: whatever cannot or must not be written is refused before any work, and costs nobody a file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedsched.files import alone
from fedsched.policy import checkpoint, speed_checkpoint
from tests.cli.conftest import Run

CLUSTERS: list[dict[str, Any]] = [
    {"name": "c", "nodes": [{"name": "n", "cpus": 8, "memory_gb": 8, "count": 2}]},
]
SIMULATE = "sim run one.yaml --policies drf --seeds 1 --workers 1"
WRITERS = {
    "train online": "train online one.yaml FILE --episodes 1 --validation-seeds 1",
    "train federated": "train federated one.yaml FILE --episodes 1 --validation-seeds 1",
    "train speeds": "train speeds one.yaml FILE --runs 1",
    "train set": "train set one.yaml FILE --lessons 0 --improvements 0 --teacher none",
    "sim run --per-job": f"{SIMULATE} --per-job FILE",
    "sim run --parquet": f"{SIMULATE} --parquet FILE",
    "sim run --html": f"{SIMULATE} --html FILE",
    "sim compare --per-job": "sim compare one.yaml --seeds 1 --workers 1 --per-job FILE",
}
TRAININGS = {
    "train supervised": "train supervised FILE --steps 1 --scenarios 1 --held-out 1",
    **{name: words for name, words in WRITERS.items() if name.startswith("train ") and "--" not in name},
}
WEIGHTS = ["train supervised", "train online", "train federated", "train speeds", "train set"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An experiment of three files and weights, in the folder where commands run."""
    experiment = {
        "clusters": "clusters.yaml",
        "workload": "workload.yaml",
        "policies": {"drf": {"name": "drf"}, "dl2": {"name": "dl2", "checkpoint": "weights"}},
        "seeds": 1,
        "federation": {"interval_s": 30, "deadline_s": 10},
    }
    here = tmp_path / "here"
    here.mkdir()
    plain = {"one": experiment, "clusters": CLUSTERS, "workload": {"jobs": 3, "gap_s": 5}}
    for name, part in plain.items():
        (here / f"{name}.yaml").write_text(yaml.safe_dump(part))
    (here / "weights").write_bytes(checkpoint.BUILTIN.read_bytes())
    monkeypatch.chdir(here)
    return here


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.mark.parametrize("command", sorted(WRITERS))
@pytest.mark.parametrize(
    ("place", "why"),
    [
        ("one.yaml", "would be written over"),
        ("clusters.yaml", "would be written over"),
        ("workload.yaml", "would be written over"),
        ("weights", "would be written over"),
        ("folder", "is a folder"),
        ("none/file", "there is no folder"),
    ],
)
def test_no_command_works_for_a_file_that_it_cannot_write_or_writes_over_what_it_reads(
    run: Run, folder: Path, command: str, place: str, why: str
) -> None:
    """A slip of the hand must cost neither the experiment nor an hour of training."""
    (folder / "folder").mkdir()
    before = contents(folder)
    done = run(*WRITERS[command].replace("FILE", place).split())
    assert (done.code, done.out) == (2, "")
    assert why in done.err
    assert contents(folder) == before


@pytest.mark.parametrize("command", WEIGHTS)
def test_weights_are_never_written_over_what_are_none(run: Run, folder: Path, command: str) -> None:
    """`train speeds A.yaml B.yaml` without a name for the result would eat the second experiment."""
    (folder / "notes.txt").write_text("mine")
    done = run(*(WRITERS | TRAININGS)[command].replace("FILE", "notes.txt").split())
    assert (done.code, done.out) == (2, "")
    assert "notes.txt is there and is no checkpoint" in done.err
    assert (folder / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("command", sorted(TRAININGS))
@pytest.mark.usefixtures("folder")
def test_a_training_does_not_put_its_log_and_state_beside_a_device(run: Run, command: str) -> None:
    """They would lie in /dev, or nowhere."""
    done = run(*TRAININGS[command].replace("FILE", "/dev/null").split())
    assert (done.code, done.out) == (2, "")
    assert "/dev/null is no regular file" in done.err
    assert not Path("/dev/null.state").exists()


def test_a_trainings_log_is_not_written_over_somebodys_table(run: Run, folder: Path) -> None:
    """Its name is made from that of the weights; nobody chose it."""
    (folder / "jobs.csv").write_text("mine")
    done = run(*WRITERS["train online"].replace("FILE", "jobs.weights").split())
    assert done.code == 2
    assert "jobs.csv is there" in done.err
    assert (folder / "jobs.csv").read_text() == "mine"


def test_statistics_are_not_merged_into_one_of_their_parts(run: Run, folder: Path) -> None:
    """The part could not be had again."""
    for name in ("east", "west"):
        (folder / name).write_bytes(speed_checkpoint.BUILTIN.read_bytes())
    before = contents(folder)
    for place in ("east", "one.yaml", "."):
        assert run("policy", "merge", "east", "west", place).code == 2
    assert contents(folder) == before


def test_statistics_are_merged_into_a_new_file_only(run: Run, folder: Path) -> None:
    """Whoever forgets to name the file to write gives the last part to be written over."""
    for name in ("east", "west", "north"):
        (folder / name).write_bytes(speed_checkpoint.BUILTIN.read_bytes())
    before = contents(folder)
    done = run("policy", "merge", "east", "west", "north")
    assert done.code == 2
    assert "north exists already" in done.err
    assert contents(folder) == before
    assert run("policy", "merge", "east", "west", "north", "total").code == 0
    assert run("policy", "merge", "east", "west", "/dev/null").code == 0


@pytest.mark.parametrize(
    ("option", "missing"), [("--parquet", "pyarrow"), ("--html", "jinja2"), ("--html", "matplotlib")]
)
def test_what_is_not_installed_is_told_before_the_runs(
    run: Run, folder: Path, option: str, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Told afterwards, the results would be lost."""
    monkeypatch.setitem(sys.modules, missing, None)
    done = run(*f"{SIMULATE} {option} out".split())
    assert (done.code, done.out) == (2, "")
    assert f"out needs {missing}, which is not installed" in done.err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_results_that_fit_on_no_disk_are_still_shown_and_the_other_files_written(run: Run, folder: Path) -> None:
    """They may have taken an hour."""
    done = run(*f"{SIMULATE} --per-job /dev/full --parquet out".split())
    assert done.code == 1
    assert "drf" in done.out
    assert "/dev/full: No space left" in done.err
    assert (folder / "out").stat().st_size


def test_a_second_training_into_the_same_files_is_refused(run: Run, folder: Path) -> None:
    """Both would end well, and the files would be of both."""
    with alone(folder / "new.state"):
        for option in ("", " --restart"):
            done = run(*f"{WRITERS['train online'].replace('FILE', 'new')}{option}".split())
            assert (done.code, done.out) == (5, "")
            assert "another process is writing new.state" in done.err
