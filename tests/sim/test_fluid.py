"""The light training environment tells the same story as the world."""

from __future__ import annotations

import numpy as np
import pytest

from fedsched.core.cluster import Node
from fedsched.core.commands import RewardSlot
from fedsched.core.decision import Budget, Decision, JobView, Observation, Policy
from fedsched.core.ids import ClusterName, NodeName
from fedsched.core.resources import Resources
from fedsched.errors import InvalidInput
from fedsched.learn.clipped import SetLearner
from fedsched.policy import plugins
from fedsched.policy.set import Set, SetOptions, SetShape, initial
from fedsched.sim.cluster import Rules, Setup
from fedsched.sim.dl2_workload import Dl2Workload, Dl2WorkloadConfig
from fedsched.sim.fluid import Fluid
from fedsched.sim.ports import SimulatedJob
from fedsched.sim.speeds.config import AnalyticConfig
from fedsched.sim.world import run

SMALL = SetShape(width=16, rows=32)
SLOT_S = 1200.0


class Watched:
    """A policy whose questions and traces are kept."""

    version = 0

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.name = policy.name
        self.seen: list[Observation] = []
        self.learner = SetLearner(10**9)

    def decide(self, observation: Observation, budget: Budget) -> Decision:
        self.seen.append(observation)
        decision = self.policy.decide(observation, budget)
        if isinstance(self.policy, Set):
            self.learner.record(observation.slot, self.policy.last_trace())
        return decision


class _Rewards:
    """Hears the world's rewards through its loop."""

    def __init__(self) -> None:
        self.all: list[RewardSlot] = []

    def __call__(self, event: object, commands: object) -> None:
        assert isinstance(commands, list | tuple)
        self.all += [command for command in commands if isinstance(command, RewardSlot)]


def jobs(count: int, seed: int = 0) -> list[SimulatedJob]:
    config = Dl2WorkloadConfig(jobs=count, slot_length_s=SLOT_S, lengths_vary=True, length_error=0.2)
    return list(Dl2Workload(config).draw(seed))


@pytest.mark.parametrize("name", ["set", "constant", "srtf"])
@pytest.mark.parametrize("servers", [6, 60])
def test_a_cluster_of_one_node_lives_through_the_same_in_the_world(name: str, servers: int) -> None:
    """What is learned in the one must be worth the same in the other: every observation, completion and reward."""
    speeds = AnalyticConfig(form="analytic", coefficients="dl2_fitted").model(0)
    capacity = Resources(cpu_milli=8000 * servers, gpu_milli=2000 * servers)

    def policy() -> Watched:
        if name == "set":
            # Of no version, it is taken at its word: the world would replace a guarded one that decides so badly.
            return Watched(Set(initial(SMALL, 1), shape=SMALL, version=0, options=SetOptions(stay=3.0)))
        return Watched(plugins.make(name, {"workers": 2, "ps": 3} if name == "constant" else {}))

    here, there, rewards = policy(), policy(), _Rewards()
    setup = Setup(
        ClusterName("one"),
        (Node(NodeName("pool"), capacity),),
        there,
        plugins.make("drf", {}),
        observers=(rewards,),
    )
    world = run([setup], jobs(40), speeds, Rules(SLOT_S, store_s=0.0, keep_running=False))
    assert world.complete
    fluid, told = Fluid(capacity, jobs(40), speeds, SLOT_S), list[RewardSlot]()
    average_s = fluid.run(here, told.append)

    assert average_s == pytest.approx(world.average_jct_s, rel=1e-9)
    for outcome in world.outcomes:
        assert fluid.jct_s[outcome.job.spec.job_id] == pytest.approx(outcome.jct_s, rel=1e-9)
    asked = [seen for seen in there.seen if seen.jobs]
    assert len(here.seen) == len(asked)
    for one, other in zip(here.seen, asked, strict=True):
        assert (one.slot, one.time_s, len(one.jobs)) == (other.slot, other.time_s, len(other.jobs))
        for mine, real in zip(one.jobs, other.jobs, strict=True):
            _same(mine, real)
    real_rewards = [reward for reward in rewards.all if reward.progress]
    mine_rewards = [reward for reward in told if reward.progress]
    assert [reward.slot for reward in mine_rewards] == [reward.slot for reward in real_rewards]
    for my, theirs in zip(mine_rewards, real_rewards, strict=True):
        assert [job_id for job_id, _ in my.progress] == [job_id for job_id, _ in theirs.progress]
        assert [done for _, done in my.progress] == pytest.approx([done for _, done in theirs.progress])


def _same(mine: JobView, real: JobView) -> None:
    for field in JobView.__struct_fields__:
        one, other = getattr(mine, field), getattr(real, field)
        if field == "placement":
            # Which of its tasks stay is the placement's business; how many there are is the policy's.
            assert [entry.role for entry in one] == [entry.role for entry in other]
        elif field == "speeds":
            assert [(s.workers, s.ps) for s in one] == [(s.workers, s.ps) for s in other]
            assert np.allclose([s.epochs_per_s for s in one], [s.epochs_per_s for s in other])
        elif isinstance(one, float):
            assert one == pytest.approx(other, abs=1e-6), field
        elif field == "attained_by":
            assert dict(one) == pytest.approx(dict(other)), field
        else:
            assert one == other, field


def test_policies_may_be_shown_no_type() -> None:
    """So that training also meets jobs that nobody knows."""
    some = jobs(3)
    speeds = AnalyticConfig(form="analytic", coefficients="dl2_fitted").model(0)
    fluid = Fluid(Resources(8000, 0, 2000), some, speeds, SLOT_S, shown={some[0].spec.job_id: "unknown"})
    assert fluid.observe().jobs[0].job_type == "unknown"


def test_a_cluster_on_which_a_job_can_never_run_is_refused_at_once() -> None:
    """Nobody would see the end of it: a training on too small a cluster ran for ever, without a word."""
    some = jobs(5)
    least = [job.spec.demand_of(job.spec.minimum) for job in some]
    enough = Resources(*(max(getattr(one, name) for one in least) for name in ("cpu_milli", "memory_mib", "gpu_milli")))
    speeds = AnalyticConfig(form="analytic", coefficients="dl2_fitted").model(0)
    assert Fluid(enough, some, speeds, SLOT_S).run(plugins.make("srtf", {})) > 0
    with pytest.raises(InvalidInput, match=r"job dl2-\d+ \(.*\) needs .* at least; a cluster to train on has"):
        Fluid(Resources(enough.cpu_milli - 1, enough.memory_mib, enough.gpu_milli), some, speeds, SLOT_S)
