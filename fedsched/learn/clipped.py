"""Improves the `set` policy from what its slots really brought: clipped policy gradient on a slot's common gain.

A slot is one step of a contextual bandit: nothing is discounted or bootstrapped. Details that matter:

* A job's reward is its progress in the slot, in slots at the fastest pace ever seen of its kind, times (remaining time
  at that pace)^-0.3: short jobs first, mildly. Without that factor a job's rewards add up to a constant, its time at
  full pace, so only when they come counts. DL2's reward divides by the job's length instead, and short jobs dominate.
* Everybody's advantage is the slot's: the sum over its jobs of reward minus expectation. A job that is paid for itself
  alone learns to take all it can, which chokes a crowded cluster. The expectation is a network of its own, per job.
* Proximal policy optimisation (Schulman et al. 2017) with a ratio per job, clipped at 0.2; an improvement stops where
  the policy has moved by 0.03 nats. Advantages are whitened over the batch.
* The learner also computes plain gradients at given weights: that is what a cluster gives to the federation, and the
  optimiser sits where the gradients of all clusters come together.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedsched.core.commands import RewardSlot
from fedsched.core.ids import stream
from fedsched.learn.actor_critic import PENDING_SLOTS_MAX, BatchGradient
from fedsched.learn.tensors import adam_state, one_thread, parameters, restore_adam, to_arrays
from fedsched.policy.learnable import Array, Arrays
from fedsched.policy.set import (
    Choice,
    SetInputs,
    SlotSample,
    of_types,
    ps_logits,
    trunk,
    urgency,
    values,
    worker_logits,
)

TILT = 0.3
"""How much short jobs count above long ones."""
REMAINING_MIN = 0.5
"""Slots; no job counts as shorter."""
CLIP = 0.2
KL_MAX = 0.03
ENTROPY_WEIGHT = 0.003
VALUE_WEIGHT = 0.5
VALUE_RATE = 1e-3
"""Learning rate of the value network where it learns alone."""
NORM_MAX = 0.5

Tensors = Mapping[str, torch.Tensor]


# --- Rewards -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Lived:
    """A slot's choices and what they brought."""

    sample: SlotSample
    rewards: Array
    """(m,)."""

    @property
    def size(self) -> int:
        """How many jobs it is about."""
        return len(self.rewards)


