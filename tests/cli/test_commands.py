"""The command line against a controller: output that people and programs can use, and exit codes that scripts trust."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import yaml
from msgspec.structs import replace
from rich.console import Console

from fedsched.adapters.attach import AttachClient
from fedsched.adapters.memory import MemoryStore
from fedsched.addresses import free_address
from fedsched.agent.logs import read_logs
from fedsched.cli.jobs import COLUMNS, LETTERS, SPARE
from fedsched.cli.output import table
from fedsched.config import ControllerConfig
from fedsched.controller.app import Controller
from fedsched.core.ids import ClusterName, JobId
from fedsched.core.job import JobPhase, Progress, Reason
from fedsched.core.rounds import Absence, Absentee, RoundOutcome, RoundRecord
from fedsched.errors import FedschedError
from fedsched.runtime import codec, keys
from fedsched.runtime.ports import LogPiece, Put
from tests.cli.conftest import Result, Run
from tests.controller.stand_in import StandInAgent
from tests.waiting import eventually


def started(store: MemoryStore, run: Run, file: str) -> StandInAgent:
    """A cluster on which job 1 runs."""
    east = StandInAgent(store, "east")
    assert run("submit", file, "-o", "name").out == "job/1\n"
    eventually(lambda: JobId("1") in east.assigned(), "it is dispatched")
    east.run(JobId("1"))
    eventually(lambda: " R " in run("queue").out, "it runs")
    return east


def test_the_queue_shows_what_slurm_users_look_for(store: MemoryStore, server: str, run: Run, file: str) -> None:
    """One line per job, letters that they know, the reason in the last column."""
    east = started(store, run, file)
    east.move(JobId("1"), JobPhase.RUNNING, Reason.NONE, progress=Progress(epochs=1.0))
    assert run("submit", file, "-n", "second", "--", "python", "other.py").code == 0
    eventually(lambda: "25%" in run("queue").out and " D " in run("queue").out, "the queue shows both")

    head, first, second = run("queue").out.splitlines()

    assert " ".join(head.split()) == "ID NAME QUEUE USER CLUSTER ST PS WORKERS PROG RUNTIME ATT ETA REASON"
    assert first.split()[0:3] == ["1", "digits", "default"]
    assert first.split()[4:9] == ["east", "R", "1/1..1", "1/1..3", "25%"]
    assert re.fullmatch(r"00:00:\d\d", first.split()[9])
    assert first.split()[11].startswith("~")
    assert second.split()[4:7] == ["east", "D", "0/1..1"]
    assert second.split()[-1] == "PendingEvaluation"


def test_every_list_is_available_to_programs(store: MemoryStore, server: str, run: Run, file: str) -> None:
    """Nobody should parse tables."""
    started(store, run, file)
    for command in (["queue"], ["info"], ["policy", "list"], ["federation", "rounds"], ["events"]):
        found = json.loads(run(*command, "-o", "json").out)
        assert isinstance(found, list)
        assert yaml.safe_load(run(*command, "-o", "yaml").out) == found or command == ["info"]
    job = json.loads(run("queue", "-o", "json").out)[0]
    assert job["spec"]["job_id"] == "1"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", job["spec"]["submitted_at"])
    assert job["status"]["finished_at"] is None
    assert job["spec"]["grace_s"] == 10.0, "lengths of time stay numbers"
    assert json.loads(run("info", "-o", "json").out)[0]["record"]["nodes"][0]["name"] == "east-0"
    assert json.loads(run("federation", "status", "-o", "json").out)["clusters"][0]["name"] == "east"
    assert json.loads(run("explain", "1", "-o", "json").out)["routing"]["choice"] == "east"
    assert run("queue", "-o", "name").out == "job/1\n"
    assert run("info", "-o", "name").out == "cluster/east\n"


def test_logs_are_lines_for_people_and_records_for_programs(
    store: MemoryStore, server: str, run: Run, file: str
) -> None:
    """Whoever searches the logs of many tasks needs to know whose line it is, whatever the line holds."""
    started(store, run, file)
    pieces = [LogPiece(b"worker-0 | loss | 0.5\nps-"), LogPiece(b"0 | ready\n")]
    line = AttachClient(store, ClusterName("east"), "east/1/1", lambda job_id, follow, read: iter(pieces))
    try:
        eventually(lambda: run("logs", "1").code == 0, "the agent is attached")
        assert run("logs", "1").out == "worker-0 | loss | 0.5\nps-0 | ready\n"
        found = [json.loads(record) for record in run("logs", "1", "-o", "json").out.splitlines()]
        assert found == [{"task": "worker-0", "text": "loss | 0.5"}, {"task": "ps-0", "text": "ready"}]
    finally:
        line.close()


def test_explain_prints_reason_evidence_verdicts_and_one_next_step(
    store: MemoryStore, server: str, run: Run, file: str
) -> None:
    """The answer to the most asked question, on one screen."""
    assert run("submit", file).code == 0
    eventually(lambda: "NoMatchingCluster" in run("explain", "1").out, "the reason is there")
    assert "no cluster has joined the federation yet" in run("explain", "1").out
    east = StandInAgent(store, "east")
    eventually(lambda: JobId("1") in east.assigned(), "it is dispatched")
    out = run("explain", "1").out
    assert "job 1 (digits) is Dispatched on east" in out
    assert re.search(r"^evidence   minimum 1w\+1ps needs", out, re.MULTILINE)
    assert re.search(r"^CLUSTER +VERDICT +FITS NOW", out, re.MULTILINE)
    assert re.search(r"^next step  \w+", out, re.MULTILINE)
    east.run(JobId("1"))
    reached = Progress(epochs=4.0, steps=60, loss=0.25, accuracy=0.875)
    east.move(JobId("1"), JobPhase.SUCCEEDED, Reason.FINISHED, progress=reached)
    eventually(lambda: "is Succeeded on east" in run("explain", "1").out, "it is over")
    out = run("explain", "1").out
    assert "trained 4 epochs in 60 steps, loss 0.25, accuracy 0.875" in out
    assert "VERDICT" not in out, "where else it could go is of no interest any more"


def test_events_tell_when_who_moved_which_job_and_why(store: MemoryStore, server: str, run: Run, file: str) -> None:
    """The first question after something odd is who did it."""
    started(store, run, file)
    eventually(lambda: "Running" in run("events", "--job", "1").out, "the move is recorded")
    first, *_, last = run("events", "--job", "1").out.splitlines()
    assert re.fullmatch(r"\S+Z  job 1     controller   Queued PendingEvaluation: submitted", first)
    assert re.search(r"Z  job 1     agent/east   Dispatched -> Running$", last)


def test_logs_of_a_job_that_printed_nothing_say_so(store: MemoryStore, server: str, run: Run, file: str) -> None:
    """An empty answer looks like a broken one."""
    started(store, run, file)
    line = AttachClient(store, ClusterName("east"), "east/1/1", lambda job_id, follow, read: iter(()))
    try:
        eventually(lambda: run("logs", "1").code == 0, "the agent is attached")
        result = run("logs", "1")
    finally:
        line.close()
    assert result.out == ""
    assert "job 1 have printed nothing" in result.err


def test_rounds_say_who_gave_nothing_and_why(store: MemoryStore, server: str, run: Run) -> None:
    """A federation that does not learn must tell what keeps it from learning."""
    absentee = Absentee(ClusterName("west"), Absence.DECLINED, "no decision of this cluster has a reward yet")
    asked = (ClusterName("east"), ClusterName("west"))
    record = RoundRecord(1, "dl2", 1, 1, RoundOutcome.NO_QUORUM, 2, asked, (), (absentee,), 1.0, 2.0)
    store.commit((), (Put(keys.round_record(1), codec.dumps(record)),))
    assert "west declined: no decision of this cluster has a reward yet" in run("federation", "rounds").out


def test_a_dry_run_prints_the_verdicts_and_the_long_form(store: MemoryStore, server: str, run: Run, file: str) -> None:
    """Where would it go, and what exactly would be submitted."""
    StandInAgent(store, "east")
    result = run("submit", file, "--dry-run")
    assert result.code == 0
    assert "job digits would go to east" in result.out
    long_form = yaml.safe_load(run("submit", file, "--dry-run", "-o", "yaml").out)
    assert (long_form["kind"], long_form["metadata"]["name"]) == ("ElasticJob", "digits")
    assert run("queue", "-o", "name").out == ""


@pytest.mark.parametrize(
    ("phase", "reason", "code"),
    [
        (JobPhase.SUCCEEDED, Reason.FINISHED, 0),
        (JobPhase.FAILED, Reason.USER_ERROR, 10),
        (JobPhase.CANCELLED, Reason.CANCELLED_BY_USER, 11),
        (JobPhase.FAILED, Reason.LOST, 12),
    ],
)
def test_submit_wait_ends_as_the_job_does(
    store: MemoryStore, server: str, run: Run, file: str, phase: JobPhase, reason: Reason, code: int
) -> None:
    """Pipelines branch on it."""
    east = StandInAgent(store, "east")

    def play() -> None:
        eventually(lambda: JobId("1") in east.assigned(), "it is dispatched")
        east.run(JobId("1"))
        east.end(JobId("1"), phase, reason)

    agent = threading.Thread(target=play)
    agent.start()
    result = run("submit", file, "--wait", "--timeout", "60")
    agent.join(10)
    assert result.code == code
    assert f"job 1 {phase.value}" in result.err
    assert f"(digits) {phase.value} after" in result.out


def test_submit_wait_gives_up_at_its_timeout(server: str, run: Run, file: str) -> None:
    """A pipeline must not hang for ever on a job that waits for a cluster."""
    result = run("submit", file, "--wait", "--timeout", "0.5")
    assert result.code == 6
    assert "job 1 is not over after 0.5 s" in result.err


def test_cancel_says_what_happens_now(store: MemoryStore, server: str, run: Run, file: str) -> None:
    """Cancelled, being cancelled, or later: three different things."""
    run("submit", file)
    assert run("cancel", "1").out == "job 1 is Cancelled\n"
    east = StandInAgent(store, "east")
    run("submit", file)
    eventually(lambda: JobId("2") in east.assigned(), "it is dispatched")
    assert run("cancel", "2").out == "job 2 is being cancelled by east\n"
    east.vanish()
    eventually(lambda: " U " in run("queue").out, "it is unreachable")
    assert run("cancel", "2").out == "job 2 will be cancelled when the agent of east is back\n"


def test_an_idempotency_key_submits_once(server: str, run: Run, file: str) -> None:
    """Scripts that retry."""
    assert run("submit", file, "--idempotency-key", "k").code == 0
    assert "was submitted before" in run("submit", file, "--idempotency-key", "k").out
    conflict = run("submit", file, "-n", "other", "--idempotency-key", "k")
    assert (conflict.code, conflict.err.split()[0]) == (5, "[FS201]")


def test_the_submission_is_the_root_of_the_jobs_trace(
    store: MemoryStore, server: str, run: Run, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`trace show` tells the story from the moment the user pressed enter."""
    monkeypatch.setenv("FEDSCHED_TRACE_FILE", str(tmp_path / "trace.jsonl"))
    assert run("submit", file).code == 0
    spec = json.loads(run("queue", "-o", "json").out)[0]["spec"]
    shown_result = run("trace", "show", "1", "-o", "json")
    assert shown_result.code == 0, shown_result.err
    shown = json.loads(shown_result.out)
    assert [(record["name"], record["service"]) for record in shown if not record["parent_id"]] == [("submit", "cli")]
    assert shown[0]["trace_id"] == spec["traceparent"].split("-")[1]
    assert "submit" in run("trace", "show", "1", "--file", str(tmp_path / "trace.jsonl")).out
    missing = run("trace", "show", "9", "--file", str(tmp_path / "trace.jsonl"))
    assert (missing.code, missing.err.split()[0]) == (3, "[FS110]")


