"""The executor against a stand-in job that speaks the protocol: how an attempt begins, changes and ends."""

from __future__ import annotations

import errno
import logging
import os
import signal
from pathlib import Path

import pytest

from fedsched.core.commands import AdoptJobs, StartJob
from fedsched.core.events import JobAdopted, JobExited, JobScaled, JobStarted, ProgressReported, ScaleFailed
from fedsched.core.job import Reason
from fedsched.executor import launching, records
from fedsched.executor.local import LocalExecutor
from fedsched.executor.processes import identify
from fedsched.executor.records import FenceRecord, LauncherRecord
from tests.executor.conftest import JOB, STAND_IN, Cluster, placement, stand_in_programs
from tests.waiting import eventually

pytestmark = pytest.mark.live


def run(how: str) -> str:
    return f"python {STAND_IN} {how}"


def test_a_job_starts_reports_progress_and_finishes(cluster: Cluster) -> None:
    """The plain life of a job, and nothing of it stays behind."""
    cluster.programs = stand_in_programs(steps=30)
    cluster.start(cluster.spec(), placement(2, 1))

    cluster.wait_for(JobStarted)
    exited = cluster.wait_for(JobExited)

    assert (exited.reason, exited.message) == (Reason.FINISHED, "")
    assert exited.progress is not None
    assert exited.progress.steps == 30
    assert exited.progress.checkpoint_step == 30
    steps = [event.progress.steps for event in cluster.all_of(ProgressReported)]
    assert steps == sorted(steps)
    assert 2 <= len(steps) <= 8, "at most about two reports a second"
    assert cluster.alive() == set()
    assert len(cluster.all_of(JobExited)) == 1


def test_a_resize_adds_and_removes_tasks_while_the_others_keep_running(cluster: Cluster) -> None:
    """Growing or shrinking a job must never restart the tasks that stay."""
    cluster.start(cluster.spec(), placement(1, 1))
    cluster.wait_for(JobStarted)
    before = cluster.pids()

    cluster.scale(placement(3, 2))
    grown = cluster.wait_for(JobScaled)
    during = cluster.pids()
    mark = cluster.mark()
    cluster.scale(placement(1, 2))
    shrunk = cluster.wait_for(JobScaled, after=mark)

    assert grown.placement == placement(3, 2)
    assert grown.pause_s == pytest.approx(0.01)
    assert before.items() <= during.items()
    assert set(during) == {"coordinator", "worker-0", "worker-1", "worker-2", "ps-0", "ps-1"}
    assert shrunk.placement == placement(1, 2)
    assert cluster.alive() == {"coordinator", "worker-0", "ps-0", "ps-1"}, "what was removed has ended"
    assert before.items() <= cluster.pids().items()


def test_a_resize_whose_new_task_crashes_is_rolled_back(cluster: Cluster) -> None:
    """A failed resize must cost the job nothing: it goes on as it was, and its user reads why."""
    cluster.scale_deadline_s = 2.0
    cluster.start(cluster.spec(run("crash-if-added")), placement(1, 1))
    cluster.wait_for(JobStarted)

    cluster.scale(placement(2, 1))
    failed = cluster.wait_for(ScaleFailed)

    assert failed.placement == placement(1, 1)
    assert failed.message == "worker-1 failed with exit code 1: ValueError: no room for another one"
    assert cluster.alive() == {"coordinator", "worker-0", "ps-0"}
    assert cluster.all_of(JobExited) == []


def test_a_stop_during_a_resize_ends_the_job_and_only_that_is_told(cluster: Cluster) -> None:
    """A cancel must not wait for a resize, and the scheduler must not hear of a resize of a job that is over."""
    cluster.start(cluster.spec(env=(("STAND_IN_SCALE_S", "60"),)), placement(1, 1))
    cluster.wait_for(JobStarted)
    cluster.programs = stand_in_programs()

    cluster.scale(placement(2, 1))
    eventually(lambda: "worker-1" in cluster.alive(), "the resize has begun")
    cluster.stop(Reason.CANCELLED_BY_USER, checkpoint=False)
    exited = cluster.wait_for(JobExited)

    assert exited.reason is Reason.CANCELLED_BY_USER
    assert cluster.alive() == set()


