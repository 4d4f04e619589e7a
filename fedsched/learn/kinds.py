"""The policies that can be taught: how weights, policy and learner of each are made. A new one is a line in `KINDS`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fedsched.errors import InvalidInput
from fedsched.learn.actor_critic import Learner
from fedsched.learn.clipped import SetLearner
from fedsched.learn.config import LearningConfig
from fedsched.learn.exploration import JobAware
from fedsched.learn.learner import ClusterLearner
from fedsched.policy import checkpoint
from fedsched.policy import set as set_policy
from fedsched.policy.checkpoint import BUILTIN, BUILTIN_SET, Checkpoint
from fedsched.policy.dl2 import DL2, Shape, initial
from fedsched.policy.learnable import Learnable
from fedsched.policy.set import Set


@dataclass(frozen=True, slots=True)
class Kind:
    """One policy that can be taught."""

    fresh: Callable[[int, int | None], Checkpoint]
    """Weights that know nothing, from a seed; for so many jobs at once, where that matters and is said."""
    policy: Callable[[Checkpoint, int, int, bool, bool], Learnable]
    """The policy with these weights: checkpoint, version, seed, whether it samples, whether it explores beyond that."""
    learner: Callable[[Checkpoint, LearningConfig, int], ClusterLearner]
    """Its learner, for gradients over so many decisions."""


def _dl2(weights: Checkpoint, version: int, seed: int, explore: bool, exploration: bool) -> DL2:
    explorer = JobAware() if explore and exploration else None
    return DL2(weights.arrays, version, shape=weights.shape, seed=seed, explore=explore, explorer=explorer)


def _dl2_learner(weights: Checkpoint, config: LearningConfig, batch_size: int) -> Learner:
    return Learner(
        weights.shape,
        config.capacity(batch_size),
        prioritised=config.replay == "prioritised",
        entropy_weight=config.entropy_weight,
        baseline=config.baseline,
    )


def _dl2_fresh(seed: int, window: int | None) -> Checkpoint:
    # The reference's rule for the width: two thirds of the inputs, twice.
    shape = Shape() if window is None else Shape(window, (4 * window, 4 * window))
    return Checkpoint(initial(shape, seed), shape, {"seed": seed})


def _set(weights: Checkpoint, version: int, seed: int, explore: bool, exploration: bool) -> Set:
    return Set(weights.arrays, version, shape=weights.shape, seed=seed, explore=explore)


def _set_learner(weights: Checkpoint, config: LearningConfig, batch_size: int) -> SetLearner:
    return SetLearner(config.capacity(batch_size))


def _set_fresh(seed: int, window: int | None) -> Checkpoint:
    shape = set_policy.Shape()
    return Checkpoint(set_policy.initial(shape, seed), shape, {"seed": seed})


KINDS = {
    DL2.name: Kind(_dl2_fresh, _dl2, _dl2_learner),
    Set.name: Kind(_set_fresh, _set, _set_learner),
}
BUILTINS = {DL2.name: BUILTIN, Set.name: BUILTIN_SET}
"""The weights of each that ship with the package."""


def kind_of(name: str) -> Kind:
    """How the policy of this name is taught.

    Raises:
        InvalidInput: it has no weights.
    """
    if name not in KINDS:
        known = ", ".join(KINDS)
        raise InvalidInput(f"policy {name} has no weights to teach; {known} was expected", f"name {known}")
    return KINDS[name]


def first_weights(name: str, source: str, seed: int, window: int | None = None) -> Checkpoint:
    """The weights that teaching starts from.

    Args:
        source: path of a checkpoint, `builtin` for those that ship with the package, `scratch` for fresh ones.
        seed: of fresh ones.
        window: of fresh ones, see `Kind.fresh`.

    Raises:
        InvalidInput: the policy has no weights.
        CorruptCheckpoint: the file cannot be used.
    """
    kind = kind_of(name)
    if source == "scratch":
        return kind.fresh(seed, window)
    return checkpoint.load(BUILTINS[name] if source == "builtin" else Path(source))
