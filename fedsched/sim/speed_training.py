"""Lets `learned_speed` see simulated jobs, run after run, and keeps what it learned of their speeds."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fedsched.core.decision import Policy
from fedsched.core.ids import ClusterName
from fedsched.core.speeds import SpeedStatistics
from fedsched.policy.learned_speed import LearnedSpeed, LearnedSpeedOptions
from fedsched.policy.oracle_greedy import LowerBound, OracleGreedy, OracleGreedyOptions
from fedsched.sim.collecting import Collector
from fedsched.sim.comparing import Interval, interval
from fedsched.sim.experiment import ExperimentConfig
from fedsched.sim.running import Request, build, run_whole

EXPLORES = 1.0
"""Standard deviations by which doubtful allocations count as faster while it learns, if nothing else is said."""

Tell = Callable[[str], None]
"""Hears what happens, for people who wait."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run of training."""

    seed: int
    slots: int
    """Decisions, over all clusters."""
    jct_s: float
    """Mean over its jobs."""
    observations: int
    """Of jobs in cells, since the beginning."""
    cpu_s: float


Keep = Callable[[SpeedStatistics, Sequence[Run]], None]


def train(
    experiments: Sequence[ExperimentConfig],
    options: LearnedSpeedOptions,
    *,
    seed: int,
    runs: int,
    known: SpeedStatistics | None = None,
    done: Sequence[Run] = (),
    keep: Keep = lambda statistics, done: None,
) -> tuple[SpeedStatistics, tuple[Run, ...]]:
    """Run the experiments' jobs under the policy in turn; what it learned, and how the runs went.

    Clusters of one run learn alone; their sums are added up after it.

    Args:
        seed: of the first run; the next one draws from the next.
        known: where it starts from.
        done: runs that are over, where it goes on; `known` is what was known after them.
        keep: hears of every run that is over, and of what is known then.

    Raises:
        InvalidInput: a run did not end.
    """
    statistics, over = known or SpeedStatistics(), list(done)
    for number in range(len(over), runs):
        experiment = experiments[number % len(experiments)]
        statistics, run = _run(experiment, options, seed + number, statistics)
        over.append(run)
        keep(statistics, over)
    return statistics, tuple(over)


def _run(
    experiment: ExperimentConfig, options: LearnedSpeedOptions, seed: int, known: SpeedStatistics
) -> tuple[SpeedStatistics, Run]:
    begun_s = time.process_time()
    policies = {ClusterName(cluster.name): LearnedSpeed(options, known) for cluster in experiment.clusters}
    jct_s, slots = _jct_s(experiment, policies, seed)
    merged = known.merged(policies[name].observed for name in sorted(policies))
    return merged, Run(seed, slots, jct_s, merged.observations, time.process_time() - begun_s)


def _jct_s(experiment: ExperimentConfig, policies: Mapping[ClusterName, Policy], seed: int) -> tuple[float, int]:
    """Mean JCT of a run with these policies, and its decisions.

    Raises:
        InvalidInput: it did not end.
    """
    collector = Collector()
    request = Request("training", experiment, next(iter(experiment.policies)), seed)
    world = build(request, [collector.on], lambda event, commands: None, policies)
    jobs = run_whole(world, collector, seed)
    return float((jobs.finish_s - jobs.submit_s).mean()), world.slots


@dataclass(frozen=True, slots=True)
class Judged:
    """Mean JCTs of one policy on jobs that it was not trained on."""

    policy: str
    jcts_s: tuple[float, ...]
    """By seed."""

    @property
    def jct_s(self) -> Interval:
        """Over the seeds."""
        return interval(self.jcts_s)


def judge(
    experiment: ExperimentConfig,
    statistics: SpeedStatistics,
    options: LearnedSpeedOptions,
    seeds: Sequence[int],
    tell: Tell = lambda _: None,
) -> tuple[Judged, ...]:
    """The trained policy without exploration, the greedy that knows the true speeds, and the lower bound."""
    frozen = options.model_copy(update={"explore": 0.0})
    greedy = OracleGreedyOptions(stay=options.stay, resize_s=options.resize_s)
    makers: dict[str, Callable[[], Policy]] = {
        LearnedSpeed.name: lambda: LearnedSpeed(frozen, statistics),
        OracleGreedy.name: lambda: OracleGreedy(greedy),
        LowerBound.name: LowerBound,
    }
    judged = []
    for name, maker in makers.items():
        jcts_s = []
        for seed in seeds:
            policies = {ClusterName(cluster.name): maker() for cluster in experiment.clusters}
            jcts_s.append(_jct_s(experiment, policies, seed)[0])
        judged.append(Judged(name, tuple(jcts_s)))
        tell(f"{name}: JCT {judged[-1].jct_s.mean:,.1f} s over {len(jcts_s)} held-out runs")
    return tuple(judged)