def test_a_preempted_job_writes_a_checkpoint_first(cluster: Cluster) -> None:
    """Work that was done must survive the preemption."""
    cluster.start(cluster.spec(), placement(2, 1))
    cluster.wait_for(JobStarted)

    cluster.stop(Reason.PREEMPTED, checkpoint=True)
    exited = cluster.wait_for(JobExited)

    assert exited.reason is Reason.PREEMPTED
    assert exited.progress is not None
    assert exited.progress.checkpoint_step == exited.progress.steps > 0
    assert cluster.alive() == set()


def test_a_stop_while_tasks_still_join_ends_them_within_the_grace(cluster: Cluster) -> None:
    """A user who cancels early must not wait for the join deadline; a task that ignores SIGTERM must not matter."""
    cluster.start(cluster.spec(run("ignore-sigterm")), placement(1, 1))
    log = cluster.attempt.logs / "worker-0.log"
    eventually(lambda: log.exists() and "cannot be asked" in log.read_text(), "the worker ignores SIGTERM")

    cluster.stop(Reason.CANCELLED_BY_USER, grace_s=0.5)
    exited = cluster.wait_for(JobExited, deadline_s=10.0)

    assert exited.reason is Reason.CANCELLED_BY_USER
    assert cluster.all_of(JobStarted) == []
    assert cluster.alive() == set()


@pytest.mark.parametrize(
    ("how", "reason", "message"),
    [
        (
            run("crash"),
            Reason.USER_ERROR,
            "worker-0 failed with exit code 1: ValueError: learning rate -1 is no learning rate",
        ),
        (run("out-of-memory"), Reason.OUT_OF_MEMORY, "worker-0 failed with exit code 1: MemoryError"),
        ("sh -c 'kill -9 $$'", Reason.TASK_KILLED, "worker-0 was killed by SIGKILL"),
        ("no-such-command --fast", Reason.START_FAILED, "worker-0: command not found: no-such-command"),
        ("python missing.py", Reason.START_FAILED, "worker-0: script missing.py does not exist in "),
        ("python -m no_such_module", Reason.START_FAILED, "worker-0: there is no module named no_such_module"),
        ("echo 'unbalanced", Reason.START_FAILED, 'worker-0: the command "echo \'unbalanced" cannot be split'),
        ("", Reason.START_FAILED, "worker-0: the command is empty"),
        (
            run("never-join"),
            Reason.START_FAILED,
            "worker-0 did not join the job within 4 s; expected: the script calls fedsched.elastic.join",
        ),
        (
            run("leave-at-once"),
            Reason.START_FAILED,
            "worker-0 ended with exit code 0 before the training was done: nothing to do",
        ),
    ],
)
def test_each_bad_start_is_told_apart(cluster: Cluster, how: str, reason: Reason, message: str) -> None:
    """A user must read what went wrong, not that something did."""
    cluster.settle_s = 0.5
    if "never-join" in how:
        cluster.join_deadline_s = 4.0
    cluster.start(cluster.spec(how), placement(1, 1))

    exited = cluster.wait_for(JobExited)

    if "never-join" in how:  # the stand-in's coordinator counts a member as such from the start
        assert "worker-0" in exited.message
        assert "did not join the job within 4 s" in exited.message
    else:
        assert exited.message.startswith(message)
    assert exited.reason is reason
    assert cluster.alive() == set()
    assert len(cluster.all_of(JobExited)) == 1


@pytest.mark.parametrize("victim", ["worker-1", "ps-0", "coordinator"])
def test_killing_any_task_ends_the_attempt_and_names_the_task(cluster: Cluster, victim: str) -> None:
    """Half a job must never linger: its resources are wanted for the next attempt."""
    cluster.start(cluster.spec(), placement(2, 1))
    cluster.wait_for(JobStarted)

    os.kill(cluster.record(victim).pid, signal.SIGKILL)
    exited = cluster.wait_for(JobExited)

    assert exited.reason is Reason.TASK_KILLED
    assert exited.message.startswith(f"{victim} was killed by SIGKILL")
    assert cluster.alive() == set()


