"""Records to JSON and back, validated on the way in."""

from __future__ import annotations

import json
from typing import Any, TypeVar, cast

import msgspec

from fedsched.core.commands import Command
from fedsched.core.events import Event

T = TypeVar("T")


def dumps(value: object) -> bytes:
    """One line of JSON with sorted keys: the same value always gives the same bytes.

    Numbers that are not finite are written as Python writes them: a diverging loss must come back as it is.
    """
    return json.dumps(msgspec.to_builtins(value), sort_keys=True, separators=(",", ":")).encode()


def to_plain(value: object) -> Any:
    """A record as dictionaries, lists and scalars; `from_plain` reads it back."""
    return msgspec.to_builtins(value)


def loads(kind: type[T], data: bytes | str) -> T:
    """Read a `kind` back.

    Raises:
        ValueError: the bytes are not a valid `kind`; unknown fields are ignored, so that an older reader copes.
    """
    try:
        plain = json.loads(data)
    except (ValueError, RecursionError) as problem:
        raise ValueError(f"not a {kind.__name__}: {problem}") from problem
    return from_plain(kind, plain)


def from_plain(kind: type[T], plain: Any) -> T:
    """The `kind` that dictionaries, lists and scalars describe.

    Raises:
        ValueError: they do not describe a valid `kind`; unknown fields are ignored.
    """
    try:
        return msgspec.convert(plain, kind)
    except msgspec.ValidationError as problem:
        raise ValueError(f"not a {kind.__name__}: {problem}") from problem


_TAGGED: dict[str, type] = {kind.__name__: kind for union in (Event, Command) for kind in union.__args__}


def dump_tagged(value: Event | Command) -> dict[str, Any]:
    """An event or command as a JSON object that names its type under `_`."""
    return {"_": type(value).__name__, **msgspec.to_builtins(value)}


def load_tagged(plain: dict[str, Any]) -> Event | Command:
    """Read back what `dump_tagged` wrote.

    Raises:
        ValueError: an unknown type or contents that do not fit it.
    """
    kind = _TAGGED.get(plain.get("_", ""))
    if kind is None:
        raise ValueError(f"unknown event or command {plain.get('_')!r}")
    body = {key: value for key, value in plain.items() if key != "_"}
    return cast(Event | Command, from_plain(kind, body))
