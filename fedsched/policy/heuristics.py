"""FIFO, SRTF and DRF: every job at its minimum first, in the rule's order, then growth by the rule.

Departures from the schedulers of the same names in DL2's reference code, because these run live:

* a grant that does not fit skips the job instead of ending the slot, so no capacity is stranded behind it;
* jobs are admitted at their own minimum, not at one worker and one parameter server;
* SRTF orders by remaining time as far as speeds are known, not by the remaining fraction;
* ties go by `(arrived_s, job_id)`, not by memory address.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import ClassVar

from fedsched.core.decision import Budget, Decision, JobView, Observation
from fedsched.core.job import Allocation


def by_arrival(views: Iterable[JobView]) -> list[JobView]:
    """Jobs in the order in which they came; the id settles ties."""
    return sorted(views, key=lambda view: (view.arrived_s, view.job_id))


def admit(ordered: Iterable[JobView], budget: Budget) -> list[JobView]:
    """Raise each job to its minimum, those of higher priority first, else in this order; the jobs that hold it now.

    Every job gets its minimum before any gets more; otherwise a rule that likes big jobs starves small ones for good.
    A job whose minimum does not fit is passed over, so a smaller one behind it can still start.
    """
    admitted = []
    for view in sorted(ordered, key=lambda view: -view.priority):
        have, least = budget.allocation(view.job_id), view.minimum
        workers, ps = max(0, least.workers - have.workers), max(0, least.ps - have.ps)
        if (workers or ps) and not budget.grant(view.job_id, workers, ps):
            continue
        admitted.append(view)
    return admitted


def bundle(view: JobView, have: Allocation) -> Allocation:
    """The job's next growth step: one worker and one parameter server, each only below its maximum.

    Nothing when all workers are there: parameter servers alone are no growth.
    """
    if have.workers >= view.workers.maximum:
        return Allocation()
    return Allocation(1, 1 if have.ps < view.ps.maximum else 0)


def next_step(view: JobView, have: Allocation) -> Allocation:
    """What the job would be granted next, all or nothing: what its minimum lacks, else its next bundle."""
    least = view.minimum
    missing = Allocation(max(0, least.workers - have.workers), max(0, least.ps - have.ps))
    return missing or bundle(view, have)


class Heuristic(ABC):
    """A policy without memory: an order of admission and a rule of growth."""

    name: ClassVar[str]
    version: ClassVar[int] = 0

    def decide(self, observation: Observation, budget: Budget) -> Decision:
        """Admit in order, then grow."""
        changeable = [view for view in by_arrival(observation.jobs) if not view.pinned]
        admitted = admit(self._order(observation, changeable), budget)
        self._grow(observation, admitted, budget)
        return Decision(observation.slot, budget.allocations(), self.name)

    @abstractmethod
    def _order(self, observation: Observation, views: Sequence[JobView]) -> Sequence[JobView]:
        """The order of admission; `views` come by arrival."""

    @abstractmethod
    def _grow(self, observation: Observation, admitted: Sequence[JobView], budget: Budget) -> None:
        """Spend what the minima left; `admitted` is in the order of admission."""


def remaining_times_s(observation: Observation) -> dict[str, float]:
    """How long each job would still take at its best observed speed.

    A job that was never seen running counts as fast as the mean of its type, or else of all jobs; where nothing was
    ever seen, all count as equally fast and the order is that of the remaining epochs.
    """
    best = {view.job_id: max((sample.epochs_per_s for sample in view.speeds), default=0.0) for view in observation.jobs}
    by_type: dict[str, list[float]] = {}
    for view in by_arrival(observation.jobs):
        if best[view.job_id] > 0:
            by_type.setdefault(view.job_type, []).append(best[view.job_id])
    every = [speed for kind in sorted(by_type) for speed in by_type[kind]]
    overall = sum(every) / len(every) if every else 1.0
    typical = {kind: sum(speeds) / len(speeds) for kind, speeds in by_type.items()}
    return {
        view.job_id: view.remaining_epochs / (best[view.job_id] or typical.get(view.job_type, overall))
        for view in observation.jobs
    }


class Drf(Heuristic):
    """Dominant resource fairness (Ghodsi et al.) by progressive filling: the poorest job gets the next bundle."""

    name = "drf"

    def _order(self, observation: Observation, views: Sequence[JobView]) -> Sequence[JobView]:
        return views

    def _grow(self, observation: Observation, admitted: Sequence[JobView], budget: Budget) -> None:
        capacity = observation.capacity
        by_id = {view.job_id: view for view in admitted}

        def share(view: JobView) -> float:
            have = budget.allocation(view.job_id)
            return (view.worker_demand * have.workers + view.ps_demand * have.ps).dominant_share(capacity)

        poorest = [(share(view), view.arrived_s, view.job_id) for view in admitted]
        heapq.heapify(poorest)
        while poorest:
            _, arrived_s, job_id = heapq.heappop(poorest)
            view = by_id[job_id]
            step = bundle(view, budget.allocation(job_id))
            if step and budget.grant(job_id, step.workers, step.ps):
                heapq.heappush(poorest, (share(view), arrived_s, job_id))
