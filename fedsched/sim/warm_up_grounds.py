"""Where a warm-up's teacher is watched and its student judged: small clusters drawn for it, or an experiment's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from fedsched.core.decision import Policy
from fedsched.core.ids import ClusterName
from fedsched.policy.registry import heuristic
from fedsched.sim.collecting import Collector
from fedsched.sim.experiment import ExperimentConfig
from fedsched.sim.running import Request, build, run_whole
from fedsched.sim.seeds import HELD_OUT_OFFSET, apart
from fedsched.sim.workload import draw_scenario
from fedsched.sim.world import run_scenario

DRAWN_HELD_OUT_OFFSET = 50_000
"""Held-out clusters are drawn from seeds this far from those of training."""
SEED_STRIDE = 100_000

Makes = Callable[[], Policy]


class WarmUpGround(Protocol):
    """Runs to learn from, and others to judge by."""

    def jct_s(self, make: Makes, runs: int, *, held_out: bool) -> float:
        """Average completion time in seconds under the policies that are made, over so many runs.

        Args:
            make: makes a policy that has decided nothing yet.
            held_out: the runs that judge, which have no job in common with those that are learnt from.

        Raises:
            FedschedError: a run cannot be made, or never ends.
        """

    def told(self, runs: int, *, held_out: bool) -> str:
        """These runs, in words."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """Small clusters and their jobs, drawn from a seed. One policy decides on all of them, one after the other."""

    teacher: str
    """Decides where the policy fails."""
    seed: int

    def _first(self, held_out: bool) -> int:
        return self.seed * SEED_STRIDE + (DRAWN_HELD_OUT_OFFSET if held_out else 0)

    def jct_s(self, make: Makes, runs: int, *, held_out: bool) -> float:
        """See `WarmUpGround`."""
        policy, fallback, first = make(), heuristic(self.teacher), self._first(held_out)
        results = [run_scenario(draw_scenario(first + number), policy, fallback) for number in range(runs)]
        return sum(result.average_jct_s for result in results) / len(results)

    def told(self, runs: int, *, held_out: bool) -> str:
        """See `WarmUpGround`."""
        first = self._first(held_out)
        if held_out:
            return f"{runs} clusters drawn from seed {first} on"
        return f"{runs} clusters of 2 to 12 nodes, from seed {first} on, 16 jobs each"


@dataclass(frozen=True, slots=True)
class Declared:
    """An experiment's own clusters and workload. Every cluster of every run has a policy of its own."""

    name: str
    """Of the experiment."""
    experiment: ExperimentConfig
    seed: int

    def _seed(self, number: int, held_out: bool) -> int:
        first = self.experiment.seed
        # Part 0 is what `fedsched sim compare` runs.
        return first + HELD_OUT_OFFSET + number if held_out else apart(first + number, self.seed + 1)

    def jct_s(self, make: Makes, runs: int, *, held_out: bool) -> float:
        """See `WarmUpGround`."""
        means = [self._run(make, self._seed(number, held_out)) for number in range(runs)]
        return sum(means) / len(means)

    def _run(self, make: Makes, seed: int) -> float:
        alone = self.experiment.model_copy(update={"federation": None})
        policies = {ClusterName(cluster.name): make() for cluster in alone.clusters}
        collector, request = Collector(), Request(self.name, alone, next(iter(alone.policies)), seed)
        world = build(request, [collector.on], lambda event, commands: None, policies)
        jobs = run_whole(world, collector, seed)
        return float((jobs.finish_s - jobs.submit_s).mean())

    def told(self, runs: int, *, held_out: bool) -> str:
        """See `WarmUpGround`."""
        return f"{runs} runs of {self.name}, from seed {self._seed(0, held_out)} on"
