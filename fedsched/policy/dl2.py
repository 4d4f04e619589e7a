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
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from random import Random
from typing import Any, ClassVar, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from fedsched.core.decision import Budget, Decision, JobView, Observation
from fedsched.core.ids import JobId, stream
from fedsched.core.job import Allocation, sized
from fedsched.core.resources import Resources
from fedsched.policy.heuristics import admit, by_arrival
from fedsched.policy.learnable import Array, Arrays, Weighted, fresh

# --- The shape of the problem ------------------------------------------------------------------------------------

ROWS = 6
KINDS = (Allocation(workers=1), Allocation(ps=1), Allocation(workers=1, ps=1))
"""What action `3 * column + kind` grants."""
WORKER, PS, BUNDLE = range(3)
_TASKS = [(kind.workers, kind.ps) for kind in KINDS]


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


@lru_cache(maxsize=4096)
def type_number(job_type: str) -> int:
    """1..8; the same for the same name in every process and on every cluster."""
    known = TYPES.get(job_type)
    return known if known is not None else 1 + hashlib.sha256(job_type.encode()).digest()[0] % len(TYPES)


class _Seat:
    """One job of the window: what of it does not change within a slot, at hand, and what it holds."""

    __slots__ = ("failed", "legal", "minimum", "most_ps", "most_workers", "ps", "shares", "view", "workers")

    def __init__(self, view: JobView, have: Allocation, failed: int, capacity: Resources) -> None:
        self.view = view
        self.workers, self.ps = have.workers, have.ps
        self.failed = failed
        """Kinds that it was refused, one bit each."""
        self.legal = 0
        """Kinds that the mask allows, one bit each."""
        self.minimum = view.minimum
        self.most_workers, self.most_ps = view.workers.maximum, view.ps.maximum
        worker, server = view.worker_demand, view.ps_demand
        self.shares = [
            (of_worker, of_server, whole)
            for of_worker, of_server, whole in (
                (worker.cpu_milli, server.cpu_milli, capacity.cpu_milli),
                (worker.memory_mib, server.memory_mib, capacity.memory_mib),
                (worker.gpu_milli, server.gpu_milli, capacity.gpu_milli),
            )
            if of_worker or of_server
        ]
        """Of each resource that its tasks take: how much a worker and a server take, and how much there is."""

    def share(self) -> float:
        """Dominant share; above 1 only while a lost node still counts as a pinned job's place."""
        share, workers, ps = 0.0, self.workers, self.ps
        for of_worker, of_server, whole in self.shares:
            taken = of_worker * workers + of_server * ps
            if taken:
                part = taken / whole if whole else math.inf
                if part > share:
                    share = part
        return share if share < 1.0 else 1.0

    def is_full(self) -> bool:
        """Whether it can be granted nothing more."""
        return self.workers >= self.most_workers and self.ps >= self.most_ps

    def usable(self) -> int:
        """Kinds that it could still be granted, one bit each."""
        if self.view.pinned or self.workers < self.minimum.workers or self.ps < self.minimum.ps:
            return 0
        workers, ps = self.workers < self.most_workers, self.ps < self.most_ps
        return (workers << WORKER | ps << PS | (workers and ps) << BUNDLE) & ~self.failed

    def column(self) -> tuple[float, ...]:
        """The job's six raw numbers; the last three change with what it is granted."""
        view = self.view
        remaining = view.remaining_epochs / view.epochs if view.epochs > 0 else 0.0
        return type_number(view.job_type), view.waited_slots, remaining, self.share(), self.workers, self.ps


