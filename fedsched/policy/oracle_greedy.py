"""What marginal value comes to if speeds need not be learned: yardsticks for simulations, which alone know the truth.

`oracle_greedy` spends by the rule of `learned_speed` (`fedsched.policy.marginal`) with the true speeds, and
`lower_bound` gives every job its best allocation at once, on a cluster that has room for all of them, where a change
costs nothing: no schedule can have a lower mean completion time.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from fedsched.config import Tree
from fedsched.core.decision import Budget, Decision, JobView, Observation
from fedsched.core.ids import JobId
from fedsched.core.job import allocation_of
from fedsched.core.resources import Resources, total
from fedsched.errors import InvalidInput
from fedsched.policy.heuristics import by_arrival
from fedsched.policy.marginal import LEFT_MIN, Claim, Curve, pause, per_unit, spend, staircase, urgency
from fedsched.policy.reference import Oracle
from fedsched.policy.speed_model import levels


class OracleGreedyOptions(Tree):
    """What it knows and how it decides."""

    knows: Literal["types", "jobs"] = "types"
    """The speeds of job types, or also by how much every single job is off them with every allocation, which nobody
    could know."""
    stay: float = Field(default=0.03, ge=0, le=10)
    """By how much what a job has counts as faster than it is, for a change that nobody needs."""
    resize_s: float = Field(default=5.0, ge=0)
    """What a change is reckoned to cost, in seconds of training."""


class _Informed:
    """Has curves of true speeds."""

    name: ClassVar[str]
    version: ClassVar[int] = 0
    knows_jobs = True
    unbounded = False

    def __init__(self) -> None:
        self._oracle: Oracle | None = None
        self._curves: dict[tuple[object, ...], Curve] = {}

    def consult(self, oracle: Oracle) -> None:
        """Ask this for speeds."""
        self._oracle = oracle

    def _curve(self, view: JobView, capacity: Resources, slot_s: float) -> Curve:
        kind: tuple[object, ...] = (view.job_type, view.accelerators, view.workers, view.ps)
        key = (*kind, view.worker_demand, view.ps_demand, capacity, view.job_id if self.knows_jobs else "")
        found = self._curves.get(key)
        if found is None:
            found = self._curves[key] = self._asked(view, capacity, slot_s)
        return found

    def _asked(self, view: JobView, capacity: Resources, slot_s: float) -> Curve:
        if self._oracle is None:
            raise InvalidInput(
                f"policy {self.name} knows the true speeds of jobs, and nobody has told it any",
                "use it in simulations; learned_speed learns them",
            )
        workers, ps = _cells(view)
        rates = [self._oracle(view, w, p, slot_s) / slot_s for w, p in zip(workers.tolist(), ps.tolist(), strict=True)]
        shares = per_unit(view.worker_demand, capacity), per_unit(view.ps_demand, capacity)
        return Curve(workers, ps, np.array(rates), *shares)

    def _forget(self, observation: Observation) -> None:
        if self.knows_jobs:
            here: set[JobId | str] = {view.job_id for view in observation.jobs}
            self._curves = {key: curve for key, curve in self._curves.items() if key[-1] in here}


def _cells(view: JobView) -> tuple[np.ndarray, np.ndarray]:
    """All allocations that the job may have, as far as they are told apart."""
    least = view.minimum
    by_workers = _between(least.workers, view.workers.maximum)
    by_ps = _between(least.ps, view.ps.maximum) if view.ps.maximum else np.array([0])
    workers, ps = np.meshgrid(by_workers, by_ps, indexing="ij")
    return workers.ravel(), ps.ravel()


def _between(least: int, most: int) -> np.ndarray:
    told_apart = levels(max(1, most))
    return np.unique(np.concatenate([[least, most], told_apart[(told_apart > least) & (told_apart < most)]]))


def _capacity(observation: Observation) -> Resources:
    return total([node.capacity for node in observation.nodes if node.schedulable])


class OracleGreedy(_Informed):
    """Marginal value with the true speeds."""

    name = "oracle_greedy"
    Options = OracleGreedyOptions

    def __init__(self, options: OracleGreedyOptions | None = None) -> None:
        super().__init__()
        self._options = options or OracleGreedyOptions()
        self.knows_jobs = self._options.knows == "jobs"

    def decide(self, observation: Observation, budget: Budget) -> Decision:
        """Spend by marginal value."""
        capacity = _capacity(observation)
        views = [view for view in by_arrival(observation.jobs) if not view.pinned]
        wishes = [self._wish(view, capacity, observation.slot_length_s, budget) for view in views]
        spend(wishes, observation.jobs, capacity, budget)
        self._forget(observation)
        return Decision(observation.slot, budget.allocations(), self.name)

    def _wish(self, view: JobView, capacity: Resources, slot_s: float, budget: Budget) -> Claim:
        curve = self._curve(view, capacity, slot_s)
        left_slots = max(view.remaining_epochs, LEFT_MIN * view.epochs) / curve.best / slot_s if curve.best else 1e9
        held, own = allocation_of(view.placement), {}
        if held.workers:
            cell = (held.workers, held.ps)
            bonus = 1 + self._options.stay + pause(self._options.resize_s, slot_s, left_slots)
            own[cell] = float(curve.rates[curve.index(cell)]) * bonus
        have = budget.allocation(view.job_id)
        stairs = staircase(curve, own, start=(have.workers, have.ps))
        return Claim(view, curve, urgency(left_slots), stairs, held)


class LowerBound(_Informed):
    """Every job at its best."""

    name = "lower_bound"
    unbounded = True

    def decide(self, observation: Observation, budget: Budget) -> Decision:
        """Its best allocation for every job."""
        capacity = _capacity(observation)
        for view in by_arrival(observation.jobs):
            if not view.pinned:
                curve = self._curve(view, capacity, observation.slot_length_s)
                best, have = int(np.argmax(curve.rates)), budget.allocation(view.job_id)
                workers, ps = int(curve.workers[best]) - have.workers, int(curve.ps[best]) - have.ps
                if workers > 0 or ps > 0:
                    budget.grant(view.job_id, max(0, workers), max(0, ps))
        self._forget(observation)
        return Decision(observation.slot, budget.allocations(), self.name)
