"""Policies as they are configured."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fedsched.config import PolicyConfig
from fedsched.core.decision import Policy
from fedsched.core.speeds import SpeedStatistics
from fedsched.errors import CorruptCheckpoint, InvalidConfiguration
from fedsched.policy import checkpoint, plugins
from fedsched.policy.checkpoint import Checkpoint
from fedsched.policy.dl2 import DL2, Dl2Shape, Explorer
from fedsched.policy.set import Set, SetOptions, SetShape

if TYPE_CHECKING:
    from fedsched.policy.learned_speed import LearnedSpeed

LEARNED_SPEED = "learned_speed"
"""Its name; the class is imported when it is made, because its solver takes seconds to load."""
BUILTINS = {DL2.name: checkpoint.BUILTIN, Set.name: checkpoint.BUILTIN_SET}
"""The weights that ship with the package, by the policy that they are for; no other policy has any."""
_SHAPES: dict[str, type[Dl2Shape | SetShape]] = {DL2.name: Dl2Shape, Set.name: SetShape}
HEURISTICS = ("drf", "fifo", "optimus", "srtf")
"""Those that may decide in place of another policy: without options, without memory, quick."""


def heuristic(name: str) -> Policy:
    """The heuristic of this name; `PolicyConfig.fallback` admits no other."""
    return plugins.make(name, {})


def make(config: PolicyConfig) -> Policy:
    """The configured policy, bare: deadline, checks and fallback are around it, not in it.

    Weights count as version 1 until the aggregator offers newer ones.

    Raises:
        CorruptCheckpoint: its weights cannot be used.
        InvalidConfiguration: it cannot be loaded, or its options are wrong.
    """
    if config.name in BUILTINS:
        return with_weights(config, weights(config.name, config.checkpoint))
    if config.name == LEARNED_SPEED:
        return make_learned_speed(config)
    return plugins.make(config.name, config.options)


def with_weights(
    config: PolicyConfig, first: Checkpoint, version: int = 1, explorer: Explorer | None = None
) -> DL2 | Set:
    """The configured policy with these weights, in place of those that its configuration names.

    Args:
        config: of one of `BUILTINS`.
        version: of the weights.
        explorer: chooses in the network's place now and then; for DL2 only.

    Raises:
        InvalidConfiguration: its options are wrong.
    """
    if config.name == DL2.name:
        return DL2(
            first.arrays, version, shape=first.shape, seed=config.seed, explore=config.explore, explorer=explorer
        )
    options = plugins.options_of(config.name, config.options)
    assert isinstance(options, SetOptions)
    return Set(first.arrays, version, shape=first.shape, seed=config.seed, explore=config.explore, options=options)


def weights_file(name: str, source: str) -> Path:
    """Where a policy's first weights lie.

    Args:
        source: path of a checkpoint, or `builtin` for those that ship with the package.

    Raises:
        InvalidConfiguration: the policy has no weights.
    """
    if name not in BUILTINS:
        known = " or ".join(BUILTINS)
        raise InvalidConfiguration(f"policy {name} has no weights; {known} was expected", f"name {known}")
    return BUILTINS[name] if source == "builtin" else Path(source)


def weights(name: str, source: str) -> Checkpoint:
    """A policy's first weights; see `weights_file`.

    Raises:
        CorruptCheckpoint: the file cannot be used, or is another policy's.
        InvalidConfiguration: the policy has no weights.
    """
    path = weights_file(name, source)
    found = checkpoint.load(path)
    if not isinstance(found.shape, _SHAPES[name]):
        raise CorruptCheckpoint(
            f"checkpoint {path} holds weights of format {found.shape.FORMAT}; "
            f"policy {name} expected {_SHAPES[name].FORMAT}",
            "name a checkpoint of this policy, or the policy that the checkpoint is for",
        )
    return found


def make_learned_speed(config: PolicyConfig) -> LearnedSpeed:
    """The policy with the configured statistics of speeds; `scratch`: with none.

    Raises:
        CorruptCheckpoint: the statistics cannot be used.
        InvalidConfiguration: its options are wrong.
    """
    return with_statistics(config, statistics(config.checkpoint))


def statistics(source: str) -> SpeedStatistics:
    """What `learned_speed` starts from.

    Args:
        source: path of a file, `builtin` for what ships with the package, `scratch` for nothing.

    Raises:
        CorruptCheckpoint: the file cannot be used.
    """
    from fedsched.policy import speed_checkpoint

    if source == "scratch":
        return SpeedStatistics()
    return speed_checkpoint.load(speed_checkpoint.BUILTIN if source == "builtin" else Path(source)).statistics


def with_statistics(config: PolicyConfig, known: SpeedStatistics) -> LearnedSpeed:
    """The configured `learned_speed` with these statistics, in place of those that its configuration names.

    Raises:
        InvalidConfiguration: its options are wrong.
    """
    from fedsched.policy.learned_speed import LearnedSpeed, LearnedSpeedOptions

    options = plugins.options_of(config.name, config.options)
    assert isinstance(options, LearnedSpeedOptions)
    if not config.explore:
        options = options.model_copy(update={"explore": 0.0})
    return LearnedSpeed(options, known, version=1)
