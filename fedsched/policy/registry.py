"""Policies as they are configured."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fedsched.config import PolicyConfig
from fedsched.core.decision import Policy
from fedsched.errors import CorruptCheckpoint
from fedsched.policy import checkpoint, plugins
from fedsched.policy.dl2 import DL2, Shape
from fedsched.policy.set import Set, SetOptions
from fedsched.policy.set import Shape as SetShape

if TYPE_CHECKING:
    from fedsched.policy.learned_speed import LearnedSpeed

LEARNED_SPEED = "learned_speed"
"""Its name; the class is imported when it is made, because its solver takes seconds to load."""
HEURISTICS = ("drf", "fifo", "optimus", "srtf")
"""Those that may decide in place of another policy: without options, without memory, quick."""


def heuristic(name: str) -> Policy:
    """The heuristic of this name; `PolicyConfig.fallback` admits no other."""
    return plugins.make(name, {})


def make(config: PolicyConfig) -> Policy:
    """The configured policy, bare: deadline, checks and fallback are around it, not in it.

    Raises:
        CorruptCheckpoint: its weights cannot be used.
        InvalidConfiguration: it cannot be loaded, or its options are wrong.
    """
    if config.name == DL2.name:
        return make_dl2(config)
    if config.name == LEARNED_SPEED:
        return make_learned_speed(config)
    if config.name == Set.name:
        return make_set(config)
    return plugins.make(config.name, config.options)


def make_dl2(config: PolicyConfig) -> DL2:
    """DL2 with the configured weights, which count as version 1 until the aggregator offers newer ones.

    Raises:
        CorruptCheckpoint: the weights cannot be used.
    """
    path = checkpoint.BUILTIN if config.checkpoint == "builtin" else Path(config.checkpoint)
    first = _load(path, DL2.name, Shape)
    return DL2(first.arrays, shape=first.shape, seed=config.seed, explore=config.explore)


def make_learned_speed(config: PolicyConfig) -> LearnedSpeed:
    """The policy with the configured statistics of speeds.

    Raises:
        CorruptCheckpoint: the statistics cannot be used.
        InvalidConfiguration: its options are wrong.
    """
    from fedsched.policy import speed_checkpoint
    from fedsched.policy.learned_speed import LearnedSpeed, LearnedSpeedOptions

    path = speed_checkpoint.BUILTIN if config.checkpoint == "builtin" else Path(config.checkpoint)
    options = plugins.options_of(config.name, config.options)
    assert isinstance(options, LearnedSpeedOptions)
    if not config.explore:
        options = options.model_copy(update={"explore": 0.0})
    return LearnedSpeed(options, speed_checkpoint.load(path).statistics, version=1)


def make_set(config: PolicyConfig) -> Set:
    """The policy `set` with the configured weights; see `make_dl2`.

    Raises:
        CorruptCheckpoint: the weights cannot be used.
        InvalidConfiguration: its options are wrong.
    """
    path = checkpoint.BUILTIN_SET if config.checkpoint == "builtin" else Path(config.checkpoint)
    first = load_set(path)
    options = plugins.options_of(config.name, config.options)
    assert isinstance(options, SetOptions)
    return Set(first.arrays, shape=first.shape, seed=config.seed, explore=config.explore, options=options)


def load_set(path: Path) -> checkpoint.Checkpoint:
    """Weights of the policy `set`.

    Raises:
        CorruptCheckpoint: the file cannot be used, or is another policy's.
    """
    return _load(path, Set.name, SetShape)


def _load(path: Path, name: str, shape: type[Shape] | type[SetShape]) -> checkpoint.Checkpoint:
    found = checkpoint.load(path)
    if not isinstance(found.shape, shape):
        raise CorruptCheckpoint(
            f"checkpoint {path} holds weights of format {found.shape.FORMAT}; policy {name} expected {shape.FORMAT}",
            "name a checkpoint of this policy, or the policy that the checkpoint is for",
        )
    return found
