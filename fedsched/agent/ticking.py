"""Says when a slot begins. Slots are numbered from 1970, so that their numbers go on over restarts of the agent."""

from __future__ import annotations

import threading
import time

from fedsched.core.events import SlotStarted
from fedsched.runtime.ports import Post


class Ticker:
    """Posts `SlotStarted` from a thread at every multiple of the slot's length; one that was slept over is left out."""

    def __init__(self, length_s: float, post: Post) -> None:
        self._length_s = length_s
        self._post = post
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ticker", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop ticking."""
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        last = -1
        while True:
            now_s = time.time()
            slot = int(now_s // self._length_s)
            if slot > last:
                last = slot
                self._post(SlotStarted(now_s, slot))
            if self._closing.wait(max(0.01, (slot + 1) * self._length_s - time.time())):
                return
