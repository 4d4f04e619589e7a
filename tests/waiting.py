"""Waiting for a condition, with a deadline and a word on what was waited for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

DEADLINE_S = 20.0
SOON_S = 60.0
"""A busy machine alone needs less; the faults that are looked for cost minutes, or end never."""


def eventually(holds: Callable[[], object], what: str, deadline_s: float = DEADLINE_S) -> None:
    """Wait until `holds()`; fail with `what` after the deadline.

    What takes long to find out is asked less often: whoever waits leaves the processor to what is waited for.
    """
    begun_s = looked_s = time.monotonic()
    while not holds():
        now_s = time.monotonic()
        assert now_s < begun_s + deadline_s, f"not within {deadline_s:g} s: {what}"
        time.sleep(min(max(4 * (now_s - looked_s), 0.01), 0.5))
        looked_s = time.monotonic()


@contextmanager
def soon(what: str, deadline_s: float = SOON_S) -> Iterator[None]:
    """Fail if the body waited for something that does not come."""
    begun_s = time.monotonic()
    yield
    took_s = time.monotonic() - begun_s
    assert took_s < deadline_s, f"took {took_s:.1f} s, not {deadline_s:g}: {what}"
