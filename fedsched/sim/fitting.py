"""Fits a statistical generator to a trace, draws any number of jobs from it, and says how alike the two are.

For each cluster of the trace:
- sizes: the shares of the GPU counts; counts that are rare are put together into classes;
- arrivals of each class: a Poisson process whose rate follows the cluster's hour of the day and day of the week, times
  a gamma factor of mean 1 for each day and another for each hour. Each class has factors of its own: the many small
  jobs come in bursts, those that hold most GPU-hours hardly do, and a queue depends on the latter;
- durations: for each class a quantile curve (linear in the logarithm between its knots), and above it a bounded Pareto
  tail whose exponent is chosen so that the class has the GPU-hours of the trace, most of which its longest jobs hold;
- likeness: jobs of a class come in batches, one after the other, of a geometric number of jobs that are of one size and
  whose durations resemble each other (a Gaussian copula, so that the curve of durations stays what it is); and they
  lean to the shorter or longer where many jobs come.

Hours and days count from the trace's own beginning, its second 0. What is not in the model: that users wait for earlier
jobs before they submit more, and that a cluster's use grows or shrinks over months.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray
from pydantic import Field, model_validator

from fedsched.config import Tree, load
from fedsched.core.ids import stream
from fedsched.errors import InvalidTrace, NotFound
from fedsched.files import write_whole
from fedsched.sim.polygamma import digamma, trigamma
from fedsched.sim.traces.record import TraceJob

Floats = NDArray[np.float64]
HOUR_S = 3600.0
DAY_S = 86400.0
HOURS, WEEKDAYS = 24, 7
JOBS_MIN = 50
"""A cluster with fewer jobs is not fitted: its tail would be a guess."""
CLASS_JOBS_MIN = 60
"""Sizes are put together until so many jobs share a duration curve."""
WEEKS_MIN = 2
"""Shorter traces say nothing of weekdays."""
KNOTS = 29
NARROWING = 1.5
"""The steps of probability between knots narrow towards the long durations, where an error costs more GPU-hours."""
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
NORMAL_SCORES = np.linspace(-6.0, 6.0, 4097)
NORMAL_CHANCES = np.array([NormalDist().cdf(score) for score in NORMAL_SCORES])
CHUNK_JOBS = 50_000
CHUNK_DAYS_MAX = 3650
EXPONENT_MAX = 50.0
SHIPPED = Path(__file__).with_name("fitted")


def _knots(count: int, body: float) -> Floats:
    """Probabilities from 0 to `body` of the knots of a duration curve."""
    knots: Floats = body * (1.0 - np.linspace(1.0, 0.0, count) ** NARROWING)
    return knots


class SizeClass(Tree):
    """GPU counts that share a distribution of durations."""

    gpus: tuple[float, ...] = Field(min_length=1)
    shares: tuple[float, ...]
    """Of the cluster's jobs, one for each of `gpus`."""
    seconds: tuple[float, ...] = Field(min_length=2)
    """Durations at probabilities from 0 to 1 - `tail`, at the steps that `_knots` makes."""
    tail: float = Field(ge=0, lt=1)
    """Probability of a duration in the tail, between the last of `seconds` and `longest_s`."""
    tail_exponent: float = Field(ge=-EXPONENT_MAX, le=EXPONENT_MAX)
    longest_s: float
    day_variance: float = Field(default=0.0, ge=0)
    """Of the random factor, of mean 1, that a day's rate of such jobs is multiplied by."""
    hour_variance: float = Field(default=0.0, ge=0)
    """The same for each single hour."""
    batch_jobs: float = Field(default=1.0, ge=1)
    """Mean number of jobs of a batch: they come one after the other, and are of one size."""
    likeness: float = Field(default=0.0, ge=0, le=1)
    """Correlation of their durations, as normal scores."""
    burst_bias: float = Field(default=0.0, gt=-1, lt=1)
    """Correlation of durations with the rate at which such jobs come, as normal scores: below 0 bursts are short."""

    @model_validator(mode="after")
    def _is_a_distribution(self) -> SizeClass:
        if len(self.shares) != len(self.gpus):
            raise ValueError(f"there are {len(self.gpus)} gpus and {len(self.shares)} shares; one each was expected")
        if min(self.gpus) <= 0 or min(self.shares) <= 0:
            raise ValueError("gpus and shares must be above 0")
        if self.seconds[0] <= 0 or any(b < a for a, b in zip(self.seconds, self.seconds[1:], strict=False)):
            raise ValueError("seconds must be above 0 and never fall")
        if self.longest_s < self.seconds[-1]:
            raise ValueError(f"longest_s is {self.longest_s:g}; it cannot be below the last of seconds")
        return self

    def durations_s(self, chances: Floats) -> Floats:
        """The durations at these probabilities, in whole seconds from 1."""
        body = 1.0 - self.tail
        result = np.exp(np.interp(chances, _knots(len(self.seconds), body), np.log(self.seconds)))
        in_tail = chances > body
        if in_tail.any():
            result[in_tail] = self._tail_s((chances[in_tail] - body) / self.tail)
        return np.maximum(np.rint(result), 1.0)

    def _tail_s(self, chances: Floats) -> Floats:
        spread, exponent = math.log(self.longest_s / self.seconds[-1]), self.tail_exponent
        if abs(exponent) < 1e-9:
            return self.seconds[-1] * np.exp(chances * spread)
        return self.seconds[-1] * np.power(1.0 + chances * math.expm1(-exponent * spread), -1.0 / exponent)


