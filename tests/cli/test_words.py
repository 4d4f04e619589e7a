"""What a command says where there is little to say: nothing found, nothing to do, a failure, an interruption."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fedsched.adapters.memory import MemoryStore
from fedsched.cli.teaching import Place, View, at_work, shown
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
    assert refused.code == 3
    assert "try: check the path; " in refused.err


@pytest.mark.parametrize(
    ("word", "told"), [("drf", "policy drf has no weights"), ("lerned_speed", "did you mean learned_speed?")]
)
def test_a_card_of_what_is_no_file_says_which_policies_have_weights(run: Run, word: str, told: str) -> None:
    """Whoever names a policy looks for no file, and cannot restore one from a backup."""
    refused = run("policy", "card", word)
    assert refused.code == 3
    assert told in refused.err
    assert "backup" not in refused.err


def test_without_a_federation_policies_are_listed_by_what_they_are_for(run: Run) -> None:
    """Seven columns of dashes say nothing; that a policy answers in simulations only has to be seen before it is
    configured."""
    head, *rows = run("policy", "list").out.splitlines()
    assert head.split() == ["NAME", "PACKAGE", "USE"]
    uses = {row.split()[0]: " ".join(row.split()[2:]) for row in rows}
    assert (uses["drf"], uses["set"], uses["oracle_greedy"]) == ("-", "learns", "simulations only")


@pytest.mark.parametrize("gone_on", [False, True])
def test_every_row_of_a_log_is_told_once_where_there_is_no_terminal(
    gone_on: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two looks that came at once were one line; a resumed training told nothing twice."""
    view = View({"STEP": "step"}, curve="step", about="steps", done="step")
    rows = [{"step": number} for number in range(5)]
    with shown(view, 5, 2 if gone_on else 0) as show:
        for count in (2, 4, 4, 5):
            show(rows[:count])
    first = [] if gone_on else ["step 0"]
    assert capfd.readouterr().err.splitlines() == [*first, "step 1", "step 2", "step 3", "step 4"]


@pytest.mark.parametrize("kept", [False, True], ids=["nothing kept", "a state kept"])
def test_who_interrupts_a_training_is_told_whether_it_can_go_on(
    kept: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    place = Place(tmp_path / "new.safetensors")
    if kept:
        place.state.write_bytes(b"")
    with pytest.raises(KeyboardInterrupt), at_work(place):
        raise KeyboardInterrupt
    left = f"--resume goes on from {place.state}" if kept else "nothing is kept yet"
    assert capfd.readouterr().err == f"the training is interrupted; {left}\n"


def test_a_training_that_is_interrupted_goes_on_with_resume_as_it_says(tmp_path: Path) -> None:
    """Hours of training are not to be thrown away for want of a word."""
    small = Path(__file__).parents[2] / "simulations" / "experiments" / "small.yaml"
    file = tmp_path / "new.safetensors"
    command = [sys.executable, "-m", "fedsched.cli.main", "train", "speeds", str(small), str(file), "--runs"]
    with subprocess.Popen([*command, "500"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as training:
        assert training.stderr is not None
        assert training.stderr.readline().startswith("run 1, ")
        eventually((tmp_path / "new.state").exists, "its state is kept")
        training.send_signal(signal.SIGINT)
        told = training.stderr.read().splitlines()
        assert training.wait() == 130
    assert told[-1] == f"the training is interrupted; --resume goes on from {tmp_path / 'new.state'}"
    runs = sum(line.startswith("run ") for line in told) + 3
    resumed = subprocess.run([*command, str(runs), "--resume"], capture_output=True, text=True)
    assert resumed.returncode == 0, resumed.stderr
    assert "run 1, " not in resumed.stderr
    assert len((tmp_path / "new.csv").read_text().splitlines()) == 1 + runs