class Paces:
    """The fastest that each kind of job was ever seen to train, in epochs per slot."""

    def __init__(self) -> None:
        self._fastest: dict[str, float] = {}

    def state(self) -> dict[str, NDArray[Any]]:
        """Kinds, as one text, and their paces."""
        kinds = sorted(self._fastest)
        text = "\n".join(kinds).encode()
        return {
            "kinds": np.frombuffer(text, dtype=np.uint8).copy(),
            "paces": np.array([self._fastest[kind] for kind in kinds], dtype=np.float64),
        }

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Go on from what `state` gave."""
        kinds = bytes(state["kinds"]).decode().split("\n") if len(state["paces"]) else []
        self._fastest = dict(zip(kinds, state["paces"].tolist(), strict=True))

    def rewards(self, sample: SlotSample, progress: Mapping[str, float]) -> Array:
        """What the slot's jobs earned, (m,); learns their paces on the way.

        Args:
            sample: the slot.
            progress: by job, in the slot, as a fraction of its declared epochs; nothing for those that made none.
        """
        done = np.array([progress.get(job_id, 0.0) for job_id in sample.jobs]) * sample.epochs
        for kind, epochs in zip(sample.kinds, done, strict=True):
            self._fastest[kind] = max(self._fastest.get(kind, 0.0), float(epochs))
        fastest = np.array([self._fastest[kind] or 1.0 for kind in sample.kinds])
        remaining = np.maximum(sample.remaining / fastest, REMAINING_MIN)
        rewards: Array = (done / fastest * remaining**-TILT).astype(np.float32)
        return rewards


# --- Batches -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class SlotBatch:
    """The jobs of many slots below each other; n slots, m jobs."""

    slots: int
    slot: torch.Tensor
    """(m,): which slot each job is of, ascending."""
    counts: torch.Tensor
    """(n, 1): jobs per slot."""
    features: torch.Tensor
    """This and the next six as in `SetInputs`, with the jobs of all slots."""
    types: torch.Tensor
    typed: torch.Tensor
    ps_legal: torch.Tensor
    workers_legal: torch.Tensor
    ps_now: torch.Tensor
    workers_now: torch.Tensor
    """Present sizes as `with_stay` wants them: -1 also where another number of servers was chosen."""
    stay: torch.Tensor
    """(m,): what staying is preferred by in each job's slot."""
    free: torch.Tensor
    """(m,): whose size was the policy's to choose."""
    ps: torch.Tensor
    """This and the next three as in `Choice`: what was chosen, and its log-probability then."""
    workers: torch.Tensor
    urgency: torch.Tensor
    chance: torch.Tensor
    rewards: torch.Tensor
    """(m,): as in `Lived`."""

    def part(self, slots: torch.Tensor) -> tuple[SlotBatch, torch.Tensor]:
        """The jobs of some slots (indices, ascending), and their rows here."""
        number = torch.full((self.slots,), -1)
        number[slots] = torch.arange(len(slots))
        rows = (number[self.slot] >= 0).nonzero()[:, 0]
        rest = {name: getattr(self, name)[rows] for name in _ROWS}
        return SlotBatch(len(slots), number[self.slot[rows]], self.counts[slots], **rest), rows

    def pool(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Each slot's mean over its jobs, times the weight, for each of its jobs."""
        sums = torch.zeros(self.slots, hidden.shape[1]).index_add(0, self.slot, hidden)
        return (sums / self.counts @ weight.T)[self.slot]

    def sums(self, per_job: torch.Tensor) -> torch.Tensor:
        """Each slot's sum, for each of its jobs."""
        return torch.zeros(self.slots).index_add(0, self.slot, per_job)[self.slot]


_ROWS = (
    "features",
    "types",
    "typed",
    "ps_legal",
    "workers_legal",
    "ps_now",
    "workers_now",
    "stay",
    "free",
    "ps",
    "workers",
    "urgency",
    "chance",
    "rewards",
)


def batch_of(lived: Sequence[Lived]) -> SlotBatch:
    """The slots side by side."""
    counts = np.array([one.size for one in lived])
    seen = [one.sample.seen for one in lived]
    choices = [one.sample.choice for one in lived]
    ps = np.concatenate([choice.ps for choice in choices])
    ps_now = np.concatenate([one.ps_now for one in seen])
    workers_now = np.concatenate([one.workers_now for one in seen])
    return SlotBatch(
        len(lived),
        torch.from_numpy(np.repeat(np.arange(len(lived)), counts)),
        torch.from_numpy(counts.astype(np.float32))[:, None],
        features=torch.from_numpy(np.concatenate([one.features for one in seen])),
        types=torch.from_numpy(np.concatenate([one.types for one in seen])),
        typed=torch.from_numpy(np.concatenate([one.typed for one in seen])),
        ps_legal=torch.from_numpy(np.concatenate([one.ps_legal for one in seen])),
        workers_legal=torch.from_numpy(np.concatenate([one.workers_legal for one in seen])),
        ps_now=torch.from_numpy(ps_now),
        workers_now=torch.from_numpy(np.where(ps == ps_now, workers_now, -1)),
        stay=torch.from_numpy(np.repeat(np.array([one.sample.stay for one in lived], np.float32), counts)),
        free=torch.from_numpy(np.concatenate([one.sample.free for one in lived])),
        ps=torch.from_numpy(ps),
        workers=torch.from_numpy(np.concatenate([choice.workers for choice in choices])),
        urgency=torch.from_numpy(np.concatenate([choice.urgency for choice in choices]).astype(np.float32)),
        chance=torch.from_numpy(np.concatenate([choice.chance for choice in choices])),
        rewards=torch.from_numpy(np.concatenate([one.rewards for one in lived])),
    )


# --- Loss --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Answers:
    """What the policy network says of a batch's jobs."""

    of_ps: torch.Tensor
    """(m, c): log-probabilities."""
    of_workers: torch.Tensor
    """(m, c): the same beside the servers that were chosen."""
    urgency: torch.Tensor
    """(m,): means."""


def answers(weights: Tensors, batch: SlotBatch) -> Answers:
    """The network's distributions, given the chosen servers."""
    types = of_types(weights, "policy", batch.types, batch.typed)
    jobs = trunk(weights, "policy", batch.features, types, batch.pool)
    of_ps = _log_chances(ps_logits(weights, jobs), batch.ps_legal, batch.ps_now, batch.stay)
    beside = worker_logits(weights, jobs, batch.ps)
    of_workers = _log_chances(beside, batch.workers_legal, batch.workers_now, batch.stay)
    return Answers(of_ps, of_workers, urgency(weights, jobs))


def _log_chances(logits: torch.Tensor, legal: torch.Tensor, now: torch.Tensor, stay: torch.Tensor) -> torch.Tensor:
    bonus = torch.where(now >= 0, stay, 0.0)[:, None]
    logits = logits.scatter_add(1, now.clamp(min=0)[:, None], bonus)
    return torch.log_softmax(logits.masked_fill(~legal, -1e9), dim=1)


def expected(weights: Tensors, batch: SlotBatch) -> torch.Tensor:
    """What the value network expects of each job, (m,)."""
    types = of_types(weights, "value", batch.types, batch.typed)
    result: torch.Tensor = values(weights, batch.features, types, batch.pool)
    return result


def advantages(weights: Tensors, batch: SlotBatch) -> torch.Tensor:
    """Each job's share in its slot's gain over what was expected, (m,): everybody's is the whole, whitened."""
    with torch.no_grad():
        gains = batch.sums(batch.rewards - expected(weights, batch))
        deviation = gains.std() if len(gains) > 1 else torch.tensor(0.0)
        return (gains - gains.mean()) / (deviation + 1e-8)


@dataclass(frozen=True, slots=True, eq=False)
class Loss:
    """A batch's loss in its parts."""

    policy: torch.Tensor
    value: torch.Tensor
    entropy: torch.Tensor
    moved: torch.Tensor
    """Divergence (KL) of the weights' policy from the one that acted, estimated on its choices."""

    @property
    def total(self) -> torch.Tensor:
        """What is minimised."""
        return self.policy + VALUE_WEIGHT * self.value - ENTROPY_WEIGHT * self.entropy


def loss_on(weights: Tensors, batch: SlotBatch, gains: torch.Tensor) -> Loss:
    """The clipped surrogate with the value network's error and an entropy bonus.

    Jobs that had no choice count in the value network's error only.

    Args:
        weights: at which it is computed.
        batch: with the chances that the choices had when they were made.
        gains: advantages, (m,).
    """
    said = answers(weights, batch)
    deviation = weights["policy.urgency.deviation"]
    off = (batch.urgency - said.urgency) / deviation.exp()
    chance = _at(said.of_ps, batch.ps) + _at(said.of_workers, batch.workers) - off**2 / 2 - deviation
    change = chance - batch.chance
    ratio = change.exp()
    surrogate = torch.minimum(ratio * gains, ratio.clamp(1 - CLIP, 1 + CLIP) * gains)
    entropy = _entropy(said.of_ps) + _entropy(said.of_workers) + deviation
    error = (expected(weights, batch) - batch.rewards) ** 2
    free = batch.free
    return Loss(-surrogate[free].mean(), error.mean(), entropy[free].mean(), (ratio - 1 - change)[free].mean().detach())


def _at(log_chances: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    return log_chances.gather(1, chosen[:, None])[:, 0]


def _entropy(log_chances: torch.Tensor) -> torch.Tensor:
    # What is illegal has probability 0 and a large finite log, so it adds nothing.
    return -(log_chances.exp() * log_chances).sum(dim=1)


# --- Learning ----------------------------------------------------------------------------------------------------


class SetLearner:
    """Remembers a cluster's newest slots and turns them into gradients. All methods may be called from any thread.

    Args:
        capacity: how many jobs' choices it remembers; old ones teach a policy little that has moved on.
    """

    def __init__(self, capacity: int = 8192) -> None:
        self._lock = threading.Lock()
        self._capacity = capacity
        self._paces = Paces()
        self._lived: deque[Lived] = deque()
        self._pending: dict[int, SlotSample] = {}
        self._size = 0
        self._recorded = 0

    def __len__(self) -> int:
        """How many jobs' choices it remembers."""
        with self._lock:
            return self._size

    @property
    def recorded(self) -> int:
        """How many it was ever told, forgotten ones included."""
        with self._lock:
            return self._recorded

    def record(self, slot: int, samples: Sequence[SlotSample]) -> None:
        """Keep a slot's choices until its reward is known."""
        with self._lock:
            for sample in samples:
                self._pending[slot] = sample
            while len(self._pending) > PENDING_SLOTS_MAX:
                del self._pending[min(self._pending)]

    def reward(self, reward: RewardSlot) -> None:
        """What a slot brought. A slot whose choices were not ours (a fallback decided) teaches nothing."""
        with self._lock:
            sample = self._pending.pop(reward.slot, None)
            if sample is None:
                return
            self._lived.append(Lived(sample, self._paces.rewards(sample, dict(reward.progress))))
            self._size += self._lived[-1].size
            self._recorded += self._lived[-1].size
            while self._size > self._capacity and len(self._lived) > 1:
                self._size -= self._lived.popleft().size

    def gradient(self, arrays: Arrays, batch_size: int, seed: int) -> BatchGradient:
        """The gradient at these weights over remembered slots with about `batch_size` jobs.

        The same memory, weights and seed give the same gradient.

        Raises:
            ValueError: nothing is remembered yet.
        """
        with self._lock:
            if not self._lived:
                raise ValueError("there is no slot to learn from yet")
            draw = stream(seed, "set/batch").random
            order = sorted(range(len(self._lived)), key=lambda _: draw())
            chosen, jobs = [], 0
            for index in order:
                if jobs >= batch_size:
                    break
                chosen.append(index)
                jobs += self._lived[index].size
            lived = [self._lived[index] for index in sorted(chosen)]
        return gradient_on(arrays, lived)

    def abandon(self) -> None:
        """Choices that still wait for a reward will never get one: the run that they were made in is over."""
        with self._lock:
            self._pending.clear()

    def forget(self) -> None:
        """Remember nothing, as after a restart of the process."""
        with self._lock:
            self._pending.clear()
            self._lived.clear()
            self._paces = Paces()
            self._size = 0

    def state(self) -> dict[str, NDArray[Any]]:
        """All that the next gradients depend on, by name; choices without a reward are left out."""
        with self._lock:
            return {
                **self._paces.state(),
                **_packed(list(self._lived)),
                "recorded": np.array(self._recorded, dtype=np.int64),
            }

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Go on from what `state` gave."""
        with self._lock:
            self._pending.clear()
            self._paces.restore(state)
            self._lived = deque(_unpacked(state))
            self._size = sum(one.size for one in self._lived)
            self._recorded = int(state["recorded"])


_SEEN = ("features", "types", "typed", "ps_legal", "workers_legal", "ps_now", "workers_now")
_CHOSEN = ("ps", "workers", "urgency", "chance")


def _packed(lived: Sequence[Lived]) -> dict[str, NDArray[Any]]:
    """What learning needs of the slots, as arrays; names of jobs are not among it."""
    counts = np.array([one.size for one in lived], dtype=np.int64)
    result = {
        "counts": counts,
        "stay": np.array([one.sample.stay for one in lived], dtype=np.float64),
    }
    if lived:
        for name in _SEEN:
            result[f"seen.{name}"] = np.concatenate([getattr(one.sample.seen, name) for one in lived])
        for name in _CHOSEN:
            result[f"chosen.{name}"] = np.concatenate([getattr(one.sample.choice, name) for one in lived])
        result["free"] = np.concatenate([one.sample.free for one in lived])
        result["rewards"] = np.concatenate([one.rewards for one in lived])
    return result


def _unpacked(state: Mapping[str, NDArray[Any]]) -> list[Lived]:
    ends = np.cumsum(state["counts"]).tolist()
    lived, begin = [], 0
    for end, stay in zip(ends, state["stay"].tolist(), strict=True):
        rows = slice(begin, end)
        seen = SetInputs(*(state[f"seen.{name}"][rows] for name in _SEEN))
        choice = Choice(*(state[f"chosen.{name}"][rows] for name in _CHOSEN))
        nothing = np.zeros(0)
        sample = SlotSample(0, 0, (), (), nothing, nothing, state["free"][rows], stay, seen, choice)
        lived.append(Lived(sample, state["rewards"][rows]))
        begin = end
    return lived


def gradient_on(arrays: Arrays, lived: Sequence[Lived]) -> BatchGradient:
    """The loss's gradient with respect to every weight, over these slots."""
    with one_thread():
        weights = parameters(arrays)
        batch = batch_of(lived)
        loss = loss_on(weights, batch, advantages(weights, batch))
        loss.total.backward()  # type: ignore[no-untyped-call]
        gradients = to_arrays({name: weight.grad for name, weight in weights.items() if weight.grad is not None})
    return BatchGradient(
        gradients,
        len(batch.rewards),
        float(loss.policy.detach()),
        float(loss.value.detach()),
        float(loss.entropy.detach()),
        float(batch.rewards.mean()),
    )


@dataclass(frozen=True, slots=True)
class Improved:
    """How an improvement went."""

    jobs: int
    mean_reward: float
    explained: float
    """Share of the rewards' variance that the value network expected; 0 where all rewards are the same."""
    entropy: float
    moved: float
    """In nats, at the end."""
    steps: int


class Improver:
    """Weights in training: imitation and improvement step on the same optimiser."""

    def __init__(self, arrays: Arrays, *, learning_rate: float = 1e-3, seed: int = 0) -> None:
        self._weights = parameters(arrays)
        self._optimiser = _adam(self._weights, learning_rate)
        self._random = torch.Generator().manual_seed(seed)

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """The live tensors."""
        return self._weights

    @property
    def learning_rate(self) -> float:
        """Of the next step."""
        return float(self._optimiser.param_groups[0]["lr"])

    @learning_rate.setter
    def learning_rate(self, rate: float) -> None:
        self._optimiser.param_groups[0]["lr"] = rate

    def arrays(self) -> dict[str, Array]:
        """The weights now."""
        return to_arrays(self._weights)

    def go_back(self, arrays: Arrays, learning_rate: float) -> None:
        """Go on from these weights, with another learning rate and without the optimiser's momentum."""
        self._weights = parameters(arrays)
        self._optimiser = _adam(self._weights, learning_rate)

    def state(self) -> dict[str, NDArray[Any]]:
        """All that the next steps depend on but for the learning rate, by name."""
        return {
            **{f"weights/{name}": array for name, array in self.arrays().items()},
            **adam_state(self._optimiser),
            "random": self._random.get_state().numpy().copy(),
        }

    def restore(self, state: Mapping[str, NDArray[Any]], learning_rate: float) -> None:
        """Go on from what `state` gave."""
        arrays = {name.removeprefix("weights/"): a for name, a in state.items() if name.startswith("weights/")}
        self.go_back(arrays, learning_rate)
        restore_adam(self._optimiser, state)
        self._random.set_state(torch.tensor(state["random"]))

    def fit_values(self, lived: Sequence[Lived], *, passes: int = 3, parts: int = 8) -> None:
        """Teach the value network alone what to expect of the present policy, at its own pace."""
        with one_thread():
            whole = batch_of(lived)
            weights = {name: tensor for name, tensor in self._weights.items() if name.startswith("value.")}
            optimiser = _adam(weights, VALUE_RATE)
            for part in self._parts(whole.slots, passes, parts):
                batch, _ = whole.part(part)
                error = ((expected(weights, batch) - batch.rewards) ** 2).mean()
                optimiser.zero_grad()
                error.backward()  # type: ignore[no-untyped-call]
                optimiser.step()

    def improve(self, lived: Sequence[Lived], *, passes: int = 3, parts: int = 4) -> Improved:
        """Learn from slots that these very weights decided."""
        with one_thread():
            whole = batch_of(lived)
            gains = advantages(self._weights, whole)
            with torch.no_grad():
                missed = whole.rewards - expected(self._weights, whole)
                spread = whole.rewards.var() if len(missed) > 1 else torch.tensor(0.0)
                explained = float(1 - missed.var() / spread) if spread > 0 else 0.0
            steps, loss = 0, None
            for part in self._parts(whole.slots, passes, parts):
                batch, rows = whole.part(part)
                loss = loss_on(self._weights, batch, gains[rows])
                if not float(loss.moved) <= KL_MAX:  # nor by what is no number
                    break
                self.step(loss.total)
                steps += 1
            assert loss is not None
            return Improved(
                len(whole.rewards),
                float(whole.rewards.mean()),
                explained,
                float(loss.entropy.detach()),
                float(loss.moved),
                steps,
            )

    def _parts(self, slots: int, passes: int, parts: int) -> list[torch.Tensor]:
        return [
            part.sort().values
            for _ in range(passes)
            for part in torch.randperm(slots, generator=self._random).chunk(parts)
        ]

    def shuffled(self, count: int) -> torch.Tensor:
        """The numbers below `count` in a drawn order."""
        return torch.randperm(count, generator=self._random)

    def step(self, loss: torch.Tensor) -> None:
        """One step down the gradient, which is clipped for each network on its own."""
        self._optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        for network in ("policy.", "value."):
            tensors = [tensor for name, tensor in self._weights.items() if name.startswith(network)]
            torch.nn.utils.clip_grad_norm_(tensors, NORM_MAX)
        self._optimiser.step()


def _adam(weights: Tensors, learning_rate: float) -> torch.optim.Adam:
    return torch.optim.Adam(list(weights.values()), lr=learning_rate, eps=1e-5)
