"""Teaches DL2's policy network to decide like an existing scheduler, from that scheduler's own grants.

The teacher spends a budget that looks over its shoulder: just before each task is granted beyond a job's minimum, the
state and the action that grants this task are a sample. Departures from DL2's `sl_agent`:

* states begin where DL2 itself begins a slot, after the minima, not from nothing;
* a bundle is one sample with the bundle's own action, and void is a label where the teacher left room unused, so the
  student keeps all its actions;
* columns stand packed by arrival, as they do when DL2 acts, and each sample comes once more with its jobs in another
  order (the reference shuffles all columns, empty ones included), so that what is learned of one column serves others;
* samples are kept, not overwritten in a ring; the learning rate falls linearly to zero;
* training is in double precision and the result is rounded to eleven significant bits: the last bits of the sums depend
  on a processor's vector units, and the shipped weights must come out the same on every machine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedsched.core.decision import Budget, Decision, Observation, Policy
from fedsched.core.ids import JobId, stream
from fedsched.core.job import Allocation
from fedsched.learn.tensors import adam_state, one_thread, parameters, restore_adam, to_arrays
from fedsched.policy.dl2 import BUNDLE, KINDS, PS, WORKER, Dl2Shape, Window, features, forward
from fedsched.policy.learnable import Array, Arrays


@dataclass(frozen=True, slots=True, eq=False)
class Label:
    """A state and what the teacher did in it."""

    state: Array
    mask: NDArray[np.bool_]
    action: int


def fingerprint(labels: Sequence[Label]) -> str:
    """SHA-256 over all labels: tells whether a teacher still decides as it did."""
    sha = hashlib.sha256()
    for label in labels:
        sha.update(np.ascontiguousarray(label.state).tobytes())
        sha.update(np.packbits(label.mask).tobytes())
        sha.update(label.action.to_bytes(4, "big"))
    return sha.hexdigest()


class _OverTheShoulder:
    """A budget that notes the state before each grant beyond the minimum."""

    def __init__(self, observation: Observation, budget: Budget, shape: Dl2Shape) -> None:
        self._budget = budget
        self._shape = shape
        self._minimum = {view.job_id: view.minimum for view in observation.jobs}
        self._window: Window | None = None
        self._observation = observation
        self.labels: list[Label] = []

    def grant(self, job_id: JobId, workers: int = 0, ps: int = 0, accelerator: str = "") -> bool:
        """As the real budget; what it grants is noted."""
        if not self._holds_minimum(job_id):
            return self._budget.grant(job_id, workers, ps, accelerator)
        window = self._look()
        kinds = _kinds(workers, ps)
        states = self._before(window, job_id, kinds)
        if not self._budget.grant(job_id, workers, ps, accelerator):
            if len(kinds) == 1:
                window.refused(job_id, kinds[0])
            return False
        self.labels += states
        window.granted(job_id)
        return True

    def allocation(self, job_id: JobId) -> Allocation:
        """As the real budget."""
        return self._budget.allocation(job_id)

    def allocations(self) -> tuple[tuple[JobId, Allocation], ...]:
        """As the real budget."""
        return self._budget.allocations()

    def finish(self) -> None:
        """Note void where the teacher left something that would have fitted. Spends the budget: the last call."""
        window = self._look()
        before = Label(window.state.copy(), window.mask.copy(), self._shape.void)
        for action in np.flatnonzero(window.mask[:-1]):
            view, kind = window.target(int(action))
            if self._budget.grant(view.job_id, KINDS[kind].workers, KINDS[kind].ps):
                self.labels.append(before)
                return

    def _holds_minimum(self, job_id: JobId) -> bool:
        have, least = self._budget.allocation(job_id), self._minimum[job_id]
        return have.workers >= least.workers and have.ps >= least.ps

    def _look(self) -> Window:
        """The window, built when the minima are out: that is the first state of the slot."""
        if self._window is None:
            self._window = Window(self._observation, self._budget, self._shape.window)
        return self._window

    def _before(self, window: Window, job_id: JobId, kinds: Sequence[int]) -> list[Label]:
        """The label of a grant of one task or bundle; larger grants and jobs beyond the window have none."""
        column = window.column_of(job_id)
        if column is None or len(kinds) != 1:
            return []
        return [Label(window.state.copy(), window.mask.copy(), 3 * column + kinds[0])]


def _kinds(workers: int, ps: int) -> tuple[int, ...]:
    """The actions that together grant this much."""
    bundles = min(workers, ps)
    return (BUNDLE,) * bundles + (WORKER,) * (workers - bundles) + (PS,) * (ps - bundles)


class Watched:
    """A teacher that decides as ever while what can be learned from it is noted. Spends all of its budget."""

    def __init__(self, teacher: Policy, shape: Dl2Shape) -> None:
        self._teacher = teacher
        self._shape = shape
        self.labels: list[Label] = []

    @property
    def name(self) -> str:
        """The teacher's."""
        return self._teacher.name

    @property
    def version(self) -> int:
        """The teacher's."""
        return self._teacher.version

    def decide(self, observation: Observation, budget: Budget) -> Decision:
        """The teacher's decision."""
        watched = _OverTheShoulder(observation, budget, self._shape)
        decision = self._teacher.decide(observation, watched)
        watched.finish()
        self.labels += watched.labels
        return decision


