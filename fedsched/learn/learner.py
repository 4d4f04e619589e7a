"""What teaches a policy in its cluster, as everybody sees it who runs the cluster; importing it loads no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from numpy.typing import NDArray

from fedsched.core.commands import RewardSlot
from fedsched.federation.source import Arrays, Gradient


class ClusterLearner(Protocol):
    """Turns what a cluster's policy chose, and what that brought, into gradients."""

    def __len__(self) -> int:
        """How many decisions it remembers with their reward."""

    @property
    def recorded(self) -> int:
        """How many it was ever told, forgotten ones included."""

    def record(self, slot: int, samples: Sequence[Any]) -> None:
        """Keep a slot's choices, the policy's `last_trace`, until their reward is known."""

    def reward(self, reward: RewardSlot) -> None:
        """What a slot brought."""

    def gradient(self, arrays: Arrays, batch_size: int, seed: int) -> Gradient:
        """The gradient at these weights; the same memory, weights and seed give the same one.

        Raises:
            ValueError: nothing is remembered yet.
        """

    def abandon(self) -> None:
        """Choices that still wait for a reward will never get one: the run that they were made in is over."""

    def forget(self) -> None:
        """Remember nothing, as after a restart of the process."""

    def state(self) -> dict[str, NDArray[Any]]:
        """All that the next gradients depend on, by name."""

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Go on from what `state` gave.

        Raises:
            ValueError: it is of a learner of another size.
        """
