"""Why a task ended, in words for its user."""

from __future__ import annotations

import pytest

from fedsched.core.ids import TaskName
from fedsched.core.job import Reason
from fedsched.executor.endings import explain, last_words
from fedsched.executor.records import ExitRecord

TRACEBACK = """step 3
Traceback (most recent call last):
  File "x.py", line 1, in <module>
    open("data")

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "x.py", line 3, in <module>
    raise ValueError("no data")
ValueError: no data
shutting down
"""


@pytest.mark.parametrize(
    ("log", "words"),
    [
        (TRACEBACK, "ValueError: no data"),
        ("", ""),
        ("one\n\ntwo\nthree\nfour\n", "two | three | four"),
        ('  File "x.py", line 1\n    def f(:\nSyntaxError: invalid syntax\n', "SyntaxError: invalid syntax"),
        ("Traceback (most recent call last):\n  File", "Traceback (most recent call last): |   File"),
    ],
)
def test_the_last_words_are_those_that_matter(log: str, words: str) -> None:
    """Nobody should have to fetch a log to read one line."""
    assert last_words(log) == words


@pytest.mark.parametrize(
    ("task", "fields", "log", "reason", "message"),
    [
        (
            "worker-0",
            {"code": 1},
            TRACEBACK,
            Reason.USER_ERROR,
            "worker-0 failed with exit code 1: ValueError: no data",
        ),
        ("ps-0", {"code": 1}, "x", Reason.TASK_KILLED, "ps-0 failed with exit code 1: x"),
        ("coordinator", {"code": 1}, "", Reason.TASK_KILLED, "coordinator failed with exit code 1"),
        ("worker-0", {"code": 1}, "MemoryError", Reason.OUT_OF_MEMORY, "worker-0 failed with exit code 1: MemoryError"),
        (
            "worker-0",
            {"code": 1},
            "Traceback (most recent call last):\n  x\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate",
            Reason.OUT_OF_MEMORY,
            "worker-0 failed with exit code 1: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate",
        ),
        (
            "worker-0",
            {"signal": 9, "oom_killed": True},
            "",
            Reason.OUT_OF_MEMORY,
            "worker-0 was killed by the kernel (SIGKILL): the machine ran out of memory",
        ),
        ("worker-0", {"signal": 9}, "", Reason.TASK_KILLED, "worker-0 was killed by SIGKILL"),
        ("worker-0", {"signal": 11}, "a", Reason.TASK_KILLED, "worker-0 was killed by SIGSEGV: a"),
        ("worker-0", {"signal": 99}, "", Reason.TASK_KILLED, "worker-0 was killed by signal 99"),
        ("worker-0", {}, "", Reason.LOST, "worker-0 is gone and nobody saw how it ended"),
        (
            "worker-0",
            {},
            "loss 1.5\nslurmstepd-n0: error: Exceeded job memory limit\nslurmstepd-n0: error: *** JOB 3 CANCELLED ***",
            Reason.OUT_OF_MEMORY,
            "worker-0 used more memory than it was given: slurmstepd-n0: error: Exceeded job memory limit",
        ),
        (
            "worker-0",
            {"signal": 15, "reason": Reason.PREEMPTED, "message": "was preempted (Slurm job 3: PREEMPTED)"},
            "x",
            Reason.PREEMPTED,
            "worker-0 was preempted (Slurm job 3: PREEMPTED)",
        ),
        ("worker-0", {"code": 127, "start_error": "no"}, "", Reason.START_FAILED, "worker-0: no"),
    ],
)
def test_each_end_has_its_reason(task: str, fields: dict[str, object], log: str, reason: Reason, message: str) -> None:
    """Whether another attempt is worth it depends on the reason."""
    record = ExitRecord(pid=1, request="r", ended_s=0.0, **fields)  # type: ignore[arg-type]

    assert explain(TaskName(task), record, log) == (reason, message)


def test_words_without_end_are_cut() -> None:
    """A message goes into records, tables and traces; an exception may hold a whole array."""
    log = f"Traceback (most recent call last):\n  File\nValueError: {'9, ' * 100_000}\n"
    assert last_words(log).startswith("ValueError: 9, 9")
    assert len(last_words(log)) < 500
    assert len(last_words("x" * 100_000)) < 500
