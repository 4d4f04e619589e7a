"""What runs over several seeds say: means with confidence intervals, and differences between policies, seed by seed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fedsched.sim.results import RunResult

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over seeds and the 95 % confidence interval of Student's t."""

    mean: float
    half: float | None
    """Half the interval's width; None where there is one seed, which says nothing of the spread."""

    @property
    def low(self) -> float | None:
        """The lower bound."""
        return None if self.half is None else self.mean - self.half

    @property
    def high(self) -> float | None:
        """The upper bound."""
        return None if self.half is None else self.mean + self.half


def interval(values: Sequence[float]) -> Interval:
    """The mean of a few independent values and where the true mean lies with 95 % confidence."""
    mean = _mean(values)
    if len(values) < 2:
        return Interval(mean, None)
    from scipy import stats

    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    half = float(stats.t.interval(CONFIDENCE, len(values) - 1)[1]) * math.sqrt(variance / len(values))
    return Interval(mean, half)


@dataclass(frozen=True, slots=True)
class Arm:
    """What is compared: a policy in an experiment."""

    experiment: str
    policy: str


@dataclass(frozen=True, slots=True)
class Summary:
    """One arm over all seeds."""

    arm: Arm
    seeds: int
    jct_s: Interval | None
    """Of the runs' mean job completion times; None if any run is partial: a mean over the others would flatter."""
    jct_slots: float | None
    makespan_s: float | None
    """Mean over the runs, None likewise."""
    resizes: float
    """Per run."""
    utilisation: float
    """Mean over the runs."""
    fallbacks: int
    """Slots, of all runs, that the policy's fallback decided; where it is not 0 the row is not the policy's alone."""
    unfinished: int
    """Jobs, of all runs, that did not come to an end."""
    partial: int
    """Runs that did not come to their end."""

    def plain(self) -> dict[str, Any]:
        """As data."""
        return {
            "experiment": self.arm.experiment,
            "policy": self.arm.policy,
            "seeds": self.seeds,
            "avg_jct_s": self.jct_s and self.jct_s.mean,
            "ci95_s": self.jct_s and self.jct_s.half,
            "ci95_low_s": self.jct_s and self.jct_s.low,
            "ci95_high_s": self.jct_s and self.jct_s.high,
            "avg_jct_slots": self.jct_slots,
            "makespan_s": self.makespan_s,
            "resizes": self.resizes,
            "utilisation": self.utilisation,
            "fallbacks": self.fallbacks,
            "unfinished": self.unfinished,
            "partial": self.partial > 0,
        }


def arms(runs: Sequence[RunResult]) -> tuple[Arm, ...]:
    """What was compared, in the order in which it ran."""
    return tuple(dict.fromkeys(Arm(run.experiment, run.policy) for run in runs))


def summarise(runs: Sequence[RunResult]) -> tuple[Summary, ...]:
    """One summary per arm."""
    return tuple(
        _summary(arm, [run for run in runs if (run.experiment, run.policy) == (arm.experiment, arm.policy)])
        for arm in arms(runs)
    )


def _summary(arm: Arm, runs: Sequence[RunResult]) -> Summary:
    partial = sum(bool(run.partial) for run in runs)
    jcts_s = [] if partial else [run.avg_jct_s for run in runs if run.avg_jct_s is not None]
    whole = bool(jcts_s) and len(jcts_s) == len(runs)
    slots = [run.avg_jct_slots for run in runs if run.avg_jct_slots is not None]
    return Summary(
        arm=arm,
        seeds=len(runs),
        jct_s=interval(jcts_s) if whole else None,
        jct_slots=_mean(slots) if whole else None,
        makespan_s=_mean([run.makespan_s for run in runs]) if whole else None,
        resizes=_mean([int(run.jobs.resizes.sum()) for run in runs]),
        utilisation=_mean([run.utilisation for run in runs]),
        fallbacks=sum(run.fallbacks for run in runs),
        unfinished=sum(run.unfinished for run in runs),
        partial=partial,
    )


@dataclass(frozen=True, slots=True)
class Difference:
    """How much longer jobs take in one arm than in the baseline, on the same jobs.

    Seeds differ far more than policies do; differences seed by seed leave that out.
    """

    arm: Arm
    baseline: Arm
    jct_s: Interval
    """Of the differences of mean JCTs; negative where the arm is faster than the baseline."""
    ratio: float
    """Of the mean JCTs over these seeds."""
    seeds: int
    """Those that both arms completed."""

    @property
    def certain(self) -> bool:
        """Whether the interval leaves out 0."""
        low, high = self.jct_s.low, self.jct_s.high
        return low is not None and high is not None and (low > 0 or high < 0)

    def plain(self) -> dict[str, Any]:
        """As data."""
        return {
            "experiment": self.arm.experiment,
            "policy": self.arm.policy,
            "baseline_experiment": self.baseline.experiment,
            "baseline_policy": self.baseline.policy,
            "seeds": self.seeds,
            "avg_jct_s": self.jct_s.mean,
            "ci95_s": self.jct_s.half,
            "ci95_low_s": self.jct_s.low,
            "ci95_high_s": self.jct_s.high,
            "ratio": self.ratio,
            "certain": self.certain,
        }


def differences(runs: Sequence[RunResult]) -> tuple[Difference, ...]:
    """Every arm against the first one; arms that share no completed seed with it are left out."""
    found = arms(runs)
    jcts_s: dict[Arm, dict[int, float]] = {arm: {} for arm in found}
    for run in runs:
        if not run.partial and run.avg_jct_s is not None:
            jcts_s[Arm(run.experiment, run.policy)][run.seed] = run.avg_jct_s
    made = (_difference(arm, found[0], jcts_s[arm], jcts_s[found[0]]) for arm in found[1:])
    return tuple(difference for difference in made if difference is not None)


def _difference(arm: Arm, baseline: Arm, ours: dict[int, float], theirs: dict[int, float]) -> Difference | None:
    seeds = sorted(set(ours) & set(theirs))
    if not seeds:
        return None
    ratio = _mean([ours[seed] for seed in seeds]) / _mean([theirs[seed] for seed in seeds])
    return Difference(arm, baseline, interval([ours[seed] - theirs[seed] for seed in seeds]), ratio, len(seeds))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