class Window:
    """What the network sees of a slot, kept up to date as grants go out: state, mask, and the job of each column.

    A grant changes three numbers of one column and leaves the others alone, and seldom what is legal; that is what
    makes a slot of some hundred choices cheap.

    Args:
        observation: the slot.
        budget: what of it is granted already, and what is granted without a word to `grew`.
        size: J.
        bias: what legal actions add to the network's outputs (3J+1,); None: nothing.
    """

    def __init__(self, observation: Observation, budget: Budget, size: int, bias: Array | None = None) -> None:
        self._budget = budget
        self._capacity = observation.capacity
        self._failed: dict[JobId, int] = {}
        """Kinds that a job was refused, one bit each."""
        views = [view for view in by_arrival(observation.jobs) if not _full(view, budget.allocation(view.job_id))]
        self._behind = views[size:][::-1]
        """Jobs that move up when one in the window is full, the next one last."""
        self.size = size
        self.jobs = views[:size]
        self._seats = [self._seat(view) for view in self.jobs]
        self._index = {view.job_id: index for index, view in enumerate(self.jobs)}
        self.state: Array = np.zeros((ROWS, size), dtype=np.float32)
        if self.jobs:
            self.state[:, : len(self.jobs)] = np.transpose([seat.column() for seat in self._seats])
        self.inputs = features(self.state[None])
        """(1, 6J), always `features` of the state."""
        self._rows = self.inputs.reshape(ROWS, size)
        self.mask: NDArray[np.bool_] = np.zeros(3 * size + 1, dtype=np.bool_)
        self._bias: Array = np.zeros(3 * size + 1, np.float32) if bias is None else bias
        self.added: Array = np.full(3 * size + 1, -math.inf, dtype=np.float32)
        """What actions add to the network's outputs: legal ones their bias, the others minus infinity."""
        self.mask[-1], self.added[-1] = True, self._bias[-1]
        self._one_state, self._one_input = _one_by_one(self.state), _one_by_one(self.inputs)
        self._one_mask, self._one_added = _one_by_one(self.mask), _one_by_one(self.added)
        self._one_bias = _one_by_one(self._bias)
        self.legal_count = 0
        """How many actions are legal; void is, and does not count."""
        for index, seat in enumerate(self._seats):
            self._note_legal(index, seat)

    def target(self, action: int) -> tuple[JobView, int]:
        """The job and the kind (an index of `KINDS`) that a job action means."""
        return self.jobs[action // 3], action % 3

    def column_of(self, job_id: JobId) -> int | None:
        """Where a job stands in the window, if it does."""
        return self._index.get(job_id)

    def held(self) -> list[Allocation]:
        """What the jobs of the window hold, in its order."""
        return [sized(seat.workers, seat.ps) for seat in self._seats]

    def granted(self, job_id: JobId) -> None:
        """The budget has just granted this job something."""
        index = self._index.get(job_id)
        if index is None:
            return
        have = self._budget.allocation(job_id)
        seat = self._seats[index]
        seat.workers, seat.ps = have.workers, have.ps
        self._changed(index, seat)

    def grew(self, index: int, workers: int, ps: int) -> None:
        """The job of this column has just been granted so many more tasks."""
        seat = self._seats[index]
        seat.workers += workers
        seat.ps += ps
        self._changed(index, seat)

    def refused(self, job_id: JobId, kind: int) -> None:
        """The budget has just refused this job that; room only shrinks, so it stays refused for the slot."""
        failed = self._failed[job_id] = self._failed.get(job_id, 0) | 1 << kind | 1 << BUNDLE
        index = self._index.get(job_id)
        if index is not None:
            seat = self._seats[index]
            seat.failed = failed
            self._note_legal(index, seat)

    def _seat(self, view: JobView) -> _Seat:
        return _Seat(view, self._budget.allocation(view.job_id), self._failed.get(view.job_id, 0), self._capacity)

    def _changed(self, index: int, seat: _Seat) -> None:
        workers, ps, size = seat.workers, seat.ps, self.size
        if workers >= seat.most_workers and ps >= seat.most_ps:
            self._take_out(index)
            return
        share, state, inputs = seat.share(), self._one_state, self._one_input
        at = 3 * size + index
        state[at], inputs[at] = share, share * _SHARE_SCALE
        at += size
        state[at], inputs[at] = workers, workers * _TASKS_SCALE
        at += size
        state[at], inputs[at] = ps, ps * _TASKS_SCALE
        if seat.usable() != seat.legal:
            self._note_legal(index, seat)

    def _take_out(self, gone: int) -> None:
        """A full job leaves; those behind it move up, and the next one in."""
        self.legal_count -= self._seats[gone].legal.bit_count()
        for columns in (self.state, self._rows):
            columns[:, gone:-1] = columns[:, gone + 1 :]
            columns[:, -1] = 0.0
        self.mask[3 * gone : -4] = self.mask[3 * gone + 3 : -1]
        self.mask[-4:-1] = False
        self.added[:] = np.where(self.mask, self._bias, -math.inf)
        del self.jobs[gone], self._seats[gone]
        while self._behind and len(self.jobs) < self.size:
            at, seat = len(self.jobs), self._seat(self._behind.pop())
            if not seat.is_full():
                self.jobs.append(seat.view)
                self._seats.append(seat)
                self.state[:, at] = seat.column()
                self._rows[:, at] = features(self.state[None, :, at : at + 1])[0]
                self._note_legal(at, seat)
        self._index = {view.job_id: index for index, view in enumerate(self.jobs)}

    def _note_legal(self, index: int, seat: _Seat) -> None:
        mask, added, bias, legal = self._one_mask, self._one_added, self._one_bias, seat.usable()
        self.legal_count += legal.bit_count() - seat.legal.bit_count()
        seat.legal = legal
        for kind in (WORKER, PS, BUNDLE):
            action, allowed = 3 * index + kind, bool(legal >> kind & 1)
            mask[action] = allowed
            added[action] = bias[action] if allowed else -math.inf


def _one_by_one(array: NDArray[Any]) -> memoryview[float]:
    """An array's numbers in C order, to read and write single ones in half the time that the array takes for it."""
    return cast("memoryview[float]", array.reshape(-1).data)


def _full(view: JobView, have: Allocation) -> bool:
    return have.workers >= view.workers.maximum and have.ps >= view.ps.maximum


# --- Networks ----------------------------------------------------------------------------------------------------


SCALE = (1 / 8, 1.0, 1.0, 1.0, 1 / 8, 1 / 8)
"""Of the rows; the second one's logarithm is divided by 4 then."""
_SHARE_SCALE, _TASKS_SCALE = SCALE[3], SCALE[4]


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
    """`forward`, `probabilities` and `draw` for one slot of some hundred choices, in half as many steps: networks of
    this size cost less than calling numpy for them.

    Logits are the same to the last bit. Probabilities stay without their common factor, which a draw does not need; so
    they may differ in the last bit of a float64.

    Args:
        arrays: weights of `shape`.
    """

    def __init__(self, arrays: Arrays, shape: Dl2Shape) -> None:
        layers = [(arrays[f"policy.{at}.weight"], arrays[f"policy.{at}.bias"]) for at in range(len(shape.hidden) + 1)]
        self._hidden = [(weight.dot, bias, np.zeros_like(bias), np.empty_like(bias)) for weight, bias in layers[:-1]]
        self._last, self.bias = layers[-1][0].dot, layers[-1][1]
        self._outputs, self._logits = np.empty_like(self.bias), np.empty_like(self.bias)
        self._relative: NDArray[np.float64] = np.empty(shape.actions)
        self._sums: NDArray[np.float64] = np.empty(shape.actions)
        self._one_relative, self._one_sum = _one_by_one(self._relative), _one_by_one(self._sums)

    def look(self, inputs: Array) -> None:
        """Compute the outputs, without the last bias, for a state (6J,)."""
        values = inputs
        for dot, bias, zeros, out in self._hidden:
            dot(values, out)
            _add(out, bias, out)
            values = _maximum(out, zeros, out=out)
        self._last(values, self._outputs)

    def over(self, added: Array) -> None:
        """Find how likely each action is in the state that was looked at last.

        Args:
            added: see `Window.added`.

        Raises:
            ArithmeticError: the network's outputs are not finite.
        """
        relative = self._relative
        np.copyto(relative, _add(self._outputs, added, self._logits))
        _exp(relative, relative)
        _accumulate(relative, 0, None, self._sums)
        if not 1e-200 < self._one_sum[-1] < 1e200:  # only then is the common factor worth its time
            if not np.isfinite(self._outputs).all():
                raise ArithmeticError("the policy network's outputs are not finite")
            relative[:] = probabilities(self._logits, np.isfinite(self._logits))
            _accumulate(relative, 0, None, self._sums)

    def draw(self, uniform: float) -> int:
        """`draw` of what `over` found last."""
        index = bisect_right(self._one_sum, uniform * self._one_sum[-1])
        return index if index < len(self._sums) else int(np.flatnonzero(self._relative)[-1])

    def likeliest(self) -> int:
        """The action that `over` found likeliest; the first of equals."""
        return int(self._relative.argmax())

    def of(self, action: int) -> float:
        """The probability of an action that `over` found last."""
        return self._one_relative[action] / self._one_sum[-1]

    def of_all(self) -> NDArray[np.float64]:
        """The probabilities that `over` found last."""
        chances: NDArray[np.float64] = self._relative / self._sums[-1]
        return chances


_add, _maximum, _exp, _accumulate = np.add, np.maximum, np.exp, np.add.accumulate


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
    action: int
    probability: float
    """Of the action, for the network over what was legal; where exploration chose instead, still the network's."""
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
        self._retell: Callable[[], Iterable[DecisionSample]] | None = None
        """Makes the trace of the last decision, until somebody has asked for it."""

    def decide(self, observation: Observation, budget: Budget) -> Decision:
        """Minimum for every job, then one action after the other until void or until nothing is legal."""
        version, arrays = self._weights
        self._trace, self._retell = (), None
        admit([view for view in by_arrival(observation.jobs) if not view.pinned], budget)
        before = _Before(budget.allocations())
        with np.errstate(over="ignore"):  # `_Chances` sees to it
            choices = self._spend(observation, budget, _Chances(arrays, self.shape))
        self._retell = partial(_retold, observation, before, self.shape, version, choices)
        return Decision(observation.slot, budget.allocations(), self.name, version)

    def _spend(self, observation: Observation, budget: Budget, network: _Chances) -> list[_Choice]:
        """Choose, grant, look again; what was chosen."""
        window, choices = Window(observation, budget, self.shape.window, network.bias), list[_Choice]()
        uniform = stream(self._seed, f"dl2/act/{observation.slot}").random
        exploration = stream(self._seed, f"dl2/explore/{observation.slot}") if self._explorer is not None else None
        inputs, jobs, explore, void = window.inputs[0], window.jobs, self._explore, self.shape.void
        network.look(inputs)
        while window.legal_count:
            network.over(window.added)
            action = network.draw(uniform()) if explore else network.likeliest()
            if self._explorer is not None and exploration is not None:
                action = self._explorer.choose(window, network.of_all(), action, exploration)
            if action == void:
                choices.append((action, network.of(action), True))
                break
            index, kind = divmod(action, 3)
            job_id, (workers, ps) = jobs[index].job_id, _TASKS[kind]
            granted = budget.grant(job_id, workers, ps)
            choices.append((action, network.of(action), granted))
            if granted:
                window.grew(index, workers, ps)
                network.look(inputs)
            else:
                window.refused(job_id, kind)
        return choices

    def last_trace(self) -> tuple[DecisionSample, ...]:
        """The choices of the slot decided last; empty when there was nothing to choose."""
        if self._retell is not None:
            self._trace, self._retell = tuple(self._retell()), None
        return self._trace


_Choice = tuple[int, float, bool]
"""Action, its probability, whether it was granted."""


class _Before:
    """What jobs held before the first choice of a slot, and no more to grant."""

    def __init__(self, allocations: tuple[tuple[JobId, Allocation], ...]) -> None:
        self._allocations = allocations
        self._of = dict(allocations)

    def grant(self, job_id: JobId, workers: int = 0, ps: int = 0, accelerator: str = "") -> bool:
        """Nothing."""
        return False

    def allocation(self, job_id: JobId) -> Allocation:
        """Of one job."""
        return self._of.get(job_id, Allocation())

    def allocations(self) -> tuple[tuple[JobId, Allocation], ...]:
        """Of all that held anything."""
        return self._allocations


def _retold(
    observation: Observation, before: Budget, shape: Dl2Shape, version: int, choices: list[_Choice]
) -> Iterator[DecisionSample]:
    """The samples that a slot's choices are.

    They are made when somebody asks, which where nothing is learned nobody does; keeping what the network saw at each
    choice would take a sixth of a slot's time.
    """
    window = Window(observation, before, shape.window)
    for action, probability, granted in choices:
        index, kind = divmod(action, 3)
        job_id = window.jobs[index].job_id if action != shape.void else None
        if granted:
            state, mask = window.state.copy(), window.mask.copy()
            yield DecisionSample(observation.slot, version, state, mask, action, probability, job_id)
        if job_id is None:
            return
        if granted:
            window.grew(index, *_TASKS[kind])
        else:
            window.refused(job_id, kind)
