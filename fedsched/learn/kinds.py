"""The policies that can be taught: fresh weights, learner and explorer of each. A new one is a line in `TEACHABLE`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedsched.config import LearningConfig, PolicyConfig, PromotionConfig
from fedsched.core.decision import Policy
from fedsched.errors import InvalidInput
from fedsched.learn.exploration import JobAware
from fedsched.learn.learner import ClusterLearner
from fedsched.policy import registry
from fedsched.policy import set as set_policy
from fedsched.policy.checkpoint import Checkpoint
from fedsched.policy.dl2 import DL2, Dl2Shape, Explorer, initial
from fedsched.policy.learnable import Learnable
from fedsched.policy.set import Set

if TYPE_CHECKING:  # what learns takes seconds to load, and most who ask here decide only
    from fedsched.learn.actor_critic import Learner
    from fedsched.learn.clipped import SetLearner

AT_ONCE = PromotionConfig(accept="at_once")
"""Nothing is learned beside what the federation, if there is one, makes of it."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One policy that can be taught."""

    fresh: Callable[[int, int | None], Checkpoint]
    """Weights that know nothing, from a seed; for so many jobs at once, where that matters and is said."""
    learner: Callable[[Any, LearningConfig, int], ClusterLearner]
    """Its learner, for weights of that shape and gradients over so many decisions."""
    explorer: Callable[[], Explorer] | None
    """Makes what chooses in its place now and then; None: its own draws are all the exploration that it has."""

    def policy(self, config: PolicyConfig, weights: Checkpoint, version: int, learning: LearningConfig) -> Learnable:
        """The configured policy with these weights, as it decides while it learns."""
        explorer = self.explorer() if self.explorer and config.explore and learning.exploration else None
        return registry.with_weights(config, weights, version, explorer)

    def pupil(
        self, first: Checkpoint, learning: LearningConfig, batch_size: int, promotion: PromotionConfig
    ) -> ClusterLearner:
        """What teaches it in a cluster of a federation, beginning with these weights."""
        learner = self.learner(first.shape, learning, batch_size)
        if promotion.accept != "own_track":
            return learner
        from fedsched.learn.own_track import OwnTrack

        return OwnTrack(learner, first, promotion.own)


def _dl2_learner(shape: Dl2Shape, config: LearningConfig, batch_size: int) -> Learner:
    from fedsched.learn.actor_critic import Learner

    return Learner(
        shape,
        config.capacity(batch_size),
        prioritised=config.replay == "prioritised",
        entropy_weight=config.entropy_weight,
        baseline=config.baseline,
        per_job=config.reward == "job",
        discount=config.discount,
    )


def _dl2_fresh(seed: int, window: int | None) -> Checkpoint:
    # The reference's rule for the width: two thirds of the inputs, twice.
    shape = Dl2Shape() if window is None else Dl2Shape(window, (4 * window, 4 * window))
    return Checkpoint(initial(shape, seed), shape, {"seed": seed})


def _set_learner(shape: set_policy.SetShape, config: LearningConfig, batch_size: int) -> SetLearner:
    from fedsched.learn.clipped import SetLearner

    return SetLearner(config.capacity(batch_size))


def _set_fresh(seed: int, window: int | None) -> Checkpoint:
    shape = set_policy.SetShape()
    return Checkpoint(set_policy.initial(shape, seed), shape, {"seed": seed})


TEACHABLE = {
    DL2.name: Kind(_dl2_fresh, _dl2_learner, JobAware),
    Set.name: Kind(_set_fresh, _set_learner, None),
}


def kind_of(name: str) -> Kind:
    """How the policy of this name is taught.

    Raises:
        InvalidInput: it has no weights.
    """
    if name not in TEACHABLE:
        known = ", ".join(TEACHABLE)
        raise InvalidInput(f"policy {name} has no weights to teach; {known} was expected", f"name {known}")
    return TEACHABLE[name]


def first_weights(name: str, source: str, seed: int, window: int | None = None) -> Checkpoint:
    """The weights that teaching starts from.

    Args:
        source: path of a checkpoint, `builtin` for those that ship with the package, `scratch` for fresh ones.
        seed: of fresh ones.
        window: of fresh ones, see `Kind.fresh`.

    Raises:
        InvalidInput: the policy has no weights.
        CorruptCheckpoint: the file cannot be used, or is another policy's.
    """
    kind = kind_of(name)
    return kind.fresh(seed, window) if source == "scratch" else registry.weights(name, source)


def make(config: PolicyConfig, learning: LearningConfig) -> Policy:
    """The configured policy as it decides where it learns; one that cannot be taught, as everywhere.

    Raises:
        CorruptCheckpoint: its weights cannot be used.
        InvalidConfiguration: it cannot be loaded, or its options are wrong.
    """
    if config.name not in TEACHABLE:
        return registry.make(config)
    return TEACHABLE[config.name].policy(config, registry.weights(config.name, config.checkpoint), 1, learning)


def learner_for(
    policy: Policy, learning: LearningConfig, batch_size: int, promotion: PromotionConfig = AT_ONCE
) -> ClusterLearner | None:
    """What teaches a policy that decides; None where it cannot be taught."""
    kind = TEACHABLE.get(policy.name)
    if kind is None or not isinstance(policy, Learnable):
        return None
    first = Checkpoint(policy.weights, policy.shape, {})
    return kind.pupil(first, learning, batch_size, promotion)
