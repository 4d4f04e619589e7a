"""The state of a training as one file, whole or absent, that proves what it is and says which recipe it belongs to."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from fedsched.errors import CorruptCheckpoint, InvalidInput
from fedsched.files import write_whole
from fedsched.policy import checkpoint
from fedsched.policy.learnable import Arrays, misfit

FORMAT = "fedsched/training/3"
HINT = "begin anew with --restart, or restore the file from a backup"


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """All that an interrupted training goes on from."""

    recipe: Mapping[str, Any]
    """All that decides what is made, as plain data: a state is of one recipe only."""
    arrays: Mapping[str, NDArray[Any]]
    rest: Mapping[str, Any]
    """Whatever is no array, as plain data."""

    def to_bytes(self) -> bytes:
        """The file's contents; the same state always gives the same bytes."""
        card = {
            "format": FORMAT,
            "recipe": self.recipe,
            "rest": self.rest,
            "digest": checkpoint.digest(self.arrays),
        }
        return checkpoint.seal(self.arrays, card)

    def save(self, path: Path) -> None:
        """Write the file so that a crash of the process or the machine leaves the old one or the new one."""
        write_whole(path, self.to_bytes(), durable=True)


def load(path: Path, recipe: Mapping[str, Any]) -> Kept:
    """The state in the file.

    Raises:
        CorruptCheckpoint: the file cannot be read or is damaged.
        InvalidInput: it is the state of another recipe; the first difference is named.
    """
    data = checkpoint.contents(path, "the training's state", HINT)
    try:
        arrays, card = checkpoint.unsealed(data)
        if card["format"] != FORMAT:
            raise ValueError(f"it is of format {card['format']}; {FORMAT} was expected")
        found = checkpoint.digest(arrays)
        if found != card["digest"]:
            raise ValueError(f"its arrays have digest {found[:12]}; {card['digest'][:12]} was expected")
        kept = Kept(dict(card["recipe"]), arrays, dict(card["rest"]))
    except checkpoint.MALFORMED as problem:
        raise CorruptCheckpoint(f"{path} is no whole state of a training: {problem}", HINT) from problem
    _same(path, kept.recipe, recipe)
    return kept


@contextmanager
def taken_apart() -> Iterator[None]:
    """While a state is made into a training again: where it is not made as it should be, another version kept it.

    Raises:
        CorruptCheckpoint: in place of whatever that leads to.
    """
    try:
        yield
    except (*checkpoint.MALFORMED, OverflowError, RuntimeError) as problem:  # torch has its own
        why = f"{type(problem).__name__}: {problem}"
        raise CorruptCheckpoint(f"the training's state cannot be gone on from; {why}", HINT) from problem


def weights(arrays: Mapping[str, NDArray[Any]], prefix: str, layers: Mapping[str, tuple[int, ...]]) -> Arrays:
    """Those below the prefix.

    Raises:
        ValueError: they are no weights of these layers, or not finite.
    """
    found = under(arrays, prefix)
    problem = misfit(found, layers)
    if problem:
        raise ValueError(problem)
    return found


def under(arrays: Mapping[str, NDArray[Any]], prefix: str) -> dict[str, NDArray[Any]]:
    """Those whose names begin so, by the rest of their names."""
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


def _same(path: Path, there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    here = json.loads(json.dumps(here))
    for name in [*there, *(name for name in here if name not in there)]:
        if there.get(name) != here.get(name):
            what = f"{name} is {here.get(name)!r} now and was {there.get(name)!r}"
            if name.startswith("experiment"):
                what = "it is another experiment, or the experiment's files have changed since"
                if name not in here or name not in there:
                    what = f"{'fewer' if name not in here else 'more'} experiments are named now than were"
            raise InvalidInput(
                f"{path} is the state of another training: {what}", "use the same options, or begin anew with --restart"
            )
