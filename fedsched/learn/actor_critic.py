"""DL2's online learning: REINFORCE with a value baseline and an entropy bonus, on what really happened to the jobs.

As in the reference, every choice of a slot earns that slot's reward, the sum of the jobs' normalised progress, without
discount or bootstrap (both can be chosen otherwise: a job's own progress, and the paper's discounted sum over later
slots): target = r, advantage = r - V(s), value loss = mean (V - r)^2, entropy weight 0.1 averaged over
the 3J+1 actions. Departures:

* log-probabilities are those of the present network over what was legal. The reference feeds the stored ones in place
  of the network's output, which is the gradient at an older policy, back-propagated through newer weights.
* A replayed choice may stem from older weights; its term is weighted by pi_now(a) / pi_then(a), truncated at 2, which
  bounds the variance (truncated importance sampling).
* The learner computes gradients, it does not step: the optimiser sits where gradients of all clusters come together.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from fedsched.core.commands import RewardSlot
from fedsched.core.ids import stream
from fedsched.learn.replay import Batch, Replay
from fedsched.learn.tensors import one_thread, parameters, to_arrays
from fedsched.policy.dl2 import DecisionSample, Dl2Shape, features, forward
from fedsched.policy.learnable import Array, Arrays

ENTROPY_WEIGHT = 0.1
RATIO_MAX = 2.0
LATE_MIN = 0.01
"""Rewards that would count less than this are too late to count."""
PENDING_SLOTS_MAX = 64
"""Slots that may wait for their reward; older ones are forgotten (the agent was cut off meanwhile)."""


@dataclass(frozen=True, slots=True, eq=False)
class BatchGradient:
    """What one cluster's experience says about given weights."""

    gradients: dict[str, Array]
    """Of the loss with respect to every weight of both networks; mean over the samples."""
    samples: int
    loss: float
    """Of the policy, entropy bonus included."""
    value_loss: float
    entropy: float
    """Mean entropy of the policy over what was legal, in nats."""
    mean_reward: float


class _Ripening:
    """A slot's choices, to which later slots still add."""

    def __init__(self, slot: int, samples: tuple[DecisionSample, ...], rewards: list[float]) -> None:
        self.slot = slot
        self.samples = samples
        self.returns = rewards

    def add(self, factor: float, rewards: list[float]) -> None:
        self.returns = [sum_ + factor * reward for sum_, reward in zip(self.returns, rewards, strict=True)]


