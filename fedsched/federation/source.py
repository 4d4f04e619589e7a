"""What an agent shows the federation of itself: who it is, the gradients it gives, the policies it is offered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from numpy.typing import NDArray

from fedsched.core.ids import ClusterName

WIRE_VERSION = 1
"""Version of the stream between agent and aggregator; grows when an older peer could misread a message."""

Arrays = Mapping[str, NDArray[Any]]
"""A policy's weights, or a gradient of them, by name."""


@dataclass(frozen=True, slots=True)
class Hello:
    """How an agent introduces itself; told again whenever one of the numbers changes."""

    cluster: ClusterName
    term: int
    agent_version: str
    policy: str
    """Name of the learned policy that it runs."""
    policy_version: int
    samples: int
    """Decisions it has recorded and could compute a gradient from."""


@dataclass(frozen=True, slots=True)
class PolicyOffer:
    """A version of the policy that the aggregator holds to be the best one."""

    name: str
    version: int
    digest: str
    checkpoint: bytes
    """In the format of the policy's checkpoint files."""
    traceparent: str = ""
    """Trace of the round that made it."""


class Declined(Exception):
    """A learner has nothing to give in this round; the message says why, for the round's record."""


class Gradient(Protocol):
    """A gradient and what it was computed from."""

    @property
    def gradients(self) -> Arrays:
        """One array for each of the policy's, with its name and shape."""

    @property
    def samples(self) -> int:
        """Decisions in the batch."""

    @property
    def loss(self) -> float:
        """Policy loss over the batch."""

    @property
    def entropy(self) -> float:
        """Mean entropy of the policy over the batch."""

    @property
    def mean_reward(self) -> float:
        """Mean reward of the batch's decisions."""


class GradientSource(Protocol):
    """An agent's learner, as the federation sees it. Called from a thread of the federation's."""

    def gradient(self, arrays: Arrays, batch_size: int, seed: int) -> Gradient:
        """The gradient of the policy with these weights over `batch_size` recorded decisions.

        Raises:
            Declined: there is nothing to give.
        """
