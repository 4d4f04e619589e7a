"""Refuses orders of an agent that has been replaced and orders that were taken already, also across restarts."""

from __future__ import annotations

import fcntl
import threading

from fedsched.errors import Conflict
from fedsched.executor import records
from fedsched.executor.records import FenceRecord, Layout


class Fence:
    """The newest `(term, seq)` of a cluster, kept in a file that all executors of the cluster share."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._lock = threading.Lock()

    def admit(self, term: int, seq: int) -> bool:
        """Take note of an order; False when it was taken before and has nothing more to do.

        Raises:
            Conflict: an agent with a newer term has given orders here.
        """
        with self._lock, self._layout.fence_lock.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            newest = records.read(FenceRecord, self._layout.fence) or FenceRecord()
            if term < newest.term:
                raise Conflict(
                    f"an order of term {term} was refused; this cluster already obeys term {newest.term}",
                    "nothing, if another agent took over",
                )
            if (term, seq) <= (newest.term, newest.seq):
                return False
            records.write(self._layout.fence, FenceRecord(term, seq))
            return True
