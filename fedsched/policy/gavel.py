"""Gavel (Narayanan et al., OSDI 2020): shares of time per accelerator type from a linear program, realised in rounds.

The rule (sections 3 to 5 of the paper): `x[j,t]` is the fraction of time that job j should spend on type t. With the
effective throughput `sum_t T[j,t] x[j,t]` a policy is an objective over

    x >= 0,   sum_t x[j,t] <= 1 for every job,   sum_j demand[j] x[j,t] <= capacity[t] for every type.

* `gavel_maxmin`: greatest z with `z <= g[j] * throughput[j] / T_equal[j]`, where g is the size of the gang and T_equal
  the throughput with the same share of every type for every job.
* `gavel_makespan`: least H with `throughput[j] >= remaining[j] / H`. Solved for 1/H at once; Gavel's code bisects H.

Each slot is a round: on each type, fastest first, the jobs with the greatest `x / time received since the shares were
computed` run next, and others where those leave room; ties go to those whom earlier plans promised more than they got
(Gavel's deficits). Bigger gangs are placed first.

Departures, most of them because this runs live:

* no packing of two jobs on one accelerator;
* capacity counts every resource of the nodes of a type, not accelerators alone;
* a gang is the job's minimum; what the gangs leave lets the running jobs grow on their type, in turn. A gang that no
  type can hold has no share, and runs over several types where the others leave room for it;
* shares are computed anew when jobs, nodes or estimates change, but every `replan_slots` at the soonest, counted in
  rounds, not seconds. A job that came meanwhile gets what the others leave (`wait_for_plan`: nothing, as there);
* optima are rarely unique, and Gavel takes what its solver returns. `policy/interior.py` follows that solver's path to
  the same end, to about 1e-6; where that fails, a corner of the optimal face is taken;
* jobs of higher priority are served first in every round.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from scipy.optimize import linprog
from scipy.sparse import csr_array, diags_array, hstack, kron, vstack

from fedsched.config import Tree
from fedsched.core.decision import Budget, Decision, JobView, Observation
from fedsched.core.ids import JobId, stream
from fedsched.core.resources import Resources
from fedsched.policy import interior
from fedsched.policy.heuristics import by_arrival, next_step
from fedsched.policy.throughput import throughputs

Array = NDArray[np.float64]


class GavelOptions(Tree):
    """How Gavel plans."""

    replan_slots: int = Field(default=6, ge=1)
    """Fewest slots between two computations of the shares. Gavel's simulator: 1920 s in rounds of 360 s."""
    aware: bool = True
    """Whether a type counts by the job's speed on it; else all types count alike, the baseline of Gavel's paper."""
    wait_for_plan: bool = False
    """A job that comes between two plans waits for the next one, as in Gavel's simulator; else it gets what the others
    leave until then."""
    seed: int = 0
    """Of the order in which types are filled where they count alike."""


@dataclass(frozen=True, slots=True)
class _Types:
    """Accelerator types of the cluster, sorted by name, with what their nodes hold together."""

    names: tuple[str, ...]
    capacity: tuple[Resources, ...]

    @property
    def sizes(self) -> Array:
        """How much of the cluster each type is: its accelerators, or its cores where nothing has accelerators."""
        gpus = np.array([room.gpu_milli for room in self.capacity], dtype=np.float64)
        return gpus if gpus.any() else np.array([room.cpu_milli for room in self.capacity], dtype=np.float64)


@dataclass(frozen=True, slots=True)
class _Plan:
    """Shares of time, and what each job had received when they were computed."""

    slot: int
    time_s: float
    basis: tuple[object, ...]
    """What the shares follow from; the same basis gives the same shares."""
    jobs: frozenset[JobId]
    """All that were there."""
    shares: Mapping[tuple[JobId, str], float]
    before: Mapping[tuple[JobId, str], float]
    """Task-seconds received until then."""
    owed: Mapping[tuple[JobId, str], float]
    """Seconds that earlier plans promised and their rounds did not bring; negative where they brought more."""

    def received_s(self, view: JobView, kind: str) -> float:
        """Time on the type since then."""
        tasks = view.minimum.workers + view.minimum.ps
        taken_s = dict(view.attained_by).get(kind, 0.0) - self.before.get((view.job_id, kind), 0.0)
        return max(0.0, round(taken_s / tasks, 6))

    def owed_at(self, view: JobView, kind: str, now_s: float) -> float:
        """What it owes to the job at this time, with what it took over from the plans before."""
        pair = (view.job_id, kind)
        promised_s = self.shares.get(pair, 0.0) * (now_s - self.time_s)
        return self.owed.get(pair, 0.0) + promised_s - self.received_s(view, kind)