class Learner:
    """Turns a cluster's decisions and rewards into gradients. All methods may be called from any thread.

    Args:
        capacity: decisions that are remembered; the oldest give way.
        prioritised: batches are drawn by surprise (DL2, section 4.3), not evenly.
        entropy_weight: of the bonus for staying undecided.
        baseline: what a return is compared with: the value network's guess, or the mean of what is remembered.
        per_job: a choice earns the progress of the job that it was about, in place of the sum over all jobs.
        discount: what a later slot's reward counts, per slot, in [0, 1).
    """

    def __init__(
        self,
        shape: Dl2Shape,
        capacity: int = 8192,
        *,
        prioritised: bool = True,
        entropy_weight: float = ENTROPY_WEIGHT,
        baseline: Literal["value", "mean"] = "value",
        per_job: bool = False,
        discount: float = 0.0,
    ) -> None:
        self._lock = threading.Lock()
        self._replay = Replay(shape, capacity, prioritised=prioritised)
        self._entropy_weight = entropy_weight
        self._baseline = baseline
        self._per_job = per_job
        self._discount = discount
        self._ripening: list[_Ripening] = []
        """By slot, those whose later rewards still count; empty without a discount."""
        self._pending: dict[int, tuple[DecisionSample, ...]] = {}
        self._recorded = 0

    def __len__(self) -> int:
        """How many transitions it remembers."""
        with self._lock:
            return len(self._replay)

    @property
    def recorded(self) -> int:
        """How many transitions it was ever told, forgotten ones included."""
        with self._lock:
            return self._recorded

    def record(self, slot: int, samples: Sequence[DecisionSample]) -> None:
        """Keep a slot's choices until its reward is known."""
        with self._lock:
            self._pending[slot] = tuple(samples)
            while len(self._pending) > PENDING_SLOTS_MAX:
                del self._pending[min(self._pending)]

    def reward(self, reward: RewardSlot) -> None:
        """What a slot brought. A slot whose choices were not ours (a fallback decided) teaches nothing."""
        with self._lock:
            for waiting in self._ripening:
                factor = self._discount ** (reward.slot - waiting.slot)
                waiting.add(factor, self._earned(waiting.samples, reward))
            samples = self._pending.pop(reward.slot, ())
            self._ripening.append(_Ripening(reward.slot, samples, self._earned(samples, reward)))
            while self._ripening and self._discount ** (reward.slot + 1 - self._ripening[0].slot) < LATE_MIN:
                self._remember(self._ripening.pop(0))

    def _earned(self, samples: Sequence[DecisionSample], reward: RewardSlot) -> list[float]:
        """What each of the choices gets of a slot's reward."""
        slot = sum(progress for _, progress in sorted(reward.progress))
        if not self._per_job:
            return [slot] * len(samples)
        jobs = dict(reward.progress)
        mean = slot / len(jobs) if jobs else 0.0
        return [mean if sample.job_id is None else jobs.get(sample.job_id, 0.0) for sample in samples]

    def _remember(self, ripe: _Ripening) -> None:
        self._replay.add(ripe.samples, ripe.returns)
        self._recorded += len(ripe.samples)

    def gradient(self, arrays: Arrays, batch_size: int, seed: int) -> BatchGradient:
        """The gradient of both losses at these weights, over a batch drawn from memory.

        The same memory, weights and seed give the same gradient.

        Raises:
            ValueError: nothing is remembered yet.
        """
        with self._lock, one_thread():
            if not len(self._replay):
                raise ValueError("there is no transition to learn from yet")
            batch = self._replay.draw(batch_size, stream(seed, "actor-critic/batch"))
            mean = self._replay.mean_reward if self._baseline == "mean" else None
            update, advantages = gradient_on(arrays, batch, entropy_weight=self._entropy_weight, baseline=mean)
            self._replay.used(batch, advantages)
        return update

    def abandon(self) -> None:
        """Choices that still wait for a reward will never get one: the run that they were made in is over."""
        with self._lock:
            self._pending.clear()
            for ripe in self._ripening:  # no later slot adds to them
                self._remember(ripe)
            self._ripening.clear()

    def forget(self) -> None:
        """Remember nothing, as after a restart of the process."""
        with self._lock:
            self._pending.clear()
            self._ripening.clear()
            self._replay.clear()

    def state(self) -> dict[str, NDArray[Any]]:
        """All that the next gradients depend on, by name; choices without a reward are left out."""
        with self._lock:
            return {**self._replay.state(), "recorded": np.array(self._recorded, dtype=np.int64)}

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Go on from what `state` gave.

        Raises:
            ValueError: it is of a learner of another size.
        """
        with self._lock:
            self._pending.clear()
            self._ripening.clear()
            self._replay.restore(state)
            self._recorded = int(state["recorded"].item())


def gradient_on(
    arrays: Arrays, batch: Batch, *, entropy_weight: float = ENTROPY_WEIGHT, baseline: float | None = None
) -> tuple[BatchGradient, Array]:
    """The gradient over a given batch, and each transition's advantage.

    Args:
        baseline: what rewards are compared with; None: the value network's guess. With it that network learns nothing.
    """
    weights = parameters(arrays)
    inputs = torch.from_numpy(features(batch.states))
    masks = torch.from_numpy(batch.masks)
    actions = torch.from_numpy(batch.actions)[:, None]
    rewards = torch.from_numpy(batch.rewards)
    importance = torch.from_numpy(batch.weights)

    logits = forward(weights, "policy", inputs).masked_fill(~masks, -torch.inf)
    log_chances = torch.log_softmax(logits, dim=1)
    chosen = log_chances.gather(1, actions)[:, 0]
    values = forward(weights, "value", inputs)[:, 0]

    advantages = (rewards - values).detach() if baseline is None else rewards - baseline
    behaviour = torch.from_numpy(batch.behaviour).clamp(min=1e-6)
    ratios = (chosen.detach().exp() / behaviour).clamp(max=RATIO_MAX)
    # Illegal actions have probability 0 and contribute nothing; their log must not turn 0 * -inf into NaN.
    entropies = -(log_chances.exp() * log_chances.masked_fill(~masks, 0.0)).sum(dim=1)
    bonus = entropy_weight * entropies.mean() / masks.shape[1]
    policy_loss = -(ratios * importance * advantages * chosen).mean() - bonus
    # Times nothing where it does not learn: its gradient is then zeros of the right shapes, which every round expects.
    value_loss = (importance * (values - rewards) ** 2).mean() * (1.0 if baseline is None else 0.0)
    (policy_loss + value_loss).backward()

    gradients = to_arrays({name: weight.grad for name, weight in weights.items() if weight.grad is not None})
    update = BatchGradient(
        gradients,
        len(batch.actions),
        float(policy_loss.detach()),
        float(value_loss.detach()),
        float(entropies.detach().mean()),
        float(rewards.mean()),
    )
    return update, advantages.numpy()
