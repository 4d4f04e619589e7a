"""Draws any number of jobs from the parameters that were fitted to a trace."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from fedsched.core.ids import stream
from fedsched.sim.polygamma import digamma, trigamma
from fedsched.sim.trace_fit import DAY_S, HOUR_S, HOURS, WEEKDAYS, ClusterFit, Floats, SizeClass

NORMAL_SCORES = np.linspace(-6.0, 6.0, 4097)
NORMAL_CHANCES = np.array([NormalDist().cdf(score) for score in NORMAL_SCORES])
CHUNK_JOBS = 50_000
CHUNK_DAYS_MAX = 3650


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
