"""Keeps a process registered: a lease that is renewed, the keys under it, and word when the lease was lost."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping

from fedsched.errors import Conflict, NotFound, StoreUnavailable
from fedsched.runtime.backoff import Backoff
from fedsched.runtime.ports import Guard, Put, Store

RETRY_S = 0.2
"""Pause after an attempt that the store did not answer, the first time; it doubles up to a third of the lease."""
JOIN_S = 15.0
"""How long `close` waits for a call to the store that is under way."""


def _nothing() -> None:
    """Default of the callbacks."""


class LeaseKeeper:
    """A lease with keys under it that are there as long as this process lives and reaches the store.

    Whether the lease is held is judged by the local monotonic clock alone: it counts as lost once `ttl_s` have passed
    since the last renewal was *sent*, which is never later than when the store lets it go. Call `start` to begin.

    Args:
        ttl_s: how long the keys outlive the last renewal.
        keys: what to write under the lease, now and again after each loss.
        guards: what must hold whenever the keys are written, such as the agent's own term; once they do not hold,
            the keeper gives up for good (`refused`), since somebody else has taken over.
        on_lost, on_regained: called from the keeper's thread, in turns; may be late by one call to the store, so ask
            `held` before acting on being registered.
    """

    def __init__(
        self,
        store: Store,
        ttl_s: int,
        keys: Mapping[str, bytes],
        *,
        guards: tuple[Guard, ...] = (),
        on_lost: Callable[[], None] = _nothing,
        on_regained: Callable[[], None] = _nothing,
    ) -> None:
        self._store = store
        self._ttl_s = ttl_s
        self._guards = guards
        self._on_lost = on_lost
        self._on_regained = on_regained
        self._changed = threading.Condition()
        self._values = dict(keys)
        self._unwritten: set[str] = set()
        self._stirred = False
        self._lease: int | None = None
        self._renewed_s = float("-inf")
        self._told_held = True
        self._closing = False
        self._refused = False
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)

    @property
    def held(self) -> bool:
        """Whether the keys are certainly there now."""
        return not self._refused and time.monotonic() < self._renewed_s + self._ttl_s

    @property
    def refused(self) -> bool:
        """Whether a guard did not hold: another process has taken this one's place."""
        return self._refused

    def start(self) -> None:
        """Take the lease and write the keys, then keep them from a thread.

        Raises:
            StoreUnavailable: the store did not answer.
            Conflict: a guard does not hold.
        """
        self._register()
        if self._refused:
            self.close()
            raise Conflict(
                f"{', '.join(sorted(self._values))} cannot be registered: another process has taken over",
                "end one of the two",
            )
        self._thread.start()

    def update(self, key: str, value: bytes) -> None:
        """Have `key` hold `value` under the lease: soon, from the keeper's thread, so that no caller waits for it."""
        with self._changed:
            self._values[key] = value
            self._unwritten.add(key)
            self._stirred = True
            self._changed.notify()

    def close(self) -> None:
        """Remove the keys, if the store answers, and end; safe to call twice."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(JOIN_S)
        lease, self._lease = self._lease, None
        self._renewed_s = float("-inf")
        if lease is not None:
            # If it cannot be revoked it ends by itself.
            with contextlib.suppress(StoreUnavailable):
                self._store.revoke(lease)

    def _run(self) -> None:
        renew_s = time.monotonic() + self._ttl_s / 3
        backoff = Backoff(RETRY_S, self._ttl_s / 3)
        while self._wait(renew_s):
            try:
                self._keep()
                backoff.reset()
                renew_s = time.monotonic() + self._ttl_s / 3
            except StoreUnavailable:
                renew_s = time.monotonic() + backoff.pause_s()
            self._tell()
            if self._refused:
                return

    def _wait(self, until_s: float) -> bool:
        """Wait for the time to renew, the moment the lease is lost, or an update; False when closing."""
        with self._changed:
            lost_s = self._renewed_s + self._ttl_s
            wake_s = min(until_s, lost_s) if self._told_held else until_s
            self._changed.wait_for(lambda: self._closing or self._stirred, max(wake_s - time.monotonic(), 0.0))
            self._stirred = False
            return not self._closing

    def _keep(self) -> None:
        sent_s = time.monotonic()
        if self._lease is not None and self._store.keep_alive(self._lease) and self._write_changed(self._lease):
            self._renewed_s = sent_s
            return
        # The store has let the lease go, whatever our own clock says.
        self._lease, self._renewed_s = None, float("-inf")
        self._tell()
        self._register()

    def _register(self) -> None:
        sent_s = time.monotonic()
        lease = self._store.grant_lease(self._ttl_s)
        with self._changed:
            self._unwritten = set(self._values)
        if not self._write_changed(lease):
            raise StoreUnavailable("the store let a new lease go at once", "is the machine overloaded?")
        self._lease = lease
        if not self._refused:
            self._renewed_s = sent_s

    def _write_changed(self, lease: int) -> bool:
        """Write what is not written yet; False if the lease has ended."""
        with self._changed:
            writes = tuple(Put(key, self._values[key], lease) for key in sorted(self._unwritten))
        if not writes:
            return True
        try:
            self._refused = not self._store.commit(self._guards, writes).ok
        except NotFound:
            return False
        with self._changed:
            # What was updated again meanwhile stays to be written.
            self._unwritten -= {write.key for write in writes if self._values[write.key] is write.value}
        return True

    def _tell(self) -> None:
        if self.held == self._told_held:
            return
        self._told_held = self.held
        (self._on_regained if self._told_held else self._on_lost)()
