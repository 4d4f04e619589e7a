"""What a simulated run leaves: a row per job, how full each cluster was over time, and the figures made of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsched.core.job import JobPhase
from fedsched.sim.federation_results import FederationResult

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]

PHASES = tuple(JobPhase)
_SUCCEEDED = PHASES.index(JobPhase.SUCCEEDED)

SPENT = ("queued_s", "starting_s", "running_s", "resizing_s", "stopping_s")
"""Where a job's time goes. Together they are its JCT; a job trains only while it is running."""

LEVELS = ("queued", "active", "gpus_held", "cores_held", "gpus", "cores")
"""What is known of a cluster over time: jobs that wait, jobs that hold tasks, what tasks hold, what nodes offer."""


@dataclass(frozen=True, slots=True, eq=False)
class Jobs:
    """A column per fact, a row per job in order of arrival; times in virtual seconds, NaN where it did not happen."""

    job_id: Sequence[str]
    cluster: Sequence[str]
    phase: NDArray[np.uint8]
    """Index into `PHASES`."""
    submit_s: Floats
    start_s: Floats
    """First start of tasks."""
    finish_s: Floats
    spent_s: Floats
    """Rows by the columns of `SPENT`; up to the end of the run for jobs that are not over."""
    gpu_s: Floats
    """GPU-seconds that its tasks held, starts, resizes and stops included."""
    core_s: Floats
    """The same of CPU cores."""
    resizes: Counts
    preemptions: Counts
    """Stops for the sake of other jobs or for lack of a node."""
    attempts: Counts

    def __len__(self) -> int:
        return len(self.job_id)

    @property
    def jct_s(self) -> Floats:
        """Finish minus submission, queueing included."""
        return self.finish_s - self.submit_s

    @property
    def over(self) -> NDArray[np.bool_]:
        """Rows of jobs that came to an end of any kind."""
        return np.logical_not(np.isnan(self.finish_s))

    @property
    def succeeded(self) -> NDArray[np.bool_]:
        """Rows of jobs whose training came to its end."""
        return np.equal(self.phase, _SUCCEEDED)


@dataclass(frozen=True, slots=True, eq=False)
class Series:
    """How one cluster was over time: means over steps of equal length."""

    cluster: str
    step_s: float
    levels: Floats
    """Rows by time, columns as in `LEVELS`."""

    @property
    def time_s(self) -> Floats:
        """The middle of each step."""
        return np.arange(0.5, len(self.levels)) * self.step_s

    def level(self, name: str) -> Floats:
        """One of `LEVELS`."""
        return self.levels[:, LEVELS.index(name)]

    @property
    def utilisation(self) -> Floats:
        """Share of the GPUs that tasks held; of the CPU cores in a cluster without GPUs."""
        kind = "gpus" if self.level("gpus").any() else "cores"
        offered = self.level(kind)
        held = self.level(f"{kind}_held")
        return np.divide(held, offered, out=np.zeros_like(held), where=offered > 0)

    def coarser(self, step_s: float) -> Series:
        """The same in longer steps; `step_s` is a power of two times this one's."""
        factor = round(step_s / self.step_s)
        rows = math.ceil(len(self.levels) / factor)
        padded = np.zeros((rows * factor, len(LEVELS)))
        padded[: len(self.levels)] = self.levels
        return Series(self.cluster, step_s, padded.reshape(rows, factor, len(LEVELS)).mean(axis=1))


def together(series: Sequence[Series], name: str = "all clusters") -> Series:
    """The sum of several clusters, in the longest of their steps."""
    step_s = max(one.step_s for one in series)
    parts = [one.coarser(step_s).levels for one in series]
    levels = np.zeros((max(len(part) for part in parts), len(LEVELS)))
    for part in parts:
        levels[: len(part)] += part
    return Series(name, step_s, levels)


@dataclass(frozen=True, slots=True)
class Lane:
    """What one job held over time, as a lane of a chart."""

    job_id: str
    submit_s: float
    steps: tuple[tuple[float, str, int], ...]
    """From when on, one of `SPENT`, and how many tasks; the last step ends the job, or the run."""


