"""Fits the parameters of a statistical generator to a trace; what they mean stands in `trace_fit`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsched.errors import InvalidTrace
from fedsched.sim.fit_drawing import NORMAL_CHANCES, NORMAL_SCORES
from fedsched.sim.trace_fit import (
    DAY_S,
    EXPONENT_MAX,
    HOUR_S,
    HOURS,
    KNOTS,
    WEEKDAYS,
    ClusterFit,
    Floats,
    SizeClass,
    TraceFit,
    knots,
)
from fedsched.sim.traces.record import TraceJob

JOBS_MIN = 50
"""A cluster with fewer jobs is not fitted: its tail would be a guess."""
CLASS_JOBS_MIN = 60
"""Sizes are put together until so many jobs share a duration curve."""
WEEKS_MIN = 2
"""Shorter traces say nothing of weekdays."""
TAIL_MIN, TAIL_JOBS, TAIL_MAX = 0.01, 20, 0.2
"""The tail is 1 % of a class, or as much as holds 20 jobs, but no more than a fifth."""
SHRINK_JOBS = 240
"""A profile of so many jobs is half believed; the fewer the jobs, the nearer it is to flat."""
LIKENESS_JOBS_MIN = 40
"""A class of fewer jobs says nothing of their likeness."""
LAG = 10
GOES_ON_MAX = 0.995
"""Chance that a batch goes on with another job: more than 200 jobs alike cannot be told from a trend."""
DIGITS = 4


class By(StrEnum):
    """What makes a cluster of a fit."""

    CLUSTER = "cluster"
    VC = "vc"
    ALL = "all"


def fit(jobs: Sequence[TraceJob], source: str, by: By = By.CLUSTER) -> TraceFit:
    """Parameters from which jobs like these are drawn.

    Args:
        source: names the trace, and the only cluster of one whose jobs name none.
        by: whether clusters, virtual clusters or all jobs together get parameters of their own. Those with
            fewer than `JOBS_MIN` jobs get none.

    Raises:
        InvalidTrace: no cluster has enough jobs, or they all come at once.
    """
    fitted = {name: part for name, part in grouped(jobs, source, by).items() if len(part) >= JOBS_MIN}
    if not fitted:
        raise InvalidTrace(f"{source} has no cluster with {JOBS_MIN} jobs or more", "fit a longer trace, or --by all")
    submits = [job.submit_s for part in fitted.values() for job in part]
    begin_s, span_s = trace_begin_s(submits), max(submits) - min(submits)
    if span_s < DAY_S:
        raise InvalidTrace(f"{source} covers {span_s:g} s; a day or more was expected", "fit a longer trace")
    return TraceFit(
        source=source,
        days=_short(span_s / DAY_S),
        clusters=tuple(_cluster_fit(name, part, begin_s) for name, part in sorted(fitted.items())),
    )


def trace_begin_s(submit_s: Iterable[float]) -> float:
    """Where counting starts: whole days before the first job, so that the hour of the day stays what it is."""
    return min(submit_s) // DAY_S * DAY_S


def grouped(jobs: Iterable[TraceJob], source: str, by: By) -> dict[str, list[TraceJob]]:
    """The jobs of each cluster of a fit, by its name."""
    groups: dict[str, list[TraceJob]] = {}
    for job in jobs:
        name = {By.CLUSTER: job.cluster, By.VC: job.vc, By.ALL: ""}[by]
        groups.setdefault(name or source, []).append(job)
    return groups


def _cluster_fit(name: str, jobs: Sequence[TraceJob], begin_s: float) -> ClusterFit:
    submit_s = np.array([job.submit_s for job in jobs]) - begin_s
    counts = hourly(submit_s)
    # A cluster is fitted over the days that it was in use; ITP's smallest came to life in the third week.
    used = np.flatnonzero(counts.sum(axis=1))
    counts = counts[used[0] : used[-1] + 1]
    by_hour = _believed(counts.sum(axis=0), len(jobs))
    by_day = np.ones(WEEKDAYS)
    if len(counts) >= WEEKS_MIN * WEEKDAYS:
        days = np.arange(used[0], used[-1] + 1) % WEEKDAYS
        by_day = _believed(np.array([counts[days == day].sum(axis=1).mean() for day in range(WEEKDAYS)]), len(jobs))
    profile = by_hour[None, :] * by_day[np.arange(used[0], used[-1] + 1) % WEEKDAYS][:, None]
    return ClusterFit(
        name=name,
        # The first and last day are seldom whole.
        jobs_per_day=_short(len(jobs) / max(1.0, float(np.ptp(submit_s)) / DAY_S)),
        by_hour=tuple(_short(value) for value in by_hour),
        by_day=tuple(_short(value) for value in by_day),
        classes=_classes(jobs, _Use(begin_s, int(used[0]), profile)),
    )


@dataclass(frozen=True, slots=True)
class _Use:
    """When a cluster is used."""

    begin_s: float
    """Where counting starts."""
    first: int
    """The first day of use."""
    profile: Floats
    """Rate in each hour against the mean, a row per day of use."""

    def counts(self, submit_s: Floats) -> Floats:
        """Arrivals in each hour, in rows as the profile's."""
        days, hours = self.profile.shape
        at = ((submit_s - self.begin_s) // HOUR_S).astype(np.int64) - self.first * hours
        return np.bincount(at, minlength=days * hours).reshape(days, hours).astype(np.float64)


def hourly(submit_s: Floats) -> Floats:
    """Arrivals in each hour up to the day of the last, one row a day."""
    days = int(submit_s.max() // DAY_S) + 1
    hours = np.bincount((submit_s // HOUR_S).astype(np.int64), minlength=days * HOURS)
    return hours.reshape(days, HOURS).astype(np.float64)


def _believed(profile: Floats, jobs: int) -> Floats:
    """A profile of mean 1, drawn towards flat where few jobs speak for it."""
    believed: Floats = 1.0 + (profile / profile.mean() - 1.0) * jobs / (jobs + SHRINK_JOBS)
    return believed


def _variances(counts: Floats, expected: Floats) -> tuple[float, float]:
    """Variances of the factors of a day and of an hour, by the method of moments.

    With factors A (a day) and B (an hour) of mean 1 and variances a and b, a count of mean m has variance
    m + m^2 ((1 + a)(1 + b) - 1), and a day's total of mean M has M + M^2 a + (1 + a) b (sum of its hours' m^2).
    """
    days = expected.sum(axis=1)
    squares = (expected**2).sum()
    by_hour = float((((counts - expected) ** 2) - expected).sum() / squares)
    by_day = float((((counts.sum(axis=1) - days) ** 2) - days).sum() / (days**2).sum())
    ratio = float(squares / (days**2).sum())
    day = max(0.0, (by_day - ratio * by_hour) / (1.0 - ratio))
    return day, max(0.0, (1.0 + by_hour) / (1.0 + day) - 1.0)


def _classes(jobs: Sequence[TraceJob], use: _Use) -> tuple[SizeClass, ...]:
    by_size: dict[float, list[TraceJob]] = {}
    for job in jobs:
        by_size.setdefault(job.num_gpu, []).append(job)
    groups: list[list[float]] = []
    for size in sorted(by_size):
        if groups and sum(len(by_size[member]) for member in groups[-1]) < CLASS_JOBS_MIN:
            groups[-1].append(size)
        else:
            groups.append([size])
    if len(groups) > 1 and sum(len(by_size[member]) for member in groups[-1]) < CLASS_JOBS_MIN:
        groups[-2].extend(groups.pop())
    return tuple(_size_class(sizes, by_size, len(jobs), use) for sizes in groups)


def _size_class(sizes: Sequence[float], by_size: Mapping[float, Sequence[TraceJob]], jobs: int, use: _Use) -> SizeClass:
    members = sorted((job for size in sizes for job in by_size[size]), key=lambda job: job.submit_s)
    durations_s = np.array([job.duration_s for job in members])
    gpus = np.array([job.num_gpu for job in members])
    submit_s = np.array([job.submit_s for job in members])
    counts = use.counts(submit_s)
    day_variance, hour_variance = _variances(counts, use.profile * counts.sum() / use.profile.sum())
    batch_jobs, likeness, burst_bias = _alike(durations_s, ((submit_s - use.begin_s) // HOUR_S).astype(np.int64))
    tail = _short(min(TAIL_MAX, max(TAIL_MIN, TAIL_JOBS / len(durations_s))))
    seconds = [_short(value) for value in np.quantile(durations_s, knots(KNOTS, 1.0 - tail))]
    longest_s = max(_short(durations_s.max()), seconds[-1])
    # The mean counts each job by its GPUs. What a curve of few knots gets wrong in the body, the tail makes good.
    wanted_s = float((durations_s * gpus).sum() / gpus.sum())
    tail_mean_s = (wanted_s - (1.0 - tail) * _mean_s(seconds)) / tail
    return SizeClass(
        gpus=tuple(sizes),
        shares=tuple(float(f"{len(by_size[size]) / jobs:.6g}") for size in sizes),
        seconds=tuple(seconds),
        tail=tail,
        tail_exponent=_short(_exponent(seconds[-1], longest_s, tail_mean_s)),
        longest_s=longest_s,
        day_variance=_short(day_variance),
        hour_variance=_short(hour_variance),
        batch_jobs=_short(batch_jobs),
        likeness=_short(likeness),
        burst_bias=_short(burst_bias),
    )


def _alike(durations_s: Floats, hours: NDArray[np.int64]) -> tuple[float, float, float]:
    """Mean jobs of a batch, likeness within it and bias of bursts, of jobs in order of arrival.

    With batches of a geometric number of jobs, the normal scores of two durations that lie `k` jobs apart correlate by
    likeness times (chance that a batch goes on) ** k; the correlations of neighbours and at `LAG` give both.
    """
    if len(durations_s) < LIKENESS_JOBS_MIN:
        return 1.0, 0.0, 0.0
    scores = _scores(durations_s)
    bias = float(np.mean(_scores(np.bincount(hours - hours.min())[hours - hours.min()]) * scores))
    bias *= len(scores) / (len(scores) + SHRINK_JOBS)
    rest = scores - bias * _scores(np.bincount(hours - hours.min())[hours - hours.min()])
    near, far = (float(np.mean(rest[lag:] * rest[:-lag]) / np.mean(rest * rest)) for lag in (1, LAG))
    if near <= 0:
        return 1.0, 0.0, bias
    goes_on = float(np.clip(max(far, 1e-3) / near, 0.0, GOES_ON_MAX ** (LAG - 1)) ** (1 / (LAG - 1)))
    return 1 / (1 - goes_on), min(1.0, near / goes_on), bias


def _scores(values: NDArray[Any]) -> Floats:
    """Normal scores of the ranks; equal values share the middle one."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    upto = np.cumsum(counts)
    middle = ((upto - counts + upto) / 2 / len(values))[inverse]
    return np.interp(middle, NORMAL_CHANCES, NORMAL_SCORES)


def _mean_s(seconds: Sequence[float]) -> float:
    """Mean of a curve that is linear in the logarithm between its knots."""
    low, high = np.array(seconds[:-1]), np.array(seconds[1:])
    steps = np.log(high / low)
    flat = steps < 1e-9
    means = np.where(flat, low, (high - low) / np.where(flat, 1.0, steps))
    return float((means * np.diff(knots(len(seconds), 1.0))).sum())


def _exponent(shortest_s: float, longest_s: float, mean_s: float) -> float:
    """Exponent of the Pareto distribution between two bounds that has this mean, as nearly as any has."""
    spread = math.log(longest_s / shortest_s)
    if spread < 1e-6:
        return 0.0
    if mean_s <= shortest_s:
        return EXPONENT_MAX

    def excess(exponent: float) -> float:
        return math.log(_partial(exponent - 1.0, spread) / _partial(exponent, spread)) - math.log(mean_s / shortest_s)

    low, high = excess(-EXPONENT_MAX), excess(EXPONENT_MAX)
    if low * high > 0:
        return -EXPONENT_MAX if abs(low) < abs(high) else EXPONENT_MAX
    from scipy.optimize import brentq  # takes long to load, and only fitting needs it

    return float(brentq(excess, -EXPONENT_MAX, EXPONENT_MAX))


def _partial(exponent: float, spread: float) -> float:
    """The integral of exp(-exponent x) over 0 to `spread`."""
    return spread if abs(exponent) < 1e-9 else -math.expm1(-exponent * spread) / exponent


def _short(value: float) -> float:
    return float(f"{float(value):.{DIGITS}g}")