def test_daemons_of_a_task_live_as_long_as_the_task(cluster: Cluster, tmp_path: Path) -> None:
    """A script's helpers that detach themselves would hold memory and GPUs that the cluster has given to others."""
    daemons = tmp_path / "daemons"
    daemons.mkdir()
    cluster.start(cluster.spec(run(f"leave-daemons {daemons}")), placement(1, 1))
    cluster.wait_for(JobStarted)
    eventually(lambda: len(list(daemons.iterdir())) == 2, "both daemons run", 10.0)
    pids = [int(path.name) for path in daemons.iterdir()]
    assert all(identify(pid) for pid in pids), "the task that they serve still runs"

    cluster.stop(checkpoint=False, grace_s=0.5)
    cluster.wait_for(JobExited)

    eventually(lambda: not any(identify(pid) for pid in pids), "they end with their task", 10.0)


def test_a_new_executor_adopts_what_the_old_one_left_running(cluster: Cluster) -> None:
    """Restarting an agent must cost its jobs nothing: same processes, still driven."""
    spec = cluster.spec()
    cluster.start(spec, placement(2, 1))
    cluster.wait_for(JobStarted)
    cluster.scale(placement(3, 1))
    cluster.wait_for(JobScaled)
    before = cluster.pids()
    cluster.executor.close()
    assert cluster.alive() == set(before)

    cluster.open()
    cluster.adopt((spec, 1))
    adopted = cluster.wait_for(JobAdopted)
    mark = cluster.mark()
    cluster.scale(placement(1, 1))
    cluster.wait_for(JobScaled, after=mark)
    cluster.stop(Reason.TIME_LIMIT)

    assert adopted.placement == placement(3, 1)
    assert {task: pid for task, pid in before.items() if task in cluster.pids()} == cluster.pids()
    assert cluster.wait_for(JobExited).reason is Reason.TIME_LIMIT


def test_an_end_that_nobody_heard_of_is_told_after_the_restart(cluster: Cluster) -> None:
    """A job that finished while its agent was down has finished; it is not lost and not run again."""
    cluster.programs = stand_in_programs(steps=20)
    spec = cluster.spec()
    cluster.start(spec, placement(1, 1))
    cluster.wait_for(JobStarted)
    cluster.executor.close()
    eventually(lambda: not cluster.alive(), "the job has ended unwatched")
    assert cluster.all_of(JobExited) == []

    cluster.open()
    cluster.adopt((spec, 1))
    exited = cluster.wait_for(JobExited)
    mark = cluster.mark()
    cluster.adopt((spec, 1))
    again = cluster.wait_for(JobExited, after=mark)

    assert exited.reason is Reason.FINISHED
    assert again == exited


def test_tasks_that_died_with_their_launcher_are_lost(cluster: Cluster) -> None:
    """Whatever died unseen must end as such, so that the job goes on from its checkpoint instead of waiting."""
    spec = cluster.spec()
    cluster.start(spec, placement(1, 1))
    cluster.wait_for(JobStarted)
    cluster.executor.close()
    launcher = records.read(LauncherRecord, cluster.layout.launcher)
    assert launcher is not None
    for pid in [launcher.pid, *cluster.pids().values()]:
        os.kill(pid, signal.SIGKILL)

    cluster.open()
    cluster.adopt((spec, 1), (cluster.spec(job_id="job-2"), 3))
    eventually(lambda: len(cluster.all_of(JobExited)) == 2, "both jobs are answered for")

    ends = {event.job_id: event for event in cluster.all_of(JobExited)}
    assert ends[JOB].reason is Reason.LOST
    assert ends[cluster.spec(job_id="job-2").job_id].message == "the attempt was never started"


def test_what_no_job_is_known_for_is_killed_at_adoption(cluster: Cluster) -> None:
    """Tasks of an attempt that was replaced must go: nothing runs twice."""
    cluster.start(cluster.spec(), placement(1, 1))
    cluster.wait_for(JobStarted)
    cluster.executor.close()
    mark = cluster.mark()

    cluster.open()
    cluster.adopt()
    eventually(lambda: not cluster.alive(), "the strays are gone")
    eventually(lambda: cluster.attempt.exited.exists(), "the attempt is closed")

    assert cluster.events[mark:] == [], "nobody asked about it"


