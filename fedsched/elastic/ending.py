"""How the processes that are wholly ours, coordinator and servers, end: at once, and never half; and what they say."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn


def say(text: str) -> None:
    """Write a line into the task's log. Where that lies on a full disk the line is lost, and nothing else for it."""
    with suppress(OSError):
        sys.stderr.write(f"{text.rstrip()}\n")
        sys.stderr.flush()


def run(main: Callable[[], int]) -> NoReturn:
    """Be `main`, then end the process.

    Everything is closed when `main` returns. To take apart an interpreter that has torch loaded would cost seconds of
    processor time, and a resize waits for whoever leaves. When `main` fails, threads of gRPC may wait for what will
    never come; the end of the process must not wait for them.
    """
    threading.excepthook = _end_at_fault
    try:
        code = main()
    except BaseException:
        say(traceback.format_exc())
        code = 1
    _leave(code)


def _end_at_fault(fault: threading.ExceptHookArgs) -> None:
    """A process that went on without one of its threads would keep its whole job waiting."""
    if fault.exc_value is None:
        return
    say("".join(traceback.format_exception(fault.exc_value)))
    frames = [frame for frame, _ in traceback.walk_tb(fault.exc_traceback)]
    # A library's own threads may fail and be replaced.
    if any(str(frame.f_globals.get("__name__", "")).startswith("fedsched.") for frame in frames):
        _leave(1)


def _leave(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(code)
