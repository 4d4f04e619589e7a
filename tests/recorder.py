"""Records what a watch tells and lets a test wait for it."""

from __future__ import annotations

import threading

from fedsched.runtime.ports import KeyChanged, Snapshot, Store, Watch
from tests.waiting import eventually


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
