"""Optimus (Peng et al., EuroSys 2018): fit how jobs scale, then give each next task where it saves most time.

Fitted from observed speeds only. A synchronous job with w workers and p parameter servers needs, per epoch,
`a/w + b + c*w/p + d*w + e*p` seconds with non-negative coefficients (the paper's `m`, the batch size, is a constant of
the job and part of `a` here). Jobs of one type share the coefficients. Steps are single tasks, as in the paper.

Before there are observations a prior shape speaks: mostly parallel work, some cost of communication that more
parameter servers relieve. It enters the fit as a few weak pseudo-observations, scaled to the type's own observed level,
or to that of all types, so that one real sample already sets the level and a handful set the shape.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fedsched.core.decision import Budget, JobView, Observation, SpeedSample
from fedsched.core.ids import JobId
from fedsched.core.job import Allocation
from fedsched.core.resources import Resources
from fedsched.policy.heuristics import Heuristic

PRIOR = (1.0, 0.05, 0.1, 0.01, 0.01)
"""Coefficients a, b, c, d, e before anything was seen, up to a common factor."""

PRIOR_POINTS = ((1, 0), (4, 0), (1, 1), (2, 1), (1, 2), (2, 2), (4, 2), (4, 4), (8, 4))
PRIOR_WEIGHT = 0.01
"""Weight of one pseudo-observation against one real one."""

EPOCH_S_MIN = 1e-9
EPOCHS_PER_S_MIN = 1e-9
"""A job that was slower (an epoch in thirty years) stood still for a reason that says nothing about its allocation."""


def terms(workers: int, ps: int) -> NDArray[np.float64]:
    """The five terms that the coefficients multiply; without parameter servers (all-reduce) theirs are zero."""
    return np.array([1 / workers, 1.0, workers / ps if ps else 0.0, workers, ps], dtype=np.float64)


@dataclass(frozen=True, slots=True)
class SpeedCurve:
    """Epochs per second as a function of the allocation."""

    coefficients: tuple[float, float, float, float, float]

    def __call__(self, allocation: Allocation) -> float:
        """Epochs per second; zero without workers."""
        if not allocation.workers:
            return 0.0
        epoch_s = float(terms(allocation.workers, allocation.ps) @ np.array(self.coefficients))
        # A fit to contradictory samples can leave nothing but terms that vanish here.
        return 1 / max(epoch_s, EPOCH_S_MIN)


def fit(samples: Sequence[SpeedSample], level: float = 1.0) -> SpeedCurve:
    """The curve nearest to the samples in relative error, with the prior as weak support.

    Args:
        samples: observations of one job type; those without progress are ignored.
        level: how many times longer than under `PRIOR` an epoch takes where there are no samples.
    """
    seen = _telling(samples)
    scale = _level(seen) if seen else level
    # Speed times predicted seconds per epoch is 1 for a perfect fit: residuals are relative errors.
    rows = [terms(sample.workers, sample.ps) * sample.epochs_per_s for sample in seen]
    prior = np.array(PRIOR) * scale
    weight = PRIOR_WEIGHT**0.5
    rows += [terms(w, p) / (terms(w, p) @ prior) * weight for w, p in PRIOR_POINTS]
    target = [1.0] * len(seen) + [weight] * len(PRIOR_POINTS)
    from scipy.optimize import nnls  # takes long to load, and few runs need it

    solution, _ = nnls(np.array(rows), np.array(target))
    a, b, c, d, e = (float(value) for value in solution)
    return SpeedCurve((a, b, c, d, e))


def _telling(samples: Sequence[SpeedSample]) -> list[SpeedSample]:
    return [sample for sample in samples if sample.epochs_per_s >= EPOCHS_PER_S_MIN and sample.workers > 0]


def _level(samples: Sequence[SpeedSample]) -> float:
    """How many times longer an epoch takes than under `PRIOR`, on average over the samples."""
    return float(np.mean([1 / (s.epochs_per_s * (terms(s.workers, s.ps) @ np.array(PRIOR))) for s in samples]))


def fit_types(views: Iterable[JobView]) -> dict[str, SpeedCurve]:
    """One curve per job type, pooled over its jobs."""
    pooled: dict[str, list[SpeedSample]] = {}
    for view in sorted(views, key=lambda view: view.job_id):
        pooled.setdefault(view.job_type, []).extend(view.speeds)
    seen = _telling([sample for kind in sorted(pooled) for sample in pooled[kind]])
    level = _level(seen) if seen else 1.0
    return {kind: fit(samples, level) for kind, samples in sorted(pooled.items())}


_Role = Literal["ps", "worker"]
_ROLES: tuple[_Role, ...] = ("ps", "worker")
"""Equal gains of one job go to parameter servers first, as in DL2's reference."""


class Optimus(Heuristic):
    """Greatest saving of completion time per dominant share first; growth that saves nothing is not done."""

    name = "optimus"

    def _order(self, observation: Observation, views: Sequence[JobView]) -> Sequence[JobView]:
        return views

    def _grow(self, observation: Observation, admitted: Sequence[JobView], budget: Budget) -> None:
        curves = fit_types(observation.jobs)
        capacity = observation.capacity
        by_id = {view.job_id: view for view in admitted}
        best: list[tuple[float, float, JobId, _Role, tuple[int, int]]] = []

        def consider(view: JobView) -> None:
            have = budget.allocation(view.job_id)
            for role in _ROLES:
                gain = _gain(view, have, role, curves[view.job_type], capacity)
                if gain > 0:
                    heapq.heappush(best, (-gain, view.arrived_s, view.job_id, role, (have.workers, have.ps)))

        for view in admitted:
            consider(view)
        while best:
            _, _, job_id, role, seen = heapq.heappop(best)
            view = by_id[job_id]
            have = budget.allocation(job_id)
            if (have.workers, have.ps) != seen:
                continue  # Computed before the job's last grant; what it would gain now is in the heap too.
            if budget.grant(job_id, workers=int(role == "worker"), ps=int(role == "ps")):
                consider(view)


def _gain(view: JobView, have: Allocation, role: _Role, curve: SpeedCurve, capacity: Resources) -> float:
    """Seconds saved per dominant share by one more task of `role`; nothing where it is not allowed."""
    if role == "worker":
        allowed, after, demand = have.workers < view.workers.maximum, have + Allocation(workers=1), view.worker_demand
    else:
        allowed, after, demand = have.ps < view.ps.maximum, have + Allocation(ps=1), view.ps_demand
    if not allowed:
        return 0.0
    saved_s = view.remaining_epochs / curve(have) - view.remaining_epochs / curve(after)
    return saved_s / max(demand.dominant_share(capacity), 1e-9)
