"""The same allocation for every job, whatever it is: the baseline that tells whether a clever rule earns its keep.

First come, first served, each job at once at its constant size. Where that does not fit, a job gets what fits of it, at
least its minimum. A job's own limits bound the constant on both sides. Or all jobs grow in turn, as far as the constant
at most: the strongest of its kind where not all fits.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from fedsched.config import Tree
from fedsched.core.decision import Budget, Decision, JobView, Observation
from fedsched.core.job import TASKS_MAX, Allocation
from fedsched.policy.heuristics import admit, by_arrival, next_step


class ConstantOptions(Tree):
    """The allocation."""

    workers: int = Field(default=1, ge=1, le=TASKS_MAX)
    ps: int = Field(default=1, ge=0, le=TASKS_MAX)
    """Parameter servers; a job that takes none gets none."""
    in_turn: bool = False
    """Every job gets its minimum first, then a task of each role at a time; else the first to come gets all of it."""


class Constant:
    """Every job gets the same."""

    name: ClassVar[str] = "constant"
    version: ClassVar[int] = 0
    Options = ConstantOptions

    def __init__(self, options: ConstantOptions | None = None) -> None:
        self._options = options or ConstantOptions()

    def decide(self, observation: Observation, budget: Budget) -> Decision:
        """Whole constants in order of arrival, those of higher priority first, then parts of it; or parts in turn."""
        views = [view for view in by_arrival(observation.jobs) if not view.pinned]
        views.sort(key=lambda view: -view.priority)
        if self._options.in_turn:
            growing = admit(views, budget)
            while growing:
                growing = [view for view in growing if self._give_step(view, budget)]
        else:
            for view in [view for view in views if not self._give_all(view, budget)]:
                while self._give_step(view, budget):
                    pass
        return Decision(observation.slot, budget.allocations(), self.name)

    def _goal(self, view: JobView) -> Allocation:
        least = view.minimum
        workers = max(least.workers, min(self._options.workers, view.workers.maximum))
        return Allocation(workers, max(least.ps, min(self._options.ps, view.ps.maximum)))

    def _give_all(self, view: JobView, budget: Budget) -> bool:
        goal, have = self._goal(view), budget.allocation(view.job_id)
        workers, ps = max(0, goal.workers - have.workers), max(0, goal.ps - have.ps)
        return not (workers or ps) or budget.grant(view.job_id, workers, ps)

    def _give_step(self, view: JobView, budget: Budget) -> bool:
        """One step towards the goal: the minimum first, then a task of each role, or of one where only that fits."""
        goal, have = self._goal(view), budget.allocation(view.job_id)
        if have.workers < view.minimum.workers or have.ps < view.minimum.ps:
            steps = [next_step(view, have)]
        else:
            worker, ps = int(have.workers < goal.workers), int(have.ps < goal.ps)
            steps = [Allocation(worker, ps), Allocation(worker, 0), Allocation(0, ps)]
        return any(step and budget.grant(view.job_id, step.workers, step.ps) for step in steps)
