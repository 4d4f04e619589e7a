"""The executor against a stand-in job that speaks the protocol: how an attempt begins, changes and ends."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fedsched.core.commands import AdoptJobs
from fedsched.core.events import JobExited, JobScaled, JobStarted, ScaleFailed
from fedsched.core.job import Reason
from fedsched.executor import launching, records
from fedsched.executor.jobs import JobExecutor
from fedsched.executor.records import LauncherRecord, Layout
from tests.executor.cluster import JOB, STAND_IN, Cluster, placement, stand_in_programs
from tests.waiting import eventually

pytestmark = pytest.mark.live


def run(how: str) -> str:
    return f"python {STAND_IN} {how}"


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
    executor: JobExecutor = cluster.executor
    cluster.start(cluster.spec())
    executor.close()

    assert cluster.all_of(JobExited) == []


def test_a_launcher_that_ends_leaves_nothing_outside_its_folder(tmp_path: Path) -> None:
    """Its address lies elsewhere where the folder's name is too long for one; a machine must not fill with them."""
    layout = Layout(tmp_path / ("long" * 25))
    layout.root.mkdir()
    command = [sys.executable, "-m", "fedsched.executor.launcher", "--root", str(layout.root), "--idle-s", "1"]
    subprocess.run(command, check=True, timeout=60)  # the launcher detaches itself
    eventually(layout.launcher.exists, "the launcher listens")
    found = records.read(LauncherRecord, layout.launcher)
    assert found is not None
    place = Path(found.socket).parent
    assert place != layout.root
    assert place.exists()

    eventually(lambda: not layout.launcher.exists(), "the launcher has ended, having nothing to do")
    eventually(lambda: not place.exists(), "the place of its address is gone")


def test_a_switch_that_takes_longer_than_its_deadline_is_waited_for(cluster: Cluster) -> None:
    """Where steps are slow, or the machine is busy, the members have the new plan long before they have taken its first
    step; to give up and kill the newcomers then would end a job that is healthy."""
    cluster.scale_deadline_s = 0.1
    cluster.programs = stand_in_programs(switch_s=8.0)
    cluster.start(cluster.spec(), placement(1, 1))
    cluster.wait_for(JobStarted)
    before = cluster.pids()

    cluster.scale(placement(2, 1))
    scaled = cluster.wait_for(JobScaled)

    assert scaled.placement == placement(2, 1)
    assert cluster.all_of(ScaleFailed) == []
    assert before.items() <= cluster.pids().items()
    assert cluster.alive() == {"coordinator", "ps-0", "worker-0", "worker-1"}
