"""What a command says where there is little to say: nothing found, nothing to do, a failure, an interruption."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fedsched.adapters.memory import MemoryStore
from fedsched.core.ids import JobId
from fedsched.core.job import JobPhase, Reason
from tests.cli.conftest import Run
from tests.controller.stand_in import StandInAgent
from tests.waiting import eventually


@pytest.mark.parametrize(
    "command", [("queue",), ("queue", "--all"), ("policy", "diff"), ("federation", "rounds")], ids=" ".join
)
def test_an_empty_list_says_so_to_people_and_is_just_empty_to_programs(
    server: str, run: Run, command: tuple[str, ...]
) -> None:
    """A head of a table with nothing below it may as well be a fault."""
    shown = run(*command)
    assert shown.code == 0
    assert len(shown.out.splitlines()) == 1, "what reads the table meets nothing else"
    assert "no" in shown.err.split()[0]
    read = run(*command, "-o", "json")
    assert (json.loads(read.out), read.err) == ([], "")


def test_jobs_of_others_are_not_taken_for_none(server: str, run: Run, file: str) -> None:
    run("submit", file)
    assert run("queue", "--user", "nobody").err == "no job of that user or queue waits or runs\n"
    assert run("queue").err == ""


@pytest.mark.parametrize("over", [JobPhase.SUCCEEDED, JobPhase.FAILED])
def test_a_job_that_was_over_is_not_said_to_be_cancelled(
    store: MemoryStore, server: str, run: Run, file: str, over: JobPhase
) -> None:
    """Whoever cancels has to know whether anything was ended by it."""
    east = StandInAgent(store, "east")
    run("submit", file)
    eventually(lambda: JobId("1") in east.assigned(), "it is dispatched")
    east.run(JobId("1"))
    east.move(JobId("1"), over, Reason.FINISHED if over is JobPhase.SUCCEEDED else Reason.USER_ERROR)
    eventually(lambda: f"is {over.value}" in run("explain", "1").out, "it is over")
    assert run("cancel", "1").out == f"job 1 was over already: it is {over.value}\n"


def test_who_waits_for_a_job_that_cannot_start_is_told_what_to_look_at(
    store: MemoryStore, server: str, run: Run, file: str
) -> None:
    """The first job of most people is a script that trains without the three calls."""
    east = StandInAgent(store, "east")
    run("submit", file)
    eventually(lambda: JobId("1") in east.assigned(), "it is dispatched")
    east.run(JobId("1"))
    east.move(JobId("1"), JobPhase.FAILED, Reason.START_FAILED)
    waited = run("submit", file, "--wait", "--timeout", "0.1")
    assert waited.code == 6
    eventually(lambda: "is Failed" in run("explain", "1").out, "it is over")
    (step,) = (line for line in run("explain", "1").out.splitlines() if line.startswith("next step"))
    assert "workdir" in step
    assert "fedsched.elastic.join" in step


def test_who_stops_waiting_is_told_that_the_job_goes_on(
    store: MemoryStore, server: str, run: Run, file: str, tmp_path: Path
) -> None:
    """Ctrl-C ends what runs in a shell; whoever believes that it ended the job leaves it running."""
    StandInAgent(store, "east")
    command = [sys.executable, "-m", "fedsched.cli.main", "submit", file, "--wait"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as waiting:
        assert waiting.stderr is not None
        assert waiting.stderr.readline().startswith("job 1 ")
        waiting.send_signal(signal.SIGINT)
        told = waiting.stderr.read()
        assert waiting.wait() == 130
    assert told.splitlines()[-2:] == [
        "job 1 goes on",
        "  follow it: fedsched logs 1 -f     end it: fedsched cancel 1",
    ]
    assert "1 " in run("queue").out


def test_weights_that_are_not_there_are_looked_for_before_they_are_replaced(run: Run) -> None:
    """A typing mistake is likelier than a lost disk."""
    refused = run("policy", "card", "nowhere.safetensors")
    assert refused.code == 1
    assert "try: check the path, or " in refused.err
