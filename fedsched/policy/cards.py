"""What files of weights and of statistics say of themselves: what made them, from what, how well they did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedsched.policy import checkpoint, speed_checkpoint
from fedsched.policy.dl2 import DL2, Dl2Shape
from fedsched.policy.registry import BUILTINS, LEARNED_SPEED
from fedsched.policy.set import Set, SetShape

SHIPPED = {**BUILTINS, LEARNED_SPEED: speed_checkpoint.BUILTIN}
"""The files that ship with the package, by policy."""
_FORMATS = {Dl2Shape.FORMAT: DL2.name, SetShape.FORMAT: Set.name, speed_checkpoint.FORMAT: LEARNED_SPEED}


@dataclass(frozen=True, slots=True)
class Card:
    """Of one file, which is whole."""

    policy: str
    file: str
    digest: str
    size_bytes: int
    made: Mapping[str, Any]
    """Command, seeds, steps, results and more, as the training told them; what ships has been told its price, too: the
    same command makes the same weights, but no two runs take the same time."""


def read(path: Path) -> Card:
    """The card of a file.

    Raises:
        CorruptCheckpoint: it cannot be read, is damaged, or is none of ours.
    """
    data = checkpoint.contents(path, "checkpoint", checkpoint.HINT)
    found = _whole(data, str(path))
    layout = speed_checkpoint.FORMAT if isinstance(found, speed_checkpoint.SpeedCheckpoint) else found.shape.FORMAT
    return Card(_FORMATS[layout], str(path), found.digest, len(data), found.made)


def _whole(data: bytes, origin: str) -> checkpoint.Checkpoint | speed_checkpoint.SpeedCheckpoint:
    try:
        of_speeds = checkpoint.unsealed(data)[1]["format"] == speed_checkpoint.FORMAT
    except checkpoint.MALFORMED:
        of_speeds = False  # told below, in full
    return speed_checkpoint.from_bytes(data, origin) if of_speeds else checkpoint.from_bytes(data, origin)
