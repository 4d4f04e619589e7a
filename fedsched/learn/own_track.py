"""A cluster's learner that also learns alone: beside the federation's weights it keeps weights of its own.

After every slot's reward they take a step down the gradient over what the cluster remembers, as they would if there
were no federation, and are offered as a version like the federation's; see `fedsched.core.versions` for which of both
decides. What is remembered are the decisions of whichever did, so what is learnt here from another's decisions is
weighed by how likely the own weights would have made them (DL2's and `set`'s gradients do that).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fedsched.core.commands import RewardSlot
from fedsched.core.versions import OWN, Version
from fedsched.federation.loop import step_length
from fedsched.federation.optimiser import ServerOptimiser
from fedsched.federation.source import Arrays, Gradient
from fedsched.learn.learner import ClusterLearner
from fedsched.learn.tensors import one_thread
from fedsched.policy.checkpoint import Checkpoint
from fedsched.policy.learnable import Learnable

_MINE = "own/"
"""What the names of its own state begin with."""


class Steps(Protocol):
    """How configuration says that the own weights step; see `fedsched.config.OwnTrackConfig`."""

    @property
    def learning_rate(self) -> float:
        """Step size of Adam."""

    @property
    def half_after(self) -> float | None:
        """As in rounds."""

    @property
    def batch_size(self) -> int:
        """Decisions of each gradient."""

    @property
    def samples_min(self) -> int:
        """Steps begin when the rewards of so many are known."""


class OwnTrack:
    """A learner with weights of its own.

    Args:
        learner: remembers, and makes gradients, for the federation too.
        first: weights to begin with.
        steps: that they take.
    """

    def __init__(self, learner: ClusterLearner, first: Checkpoint, steps: Steps) -> None:
        self._learner = learner
        self._steps = steps
        self._weights = first
        self._optimiser = ServerOptimiser(steps.learning_rate)
        self._policy: Learnable | None = None
        self._offered: Callable[[Version, bytes], None] = lambda version, data: None

    def join(self, policy: Learnable, offered: Callable[[Version, bytes], None]) -> None:
        """From now on this policy decides in the cluster, and own versions are offered there."""
        self._policy, self._offered = policy, offered

    @property
    def weights(self) -> Checkpoint:
        """Its own, now."""
        return self._weights

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
        """Take note, take a step where there is something new, and offer what came of it."""
        before = self._learner.recorded
        self._learner.reward(reward)
        if self._learner.recorded == before or len(self._learner) < self._steps.samples_min:
            return
        taken, arrays = self._optimiser.given, self._weights.arrays
        gradient = self._learner.gradient(arrays, self._steps.batch_size, taken)
        length = step_length(self._steps.half_after, taken, 1)
        with one_thread():
            arrays, optimiser = self._optimiser.step(arrays, gradient.gradients, factor=length)
        if not all(bool(np.isfinite(array).all()) for array in arrays.values()):
            return  # they go on from where they were, as a round's do
        self._optimiser = optimiser
        self._weights = made = self._weights.replaced(arrays, {"track": OWN, "steps": taken + 1})
        self._offered(Version(self._policy.name if self._policy else "", 0, made.digest, OWN), made.to_bytes())

    def gradient(self, arrays: Arrays, batch_size: int, seed: int) -> Gradient:
        """As the learner's: at the federation's weights."""
        return self._learner.gradient(arrays, batch_size, seed)

    def abandon(self) -> None:
        """As the learner's."""
        self._learner.abandon()

    def forget(self) -> None:
        """As the learner's; the own weights are those that decide, which were no worse, and begin anew from there."""
        self._learner.forget()
        self._optimiser = ServerOptimiser(self._steps.learning_rate)
        if self._policy is not None:
            self._weights = self._weights.replaced(self._policy.weights, {"track": OWN, "steps": 0})

    def state(self) -> dict[str, NDArray[Any]]:
        """The learner's, the own weights and the moments of their steps."""
        optimiser = np.frombuffer(self._optimiser.to_bytes(), np.uint8)
        own = {f"{_MINE}weights/{name}": array for name, array in self._weights.arrays.items()}
        return {**self._learner.state(), **own, f"{_MINE}optimiser": optimiser}

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Go on from what `state` gave.

        Raises:
            ValueError: it is of a learner of another size.
        """
        self._learner.restore({name: array for name, array in state.items() if not name.startswith(_MINE)})
        prefix = f"{_MINE}weights/"
        arrays = {name.removeprefix(prefix): array for name, array in state.items() if name.startswith(prefix)}
        data = state[f"{_MINE}optimiser"].tobytes()
        digest = hashlib.sha256(data).hexdigest()
        self._optimiser = ServerOptimiser.from_bytes(self._steps.learning_rate, data, digest)
        self._weights = self._weights.replaced(arrays, {"track": OWN, "steps": self._optimiser.given})
