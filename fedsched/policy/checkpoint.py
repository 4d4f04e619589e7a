"""Weights of a policy as one safetensors file that says how it was made and proves that it is whole."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from fedsched.errors import CorruptCheckpoint, InvalidInput
from fedsched.files import read_whole, refuse_clashes, write_whole
from fedsched.policy import dl2
from fedsched.policy import set as set_policy
from fedsched.policy.learnable import Arrays, misfit

FOLDER = Path(__file__).parent / "checkpoints"
BUILTIN = FOLDER / "dl2-v1.safetensors"
"""DL2's weights that ship with the package."""
BUILTIN_SET = FOLDER / "set-v1.safetensors"
"""Those of the policy `set`."""
SHAPES: dict[str, type[dl2.Dl2Shape | set_policy.SetShape]] = {
    dl2.Dl2Shape.FORMAT: dl2.Dl2Shape,
    set_policy.SetShape.FORMAT: set_policy.SetShape,
}
"""What weights may be of, by the format that their file names."""

MALFORMED = (
    SafetensorError,
    ValueError,
    LookupError,
    AttributeError,
    TypeError,
    OverflowError,
    RecursionError,
    struct.error,
)
"""What it raises to look into a file that is damaged or none of ours."""
BYTES_MAX = 2**30
"""Nothing larger is read: whoever may name a file may name one without end, and the reader has a cluster to serve."""
HINT = "restore it from a backup, use the built-in weights (checkpoint: builtin), or run: fedsched train supervised"

Made = Mapping[str, str | int | float]
"""How weights came to be: command, teacher, seed, steps, losses; or round, contributors."""


def digest(arrays: Mapping[str, NDArray[Any]]) -> str:
    """SHA-256 over names, types, shapes and bytes, sorted by name: equal weights, equal digest."""
    sha = hashlib.sha256()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        sha.update(f"{name} {array.dtype} {array.shape}\n".encode())
        sha.update(array.tobytes())
    return sha.hexdigest()


def seal(arrays: Mapping[str, NDArray[Any]], card: Mapping[str, Any]) -> bytes:
    """A safetensors file of the arrays with a description that `unsealed` can tell to be whole."""
    text = json.dumps(card, sort_keys=True)
    # One metadata key only: the format's writer does not promise an order among several.
    metadata = {"fedsched": text, "sha256": hashlib.sha256(text.encode()).hexdigest()}
    return save_tensors(
        {name: np.ascontiguousarray(arrays[name]) for name in sorted(arrays)},
        {"fedsched": json.dumps(metadata, sort_keys=True)},
    )


def contents(path: Path, what: str, hint: str) -> bytes:
    """All of a file.

    Args:
        what: it should be, for the error.
        hint: what to do if it cannot be read.

    Raises:
        CorruptCheckpoint: it cannot be.
    """
    try:
        return read_whole(path, BYTES_MAX)
    except (OSError, ValueError) as problem:  # a name with a null character is no OSError
        why = problem.strerror if isinstance(problem, OSError) else problem
        hint = f"check the path, or {hint}" if isinstance(problem, FileNotFoundError) else hint
        raise CorruptCheckpoint(f"cannot read {what} {path}: {why}", hint) from problem


def unsealed(data: bytes) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """The arrays and the description in a file's contents; safetensors itself reads metadata from files only.

    Raises:
        One of `MALFORMED`: it is no such file, or not whole.
    """
    arrays = load_tensors(data)
    (length,) = struct.unpack("<Q", data[:8])
    sealed = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["fedsched"])
    text = sealed["fedsched"]
    if hashlib.sha256(text.encode()).hexdigest() != sealed["sha256"]:
        raise ValueError("the description does not match its checksum")
    card: dict[str, Any] = json.loads(text)
    # Half characters can be escaped in JSON, and then neither be sent nor shown: this raises where there is one.
    json.dumps(card, ensure_ascii=False).encode()
    return arrays, card


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """Weights, their shape and their story."""

    arrays: Arrays
    shape: Any
    """One of `SHAPES`: that of the policy which the weights are for."""
    made: Made

    @property
    def digest(self) -> str:
        """Identifies the weights, whatever their story."""
        return digest(self.arrays)

    def to_bytes(self) -> bytes:
        """The file's contents; the same checkpoint always gives the same bytes."""
        card = {
            **self.shape.card(),
            "format": self.shape.FORMAT,
            "digest": self.digest,
            "made": dict(self.made),
        }
        return seal(self.arrays, card)

    def replaced(self, arrays: Arrays, made: Made) -> Checkpoint:
        """Weights of the same shape with these values and this story."""
        return Checkpoint(arrays, self.shape, made)

    def save(self, path: Path) -> None:
        """Write the file so that a reader never sees a part of it."""
        write_whole(path, self.to_bytes())


def refuse_bad_places(read: Iterable[Path], written: Iterable[Path]) -> None:
    """Before weights or statistics are made: whether they can be written there, and over nothing but older ones.

    Args:
        read: files that they are made from.
        written: checkpoint files.

    Raises:
        InvalidInput: a file could not be written, or something else would be lost.
    """
    written = tuple(written)
    refuse_clashes(read, written)
    for path in written:
        if path.is_file() and path.stat().st_size and not _is_tensors(path):
            raise InvalidInput(
                f"{path} is there and is no checkpoint; a checkpoint would be written over it",
                "name another file, or remove it first",
            )


def _is_tensors(path: Path) -> bool:
    """Whether it begins as safetensors files do: the length of a header, and a JSON object."""
    with path.open("rb") as file:
        return file.read(9)[8:] == b"{"


def load(path: Path) -> Checkpoint:
    """Read and verify a checkpoint file.

    Raises:
        CorruptCheckpoint: it cannot be read, is damaged, or is not one of ours.
    """
    return from_bytes(contents(path, "checkpoint", HINT), str(path))


def from_bytes(data: bytes, origin: str = "received checkpoint") -> Checkpoint:
    """Verify a checkpoint's bytes; `origin` names them in errors.

    Raises:
        CorruptCheckpoint: they are damaged or not one of ours.
    """
    try:
        arrays, card = unsealed(data)
        if card["format"] not in SHAPES:
            raise ValueError(f"made for {card['format']}")
        shape = SHAPES[card["format"]].of_card(card)
        made, promised = dict(card["made"]), str(card["digest"])
    except MALFORMED as problem:
        raise CorruptCheckpoint(
            f"{origin} is no whole checkpoint ({type(problem).__name__}: {problem}); "
            f"expected a safetensors file of format {' or '.join(SHAPES)}",
            HINT,
        ) from problem
    problem_found = misfit(arrays, shape.layers())
    if problem_found:
        raise CorruptCheckpoint(f"{origin} does not match its own schema: {problem_found}", HINT)
    actual = digest(arrays)
    if actual != promised:
        raise CorruptCheckpoint(f"{origin} is damaged: its weights have digest {actual}; expected {promised}", HINT)
    return Checkpoint(arrays, shape, made)