class Gavel(ABC):
    """Computes shares now and then, and fills each round with the jobs that lag most behind theirs.

    Keeps the last plan; a new object simply makes a plan at once.
    """

    name: ClassVar[str]
    version: ClassVar[int] = 0
    Options = GavelOptions

    def __init__(self, options: GavelOptions | None = None) -> None:
        self._options = options or GavelOptions()
        self._plan: _Plan | None = None

    @abstractmethod
    def _worth(self, views: Sequence[JobView], speeds: Array, equal: Array) -> Array:
        """What a whole share of each type does for each job's part of the objective, whose least part is maximised.

        Args:
            views: the jobs, one a row.
            speeds: epochs per second by job and type, zero where a job cannot run.
            equal: epochs per second of each job with equal shares.
        """

    def decide(self, observation: Observation, budget: Budget) -> Decision:
        """Plan if it is time, then choose who runs where in this round."""
        views = by_arrival(observation.jobs)
        types = _types(observation)
        speeds = self._speeds(views, types)
        plan = self._planned(observation, views, types, speeds)
        if self._options.wait_for_plan:
            shown = [row for row, view in enumerate(views) if view.job_id in plan.jobs]
            views, speeds = [views[row] for row in shown], speeds[shown]
        this = _Round(observation, views, types, speeds, plan, budget)
        this.fill(self._type_order(observation.slot, speeds))
        chosen = tuple(sorted((job_id, kind) for job_id, kind in this.chosen.items() if kind))
        return Decision(observation.slot, budget.allocations(), self.name, accelerators=chosen)

    def _speeds(self, views: Sequence[JobView], types: _Types) -> Array:
        """Epochs per second of each job's gang on each type; zero where it may not or cannot run."""
        known = throughputs(views, types.names)
        speeds = np.array(
            [
                [
                    known.get((view.job_id, kind), 0.0) if _gang(view).fits_in(room) else 0.0
                    for kind, room in zip(types.names, types.capacity, strict=True)
                ]
                for view in views
            ],
            dtype=np.float64,
        ).reshape(len(views), len(types.names))
        return speeds if self._options.aware else (speeds > 0).astype(np.float64)

    def _type_order(self, slot: int, speeds: Array) -> list[int]:
        """Fastest first, on average over jobs whose own mean counts as one; by chance where types count alike."""
        types = speeds.shape[1]
        if not self._options.aware:
            chance = stream(self._options.seed, f"gavel/{slot}")
            return sorted(range(types), key=lambda _: chance.random())
        sums = speeds.sum(axis=1, keepdims=True)
        relative = np.divide(speeds, sums, out=np.zeros_like(speeds), where=sums > 0).sum(axis=0)
        return sorted(range(types), key=lambda kind: -relative[kind])

    def _planned(self, observation: Observation, views: Sequence[JobView], types: _Types, speeds: Array) -> _Plan:
        """The plan that holds in this slot, a new one if the old one is both outdated and old enough."""
        basis = (types, tuple(view.job_id for view in views), speeds.tobytes())
        plan = self._plan
        if plan and (plan.basis == basis or plan.slot <= observation.slot < plan.slot + self._options.replan_slots):
            return plan
        owed = {
            (view.job_id, kind): plan.owed_at(view, kind, observation.time_s) if plan else 0.0
            for view in views
            for kind in types.names
        }
        self._plan = _Plan(
            observation.slot,
            observation.time_s,
            basis,
            frozenset(view.job_id for view in views),
            self._shares(views, types, speeds),
            {(view.job_id, kind): taken_s for view in views for kind, taken_s in view.attained_by},
            owed,
        )
        return self._plan

    def _shares(self, views: Sequence[JobView], types: _Types, speeds: Array) -> dict[tuple[JobId, str], float]:
        able = [row for row in range(len(views)) if speeds[row].any()]
        if not able:
            return {}
        chosen, fast = [views[row] for row in able], speeds[able]
        sizes = types.sizes
        equal = fast @ (sizes / sizes.sum()) if sizes.any() else fast.mean(axis=1)
        # A job that may run only where nothing counts as size is measured by its mean speed instead.
        equal = np.where(equal > 0, equal, fast.mean(axis=1))
        worth = self._worth(chosen, fast, equal)
        loads = np.array([_amounts(_gang(view)) for view in chosen])
        rooms = np.array([_amounts(room) for room in types.capacity])
        shares = greatest_least(worth, loads, rooms, fast > 0)
        return {
            (view.job_id, kind): float(shares[row, column])
            for row, view in enumerate(chosen)
            for column, kind in enumerate(types.names)
        }