@dataclass(frozen=True, slots=True, eq=False)
class RunResult:
    """One policy on the jobs of one seed."""

    experiment: str
    policy: str
    """The policy's label."""
    seed: int
    clock: str
    """`exact`: decisions at events. `slots`: decisions at slot starts only."""
    slot_length_s: float
    slots: int
    jobs: Jobs
    series: tuple[Series, ...]
    """One per cluster."""
    lanes: tuple[Lane, ...]
    """Of some jobs, evenly spread over the arrivals."""
    cpu_s: float
    """Of the process, for this run."""
    fallbacks: int
    """Slots that the fallback decided because the policy's answer could not be used."""
    digest: str
    """Of the run's whole story: equal digests, equal runs."""
    partial: str = ""
    """Why the run did not come to its end; empty where it did. What had happened until then is kept."""
    federations: tuple[FederationResult, ...] = ()
    """Who learnt together while it ran."""
    training_seed: int | None = None
    """Of the training that the policy's weights came out of; None where none was made for this comparison."""

    @property
    def unfinished(self) -> int:
        """Jobs that did not come to an end of any kind."""
        return len(self.jobs) - int(self.jobs.over.sum())

    @property
    def failed(self) -> int:
        """Jobs that ended without success."""
        return int((self.jobs.over & ~self.jobs.succeeded).sum())

    @property
    def avg_jct_s(self) -> float | None:
        """Mean over the jobs that succeeded; None where none did."""
        return self._of_jcts(np.mean)

    @property
    def avg_jct_slots(self) -> float | None:
        """The mean in slots, fractions of them included."""
        mean_s = self.avg_jct_s
        return None if mean_s is None else mean_s / self.slot_length_s

    def jct_percentile_s(self, percent: float) -> float | None:
        """The JCT that so many per cent of the jobs that succeeded stay below."""
        return self._of_jcts(lambda times_s: np.percentile(times_s, percent))

    @property
    def makespan_s(self) -> float:
        """From the first arrival to the last end; 0 where nothing ended."""
        ends_s = self.jobs.finish_s[self.jobs.over]
        return float(ends_s.max() - self.jobs.submit_s.min()) if len(ends_s) else 0.0

    @property
    def utilisation(self) -> float:
        """Share of the GPUs (without any: of the CPU cores) that tasks held over the makespan."""
        span_s = self.makespan_s
        if not span_s or not self.series:
            return 0.0
        whole = together(self.series)
        kind, used_s = ("gpus", self.jobs.gpu_s) if whole.level("gpus").any() else ("cores", self.jobs.core_s)
        offered = whole.level(kind)
        mean = float(offered[offered > 0].mean()) if offered.any() else 0.0
        return float(used_s.sum()) / (mean * span_s) if mean else 0.0

    def avg_jct_of_s(self, cluster: str) -> float | None:
        """Mean over the jobs that succeeded in one cluster; None where none did."""
        there = np.array([name == cluster for name in self.jobs.cluster], dtype=np.bool_)
        times_s = self.jobs.jct_s[self.jobs.succeeded & there]
        return float(times_s.mean()) if len(times_s) else None

    def _of_jcts(self, figure: Callable[[Floats], np.floating[Any]]) -> float | None:
        times_s = self.jobs.jct_s[self.jobs.succeeded]
        return float(figure(times_s)) if len(times_s) else None

    def plain(self) -> dict[str, Any]:
        """The run's figures as data, without the jobs."""
        spent_s = self.jobs.spent_s.mean(axis=0) if len(self.jobs) else np.zeros(len(SPENT))
        return {
            "experiment": self.experiment,
            "policy": self.policy,
            "seed": self.seed,
            **({} if self.training_seed is None else {"training_seed": self.training_seed}),
            "clock": self.clock,
            "slot_length_s": self.slot_length_s,
            "jobs": len(self.jobs),
            "avg_jct_s": self.avg_jct_s,
            "avg_jct_slots": self.avg_jct_slots,
            "p50_jct_s": self.jct_percentile_s(50),
            "p90_jct_s": self.jct_percentile_s(90),
            "p99_jct_s": self.jct_percentile_s(99),
            "makespan_s": self.makespan_s,
            "utilisation": self.utilisation,
            **{f"avg_{name}": float(mean_s) for name, mean_s in zip(SPENT, spent_s, strict=True)},
            "resizes": int(self.jobs.resizes.sum()),
            "preemptions": int(self.jobs.preemptions.sum()),
            "slots": self.slots,
            "fallbacks": self.fallbacks,
            "unfinished": self.unfinished,
            "failed": self.failed,
            "digest": self.digest,
            "cpu_s": self.cpu_s,
            "partial": bool(self.partial),
            "problem": self.partial or None,
            **({"federations": [federation.plain() for federation in self.federations]} if self.federations else {}),
        }