class ClusterFit(Tree):
    """The parameters of one cluster."""

    name: str = Field(min_length=1)
    jobs_per_day: float = Field(gt=0)
    by_hour: tuple[float, ...] = Field(min_length=HOURS, max_length=HOURS)
    """Rate in each hour of the day against the mean; the first begins with the trace's second 0."""
    by_day: tuple[float, ...] = Field(min_length=WEEKDAYS, max_length=WEEKDAYS)
    """Rate on each day of the week against the mean."""
    classes: tuple[SizeClass, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _are_shares(self) -> ClusterFit:
        if min(self.by_hour) < 0 or min(self.by_day) < 0 or not sum(self.by_hour) or not sum(self.by_day):
            raise ValueError("by_hour and by_day cannot be negative, nor all 0")
        total = sum(share for part in self.classes for share in part.shares)
        if abs(total - 1) > 0.01:
            raise ValueError(f"the shares of all classes add up to {total:g}; 1 was expected")
        return self


class TraceFit(Tree):
    """The parameters of a whole trace."""

    source: str
    """What it was fitted to."""
    days: float = Field(gt=0)
    """How long that was."""
    clusters: tuple[ClusterFit, ...] = Field(min_length=1)


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
    begin_s, span_s = _begin_s(submits), max(submits) - min(submits)
    if span_s < DAY_S:
        raise InvalidTrace(f"{source} covers {span_s:g} s; a day or more was expected", "fit a longer trace")
    return TraceFit(
        source=source,
        days=_short(span_s / DAY_S),
        clusters=tuple(_cluster_fit(name, part, begin_s) for name, part in sorted(fitted.items())),
    )


def _begin_s(submit_s: Iterable[float]) -> float:
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
    counts = _hourly(submit_s)
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


def _hourly(submit_s: Floats) -> Floats:
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
    seconds = [_short(value) for value in np.quantile(durations_s, _knots(KNOTS, 1.0 - tail))]
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
    return float((means * np.diff(_knots(len(seconds), 1.0))).sum())


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


def save(path: Path, parameters: TraceFit) -> None:
    """Write parameters as YAML.

    Raises:
        OSError: it could not be written.
    """
    plain = _lists(parameters.model_dump())
    write_whole(path, yaml.safe_dump(plain, sort_keys=False, default_flow_style=None, width=120).encode())


def _lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _lists(item) for key, item in value.items()}
    return [_lists(item) for item in value] if isinstance(value, tuple | list) else value


