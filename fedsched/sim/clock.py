"""Virtual time: what is due happens in order of time, and at one time in the order of ranks, then as it was planned."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

NEWS, ARRIVAL, TICK = 0, 1, 2
"""What happens first at one time: answers and ends of jobs, then what comes from outside, then decisions."""


class VirtualClock:
    """A heap of what is due. Time stands still while something happens and jumps to what is due next.

    News of the present moment, which most things lead to, are a queue of their own and never see the heap.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self._due: list[tuple[float, int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._soon: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._planned = 0

    def soon(self, action: Callable[..., None], *arguments: Any) -> None:
        """Have `action(*arguments)` happen now, after the news that are planned for now already."""
        self._soon.append((action, arguments))

    def after(self, delay_s: float, action: Callable[..., None], *arguments: Any, rank: int = NEWS) -> None:
        """Have it happen in `delay_s`; 0 means after what is planned for now at this rank."""
        self.at(self.now_s + delay_s, action, *arguments, rank=rank)

    def at(self, time_s: float, action: Callable[..., None], *arguments: Any, rank: int = NEWS) -> None:
        """Have it happen at a time, which is not before now."""
        if rank == NEWS and time_s <= self.now_s:
            self._soon.append((action, arguments))
            return
        self._planned += 1
        heappush(self._due, (time_s, rank, self._planned, action, arguments))

    def __len__(self) -> int:
        """How much is planned."""
        return len(self._due) + len(self._soon)

    def run(self) -> None:
        """Let everything happen that is planned, and what is planned meanwhile."""
        soon, due = self._soon, self._due
        while True:
            while soon:
                action, arguments = soon.popleft()
                action(*arguments)
            if not due:
                return
            self.now_s, rank, _, action, arguments = heappop(due)
            if rank == NEWS and due and due[0][0] == self.now_s:
                self._follow()
            action(*arguments)

    def step(self) -> bool:
        """Let the next thing happen; False when nothing is planned."""
        if self._soon:
            action, arguments = self._soon.popleft()
        elif self._due:
            self.now_s, rank, _, action, arguments = heappop(self._due)
            if rank == NEWS:
                self._follow()
        else:
            return False
        action(*arguments)
        return True

    def _follow(self) -> None:
        """Other news of a time come right after the first."""
        due, following = self._due, (self.now_s, ARRIVAL)
        while due and due[0] < following:
            self._soon.append(heappop(due)[3:])
