"""Says why an attempt ended, from what its tasks left behind: pure, so that every case can be read and tested alone."""

from __future__ import annotations

import signal

from fedsched.core.ids import TaskName
from fedsched.core.job import COORDINATOR, Reason
from fedsched.executor.records import ExitRecord

LOG_LINES = 3
"""Lines of a log that a message quotes when no exception ends it."""
CHARS_MAX = 400
"""A message is a line in a table; the log has the rest."""
OUT_OF_MEMORY = ("MemoryError", "OutOfMemoryError", "can't allocate memory", "CUDA out of memory")
"""What Python, numpy and torch say when an allocation fails."""
OVER_MEMORY = "Exceeded job memory limit"
"""What Slurm writes into the log of a job that it ends for its memory, where it says so nowhere else."""


def explain(task: TaskName, record: ExitRecord, log: str) -> tuple[Reason, str]:
    """Why a task that should not have ended did, and a message for its user.

    Args:
        log: the end of what the task printed.
    """
    if record.start_error:
        return Reason.START_FAILED, f"{task}: {record.start_error}"
    if record.reason is not Reason.NONE:
        return record.reason, f"{task} {record.message}"
    last = last_words(log)
    if record.signal is not None:
        name = _signal_name(record.signal)
        if record.oom_killed:
            return Reason.OUT_OF_MEMORY, f"{task} was killed by the kernel ({name}): the machine ran out of memory"
        return Reason.TASK_KILLED, f"{task} was killed by {name}{_after(last)}"
    if record.code is None and OVER_MEMORY in log:
        return Reason.OUT_OF_MEMORY, f"{task} used more memory than it was given{_after(_line_with(OVER_MEMORY, log))}"
    if record.code is None:
        return Reason.LOST, f"{task} is gone and nobody saw how it ended{_after(last)}"
    if any(sign in last for sign in OUT_OF_MEMORY):
        return Reason.OUT_OF_MEMORY, f"{task} failed with exit code {record.code}{_after(last)}"
    if record.code == 0:
        return Reason.USER_ERROR, f"{task} ended with exit code 0 before the training was done{_after(last)}"
    # Servers and the coordinator run the product's programs: their failure is not the user's error.
    is_users = task != COORDINATOR and not task.startswith("ps-")
    reason = Reason.USER_ERROR if is_users else Reason.TASK_KILLED
    return reason, f"{task} failed with exit code {record.code}{_after(last)}"


def last_words(log: str) -> str:
    """The exception that ended a program, or else its last lines; cut where they are long."""
    text = _last_words(log)
    return text if len(text) <= CHARS_MAX else f"{text[:CHARS_MAX]}..."


def _last_words(log: str) -> str:
    lines = [line.rstrip() for line in log.splitlines() if line.strip()]
    starts = [at for at, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
    if starts:
        for line in lines[starts[-1] + 1 :]:
            if not line.startswith((" ", "\t")):
                return line
    errors = [line for line in lines if not line.startswith(" ") and line.partition(":")[0].endswith("Error")]
    return errors[-1] if errors else " | ".join(lines[-LOG_LINES:])


def _line_with(sign: str, log: str) -> str:
    return next(line.strip() for line in log.splitlines() if sign in line)


def _after(text: str) -> str:
    return f": {text}" if text else ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
