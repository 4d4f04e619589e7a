"""Pauses between tries that fail: they grow, and no two processes that lost the same server come back in step."""

from __future__ import annotations

import random
from collections.abc import Callable

_draw = random.SystemRandom().random


class Backoff:
    """The pauses of one who tries again.

    Args:
        first_s: longest first pause, in seconds.
        longest_s: longest pause of all, in seconds.
        draw: a number from 0 to 1. Not a named stream by default: equal streams are what must not be.
    """

    def __init__(self, first_s: float, longest_s: float, draw: Callable[[], float] = _draw) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._draw = draw
        self._next_s = first_s

    def pause_s(self) -> float:
        """The next pause: at least half as long as it may be; the one after may be twice as long."""
        here_s, self._next_s = self._next_s, min(2 * self._next_s, self._longest_s)
        return here_s * (0.5 + self._draw() / 2)

    def reset(self) -> None:
        """It went well: the next pause is a first one."""
        self._next_s = self._first_s
