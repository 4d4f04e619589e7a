"""What an agent gives to the federation's rounds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fedsched.core.commands import RewardSlot
from fedsched.core.decision import Observation
from fedsched.core.ids import ClusterName, JobId
from fedsched.core.placement import TentativePlacement
from fedsched.federation.exchange import GradientRequest, respond
from fedsched.federation.source import Declined, Hello, PolicyOffer
from fedsched.learn.actor_critic import Learner
from fedsched.learn.contributing import ClusterLearning
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


EAST = ClusterName("east")


class Cluster:
    """A policy that decides and a learner that watches it."""

    def __init__(self) -> None:
        self.first = checkpoint.load(checkpoint.BUILTIN)
        self.policy = DL2(self.first.arrays, shape=self.first.shape)
        self.learner = Learner(self.policy.shape)
        self.learning = ClusterLearning(EAST, self.policy, self.learner, lambda version, data: None)

    def give(self) -> int:
        return self.learning.gradient(self.first.arrays, 8, 0).samples

    def hear(self, version: int, contributors: str) -> None:
        """A round has counted the updates of these."""
        made = self.first.replaced(self.first.arrays, {"contributors": contributors})
        assert self.learning.take(PolicyOffer("dl2", version, made.digest, made.to_bytes())) is None


def test_an_idle_cluster_gives_no_gradient_twice_once_it_has_counted() -> None:
    """An idle federation that learns the same memories again and again drifts away from a good policy."""
    cluster = Cluster()
    with pytest.raises(Declined, match="has a reward yet"):
        cluster.give()
    decide(cluster.policy, cluster.learner, 1)
    assert cluster.give() > 0
    cluster.hear(2, "east, west")
    with pytest.raises(Declined, match="since this cluster's last update that counted"):
        cluster.give()
    decide(cluster.policy, cluster.learner, 2)
    assert cluster.give() > 0


@pytest.mark.parametrize("contributors", ["", "west", "north-east, west"])
def test_what_did_not_count_may_be_given_again(contributors: str) -> None:
    """An update that was lost, late or below the quorum has taught nobody anything yet."""
    cluster = Cluster()
    decide(cluster.policy, cluster.learner, 1)
    assert cluster.give() > 0
    assert cluster.give() > 0
    cluster.hear(2, contributors)
    assert cluster.give() > 0


def test_decisions_made_after_the_gradient_are_new_also_when_it_counts_later() -> None:
    cluster = Cluster()
    decide(cluster.policy, cluster.learner, 1)
    cluster.give()
    decide(cluster.policy, cluster.learner, 2)
    cluster.hear(2, "east")
    assert cluster.give() > 0


def test_too_few_decisions_are_declined_before_the_learner_is_asked() -> None:
    """`samples_min` holds on the agent's side: three decisions make noise that would count as an update."""
    cluster = Cluster()
    decide(cluster.policy, cluster.learner, 1)
    few = cluster.learning.samples
    hello = Hello(EAST, 3, "0.1.0", "dl2", 1, few)

    question = GradientRequest(4, 1, 8, 0, "", samples_min=few + 1)
    declined = respond(hello, cluster.learning, cluster.first.arrays, question)
    enough = respond(hello, cluster.learning, cluster.first.arrays, replace(question, samples_min=few))

    assert declined.declined == f"{few} decisions have a reward; the federation asks for at least {few + 1}"
    assert (declined.term, declined.base_version, declined.gradients) == (3, 1, {})
    assert not enough.declined
    assert enough.samples > 0


def test_weights_of_another_policy_are_declined_by_name_and_nothing_changes() -> None:
    """Two policies of one federation's past, or a wrong file: the operator reads this line, not a list of arrays."""
    cluster = Cluster()
    other = checkpoint.load(checkpoint.BUILTIN_SET)
    refused = cluster.learning.take(PolicyOffer("set", 2, other.digest, other.to_bytes()))
    assert refused == "it holds weights of format fedsched/set/1; fedsched/dl2/1 was expected"
    assert (cluster.learning.version, cluster.policy.version) == (0, 1)
