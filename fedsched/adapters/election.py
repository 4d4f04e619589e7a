"""Elects one leader among the processes of a role, over the store."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

from fedsched.errors import NotFound, StoreUnavailable
from fedsched.runtime import keys
from fedsched.runtime.backoff import Backoff
from fedsched.runtime.ports import Guard, KeyChanged, Put, RevisionIs, Snapshot, Store

JOIN_S = 15.0
"""How long `close` waits for a call to the store that is under way."""
RETRY_S = 0.2
"""Pause after an attempt that the store did not answer, the first time; it doubles up to a third of the lease."""
_NEVER = -1
"""A revision that no key ever has."""


class Election:
    """Campaigns for `role` until closed. Leadership is a key under a lease; whoever creates it leads.

    Two processes may both believe that they lead for a moment; that is harmless if each write that only a leader may
    make carries `guard()`.

    Args:
        candidate_id: written into the key, for people to read.
        ttl_s: how long after its last sign of life a leader can be replaced.
        on_change: called with True when this process has won and with False when it no longer leads, from the
            election's thread; it must return soon, since the lease is renewed from there.
    """

    def __init__(
        self, store: Store, role: str, candidate_id: str, ttl_s: int, on_change: Callable[[bool], None]
    ) -> None:
        self._store = store
        self._key = keys.leader(role)
        self._candidate = candidate_id.encode()
        self._ttl_s = ttl_s
        self._on_change = on_change
        self._changed = threading.Condition()
        self._stirred = False
        self._closing = False
        self._lease: int | None = None
        self._revision = _NEVER
        self._renewed_s = float("-inf")
        self._thread = threading.Thread(target=self._run, name=f"election {role}", daemon=True)
        # Only makes us look sooner; what counts is read from the store.
        self._watch = store.watch(self._key, self._on_snapshot, self._on_key)
        self._thread.start()

    @property
    def leading(self) -> bool:
        """Whether this process leads, as far as its own clock can tell."""
        return self._revision != _NEVER and time.monotonic() < self._renewed_s + self._ttl_s

    def guard(self) -> Guard:
        """Holds in a transaction only while this process is the leader; never, if it is not."""
        return RevisionIs(self._key, self._revision)

    def close(self) -> None:
        """Resign, so that another can lead at once, and stop campaigning; safe to call twice."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._watch.close()
        if self._thread is not threading.current_thread():
            self._thread.join(JOIN_S)

    def _on_snapshot(self, snapshot: Snapshot) -> None:
        self._stir()

    def _on_key(self, change: KeyChanged) -> None:
        # The prefix also finds roles whose name begins alike.
        if change.key == self._key and change.revision != self._revision:
            self._stir()

    def _stir(self) -> None:
        with self._changed:
            self._stirred = True
            self._changed.notify()

    def _run(self) -> None:
        backoff, wait_s = Backoff(RETRY_S, self._ttl_s / 3), 0.0
        while self._wait(wait_s):
            try:
                if self._revision == _NEVER:
                    self._campaign()
                else:
                    self._renew()
                backoff.reset()
                wait_s = self._ttl_s / 3
            except StoreUnavailable:
                wait_s = backoff.pause_s()
            if self._revision != _NEVER and not self.leading:
                self._step_down()
        if self._revision != _NEVER:
            self._step_down()
        # If the lease cannot be revoked it ends by itself.
        with contextlib.suppress(StoreUnavailable):
            self._let_go()

    def _wait(self, wait_s: float) -> bool:
        """Wait for the next look at the store; False when closing."""
        with self._changed:
            if self._revision != _NEVER:
                wait_s = min(wait_s, max(self._renewed_s + self._ttl_s - time.monotonic(), 0.0))
            self._changed.wait_for(lambda: self._closing or self._stirred, wait_s)
            self._stirred = False
            return not self._closing

    def _campaign(self) -> None:
        # A lease left over from an attempt whose outcome we did not learn may hold the key: without it gone, we
        # would wait for ourselves.
        self._let_go()
        if self._store.get(self._key) is not None:
            return
        sent_s = time.monotonic()
        self._lease = self._store.grant_lease(self._ttl_s)
        try:
            won = self._store.commit((RevisionIs(self._key, 0),), (Put(self._key, self._candidate, self._lease),))
        except NotFound as problem:
            raise StoreUnavailable("the store let a new lease go at once", "is the machine overloaded?") from problem
        if not won.ok:
            self._let_go()
            return
        self._revision, self._renewed_s = won.revision, sent_s
        self._on_change(True)

    def _renew(self) -> None:
        sent_s = time.monotonic()
        assert self._lease is not None
        entry = self._store.get(self._key) if self._store.keep_alive(self._lease) else None
        if entry is None or entry.mod_revision != self._revision:
            self._step_down()
            self._stir()
        else:
            self._renewed_s = sent_s

    def _step_down(self) -> None:
        self._revision, self._renewed_s = _NEVER, float("-inf")
        self._on_change(False)

    def _let_go(self) -> None:
        if self._lease is not None:
            self._store.revoke(self._lease)
            self._lease = None
