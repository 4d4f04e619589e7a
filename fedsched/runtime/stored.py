"""Reads what a store's key holds: a record, a number or a name, or one clear error that names the key."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TypeVar

from fedsched.errors import CorruptRecord
from fedsched.runtime import codec
from fedsched.runtime.ports import Entry

T = TypeVar("T")

_log = logging.getLogger(__name__)


def record(kind: type[T], entry: Entry) -> T:
    """The `kind` that the entry holds.

    Raises:
        CorruptRecord: it holds something else.
    """
    try:
        return codec.loads(kind, entry.value)
    except ValueError as problem:
        raise _corrupt(entry, str(problem)) from problem


def readable(kind: type[T], entries: Iterable[Entry]) -> list[T]:
    """The records among the entries that can be read; the others are told of in the log."""
    found = []
    for entry in entries:
        try:
            found.append(record(kind, entry))
        except CorruptRecord as problem:
            _log.error("left out: %s", problem.message)
    return found


def number(entry: Entry) -> int:
    """The number that the entry holds as decimal text.

    Raises:
        CorruptRecord: it holds something else.
    """
    try:
        return int(entry.value)
    except ValueError as problem:
        raise _corrupt(entry, f"a number was expected, it holds {entry.value[:40]!r}") from problem


def text(entry: Entry) -> str:
    """The text that the entry holds.

    Raises:
        CorruptRecord: it holds something else.
    """
    try:
        return entry.value.decode()
    except ValueError as problem:
        raise _corrupt(entry, str(problem)) from problem


def numbered(entries: tuple[Entry, ...], prefix: str) -> dict[int, Entry]:
    """The entries whose keys are the prefix and a number, by that number, in order; others are nobody's."""
    tails = ((entry.key.removeprefix(prefix), entry) for entry in entries)
    return dict(sorted((int(tail), entry) for tail, entry in tails if tail.isascii() and tail.isdigit()))


def _corrupt(entry: Entry, why: str) -> CorruptRecord:
    return CorruptRecord(
        f"the record {entry.key} in etcd cannot be read: {why}",
        f"see what was written there (etcdctl get {entry.key}); put it right, or restore etcd from a backup",
    )
