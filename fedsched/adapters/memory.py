"""A store in memory that behaves like etcd: for tests, and for the simulator with its own clock."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from fedsched.errors import NotFound, StoreUnavailable
from fedsched.runtime.ports import (
    Committed,
    Delete,
    Entry,
    Guard,
    KeyChanged,
    Put,
    RevisionIs,
    Snapshot,
    Watch,
    Write,
)

OPERATIONS_MAX = 128
"""etcd's default limit of guards or writes in one transaction."""
REQUEST_BYTES_MAX = 1_500_000
"""Just below etcd's default limit for one request (1.5 MiB with its envelope)."""


def check_transaction(guards: tuple[Guard, ...], writes: tuple[Write, ...]) -> None:
    """Refuse what etcd refuses, before anything is sent.

    Raises:
        ValueError: an empty key, a key written twice, too many operations or too many bytes.
    """
    if max(len(guards), len(writes)) > OPERATIONS_MAX:
        raise ValueError(f"{len(guards)} guards and {len(writes)} writes; a transaction holds {OPERATIONS_MAX} of each")
    if not all(operation.key for operation in (*guards, *writes)):
        raise ValueError("a key is empty")
    keys = [write.key for write in writes]
    if len(set(keys)) < len(keys):
        raise ValueError(f"a key is written twice in one transaction: {sorted(k for k in keys if keys.count(k) > 1)}")
    size = sum(len(write.key) + len(write.value) for write in writes if isinstance(write, Put))
    if size > REQUEST_BYTES_MAX:
        raise ValueError(f"a transaction of {size} bytes; at most {REQUEST_BYTES_MAX} are allowed")


@dataclass(slots=True)
class _Lease:
    ttl_s: int
    ends_s: float
    keys: set[str] = field(default_factory=set)


class _MemoryWatch:
    """Hands snapshots and changes to its callbacks; in a thread of its own, or when the store drains it."""

    def __init__(
        self,
        prefix: str,
        on_snapshot: Callable[[Snapshot], None],
        on_change: Callable[[KeyChanged], None],
        on_close: Callable[[_MemoryWatch], None],
    ) -> None:
        self.prefix = prefix
        self._on_snapshot = on_snapshot
        self._on_change = on_change
        self._on_close = on_close
        self._closed = False
        # Held during a callback; reentrant, so that a callback may close its own watch.
        self._calling = threading.RLock()

    def call(self, item: Snapshot | KeyChanged) -> None:
        with self._calling:
            if self._closed:
                return
            if isinstance(item, Snapshot):
                self._on_snapshot(item)
            else:
                self._on_change(item)

    def close(self) -> None:
        """Stop; waits for a callback that runs in another thread."""
        with self._calling:
            self._closed = True
        self._on_close(self)


class _Courier:
    """Delivers one watch's items from a thread of its own."""

    def __init__(self, watch: _MemoryWatch) -> None:
        self._watch = watch
        self._items: deque[Snapshot | KeyChanged] = deque()
        self._changed = threading.Condition()
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="memory-watch", daemon=True)
        self._thread.start()

    def offer(self, item: Snapshot | KeyChanged) -> None:
        with self._changed:
            self._items.append(item)
            self._changed.notify()

    def end(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._items or self._ended)
                if self._ended:
                    return
                item = self._items.popleft()
            self._watch.call(item)


