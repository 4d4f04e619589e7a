"""A cluster under test: its executor, the events it posted, the promise that nothing stays behind."""

from __future__ import annotations

import shlex
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, TypeVar

import psutil
import pytest

from fedsched.core.commands import AdoptJobs, ScaleJob, StartJob, StopJob
from fedsched.core.events import Event, JobExited, ProgressReported
from fedsched.core.ids import JobId, NodeName
from fedsched.core.job import JobSpec, Placement, Range, Reason, Role, TaskPlacement, task_name
from fedsched.core.resources import Resources
from fedsched.executor import records
from fedsched.executor.backend import TaskBackend
from fedsched.executor.jobs import JobExecutor
from fedsched.executor.local import LocalTasks, shut_down
from fedsched.executor.orders import Programs
from fedsched.executor.processes import is_alive
from fedsched.executor.records import Attempt, LauncherRecord, Layout, TaskRecord
from tests.waiting import eventually

STAND_IN = Path(__file__).with_name("stand_in.py")
COORDINATOR = Path(__file__).with_name("stand_in_coordinator.py")
JOB = JobId("job-1")
E = TypeVar("E", bound=Event)


def placement(workers: int, ps: int, node: str = "n1") -> Placement:
    tasks = [task_name(Role.WORKER, index) for index in range(workers)] + [task_name(Role.PS, n) for n in range(ps)]
    return tuple(sorted(TaskPlacement(task, NodeName(node)) for task in tasks))


def stand_in_programs(
    steps: int = 100_000, *, turns_back_at: int = 0, scale_s: float = 0.0, switch_s: float = 0.0
) -> Programs:
    """The stand-in's.

    Args:
        scale_s: how long it does nothing about a resize.
        switch_s: how long the switch takes once all have joined.
    """
    coordinator, member = (shlex.quote(str(file)) for file in (COORDINATOR, STAND_IN))
    return Programs(
        coordinator=f"python {coordinator} {steps} {turns_back_at} {scale_s} {switch_s}",
        server=f"python {member} member",
        preload=("grpc", "fedsched.pb.training_pb2_grpc"),
        launcher_idle_s=1.0,
    )


class Recorded(Protocol):
    """Whose tasks are on record."""

    def record(self, task: str) -> TaskRecord:
        """Of the job's attempt that runs."""


class Place(Protocol):
    """Where the tasks of a cluster under test run, and what can happen to it."""

    join_s: float
    """How long a job of the stand-in may take to begin here."""

    def open(self, root: Path, programs: Programs) -> TaskBackend:
        """A back end, as an agent opens it."""

    def end(self, root: Path) -> None:
        """End everything that runs for the cluster."""

    def pids(self, attempt: Attempt) -> dict[str, int]:
        """The processes of an attempt's tasks that run."""

    def preempt(self, cluster: Recorded, task: str) -> None:
        """Take a task away without the agent, as the platform itself does."""

    def lose(self, cluster: Recorded, task: str) -> None:
        """Have the node that the task runs on vanish."""

    def kept(self, cluster: Cluster) -> set[str]:
        """What the platform holds of the cluster's tasks, those that have ended included."""


class Local:
    """This machine."""

    join_s = 20.0

    def __init__(self, cgroup: str = "") -> None:
        self.cgroup = cgroup

    def open(self, root: Path, programs: Programs) -> TaskBackend:
        return LocalTasks(root, programs, cgroup=self.cgroup)

    def end(self, root: Path) -> None:
        shut_down(root, grace_s=1.0)

    def pids(self, attempt: Attempt) -> dict[str, int]:
        return {task: record.pid for task, record in attempt.records().items() if is_alive(record.identity)}

    def preempt(self, cluster: Recorded, task: str) -> None:
        raise NotImplementedError

    def lose(self, cluster: Recorded, task: str) -> None:
        raise NotImplementedError

    def kept(self, cluster: Cluster) -> set[str]:
        launcher = records.read(LauncherRecord, cluster.layout.launcher)
        children = psutil.Process(launcher.pid).children() if launcher else []
        return {str(child.pid) for child in children}


def told_to_run(attempt: Attempt) -> dict[str, int]:
    """The tasks of an attempt, with their numbers, by what their processes were told when they were started."""
    found = {}
    for process in psutil.process_iter():
        try:
            env = process.environ()
            is_tasks = env.get("FEDSCHED_ATTEMPT_DIR") == str(attempt.path)
            if is_tasks and process.status() != psutil.STATUS_ZOMBIE:
                found[env["FEDSCHED_TASK"]] = process.pid
        except psutil.Error:
            continue
    return found


