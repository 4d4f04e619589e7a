"""What a cluster learns alone, beside what its gradients do for the federation."""

from __future__ import annotations

import pytest

from fedsched.config import LearningConfig, OwnTrackConfig
from fedsched.core.commands import RewardSlot
from fedsched.core.decision import Observation
from fedsched.core.ids import JobId
from fedsched.core.placement import TentativePlacement
from fedsched.core.versions import Version
from fedsched.federation.optimiser import ServerOptimiser
from fedsched.learn import kinds
from fedsched.learn.actor_critic import Learner
from fedsched.learn.own_track import OwnTrack
from fedsched.policy import checkpoint
from fedsched.policy.dl2 import DL2
from tests.core.test_placement import view
from tests.core.world import node

FIRST = checkpoint.load(checkpoint.BUILTIN)
STEPS = OwnTrackConfig(batch_size=8, samples_min=1, learning_rate=0.01, half_after=2)


class Cluster:
    """A policy that decides, its learner and the versions that it offers."""

    def __init__(self, steps: OwnTrackConfig = STEPS) -> None:
        self.policy = DL2(FIRST.arrays, shape=FIRST.shape)
        self.learner = Learner(FIRST.shape, prioritised=False)  # draws leave no traces in it
        self.track = OwnTrack(self.learner, FIRST, steps)
        self.offered: list[tuple[Version, bytes]] = []
        self.track.join(self.policy, lambda version, data: self.offered.append((version, data)))
        self.slots = iter(range(1, 100))

    def decide(self, slots: int = 1) -> None:
        for _, slot in zip(range(slots), self.slots, strict=False):
            observation = Observation(slot, 1.0, (node("n", 8),), (view("a"), view("b")))
            self.policy.decide(observation, TentativePlacement(observation))
            self.track.record(slot, self.policy.last_trace())
            self.track.reward(RewardSlot(slot, ((JobId("a"), 0.5),)))


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


def test_each_slot_makes_a_version_that_says_where_it_comes_from(cluster: Cluster) -> None:
    cluster.decide(3)
    assert [version.own for version, _ in cluster.offered] == [True, True, True]
    assert {version.policy for version, _ in cluster.offered} == {"dl2"}
    version, data = cluster.offered[-1]
    sent = checkpoint.from_bytes(data, "the last one")
    assert sent.digest == version.digest == cluster.track.weights.digest
    assert sent.made == {"track": "own track", "steps": 3}
    assert len({version.digest for version, _ in cluster.offered}) == 3


def test_it_steps_as_an_aggregator_with_this_cluster_alone_would(cluster: Cluster) -> None:
    """What it is compared with must be what learning alone is: the same gradients, lengths and moments."""
    by_hand, optimiser = FIRST.arrays, ServerOptimiser(STEPS.learning_rate)
    for taken, length in enumerate((1.0, 2 / 3, 2 / 4)):
        cluster.decide()
        drawn = cluster.learner.gradient(by_hand, STEPS.batch_size, taken)
        by_hand, optimiser = optimiser.step(by_hand, drawn.gradients, factor=length)
    assert checkpoint.digest(by_hand) == cluster.track.weights.digest != FIRST.digest


def test_what_decides_and_what_the_federation_asks_for_are_not_its_own_weights(cluster: Cluster) -> None:
    cluster.decide(5)
    assert checkpoint.digest(cluster.policy.weights) == FIRST.digest
    asked = cluster.track.gradient(FIRST.arrays, 8, 1)
    assert asked.samples == 8
    assert checkpoint.digest(cluster.policy.weights) == FIRST.digest


def test_nothing_new_makes_no_version(cluster: Cluster) -> None:
    """An idle cluster would drift on what it remembers."""
    cluster.decide(2)
    cluster.track.reward(RewardSlot(90, ()))
    assert len(cluster.offered) == 2


def test_it_goes_on_from_its_state_bit_by_bit(cluster: Cluster) -> None:
    cluster.decide(3)
    other = Cluster()
    other.track.restore(cluster.track.state())
    assert other.track.weights.digest == cluster.track.weights.digest
    assert dict(other.track.weights.made) == dict(cluster.track.weights.made)
    other.policy.load(1, cluster.policy.weights)
    for one in (cluster, other):
        one.track.record(50, cluster.policy.last_trace())
        one.track.reward(RewardSlot(50, ((JobId("b"), 0.25),)))
    assert other.track.weights.digest == cluster.track.weights.digest != FIRST.digest


def test_after_a_restart_it_begins_with_what_decides(cluster: Cluster) -> None:
    """What it had is gone with the process; what decides was no worse, or it would not have decided."""
    cluster.decide(2)
    better = checkpoint.from_bytes(cluster.offered[0][1], "the first one")
    cluster.policy.load(2, better.arrays)
    cluster.track.forget()
    assert cluster.track.weights.digest == better.digest
    assert len(cluster.track) == 0


def test_a_step_to_what_is_no_number_is_not_taken() -> None:
    """The first step is so long that no gradient can be computed where it ends."""
    cluster = Cluster(OwnTrackConfig(batch_size=8, samples_min=1, learning_rate=3e37))
    cluster.decide(3)
    assert len(cluster.offered) == 1
    assert cluster.track.weights.digest == cluster.offered[0][0].digest


@pytest.mark.parametrize("name", sorted(kinds.TEACHABLE))
def test_every_policy_with_weights_can_learn_alone_beside_a_federation(name: str) -> None:
    kind = kinds.TEACHABLE[name]
    first = kind.fresh(1, None)
    promotion = kinds.AT_ONCE.model_copy(update={"accept": "own_track"})
    assert isinstance(kind.pupil(first, LearningConfig(), 8, promotion), OwnTrack)
    assert not isinstance(kind.pupil(first, LearningConfig(), 8, kinds.AT_ONCE), OwnTrack)
