"""One resize of an attempt: which tasks come and which go, what the coordinator made of it, who is still waited for."""

from __future__ import annotations

import signal
import time
from collections.abc import Collection

from fedsched.core.commands import ScaleJob
from fedsched.core.ids import TaskName
from fedsched.core.job import members_of
from fedsched.executor.control import MemberOrder
from fedsched.executor.endings import explain
from fedsched.executor.records import ExitRecord
from fedsched.executor.roster import Roster
from fedsched.executor.stopping import CLEAN_UP_S
from fedsched.pb.training_pb2 import ScaleReply

NEWS_S = 0.5
"""How long after a resize failed the news may come that the job has ended: reports come every 0.2 s."""


class Resize:
    """From the order until it is carried out, or rolled back, and those that leave have left.

    Args:
        members: the attempt's tasks now, without the coordinator.
        tasks: where the newcomers will be, too.
    """

    def __init__(self, order: ScaleJob, members: Collection[TaskName], tasks: Roster) -> None:
        self.order = order
        self.wanted = tuple(sorted(entry.task for entry in members_of(order.placement)))
        """The members that are ordered."""
        self.added = tuple(task for task in self.wanted if task not in members)
        self.removed = tuple(task for task in sorted(members) if task not in self.wanted)
        self.asked: MemberOrder | None = None
        """Of the coordinator, as long as it has not answered."""
        self.pause_s = 0.0
        """How long workers stood still for the switch."""
        self.failure = ""
        """Why it is, or will be, rolled back."""
        self.leaving: tuple[TaskName, ...] = ()
        self._tasks = tasks
        self._is_settled = False
        """The members are what they will be; only the `leaving` are waited for."""
        self._term_at_s = float("inf")
        self._kill_at_s = float("inf")
        self._done_at_s = float("-inf")
        """Not complete before this."""

    def hear(self, reply: ScaleReply | str, grace_s: float) -> None:
        """What the coordinator answered, or why it did not.

        Args:
            grace_s: how long the removed tasks may take to leave.
        """
        self.asked = None
        if isinstance(reply, str):
            self.roll_back(f"the coordinator did not carry the resize out: {reply}")
            return
        if not reply.ok:
            self.roll_back(self.failure or reply.message or "the coordinator rolled the resize back")
            return
        now_s = time.monotonic()
        self._is_settled, self.failure, self.pause_s = True, "", reply.pause_s
        self.leaving = self.removed
        self._term_at_s, self._kill_at_s = now_s + grace_s / 2, now_s + grace_s

    def roll_back(self, message: str) -> None:
        """The members stay as they were; the newcomers end."""
        now_s = time.monotonic()
        self._is_settled, self.failure, self.leaving = True, message, self.added
        self._term_at_s, self._kill_at_s = now_s, now_s + CLEAN_UP_S
        # The job may have come to its end meanwhile: then that is the news, and it arrives within this time.
        self._done_at_s = now_s + NEWS_S

    def push(self) -> bool:
        """Send those that leave the signals that are due; whether all is done."""
        now_s = time.monotonic()
        if now_s >= self._kill_at_s:
            self._tasks.signal(self.leaving, signal.SIGKILL)
        elif now_s >= self._term_at_s:
            self._tasks.signal(self.leaving, signal.SIGTERM)
            self._term_at_s = float("inf")
        return now_s >= self._done_at_s and not any(self._tasks.runs(task) for task in self.leaving)

    def expects(self, task: TaskName, record: ExitRecord) -> bool:
        """Whether a task's end belongs to the resize; that of a newcomer which has not joined yet rolls it back."""
        if not self._is_settled and task in self.added:
            if not self.failure:  # The first is the cause; the other newcomers end because of it.
                self.failure = explain(task, record, self._tasks.log_tail(task))[1]
                if self.asked is not None:
                    self.asked.lose(task, self.failure)
            return True
        if self._is_settled and task in self.leaving:
            return True
        # It left at the switch, of which the coordinator tells only when all others have taken theirs. Nobody sees an
        # end that cannot be put on record, on a full disk say; the coordinator knows whether it was too early.
        return task in self.removed and (record.code == 0 or not record.is_seen)
