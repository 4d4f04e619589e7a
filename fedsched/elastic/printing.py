"""Lets a script print though its log cannot be written: lines are lost, the training goes on, and its user is told.

A full disk would otherwise raise out of the user's own `print`, and end the job with it. Only what goes through
Python's standard streams is looked after: in a task that the launcher forks from its first line on, elsewhere from
`elastic.join` on.
"""

from __future__ import annotations

import errno
import io
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

LOST = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ESTALE})
"""What the operating system says when a log has no room, or is not there any more."""

_why = ""
"""Why the first of the lines that are lost could not be written."""


class _Log(io.FileIO):
    """A standard stream's descriptor; what cannot be written there counts as written."""

    def write(self, data: ReadableBuffer, /) -> int:
        global _why
        try:
            return super().write(data)
        except OSError as problem:
            if problem.errno not in LOST:
                raise
            _why = _why or str(problem.strerror)
            return memoryview(data).nbytes


def lose_what_cannot_be_logged() -> None:
    """Have stdout and stderr of this process lose lines rather than raise; a stream of the script's own stays."""
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if not isinstance(stream, io.TextIOWrapper) or stream is not getattr(sys, f"__{name}__"):
            continue
        raw: Any = getattr(stream.buffer, "raw", stream.buffer)
        if isinstance(raw, _Log) or raw.fileno() != descriptor:
            continue
        with suppress(OSError):
            stream.flush()
        log = _Log(descriptor, "wb", closefd=False)
        # An interpreter that was told not to buffer (-u) has the descriptor right below the text.
        below = log if raw is stream.buffer else io.BufferedWriter(log)
        new = io.TextIOWrapper(
            below,
            stream.encoding,
            stream.errors,
            line_buffering=True,
            write_through=stream.write_through,
        )
        setattr(sys, name, new)
        setattr(sys, f"__{name}__", new)


def complaint() -> str:
    """What the task's user is to know of it; empty as long as no line is lost."""
    return f"its log cannot be written, what it prints is lost: {_why}" if _why else ""
