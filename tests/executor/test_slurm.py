"""What the back end `slurm` makes of Slurm's lists; what it does with a real Slurm is in the contract suite."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedsched.core.ids import NodeName, TaskName
from fedsched.executor import slurm
from fedsched.executor.records import TaskRecord
from fedsched.executor.shepherded import TaskCondition
from fedsched.executor.slurm import SlurmOptions, SlurmTasks
from tests.waiting import eventually

TASK = TaskRecord(0, "", TaskName("worker-0"), NodeName("n1"), 1, "request", 0, "7")
OTHER = TaskRecord(0, "", TaskName("worker-1"), NodeName("n1"), 2, "another", 0, "9")


@pytest.fixture
def listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file; what is in it is what `squeue` lists. Quick, so that the test need not wait for minutes."""
    file, program = tmp_path / "listed", tmp_path / "squeue"
    file.write_text("7|RUNNING|None|n1\n8|RUNNING|None|n1\n")
    program.write_text(f"#!/bin/sh\nexec cat {file}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(slurm, "POLL_S", 0.05)
    monkeypatch.setattr(slurm, "GONE_S", 1.0)
    return file


@pytest.fixture
def tasks(listed: Path) -> Iterator[SlurmTasks]:
    made = SlurmTasks(SlurmOptions())
    yield made
    made.close()


def test_a_task_that_slurm_forgot_while_nobody_could_ask_has_ended(tasks: SlurmTasks, listed: Path) -> None:
    """Slurm forgets jobs minutes after they end; one that it listed as running before an outage would run for ever."""
    tasks._standing(TASK)  # it is asked about from now on
    eventually(lambda: "7" in tasks._jobs, "it is listed")
    assert tasks._standing(TASK) == TaskCondition()

    listed.write_text("")

    eventually(lambda: tasks._standing(TASK).ended, "it counts as ended")


def test_what_slurm_lists_of_others_and_of_forgotten_tasks_is_not_kept(tasks: SlurmTasks) -> None:
    """An agent that runs for months must not keep every task that ever ran."""
    tasks._standing(TASK)
    eventually(lambda: "7" in tasks._jobs, "it is listed")
    assert "8" not in tasks._jobs, "a job of the same user that is none of ours"
    listed_at_s = tasks._listed_at_s

    tasks.forget([TASK])
    tasks._standing(OTHER)  # so that Slurm is asked again

    eventually(lambda: tasks._listed_at_s > listed_at_s, "Slurm lists it still")
    assert "7" not in tasks._jobs


def test_slurm_is_not_asked_when_no_task_is_left(tasks: SlurmTasks) -> None:
    """Its controller answers everybody's questions, one after the other."""
    tasks._standing(TASK)
    eventually(lambda: "7" in tasks._jobs, "it is listed")
    tasks.forget([TASK])
    tasks._list()  # one may be under way
    listed_at_s = tasks._listed_at_s

    tasks._list()

    assert tasks._listed_at_s == listed_at_s


def test_which_states_of_slurms_nodes_take_tasks(tmp_path: Path, tasks: SlurmTasks) -> None:
    """A node that only sleeps or is busy is no dead one, and the reverse costs every job five minutes."""
    open_states = ("idle", "mixed", "allocated", "completing", "planned", "idle~", "idle#", "mixed-", "allocated+")
    closed_states = (
        "down",
        "down*",
        "idle*",
        "mixed*",
        "drained",
        "draining",
        "fail",
        "unknown",
        "inval",
        "maint",
        "idle$",
        "idle@",
        "idle%",
    )
    states = {f"n{number}": state for number, state in enumerate((*open_states, *closed_states))}
    program = tmp_path / "sinfo"
    lines = "".join(f"{node}|{state}|{'none' if state in open_states else 'a | b'}\n" for node, state in states.items())
    program.write_text(f"#!/bin/sh\ncat <<END\n{lines}END\n")
    program.chmod(0o755)

    closed = tasks.closed([NodeName(node) for node in (*states, "n99")])

    assert closed == {
        **{node: f"Slurm says {state}, a | b" for node, state in states.items() if state in closed_states},
        "n99": "Slurm has no such node",
    }
    program.write_text("#!/bin/sh\necho 'Unable to contact slurm controller' >&2; exit 1\n")
    assert tasks.closed([NodeName("n1")]) is None, "who does not answer says nothing about nodes"
