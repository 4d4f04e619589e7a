"""The `set` policy: one pass of a permutation-equivariant network sizes and ranks all jobs of a slot. Read it top down.

A slot is decided at once: the network looks at all jobs together (Deep Sets, Zaheer et al. 2017: each job's own layers
and the mean over all jobs) and says for every job how many parameter servers it should have, how many workers beside
those, and how urgent it is. Then the budget is spent in the order of urgency; what comes late waits.

Details that matter:

* It is a black box: it sees what the agent sees, which is declared epochs, progress, waiting, allocations, speeds
  observed so far, job types and capacity. Time counts in slots and resources as shares of the cluster, so jobs and
  clusters may be of any number and size.
* There is no choice "wait": an argmax over one starves jobs for ever. Who waits follows from the urgency alone.
* Sizes come from a fine grid (`COUNTS`); a coarse one costs 5 % of the completion time. Jobs without parameter servers
  and rigid jobs have fewer legal sizes, nothing else is special about them.
* A job's type enters as the sum of two rows of a table, by two hashes of its name: any name has a place, two names
  hardly ever the same two. Rows that were never trained are zero, as is what the type `unknown` stands for, of which
  training has its share; so a new type is decided by what is seen of its jobs.
* Staying as it is gets a bonus on its logits, in training too, because every resize pauses a job.
* A job that got less than a small share of what its minimum would have had since it came is starving: its minimum goes
  before everybody else's wishes, the most deprived first.
* A job whose size does not fit any more gets what fits, parameter servers first; one whose minimum does not fit is
  passed over.

Acting needs numpy only; the same layers serve torch tensors in training (`learn/clipped.py`).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fedsched.config import Tree
from fedsched.core.decision import Budget, Decision, JobView, Observation
from fedsched.core.ids import JobId, stream
from fedsched.core.job import Allocation, allocation_of, sized
from fedsched.core.resources import OVERDRAWN, Resources, amount_of
from fedsched.policy.heuristics import by_arrival
from fedsched.policy.learnable import Array, Arrays, Weighted, fresh
from fedsched.policy.optimus import EPOCHS_PER_S_MIN

# --- The shape of the problem ------------------------------------------------------------------------------------

UNKNOWN = "unknown"
"""The type of jobs that were given none: they need not be alike."""
NEVER = (0.0, 0, 0)
"""The speed of jobs that were never seen running, and with how many workers and servers."""
SHARE_MAX = 100.0
"""A task that the cluster cannot hold at all counts as so many clusters."""
COUNTS: NDArray[np.int64] = np.array([*range(17), 20, 24, 32, 48, 64, 96, 128, 192, 256, 512])
"""Numbers of tasks that the network chooses from; a job's own limits bound them."""
FEATURES = 20
"""Numbers that describe a job; see `encode`."""