class GavelMaxmin(Gavel):
    """Everybody gets at least the same multiple of what an equal share of all types would give."""

    name = "gavel_maxmin"

    def _worth(self, views: Sequence[JobView], speeds: Array, equal: Array) -> Array:
        # A job on one accelerator shall have as much more time as a gang of two takes more of the cluster.
        gangs = np.array([view.minimum.workers for view in views], dtype=np.float64)
        return speeds * (gangs / equal)[:, None]


class GavelMakespan(Gavel):
    """The last job ends as early as can be."""

    name = "gavel_makespan"

    def _worth(self, views: Sequence[JobView], speeds: Array, equal: Array) -> Array:
        left = np.array([view.remaining_epochs for view in views])
        # One that has done all it declared and still runs counts as nearly done, not as endlessly urgent.
        least = np.array([view.epochs for view in views]) * 1e-3
        urgency: Array = 1 / np.maximum(left, np.maximum(least, 1e-12))
        worth: Array = speeds * urgency[:, None]
        scaled: Array = worth / worth.max(axis=1).mean()
        return scaled


class _Round:
    """Who runs where in one slot."""

    def __init__(
        self,
        observation: Observation,
        views: Sequence[JobView],
        types: _Types,
        speeds: Array,
        plan: _Plan,
        budget: Budget,
    ) -> None:
        self._views, self._types, self._speeds, self._budget = views, types, speeds, budget
        self._plan = plan
        self._lag = _lag(views, types, plan, observation.slot_length_s)
        kinds = {node.name: node.accelerator for node in observation.nodes}
        self.chosen: dict[JobId, str] = {}
        """The type of each job that runs; jobs that are kept on nodes of several types are left out."""
        for view in views:
            under = sorted({kinds[entry.node] for entry in view.placement if entry.node in kinds})
            if budget.allocation(view.job_id) and len(under) == 1 and not view.pinned:
                self.chosen[view.job_id] = under[0]

    def fill(self, order: Sequence[int]) -> None:
        """Start the most urgent jobs on each type, then those that fit on none, then let all grow in turn."""
        for column in order:
            for row in self._queue(column):
                self._start(self._views[row], self._types.names[column])
        for row in np.flatnonzero(~self._speeds.any(axis=1)).tolist():
            self._start(self._views[row], "")
        urgency = self._lag.max(axis=1, initial=0.0)
        ranked = sorted(range(len(self._views)), key=lambda row: (-self._views[row].priority, -urgency[row]))
        growing = [view for row in ranked if self._budget.allocation((view := self._views[row]).job_id)]
        while growing:
            growing = [view for view in growing if self._grow(view)]

    def _queue(self, column: int) -> list[int]:
        """Jobs that can run on the type, the one that lags most behind its share first.

        Ties go to whom earlier plans owe most (to the second: shares are exact to about 1e-6), then to the
        greater share, then by arrival.
        """
        kind = self._types.names[column]

        def urgency(row: int) -> tuple[float, ...]:
            view = self._views[row]
            pair = (view.job_id, kind)
            owed_s, share = self._plan.owed.get(pair, 0.0), self._plan.shares.get(pair, 0.0)
            return (-view.priority, -self._lag[row, column], -round(owed_s), -share)

        return sorted((row for row in range(len(self._views)) if self._speeds[row, column] > 0), key=urgency)

    def _start(self, view: JobView, kind: str) -> None:
        if not self._budget.allocation(view.job_id):
            least = view.minimum
            if self._budget.grant(view.job_id, least.workers, least.ps, kind):
                self.chosen[view.job_id] = kind

    def _grow(self, view: JobView) -> bool:
        step = next_step(view, self._budget.allocation(view.job_id))
        kind = self.chosen.get(view.job_id, "")
        return bool(step) and self._budget.grant(view.job_id, step.workers, step.ps, kind)


