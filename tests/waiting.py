"""Waiting for a condition, with a deadline and a word on what was waited for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

DEADLINE_S = 20.0
SOON_S = 60.0
"""A busy machine alone needs less; the faults that are looked for cost minutes, or end never."""


def eventually(holds: Callable[[], object], what: str, deadline_s: float = DEADLINE_S) -> None:
    """Wait until `holds()`; fail with `what` after the deadline."""
    end_s = time.monotonic() + deadline_s
    while not holds():
        assert time.monotonic() < end_s, f"not within {deadline_s:g} s: {what}"
        time.sleep(0.01)


@contextmanager
def soon(what: str, deadline_s: float = SOON_S) -> Iterator[None]:
    """Fail if the body waited for something that does not come."""
    begun_s = time.monotonic()
    yield
    took_s = time.monotonic() - begun_s
    assert took_s < deadline_s, f"took {took_s:.1f} s, not {deadline_s:g}: {what}"
