"""What cgroups do to tasks; `test_cgroups` runs this where there is a kernel that lets it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedsched.core.events import JobExited, JobStarted
from fedsched.core.job import Reason
from fedsched.core.resources import Resources
from fedsched.executor import records
from fedsched.executor.cgroups import candidates
from fedsched.executor.records import LauncherRecord
from tests.executor.cluster import JOB, STAND_IN, Cluster, Local, ended, placement
from tests.waiting import eventually


class Limited(Local):
    """This machine, below a cgroup of the test's own."""

    join_s = 120.0


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    around = candidates()[-1]
    (around / "cgroup.subtree_control").write_text("+cpu +memory")
    cgroup = around / f"fedsched-test-{time.time_ns()}"
    cgroup.mkdir()
    with ended(Cluster(tmp_path / "root", Limited(str(cgroup)))) as cluster:
        yield cluster
    eventually(lambda: not [path for path in cgroup.iterdir() if path.is_dir()], "no cgroup is left behind", 20.0)
    cgroup.rmdir()


def groups(cluster: Cluster) -> dict[str, Path]:
    """The tasks' cgroups by name."""
    assert isinstance(cluster.place, Limited)
    found = Path(cluster.place.cgroup).glob("fedsched-*/*")
    return {path.name: path for path in found if path.is_dir()}


def test_a_task_that_uses_more_memory_than_it_was_given_is_told_so_and_harms_nobody_else(cluster: Cluster) -> None:
    """Without a limit the kernel kills whatever is largest when the machine is full: another job, or the agent."""
    hungry = cluster.spec(f"python {STAND_IN} exhaust", worker_demand=Resources(1000, 200))
    other = cluster.spec(job_id="other", worker_demand=Resources(1000, 200))
    cluster.start(other, placement(1, 1))
    cluster.wait_for(JobStarted)
    cluster.start(hungry, placement(1, 1))

    eventually(lambda: any(event.job_id == JOB for event in cluster.all_of(JobExited)), "it is ended", 120.0)

    exited = next(event for event in cluster.all_of(JobExited) if event.job_id == JOB)
    assert exited.reason is Reason.OUT_OF_MEMORY
    assert exited.message == "worker-0 used more memory than the 200 MiB that it was given"
    assert [event for event in cluster.all_of(JobExited) if event.job_id != JOB] == []
    eventually(lambda: len(groups(cluster)) == 3, "only the other job's tasks have cgroups")


def test_a_task_gets_no_more_processor_time_than_it_was_given(cluster: Cluster) -> None:
    """A job that asked for a tenth of a core and takes all of one slows those that asked for theirs."""
    cluster.start(cluster.spec(f"python {STAND_IN} busy", worker_demand=Resources(100, 512)), placement(1, 1))
    cluster.wait_for(JobStarted)
    group = next(path for name, path in groups(cluster).items() if "worker-0" in name)
    stat = group / "cpu.stat"
    assert (group / "cpu.max").read_text().split() == ["10000", "100000"]

    def used() -> dict[str, int]:
        return {name: int(value) for name, value in (line.split() for line in stat.read_text().splitlines())}

    # In the kernel's own periods: how long the test itself was kept from running says nothing.
    before = used()
    eventually(lambda: used()["nr_periods"] >= before["nr_periods"] + 20, "twenty periods have passed", 60.0)
    after = used()

    periods = after["nr_periods"] - before["nr_periods"]
    assert after["nr_throttled"] - before["nr_throttled"] >= periods / 2, "it wanted more"
    assert after["usage_usec"] - before["usage_usec"] <= (periods + 2) * 10_000 * 1.5


def test_cgroups_that_a_killed_launcher_left_are_taken_away_by_a_later_one(cluster: Cluster) -> None:
    """They would pile up: the kernel keeps each until somebody removes it."""
    cluster.start(cluster.spec(), placement(1, 1))
    cluster.wait_for(JobStarted)
    launcher = records.read(LauncherRecord, cluster.layout.launcher)
    assert launcher is not None
    os.kill(launcher.pid, signal.SIGKILL)
    cluster.stop()
    cluster.wait_for(JobExited)
    left = set(groups(cluster))
    assert len(left) == 3, "nobody was there to do it"

    mark = cluster.mark()
    cluster.start(cluster.spec(job_id="next"), placement(1, 1))
    cluster.wait_for(JobStarted, after=mark)
    assert not left & set(groups(cluster))