def test_the_launcher_may_die_and_jobs_go_on(cluster: Cluster) -> None:
    """A crash of our own must not become a crash of the users' jobs, and resizes must work afterwards."""
    cluster.start(cluster.spec(), placement(1, 1))
    cluster.wait_for(JobStarted)
    before = cluster.pids()
    launcher = records.read(LauncherRecord, cluster.layout.launcher)
    assert launcher is not None

    os.kill(launcher.pid, signal.SIGKILL)
    cluster.scale(placement(2, 1))
    cluster.wait_for(JobScaled)
    mark = cluster.mark()
    cluster.scale(placement(1, 1))
    cluster.wait_for(JobScaled, after=mark)
    assert cluster.pids() == before
    cluster.stop()

    assert cluster.wait_for(JobExited).reason is Reason.PREEMPTED


def test_a_stop_that_was_under_way_is_completed_after_a_restart(cluster: Cluster) -> None:
    """An agent that dies between the order and the end must not turn a cancelled job into one that runs on."""
    spec = cluster.spec(run("ignore-sigterm"))
    cluster.start(spec, placement(1, 1))
    log = cluster.attempt.logs / "worker-0.log"
    eventually(lambda: log.exists() and "cannot be asked" in log.read_text(), "the worker ignores SIGTERM")
    cluster.stop(Reason.CANCELLED_BY_USER, grace_s=2.0)
    eventually(lambda: cluster.attempt.stop.exists(), "the stop is under way")
    cluster.executor.close()
    assert "worker-0" in cluster.alive()

    cluster.open()
    cluster.adopt((spec, 1))

    assert cluster.wait_for(JobExited).reason is Reason.CANCELLED_BY_USER
    assert cluster.alive() == set()


def test_a_start_that_was_under_way_is_completed_after_a_restart(cluster: Cluster) -> None:
    """A job whose first tasks run already is completed, not thrown away."""
    spec = cluster.spec()
    cluster.start(spec, placement(1, 1))
    eventually(lambda: cluster.attempt.coordinator.exists(), "the coordinator runs")
    cluster.executor.close()

    cluster.open()
    cluster.adopt((spec, 1))
    adopted = cluster.wait_for(JobAdopted)
    eventually(lambda: cluster.all_of(ProgressReported), "the job trains")

    assert adopted.placement == placement(1, 1)
    assert cluster.alive() == {"coordinator", "worker-0", "ps-0"}


def test_a_resize_that_was_under_way_is_resolved_after_a_restart(cluster: Cluster) -> None:
    """A new task that is no member when the agent comes back must not hold resources unseen."""
    cluster.scale_deadline_s = 3.0
    spec = cluster.spec(run("never-join-if-added"))
    cluster.start(spec, placement(1, 1))
    cluster.wait_for(JobStarted)
    cluster.scale(placement(2, 1))
    eventually(lambda: "worker-1" in cluster.alive(), "the resize is under way")
    cluster.executor.close()

    cluster.open()
    cluster.adopt((spec, 1))
    adopted = cluster.wait_for(JobAdopted)

    assert adopted.placement == placement(1, 1)
    assert cluster.alive() == {"coordinator", "worker-0", "ps-0"}


