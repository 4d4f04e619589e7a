"""Domain dataclasses to JSON and back, validated on the way in."""

from __future__ import annotations

import json
from typing import Any, TypeVar, cast

from pydantic import TypeAdapter, ValidationError

from fedsched.core.commands import Command
from fedsched.core.events import Event

T = TypeVar("T")


_adapters: dict[type, TypeAdapter[Any]] = {}


def _adapter(kind: type) -> TypeAdapter[Any]:
    if kind not in _adapters:
        _adapters[kind] = TypeAdapter(kind)
    return _adapters[kind]


def dumps(value: object) -> bytes:
    """One line of JSON with sorted keys: the same value always gives the same bytes."""
    plain = _adapter(type(value)).dump_python(value, mode="json")
    return json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()


def loads(kind: type[T], data: bytes | str) -> T:
    """Read a `kind` back.

    Raises:
        ValueError: the bytes are not a valid `kind`; unknown fields are ignored, so that an older reader copes.
    """
    try:
        return cast(T, _adapter(kind).validate_json(data))
    except ValidationError as problem:
        raise ValueError(f"not a {kind.__name__}: {problem}") from problem


_TAGGED: dict[str, type] = {kind.__name__: kind for union in (Event, Command) for kind in union.__args__}


def dump_tagged(value: Event | Command) -> dict[str, Any]:
    """An event or command as a JSON object that names its type under `_`."""
    return {"_": type(value).__name__, **_adapter(type(value)).dump_python(value, mode="json")}


def load_tagged(plain: dict[str, Any]) -> Event | Command:
    """Read back what `dump_tagged` wrote.

    Raises:
        ValueError: an unknown type or contents that do not fit it.
    """
    kind = _TAGGED.get(plain.get("_", ""))
    if kind is None:
        raise ValueError(f"unknown event or command {plain.get('_')!r}")
    body = {key: value for key, value in plain.items() if key != "_"}
    return cast(Event | Command, loads(kind, json.dumps(body)))