def reordered(label: Label, chance: Random) -> Label:
    """The same choice with the window's jobs in a drawn order; empty columns stay behind them."""
    jobs = int(np.count_nonzero(label.state[0]))
    columns = label.state.shape[1]
    order = [*sorted(range(jobs), key=lambda _: chance.random()), *range(jobs, columns)]
    mask = label.mask.copy()
    mask[:-1] = label.mask[:-1].reshape(columns, len(KINDS))[order].reshape(-1)
    void = label.action == len(label.mask) - 1
    action = label.action if void else len(KINDS) * order.index(label.action // 3) + label.action % 3
    return Label(label.state[:, order], mask, action)


@dataclass(frozen=True, slots=True, eq=False)
class Fitted:
    """Trained weights and how training went."""

    arrays: dict[str, Array]
    first_loss: float
    """Cross-entropy of the first minibatch."""
    last_loss: float
    """Mean cross-entropy of the last tenth of the minibatches."""


class Fit:
    """Minimises cross-entropy over the legal actions with Adam; only the policy network changes.

    The same labels, steps and seed give the same weights, also when it was stopped and goes on from its `state`.

    Args:
        arrays: the weights to begin with.
        labels: what is learnt.
        steps: minibatches in all; the step size falls to zero over them.
        batch_size: labels of each.
        learning_rate: the first step's.
        seed: of the order of jobs and of the batches.
    """

    def __init__(
        self,
        arrays: Arrays,
        labels: Sequence[Label],
        *,
        steps: int,
        batch_size: int = 256,
        learning_rate: float = 5e-3,
        seed: int,
    ) -> None:
        chance = stream(seed, "supervised/order")
        labels = [*labels, *(reordered(label, chance) for label in labels)]
        self._inputs, self._masks, self._actions = _tensors(labels)
        self._batch_size = min(batch_size, len(labels))
        self._steps = steps
        self._learning_rate = learning_rate
        self._draw = stream(seed, "supervised/batches").random
        self.losses: list[float] = []
        """Cross-entropy of each minibatch so far."""
        self._begin(arrays)

    def _begin(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        self._weights = parameters(arrays, torch.float64)
        trained = [tensor for name, tensor in self._weights.items() if name.startswith("policy.")]
        self._optimiser = torch.optim.Adam(trained, lr=self._learning_rate)

    def run(self, until: int) -> None:
        """Go on until so many steps are done."""
        with one_thread():
            for step in range(len(self.losses), until):
                self._optimiser.param_groups[0]["lr"] = self._learning_rate * (1 - step / self._steps)
                rows = torch.tensor(self._batch())
                logits = forward(self._weights, "policy", self._inputs[rows])
                legal = logits.masked_fill(~self._masks[rows], -torch.inf)
                loss = torch.nn.functional.cross_entropy(legal, self._actions[rows])
                self._optimiser.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                self._optimiser.step()
                self.losses.append(float(loss.detach()))

    def _batch(self) -> list[int]:
        return [int(self._draw() * len(self._actions)) for _ in range(self._batch_size)]

    def fitted(self) -> Fitted:
        """What all steps made."""
        last = self.losses[-max(1, self._steps // 10) :]
        return Fitted(_rounded(self._weights), self.losses[0], sum(last) / len(last))

    def state(self) -> dict[str, NDArray[Any]]:
        """All that the next steps depend on, by name."""
        return {
            **{f"weights/{name}": tensor.detach().numpy().copy() for name, tensor in self._weights.items()},
            **adam_state(self._optimiser),
            "losses": np.array(self.losses),
        }

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Go on from what `state` gave."""
        self._begin({name.removeprefix("weights/"): a for name, a in state.items() if name.startswith("weights/")})
        restore_adam(self._optimiser, state)
        self.losses = [float(loss) for loss in state["losses"]]
        for _ in self.losses:
            self._batch()  # the draws of the steps that are done


def _rounded(weights: dict[str, torch.Tensor]) -> dict[str, Array]:
    return {name: array.astype(np.float16).astype(np.float32) for name, array in to_arrays(weights).items()}


def agreement(arrays: Arrays, labels: Sequence[Label]) -> float:
    """How often the network's likeliest legal action is the teacher's."""
    inputs, masks, actions = _tensors(labels)
    with one_thread(), torch.no_grad():
        weights = parameters(arrays, torch.float64)
        logits = forward(weights, "policy", inputs).masked_fill(~masks, -torch.inf)
        return float((logits.argmax(dim=1) == actions).float().mean())


def _tensors(labels: Sequence[Label]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        torch.from_numpy(features(np.stack([label.state for label in labels]))).double(),
        torch.from_numpy(np.stack([label.mask for label in labels])),
        torch.tensor([label.action for label in labels]),
    )