def shipped() -> list[str]:
    """Names of the parameters that come with the package."""
    return sorted(path.stem for path in SHIPPED.glob("*.yaml"))


def load_fit(name: str, base: Path = Path()) -> TraceFit:
    """Parameters that come with the package, by name, or those in a YAML file.

    Args:
        base: folder that a relative path starts from.

    Raises:
        NotFound: there are none of this name.
        InvalidConfiguration: the file has problems.
    """
    if name in shipped():
        return load(TraceFit, SHIPPED / f"{name}.yaml")
    path = base / Path(name).expanduser()
    if not path.is_file():
        raise NotFound(f"there is no fit {name}; the package has {', '.join(shipped())}", "name one, or a YAML file")
    return load(TraceFit, path)


@dataclass(frozen=True, slots=True)
class Drawn:
    """Jobs as columns, in order of arrival."""

    submit_s: Floats
    duration_s: Floats
    gpus: Floats
    cluster: NDArray[np.int64]
    """Index into the fit's clusters."""

    def __len__(self) -> int:
        return len(self.submit_s)

    def first(self, count: int) -> Drawn:
        """The first so many."""
        return Drawn(self.submit_s[:count], self.duration_s[:count], self.gpus[:count], self.cluster[:count])


def draw(clusters: Sequence[ClusterFit], seed: int, *, rate: float = 1.0, days: float = math.inf) -> Iterator[Drawn]:
    """Jobs of all clusters together, as many chunks as are asked for; the same for the same seed and arguments.

    Each cluster has random streams of its own under its name, so another one beside it shifts nothing.

    Args:
        clusters: under names of their own.
        rate: arrivals come so many times as often.
        days: the last job comes before their end; endless by default.
    """
    sources = [_Source(cluster, seed, rate) for cluster in clusters]
    per_day = sum(cluster.jobs_per_day for cluster in clusters) * rate
    length = max(1, min(CHUNK_DAYS_MAX, math.ceil(CHUNK_JOBS / per_day)))
    first = 0
    while first < days:
        parts = [source.days(first, length) for source in sources]
        yield _merged(parts, days * DAY_S)
        first += length


def _merged(parts: Sequence[tuple[Floats, Floats, Floats]], end_s: float) -> Drawn:
    submit_s, duration_s, gpus = (np.concatenate([part[column] for part in parts]) for column in range(3))
    cluster = np.repeat(np.arange(len(parts)), [len(part[0]) for part in parts])
    order = np.argsort(submit_s, kind="stable")
    order = order[: int(np.searchsorted(submit_s[order], end_s))]
    return Drawn(submit_s[order], duration_s[order], gpus[order], cluster[order])


class _Source:
    """Draws the jobs of one cluster, some days at a time."""

    def __init__(self, cluster: ClusterFit, seed: int, rate: float) -> None:
        by_hour, by_day = np.array(cluster.by_hour), np.array(cluster.by_day)
        week = by_day[:, None] / by_day.mean() * (by_hour / by_hour.mean())[None, :]
        total = sum(share for part in cluster.classes for share in part.shares)
        self._classes = [
            _ClassSource(
                part,
                week * cluster.jobs_per_day * rate / HOURS * sum(part.shares) / total,
                seed,
                f"trace/{cluster.name}/{index}",
            )
            for index, part in enumerate(cluster.classes)
        ]

    def days(self, first: int, length: int) -> tuple[Floats, Floats, Floats]:
        """Submissions, durations and GPUs of the jobs of these days, not in order."""
        parts = [part.days(first, length) for part in self._classes]
        submit_s, durations_s, gpus = (np.concatenate([part[column] for part in parts]) for column in range(3))
        return submit_s, durations_s, gpus


