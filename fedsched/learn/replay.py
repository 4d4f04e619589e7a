"""Remembers what was decided and what it brought, and draws from it: uniformly or by priority."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsched.policy.dl2 import ROWS, DecisionSample, Dl2Shape
from fedsched.policy.learnable import Array


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Transitions side by side, as the learner computes on them."""

    indices: NDArray[np.int64]
    """(n,): where they lie in the replay memory."""
    states: Array
    """(n, 6, J), raw."""
    masks: NDArray[np.bool_]
    """(n, 3J+1)."""
    actions: NDArray[np.int64]
    """(n,): index of the action taken."""
    behaviour: Array
    """(n,): probability of the action under the policy that took it."""
    rewards: Array
    """(n,): returns; without a discount the reward of the decision's own slot."""
    weights: Array
    """(n,): importance of each transition; all 1 where drawing was uniform."""


class Replay:
    """A ring of transitions with uniform or prioritised drawing (DL2's `prioritized_memory.py`).

    Priorities as there: max(1, reward - mean stored reward) when new, min(|advantage| + 0.01, 4)^0.9 after use; one
    draw from each of n equal segments of the cumulated priority; weight (p / p_min)^-beta with beta growing from 0.1
    by 0.0001 per batch to 1. The cumulated priority is an array instead of a sum tree: at this size that is no slower.
    """

    def __init__(self, shape: Dl2Shape, capacity: int = 8192, *, prioritised: bool = True) -> None:
        self._prioritised = prioritised
        self._capacity = capacity
        self._states: Array = np.zeros((capacity, ROWS, shape.window), dtype=np.float32)
        self._masks = np.zeros((capacity, shape.actions), dtype=np.bool_)
        self._actions = np.zeros(capacity, dtype=np.int64)
        self._behaviour: Array = np.zeros(capacity, dtype=np.float32)
        self._rewards: Array = np.zeros(capacity, dtype=np.float32)
        self._priorities = np.zeros(capacity, dtype=np.float64)
        self._next = 0
        self._size = 0
        self._beta = 0.1

    def __len__(self) -> int:
        return self._size

    def add(self, samples: Sequence[DecisionSample], rewards: Sequence[float]) -> None:
        """Remember choices and what each earned. The oldest make room."""
        for sample, reward in zip(samples, rewards, strict=True):
            mean = self.mean_reward
            at = self._next
            self._states[at] = sample.state
            self._masks[at] = sample.mask
            self._actions[at] = sample.action
            self._behaviour[at] = sample.probability
            self._rewards[at] = reward
            self._priorities[at] = max(1.0, reward - mean)
            self._next = (at + 1) % self._capacity
            self._size = min(self._size + 1, self._capacity)

    def draw(self, count: int, chance: Random) -> Batch:
        """At most `count` transitions, fewer where fewer are remembered; uniform draws are without replacement."""
        count = min(count, self._size)
        if self._prioritised:
            indices, weights = self._by_priority(count, chance)
        else:
            indices = np.array(chance.sample(range(self._size), count), dtype=np.int64)
            weights = np.ones(count, dtype=np.float32)
        return Batch(
            indices,
            self._states[indices],
            self._masks[indices],
            self._actions[indices],
            self._behaviour[indices],
            self._rewards[indices],
            weights,
        )

    def _by_priority(self, count: int, chance: Random) -> tuple[NDArray[np.int64], Array]:
        cumulated = np.cumsum(self._priorities[: self._size])
        points = np.array([(segment + chance.random()) / count for segment in range(count)]) * cumulated[-1]
        indices = np.minimum(np.searchsorted(cumulated, points, side="right"), self._size - 1)
        least = self._priorities[: self._size].min()
        weights = (self._priorities[indices] / least) ** -self._beta
        self._beta = min(1.0, self._beta + 1e-4)
        return indices, weights.astype(np.float32)

    @property
    def mean_reward(self) -> float:
        """Of what is remembered; 0 where nothing is."""
        return float(self._rewards[: self._size].mean()) if self._size else 0.0

    def clear(self) -> None:
        """Remember nothing."""
        self._next = self._size = 0
        self._beta = 0.1

    def state(self) -> dict[str, NDArray[Any]]:
        """All that the next draws depend on, by name."""
        kept = {name: np.array(column[: self._size]) for name, column in self._columns().items()}
        return {**kept, "next": np.array(self._next, dtype=np.int64), "beta": np.array(self._beta)}

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Go on from what `state` gave.

        Raises:
            ValueError: it does not fit into this memory.
        """
        size = len(state["actions"])
        for name, column in self._columns().items():
            if size > self._capacity or state[name].shape[1:] != column.shape[1:]:
                raise ValueError(f"{name} is {state[name].shape}; at most {column.shape} fits")
            column[:size] = state[name]
        self._size, self._next, self._beta = size, int(state["next"].item()), float(state["beta"].item())

    def _columns(self) -> dict[str, NDArray[Any]]:
        return {
            "states": self._states,
            "masks": self._masks,
            "actions": self._actions,
            "behaviour": self._behaviour,
            "rewards": self._rewards,
            "priorities": self._priorities,
        }

    def used(self, batch: Batch, advantages: Array) -> None:
        """Learn how surprising these transitions were, for the next draw."""
        self._priorities[batch.indices] = np.minimum(np.abs(advantages) + 0.01, 4.0) ** 0.9
