"""What a shepherd promises of its one task, wherever a cluster has put it."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from fedsched.core.ids import NodeName, TaskName
from fedsched.executor import records
from fedsched.executor.processes import identify, is_alive, start_tied
from fedsched.executor.records import Attempt, ExitRecord, TaskOrder, TaskRecord
from tests.waiting import eventually

pytestmark = pytest.mark.live

TASK = TaskName("worker-0")


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    made = Attempt(tmp_path / "jobs" / "job-1", 1)
    for folder in (made.tasks, made.logs):
        folder.mkdir(parents=True)
    return made


def shepherd(attempt: Attempt, *argv: str, cwd: Path | None = None) -> subprocess.Popen[bytes]:
    """A shepherd whose order is on record, as a cluster with logs of its own starts it."""
    order = TaskOrder(
        "request-1", TASK, NodeName("n1"), 1, argv, str(cwd or attempt.path), (), False, str(attempt.path)
    )
    records.write(attempt.ordered(TASK), order)
    records.write(attempt.task(TASK), TaskRecord(0, "", TASK, NodeName("n1"), 1, "request-1", 0, "handle"))
    command = [sys.executable, "-m", "fedsched.executor.shepherd", "--attempt", str(attempt.path)]
    command += ["--task", TASK, "--request", "request-1", "--echo"]
    return subprocess.Popen(command, stdout=subprocess.PIPE)


def ended(attempt: Attempt, started: subprocess.Popen[bytes]) -> tuple[ExitRecord, bytes]:
    """How the task ended, and what the cluster's own log has of it."""
    said, _ = started.communicate(timeout=60)
    found = records.read(ExitRecord, attempt.exit(TASK))
    assert found is not None
    return found, said


def test_a_task_whose_log_has_no_room_goes_on_to_its_end(attempt: Attempt) -> None:
    """Nobody read on what it printed: it stood still as soon as a pipe was full, for ever."""
    attempt.log(TASK).symlink_to("/dev/full")
    exited, said = ended(attempt, shepherd(attempt, "sh", "-c", "seq 100000; exit 3"))
    assert exited.code == 3
    assert said.endswith(b"\n100000\n")


def test_what_a_task_said_last_is_in_its_log_before_its_end_is_on_record(attempt: Attempt) -> None:
    """Why it failed is read from there as soon as that is known, and told to its user."""
    for number in range(5):
        attempt.log(TASK).unlink(missing_ok=True)
        exited, _ = ended(attempt, shepherd(attempt, "sh", "-c", f"seq 20000; echo last {number} >&2; exit 1"))
        assert exited.code == 1
        assert attempt.log(TASK).read_text().endswith(f"\n20000\nlast {number}\n")


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("no-such-command", "command not found: no-such-command"),
        ("./data", "cannot execute ./data: Permission denied"),
    ],
)
def test_a_program_that_cannot_be_begun_is_told_as_such(attempt: Attempt, program: str, why: str) -> None:
    """It is not a script that failed: its user looks elsewhere."""
    (attempt.path / "data").write_text("no program")
    exited, _ = ended(attempt, shepherd(attempt, program))
    assert (exited.code, exited.start_error) == (127, why)


def test_a_missing_working_directory_is_told_as_such(attempt: Attempt, tmp_path: Path) -> None:
    """On a node that has not mounted the user's directory, say."""
    exited, _ = ended(attempt, shepherd(attempt, "true", cwd=tmp_path / "missing"))
    assert exited.start_error == f"cannot enter the working directory {tmp_path / 'missing'}: No such file or directory"


def test_a_task_ends_with_its_shepherd_however_that_ends(attempt: Attempt) -> None:
    """A cluster that kills what it started has given the place to others by then."""
    started = shepherd(attempt, "sh", "-c", "echo $$ > pid; exec sleep 600")
    pid_file = attempt.path / "pid"
    eventually(lambda: pid_file.exists() and pid_file.read_text().endswith("\n"), "the task runs")
    task = identify(int(pid_file.read_text()))
    assert task is not None
    started.kill()
    started.communicate()
    eventually(lambda: not is_alive(task), "the task has ended")


def test_a_process_with_busy_threads_starts_what_ends_with_it() -> None:
    """A fork that ran Python before its program stood still whenever another thread held a lock: in Ray's actors."""
    done = threading.Event()
    busy = [threading.Thread(target=lambda: [str(n) for n in iter(done.is_set, True)]) for _ in range(4)]
    for thread in busy:
        thread.start()
    children = [start_tied(["sh", "-c", "kill -PIPE $$"], stdin=subprocess.DEVNULL) for _ in range(20)]
    assert {child.wait(60) for child in children} == {-signal.SIGPIPE}, "programs have the usual signals"
    done.set()
    for thread in busy:
        thread.join()
    with pytest.raises(FileNotFoundError) as missing:
        start_tied(["no-such-command"])
    assert missing.value.filename == "no-such-command"