class _ClassSource:
    """Draws the jobs of one class, some days at a time.

    Each kind of draw has a stream of its own, which goes on from one call to the next, so that neither the length of
    the chunks nor the rate changes what the weather of a day is.

    Args:
        week: jobs in each hour, a row per day of the week.
        name: of its random streams.
    """

    def __init__(self, part: SizeClass, week: Floats, seed: int, name: str) -> None:
        self._fit = part
        self._week = week
        self._streams = {
            kind: np.random.Generator(np.random.PCG64(stream(seed, f"{name}/{kind}").getrandbits(128)))
            for kind in ("day", "hour", "count", "moment", "batch", "size", "likeness", "duration")
        }
        self._upto = np.cumsum(part.shares) / sum(part.shares)
        self._gpus = np.array(part.gpus)
        self._batch = self._batches(1)
        """Size and likeness of the batch that goes on."""

    def days(self, first: int, length: int) -> tuple[Floats, Floats, Floats]:
        """Submissions, durations and GPUs of the jobs of these days, in order of arrival."""
        day = self._factors("day", (length, 1), self._fit.day_variance)
        hour = self._factors("hour", (length, HOURS), self._fit.hour_variance)
        counts = self._streams["count"].poisson(self._week[np.arange(first, first + length) % WEEKDAYS] * day * hour)
        counts = counts.ravel()
        total = int(counts.sum())
        hours = np.repeat(np.arange(first * HOURS, (first + length) * HOURS, dtype=np.float64), counts)
        moments = self._streams["moment"].random(total)
        submit_s = np.round(np.sort(hours + moments) * HOUR_S, 3)
        sizes, common = self._in_batches(total)
        alike, bias = self._fit.likeness, self._fit.burst_bias
        scores = math.sqrt(alike) * common + math.sqrt(1 - alike) * self._streams["duration"].standard_normal(total)
        if bias:
            crowd = self._crowd(np.repeat((day * hour).ravel(), counts))
            scores = bias * crowd + math.sqrt(1 - bias * bias) * scores
        return submit_s, self._fit.durations_s(np.interp(scores, NORMAL_SCORES, NORMAL_CHANCES)), sizes

    def _batches(self, count: int) -> tuple[Floats, Floats]:
        """Sizes of so many batches, and what the durations in each have in common."""
        places = np.searchsorted(self._upto[:-1], self._streams["size"].random(count), side="right")
        return self._gpus[places], self._streams["likeness"].standard_normal(count)

    def _in_batches(self, total: int) -> tuple[Floats, Floats]:
        """The same of each of so many jobs."""
        begins = self._streams["batch"].random(total) < 1 / self._fit.batch_jobs
        fresh = self._batches(int(begins.sum()))
        sizes, common = (np.concatenate(pair) for pair in zip(self._batch, fresh, strict=True))
        self._batch = sizes[-1:], common[-1:]
        number = np.cumsum(begins)
        return sizes[number], common[number]

    def _crowd(self, factors: Floats) -> Floats:
        """Normal scores, nearly, of the rates at which jobs come: a job sees a gamma factor by its size."""
        variances = [value for value in (self._fit.day_variance, self._fit.hour_variance) if value > 0]
        mean = sum(digamma(1 / value + 1) + math.log(value) for value in variances)
        spread = math.sqrt(sum(trigamma(1 / value + 1) for value in variances))
        crowd: Floats = (np.log(factors) - mean) / spread if variances else np.zeros_like(factors)
        return crowd

    def _factors(self, kind: str, shape: tuple[int, int], variance: float) -> Floats:
        if variance == 0:
            return np.ones(shape)
        return self._streams[kind].gamma(1.0 / variance, variance, shape)


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


SAMPLE_JOBS = 100_000


def goodness(parameters: TraceFit, jobs: Sequence[TraceJob], by: By = By.CLUSTER) -> list[Goodness]:
    """How alike a trace and what is drawn from its fit are, cluster by cluster; `by` as in `fit`."""
    groups = grouped(jobs, parameters.source, by)
    begin_s = _begin_s(job.submit_s for cluster in parameters.clusters for job in groups[cluster.name])
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
    counts = _hourly(submit_s)
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