def test_older_terms_are_refused_and_repeated_orders_ignored_across_restarts(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    """An agent that was replaced must not start a job that its successor has given away."""
    cluster.term = 7
    first = StartJob(7, 1, cluster.spec("no-such-command"), 1, placement(1, 1))
    cluster.executor.submit(first)
    cluster.wait_for(JobExited)
    cluster.executor.close()

    executor = cluster.open()
    with caplog.at_level(logging.WARNING):
        executor.submit(first)
        executor.submit(StartJob(6, 99, cluster.spec(job_id="job-old"), 1, placement(1, 1)))
        executor.submit(AdoptJobs(7, 2, ()))
        eventually(lambda: records.read(FenceRecord, cluster.layout.fence) == FenceRecord(7, 2), "all were looked at")

    assert "an order of term 6 was refused; this cluster already obeys term 7" in caplog.text
    assert not (cluster.root / "jobs" / "job-old").exists()
    assert len(cluster.all_of(JobExited)) == 1


def test_the_next_attempt_waits_until_the_tasks_of_the_one_before_are_gone(cluster: Cluster) -> None:
    """Two attempts of a job on one checkpoint directory would destroy each other's work."""
    spec = cluster.spec(run("ignore-sigterm"))
    cluster.start(spec, placement(1, 1))
    log = cluster.attempt.logs / "worker-0.log"
    eventually(lambda: log.exists() and "cannot be asked" in log.read_text(), "the first attempt runs")
    cluster.stop(grace_s=1.0)
    cluster.start(spec, placement(1, 1), attempt=2)

    cluster.wait_for(JobExited)
    assert cluster.alive() == set()
    eventually(lambda: "worker-0" in cluster.alive(attempt=2), "the second attempt runs")
    assert next(path.parent.parent.name for path in cluster.executor.log_files(JOB)) == "attempt-1"
    assert [path.name for path in cluster.executor.log_files(JOB)][:3] == [
        "coordinator.log",
        "ps-0.log",
        "worker-0.log",
    ]


def test_a_directory_that_cannot_be_written_ends_the_attempt_with_the_reason(cluster: Cluster) -> None:
    """A full disk or a wrong owner must be told to the user, never hang the job."""
    cluster.executor.submit(AdoptJobs(1, cluster.next_seq(), ()))
    eventually(lambda: cluster.layout.fence.exists(), "the executor is up")
    (cluster.root / "jobs" / JOB).write_text("a file where the job's directory should be")
    cluster.start(cluster.spec())

    exited = cluster.wait_for(JobExited)

    assert exited.reason is Reason.START_FAILED
    assert str(cluster.root / "jobs" / JOB) in exited.message


@pytest.mark.parametrize("where", ["order.json", "fence.json", "launcher"])
def test_a_full_disk_is_not_the_jobs_fault(cluster: Cluster, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """Every job that starts or resumes while a disk is full would be lost for good."""
    write = records.write

    def full(path: Path, record: object) -> None:
        if path.name == where:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        write(path, record)

    def refuse(_connection: object, _request: object) -> dict[str, object]:
        return {"error": "fork: No space left on device", "errno": errno.ENOSPC}

    cluster.executor.submit(AdoptJobs(1, cluster.next_seq(), ()))
    eventually(lambda: cluster.layout.fence.exists(), "the executor is up")
    monkeypatch.setattr(records, "write", full)
    if where == "launcher":
        monkeypatch.setattr(launching, "exchange", refuse)
    cluster.start(cluster.spec())

    exited = cluster.wait_for(JobExited)

    assert exited.reason is Reason.NODE_LOST, exited.message
    assert "No space left on device" in exited.message
    assert cluster.alive() == set()


def test_a_job_id_that_leads_out_of_the_directory_is_refused(cluster: Cluster) -> None:
    """No id may reach files of others."""
    cluster.start(cluster.spec(job_id="../outside"))

    exited = cluster.wait_for(JobExited)

    assert exited.reason is Reason.START_FAILED
    assert not (cluster.root / "outside").exists()


def test_each_task_start_is_a_span_of_the_jobs_trace(cluster: Cluster, tmp_path: Path) -> None:
    """Who reads a job's trace sees when each of its tasks was started."""
    from fedsched import tracing
    from fedsched.adapters import spans

    file = tmp_path / "trace.jsonl"
    tracing.setup("test", file=str(file))
    try:
        spec = cluster.spec("no-such-command", traceparent=f"00-{'a' * 32}-{'b' * 16}-01")
        cluster.start(spec)
        cluster.wait_for(JobExited)
    finally:
        tracing.shutdown()

    found = [span for span in spans.read(file) if span.name == "task.start"]
    assert {span.attributes["task"] for span in found} >= {"coordinator", "worker-0"}
    assert {(span.trace_id, span.parent_id) for span in found} == {("a" * 32, "b" * 16)}


def test_close_does_not_wait_for_a_launcher_that_loads(cluster: Cluster) -> None:
    """An agent that is told to end right after its start must end."""
    executor: LocalExecutor = cluster.executor
    cluster.start(cluster.spec())
    executor.close()

    assert cluster.all_of(JobExited) == []
