"""Counts what the schedulers of a run handle."""

from __future__ import annotations

from fedsched.core.events import Event


class Steps:
    """How many events, and when the last of them was."""

    def __init__(self) -> None:
        self.count = 0
        self.now_s = 0.0

    def observe(self, event: Event, commands: object) -> None:
        """Count one."""
        self.count += 1
        self.now_s = event.time_s
