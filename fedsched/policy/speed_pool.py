"""What all clusters have seen of speeds, each cluster's sums by themselves, as one value that is merged in any order.

A cluster gives everything that it has seen since it began, never what came since the last time. So an update that is
lost, late or comes twice changes nothing: of each cluster's parts the newest takes the place of the ones before. A part
belongs to a cluster and to an *epoch*: the term under which the memory began that it comes from. An agent that lost its
memory begins another epoch, and what it gave before still counts beside it; one that kept its memory goes on with its
epoch. Within an epoch the part of the later term, and within a term the later one, is the newer.

Sums are of classes, which users name (`job_type`): no job and no time of day is in them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsched.core.ids import ClusterName
from fedsched.core.speeds import SpeedStatistics
from fedsched.errors import CorruptCheckpoint
from fedsched.policy import speed_checkpoint
from fedsched.policy.checkpoint import MALFORMED, Made, contents, digest, seal, unsealed
from fedsched.policy.speed_checkpoint import SpeedCheckpoint

FORMAT = "fedsched/learned_speed_pool/1"
HINT = "restore it from a backup"
EPOCHS_KEPT = 3
"""Of each cluster, the newest."""
CELLS_MAX = 5_000
"""Of one part."""
PART_BYTES_MAX = 1 << 20
NAME_MAX = 200
"""Letters of a class's name."""
STATISTICS = "statistics"
"""Name of the array that carries a part."""

NOBODY = ClusterName("")
Key = tuple[ClusterName, int]
"""Cluster and epoch."""


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """What a cluster has seen in one epoch, up to some moment."""

    epoch: int
    term: int
    """Of the agent that gives it."""
    number: int
    """Grows with all that this agent sees."""
    period_s: float
    """Length of the periods that its cells name."""
    statistics: SpeedStatistics

    @property
    def age(self) -> tuple[int, int, str]:
        """Greater is newer; what is equally new is told apart by what it holds, so that all keep the same one."""
        return (self.term, self.number, self.statistics.digest)

    def to_array(self) -> NDArray[np.uint8]:
        """As it travels."""
        made = {"epoch": self.epoch, "term": self.term, "number": self.number, "period_s": self.period_s}
        return np.frombuffer(SpeedCheckpoint(self.statistics, made).to_bytes(), np.uint8)


def part_of(arrays: Mapping[str, NDArray[Any]], size_max: int = PART_BYTES_MAX) -> Part:
    """The part that a cluster sends.

    Raises:
        ValueError: it cannot be used; the message says why.
    """
    if sorted(arrays) != [STATISTICS]:
        raise ValueError(f"the arrays are {', '.join(sorted(arrays)) or 'none'}; {STATISTICS} was expected")
    array = arrays[STATISTICS]
    if array.dtype != np.uint8 or array.ndim != 1 or array.size > size_max:
        raise ValueError(
            f"{STATISTICS} is {array.dtype} of shape {list(array.shape)}; at most {size_max} bytes were expected"
        )
    try:
        sent = speed_checkpoint.from_bytes(array.tobytes(), "the update")
    except CorruptCheckpoint as problem:
        raise ValueError(problem.message) from problem
    part = Part(
        epoch=_whole(sent.made, "epoch"),
        term=_whole(sent.made, "term"),
        number=_whole(sent.made, "number"),
        period_s=_duration(sent.made, "period_s"),
        statistics=sent.statistics,
    )
    problem_found = _problem_with(part)
    if problem_found:
        raise ValueError(problem_found)
    return part


def _whole(made: Made, name: str) -> int:
    value = made.get(name)
    if not isinstance(value, int) or not 0 <= value < 1 << 62:
        raise ValueError(f"{name} is {value!r}; a whole number was expected")
    return value


def _duration(made: Made, name: str) -> float:
    value = made.get(name)
    if not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"{name} is {value!r}; seconds were expected")
    return float(value)


