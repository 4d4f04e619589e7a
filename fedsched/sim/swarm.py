"""Runs small worlds in which everything goes wrong, each drawn from a seed, under the eyes of all judges."""

from __future__ import annotations

import traceback
from dataclasses import dataclass

from fedsched.core.ids import stream
from fedsched.policy.registry import HEURISTICS, heuristic
from fedsched.sim.cluster import Rules
from fedsched.sim.collecting import Collector
from fedsched.sim.counting import Steps
from fedsched.sim.faults import FaultPlan, Faults, FaultyPolicy, draw_plan
from fedsched.sim.judges import Judges
from fedsched.sim.workers import Share
from fedsched.sim.workload import Scenario, draw_scenario
from fedsched.sim.world import CLUSTER, USUAL_COSTS, run_scenario

JOBS = 10
PLANNED_S = 300.0
"""Faults fall into the first so many seconds."""
FEDERATED = 0.25
"""Share of the seeds of which a federation is drawn, too."""
FEDERATED_JOBS = 6
"""Of each of its clusters."""
SLOTS_MAX = 1_500
"""Far more than any of these runs needs: who has not finished until then waits for ever."""


@dataclass(frozen=True, slots=True)
class SeedVerdict:
    """What became of one seed."""

    seed: int
    policy: str
    clock: str
    plan: FaultPlan
    steps: int
    """Events that the schedulers of its runs handled."""
    digest: str
    """Of the run's whole story; empty where it did not come to its end."""
    problem: str = ""
    """The promise that was broken, and where; empty where none was."""

    @property
    def command(self) -> str:
        """What shows it again."""
        return f"fedsched sim swarm --first {self.seed} --seeds 1"


def judge_seed(seed: int, progress: Share = lambda _: None) -> SeedVerdict:
    """Draw a cluster, jobs, a policy and a fault plan, and run it all. The same seed, the same verdict."""
    scenario = draw_scenario(seed, jobs=JOBS)
    plan = draw_plan(seed, scenario.nodes, scenario.jobs, PLANNED_S)
    draw = stream(seed, "swarm").random
    name = HEURISTICS[int(draw() * len(HEURISTICS))]
    rules = Rules(
        scenario.slot_length_s,
        clock="slots" if draw() < 0.5 else "exact",
        slots_max=SLOTS_MAX,
        costs=USUAL_COSTS,
        keep_running=draw() < 0.5,
    )
    steps = Steps()
    digest, problem = "", ""
    try:
        digest = _run(scenario, plan, name, rules, steps)
        if stream(seed, "swarm/federated").random() < FEDERATED:
            digest += " " + _run_federated(seed, steps)
    except Exception as error:  # Whatever breaks is what is looked for.
        frame = traceback.extract_tb(error.__traceback__)[-1]
        problem = f"{type(error).__name__} in {frame.name}: {error}"
    return SeedVerdict(seed, name, rules.clock, plan, steps.count, digest, problem)


def lost_verdict(seed: int, why: str) -> SeedVerdict:
    """The verdict on a seed that nothing is left of."""
    return SeedVerdict(seed, "?", "?", FaultPlan(seed), 0, "", why)


def _run(scenario: Scenario, plan: FaultPlan, name: str, rules: Rules, steps: Steps) -> str:
    judges, collector = Judges(), Collector()
    policy = heuristic(name)
    result = run_scenario(
        scenario,
        FaultyPolicy(policy, plan) if plan.bad_answers else policy,
        heuristic("drf"),
        rules=rules,
        check=True,
        observers=(steps.observe, judges.on(CLUSTER, scenario.nodes), collector.on(CLUSTER, scenario.nodes)),
        faults=Faults(plan),
    )
    judges.close(collector.jobs(steps.now_s), steps.now_s, submitted=len(scenario.jobs))
    return result.digest


def _run_federated(seed: int, steps: Steps) -> str:
    """The same seed once more, with clusters that learn together."""
    from fedsched.sim.federation_swarm import run_federation, usual_rules  # loads torch, which takes a second

    rules = usual_rules(stream(seed, "swarm/federated/rules").random, SLOTS_MAX)
    return run_federation(seed, rules, jobs=FEDERATED_JOBS, until_s=PLANNED_S, observers=(steps.observe,))
