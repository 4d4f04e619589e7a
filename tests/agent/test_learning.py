"""What an agent gives to the federation's rounds."""

from __future__ import annotations

import pytest

from fedsched.agent.learning import ClusterLearning
from fedsched.core.commands import RewardSlot
from fedsched.core.decision import Observation
from fedsched.core.ids import JobId
from fedsched.core.placement import TentativePlacement
from fedsched.federation.source import Declined
from fedsched.learn.actor_critic import Learner
from fedsched.policy import checkpoint
from fedsched.policy.dl2 import DL2
from tests.core.test_placement import view
from tests.core.world import node


def decide(policy: DL2, learner: Learner, slot: int) -> None:
    observation = Observation(slot, 1.0, (node("n", 8),), (view("a"), view("b")))
    policy.decide(observation, TentativePlacement(observation))
    assert policy.last_trace(), "the policy had nothing to choose"
    learner.record(slot, policy.last_trace())
    learner.reward(RewardSlot(slot, ((JobId("a"), 0.5),)))


def test_a_cluster_gives_a_gradient_only_for_what_is_new() -> None:
    """An idle federation that learns the same memories again and again drifts away from a good policy."""
    first = checkpoint.load(checkpoint.BUILTIN)
    policy = DL2(first.arrays, shape=first.shape)
    learner = Learner(policy.shape)
    learning = ClusterLearning(policy, learner)

    with pytest.raises(Declined, match="has a reward yet"):
        learning.gradient(first.arrays, 8, 0)
    decide(policy, learner, 1)
    assert learning.gradient(first.arrays, 8, 0).samples > 0
    with pytest.raises(Declined, match="since this cluster's last gradient"):
        learning.gradient(first.arrays, 8, 1)
    decide(policy, learner, 2)
    assert learning.gradient(first.arrays, 8, 2).samples > 0
