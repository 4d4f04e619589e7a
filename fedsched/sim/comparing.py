"""What runs over several seeds say: means with confidence intervals, and differences between policies, seed by seed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

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


def crossed(values: Mapping[tuple[int | None, int], float]) -> Interval:
    """The mean over trainings and workloads where every training ran every workload, and its interval.

    Both are drawn by chance, so the variance of the mean has a part of each: that of the trainings' means and that of
    the workloads' means, with Satterthwaite's degrees of freedom. What is left over counts in both, so the interval is
    a little too wide rather than too narrow. With one training it is the interval over the workloads alone.

    Args:
        values: by training and workload.
    """
    parts = []
    for index in range(2):
        groups: dict[int | None, list[float]] = {}
        for key, value in values.items():
            groups.setdefault(key[index], []).append(value)
        means = [_mean(group) for group in groups.values()]
        if len(means) > 1:
            middle = _mean(means)
            variance = sum((mean - middle) ** 2 for mean in means) / (len(means) - 1) / len(means)
            parts.append((variance, len(means) - 1))
    mean = _mean(list(values.values()))
    spread = sum(variance for variance, _ in parts)
    if not parts or not spread:
        return Interval(mean, 0.0 if parts else None)
    from scipy import stats

    freedom = spread**2 / sum(variance**2 / degrees for variance, degrees in parts)
    return Interval(mean, float(stats.t.interval(CONFIDENCE, freedom)[1]) * math.sqrt(spread))


@dataclass(frozen=True, slots=True)
class Arm:
    """What is compared: a policy in an experiment."""

    experiment: str
    policy: str


Clusters = tuple[tuple[str, Interval], ...]
"""A figure by cluster."""


def _plain_clusters(clusters: Clusters) -> dict[str, Any]:
    told = {name: {"avg_jct_s": figure.mean, "ci95_s": figure.half} for name, figure in clusters}
    return {"clusters": told} if told else {}


@dataclass(frozen=True, slots=True)
class Summary:
    """One arm over all seeds."""

    arm: Arm
    seeds: int
    """Workloads."""
    trainings: int
    """Each of which ran every workload; 0 where nobody was taught before."""
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
    clusters: Clusters = ()
    """Mean job completion times by cluster, in seconds; empty where there is one, or a run is partial."""

    def plain(self) -> dict[str, Any]:
        """As data."""
        return {
            "experiment": self.arm.experiment,
            "policy": self.arm.policy,
            "seeds": self.seeds,
            "trainings": self.trainings,
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
            **_plain_clusters(self.clusters),
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
    jcts_s = {} if partial else _jcts_s(runs)
    whole = bool(jcts_s) and len(jcts_s) == len(runs)
    slots = [run.avg_jct_slots for run in runs if run.avg_jct_slots is not None]
    return Summary(
        arm=arm,
        seeds=len({run.seed for run in runs}),
        trainings=len({run.training_seed for run in runs} - {None}),
        jct_s=crossed(jcts_s) if whole else None,
        jct_slots=_mean(slots) if whole else None,
        makespan_s=_mean([run.makespan_s for run in runs]) if whole else None,
        resizes=_mean([int(run.jobs.resizes.sum()) for run in runs]),
        utilisation=_mean([run.utilisation for run in runs]),
        fallbacks=sum(run.fallbacks for run in runs),
        unfinished=sum(run.unfinished for run in runs),
        partial=partial,
        clusters=tuple((name, crossed(values)) for name, values in _by_cluster(runs).items()) if whole else (),
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
    """Workloads that both arms completed."""
    clusters: Clusters = ()
    """The same difference by cluster; empty where there is one."""

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
            **_plain_clusters(self.clusters),
        }


def differences(runs: Sequence[RunResult]) -> tuple[Difference, ...]:
    """Every arm against the first one; arms that share no completed seed with it are left out."""
    found = arms(runs)
    whole = {arm: [run for run in runs if Arm(run.experiment, run.policy) == arm and not run.partial] for arm in found}
    made = (_difference(arm, found[0], whole[arm], whole[found[0]]) for arm in found[1:])
    return tuple(difference for difference in made if difference is not None)


_Jcts = dict[tuple[int | None, int], float]
"""Mean JCT in seconds by training and workload; the training is None where nobody was taught before."""


def _jcts_s(runs: Sequence[RunResult]) -> _Jcts:
    return {(run.training_seed, run.seed): run.avg_jct_s for run in runs if run.avg_jct_s is not None}


def _by_cluster(runs: Sequence[RunResult]) -> dict[str, _Jcts]:
    """The same for every cluster, where there are several; clusters that had no job in some run are left out."""
    names = sorted({series.cluster for run in runs for series in run.series})
    found: dict[str, _Jcts] = {}
    for name in names if len(names) > 1 else ():
        jcts_s = {(run.training_seed, run.seed): run.avg_jct_of_s(name) for run in runs}
        known = {key: jct_s for key, jct_s in jcts_s.items() if jct_s is not None}
        if len(known) == len(jcts_s):
            found[name] = known
    return found


def _difference(arm: Arm, baseline: Arm, ours: Sequence[RunResult], theirs: Sequence[RunResult]) -> Difference | None:
    pairs = _paired(_jcts_s(ours), _jcts_s(theirs))
    if not pairs:
        return None
    ratio = _mean([jct_s for jct_s, _ in pairs.values()]) / _mean([reference_s for _, reference_s in pairs.values()])
    reference = _by_cluster(theirs)
    clusters = tuple(
        (name, crossed(_gaps(_paired(jcts_s, reference[name]))))
        for name, jcts_s in _by_cluster(ours).items()
        if name in reference
    )
    return Difference(arm, baseline, crossed(_gaps(pairs)), ratio, len({seed for _, seed in pairs}), clusters)


_Pairs = dict[tuple[int | None, int], tuple[float, float]]


def _paired(ours: _Jcts, theirs: _Jcts) -> _Pairs:
    """Workload by workload; training by training too where both arms were taught, else each with what there is."""
    return {
        (other if training is None else training, seed): (jct_s, reference_s)
        for (training, seed), jct_s in ours.items()
        for (other, the_same), reference_s in theirs.items()
        if seed == the_same and (training == other or None in (training, other))
    }


def _gaps(pairs: _Pairs) -> _Jcts:
    return {key: jct_s - reference_s for key, (jct_s, reference_s) in pairs.items()}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def runs_of(runs: Sequence[RunResult], arm: Arm) -> list[RunResult]:
    """Those of one arm, seed by seed."""
    return [run for run in runs if Arm(run.experiment, run.policy) == arm]


@dataclass(frozen=True, slots=True)
class ClusterSummary:
    """One cluster under one arm, over all of its seeds."""

    cluster: str
    arm: Arm
    jobs: int
    avg_jct_s: float | None
    avg_queued_s: float
    utilisation: float


def cluster_summaries(runs: Sequence[RunResult]) -> list[ClusterSummary]:
    """Every cluster under every arm that ran there, by cluster."""
    clusters = sorted({one.cluster for run in runs for one in run.series})
    found = (_cluster_summary(cluster, arm, runs_of(runs, arm)) for cluster in clusters for arm in arms(runs))
    return [summary for summary in found if summary is not None]


def _cluster_summary(cluster: str, arm: Arm, runs: Sequence[RunResult]) -> ClusterSummary | None:
    series = [one for run in runs for one in run.series if one.cluster == cluster]
    if not series:
        return None
    here = [np.array([place == cluster for place in run.jobs.cluster], dtype=bool) for run in runs]
    done = [run.jobs.jct_s[mask & run.jobs.succeeded] for run, mask in zip(runs, here, strict=True)]
    jcts_s = np.concatenate(done)
    queued_s = np.concatenate([run.jobs.spent_s[mask, 0] for run, mask in zip(runs, here, strict=True)])
    return ClusterSummary(
        cluster=cluster,
        arm=arm,
        jobs=sum(int(mask.sum()) for mask in here),
        avg_jct_s=float(jcts_s.mean()) if len(jcts_s) else None,
        avg_queued_s=float(queued_s.mean()) if len(queued_s) else 0.0,
        utilisation=float(np.mean([one.utilisation.mean() if len(one.levels) else 0.0 for one in series])),
    )