class Cluster:
    """One executor after the other on one root, and all events that they posted."""

    def __init__(self, root: Path, place: Place) -> None:
        self.root = root
        self.place = place
        self.layout = Layout(root)
        self.events: list[Event] = []
        self.news = threading.Condition()
        self.term = 1
        self.seq = 0
        self.executors: list[JobExecutor] = []
        self.tasks: list[TaskBackend] = []
        """The back end of each."""
        self.programs = stand_in_programs()
        self.join_deadline_s = place.join_s
        self.scale_deadline_s = 20.0
        self.settle_s = 20.0
        self.trace_file = ""

    @property
    def executor(self) -> JobExecutor:
        if not self.executors:
            self.open()
        return self.executors[-1]

    def open(self) -> JobExecutor:
        self.tasks.append(self.place.open(self.root, self.programs))
        executor = JobExecutor(
            post=self.post,
            clock=time.time,
            root=self.root,
            tasks=self.tasks[-1],
            trace_file=self.trace_file,
            join_deadline_s=self.join_deadline_s,
            scale_deadline_s=self.scale_deadline_s,
            settle_s=self.settle_s,
            programs=self.programs,
        )
        self.executors.append(executor)
        return executor

    def post(self, event: Event) -> None:
        with self.news:
            self.events.append(event)
            self.news.notify_all()

    def wait_for(self, kind: type[E], *, after: int = 0, deadline_s: float = 40.0) -> E:
        """The first event of `kind` at or after position `after`."""
        deadline_s = max(deadline_s, self.place.join_s)
        until = time.monotonic() + deadline_s
        with self.news:
            while True:
                for event in self.events[after:]:
                    if isinstance(event, kind):
                        return event
                    if isinstance(event, JobExited):
                        pytest.fail(f"waited for {kind.__name__}; the job ended: {event}")
                if not self.news.wait(until - time.monotonic()):
                    told = [event for event in self.events if not isinstance(event, ProgressReported)]
                    pytest.fail(f"no {kind.__name__} within {deadline_s} s; events: {told}")

    def mark(self) -> int:
        with self.news:
            return len(self.events)

    def all_of(self, kind: type[E]) -> list[E]:
        with self.news:
            return [event for event in self.events if isinstance(event, kind)]

    # --- orders

    def spec(self, run: str = f"python {STAND_IN} member", **fields: object) -> JobSpec:
        values: dict[str, object] = {
            "job_id": JOB,
            "name": "test",
            "run": run,
            "workers": Range(1, 4),
            "ps": Range(1, 4),
            "worker_demand": Resources(1000, 512),
            "ps_demand": Resources(1000, 512),
            "epochs": 10.0,
            "grace_s": 3.0,
        }
        return JobSpec(**(values | fields))  # type: ignore[arg-type]

    def next_seq(self) -> int:
        self.seq += 1
        return self.seq

    def start(self, spec: JobSpec, tasks: Placement | None = None, attempt: int = 1) -> None:
        self.executor.submit(StartJob(self.term, self.next_seq(), spec, attempt, tasks or placement(1, 1)))

    def scale(self, tasks: Placement) -> None:
        self.executor.submit(ScaleJob(self.term, self.next_seq(), JOB, 1, tasks))

    def stop(self, reason: Reason = Reason.PREEMPTED, *, checkpoint: bool = True, grace_s: float = 5.0) -> None:
        self.executor.submit(StopJob(self.term, self.next_seq(), JOB, 1, reason, checkpoint, grace_s))

    def adopt(self, *jobs: tuple[JobSpec, int]) -> None:
        """What a restarted agent does first: a new term, then the question what runs."""
        self.term, self.seq = self.term + 1, 0
        self.executor.submit(AdoptJobs(self.term, self.next_seq(), jobs))

    # --- what runs

    @property
    def attempt(self) -> Attempt:
        return self.layout.attempt(JOB, 1)

    def record(self, task: str) -> TaskRecord:
        return self.attempt.records()[task]  # type: ignore[index]

    def pids(self, attempt: int = 1) -> dict[str, int]:
        """The processes of an attempt's tasks that run."""
        return self.place.pids(self.layout.attempt(JOB, attempt))

    def starts(self, attempt: int = 1) -> dict[str, str]:
        """Which start each task of an attempt is from: another one after a restart."""
        return {task: record.request for task, record in self.layout.attempt(JOB, attempt).records().items()}

    def processes(self) -> list[psutil.Process]:
        """Everything that runs for this cluster, found by what it was started with and not by what is on record."""
        found = []
        for process in psutil.process_iter():
            try:
                texts = [*process.cmdline(), *process.environ().values()]
                if process.status() != psutil.STATUS_ZOMBIE and any(str(self.root) in text for text in texts):
                    found.append(process)
            except psutil.Error:
                continue
        return [process for process in found if process.pid != psutil.Process().pid]

    def alive(self, attempt: int = 1) -> set[str]:
        """The names of the tasks of an attempt that run."""
        return set(self.pids(attempt))


@contextmanager
def ended(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster, and afterwards the promise that nothing of it stays behind."""
    yield cluster
    for executor in cluster.executors:
        executor.close()
    if not cluster.root.exists():
        return
    cluster.place.end(cluster.root)
    try:
        eventually(lambda: not cluster.processes(), "all processes of the cluster are gone", 15.0)
    finally:
        for process in cluster.processes():
            process.kill()
        sys.stdout.write((cluster.root / "launcher.log").read_text() if cluster.layout.launcher_log.exists() else "")
