"""Which process is which, also after its number was given to another one, and signals that reach a whole task."""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import subprocess
import sys
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from fedsched.executor import tied

_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, slots=True)
class Identity:
    """One process for good: its number and the moment it started, as this machine's kernel counts it.

    The moment is kept as the kernel's ticks since boot and not as wall-clock time: a clock that is set while jobs run
    must not make them look dead, they would be started a second time.
    """

    pid: int
    started: str


def identify(pid: int) -> Identity | None:
    """The identity of the live process `pid`; None when there is none, or only its unreaped remains."""
    stat = Path(f"/proc/{pid}/stat")
    if not Path("/proc/self/stat").exists():
        return _identify_without_proc(pid)
    try:
        # The command name stands in parentheses and may itself hold spaces and parentheses.
        fields = stat.read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in ("Z", "X") else Identity(pid, f"{_boot()}/{fields[19]}")


def _identify_without_proc(pid: int) -> Identity | None:
    try:
        process = psutil.Process(pid)
        gone = process.status() == psutil.STATUS_ZOMBIE
        return None if gone else Identity(pid, f"{process.create_time():.2f}")
    except psutil.Error:
        return None


@functools.cache
def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def is_alive(identity: Identity) -> bool:
    """Whether exactly this process still runs."""
    return identify(identity.pid) == identity


def send(identity: Identity, signum: signal.Signals) -> None:
    """Signal the process and all that it started in its group; one that is gone is fine."""
    if not is_alive(identity):
        return
    with suppress(ProcessLookupError):
        try:
            os.killpg(identity.pid, signum)
        except ProcessLookupError:
            os.kill(identity.pid, signum)  # forked a moment ago and not yet the leader of its group


def adopt_orphans() -> None:
    """Have descendants whose parents end become children of this process, whatever sessions they made for themselves.

    Linux can do so; elsewhere they are init's, and only those in their task's own session are found when it ends.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def start_tied(argv: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a program that is killed when this process, or the thread that calls, ends. From a process with threads.

    Args:
        options: as `subprocess.Popen` takes them.

    Raises:
        OSError: it cannot be begun; its `filename` is the working directory where that is why, else the program.
    """
    errors_out, errors_in = os.pipe()
    with open(errors_out, "rb") as errors:
        try:
            interpreter = [sys.executable, "-I", "-S", tied.__file__]  # neither variables nor packages of the task's
            command = [*interpreter, str(os.getpid()), str(errors_in), *argv]
            child = subprocess.Popen(command, pass_fds=(errors_in,), **options)
        finally:
            os.close(errors_in)
        number = errors.read()  # ends when the program has taken the interpreter's place
    if number:
        child.wait()
        raise OSError(int(number), os.strerror(int(number)), argv[0])
    return child


def end_children(kept: Collection[int]) -> None:
    """Kill the children of this process that are not `kept`; they are to be reaped as any others."""
    for child in psutil.Process().children():
        if child.pid not in kept:
            with suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGKILL)  # its number cannot have changed hands: it is not reaped yet


def end_orphans(leaders: list[Identity]) -> bool:
    """Kill what dead session leaders left running in their sessions; whether anything was found.

    A session's number is not given to a new process while the session has members, so a member of a session whose
    leader is gone belongs to that leader.
    """
    wanted = {leader.pid for leader in leaders if identify(leader.pid) is None}
    found = False
    for pid in psutil.pids() if wanted else []:
        with suppress(OSError):
            if os.getsid(pid) in wanted and identify(pid) is not None:
                os.kill(pid, signal.SIGKILL)
                found = True
    return found
