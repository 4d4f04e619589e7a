"""Tetris (Grandl et al., SIGCOMM 2014): pack what fits the free resources best, and prefer jobs with little left.

The rule (sections 3.2 and 3.3 of the paper): with demands and free resources as fractions of capacity, a job's next
tasks score `alignment - weight * e * work`. The alignment is the dot product of demand and free resources, the work is
what the job would still consume, and `e` is the mean alignment over the mean work of all candidates, so that a weight
of 1 makes both count alike. The highest score is placed, then all are scored again. The sign matters: DL2's reference
code adds the work and so prefers the jobs with most of it left (see `fedsched.policy.reference`).

Departures, because this runs live:

* the alignment is with what is free in the whole cluster, since a policy decides sizes and the core places;
* a job's first step is its minimum, later ones a worker with a parameter server, and all jobs that fit have their
  minimum before any grows;
* remaining time is estimated from observed speeds (`fedsched.policy.heuristics.remaining_times_s`);
* no fairness knob and no reservations for starved jobs; jobs of higher priority are admitted first.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fedsched.config import Tree
from fedsched.core.decision import Budget, Decision, JobView, Observation
from fedsched.core.job import Allocation
from fedsched.core.resources import Resources, total
from fedsched.policy.heuristics import by_arrival, next_step, remaining_times_s

Array = NDArray[np.float64]

WORK_MAX = 1e100
"""A speed of next to nothing means work without end; sums of it must stay numbers."""


class TetrisOptions(Tree):
    """How Tetris weighs."""

    weight: float = Field(default=1.0, ge=0, le=1e6)
    """Of little remaining work against alignment; 0 packs only."""


class Tetris:
    """Best fit over all resources, shortest remaining work mixed in."""

    name: ClassVar[str] = "tetris"
    version: ClassVar[int] = 0
    Options = TetrisOptions

    def __init__(self, options: TetrisOptions | None = None) -> None:
        self._options = options or TetrisOptions()

    def decide(self, observation: Observation, budget: Budget) -> Decision:
        """Minima by score, then growth by score."""
        views = sorted((view for view in by_arrival(observation.jobs) if not view.pinned), key=lambda v: -v.priority)
        capacity = total([node.capacity for node in observation.nodes if node.schedulable])
        packing = _Packing(self._options.weight, capacity, observation, budget)
        for _, group in groupby(views, key=lambda view: view.priority):
            packing.spend([view for view in group if _lacks_minimum(view, budget)], grow=False)
        packing.spend([view for view in views if budget.allocation(view.job_id)], grow=True)
        return Decision(observation.slot, budget.allocations(), self.name)


class _Packing:
    """What is free, and the scores that follow from it."""

    def __init__(self, weight: float, capacity: Resources, observation: Observation, budget: Budget) -> None:
        self._weight, self._budget = weight, budget
        self._scale = np.array([1 / amount if amount else 0.0 for amount in _amounts(capacity)])
        left_s = remaining_times_s(observation)
        self._work = {
            view.job_id: float(self._share(view, view.minimum).sum()) * left_s[view.job_id] for view in observation.jobs
        }
        held = [self._share(view, budget.allocation(view.job_id)) for view in by_arrival(observation.jobs)]
        self._free = np.maximum(0.0, (self._scale > 0) - np.sum(held, axis=0)) if held else np.zeros(3)

    def spend(self, views: Sequence[JobView], *, grow: bool) -> None:
        """Give each job its next step, the best score first; again and again if they are to grow."""
        steps = [next_step(view, self._budget.allocation(view.job_id)) for view in views]
        live = np.array([bool(step) for step in steps], dtype=np.bool_)
        demands = np.array([self._share(view, step) for view, step in zip(views, steps, strict=True)]).reshape(-1, 3)
        work = np.array([self._work[view.job_id] for view in views])
        while live.any():
            best = int(np.argmax(np.where(live, scores(demands @ self._free, work, live, self._weight), -np.inf)))
            view, step = views[best], steps[best]
            granted = self._budget.grant(view.job_id, step.workers, step.ps)
            if granted:
                self._free = np.maximum(0.0, self._free - demands[best])
            steps[best] = next_step(view, self._budget.allocation(view.job_id)) if granted and grow else Allocation()
            live[best] = bool(steps[best])
            demands[best] = self._share(view, steps[best])

    def _share(self, view: JobView, step: Allocation) -> Array:
        """Of each resource of the cluster, the fraction that a step takes."""
        share: Array = np.array(_amounts(view.worker_demand * step.workers + view.ps_demand * step.ps)) * self._scale
        return share


def scores(alignment: Array, work: Array, live: NDArray[np.bool_], weight: float) -> Array:
    """Alignment less weighted work; `live` marks the candidates, which alone set the scale between the two."""
    work = np.minimum(work, WORK_MAX)
    mean_work = float(work[live].mean())
    scale = float(alignment[live].mean()) / mean_work if mean_work else 0.0
    return alignment - weight * scale * work


def _amounts(resources: Resources) -> tuple[int, int, int]:
    return resources.cpu_milli, resources.memory_mib, resources.gpu_milli


def _lacks_minimum(view: JobView, budget: Budget) -> bool:
    have, least = budget.allocation(view.job_id), view.minimum
    return have.workers < least.workers or have.ps < least.ps
