"""Measures what deciding costs: CPU time per simulated slot, and the latency of each policy's decision."""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import quantiles

from fedsched.config import PolicyConfig
from fedsched.core.decision import Budget, Decision, Observation, Policy
from fedsched.policy import registry
from fedsched.policy.dl2 import DL2
from fedsched.sim.workload import draw_scenario
from fedsched.sim.world import run_scenario

BASELINE = "fifo"
"""Costs are told as ratios to this policy, in the same run: machines differ, ratios less so."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What one policy cost over all scenarios."""

    policy: str
    slots: int
    jobs: int
    cpu_s: float
    """Of whole runs: scheduler, loop, simulated cluster and policy."""
    ratio: float
    """Of `cpu_s` to the baseline's."""
    decision_ms_p50: float
    decision_ms_p99: float


class _Timed:
    """A policy with a clock around it."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.name, self.version = policy.name, policy.version
        self.took_ms: list[float] = []

    def decide(self, observation: Observation, budget: Budget) -> Decision:
        """Decide and note how long it took."""
        begun = time.perf_counter()
        decision = self._policy.decide(observation, budget)
        self.took_ms.append((time.perf_counter() - begun) * 1e3)
        return decision


def measure(scenarios: int) -> tuple[Cost, ...]:
    """Run every policy on the same scenarios, the baseline first."""
    names = [BASELINE, *sorted({*registry.HEURISTICS, DL2.name} - {BASELINE})]
    costs: list[Cost] = []
    for name in names:
        policy = _Timed(registry.make(PolicyConfig.model_validate({"name": name})))
        begun_s = time.process_time()
        slots = jobs = 0
        for seed in range(scenarios):
            result = run_scenario(draw_scenario(seed), policy, registry.heuristic("drf"))
            slots, jobs = slots + result.slots, jobs + len(result.outcomes)
        cpu_s = time.process_time() - begun_s
        cuts = quantiles(policy.took_ms, n=100)
        costs.append(Cost(name, slots, jobs, cpu_s, cpu_s / (costs[0].cpu_s if costs else cpu_s), cuts[49], cuts[98]))
    return tuple(costs)
