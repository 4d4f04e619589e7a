"""Virtual time: what is due happens in order of time, and at one time in the order of ranks, then as it was planned."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

NEWS, ARRIVAL, TICK = 0, 1, 2
"""What happens first at one time: answers and ends of jobs, then what comes from outside, then decisions."""


class VirtualClock:
    """An event heap. Time stands still while something happens and jumps to what is due next."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._due: list[tuple[float, int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._planned = 0

    def after(self, delay_s: float, action: Callable[..., None], *arguments: Any, rank: int = NEWS) -> None:
        """Have `action(*arguments)` happen in `delay_s`; 0 means after what is planned for now at this rank."""
        self.at(self.now_s + delay_s, action, *arguments, rank=rank)

    def at(self, time_s: float, action: Callable[..., None], *arguments: Any, rank: int = NEWS) -> None:
        """Have it happen at a time, which is not before now."""
        self._planned += 1
        heapq.heappush(self._due, (time_s, rank, self._planned, action, arguments))

    def __len__(self) -> int:
        """How much is planned."""
        return len(self._due)

    def run(self) -> None:
        """Let everything happen that is planned, and what is planned meanwhile."""
        due, pop = self._due, heapq.heappop
        while due:
            self.now_s, _, _, action, arguments = pop(due)
            action(*arguments)

    def step(self) -> bool:
        """Let the next thing happen; False when nothing is planned."""
        if not self._due:
            return False
        self.now_s, _, _, action, arguments = heapq.heappop(self._due)
        action(*arguments)
        return True
