"""A learner that steps by itself: after every slot's reward its policy decides with better weights, as in DL2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from fedsched.core.commands import RewardSlot
from fedsched.federation.exchange import metrics_of
from fedsched.federation.loop import step_length
from fedsched.federation.optimiser import ServerOptimiser
from fedsched.federation.source import Arrays, Gradient
from fedsched.learn.learner import ClusterLearner
from fedsched.learn.tensors import one_thread
from fedsched.policy.learnable import Learnable


class SteppingLearner:
    """A cluster's learner with an optimiser of its own.

    Args:
        learner: remembers, and makes gradients.
        arrays: the weights to begin with, of version `version`.
        optimiser: takes the steps.
        batch_size: decisions of each gradient.
        samples_min: steps begin when the rewards of so many are known.
        half_after: after so many steps they are half as long, after twice as many a third; None: all are as long.
        seed: of the batches.
    """

    def __init__(
        self,
        learner: ClusterLearner,
        arrays: Arrays,
        version: int,
        optimiser: ServerOptimiser,
        *,
        batch_size: int,
        samples_min: int,
        half_after: float | None = None,
        seed: int,
    ) -> None:
        self._learner = learner
        self.arrays = arrays
        self.version = version
        """Grows with every step."""
        self.optimiser = optimiser
        self._batch_size = batch_size
        self._samples_min = samples_min
        self._half_after = half_after
        self._seed = seed
        self._policy: Learnable | None = None
        self._notes: list[tuple[tuple[str, float], ...]] = []

    def teach(self, policy: Learnable) -> None:
        """From now on this policy gets the weights; it has them already."""
        self._policy = policy

    def take_notes(self) -> list[tuple[tuple[str, float], ...]]:
        """What the learner said of its batch at each step since the last call."""
        taken, self._notes = self._notes, []
        return taken

    def __len__(self) -> int:
        return len(self._learner)

    @property
    def recorded(self) -> int:
        """As the learner's."""
        return self._learner.recorded

    def record(self, slot: int, samples: Sequence[Any]) -> None:
        """As the learner's."""
        self._learner.record(slot, samples)

    def reward(self, reward: RewardSlot) -> None:
        """Take note, and take a step down the gradient over what is remembered, where there is something new."""
        before = self._learner.recorded
        self._learner.reward(reward)
        if self._learner.recorded == before or len(self._learner) < self._samples_min:
            return
        gradient = self._learner.gradient(self.arrays, self._batch_size, self._seed + self.version)
        with one_thread():
            self.arrays, self.optimiser = self.optimiser.step(
                self.arrays, gradient.gradients, factor=step_length(self._half_after, self.optimiser.given, 1)
            )
        self.version += 1
        self._notes.append(metrics_of(gradient))
        if self._policy is not None:
            self._policy.load(self.version, self.arrays)

    def gradient(self, arrays: Arrays, batch_size: int, seed: int) -> Gradient:
        """As the learner's."""
        return self._learner.gradient(arrays, batch_size, seed)

    def abandon(self) -> None:
        """As the learner's."""
        self._learner.abandon()

    def forget(self) -> None:
        """As the learner's."""
        self._learner.forget()

    def state(self) -> dict[str, NDArray[Any]]:
        """As the learner's."""
        return self._learner.state()

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        """As the learner's."""
        self._learner.restore(state)
