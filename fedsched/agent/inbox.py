"""The agent's one inbox: everything that happens, from any thread, in one bounded queue for one loop."""

from __future__ import annotations

import queue
import threading
from contextlib import suppress
from dataclasses import dataclass

from fedsched.core.events import Event
from fedsched.runtime.loop import Loop

INBOX_MAX = 10_000
"""Messages that may wait. A thread that posts to a full inbox waits: the loop is the slower side then."""
LOOK_S = 0.5
"""How often who waits so looks whether the loop has ended: then nobody takes his message any more."""


@dataclass(frozen=True, slots=True)
class Written:
    """The ledger has written a step's records."""

    ticket: int


@dataclass(frozen=True, slots=True)
class Stop:
    """The agent is to end, cleanly (`error` is None) or because of this."""

    error: Exception | None = None


class Inbox:
    """Thread-safe; drained by the thread that owns the loop."""

    def __init__(self) -> None:
        self._queue: queue.Queue[Event | Written | Stop] = queue.Queue(INBOX_MAX)
        self._ended = threading.Event()

    def post(self, message: Event | Written | Stop) -> None:
        """Add a message; one that comes after the loop has ended is dropped, as it would be by its end."""
        while not self._ended.is_set():
            with suppress(queue.Full):
                self._queue.put(message, timeout=LOOK_S)
                return

    def drain(self, loop: Loop) -> Stop:
        """Feed the loop until told to stop; return how."""
        try:
            while True:
                message = self._queue.get()
                match message:
                    case Stop():
                        return message
                    case Written(ticket):
                        loop.confirm(ticket)
                    case _:
                        loop.step(message)
        finally:
            self._ended.set()
