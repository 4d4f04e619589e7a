"""A member of a small elastic job for tests of the executor: it says that it is there and trains nothing.

The argument says how it misbehaves; with `member` it does what the real programs do. It loads next to nothing: hundreds
of them are started, each in an interpreter of its own.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path


def take_part() -> None:
    directory, task = Path(os.environ["FEDSCHED_ATTEMPT_DIR"]), os.environ["FEDSCHED_TASK"]
    assert ":" in os.environ["FEDSCHED_COORDINATOR"]
    (directory / "members" / task).touch()
    try:
        while not (directory / "unwanted" / task).exists():
            time.sleep(0.02)
    finally:
        (directory / "members" / task).unlink(missing_ok=True)


def leave_daemons(folder: Path) -> None:
    """Two processes that have nothing to do with this one any more: one forked, one with a program of its own."""
    for program in ([], ["sleep", "600"]):
        if os.fork() == 0:
            os.setsid()
            if os.fork():
                os._exit(0)
            (folder / str(os.getpid())).touch()
            if program:
                os.execvp(program[0], program)
            time.sleep(600)


def main() -> None:
    role, *rest = sys.argv[1:]
    if role == "crash":
        time.sleep(0.3)
        raise ValueError("learning rate -1 is no learning rate")
    if role == "crash-if-added" and os.environ["FEDSCHED_TASK"] != "worker-0":
        raise ValueError("no room for another one")
    if role == "never-join-if-added" and os.environ["FEDSCHED_TASK"] != "worker-0":
        time.sleep(600)
    elif role == "out-of-memory":
        raise MemoryError
    elif role == "exhaust":
        (Path(os.environ["FEDSCHED_ATTEMPT_DIR"]) / "members" / os.environ["FEDSCHED_TASK"]).touch()
        hoard = []
        while True:
            hoard.append(bytearray(os.urandom(1 << 20)) * 16)
            time.sleep(0.05)
    elif role == "busy":
        (Path(os.environ["FEDSCHED_ATTEMPT_DIR"]) / "members" / os.environ["FEDSCHED_TASK"]).touch()
        while True:
            pass
    elif role == "never-join":
        time.sleep(600)
    elif role == "leave-at-once":
        sys.stdout.write("nothing to do\n")
    elif role == "ignore-sigterm":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sys.stdout.write("cannot be asked\n")
        sys.stdout.flush()
        time.sleep(600)
    else:
        if role == "say-and-join":
            sys.stdout.write(f"hello from {os.environ['FEDSCHED_TASK']}\n")
        if role == "leave-daemons":
            leave_daemons(Path(rest[0]))
        take_part()


if __name__ == "__main__":
    main()
