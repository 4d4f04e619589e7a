"""Ends the tasks of an attempt in order: members first, the coordinator last, by force where they take too long."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass, field

from fedsched.core.commands import StopJob
from fedsched.core.job import COORDINATOR, Reason
from fedsched.executor.control import Answer
from fedsched.executor.roster import Roster

CLEAN_UP_S = 1.0
"""Between SIGTERM and SIGKILL for tasks that have failed, or come to nothing: nothing of them is kept."""
LEAVE_S = 2.0
"""How long tasks may take to leave by themselves once the job is stopped."""


@dataclass(slots=True)
class Ending:
    """An attempt is to end: the reason, and when which signal follows. Times are this process' monotonic clock's."""

    reason: Reason
    message: str
    term_at_s: float
    kill_at_s: float
    is_ordered: bool = False
    """By a StopJob; else the attempt has failed."""
    answer: Answer | None = None
    """The coordinator's, to the order to stop: the signals wait for it."""
    _is_termed: bool = field(default=False, init=False)
    _coordinator_at_s: float = field(default=float("inf"), init=False)

    @classmethod
    def failed(cls, reason: Reason, message: str) -> Ending:
        """Of an attempt that cannot go on."""
        now_s = time.monotonic()
        return cls(reason, message, now_s, now_s + CLEAN_UP_S)

    @classmethod
    def ordered(cls, order: StopJob, answer: Answer | None) -> Ending:
        """By an order, within its grace.

        Args:
            answer: where the coordinator was asked to stop the job: half of the grace is its own.
        """
        now_s = time.monotonic()
        term_at_s = now_s + order.grace_s / 2 if answer is not None else now_s
        return cls(order.reason, "", term_at_s, now_s + order.grace_s, is_ordered=True, answer=answer)

    def hasten(self, order: StopJob) -> None:
        """A repeated order may change the reason and bring the end nearer, never put it off."""
        self.kill_at_s = min(self.kill_at_s, time.monotonic() + order.grace_s)
        if self.is_ordered:
            self.reason = order.reason

    def push(self, tasks: Roster) -> None:
        """Send the signals that are due; does not wait."""
        now_s = time.monotonic()
        if self.answer is not None and self.answer.done():
            # Stopped: the tasks leave by themselves, and are told to only when they take long.
            leave_s = 0.0 if self.answer.exception() is not None else min(LEAVE_S, (self.kill_at_s - now_s) / 2)
            self.term_at_s = min(self.term_at_s, now_s + leave_s)
            self.answer = None
        if now_s >= self.kill_at_s:
            tasks.signal(tasks, signal.SIGKILL)
        elif now_s >= self.term_at_s:
            members = [task for task in tasks if task != COORDINATOR]
            if self._is_termed or not tasks.signal(members, signal.SIGTERM):
                # The coordinator comes last: it writes down how the job ended.
                self._end_coordinator(tasks, now_s)
            self._is_termed = True

    def _end_coordinator(self, tasks: Roster, now_s: float) -> None:
        if any(tasks.runs(task) for task in tasks if task != COORDINATOR):
            return
        self._coordinator_at_s = min(self._coordinator_at_s, now_s + (LEAVE_S if self.is_ordered else 0.0))
        if now_s >= self._coordinator_at_s:
            tasks.signal([COORDINATOR], signal.SIGTERM)
