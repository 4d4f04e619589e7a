"""Trainings end with the same files whatever happened on the way: kills at bad moments, disks that are full."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsched.cli import teaching, train_online, train_set, train_speeds, train_supervised
from fedsched.policy import checkpoint
from tests.cli.conftest import Run

NODES = "[{name: n, count: 2, cpus: 9, memory_gb: 64}]"
ONE = f"""
clusters: [{{name: one, nodes: {NODES}}}]
workload: {{jobs: 6, gap_s: 20, alone_s_max: 60}}
policies: {{dl2: {{name: dl2}}}}
slot_length_s: 10
"""
TWO = f"""
clusters: [{{name: east, nodes: {NODES}}}, {{name: west, nodes: {NODES}}}]
workload: {{jobs: 10, gap_s: 20, alone_s_max: 60}}
policies: {{dl2: {{name: dl2}}}}
slot_length_s: 10
federation: {{interval_s: 30, quorum: 1, deadline_s: 10, batch_size: 16, learning_rate: 0.001}}
"""
ROUNDS = ("--episodes", "2", "--validate-every", "2", "--validation-seeds", "1", "--samples-min", "16")
MODES: dict[str, tuple[str, Any, list[str]]] = {
    "online": (ONE, train_online, ["--batch-size", "16", *ROUNDS]),
    "federated": (TWO, train_online, ["--together", "1", *ROUNDS]),
    "supervised": ("", train_supervised, ["--steps", "40", "--scenarios", "1", "--held-out", "1"]),
    "speeds": (ONE, train_speeds, ["--runs", "3"]),
    "set": (ONE, train_set, ["--teacher", "none", "--improvements", "1", "--sizes", "1"]),
}


Lie = Callable[[dict[str, Any], dict[str, Any]], None]
"""Changes a state's arrays, or its card."""


def _forget(arrays: dict[str, Any], card: dict[str, Any]) -> None:
    arrays.pop(min(arrays))


def _spoil(arrays: dict[str, Any], card: dict[str, Any]) -> None:
    name = next(name for name in sorted(arrays) if arrays[name].dtype.kind == "f" and "policy." in name)
    arrays[name] = np.full_like(arrays[name], np.inf)


LIES: dict[str, Lie] = {
    "says nothing": lambda arrays, card: card.update(rest={}),
    "says it otherwise": lambda arrays, card: card.update(rest=dict.fromkeys(card["rest"], 5)),
    "is no description": lambda arrays, card: card.update(rest=True),
    "is of no recipe": lambda arrays, card: card.update(recipe=[None]),
    "lacks an array": _forget,
    "holds weights that are not finite": _spoil,
}


class Killed(BaseException):
    """The process is gone."""


def command(mode: str, folder: Path) -> list[str]:
    experiment, _, options = MODES[mode]
    scenario = folder / "experiment.yaml"
    scenario.write_text(experiment)
    return ["train", mode, *([str(scenario)] if experiment else []), str(folder / "f.safetensors"), *options]


def made(folder: Path) -> dict[str, bytes]:
    """What a training leaves; the states of two kinds tell what they cost."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".state"}


@pytest.mark.parametrize("mode", MODES)
def test_a_training_killed_between_its_last_state_and_its_log_still_ends_with_both(
    mode: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is a moment of a thousandth of a second, and a log that lacks its last row says that learning ended before."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
    rows: list[int] = []

    def count(path: Path, told: Sequence[Any]) -> None:
        rows.append(len(told))
        teaching.write_log(path, told)

    def die(path: Path, told: Sequence[Any]) -> None:
        if len(told) == max(rows):
            raise Killed
        teaching.write_log(path, told)

    with monkeypatch.context() as patched:
        patched.setattr(MODES[mode][1], "write_log", count)
        assert run(*command(mode, whole)).code == 0
        patched.setattr(MODES[mode][1], "write_log", die)
        with pytest.raises(Killed):
            run(*command(mode, killed))
    assert run(*command(mode, killed), "--resume").code == 0
    assert made(killed) == made(whole)


@pytest.mark.parametrize("mode", MODES)
def test_a_state_that_is_whole_and_yet_not_what_a_training_needs_is_told_as_damaged(
    mode: str, run: Run, tmp_path: Path
) -> None:
    """Another version kept it, with the same seal: that is no fault in the program of whoever resumes, and no reason
    to learn on from weights that are none."""
    assert run(*command(mode, tmp_path)).code == 0
    state = tmp_path / "f.state"
    whole = state.read_bytes()
    before = made(tmp_path)
    for name, lie in LIES.items():
        arrays, card = checkpoint.unsealed(whole)
        if name == "holds weights that are not finite" and mode == "speeds":
            continue  # it has none
        if name == "says it otherwise" and not card["rest"]:
            continue
        if name == "says nothing" and mode == "supervised":
            continue
        lie(arrays, card)
        card["digest"] = checkpoint.digest(arrays)
        state.write_bytes(checkpoint.seal(arrays, card))
        told = run(*command(mode, tmp_path), "--resume")
        assert told.code == 1, name
        assert told.err.splitlines()[-2].startswith("[FS301] "), (name, told.err)
        assert "--restart" in told.err
        assert made(tmp_path) == before


@pytest.mark.parametrize("name", ["", ".", "/", "loop.safetensors", "folder.safetensors"])
def test_a_name_that_no_file_can_have_is_refused_before_any_work(name: str, run: Run, tmp_path: Path) -> None:
    (tmp_path / "folder.safetensors").mkdir()
    (tmp_path / "loop.safetensors").symlink_to("loop.safetensors")
    before = sorted(tmp_path.iterdir())
    file = str(tmp_path / name) if name.endswith("s") else name
    for mode in ("supervised", "speeds", "online"):
        arguments = command(mode, tmp_path)
        told = run(*(file if one.endswith("f.safetensors") else one for one in arguments))
        assert (told.code, told.err[:8]) == (2, "[FS100] "), told.err
    assert sorted(path for path in tmp_path.iterdir() if path.suffix != ".yaml") == before


@pytest.mark.parametrize("closed", [1, 2])
def test_a_training_that_nobody_watches_any_more_ends_with_its_files(closed: int, tmp_path: Path) -> None:
    """A pager that was left, a terminal that is gone: hours of work must not end for a line that nobody reads. A stream
    that was never open must not be taken by a file that a library then writes into."""
    arguments = [sys.executable, "-m", "fedsched.cli.main", *command("speeds", tmp_path)]
    with open("/dev/full", "wb") as full:
        streams: Any = {"stdout": full if closed == 2 else subprocess.DEVNULL, "stderr": full}
        subprocess.run(arguments, **streams, preexec_fn=lambda: os.close(closed), timeout=120)
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("f.")) == [
        "f.csv",
        "f.safetensors",
        "f.state",
    ]