@dataclass(frozen=True, slots=True)
class SetShape:
    """Sizes that weights must agree on."""

    FORMAT: ClassVar[str] = "fedsched/set/1"
    """Of checkpoint files."""
    width: int = 64
    """Of every hidden layer."""
    rows: int = 256
    """Of the table of job types."""

    def layers(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every weight array, sorted by name."""
        sizes = len(COUNTS)
        result: dict[str, tuple[int, ...]] = {}
        for network in ("policy", "value"):
            result[f"{network}.types"] = (self.rows, self.width)
            result[f"{network}.mean.weight"] = (self.width, self.width)
            for index, inputs in enumerate((FEATURES, self.width, self.width)):
                result |= _layer(f"{network}.{index}", inputs, self.width)
        result |= _layer("policy.ps", self.width, sizes)
        result |= _layer("policy.beside", self.width, self.width)
        result["policy.beside.ps"] = (sizes, self.width)
        result |= _layer("policy.workers", self.width, sizes)
        result |= _layer("policy.urgency", self.width, 1)
        result["policy.urgency.deviation"] = (1,)
        result |= _layer("value.out", self.width, 1)
        return dict(sorted(result.items()))

    def card(self) -> dict[str, Any]:
        """What a checkpoint file says of the shape."""
        return {"width": self.width, "rows": self.rows, "features": FEATURES, "counts": COUNTS.tolist()}

    @classmethod
    def of_card(cls, card: Mapping[str, Any]) -> SetShape:
        """The shape that `card` told of.

        Raises:
            ValueError: it is of a policy that sees or chooses something else.
            KeyError, TypeError: it is no card.
        """
        if card["features"] != FEATURES or card["counts"] != COUNTS.tolist():
            raise ValueError(f"made for {card['features']} features and the sizes {card['counts']}")
        return cls(int(card["width"]), int(card["rows"]))


def _layer(name: str, inputs: int, outputs: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


# --- What the network sees ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class SetInputs:
    """All jobs of a slot as the network's inputs; m jobs, c = len(COUNTS) sizes."""

    features: Array
    """(m, FEATURES)."""
    types: NDArray[np.int64]
    """(m, 2): rows of the table of types."""
    typed: Array
    """(m, 1): 1, or 0 where the type says nothing."""
    ps_legal: NDArray[np.bool_]
    """(m, c)."""
    workers_legal: NDArray[np.bool_]
    """(m, c)."""
    ps_now: NDArray[np.int64]
    """(m,): index of the size that it has now; -1 if it does not run."""
    workers_now: NDArray[np.int64]
    """(m,): the same of its workers."""


def encode(observation: Observation, views: Sequence[JobView], shape: SetShape) -> SetInputs:
    """The observation's jobs, in the order of `views`, as the network sees them."""
    capacity = observation.capacity
    kinds = [_kind(view) for view in views]
    best = _fastest_by_type(views, kinds)
    shares: dict[Resources, float] = {}
    numbers = chain.from_iterable(
        _row(view, observation.slot_length_s, best.get(kind, NEVER), _shares(view, capacity, shares))
        for view, kind in zip(views, kinds, strict=True)
    )
    rows = np.fromiter(numbers, np.float64).reshape(len(views), -1)
    waited, epochs, remaining, rate, known, known_workers, known_ps, workers, ps = rows.T[:9]
    worker_share, ps_share, workers_min, workers_max, ps_min, ps_max = rows.T[9:]
    least = np.maximum(1.0, workers_min) * worker_share + ps_min * ps_share
    is_known = known > 0
    fastest = np.where(is_known, known, 1.0)
    features = np.stack(
        [
            np.log1p(waited) / 4,
            remaining / np.maximum(epochs, 1e-9),
            np.log1p(remaining) / 10,
            np.log1p(epochs) / 10,
            is_known,
            np.where(is_known, _log(remaining / fastest, 0.05, 1e4), 0.0),
            np.where(is_known, rate / fastest, 0.0),
            workers > 0,
            *(np.log1p(count) / 3 for count in (ps, workers, known_ps, known_workers)),
            *(np.log1p(count) / 3 for count in (workers_min, workers_max, ps_min, ps_max)),
            # How many such tasks for every job would fill the cluster.
            _log(len(views) * worker_share, 1e-4, 1e4),
            _log(len(views) * ps_share, 1e-4, 1e4),
            worker_share / np.maximum(worker_share + ps_share, 1e-12),
            np.full(len(views), float(_log(least.sum(), 1e-4, 1e4))),
        ],
        axis=1,
    ).astype(np.float32)
    types = np.array([type_rows(view.job_type, shape.rows) for view in views], dtype=np.int64)
    typed = np.array([[view.job_type != UNKNOWN] for view in views], dtype=np.float32)
    running = workers > 0
    return SetInputs(
        features,
        types,
        typed,
        _legal(ps_min, ps_max),
        _legal(np.maximum(1.0, workers_min), workers_max),
        np.where(running, nearest(ps), -1),
        np.where(running, nearest(workers), -1),
    )


def _log(values: Any, low: float, high: float) -> Any:
    return np.log(np.clip(values, low, high)) / 3


def _fastest_by_type(views: Sequence[JobView], kinds: Sequence[str]) -> dict[str, tuple[float, int, int]]:
    """The highest speed (epochs per second) observed of any live job of a type, with the workers and servers it had."""
    best: dict[str, tuple[float, int, int]] = {}
    for view, kind in zip(views, kinds, strict=True):
        top = before = best.get(kind, (EPOCHS_PER_S_MIN, 0, 0))
        for sample in view.speeds:
            if sample.epochs_per_s >= top[0]:
                top = max(top, (sample.epochs_per_s, sample.workers, sample.ps))
        if top > before:
            best[kind] = top
    return best


def _kind(view: JobView) -> str:
    """Jobs of the same kind scale alike; those of no type are each of their own."""
    return view.job_type if view.job_type != UNKNOWN else f"{UNKNOWN} {view.job_id}"


def _shares(view: JobView, capacity: Resources, known: dict[Resources, float]) -> tuple[float, float]:
    """Of the cluster, that a worker and a parameter server take."""
    for demand in (view.worker_demand, view.ps_demand):
        if demand not in known:
            known[demand] = min(demand.dominant_share(capacity), SHARE_MAX)
    return known[view.worker_demand], known[view.ps_demand]


def _row(
    view: JobView, slot_s: float, fastest: tuple[float, int, int], shares: tuple[float, float]
) -> tuple[float, ...]:
    have, workers, ps = allocation_of(view.placement), view.workers, view.ps
    rate = 0.0
    for sample in reversed(view.speeds):  # most likely it is the newest one
        if sample.workers == have.workers and sample.ps == have.ps:
            rate = sample.epochs_per_s
            break
    return (
        view.waited_slots,
        view.epochs,
        view.remaining_epochs,
        rate * slot_s,
        fastest[0] * slot_s,
        *fastest[1:],
        have.workers,
        have.ps,
        *shares,
        workers.minimum,
        workers.maximum,
        ps.minimum,
        ps.maximum,
    )


@lru_cache(maxsize=4096)
def type_rows(job_type: str, rows: int) -> tuple[int, int]:
    """Two rows of the table of types: the same for the same name in every process and on every cluster."""
    digest = hashlib.sha256(job_type.encode()).digest()
    return int.from_bytes(digest[:4], "big") % rows, int.from_bytes(digest[4:8], "big") % rows


def nearest(counts: NDArray[Any]) -> NDArray[np.int64]:
    """Indices of the sizes nearest to these counts, the smaller of two."""
    found: NDArray[np.int64] = np.abs(COUNTS - np.asarray(counts)[:, None]).argmin(axis=1)
    return found


def _legal(low: NDArray[Any], high: NDArray[Any]) -> NDArray[np.bool_]:
    """Which sizes lie within each job's limits; where none does, the nearest stands for the lower limit."""
    legal: NDArray[np.bool_] = (low[:, None] <= COUNTS) & (high[:, None] >= COUNTS)
    none = np.flatnonzero(~legal.any(axis=1))
    legal[none, nearest(low[none])] = True
    return legal


# --- Networks ----------------------------------------------------------------------------------------------------

Pooling = Callable[[Any, Any], Any]
"""Mean over a slot's jobs, times a weight: ((m, width), (width, width)) to (m, width), or one row for all jobs."""


def pool_one(hidden: Any, weight: Any) -> Any:
    """The pool where all jobs are of one slot."""
    return hidden.mean(axis=0, keepdims=True) @ weight.T


def trunk(arrays: Mapping[str, Any], network: str, features: Any, types: Any, pool: Pooling) -> Any:
    """What there is to know of each job among the others, (m, width); on numpy arrays or torch tensors alike.

    Args:
        arrays: the weights.
        network: `policy` or `value`.
        features: (m, FEATURES).
        types: (m, width), the sums of two rows of the network's table; zero where the type is not to be known.
        pool: means over the jobs of a slot.
    """
    hidden = linear(arrays, f"{network}.0", features) + types
    hidden = linear(arrays, f"{network}.1", hidden.clip(min=0)).clip(min=0)
    context = pool(hidden, arrays[f"{network}.mean.weight"])
    return (linear(arrays, f"{network}.2", hidden) + context).clip(min=0)


def linear(arrays: Mapping[str, Any], name: str, inputs: Any) -> Any:
    """One layer without its nonlinearity."""
    return inputs @ arrays[f"{name}.weight"].T + arrays[f"{name}.bias"]


def of_types(arrays: Mapping[str, Any], network: str, types: Any, typed: Any) -> Any:
    """What the table says of each job's type, (m, width)."""
    table = arrays[f"{network}.types"]
    return (table[types[:, 0]] + table[types[:, 1]]) * typed


def ps_logits(arrays: Mapping[str, Any], jobs: Any) -> Any:
    """(m, c) from the policy's trunk."""
    return linear(arrays, "policy.ps", jobs)


def worker_logits(arrays: Mapping[str, Any], jobs: Any, ps: Any) -> Any:
    """(m, c) from the policy's trunk and the chosen numbers of servers (indices)."""
    beside = linear(arrays, "policy.beside", jobs) + arrays["policy.beside.ps"][ps]
    return linear(arrays, "policy.workers", beside.clip(min=0))


def urgency(arrays: Mapping[str, Any], jobs: Any) -> Any:
    """(m,): who comes first; the mean of a normal distribution with the deviation exp(policy.urgency.deviation)."""
    return linear(arrays, "policy.urgency", jobs)[:, 0]


def values(arrays: Mapping[str, Any], features: Any, types: Any, pool: Pooling) -> Any:
    """(m,): what each job's slot is expected to bring."""
    return linear(arrays, "value.out", trunk(arrays, "value", features, types, pool))[:, 0]


def initial(shape: SetShape, seed: int) -> dict[str, Array]:
    """Fresh weights: hidden layers uniform with He's bound, outputs near zero, so that nothing is preferred."""
    layers = shape.layers()

    def bound(name: str) -> float | None:
        if len(layers[name]) != 2 or name.endswith(".types"):
            return None
        outputs = name.split(".")[1] in ("ps", "workers", "urgency", "out") or name == "policy.beside.ps"
        return 0.01 if outputs else math.sqrt(6 / layers[name][1])

    return fresh(layers, bound, "set/initial", seed)


# --- Choosing ----------------------------------------------------------------------------------------------------


def log_softmax(logits: NDArray[Any], legal: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Log-probabilities over what is legal, (m, c)."""
    shifted = np.where(legal, logits.astype(np.float64), -np.inf)
    shifted -= shifted.max(axis=1, keepdims=True)
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return result


def with_stay(logits: NDArray[Any], now: NDArray[np.int64], bonus: float) -> NDArray[Any]:
    """The logits with the bonus on each job's present size; `now` is -1 where there is none."""
    result = logits.copy()
    rows = np.flatnonzero(now >= 0)
    result[rows, now[rows]] += bonus
    return result


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """What the network chose for each job of a slot, before the budget had its say."""

    ps: NDArray[np.int64]
    """(m,): indices of `COUNTS`."""
    workers: NDArray[np.int64]
    urgency: NDArray[np.float64]
    chance: Array
    """(m,): log-probability (density) of the three together."""


def choose(arrays: Arrays, seen: SetInputs, stay: float, uniform: NDArray[np.float64] | None) -> Choice:
    """The likeliest sizes, or drawn ones.

    Args:
        arrays: the weights.
        seen: the jobs.
        stay: bonus on the logits of the present size.
        uniform: (m, 4) numbers in 0..1 to draw with; None takes the likeliest and the mean urgency.

    Raises:
        ArithmeticError: the network's outputs are not finite.
    """
    jobs = trunk(arrays, "policy", seen.features, of_types(arrays, "policy", seen.types, seen.typed), pool_one)
    means = urgency(arrays, jobs).astype(np.float64)
    of_ps = log_softmax(with_stay(ps_logits(arrays, jobs), seen.ps_now, stay), seen.ps_legal)
    ps = _pick(of_ps, None if uniform is None else uniform[:, 0])
    # Staying means both numbers: who changes its servers has no present number of workers.
    workers_now = np.where(ps == seen.ps_now, seen.workers_now, -1)
    of_workers = log_softmax(with_stay(worker_logits(arrays, jobs, ps), workers_now, stay), seen.workers_legal)
    workers = _pick(of_workers, None if uniform is None else uniform[:, 1])
    if not (np.isfinite(means).all() and np.isfinite(of_ps.max(axis=1)).all() and np.isfinite(of_workers.max(1)).all()):
        raise ArithmeticError("the policy network's outputs are not finite")
    deviation = float(arrays["policy.urgency.deviation"][0])
    normal = np.zeros(len(means)) if uniform is None else _normal(uniform[:, 2], uniform[:, 3])
    rows = np.arange(len(means))
    chance = of_ps[rows, ps] + of_workers[rows, workers] - normal**2 / 2 - deviation
    return Choice(ps, workers, means + math.exp(deviation) * normal, chance.astype(np.float32))


def _pick(log_chances: NDArray[np.float64], uniform: NDArray[np.float64] | None) -> NDArray[np.int64]:
    if uniform is None:
        likeliest: NDArray[np.int64] = log_chances.argmax(axis=1)
        return likeliest
    cumulative = np.exp(log_chances).cumsum(axis=1)
    drawn: NDArray[np.int64] = (cumulative <= uniform[:, None] * cumulative[:, -1:]).sum(axis=1)
    return drawn


def _normal(one: NDArray[np.float64], other: NDArray[np.float64]) -> NDArray[np.float64]:
    """Standard normal numbers from uniform ones (Box and Muller)."""
    drawn: NDArray[np.float64] = np.sqrt(-2 * np.log1p(-one)) * np.cos(2 * math.pi * other)
    return drawn


@dataclass(frozen=True, slots=True, eq=False)
class SlotSample:
    """A slot's choices, as the learner needs them."""

    slot: int
    version: int
    """Of the weights that chose."""
    jobs: tuple[JobId, ...]
    kinds: tuple[str, ...]
    """Of jobs that scale alike."""
    epochs: NDArray[np.float64]
    """(m,): declared."""
    remaining: NDArray[np.float64]
    """(m,): epochs still to do when the slot began."""
    free: NDArray[np.bool_]
    """(m,): whose size was the policy's to choose; pinned jobs are only looked at."""
    stay: float
    seen: SetInputs
    choice: Choice


# --- The policy --------------------------------------------------------------------------------------------------


class SetOptions(Tree):
    """What an operator may want otherwise."""

    stay: float = Field(default=0.5, ge=0)
    """Bonus on the logits of a job's present size: above 0, jobs are resized less often."""
    starving_share: float = Field(default=0.05, ge=0, le=1)
    """Who got less than this share of its minimum's task-time since it came is starving; 0: nobody ever is."""
    patience_slots: int = Field(default=10, ge=0)
    """Nobody starves in as many slots after it came."""
    fairness: float = Field(default=0.0, ge=0)
    """How much urgency grows with each halving of the share of its minimum's task-time that a job got."""


class Set(Weighted[SetShape, SlotSample]):
    """The learned policy behind the `Policy` protocol.

    Decisions depend on the observation, the weights, the seed and the slot's number, on nothing else. `load` may be
    called from another thread while `decide` runs: a slot is decided with one set of weights from start to end.

    Args:
        arrays: weights of `shape`.
        version: theirs.
        explore: draw sizes and urgencies, as learning needs it; else take the likeliest.

    Raises:
        ValueError: the weights are not of this shape or not finite.
    """

    name: ClassVar[str] = "set"
    Options = SetOptions

    def __init__(
        self,
        arrays: Arrays,
        version: int = 1,
        *,
        shape: SetShape | None = None,
        seed: int = 0,
        explore: bool = True,
        options: SetOptions | None = None,
    ) -> None:
        super().__init__(arrays, version, shape or SetShape())
        self._options = options or SetOptions()
        self._seed = seed
        self._explore = explore

    def decide(self, observation: Observation, budget: Budget) -> Decision:
        """Choose for all jobs at once, then spend the budget in the order of urgency."""
        version, arrays = self._weights
        self._trace = ()
        views = by_arrival(observation.jobs)
        if any(not view.pinned for view in views):
            seen = encode(observation, views, self.shape)
            choice = choose(arrays, seen, self._options.stay, self._uniform(observation.slot, len(views)))
            self._trace = (self._sample(observation.slot, version, views, seen, choice),)
            self._spend(observation, views, choice, budget)
        return Decision(observation.slot, budget.allocations(), self.name, version)

    def _uniform(self, slot: int, jobs: int) -> NDArray[np.float64] | None:
        if not self._explore:
            return None
        draw = stream(self._seed, f"set/act/{slot}").random
        return np.array([draw() for _ in range(4 * jobs)]).reshape(jobs, 4)

    def _sample(self, slot: int, version: int, views: Sequence[JobView], seen: SetInputs, choice: Choice) -> SlotSample:
        return SlotSample(
            slot,
            version,
            tuple(view.job_id for view in views),
            tuple(_kind(view) for view in views),
            np.array([view.epochs for view in views]),
            np.array([view.remaining_epochs for view in views]),
            np.array([not view.pinned for view in views]),
            self._options.stay,
            seen,
            choice,
        )

    def _spend(self, observation: Observation, views: Sequence[JobView], choice: Choice, budget: Budget) -> None:
        """Starving jobs' minima first, then whole wishes in the order of urgency; users' priorities before both."""
        options = self._options
        purse = _Purse(observation, views, budget)
        order = [index for index, view in enumerate(views) if not view.pinned]
        got = [_share_got(view, observation.slot_length_s) for view in views]
        starving = [
            index
            for index in order
            if got[index] < options.starving_share and views[index].waited_slots >= options.patience_slots
        ]
        for index in sorted(starving, key=lambda index: (-views[index].priority, got[index], index)):
            purse.serve(views[index], views[index].minimum)
        ranks = (choice.urgency - options.fairness * np.log2(np.maximum(got, 1e-3))).tolist()
        workers, ps = COUNTS[choice.workers].tolist(), COUNTS[choice.ps].tolist()
        for index in sorted(order, key=lambda index: (-views[index].priority, -ranks[index], index)):
            view = views[index]
            least, most = view.minimum, view.workers.maximum
            some = max(least.workers, min(workers[index], most))
            purse.serve(view, sized(some, max(least.ps, min(ps[index], view.ps.maximum))))


def _share_got(view: JobView, slot_length_s: float) -> float:
    """Task-time that the job got since it came, as a share of what its minimum would have got; 1 for a new one."""
    tasks = max(1, view.workers.minimum) + view.ps.minimum
    due_s = view.waited_slots * slot_length_s * tasks
    return min(1.0, view.attained_s / due_s) if due_s > 0 else 1.0


class _Purse:
    """The budget with a sum of what is left of it, so that it is not asked for what cannot be there."""

    def __init__(self, observation: Observation, views: Sequence[JobView], budget: Budget) -> None:
        self._budget = budget
        self._granted = {job_id: (size.workers, size.ps) for job_id, size in budget.allocations()}
        known: dict[Resources, int] = {}
        for view in views:
            for demand in (view.worker_demand, view.ps_demand):
                if demand not in known:
                    known[demand] = amount_of(demand)
        self._takes = {view.job_id: (known[view.worker_demand], known[view.ps_demand]) for view in views}
        """What a worker and a parameter server of each job take."""
        left = amount_of(observation.capacity)
        if self._granted:
            there = {node.name for node in observation.nodes}
            for view in views:
                have = self._granted.get(view.job_id)
                # Tasks on a node that is lost take no room; better to ask in vain than not to ask.
                if have is not None and all(entry.node in there for entry in view.placement):
                    left -= self._amount(view, *have)
        self._left = left

    def serve(self, view: JobView, wish: Allocation) -> None:
        """Give the job its wish or, where that does not fit, its minimum and then parameter servers before workers."""
        workers, ps = self._granted.get(view.job_id, (0, 0))
        if self._take(view, max(0, wish.workers - workers), max(0, wish.ps - ps)):
            return
        least = view.minimum
        if not self._take(view, max(0, least.workers - workers), max(0, least.ps - ps)):
            return
        workers, ps = self._granted.get(view.job_id, (0, 0))
        while ps < wish.ps and self._take(view, 0, 1):
            ps += 1
        while workers < wish.workers and self._take(view, 1, 0):
            workers += 1

    def _take(self, view: JobView, workers: int, ps: int) -> bool:
        if not workers and not ps:
            return True
        left = self._left - self._amount(view, workers, ps)
        if left & OVERDRAWN or not self._budget.grant(view.job_id, workers, ps):
            return False
        self._left = left
        have = self._granted.get(view.job_id, (0, 0))
        self._granted[view.job_id] = (have[0] + workers, have[1] + ps)
        return True

    def _amount(self, view: JobView, workers: int, ps: int) -> int:
        worker, server = self._takes[view.job_id]
        return worker * workers + server * ps
