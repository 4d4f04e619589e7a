"""What the executor and its launcher keep on disk, so that either may die at any moment and a successor knows all."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from fedsched.core.ids import JobId, NodeName, TaskName
from fedsched.core.job import JobSpec, Placement, Reason
from fedsched.core.resources import Resources
from fedsched.errors import InvalidInput
from fedsched.executor.processes import Identity
from fedsched.files import size_bytes, write_whole
from fedsched.runtime import codec

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TaskOrder:
    """What the launcher is asked to start."""

    request: str
    """Unique per order, so that a lost answer can be found again in the task's record."""
    task: TaskName
    node: NodeName
    seq: int
    argv: tuple[str, ...]
    cwd: str
    env: tuple[tuple[str, str], ...]
    fresh: bool
    """The environment holds what an interpreter reads only when it starts: do not fork a loaded one."""
    attempt_dir: str
    demand: Resources = field(default_factory=Resources)
    """What the task was promised; nothing for a coordinator where the cluster does not count those."""
    grace_s: float = 10.0
    """How long the task may take to end when it is told to."""
    term: int = 0
    """Of the agent that gave the order, for whoever begins to carry it out later."""
    cores: tuple[int, ...] = ()
    """The machine's cores that the task is kept to; empty: all."""
    gpus: tuple[int, ...] = ()
    """The machine's GPUs that were given to it."""

    @property
    def attempt(self) -> Attempt:
        """The files of the attempt that the task belongs to."""
        return Attempt.at(Path(self.attempt_dir))


@dataclass(frozen=True, slots=True)
class TaskRecord:
    """A start, written before the task's first instruction runs."""

    pid: int
    started: str
    """See `processes.Identity`."""
    task: TaskName
    node: NodeName
    seq: int
    request: str
    log_offset: int
    """Where the task's own lines begin in its log file."""
    handle: str = ""
    """The cluster's own name for the task; empty where it is a process of this machine, which `pid` names."""
    cores: tuple[int, ...] = ()
    gpus: tuple[int, ...] = ()

    @property
    def identity(self) -> Identity:
        """The process that was started."""
        return Identity(self.pid, self.started)


@dataclass(frozen=True, slots=True)
class ExitRecord:
    """An end: an exit code or a signal; neither where nobody saw it."""

    pid: int
    request: str
    ended_s: float
    code: int | None = None
    signal: int | None = None
    start_error: str = ""
    """Why the task's program could not even be begun."""
    oom_killed: bool = False
    """The kernel killed for want of memory while the task ran, and the task died of SIGKILL."""
    reason: Reason = Reason.NONE
    """Why, where the cluster itself knows: it preempted the task, lost its node, or ended it for its memory."""
    message: str = ""
    """The cluster's own words for `reason`."""

    @classmethod
    def of_process(cls, pid: int, request: str, returncode: int, **more: Any) -> ExitRecord:
        """Of a process that has just ended.

        Args:
            returncode: as `subprocess` gives it: below 0 it died of a signal.
            more: further fields.
        """
        code, signum = (returncode, None) if returncode >= 0 else (None, -returncode)
        return cls(pid, request, time.time(), code, signum, **more)

    @property
    def is_seen(self) -> bool:
        """Whether anybody saw how the task ended."""
        return self.code is not None or self.signal is not None or self.reason is not Reason.NONE


@dataclass(frozen=True, slots=True)
class LauncherRecord:
    """Where a cluster's launcher listens."""

    pid: int
    started: str
    socket: str

    @property
    def identity(self) -> Identity:
        """The launcher's process."""
        return Identity(self.pid, self.started)


@dataclass(frozen=True, slots=True)
class CoordinatorRecord:
    """Where an attempt's coordinator listens, as it says itself."""

    address: str
    pid: int


@dataclass(frozen=True, slots=True)
class AttemptRecord:
    """What an attempt was ordered to start with."""

    spec: JobSpec
    placement: Placement
    started_s: float


