"""Virtual time: what is due happens in order of time, and at one time in the order in which it was planned."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class VirtualClock:
    """An event heap. Time stands still while something happens and jumps to what is due next."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._planned = 0

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        """Have `action` happen in `delay_s` from now; 0 means after all that is already planned for now."""
        self._planned += 1
        heapq.heappush(self._due, (self.now_s + delay_s, self._planned, action))

    def step(self) -> bool:
        """Let the next thing happen; False when nothing is planned."""
        if not self._due:
            return False
        self.now_s, _, action = heapq.heappop(self._due)
        action()
        return True
