"""Estimates what an answer is worth: how much of their declared epochs jobs would train in the slot, added up.

That sum is DL2's reward (section 4.1 of the paper), here foretold instead of measured. Speeds come from what jobs were
seen to do, as Optimus fits them (`fedsched.policy.optimus`); nobody's declared or true speed is asked. It looks one
slot ahead, so what an answer does to later slots, for fairness say, is not in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache

from fedsched.core.decision import JobView, Observation
from fedsched.core.ids import JobId
from fedsched.core.job import Allocation
from fedsched.policy.optimus import PRIOR, SpeedCurve, fit_types

Allocations = Iterable[tuple[JobId, Allocation]]
BEST_WITHIN = 16
"""By Optimus's prior shape no more tasks of a role than this are ever best."""


def worth(observation: Observation, allocations: Allocations, curves: Mapping[str, SpeedCurve]) -> float:
    """Declared epochs that all jobs together would train in the slot, each job's as a share of its own; never negative.

    Args:
        curves: epochs per second by job type; see `curves_of`.
    """
    views = {view.job_id: view for view in observation.jobs}
    total = 0.0
    for job_id, allocation in allocations:
        view = views[job_id]
        if allocation.workers and view.epochs > 0:
            trained = _speed(view, allocation, curves[view.job_type]) * observation.slot_length_s
            total += min(trained, view.remaining_epochs) / view.epochs
    return total


def curves_of(observation: Observation) -> dict[str, SpeedCurve]:
    """How fast jobs of each type train, by what those of the slot have shown."""
    try:
        return fit_types(observation.jobs)
    except RuntimeError:  # the solver gives contradictory samples up after a while
        return {view.job_type: SpeedCurve(PRIOR) for view in observation.jobs}


def _speed(view: JobView, allocation: Allocation, curve: SpeedCurve) -> float:
    """What the job itself showed with this allocation most recently; else what its type would do."""
    for sample in reversed(view.speeds):
        if (sample.workers, sample.ps) == (allocation.workers, allocation.ps):
            return sample.epochs_per_s
    return curve(allocation)


def share_of_best(observation: Observation, allocations: Allocations) -> float:
    """Which share of its best speed a job would get, on average over all jobs; by Optimus's prior shape alone.

    Costs next to nothing, so it can be asked about every answer.
    """
    views = {view.job_id: view for view in observation.jobs}
    got = 0.0
    for job_id, allocation in allocations:
        view = views[job_id]
        most = view.workers.maximum, view.ps.maximum
        got += _epoch_s_least(*most) / max(_epoch_s(allocation.workers, allocation.ps), _epoch_s_least(*most))
    return got / len(views) if views else 1.0


@lru_cache(maxsize=4096)
def _epoch_s(workers: int, ps: int) -> float:
    """Seconds for an epoch, up to a factor."""
    if not workers:
        return float("inf")
    a, b, c, d, e = PRIOR
    return a / workers + b + (c * workers / ps if ps else 0.0) + d * workers + e * ps


@lru_cache(maxsize=4096)
def _epoch_s_least(workers_max: int, ps_max: int) -> float:
    """The same with the best of all allocations up to these."""
    workers = range(1, min(BEST_WITHIN, max(1, workers_max)) + 1)
    ps = range(1, min(BEST_WITHIN, ps_max) + 1) if ps_max else (0,)
    return min(_epoch_s(some, others) for some in workers for others in ps)
