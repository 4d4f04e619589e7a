"""Records what a watch tells and lets a test wait for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from fedsched.runtime.ports import KeyChanged, Snapshot, Store, Watch

DEADLINE_S = 20.0


def eventually(holds: Callable[[], bool], what: str, deadline_s: float = DEADLINE_S) -> None:
    """Wait until `holds()`; fail with `what` after the deadline."""
    end_s = time.monotonic() + deadline_s
    while not holds():
        assert time.monotonic() < end_s, f"not within {deadline_s:g} s: {what}"
        time.sleep(0.01)


class Recorder:
    """Watches a prefix; `told` is everything that came, in order."""

    def __init__(self, store: Store, prefix: str) -> None:
        self.told: list[Snapshot | KeyChanged] = []
        self.overlapped = False
        self._calling = threading.Lock()
        self.watch: Watch = store.watch(prefix, self._record, self._record)

    @property
    def snapshots(self) -> list[Snapshot]:
        return [item for item in self.told if isinstance(item, Snapshot)]

    @property
    def changes(self) -> list[KeyChanged]:
        return [item for item in self.told if isinstance(item, KeyChanged)]

    def story(self) -> list[tuple[str, bytes | None]]:
        """Key and value (None: removed) of each change."""
        return [(change.key, change.entry.value if change.entry else None) for change in self.changes]

    def wait_listed(self, times: int = 1) -> Recorder:
        eventually(lambda: len(self.snapshots) >= times, f"{times} listing(s), told: {self.told}")
        return self

    def wait_changes(self, count: int) -> list[KeyChanged]:
        eventually(lambda: len(self.changes) >= count, f"{count} changes, told: {self.told}")
        return self.changes

    def _record(self, item: Snapshot | KeyChanged) -> None:
        if not self._calling.acquire(blocking=False):
            self.overlapped = True
            return
        try:
            self.told.append(item)
        finally:
            self._calling.release()
