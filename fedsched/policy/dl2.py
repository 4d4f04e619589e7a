"""The DL2 policy (Peng et al., "DL2: A Deep Learning-driven Scheduler for Deep Learning Clusters"), read top to bottom.

A slot is decided one task at a time: look at the jobs in the window, choose one of 3J+1 actions (one more worker, one
more parameter server or one of each for a job, or void: end the slot), grant it, look again.

Details that matter, and where they depart from the authors' code:

* The state is their 6 x J matrix of raw numbers, exactly: type 1..8, slots since arrival, remaining fraction, dominant
  share, workers, parameter servers; columns are packed, by arrival, jobs that are full left out. Raw numbers train
  badly, so the network's first step is a fixed scaling of the rows (`features`), which learns nothing.
* Every job gets its own minimum before the network spends the rest (their ASSIGN_BUNDLE gives one bundle). That also
  serves the jobs beyond the window, for which there is no action.
* Caps are each job's own maxima instead of one constant. Pinned jobs and jobs whose minimum found no room keep their
  column, because they are part of the load, but have no legal action.
* A grant that does not fit masks that action for the rest of the slot instead of ending the slot: room only shrinks
  within a slot, so it will not fit later either, but another job's task may. Failed choices are no samples: the choice
  is drawn again without them, as in rejection sampling.
* The two networks are plain layers (their batch normalisation never normalises) and share nothing. Weights start
  uniform with He's bound rather than with deviation 0.02, which needs thousands of steps to grow.
* Void is a sample only where something else was legal.

Acting needs numpy only; the same `forward` serves torch tensors in training.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from fedsched.core.decision import Budget, Decision, JobView, Observation
from fedsched.core.ids import JobId, stream
from fedsched.core.job import Allocation
from fedsched.core.resources import Resources
from fedsched.policy.heuristics import admit, by_arrival
from fedsched.policy.learnable import Array, Arrays, Weighted, fresh

# --- The shape of the problem ------------------------------------------------------------------------------------

ROWS = 6
KINDS = (Allocation(workers=1), Allocation(ps=1), Allocation(workers=1, ps=1))
"""What action `3 * column + kind` grants."""
WORKER, PS, BUNDLE = range(3)


@dataclass(frozen=True, slots=True)
class Dl2Shape:
    """Sizes that weights must agree on."""

    FORMAT: ClassVar[str] = "fedsched/dl2/1"
    """Of checkpoint files."""
    window: int = 20
    """J: how many jobs the policy sees at once."""
    hidden: tuple[int, ...] = (80, 80)
    """Width of each hidden layer, of both networks; the reference's rule is 6*J*2/3, twice."""

    @property
    def actions(self) -> int:
        """3J+1."""
        return 3 * self.window + 1

    @property
    def void(self) -> int:
        """The action that ends the slot."""
        return 3 * self.window

    def layers(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every weight array, sorted by name."""
        result: dict[str, tuple[int, ...]] = {}
        for network, outputs in (("policy", self.actions), ("value", 1)):
            sizes = (ROWS * self.window, *self.hidden, outputs)
            for index in range(len(sizes) - 1):
                result[f"{network}.{index}.weight"] = (sizes[index + 1], sizes[index])
                result[f"{network}.{index}.bias"] = (sizes[index + 1],)
        return dict(sorted(result.items()))

    def card(self) -> dict[str, Any]:
        """What a checkpoint file says of the shape."""
        return {"window": self.window, "hidden": list(self.hidden), "rows": ROWS, "types": TYPES}

    @classmethod
    def of_card(cls, card: Mapping[str, Any]) -> Dl2Shape:
        """The shape that `card` told of.

        Raises:
            ValueError: it is of another state than this policy sees.
            KeyError, TypeError: it is no card.
        """
        if card["rows"] != ROWS or card["types"] != TYPES:
            raise ValueError(f"made for {card['rows']} rows and types {card['types']}")
        return cls(int(card["window"]), tuple(int(width) for width in card["hidden"]))


# --- State -------------------------------------------------------------------------------------------------------

TYPES = {
    "linear": 1,
    "mlp": 2,
    "cnn": 3,
    "resnet": 4,
    "vgg": 5,
    "lstm": 6,
    "transformer": 7,
    "embedding": 8,
}
"""Job types with a number of their own; all others share the eight by hash."""


def type_number(job_type: str) -> int:
    """1..8; the same for the same name in every process and on every cluster."""
    known = TYPES.get(job_type)
    return known if known is not None else 1 + hashlib.sha256(job_type.encode()).digest()[0] % len(TYPES)


def column(view: JobView, have: Allocation, capacity: Resources) -> tuple[float, ...]:
    """One job's six raw numbers; the last three change with what it is granted."""
    return (
        type_number(view.job_type),
        view.waited_slots,
        view.remaining_epochs / view.epochs if view.epochs > 0 else 0.0,
        *_granted(view, have, capacity),
    )


def _granted(view: JobView, have: Allocation, capacity: Resources) -> tuple[float, int, int]:
    worker, server, workers, ps = view.worker_demand, view.ps_demand, have.workers, have.ps
    share = 0.0
    for of_worker, of_server, whole in (
        (worker.cpu_milli, server.cpu_milli, capacity.cpu_milli),
        (worker.memory_mib, server.memory_mib, capacity.memory_mib),
        (worker.gpu_milli, server.gpu_milli, capacity.gpu_milli),
    ):
        taken = of_worker * workers + of_server * ps
        if taken:
            share = max(share, taken / whole if whole else math.inf)
    # Above 1 only while a lost node still counts as a pinned job's place.
    return min(share, 1.0), workers, ps


class Window:
    """What the network sees of a slot, kept up to date as grants go out: state, mask, and the job of each column.

    A grant changes three numbers of one column and leaves the others alone; that is most of what makes a slot of some
    hundred choices cheap.
    """

    def __init__(self, observation: Observation, budget: Budget, size: int) -> None:
        self._budget = budget
        self._capacity = observation.capacity
        views = [view for view in by_arrival(observation.jobs) if not _full(view, budget.allocation(view.job_id))]
        self._behind = views[size:][::-1]
        """Jobs that move up when one in the window is full, the next one last."""
        self._failed: set[tuple[JobId, int]] = set()
        self.size = size
        self.jobs = views[:size]
        self._index = {view.job_id: index for index, view in enumerate(self.jobs)}
        self.state: Array = np.zeros((ROWS, size), dtype=np.float32)
        self.mask: NDArray[np.bool_] = np.zeros(3 * size + 1, dtype=np.bool_)
        self.mask[-1] = True
        self.barred: NDArray[np.float64] = np.full(3 * size + 1, -math.inf)
        """What legal actions add to their logits, 0, and illegal ones."""
        self.barred[-1] = 0.0
        for index, view in enumerate(self.jobs):
            self.state[:, index] = column(view, budget.allocation(view.job_id), self._capacity)
            self._note_legal(index, view, budget.allocation(view.job_id))
        self.inputs = features(self.state[None])
        """(1, 6J), always `features` of the state."""
        self._rows = self.inputs.reshape(ROWS, size)

    def target(self, action: int) -> tuple[JobView, int]:
        """The job and the kind (an index of `KINDS`) that a job action means."""
        return self.jobs[action // 3], action % 3

    def column_of(self, job_id: JobId) -> int | None:
        """Where a job stands in the window, if it does."""
        return self._index.get(job_id)

    def can_choose(self) -> bool:
        """Whether anything but void is legal."""
        return bool(self.mask[:-1].any())

    def granted(self, job_id: JobId) -> None:
        """The budget has just granted this job something."""
        index = self._index.get(job_id)
        if index is None:
            return
        view, have = self.jobs[index], self._budget.allocation(job_id)
        if _full(view, have):
            self._take_out(index)
            return
        share, workers, ps = _granted(view, have, self._capacity)
        state, rows = self.state, self._rows
        state[3, index], state[4, index], state[5, index] = share, workers, ps
        rows[3, index], rows[4, index], rows[5, index] = share * SCALE[3], workers * SCALE[4], ps * SCALE[5]
        self._note_legal(index, view, have)

    def refused(self, job_id: JobId, kind: int) -> None:
        """The budget has just refused this job that; room only shrinks, so it stays refused for the slot."""
        self._failed.add((job_id, kind))
        if kind != BUNDLE:
            self._failed.add((job_id, BUNDLE))
        index = self._index.get(job_id)
        if index is not None:
            self._note_legal(index, self.jobs[index], self._budget.allocation(job_id))

    def _take_out(self, gone: int) -> None:
        """A full job leaves; those behind it move up, and the next one in."""
        for columns in (self.state, self._rows):
            columns[:, gone:-1] = columns[:, gone + 1 :]
            columns[:, -1] = 0.0
        for actions in (self.mask, self.barred):
            actions[3 * gone : -4] = actions[3 * gone + 3 : -1]
        self.mask[-4:-1], self.barred[-4:-1] = False, -math.inf
        del self.jobs[gone]
        while self._behind and len(self.jobs) < self.size:
            view = self._behind.pop()
            have = self._budget.allocation(view.job_id)
            if not _full(view, have):
                at = len(self.jobs)
                self.jobs.append(view)
                self.state[:, at] = column(view, have, self._capacity)
                self._rows[:, at] = features(self.state[None, :, at : at + 1])[0]
                self._note_legal(at, view, have)
        self._index = {view.job_id: index for index, view in enumerate(self.jobs)}

    def _note_legal(self, index: int, view: JobView, have: Allocation) -> None:
        workers, ps, least, failed = have.workers, have.ps, view.minimum, self._failed
        able = not view.pinned and workers >= least.workers and ps >= least.ps
        more_workers, more_ps = able and workers < view.workers.maximum, able and ps < view.ps.maximum
        for kind, fits in enumerate((more_workers, more_ps, more_workers and more_ps)):
            legal = fits and (view.job_id, kind) not in failed
            self.mask[3 * index + kind] = legal
            self.barred[3 * index + kind] = 0.0 if legal else -math.inf


def _full(view: JobView, have: Allocation) -> bool:
    return have.workers >= view.workers.maximum and have.ps >= view.ps.maximum


# --- Networks ----------------------------------------------------------------------------------------------------


SCALE = (1 / 8, 1.0, 1.0, 1.0, 1 / 8, 1 / 8)
"""Of the rows; the second one's logarithm is divided by 4 then."""


def features(states: Array) -> Array:
    """Network inputs (n, 6J) from raw states (n, 6, J): every row brought to about 0..1.

    The wait grows without bound, so it enters by its logarithm.
    """
    scaled = states * np.array(SCALE)[:, None]
    scaled[:, 1] = np.log1p(scaled[:, 1]) / 4
    inputs: Array = scaled.reshape(len(states), -1).astype(np.float32)
    return inputs


def forward(arrays: Mapping[str, Any], network: str, inputs: Any) -> Any:
    """Outputs of the `policy` (logits) or `value` network, (n, outputs); on numpy arrays or torch tensors alike."""
    depth = sum(name.startswith(f"{network}.") for name in arrays) // 2
    hidden = inputs
    for index in range(depth):
        hidden = hidden @ arrays[f"{network}.{index}.weight"].T + arrays[f"{network}.{index}.bias"]
        if index < depth - 1:
            hidden = hidden.clip(min=0)
    return hidden


def initial(shape: Dl2Shape, seed: int) -> dict[str, Array]:
    """Fresh weights: hidden layers uniform with He's bound; output layers near zero, so that nothing is preferred."""
    layers = shape.layers()

    def bound(name: str) -> float | None:
        network, index, kind = name.split(".")
        if kind == "bias":
            return None
        return math.sqrt(6 / layers[name][1]) if f"{network}.{int(index) + 1}.weight" in layers else 0.01

    return fresh(layers, bound, "dl2/initial", seed)


# --- Choosing ----------------------------------------------------------------------------------------------------


def probabilities(logits: NDArray[Any], mask: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Softmax over what is legal: the same as masking the softmax and renormalising."""
    legal = np.where(mask, logits.astype(np.float64), -np.inf)
    exponents = np.exp(legal - legal.max())
    chances: NDArray[np.float64] = exponents / exponents.sum()
    return chances


def draw(chances: NDArray[np.float64], uniform: float) -> int:
    """The action at `uniform` (0 <= uniform < 1) of the cumulative distribution; never one of probability zero."""
    cumulative = np.cumsum(chances)
    index = int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
    return min(index, int(np.flatnonzero(chances)[-1]))


class _Chances:
    """`forward`, `probabilities` and `draw` for one slot of some hundred choices: the same steps, and bits, without
    making an array at each of them.

    Args:
        arrays: weights of `shape`.
    """

    def __init__(self, arrays: Arrays, shape: Dl2Shape) -> None:
        names = [f"policy.{index}" for index in range(len(shape.hidden) + 1)]
        self._layers = [
            (arrays[f"{name}.weight"].T, arrays[f"{name}.bias"], np.empty((1, len(arrays[f"{name}.bias"])), np.float32))
            for name in names
        ]
        self._logits: Array = self._layers[-1][2][0]
        self._ones = np.ones(shape.actions, np.float32)
        self._now = np.empty(shape.actions)
        self._sums = np.empty(shape.actions)

    def look(self, inputs: Array) -> None:
        """Compute the logits of a state.

        Raises:
            ArithmeticError: they are not finite.
        """
        hidden, (*before, last) = inputs, self._layers
        for weight, bias, out in before:
            np.matmul(hidden, weight, out=out)
            np.add(out, bias, out=out)
            hidden = np.maximum(out, 0, out=out)
        weight, bias, out = last
        np.matmul(hidden, weight, out=out)
        np.add(out, bias, out=out)
        if not math.isfinite(self._logits.dot(self._ones)):  # a sum is cheaper than a look at each
            raise ArithmeticError("the policy network's outputs are not finite")

    def over(self, barred: NDArray[np.float64]) -> NDArray[np.float64]:
        """`probabilities` of the state that was looked at last; the array is the next call's, too."""
        now = np.add(self._logits, barred, out=self._now)
        np.subtract(now, np.maximum.reduce(now), out=now)
        np.exp(now, out=now)
        np.divide(now, np.add.reduce(now), out=now)
        return now

    def draw(self, uniform: float) -> int:
        """`draw` of what `over` gave last."""
        sums = np.add.accumulate(self._now, out=self._sums)
        index = int(sums.searchsorted(uniform * sums[-1], side="right"))
        return index if index < len(sums) else int(np.flatnonzero(self._now)[-1])


@dataclass(frozen=True, slots=True, eq=False)
class DecisionSample:
    """One choice of the network, as the learner needs it."""

    slot: int
    version: int
    """Of the weights that chose."""
    state: Array
    """(6, J), raw."""
    mask: NDArray[np.bool_]
    """(3J+1,), true where legal."""
    probabilities: Array
    """(3J+1,), of the network over what was legal; where exploration chose instead, still the network's."""
    action: int
    job_id: JobId | None = None
    """Whom the action was about; None: void."""


class Explorer(Protocol):
    """May choose in the network's place while it learns."""

    def choose(self, window: Window, chances: NDArray[np.float64], action: int, chance: Random) -> int:
        """The action to take; `action` is the network's."""


class DL2(Weighted[Dl2Shape, DecisionSample]):
    """The learned policy behind the `Policy` protocol.

    Decisions depend on the observation, the weights, the seed and the slot's number, on nothing else. `load` may be
    called from another thread while `decide` runs: a slot is decided with one set of weights from start to end.

    Args:
        arrays: weights of `shape`.
        version: theirs.
        explore: sample actions, as learning needs it; else take the likeliest.
        explorer: overrides in training only.

    Raises:
        ValueError: the weights are not of this shape or not finite.
    """

    name = "dl2"

    def __init__(
        self,
        arrays: Arrays,
        version: int = 1,
        *,
        shape: Dl2Shape | None = None,
        seed: int = 0,
        explore: bool = True,
        explorer: Explorer | None = None,
    ) -> None:
        super().__init__(arrays, version, shape or Dl2Shape())
        self._seed = seed
        self._explore = explore
        self._explorer = explorer

    def decide(self, observation: Observation, budget: Budget) -> Decision:
        """Minimum for every job, then one action after the other until void or until nothing is legal."""
        version, arrays = self._weights
        self._trace = ()
        admit([view for view in by_arrival(observation.jobs) if not view.pinned], budget)
        window = Window(observation, budget, self.shape.window)
        chance = stream(self._seed, f"dl2/act/{observation.slot}")
        exploration = stream(self._seed, f"dl2/explore/{observation.slot}")
        samples: list[DecisionSample] = []
        network = _Chances(arrays, self.shape)
        network.look(window.inputs)
        while window.can_choose():
            chances = network.over(window.barred)
            action = network.draw(chance.random()) if self._explore else int(chances.argmax())
            if self._explorer is not None:
                action = self._explorer.choose(window, chances, action, exploration)
            sample = _sample(observation.slot, version, window, chances, action)
            if action == self.shape.void:
                samples.append(sample)
                break
            view, kind = window.target(action)
            if budget.grant(view.job_id, KINDS[kind].workers, KINDS[kind].ps):
                samples.append(sample)
                window.granted(view.job_id)
                network.look(window.inputs)
            else:
                window.refused(view.job_id, kind)
        self._trace = tuple(samples)
        return Decision(observation.slot, budget.allocations(), self.name, version)


def _sample(slot: int, version: int, window: Window, chances: NDArray[np.float64], action: int) -> DecisionSample:
    job_id = window.target(action)[0].job_id if action < 3 * window.size else None
    probabilities = chances.astype(np.float32)
    return DecisionSample(slot, version, window.state.copy(), window.mask.copy(), probabilities, action, job_id)
