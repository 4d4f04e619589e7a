"""The agent's one queue, at its limit."""

from __future__ import annotations

import threading
from typing import cast

import pytest

from fedsched.agent import inbox as module
from fedsched.agent.inbox import Inbox, Stop
from fedsched.core.events import SlotStarted
from fedsched.runtime.loop import Loop
from tests.waiting import soon


def test_who_posts_to_a_full_inbox_is_let_go_when_the_loop_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ticker that waited for a place that nobody made any more kept the agent from ending, and its successor out."""
    monkeypatch.setattr(module, "INBOX_MAX", 1)
    inbox = Inbox()
    inbox.post(Stop())
    waiting = [threading.Thread(target=inbox.post, args=(SlotStarted(0.0, slot),)) for slot in range(4)]
    for thread in waiting:
        thread.start()
    assert inbox.drain(cast(Loop, None)) == Stop()
    with soon("a thread waits for a place"):
        for thread in waiting:
            thread.join(60)
    assert not any(thread.is_alive() for thread in waiting)