def one_error(result: Result, code: int, number: str) -> None:
    """One error in the product's form, with a hint, on stderr, and nothing else."""
    assert result.code == code, result
    assert result.out == ""
    lines = result.err.splitlines()
    assert lines[0].startswith(f"[{number}] "), result.err
    assert lines[-1].startswith("  try: "), result.err
    assert sum(line.startswith("[FS") for line in lines) == 1
    assert "Traceback" not in result.err


def test_every_bad_input_is_one_clear_error_with_its_exit_code(
    store: MemoryStore, server: str, run: Run, file: str, tmp_path: Path
) -> None:
    """What was expected and what to try, never a stack; the federation goes on."""
    StandInAgent(store, "east")
    bad = tmp_path / "bad.yaml"
    bad.write_text("run: x\nelastic: {workers: 4..1, ps: -1}\nqueu: a")
    huge = tmp_path / "huge.yaml"
    huge.write_text("run: x\nelastic: {workers: 99..99}")
    one_error(run("submit", str(bad)), 2, "FS102")
    one_error(run("submit", str(tmp_path / "none.yaml")), 2, "FS102")
    one_error(run("submit", str(huge)), 2, "FS103")
    one_error(run("submit", str(huge), "--dry-run"), 2, "FS103")
    one_error(run("submit", file, "-n", "Bad Name"), 2, "FS102")
    one_error(run("explain", "99"), 3, "FS110")
    one_error(run("cancel", "x"), 3, "FS110")
    one_error(run("logs", "99"), 3, "FS110")
    one_error(run("events", "--job", "99"), 3, "FS110")
    one_error(run("policy", "show"), 3, "FS110")
    one_error(run("queue", "--server", "127.0.0.1:9"), 7, "FS220")
    one_error(run("queue", "--server", "nonsense"), 2, "FS100")
    one_error(run("up", str(bad)), 2, "FS101")
    one_error(run("server", "run", "--config", str(bad)), 2, "FS101")
    assert run("submit", file).code == 0


