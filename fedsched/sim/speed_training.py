"""Lets `learned_speed` see simulated jobs, run after run, and keeps what it learned of their speeds."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fedsched.core.ids import ClusterName
from fedsched.core.speeds import SpeedStatistics
from fedsched.errors import InvalidInput
from fedsched.policy.learned_speed import LearnedSpeed, LearnedSpeedOptions
from fedsched.sim.experiment import ExperimentConfig
from fedsched.sim.results import Collector
from fedsched.sim.running import Request, build

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


def train(
    experiments: Sequence[ExperimentConfig],
    options: LearnedSpeedOptions,
    *,
    seed: int,
    runs: int,
    known: SpeedStatistics | None = None,
    tell: Tell = lambda _: None,
) -> tuple[SpeedStatistics, tuple[Run, ...]]:
    """Run the experiments' jobs under the policy in turn; what it learned, and how the runs went.

    Clusters of one run learn alone; their sums are added up after it.

    Args:
        seed: of the first run; the next one draws from the next.
        known: where it starts from.

    Raises:
        InvalidInput: a run did not end.
    """
    statistics, done = known or SpeedStatistics(), []
    for number in range(runs):
        experiment = experiments[number % len(experiments)]
        statistics, run = _run(experiment, options, seed + number, statistics)
        tell(f"run {number + 1} of {runs}: JCT {run.jct_s:,.1f} s in {run.slots} slots; {run.observations:,} seen")
        done.append(run)
    return statistics, tuple(done)


def _run(
    experiment: ExperimentConfig, options: LearnedSpeedOptions, seed: int, known: SpeedStatistics
) -> tuple[SpeedStatistics, Run]:
    begun_s = time.process_time()
    label = next(iter(experiment.policies))
    policies = {ClusterName(cluster.name): LearnedSpeed(options, known) for cluster in experiment.clusters}
    collector = Collector()
    request = Request("training", experiment, label, seed)
    world = build(request, [collector.on], lambda event, commands: None, policies)
    world.run()
    jobs = collector.jobs(world.clock.now_s)
    if world.ended < world.arrived:
        raise InvalidInput(
            f"{world.arrived - world.ended} jobs of the run with seed {seed} never ended",
            "raise slots_max, or take nodes that can hold them",
        )
    merged = known.merged(policies[name].observed for name in sorted(policies))
    jct_s = float((jobs.finish_s - jobs.submit_s).mean())
    return merged, Run(seed, world.slots, jct_s, merged.observations, time.process_time() - begun_s)
