"""Says how alike a trace and the jobs are that are drawn from its fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedsched.sim.fit_drawing import Drawn, draw
from fedsched.sim.fitting import By, grouped, hourly, trace_begin_s
from fedsched.sim.trace_fit import HOUR_S, HOURS, ClusterFit, Floats, TraceFit
from fedsched.sim.traces.record import TraceJob

SAMPLE_JOBS = 100_000
"""Drawn of each cluster; also the steps of the integral over its durations."""


@dataclass(frozen=True, slots=True)
class Goodness:
    """How alike a cluster's trace and jobs drawn from its fit are."""

    cluster: str
    jobs: int
    duration_ks: float
    """Largest difference of the two distribution functions of durations."""
    gpus_tv: float
    """Share of jobs whose size would have to change (total variation)."""
    hours_tv: float
    """The same for hours of the day in which jobs come."""
    gpu_hours_ratio: float
    """Mean GPU-hours of a drawn job over those of the trace, in the long run: single draws scatter with their tails."""
    burstiness: float
    """Standard deviation over mean of arrivals in an hour, in the trace."""
    drawn_burstiness: float
    swing: float
    """Standard deviation over mean of the GPUs that jobs would hold if none ever waited, hour by hour, in the trace."""
    drawn_swing: float


def goodness(parameters: TraceFit, jobs: Sequence[TraceJob], by: By = By.CLUSTER) -> list[Goodness]:
    """How alike a trace and what is drawn from its fit are, cluster by cluster; `by` as in `fit`."""
    groups = grouped(jobs, parameters.source, by)
    begin_s = trace_begin_s(job.submit_s for cluster in parameters.clusters for job in groups[cluster.name])
    return [_goodness(cluster, groups[cluster.name], begin_s) for cluster in parameters.clusters]


def _goodness(cluster: ClusterFit, jobs: Sequence[TraceJob], begin_s: float) -> Goodness:
    sample = _sample(cluster)
    submit_s = np.array([job.submit_s for job in jobs]) - begin_s
    duration_s = np.array([job.duration_s for job in jobs])
    gpus = np.array([job.num_gpu for job in jobs])
    ours, drawn = _used_hours(submit_s), _used_hours(sample.submit_s)
    return Goodness(
        cluster=cluster.name,
        jobs=len(jobs),
        duration_ks=_ks(duration_s, sample.duration_s),
        gpus_tv=_tv(gpus, sample.gpus),
        hours_tv=_tv(submit_s // HOUR_S % HOURS, sample.submit_s // HOUR_S % HOURS),
        gpu_hours_ratio=_mean_gpu_s(cluster) / float((duration_s * gpus).mean()),
        burstiness=float(ours.std() / ours.mean()),
        drawn_burstiness=float(drawn.std() / drawn.mean()),
        swing=_swing(submit_s, duration_s, gpus),
        drawn_swing=_swing(sample.submit_s, sample.duration_s, sample.gpus),
    )


def _mean_gpu_s(cluster: ClusterFit) -> float:
    """Mean GPU-seconds of the jobs that are drawn."""
    chances = (np.arange(SAMPLE_JOBS) + 0.5) / SAMPLE_JOBS
    shares = sum(share for part in cluster.classes for share in part.shares)
    held = (
        float(part.durations_s(chances).mean()) * sum(a * b for a, b in zip(part.gpus, part.shares, strict=True))
        for part in cluster.classes
    )
    return sum(held) / shares


def _sample(cluster: ClusterFit) -> Drawn:
    chunks: list[Drawn] = []
    for chunk in draw((cluster,), seed=0):
        chunks.append(chunk)
        if sum(map(len, chunks)) >= SAMPLE_JOBS:
            break
    columns = ("submit_s", "duration_s", "gpus", "cluster")
    return Drawn(*(np.concatenate([getattr(chunk, name) for chunk in chunks]) for name in columns))


def _swing(submit_s: Floats, duration_s: Floats, gpus: Floats) -> float:
    """How unsteady the demand is: what makes queues where its mean can be met."""
    times_s = np.concatenate([submit_s, submit_s + duration_s])
    order = np.argsort(times_s, kind="stable")
    held = np.cumsum(np.concatenate([gpus, -gpus])[order])
    at = np.searchsorted(times_s[order], np.arange(submit_s.min(), submit_s.max(), HOUR_S), side="right") - 1
    return float(held[at].std() / held[at].mean())


def _used_hours(submit_s: Floats) -> Floats:
    """Arrivals in each hour from the first day with any to the last."""
    counts = hourly(submit_s)
    used = np.flatnonzero(counts.sum(axis=1))
    return counts[used[0] : used[-1] + 1].ravel()


def _ks(left: Floats, right: Floats) -> float:
    at = np.union1d(left, right)
    shares = [np.searchsorted(np.sort(values), at, side="right") / len(values) for values in (left, right)]
    return float(np.abs(shares[0] - shares[1]).max())


def _tv(left: Floats, right: Floats) -> float:
    at = np.union1d(left, right)
    shares = [np.bincount(np.searchsorted(at, values), minlength=len(at)) / len(values) for values in (left, right)]
    return float(np.abs(shares[0] - shares[1]).sum() / 2)
