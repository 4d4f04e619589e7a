"""Waiting for a condition, with a deadline and a word on what was waited for."""

from __future__ import annotations

import time
from collections.abc import Callable

DEADLINE_S = 20.0


def eventually(holds: Callable[[], object], what: str, deadline_s: float = DEADLINE_S) -> None:
    """Wait until `holds()`; fail with `what` after the deadline."""
    end_s = time.monotonic() + deadline_s
    while not holds():
        assert time.monotonic() < end_s, f"not within {deadline_s:g} s: {what}"
        time.sleep(0.01)
