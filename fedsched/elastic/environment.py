"""What an executor tells a task through its environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fedsched.core.ids import TaskName
from fedsched.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class TaskEnvironment:
    """One task's surroundings."""

    job_id: str
    attempt: int
    task: str
    coordinator: str
    """Where the coordinator listens; empty for the coordinator itself and for a script that runs by hand."""
    tasks: tuple[TaskName, ...]
    """The attempt's first members; only the coordinator is told."""
    job_dir: Path
    attempt_dir: Path
    checkpoint_every_s: float
    join_s: float
    """How long the first members may take to come (FEDSCHED_JOIN_S)."""
    stall_s: float
    """A job in which no step ends for so long has failed; jobs with longer steps raise it (FEDSCHED_STALL_S)."""
    traceparent: str
    trace_file: str
    trace_endpoint: str
    host: str
    """Where other tasks of the job reach this one (FEDSCHED_HOST); on one machine that is the machine itself."""

    @property
    def checkpoint_dir(self) -> Path:
        """Where the job's checkpoints lie, over all attempts."""
        return self.job_dir / "checkpoint"


def in_a_job(environ: Mapping[str, str]) -> bool:
    """Whether an executor started this process as a worker."""
    return bool(environ.get("FEDSCHED_COORDINATOR"))


def read(environ: Mapping[str, str]) -> TaskEnvironment:
    """Read a task's environment.

    Raises:
        InvalidInput: variables are missing or no numbers; all are listed.
    """
    problems: list[str] = []

    def text(name: str) -> str:
        if not environ.get(name):
            problems.append(f"{name} is not set")
        return environ.get(name, "")

    def number(name: str, default: str) -> float:
        try:
            return float(environ.get(name, default))
        except ValueError:
            problems.append(f"{name} is {environ[name]!r}; it must be a number")
            return 0.0

    job_dir = Path(text("FEDSCHED_JOB_DIR"))
    result = TaskEnvironment(
        job_id=text("FEDSCHED_JOB_ID"),
        attempt=int(number("FEDSCHED_ATTEMPT", "1")),
        task=environ.get("FEDSCHED_TASK", "coordinator"),
        coordinator=environ.get("FEDSCHED_COORDINATOR", ""),
        tasks=tuple(TaskName(name) for name in environ.get("FEDSCHED_TASKS", "").split(",") if name),
        job_dir=job_dir,
        attempt_dir=Path(environ.get("FEDSCHED_ATTEMPT_DIR") or job_dir),
        checkpoint_every_s=number("FEDSCHED_CHECKPOINT_EVERY_S", "10"),
        join_s=number("FEDSCHED_JOIN_S", "120"),
        stall_s=number("FEDSCHED_STALL_S", "300"),
        traceparent=environ.get("TRACEPARENT", ""),
        trace_file=environ.get("FEDSCHED_TRACE_FILE", ""),
        trace_endpoint=environ.get("FEDSCHED_TRACE_ENDPOINT", ""),
        host=environ.get("FEDSCHED_HOST") or "127.0.0.1",
    )
    if problems:
        raise InvalidInput(
            "this task's environment is incomplete:\n" + "\n".join(f"  - {line}" for line in problems),
            "let an executor start the task, or set the variables",
        )
    return result
