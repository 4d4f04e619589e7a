"""Clusters that learn the policy `set` together: a real aggregator, Flower, gRPC, and both clusters' real learners."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from fedsched.adapters.federation_client import FederationClient
from fedsched.adapters.memory import MemoryStore
from fedsched.config import AggregatorConfig, LearningConfig, PolicyConfig, RoundConfig
from fedsched.core.commands import RewardSlot
from fedsched.core.ids import ClusterName, JobId
from fedsched.core.rounds import PolicyRecord, RoundOutcome
from fedsched.core.versions import Version
from fedsched.errors import CorruptCheckpoint
from fedsched.federation.averaging import Update, weighted_mean
from fedsched.federation.optimiser import ServerOptimiser
from fedsched.federation.source import Hello
from fedsched.learn import kinds
from fedsched.learn.contributing import ClusterLearning
from fedsched.policy import checkpoint
from fedsched.policy.installing import install
from fedsched.policy.learnable import Learnable
from fedsched.policy.set import Set
from fedsched.runtime import codec, keys
from fedsched.sim.fluid import FluidBudget
from tests.live.federation import Running
from tests.policy.observations import job, node, observation
from tests.waiting import eventually

pytestmark = pytest.mark.live

LEARNING = LearningConfig()
ROUNDS = RoundConfig(interval_s=3600, quorum=2, deadline_s=15, samples_min=4, batch_size=64)


class Cluster:
    """What an agent has of the policy: as it decides, learns, takes part and installs."""

    def __init__(self, name: str, slots: int) -> None:
        self.name = ClusterName(name)
        policy = kinds.make(PolicyConfig(name="set"), LEARNING)
        assert isinstance(policy, Learnable)
        self.policy = policy
        learner = kinds.learner_for(self.policy, LEARNING, ROUNDS.batch_size)
        assert learner is not None
        self.learner = learner
        self.learning = ClusterLearning(self.name, self.policy, self.learner, self.install)
        self.taken: list[Version] = []
        for slot in range(slots):
            seen = observation(
                [node(f"{name}-1", 6)],
                [job(f"{name}-{index}", workers=(1, 3), ps=(1, 2)) for index in "abc"],
                slot=slot,
            )
            decision = self.policy.decide(seen, FluidBudget(seen))
            self.learner.record(slot, self.policy.last_trace())
            progress = tuple((JobId(job_id), 0.01 * size.workers) for job_id, size in decision.allocations)
            self.learner.reward(RewardSlot(slot, progress))

    def install(self, version: Version, data: bytes) -> None:
        """Promotion at once."""
        install(self.policy, version, data)
        self.taken.append(version)

    def hello(self) -> Hello:
        return Hello(self.name, 1, "0.1.0", self.policy.name, self.learning.version, self.learning.samples)


@contextmanager
def aggregator(state_dir: Path, source: str = "builtin") -> Iterator[Running]:
    store = MemoryStore()
    config = AggregatorConfig(
        listen="127.0.0.1:0",
        etcd="127.0.0.1:1",
        state_dir=state_dir,
        rounds=ROUNDS,
        policy=PolicyConfig(name="set", checkpoint=source),
        lease_ttl_s=2,
    )
    running = Running(config, store)
    try:
        yield running
    finally:
        running.stop()
        store.close()


@contextmanager
def taking_part(address: str, *clusters: Cluster) -> Iterator[list[FederationClient]]:
    clients = [
        FederationClient(address, hello=one.hello, learner=one.learning, on_policy=one.learning.take)
        for one in clusters
    ]
    try:
        yield clients
    finally:
        for client in clients:
            client.close()


def test_a_round_makes_one_policy_of_what_two_clusters_learners_of_set_have_seen(tmp_path: Path) -> None:
    """The arithmetic is that of every round; the gradients are the set learner's own, at the shipped weights."""
    east, west = Cluster("east", 6), Cluster("west", 10)
    with aggregator(tmp_path) as running:
        with taking_part(running.address, east, west):
            record = running.round(1)
            eventually(lambda: east.policy.version == west.policy.version == 2, "both decide with version 2")
        entry = running.store.get(keys.policy_version("set", 2))
        assert entry is not None
        assert running.store.get(keys.policy_version("dl2", 2)) is None
        made = codec.loads(PolicyRecord, entry.value)
        found = checkpoint.load(running.config.state_dir / made.location)

    assert record.outcome is RoundOutcome.COMBINED
    assert [(entry.cluster, entry.samples) for entry in record.contributions] == [("east", 18), ("west", 30)]
    assert (made.name, made.contributors) == ("set", ("east", "west"))
    assert made.location == "policies/set/000002.safetensors"
    first = checkpoint.load(checkpoint.BUILTIN_SET)
    # Both have fewer decisions than a batch holds, so each gradient is over all of them, whatever its seed.
    updates = [
        Update(one.name, gradient.samples, gradient.gradients)
        for one in (east, west)
        for gradient in [one.learner.gradient(first.arrays, ROUNDS.batch_size, 0)]
    ]
    expected, _ = ServerOptimiser(ROUNDS.learning_rate).step(first.arrays, weighted_mean(updates))
    for one in (east, west):
        assert isinstance(one.policy, Set)
        assert [str(version) for version in one.taken] == ["set v1", "set v2"]
        assert checkpoint.digest(one.policy.weights) == made.digest == found.digest
    for name, array in expected.items():
        assert array.tobytes() == found.arrays[name].tobytes(), name
    assert any((found.arrays[name] != first.arrays[name]).any() for name in first.arrays)
    assert all(np.isfinite(array).all() for array in found.arrays.values())


def test_a_cluster_of_another_policy_is_told_so_and_the_others_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One federation combines one policy."""
    east, west, north = Cluster("east", 6), Cluster("west", 6), Cluster("north", 6)
    other = Hello(north.name, 1, "0.1.0", "dl2", 0, 18)
    with aggregator(tmp_path) as running:
        stranger = FederationClient(
            running.address, hello=lambda: other, learner=north.learning, on_policy=north.learning.take
        )
        told = "the agent of north learns policy dl2; this aggregator combines set; try: set policy.name alike"
        eventually(lambda: told in caplog.text, "the stranger was told")
        with taking_part(running.address, east, west):
            record = running.round(1)
            eventually(lambda: east.policy.version == west.policy.version == 2, "both decide with version 2")
        stranger.close()
    assert [entry.cluster for entry in record.contributions] == ["east", "west"]
    assert north.taken == []


def test_the_first_version_is_made_of_this_policys_weights_or_of_none(tmp_path: Path) -> None:
    """Told when the aggregator starts, not by every agent that cannot use what it is offered."""
    with aggregator(tmp_path, str(checkpoint.BUILTIN)) as running:
        eventually(lambda: running.problem is not None, "the aggregator gives up")
    assert isinstance(running.problem, CorruptCheckpoint)
    assert "holds weights of format" in running.problem.message
    assert "policy set expected" in running.problem.message
