"""Themis (Mahajan et al., NSDI 2020): finish-time fairness, by offers to the jobs that are worst off.

The rule (sections 3 and 4 of the paper): `rho = T_shared / T_alone` compares when a job ends with when it would have
ended alone on one n-th of the cluster, n jobs sharing it. Whenever leases end, what is free is offered to the fraction
`1 - f` of jobs with the greatest rho; among those it goes where the product of all `1 / rho` becomes greatest. What
they leave goes to the others.

`T_shared` is the age of the job plus what is left at the speed of the allocation in question. To say who is worst off,
that is the speed of a fair share: who waited longest against its length.

Departures, because this runs live:

* every slot ends all leases;
* no hidden payments: they make selfish bidders honest, and here the cluster's own agent bids for everybody;
* the product is maximised greedily, the step that raises its logarithm most per dominant share first. A job without
  anything gains without limit, so of those the worst off comes first;
* n is the number of jobs now, not its mean over the job's life, and speeds come from the curves of
  `fedsched.policy.optimus`; a step that makes a job no faster is not given;
* jobs of higher priority are offered first, and those that the scheduler may not stop keep their minimum.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from itertools import groupby
from typing import ClassVar

from pydantic import Field

from fedsched.config import Tree
from fedsched.core.decision import Budget, Decision, JobView, Observation
from fedsched.core.ids import JobId
from fedsched.core.job import Allocation
from fedsched.core.resources import Resources
from fedsched.policy.heuristics import bundle, by_arrival, next_step
from fedsched.policy.optimus import SpeedCurve, fit_types


class ThemisOptions(Tree):
    """How Themis offers."""

    fairness: float = Field(default=0.8, ge=0, lt=1)
    """The paper's f: what is free is offered to the worst `1 - f` of the jobs first. Higher is fairer, lower packs
    better; 0.8 is the paper's choice."""


class Themis:
    """Nobody ends much later than alone on its fair part of the cluster."""

    name: ClassVar[str] = "themis"
    version: ClassVar[int] = 0
    Options = ThemisOptions

    def __init__(self, options: ThemisOptions | None = None) -> None:
        self._options = options or ThemisOptions()

    def decide(self, observation: Observation, budget: Budget) -> Decision:
        """Offer to the worst off, then to the rest."""
        views = sorted((view for view in by_arrival(observation.jobs) if not view.pinned), key=lambda v: -v.priority)
        auction = _Auction(observation, budget)
        for _, group in groupby(views, key=lambda view: view.priority):
            worst_first = sorted(group, key=lambda view: -auction.rho(view))
            # Rounded before it is rounded up: (1 - 0.8) * 5 is a little more than 1 in floating point.
            offered = max(1, math.ceil(round((1 - self._options.fairness) * len(worst_first), 9)))
            auction.offer(worst_first[:offered])
            auction.offer(worst_first[offered:])
        return Decision(observation.slot, budget.allocations(), self.name)


class _Auction:
    """Finish times with and without what is on offer."""

    def __init__(self, observation: Observation, budget: Budget) -> None:
        self._budget = budget
        self._time_s = observation.time_s
        self._capacity = observation.capacity
        self._curves = fit_types(observation.jobs)
        jobs = max(1, len(observation.jobs))
        self._fair = {
            view.job_id: fair_speed(view, self._curves[view.job_type], self._capacity, jobs)
            for view in observation.jobs
        }

    def rho(self, view: JobView) -> float:
        """Finish-time fairness if the job has its fair share from now on; above 1 it has been treated badly."""
        fair = self._fair[view.job_id]
        return (self._age_s(view) + view.remaining_epochs / fair) * fair / view.epochs

    def offer(self, worst_first: Sequence[JobView]) -> None:
        """Minima to the worst off, then each step where it raises the product most."""
        admitted = [view for view in worst_first if self._admit(view)]
        by_id = {view.job_id: view for view in admitted}
        best = [bid for view in admitted if (bid := self._bid(view))]
        heapq.heapify(best)
        while best:
            _, _, job_id, step = heapq.heappop(best)
            if self._budget.grant(job_id, step[0], step[1]):
                bid = self._bid(by_id[job_id])
                if bid:
                    heapq.heappush(best, bid)

    def _admit(self, view: JobView) -> bool:
        have, least = self._budget.allocation(view.job_id), view.minimum
        if have.workers >= least.workers and have.ps >= least.ps:
            return True
        step = next_step(view, have)
        return self._budget.grant(view.job_id, step.workers, step.ps)

    def _bid(self, view: JobView) -> tuple[float, float, JobId, tuple[int, int]] | None:
        """The job's next step, the greatest rise of the logarithm of 1/rho per dominant share first."""
        have = self._budget.allocation(view.job_id)
        step = bundle(view, have)
        now_s, then_s = self._ends_in_s(view, have), self._ends_in_s(view, have + step)
        if not step or then_s >= now_s:
            return None
        cost = (view.worker_demand * step.workers + view.ps_demand * step.ps).dominant_share(self._capacity)
        age_s = self._age_s(view)
        rise = math.inf if age_s + then_s <= 0 else math.log((age_s + now_s) / (age_s + then_s))
        return -rise / max(cost, 1e-9), view.arrived_s, view.job_id, (step.workers, step.ps)

    def _ends_in_s(self, view: JobView, have: Allocation) -> float:
        return view.remaining_epochs / self._curves[view.job_type](have)

    def _age_s(self, view: JobView) -> float:
        # Another machine's clock stamped the arrival, and may be a little ahead.
        return max(0.0, self._time_s - view.arrived_s)


def fair_speed(view: JobView, curve: SpeedCurve, capacity: Resources, jobs: int) -> float:
    """Epochs per second alone on one of `jobs` equal parts of the cluster.

    Where not even the minimum fits in the part, the job is thought to have its minimum for a part of the time.
    """

    def share(size: Allocation) -> float:
        return (view.worker_demand * size.workers + view.ps_demand * size.ps).dominant_share(capacity)

    part = 1 / jobs
    size = view.minimum
    if share(size) > part:
        return curve(size) * max(part / share(size), 1e-9)
    while (step := bundle(view, size)) and share(size + step) <= part and curve(size + step) > curve(size):
        size = size + step
    return curve(size)
