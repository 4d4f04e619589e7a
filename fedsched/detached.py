"""Starts processes that outlive their starter, and reads the end of what they said."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path


def spawn(command: Sequence[str], log: Path, environment: Mapping[str, str]) -> int:
    """Start a program in a session of its own, its output appended to `log`; returns its pid.

    Raises:
        OSError: the program or the log cannot be opened.
    """
    # Not subprocess.Popen: its object complains when it is let go of while the process lives, which is meant here.
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    try:
        return os.posix_spawn(
            command[0],
            list(command),
            environment,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, output, 1),
                (os.POSIX_SPAWN_DUP2, output, 2),
            ],
            setsid=True,
        )
    finally:
        os.close(output)


def last_lines(log: Path, count: int, *, after: int = 0) -> str:
    """The last `count` lines of a log, of what stands after byte `after`."""
    return "\n".join(log.read_bytes()[after:].decode(errors="replace").splitlines()[-count:])
