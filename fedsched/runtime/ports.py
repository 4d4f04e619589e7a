"""What the loop needs from the world: a protocol per outside thing, each with a live and a simulated side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from fedsched.core.commands import AskPolicy, ExecutorCommand, RewardSlot
from fedsched.core.events import Event

Post = Callable[[Event], None]
"""How an edge tells the loop what happened; callable from any thread."""


class Executor(Protocol):
    """Drives a cluster's tasks. Takes a command at once, works on it by itself, and posts events."""

    def submit(self, command: ExecutorCommand) -> None:
        """Accept a command without waiting for its effect."""

    def close(self) -> None:
        """Let go of the jobs: they keep running, an executor started later adopts them."""


class PolicyPort(Protocol):
    """Has a policy decide within its deadline and posts `PolicyDecided`; passes rewards to the learner."""

    def ask(self, question: AskPolicy) -> None:
        """Have the slot decided."""

    def reward(self, reward: RewardSlot) -> None:
        """Tell the learner what a slot brought."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One key of the store. `mod_revision` is the store's revision at its last write."""

    key: str
    value: bytes
    mod_revision: int
    create_revision: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All keys under a prefix, sorted, at one revision."""

    entries: tuple[Entry, ...]
    revision: int


@dataclass(frozen=True, slots=True)
class Put:
    """Write a key; under a lease it disappears with the lease."""

    key: str
    value: bytes
    lease: int | None = None


@dataclass(frozen=True, slots=True)
class Delete:
    """Remove a key; removing what is not there is fine."""

    key: str


@dataclass(frozen=True, slots=True)
class RevisionIs:
    """Guard: the key was last written at this revision; 0 means it does not exist."""

    key: str
    mod_revision: int


@dataclass(frozen=True, slots=True)
class ValueIs:
    """Guard: the key holds exactly this value."""

    key: str
    value: bytes


Guard = RevisionIs | ValueIs
Write = Put | Delete


@dataclass(frozen=True, slots=True)
class Committed:
    """A transaction's outcome: `ok` is False when a guard did not hold, and then nothing was written."""

    ok: bool
    revision: int


@dataclass(frozen=True, slots=True)
class KeyChanged:
    """A watched key was written (`entry` is the new one) or removed (`entry` is None)."""

    key: str
    entry: Entry | None
    revision: int


class Watch(Protocol):
    """A running watch; `close` ends it and no callback comes after it has returned."""

    def close(self) -> None:
        """Stop watching."""


class Store(Protocol):
    """A consistent key-value store with transactions, leases and watches: etcd, or memory with the same behaviour.

    All calls may raise `StoreUnavailable`. A commit that raised may or may not have been applied: retry with a guard.
    """

    def get(self, key: str) -> Entry | None:
        """The key's entry now."""

    def list(self, prefix: str) -> Snapshot:
        """All entries under `prefix`, sorted by key."""

    def commit(self, guards: tuple[Guard, ...], writes: tuple[Write, ...]) -> Committed:
        """Write all of `writes` in one transaction if every guard holds, else nothing."""

    def watch(
        self, prefix: str, on_snapshot: Callable[[Snapshot], None], on_change: Callable[[KeyChanged], None]
    ) -> Watch:
        """List, then follow: `on_snapshot` first, then each change once and in order.

        After a lost connection it resumes from the last revision; where that is compacted it lists again and calls
        `on_snapshot` anew. Callbacks come from one thread, never two at once.
        """

    def grant_lease(self, ttl_s: int) -> int:
        """A lease that ends `ttl_s` after its last `keep_alive`."""

    def keep_alive(self, lease: int) -> bool:
        """Renew the lease; False when it has ended."""

    def revoke(self, lease: int) -> None:
        """End the lease and remove its keys; an ended one is fine."""

    def close(self) -> None:
        """Release connections and threads."""


@dataclass(frozen=True, slots=True)
class LogPiece:
    """Some of what a job printed, and where its reader is then."""

    data: bytes = b""
    file: str = ""
    """The log file that it is from, by a name that stays."""
    offset: int = 0
    """How many bytes of that file have been read."""