def test_without_any_server_the_hint_says_how_to_start_one(run: Run) -> None:
    """The first thing a newcomer types is often the wrong one."""
    result = run("queue")
    one_error(result, 7, "FS220")
    assert "fedsched up" in result.err


def test_usage_errors_exit_with_2(run: Run) -> None:
    """As interfaces promise, and as shells expect."""
    for arguments in (["nonsense"], ["submit"], ["queue", "-o", "xml"], ["queue", "--limit", "-1"], ["policy"]):
        result = run(*arguments)
        assert result.code == 2, arguments
        assert "Usage:" in result.out + result.err


def test_something_unexpected_says_where_it_is_written_down(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of ours must be reportable, and must not fill the screen."""

    def broken() -> None:
        raise RuntimeError("the roof is leaking")

    monkeypatch.setattr("fedsched.local.current", broken)
    result = run("queue")
    assert result.code == 1
    assert "RuntimeError: the roof is leaking" in result.err
    assert "Traceback" not in result.err
    story = Path(result.err.rsplit("report it with ", 1)[1].strip())
    assert "the roof is leaking" in story.read_text()


def test_every_error_has_its_own_code() -> None:
    """The code is how the other side of a connection knows which error it was."""

    def below(kind: type[FedschedError]) -> list[type[FedschedError]]:
        return [kind, *(deeper for child in kind.__subclasses__() for deeper in below(child))]

    # Kinds that other modules derive for their own use never cross a connection.
    codes = [kind.code for kind in below(FedschedError) if kind.__module__ == FedschedError.__module__]
    assert len(codes) == len(set(codes))


def test_help_explains_arguments_and_letters_in_plain_text(run: Run) -> None:
    """Libraries under the command line have dropped one and decorated the other."""
    shown = run("explain", "--help").out
    assert re.search(r"ID +The job's id, as `fedsched queue` shows it\. +\[required\]", shown)
    assert "\\" not in shown
    shown = " ".join(run("queue", "--help").out.split())
    for letters in LETTERS.values():
        assert f" {letters} " in shown
    assert "..." not in run("--help").out.partition("Commands:")[2], "a summary is cut"
    assert run("queu").err.count("Did you mean") == 1


def test_a_narrow_terminal_shows_the_columns_that_matter_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut to equal shares, not even a job's id can be read."""
    cells = ("12", "a-long-name", "default", "someone", "east", "R", "1/1..2", "1/1..3", "25%", "00:00:10", 1, "~9s")
    shown = {}
    for width in (200, 80):
        screen = io.StringIO()
        terminal = Console(file=screen, force_terminal=True, width=width, color_system=None)
        monkeypatch.setattr("fedsched.cli.output.console", lambda terminal=terminal: terminal)
        table(COLUMNS, [(*cells, "WaitingForCapacityAndSomeMore")], SPARE)
        shown[width] = [line.rstrip() for line in screen.getvalue().splitlines()]
    assert shown[200][1].split() == [*map(str, cells), "WaitingForCapacityAndSomeMore"]
    head, line = shown[80]
    assert head.split() == ["ID", "NAME", "CLUSTER", "ST", "PS", "WORKERS", "PROG", "RUNTIME", "REASON"]
    assert line.split()[:8] == ["12", "a-long-name", "east", "R", "1/1..2", "1/1..3", "25%", "00:00:10"]
    assert line.endswith("\u2026")
    assert len(line) <= 80


def test_help_loads_nothing_heavy() -> None:
    """`fedsched --help` must answer in under 0.3 s; these imports are what would make it slow."""
    heavy = ("torch", "grpc", "numpy", "pydantic", "yaml", "rich", "flwr", "opentelemetry", "psutil", "google.protobuf")
    code = (
        "import sys\nfrom fedsched.cli.main import main\n"
        "assert main(['--help']) == 0\n"
        f"sys.exit(','.join(name for name in {heavy!r} if name in sys.modules) or 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    for command in ("submit", "queue", "up", "demo", "federation", "policy", "trace", "agent", "server", "train"):
        assert re.search(rf"^  {command} ", result.stdout, re.MULTILINE)


def test_what_the_machine_refuses_is_no_fault_of_ours(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk or a missing right asks for the operator, not for a bug report."""
    monkeypatch.setenv("FEDSCHED_HOME", "/proc/nowhere")
    done = run("up")
    assert done.code == 1
    assert done.err.startswith("[FS300] /proc/nowhere")
    assert "free space" in done.err


def test_whoever_follows_events_hears_each_once_while_the_controller_is_restarted(
    store: MemoryStore, tmp_path: Path, run: Run, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An upgrade of the controller must not end the terminal that somebody watches, or tell the story twice."""
    config = ControllerConfig(
        listen=free_address(), etcd="127.0.0.1:1", state_dir=tmp_path / "controller", lease_ttl_s=2
    )
    monkeypatch.setenv("FEDSCHED_SERVER", config.listen)
    controller = Controller(config, store)
    try:
        east = started(store, run, file)
        before = run("events", "--job", "1", "-o", "name").out.splitlines()
        command = [str(Path(sys.executable).with_name("fedsched")), "events", "--job", "1", "-f", "-o", "name"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as following:
            assert following.stdout is not None
            lines = [following.stdout.readline() for _ in before]
            controller.close()
            eventually(lambda: run("queue").code == 7, "the controller is away")
            controller = Controller(config, store)
            east.move(JobId("1"), JobPhase.COMPLETING, Reason.FINISHED)
            east.move(JobId("1"), JobPhase.SUCCEEDED, Reason.FINISHED)
            lines += following.stdout.readlines()
            assert following.wait(30) == 0
    finally:
        controller.close()
    assert lines == [f"job/1/{seq}\n" for seq in range(1, len(lines) + 1)]
    assert len(lines) == len(before) + 2
    assert run("events", "-f").code == 7, "what was never reached is told at once"


def test_whoever_follows_a_log_reads_each_line_once_while_controller_and_agent_are_restarted(
    store: MemoryStore, tmp_path: Path, run: Run, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log that ends silently looks like a job that hangs, and one that begins anew like a job that does."""
    config = ControllerConfig(
        listen=free_address(), etcd="127.0.0.1:1", state_dir=tmp_path / "controller", lease_ttl_s=2
    )
    monkeypatch.setenv("FEDSCHED_SERVER", config.listen)
    logs = tmp_path / "attempt-1" / "logs"
    logs.mkdir(parents=True)
    files = [logs / "ps-0.log", logs / "worker-0.log"]
    over = threading.Event()
    printed = 0

    def prints(count: int) -> None:
        nonlocal printed
        for path in files:
            with path.open("ab") as log:  # lines of which some do not fit in one message
                log.writelines(b"%d %s\n" % (n, b"x" * (n * 997 % 90_000)) for n in range(printed, printed + count))
        printed += count

    def agent() -> AttachClient:
        return AttachClient(
            store,
            ClusterName("east"),
            "east/1/1",
            lambda job_id, follow, read: read_logs(lambda: files, lambda: not over.is_set(), follow, read),
        )

    controller, line = Controller(config, store), agent()
    try:
        started(store, run, file)
        prints(40)
        eventually(lambda: run("logs", "1").code == 0, "the agent is attached")
        command = [str(Path(sys.executable).with_name("fedsched")), "logs", "1", "-f"]
        with (
            (tmp_path / "shown").open("wb") as shown,
            subprocess.Popen(command, stdout=shown, stderr=subprocess.PIPE) as following,
        ):
            eventually(lambda: b"worker-0 | 39 " in (tmp_path / "shown").read_bytes(), "it has read so far")
            for _ in range(2):
                prints(20)
                controller.close()
                eventually(lambda: run("queue").code == 7, "the controller is away")
                prints(20)
                controller = Controller(config, store)
                prints(20)
            line.close()
            prints(20)
            line = agent()
            eventually(
                lambda: b"worker-0 | %d " % (printed - 1) in (tmp_path / "shown").read_bytes(), "it has read on", 30.0
            )
            prints(20)
            over.set()
            assert following.wait(60) == 0
            assert following.stderr is not None
            said = following.stderr.read().decode()
    finally:
        line.close()
        controller.close()
    found = [line.partition(" | ")[::2] for line in (tmp_path / "shown").read_text().splitlines()]
    for path in files:
        assert [text for task, text in found if task == path.stem] == path.read_text().splitlines()
    assert "trying again" in said
    assert run("logs", "1", "-f").code == 7, "what was never reached is told at once"


def test_a_cluster_whose_nodes_are_closed_shows_how_many_are_left(store: MemoryStore, server: str, run: Run) -> None:
    """Half a cluster that is down explains a queue better than anything that is said of the jobs in it."""
    east = StandInAgent(store, "east")
    first, *others = east.record.nodes
    record = replace(east.record, nodes=(replace(first, schedulable=False), *others))
    eventually(lambda: " 2 " in run("info").out, "it has two nodes")
    store.commit((), (Put(keys.cluster(east.name), codec.dumps(record), east.lease),))
    eventually(lambda: " 1/2 " in run("info").out, "one of them is open")