def _lag(views: Sequence[JobView], types: _Types, plan: _Plan, slot_length_s: float) -> Array:
    """Share over time received since the plan, by job and type; everybody starts with half a round received."""
    result = np.zeros((len(views), len(types.names)))
    for row, view in enumerate(views):
        for column, kind in enumerate(types.names):
            share = plan.shares.get((view.job_id, kind), 0.0)
            result[row, column] = share / (slot_length_s / 2 + plan.received_s(view, kind))
    return result


def _types(observation: Observation) -> _Types:
    rooms: dict[str, Resources] = {}
    for node in observation.nodes:
        if node.schedulable:
            rooms[node.accelerator] = rooms.get(node.accelerator, Resources()) + node.capacity
    return _Types(tuple(sorted(rooms)), tuple(rooms[kind] for kind in sorted(rooms)))


def _gang(view: JobView) -> Resources:
    return view.worker_demand * view.minimum.workers + view.ps_demand * view.minimum.ps


def _amounts(room: Resources) -> tuple[float, float, float]:
    """Cores, GiB and GPUs: as jobs and machines are counted, so that numbers are neither great nor small."""
    return room.cpu_milli / 1000, room.memory_mib / 1024, room.gpu_milli / 1000


def greatest_least(worth: Array, loads: Array, rooms: Array, able: NDArray[np.bool_]) -> Array:
    """Shares of time that make the least of `sum_t worth[j,t] x[j,t]` over jobs as great as can be.

    Args:
        worth: what a whole share does, by job and type.
        loads: of each resource, what a job takes: jobs by resources.
        rooms: what there is of each resource on each type: types by resources.
        able: where a job can run; elsewhere its share is zero. Each job can run somewhere.
    """
    worth = np.where(able, worth, 0.0)
    # What a type has nothing of, nobody who can run there needs.
    taken = np.where(able[:, :, None] & (rooms > 0), loads[:, None, :], 0.0)
    shares = interior.follow(worth, taken, rooms, able)
    if shares is None:
        shares = _corner(worth, np.divide(taken, rooms, out=np.zeros(taken.shape), where=rooms > 0), able)
    shares = np.clip(shares, 0.0, None)
    used = np.divide((taken * shares[:, :, None]).sum(axis=0), rooms, out=np.zeros(rooms.shape), where=rooms > 0)
    within: Array = shares / max(1.0, float(shares.sum(axis=1).max()), float(used.max(initial=0.0)))
    return within


def _corner(worth: Array, fractions: Array, able: NDArray[np.bool_]) -> Array:
    """Some optimal corner, by HiGHS."""
    jobs, types, resources = fractions.shape
    worth = worth / worth.max()  # only ratios count for the shares; this keeps the program well scaled
    own = kron(diags_array(np.ones(jobs)), np.ones((1, types)), format="csr")
    least = hstack([-own @ diags_array(worth.ravel()), np.ones((jobs, 1))], format="csr")
    whole = hstack([own, csr_array((jobs, 1))], format="csr")
    rows = np.zeros((types * resources, jobs, types))
    for kind in range(types):
        rows[kind * resources : (kind + 1) * resources, :, kind] = fractions[:, kind, :].T
    room = hstack([csr_array(rows.reshape(types * resources, jobs * types)), csr_array((types * resources, 1))])
    bounds = np.array([[0.0, 1.0 if can else 0.0] for can in able.ravel()] + [[0.0, np.inf]])
    cost = np.zeros(jobs * types + 1)
    cost[-1] = -1.0
    limits = np.concatenate([np.zeros(jobs), np.ones(jobs + types * resources)])
    answer = linprog(cost, vstack([least, whole, room], format="csr"), limits, bounds=bounds, method="highs")
    if answer.x is None:
        raise ArithmeticError(f"the linear program of {jobs} jobs has no solution: {answer.message}")
    corner: Array = answer.x[:-1].reshape(jobs, types)
    return corner
