"""The back end `local`: real processes on this machine, each node a named share of it."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from fedsched.core.commands import StopJob
from fedsched.core.ids import JobId, NodeName
from fedsched.core.job import JobSpec, Reason
from fedsched.core.resources import Resources
from fedsched.executor import records
from fedsched.executor.control import Control
from fedsched.executor.launching import Launching
from fedsched.executor.orders import Programs
from fedsched.executor.pinning import Devices, pinned
from fedsched.executor.processes import Identity, end_orphans, is_alive, send
from fedsched.executor.records import (
    Attempt,
    CoordinatorRecord,
    ExitRecord,
    LauncherRecord,
    Layout,
    TaskOrder,
    TaskRecord,
)


class LocalTasks:
    """Tasks are processes that a launcher forks; they and it outlive the agent.

    Args:
        root: the cluster's directory.
        devices: what tasks are kept to.
        cgroup: the one below which tasks have theirs; empty: see `cgroups.candidates`.
        coordinator: what a coordinator is counted and kept to; nothing: neither.
    """

    is_this_machine = True

    def __init__(
        self,
        root: Path,
        programs: Programs,
        devices: Devices | None = None,
        cgroup: str = "",
        coordinator: Resources | None = None,
    ) -> None:
        self.coordinator = coordinator or Resources()
        self._layout = Layout(root)
        self._devices = devices or Devices()
        self._choosing = threading.Lock()
        self._launching = Launching(Layout(root), programs.preload, programs.launcher_idle_s, cgroup=cgroup)

    def taken(self, spec: JobSpec) -> JobSpec:
        """As it asks."""
        return msgspec.structs.replace(spec, coordinator_demand=self.coordinator)

    def warm_up(self) -> None:
        """Have a launcher load."""
        self._launching.warm_up()

    def fence(self, term: int) -> None:
        """Tell the launcher, if there is one."""
        self._launching.fence(term)

    def take_over(self, attempt: Attempt, term: int) -> None:
        """Nothing: whatever is on record has begun."""

    def start(self, term: int, order: TaskOrder) -> TaskRecord:
        """Have the launcher fork, on cores and with GPUs that the fewest other tasks of the cluster have."""
        if self._devices == Devices():
            return self._launching.start(term, order)
        with self._choosing:  # until the choice is on record, where the next one looks
            return self._launching.start(term, pinned(order, self._devices, self._running()))

    def _running(self) -> list[TaskRecord]:
        found = [record for _, attempt in self._layout.open_attempts() for record in attempt.records().values()]
        return [record for record in found if is_alive(record.identity)]

    def ended(self, attempt: Attempt, record: TaskRecord) -> ExitRecord | None:
        """What the launcher wrote down, once the process is gone."""
        if is_alive(record.identity):
            return None
        found = records.read(ExitRecord, attempt.exit(record.task))
        return (
            found if found and found.request == record.request else ExitRecord(record.pid, record.request, time.time())
        )

    def waiting(self, record: TaskRecord) -> str:
        """Processes start at once."""
        return ""

    def closed(self, nodes: Sequence[NodeName]) -> Mapping[NodeName, str]:
        """None: nodes are shares of the machine that asks."""
        return {}

    def signal(self, records: Iterable[TaskRecord], signum: signal.Signals) -> None:
        """Signal the tasks' process groups."""
        for record in records:
            send(record.identity, signum)

    def sweep(self, attempt: Attempt, records: Iterable[TaskRecord]) -> bool:
        """Kill what is left in the tasks' sessions."""
        return end_orphans([record.identity for record in records])

    def forget(self, records: Iterable[TaskRecord]) -> None:
        """Nothing is kept here: what is known is on record, and the launcher reaps what has ended."""

    def close(self) -> None:
        """Let the launcher go; it stays while it has tasks."""
        self._launching.close()


def shut_down(root: Path, *, grace_s: float = 5.0) -> int:
    """End all tasks of the cluster at `root`, which has no executor any more, and its launcher; how many tasks ran.

    Their jobs are not over: each writes a checkpoint first, and an agent started later finds them preempted, which is
    nobody's fault, and goes on from there.
    """
    layout = Layout(root)
    tasks: list[Identity] = []
    running: list[Attempt] = []
    for job_id, files in layout.open_attempts():
        alive = [task.identity for task in files.records().values() if is_alive(task.identity)]
        if alive:
            tasks += alive
            running.append(files)
            _leave_word(job_id, files, grace_s)
    _save(running, grace_s)
    for signum, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 10.0)):
        for task in tasks:
            send(task, signum)
        _wait_until_gone(tasks, wait_s)
    end_orphans(tasks)
    launcher = records.read(LauncherRecord, layout.launcher)
    if launcher is not None:
        send(launcher.identity, signal.SIGTERM)
        if not _wait_until_gone([launcher.identity], 5.0):
            send(launcher.identity, signal.SIGKILL)
    return len(tasks)


def _leave_word(job_id: JobId, files: Attempt, grace_s: float) -> None:
    """Leave word of why the tasks end, for whoever adopts the attempt; an order to stop that is there already stays."""
    if records.read(StopJob, files.stop) is None:
        order = StopJob(0, 0, job_id, files.number, Reason.PREEMPTED, checkpoint=True, grace_s=grace_s)
        with suppress(OSError):  # then the attempt counts as lost, which is nobody's fault either
            records.write(files.stop, order)


def _save(attempts: list[Attempt], grace_s: float) -> None:
    """Have every attempt write a checkpoint and stop, all at once, within `grace_s`."""
    controls = [
        Control(found.address, str(files.path), lambda _: None)
        for files in attempts
        if (found := records.read(CoordinatorRecord, files.coordinator)) is not None
    ]
    answers = [control.stop(checkpoint=True, grace_s=grace_s) for control in controls]
    until_s = time.monotonic() + grace_s
    while not all(answer.done() for answer in answers) and time.monotonic() < until_s:
        time.sleep(0.02)
    for control in controls:
        control.close()


def _wait_until_gone(processes: list[Identity], wait_s: float) -> bool:
    until_s = time.monotonic() + wait_s
    while any(is_alive(process) for process in processes):
        if time.monotonic() > until_s:
            return False
        time.sleep(0.02)
    return True