class MemoryStore:
    """`Store` without a server.

    Args:
        clock: seconds; leases end by it.
        inline: callbacks run in the thread that writes, before its call returns (or, from within a callback, right
            after that one), so that a run is the same each time; leases then end at the next call or at `expire`.
            Otherwise each watch has a thread and leases end by themselves.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, inline: bool = False) -> None:
        self._clock = clock
        self._inline = inline
        self._lock = threading.Condition(threading.RLock())
        self._entries: dict[str, Entry] = {}
        self._lease_of: dict[str, int] = {}
        self._leases: dict[int, _Lease] = {}
        self._revision = 1
        self._leases_granted = 0
        self._couriers: dict[_MemoryWatch, _Courier | None] = {}
        self._pending: deque[tuple[_MemoryWatch, Snapshot | KeyChanged]] = deque()
        self._draining = False
        self._closed = False
        self._reaper: threading.Thread | None = None

    def get(self, key: str) -> Entry | None:
        """The key's entry now."""
        with self._lock:
            self._begin()
            found = self._entries.get(key)
        self._drain()
        return found

    def list(self, prefix: str) -> Snapshot:
        """All entries under `prefix`, sorted by key."""
        with self._lock:
            self._begin()
            found = self._snapshot(prefix)
        self._drain()
        return found

    def commit(self, guards: tuple[Guard, ...], writes: tuple[Write, ...]) -> Committed:
        """Write all of `writes` in one transaction if every guard holds, else nothing.

        Raises:
            NotFound: a put names a lease that has ended; nothing was written.
        """
        check_transaction(guards, writes)
        with self._lock:
            self._begin()
            ok = all(self._holds(guard) for guard in guards)
            if ok:
                self._apply(writes)
            outcome = Committed(ok, self._revision)
        self._drain()
        return outcome

    def watch(
        self, prefix: str, on_snapshot: Callable[[Snapshot], None], on_change: Callable[[KeyChanged], None]
    ) -> Watch:
        """List, then follow: `on_snapshot` first, then each change once and in order."""
        watch = _MemoryWatch(prefix, on_snapshot, on_change, self._unwatch)
        with self._lock:
            self._begin()
            self._couriers[watch] = None if self._inline else _Courier(watch)
            self._offer(watch, self._snapshot(prefix))
        self._drain()
        return watch

    def grant_lease(self, ttl_s: int) -> int:
        """A lease that ends `ttl_s` after its last `keep_alive`."""
        if ttl_s < 1:
            raise ValueError(f"a lease of {ttl_s} s; at least 1 s is needed")
        with self._lock:
            self._begin()
            self._leases_granted += 1
            lease = self._leases_granted
            self._leases[lease] = _Lease(ttl_s, self._clock() + ttl_s)
            if not self._inline and self._reaper is None:
                self._reaper = threading.Thread(target=self._reap, name="memory-leases", daemon=True)
                self._reaper.start()
            self._lock.notify_all()
        self._drain()
        return lease

    def keep_alive(self, lease: int) -> bool:
        """Renew the lease; False when it has ended."""
        with self._lock:
            self._begin()
            found = self._leases.get(lease)
            if found is not None:
                found.ends_s = self._clock() + found.ttl_s
        self._drain()
        return found is not None

    def revoke(self, lease: int) -> None:
        """End the lease and remove its keys; an ended one is fine."""
        with self._lock:
            self._begin()
            if lease in self._leases:
                self._end(lease)
        self._drain()

    def expire(self) -> None:
        """End the leases whose time has come: for whoever moves the clock of an inline store."""
        with self._lock:
            self._begin()
        self._drain()

    def close(self) -> None:
        """End all watches and threads; later calls raise `StoreUnavailable`."""
        with self._lock:
            self._closed = True
            self._lock.notify_all()
            watches = tuple(self._couriers)
            reaper = self._reaper
        for watch in watches:
            watch.close()
        if reaper is not None and reaper is not threading.current_thread():
            reaper.join()

    def _begin(self) -> None:
        if self._closed:
            raise StoreUnavailable("the store is closed", "open another one")
        now_s = self._clock()
        ended = sorted((found.ends_s, lease) for lease, found in self._leases.items() if found.ends_s <= now_s)
        for _, lease in ended:
            self._end(lease)

    def _snapshot(self, prefix: str) -> Snapshot:
        found = (self._entries[key] for key in sorted(self._entries) if key.startswith(prefix))
        return Snapshot(tuple(found), self._revision)

    def _holds(self, guard: Guard) -> bool:
        entry = self._entries.get(guard.key)
        if isinstance(guard, RevisionIs):
            return (entry.mod_revision if entry else 0) == guard.mod_revision
        return entry is not None and entry.value == guard.value

    def _apply(self, writes: tuple[Write, ...]) -> None:
        for write in writes:
            if isinstance(write, Put) and write.lease is not None and write.lease not in self._leases:
                raise NotFound(f"lease {write.lease} has ended", "grant a new lease and write again")
        revision = self._revision + 1
        changes = []
        for write in writes:
            if isinstance(write, Put):
                changes.append(self._put(write, revision))
            elif self._entries.pop(write.key, None) is not None:
                self._detach(write.key)
                changes.append(KeyChanged(write.key, None, revision))
        # Like etcd: a transaction that changes nothing has no revision of its own.
        if changes:
            self._revision = revision
        for change in changes:
            for watch in self._couriers:
                if change.key.startswith(watch.prefix):
                    self._offer(watch, change)

    def _put(self, write: Put, revision: int) -> KeyChanged:
        old = self._entries.get(write.key)
        entry = Entry(write.key, write.value, revision, old.create_revision if old else revision)
        self._entries[write.key] = entry
        self._detach(write.key)
        if write.lease is not None:
            self._lease_of[write.key] = write.lease
            self._leases[write.lease].keys.add(write.key)
        return KeyChanged(write.key, entry, revision)

    def _detach(self, key: str) -> None:
        lease = self._lease_of.pop(key, None)
        if lease is not None and lease in self._leases:
            self._leases[lease].keys.discard(key)

    def _end(self, lease: int) -> None:
        keys = sorted(self._leases.pop(lease).keys)
        self._apply(tuple(Delete(key) for key in keys))

    def _offer(self, watch: _MemoryWatch, item: Snapshot | KeyChanged) -> None:
        courier = self._couriers[watch]
        if courier is None:
            self._pending.append((watch, item))
        else:
            courier.offer(item)

    def _drain(self) -> None:
        """Deliver what waits, outside the lock; a callback that writes adds to the queue that is being emptied."""
        with self._lock:
            if self._draining:
                return
            self._draining = True
        try:
            while True:
                with self._lock:
                    if not self._pending:
                        self._draining = False
                        return
                    watch, item = self._pending.popleft()
                watch.call(item)
        except BaseException:
            with self._lock:
                self._draining = False
            raise

    def _unwatch(self, watch: _MemoryWatch) -> None:
        with self._lock:
            courier = self._couriers.pop(watch, None)
        if courier is not None:
            courier.end()

    def _reap(self) -> None:
        """End leases when their time comes, as the server does."""
        with self._lock:
            while not self._closed:
                self._begin()
                ends_s = min((lease.ends_s for lease in self._leases.values()), default=None)
                self._lock.wait(None if ends_s is None else max(ends_s - self._clock(), 0.001))