def _problem_with(part: Part) -> str:
    if part.epoch > part.term:
        return f"its epoch, {part.epoch}, is after the term, {part.term}"
    if len(part.statistics) > CELLS_MAX:
        return f"it has {len(part.statistics)} cells; {CELLS_MAX} at most were expected"
    for cell, _ in part.statistics:
        if max(len(cell.job_type), len(cell.accelerator)) > NAME_MAX:
            return f"a class's name begins with {cell.job_type[:40]!r} and is longer than {NAME_MAX} letters"
    return ""


@dataclass(frozen=True, slots=True, eq=False)
class Pool:
    """Parts by cluster and epoch: an immutable value."""

    parts: Mapping[Key, Part] = field(default_factory=dict)
    made: Made = field(default_factory=dict)
    """Its story."""

    @property
    def arrays(self) -> Mapping[str, NDArray[Any]]:
        """None: what agents give does not depend on what they have."""
        return {}

    @property
    def digest(self) -> str:
        """SHA-256 of all parts, whatever their story."""
        return digest(self._tensors())

    @property
    def total(self) -> SpeedStatistics:
        """All that was seen, exactly."""
        return SpeedStatistics().merged(part.statistics for part in self.parts.values())

    def merged(self, others: Iterable[tuple[ClusterName, Part]]) -> Pool:
        """With these parts, where they are news."""
        parts = dict(self.parts)
        for cluster, part in others:
            known = parts.get((cluster, part.epoch))
            if known is None or part.age > known.age:
                parts[cluster, part.epoch] = part
        kept: dict[Key, Part] = {}
        for cluster in sorted({cluster for cluster, _ in parts}):
            epochs = sorted((epoch for name, epoch in parts if name == cluster), reverse=True)
            kept.update(((cluster, epoch), parts[cluster, epoch]) for epoch in epochs[:EPOCHS_KEPT])
        return Pool(kept, self.made)

    def replaced(self, arrays: Mapping[str, NDArray[Any]], made: Made) -> Pool:
        """The same parts with this story."""
        return Pool(self.parts, dict(made))

    def to_bytes(self) -> bytes:
        """The file's contents; the same pool and story always give the same bytes."""
        tensors = self._tensors()
        return seal(tensors, {"format": FORMAT, "digest": digest(tensors), "made": dict(self.made)})

    def _tensors(self) -> dict[str, NDArray[np.uint8]]:
        return {f"{cluster}/{epoch}": part.to_array() for (cluster, epoch), part in self.parts.items()}


def load(path: Path) -> Pool:
    """Read and verify a pool's file, or one of statistics that no cluster has given: these are the part of nobody.

    Raises:
        CorruptCheckpoint: it cannot be read, or holds neither.
    """
    data = contents(path, "statistics", HINT)
    try:
        known = speed_checkpoint.from_bytes(data, str(path))
    except CorruptCheckpoint:
        return from_bytes(data, str(path))
    return Pool({(NOBODY, 0): Part(0, 0, 0, 0.0, known.statistics)}, known.made)


def from_bytes(data: bytes, origin: str = "received statistics") -> Pool:
    """Verify a pool's bytes; `origin` names them in errors.

    Raises:
        CorruptCheckpoint: they are damaged or none of ours.
    """
    try:
        tensors, card = unsealed(data)
        if card["format"] != FORMAT:
            raise ValueError(f"made for {card['format']}")
        if digest(tensors) != card["digest"]:
            raise ValueError("its parts do not have the digest that it names")
        parts = {}
        for name in sorted(tensors):
            cluster, _, epoch = name.rpartition("/")
            part = part_of({STATISTICS: tensors[name]}, size_max=len(data))
            if part.epoch != int(epoch):
                raise ValueError(f"part {name} is of epoch {part.epoch}")
            parts[ClusterName(cluster), part.epoch] = part
        return Pool(parts, dict(card["made"]))
    except MALFORMED as problem:
        raise CorruptCheckpoint(
            f"{origin} is no whole file of clusters' statistics ({type(problem).__name__}: {problem}); "
            f"expected a safetensors file of format {FORMAT}",
            HINT,
        ) from problem
