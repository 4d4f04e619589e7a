"""The file that says what `up` started: whatever became of it, the processes are found and can be stopped."""

from __future__ import annotations

import errno
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedsched import local
from fedsched.addresses import free_address, listen_problem
from fedsched.errors import InvalidInput, Unreachable

DAMAGED = (b"", b"garbage{", b"[]", b"null", b'{"processes": 5}', b"\xff\xfe", b'{"processes": [{"pid": "x"}]}')


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDSCHED_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def state_dir(home: Path) -> Path:
    folder = home / "hurt"
    (folder / "clusters" / "east").mkdir(parents=True)
    return folder


@pytest.fixture
def agent(state_dir: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process with the command line of the federation's agent."""
    command = [sys.executable, "-c", "import time; time.sleep(600)", "--config", str(state_dir / "agent-east.yaml")]
    with subprocess.Popen(command) as process:
        yield process
        process.kill()


@pytest.mark.parametrize("data", DAMAGED)
def test_a_damaged_state_file_is_no_federation_while_nothing_runs(home: Path, state_dir: Path, data: bytes) -> None:
    """One bad file must not stand in the way of every other federation of the user."""
    (state_dir / local.STATE_FILE).write_bytes(data)
    with pytest.raises(Unreachable):
        local.current()
    assert not local.runs(state_dir)


def test_processes_of_a_damaged_state_file_are_recognised_and_stopped(
    state_dir: Path, agent: subprocess.Popen[bytes]
) -> None:
    """Stopping them by hand helps nobody at night: the file that named them is the one that is gone."""
    (state_dir / local.STATE_FILE).write_bytes(b"garbage{")
    assert local.runs(state_dir)
    with pytest.raises(InvalidInput, match="damaged") as told:
        local.current()
    assert "fedsched down --name hurt" in told.value.hint

    said: list[str] = []
    local.down(state_dir, purge=False, say=said.append)

    assert said == ["agent east ended"]
    assert not local.runs(state_dir)


def test_an_address_that_cannot_be_had_is_told_from_one_in_use() -> None:
    """Told that a process listens there, the operator looks for a process that is not there."""
    assert listen_problem(free_address()) is None
    problem = listen_problem("192.0.2.1:7480")
    assert problem is not None
    assert problem.errno != errno.EADDRINUSE


def test_down_after_down_says_that_nothing_runs(home: Path) -> None:
    """Who stops everything twice must not be asked which of the stopped ones to stop."""
    for name in ("demo", "mine"):
        (home / name).mkdir()
        (home / name / local.STATE_FILE).write_text("{}")
    with pytest.raises(InvalidInput, match="no federation runs on this machine; stopped are demo, mine"):
        local.named("")
