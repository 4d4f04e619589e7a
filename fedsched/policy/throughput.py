"""How fast each job would train on each accelerator type, estimated from observed speeds only.

Best evidence first: the job's own newest speed with this very allocation on this type; else the curve fitted
(`fedsched.policy.optimus`) to what jobs of its kind showed on the type; else a curve whose level is completed from
what the kind showed elsewhere and other kinds showed here. The completion has rank one, as if every accelerator type
were faster than another by the same factor for all kinds of jobs. Gavel (Narayanan et al., OSDI 2020, section 6)
completes a matrix too, from profiling runs of its own; here nothing is run only to be measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from fedsched.core.decision import JobView, SpeedSample
from fedsched.core.ids import JobId
from fedsched.core.job import Allocation
from fedsched.policy.optimus import EPOCHS_PER_S_MIN, PRIOR, SpeedCurve, fit

RIDGE = 1e-3
"""Pull towards the average where kinds or types have never been seen together."""

Kind = tuple[str, str]
"""Job type and accelerator type."""


def throughputs(views: Sequence[JobView], accelerators: Sequence[str]) -> dict[tuple[JobId, str], float]:
    """Epochs per second of each job's minimum on each accelerator type that will do for it.

    Args:
        views: the jobs.
        accelerators: types that the cluster has; the empty one stands for nodes without any.
    """
    known = {(view.job_id, accelerator): _own(view, accelerator) for view in views for accelerator in accelerators}
    allowed = [
        (view, accelerator)
        for view in views
        for accelerator in accelerators
        if not view.accelerators or accelerator in view.accelerators
    ]
    wanted = sorted({(view.job_type, kind) for view, kind in allowed if not known[view.job_id, kind]})
    curves = _curves(views, wanted) if wanted else {}
    return {
        (view.job_id, kind): known[view.job_id, kind] or curves[view.job_type, kind](view.minimum)
        for view, kind in allowed
    }


def _own(view: JobView, accelerator: str) -> float:
    """The job's newest speed with its minimum on this type; zero where it was never seen so."""
    least = view.minimum
    for sample in reversed(view.speeds):
        if (sample.workers, sample.ps, sample.accelerator) == (least.workers, least.ps, accelerator):
            return sample.epochs_per_s if sample.epochs_per_s >= EPOCHS_PER_S_MIN else 0.0
    return 0.0


def _curves(views: Iterable[JobView], wanted: Sequence[Kind]) -> dict[Kind, SpeedCurve]:
    samples: dict[Kind, list[SpeedSample]] = {}
    for view in sorted(views, key=lambda view: view.job_id):
        for sample in view.speeds:
            if sample.epochs_per_s >= EPOCHS_PER_S_MIN and sample.workers > 0:
                samples.setdefault((view.job_type, sample.accelerator), []).append(sample)
    levels = complete({kind: _level(seen) for kind, seen in sorted(samples.items())}, wanted)
    return {kind: fit(samples.get(kind, ()), levels[kind]) for kind in wanted}


def _level(samples: Sequence[SpeedSample]) -> float:
    """How many times longer an epoch takes than under Optimus's prior, on average over the samples."""
    prior = SpeedCurve(PRIOR)
    return float(np.mean([prior(Allocation(s.workers, s.ps)) / s.epochs_per_s for s in samples]))


def complete(known: dict[Kind, float], wanted: Sequence[Kind]) -> dict[Kind, float]:
    """Positive numbers for the wanted pairs, from a product of one factor per job type and one per accelerator.

    A least-squares fit of the logarithms; what nothing is known of gets the average factor.
    """
    if not known:
        return dict.fromkeys(wanted, 1.0)
    rows = sorted({kind for kind, _ in (*known, *wanted)})
    columns = sorted({accelerator for _, accelerator in (*known, *wanted)})
    design = np.zeros((len(known), len(rows) + len(columns)))
    for line, (kind, accelerator) in enumerate(sorted(known)):
        design[line, rows.index(kind)] = 1.0
        design[line, len(rows) + columns.index(accelerator)] = 1.0
    logs = np.log([known[pair] for pair in sorted(known)])
    mean = float(logs.mean())
    # Normal equations with a little ridge: unseen rows and columns come out as zero, the average.
    square = design.T @ design + RIDGE * np.eye(design.shape[1])
    factors = np.linalg.solve(square, design.T @ (logs - mean))
    return {
        (kind, accelerator): float(
            np.exp(mean + factors[rows.index(kind)] + factors[len(rows) + columns.index(accelerator)])
        )
        for kind, accelerator in wanted
    }
