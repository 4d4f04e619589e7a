"""Cores and GPUs of their own for the tasks of one machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsched.core.events import JobStarted
from fedsched.core.ids import NodeName, TaskName
from fedsched.core.resources import Resources
from fedsched.executor.backend import TaskBackend
from fedsched.executor.local import LocalTasks
from fedsched.executor.orders import Programs
from fedsched.executor.pinning import Devices, of_this_machine, pinned
from fedsched.executor.records import TaskOrder, TaskRecord
from tests.executor.cluster import Cluster, Local, ended, placement


def order(cpu: int, gpu: int, **env: str) -> TaskOrder:
    demand = Resources(cpu * 1000, 512, gpu * 1000)
    return TaskOrder(
        "r", TaskName("worker-0"), NodeName("n"), 1, ("x",), "/", tuple(env.items()), False, "/a", demand=demand
    )


def running(found: TaskOrder) -> TaskRecord:
    return TaskRecord(1, "", found.task, found.node, 1, "r", 0, cores=found.cores, gpus=found.gpus)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=8))
def test_tasks_share_a_core_or_a_gpu_only_once_all_are_taken(demands: list[tuple[int, int]]) -> None:
    """Two tasks on one core next to an idle one train at half their speed."""
    devices = Devices(cores=(0, 1, 4, 5), gpus=(2, 3))
    tasks: list[TaskRecord] = []
    for cpu, gpu in demands:
        given_to = pinned(order(cpu, gpu), devices, tasks)
        assert len(given_to.cores) == min(cpu, 4)
        assert len(given_to.gpus) == min(gpu, 2)
        assert dict(given_to.env)["CUDA_VISIBLE_DEVICES"] == ",".join(map(str, given_to.gpus))
        tasks.append(running(given_to))
    for all_of_them, held in (
        (devices.cores, [core for task in tasks for core in task.cores]),
        (devices.gpus, [gpu for task in tasks for gpu in task.gpus]),
    ):
        counts = [held.count(each) for each in all_of_them]
        assert max(counts) - min(counts) <= 1


def test_a_users_own_choice_of_gpus_stays() -> None:
    """Who sets the variable knows why."""
    assert dict(pinned(order(1, 1, CUDA_VISIBLE_DEVICES="7"), Devices(gpus=(0,)), ()).env) == {
        "CUDA_VISIBLE_DEVICES": "7"
    }


def test_without_devices_nothing_is_pinned() -> None:
    """Several clusters on a laptop must not all crowd on its first core."""
    assert of_this_machine(pin_cores=False, gpus=()) == Devices()
    assert pinned(order(1, 1), Devices(), ()) == order(1, 1)


class Pinned(Local):
    """This machine, its tasks kept to cores and to GPUs that it does not have."""

    def open(self, root: Path, programs: Programs) -> TaskBackend:
        return LocalTasks(root, programs, of_this_machine(pin_cores=True, gpus=(2, 5)))


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with ended(Cluster(tmp_path / "root", Pinned())) as cluster:
        yield cluster


@pytest.mark.live
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_tasks_run_where_they_were_pinned(cluster: Cluster) -> None:
    """What is on record must be what the kernel does."""
    spec = cluster.spec(worker_demand=Resources(1000, 512, 1000))
    cluster.start(spec, placement(2, 1))
    cluster.wait_for(JobStarted)

    records = cluster.attempt.records()
    for task in ("worker-0", "worker-1", "ps-0"):
        record = records[TaskName(task)]
        assert len(record.cores) == 1
        assert tuple(psutil.Process(record.pid).cpu_affinity()) == record.cores
    assert sorted(records[TaskName(task)].gpus for task in ("worker-0", "worker-1")) == [(2,), (5,)]
    assert records[TaskName("ps-0")].gpus == ()
    assert records[TaskName("coordinator")].cores == ()
