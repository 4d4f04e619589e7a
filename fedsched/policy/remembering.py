"""What a policy must offer to be the same one after its process was killed: all that it remembers, as bytes."""

from __future__ import annotations

from typing import Protocol, TypeVar, runtime_checkable

import msgspec

from fedsched.core.decision import Policy

T = TypeVar("T")


@runtime_checkable
class Remembering(Policy, Protocol):
    """A policy whose decisions depend on what it was asked before. What it remembers is bounded."""

    def state(self) -> bytes:
        """All that its next decisions depend on, besides what it was made of."""

    def restore(self, state: bytes) -> None:
        """Go on from what `state` gave: the next decisions are those of the policy that gave it.

        Raises:
            ValueError: it is no state of this policy with these options; nothing has changed.
        """


def recall(state: bytes, kind: type[T]) -> T:
    """The record of this kind that `msgspec.msgpack` made the bytes of.

    Raises:
        ValueError: they are of another one.
    """
    try:
        return msgspec.msgpack.decode(state, type=kind)
    except msgspec.MsgspecError as problem:
        raise ValueError(f"not what such a policy remembers: {problem}") from problem