@dataclass(frozen=True, slots=True)
class FenceRecord:
    """The newest order that was taken."""

    term: int = 0
    seq: int = 0


class Attempt:
    """The files of one attempt of a job."""

    def __init__(self, job_dir: Path, number: int) -> None:
        self.number = number
        self.job_dir = job_dir
        self.path = job_dir / f"attempt-{number}"
        self.order = self.path / "order.json"
        self.stop = self.path / "stop.json"
        self.exited = self.path / "exited.json"
        self.coordinator = self.path / "coordinator.json"
        self.result = self.path / "result.json"
        self.tasks = self.path / "tasks"
        self.logs = self.path / "logs"

    @classmethod
    def at(cls, path: Path) -> Attempt:
        """The attempt whose directory this is."""
        return cls(path.parent, int(path.name.removeprefix("attempt-")))

    def task(self, task: TaskName) -> Path:
        """`TaskRecord`."""
        return self.tasks / f"{task}.json"

    def ordered(self, task: TaskName) -> Path:
        """`TaskOrder`, where the task is begun by its shepherd."""
        return self.tasks / f"{task}.order.json"

    def exit(self, task: TaskName) -> Path:
        """`ExitRecord`."""
        return self.tasks / f"{task}.exit.json"

    def log(self, task: TaskName) -> Path:
        """Everything the task printed."""
        return self.logs / f"{task}.log"

    def begin(self, task: TaskName) -> int:
        """Forget how an earlier process of the task ended; where in its log the lines of the next one will begin."""
        self.exit(task).unlink(missing_ok=True)
        return size_bytes(self.log(task))

    def records(self) -> dict[TaskName, TaskRecord]:
        """All starts on record, by task name."""
        paths = [path for path in sorted(self.tasks.glob("*.json")) if not path.stem.endswith((".exit", ".order"))]
        found = (read(TaskRecord, path) for path in paths)
        return {record.task: record for record in found if record is not None}


class Layout:
    """The files of one cluster."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self.jobs = self.root / "jobs"
        self.fence = self.root / "fence.json"
        self.fence_lock = self.root / "fence.lock"
        self.launcher = self.root / "launcher.json"
        self.launcher_lock = self.root / "launcher.lock"
        self.launcher_log = self.root / "launcher.log"

    def attempt(self, job_id: JobId, number: int) -> Attempt:
        """The files of a job's attempt.

        Raises:
            InvalidInput: the id cannot be the name of a directory.
        """
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", job_id):
            raise InvalidInput(
                f"job id {job_id!r} cannot name a directory; expected letters, digits, '.', '_' and '-'",
                "submit it through a controller, which numbers jobs",
            )
        return Attempt(self.jobs / job_id, number)

    def attempts(self, job_id: JobId) -> list[Attempt]:
        """All attempts of a job that left files, oldest first."""
        job_dir = self.attempt(job_id, 0).job_dir
        numbers = [path.name.removeprefix("attempt-") for path in job_dir.glob("attempt-*")]
        return [Attempt(job_dir, number) for number in sorted(int(text) for text in numbers if text.isdigit())]

    def open_attempts(self) -> list[tuple[JobId, Attempt]]:
        """Attempts of any job that are not known to be over, sorted by job and number."""
        job_ids = sorted(JobId(path.name) for path in self.jobs.glob("*") if path.is_dir())
        return [
            (job_id, attempt) for job_id in job_ids for attempt in self.attempts(job_id) if not attempt.exited.exists()
        ]


def write(path: Path, record: object) -> None:
    """Put a record in place in one step."""
    write_whole(path, codec.dumps(record))


def read(kind: type[T], path: Path) -> T | None:
    """Read a record; None where there is none, or nothing that can be read as one."""
    try:
        return codec.loads(kind, path.read_bytes())
    except (OSError, ValueError):
        return None
