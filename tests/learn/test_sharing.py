"""What an agent that learns speeds gives to the others and takes from them."""

from __future__ import annotations

import pytest

from fedsched.core.ids import ClusterName
from fedsched.core.speeds import SpeedStatistics
from fedsched.federation.averaging import Update
from fedsched.federation.source import Declined, PolicyOffer
from fedsched.learn.sharing import SpeedSharing, Sums
from fedsched.policy import guardrail, registry
from fedsched.policy.learned_speed import LearnedSpeed, LearnedSpeedOptions
from fedsched.policy.speed_pool import Pool, part_of
from tests.agent.test_remembering import TYPES, Cluster

EAST, WEST = ClusterName("east"), ClusterName("west")


class Agent:
    """A cluster, its policy, and its part in the federation."""

    def __init__(
        self, name: ClusterName, seed: int, *, known: SpeedStatistics | None = None, state: bytes = b"", term: int = 1
    ) -> None:
        self.name = name
        self.cluster = Cluster(seed)
        self.policy = LearnedSpeed(LearnedSpeedOptions(resize_s=0.0), known)
        if state:
            self.policy.restore(state)
        self.sharing = SpeedSharing(name, self.policy, term)

    def run(self, slots: int) -> Agent:
        """So many slots pass."""
        for _ in range(slots):
            question = self.cluster.question()
            self.cluster.train(question, guardrail.decide(question, self.policy, registry.heuristic("fifo")))
        return self

    def update(self) -> Update:
        """What it gives."""
        given = self.sharing.gradient({}, 1, 1)
        assert not Sums(self.policy.period_s).inspect(Pool(), given.gradients).misfit
        return Update(self.name, given.samples, given.gradients)


def combined(pool: Pool, *updates: Update) -> Pool:
    return pool.merged((update.cluster, part_of(update.gradients)) for update in updates)


def offer(pool: Pool, version: int = 2) -> PolicyOffer:
    return PolicyOffer("learned_speed", version, pool.digest, pool.to_bytes())


def test_a_cluster_that_has_just_begun_knows_at_once_what_the_others_have_seen() -> None:
    """Why clusters take part at all."""
    east, fresh = Agent(EAST, 1).run(40), Agent(WEST, 2)
    assert fresh.sharing.take(offer(combined(Pool(), east.update()))) is None
    assert fresh.sharing.version == 2
    fresh.run(1)
    assert {cell.job_type for cell, _ in fresh.policy.statistics} == set(TYPES)
    assert fresh.policy.version == 2


def test_its_own_statistics_come_back_and_are_not_counted_twice() -> None:
    east = Agent(EAST, 1).run(20)
    east.sharing.take(offer(combined(Pool(), east.update())))
    before = east.policy.observed.observations
    east.run(1)
    assert east.policy.statistics.observations - before <= 6, "only what this slot has shown"
    assert east.policy.statistics == east.policy.observed


def test_what_all_began_with_is_not_counted_twice() -> None:
    known = Agent(EAST, 1).run(20).policy.observed
    begun = Pool().merged([(ClusterName(""), part_of(Agent(EAST, 1).run(20).update().gradients))])
    west = Agent(WEST, 2, known=known)
    west.sharing.take(offer(begun))
    west.run(1)
    assert west.policy.statistics == known.merged([west.policy.observed])


def test_it_gives_nothing_when_there_is_nothing_new() -> None:
    """An idle cluster must not keep making versions."""
    east = Agent(EAST, 1)
    with pytest.raises(Declined, match="no job of this cluster has shown a speed yet"):
        east.sharing.gradient({}, 1, 1)
    east.run(20)
    east.sharing.take(offer(combined(Pool(), east.update())))
    with pytest.raises(Declined, match="nothing was seen since"):
        east.sharing.gradient({}, 1, 1)
    east.run(10)
    assert east.update().samples


def test_an_agent_that_restarts_goes_on_with_its_part_and_one_that_lost_its_memory_begins_another() -> None:
    """Either way everything that was seen counts once."""
    first = Agent(EAST, 1, term=3).run(20)
    pool = combined(Pool(), first.update())
    kept = Agent(EAST, 1, state=first.policy.state(), term=4)
    kept.cluster = first.cluster
    pool = combined(pool, kept.run(20).update())
    assert pool.total == kept.policy.observed
    lost = Agent(EAST, 5, term=5).run(20)
    pool = combined(pool, lost.update())
    assert pool.total == kept.policy.observed.merged([lost.policy.observed])
    assert sorted(epoch for _, epoch in pool.parts) == [3, 5]


def test_what_was_taken_outlives_the_agent() -> None:
    """The decisions after a restart are those of an agent that was never killed, others' statistics included."""
    east, west = Agent(EAST, 1).run(40), Agent(WEST, 2)
    west.sharing.take(offer(combined(Pool(), east.update())))
    west.run(5)
    again = Agent(WEST, 2, state=west.policy.state(), term=2)
    again.cluster = west.cluster
    assert again.sharing.version == 2
    question = west.cluster.question()
    decided = [guardrail.decide(question, one.policy, registry.heuristic("fifo")) for one in (west, again)]
    assert decided[0] == decided[1]


def test_an_offer_that_is_damaged_changes_nothing() -> None:
    east, west = Agent(EAST, 1).run(20), Agent(WEST, 2)
    sound = offer(combined(Pool(), east.update()))
    damaged = PolicyOffer(sound.name, 2, sound.digest, sound.checkpoint[:-9])
    other = PolicyOffer(sound.name, 2, "0" * 64, sound.checkpoint)
    assert "no whole file" in (west.sharing.take(damaged) or "")
    assert "announced was 000" in (west.sharing.take(other) or "")
    assert west.sharing.version == 0


def test_a_cluster_with_another_calendar_is_refused() -> None:
    update = Agent(EAST, 1).run(20).update()
    assert "the federation's last 60 s" in Sums(60.0).inspect(Pool(), update.gradients).misfit


def test_clusters_that_know_the_same_try_different_things() -> None:
    """Eight clusters that all try the same learn from eight slots what one could have shown."""
    known = Agent(ClusterName("north"), 3).run(4)
    pool = combined(Pool(), known.update())
    alike = [Agent(name, 1) for name in (EAST, WEST)]
    for agent in alike:
        agent.sharing.take(offer(pool))
        agent.run(12)
    tried = [{(cell.job_type, cell.workers) for cell, _ in agent.policy.observed} for agent in alike]
    assert tried[0] != tried[1]
    again = Agent(EAST, 1)
    again.sharing.take(offer(pool))
    assert again.run(12).policy.observed == alike[0].policy.observed, "each sticks to its own"
