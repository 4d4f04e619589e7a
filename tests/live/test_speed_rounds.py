"""Clusters that share what they see of speeds: a real aggregator and etcd, gRPC and Flower, and two agents' ends."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from fedsched.adapters import etcd_server
from fedsched.adapters.etcd import EtcdStore
from fedsched.adapters.federation_client import FederationClient
from fedsched.addresses import free_address
from fedsched.core.ids import ClusterName
from fedsched.core.rounds import Absence, PolicyRecord, RoundRecord
from fedsched.core.speeds import SpeedStatistics, SpeedSums
from fedsched.federation.source import Arrays, Hello
from fedsched.learn.sharing import Shared
from fedsched.policy import speed_pool
from fedsched.policy.speed_checkpoint import SpeedCheckpoint
from fedsched.policy.speed_pool import STATISTICS, Part, part_of
from fedsched.runtime import codec, keys
from tests.agent.test_remembering import ROOT, TYPES
from tests.learn.test_sharing import EAST, WEST
from tests.learn.test_sharing import Agent as Cluster
from tests.waiting import eventually

pytestmark = pytest.mark.live
WAIT_S = 90.0
"""The aggregator's process may have to begin twice on a busy machine."""


class Federation:
    """An aggregator's process beside an etcd of its own."""

    def __init__(self, folder: Path, etcd: str) -> None:
        self.store = EtcdStore(etcd)
        self.address = free_address()
        self._folder = folder
        # Nobody knows anything yet, so that all that is known was shared.
        SpeedCheckpoint(SpeedStatistics(), {"command": "test"}).save(folder / "nothing")
        config = {
            "listen": self.address,
            "etcd": etcd,
            "state_dir": str(folder / "state"),
            "rounds": {"interval_s": 0.3, "quorum": 1, "deadline_s": 10},
            "policy": {
                "name": "learned_speed",
                "checkpoint": str(folder / "nothing"),
                "options": {"period_s": 604800.0},
            },
            "lease_ttl_s": 2,
        }
        (folder / "aggregator.yaml").write_text(yaml.safe_dump(config))
        self.start()

    def start(self) -> None:
        program = [sys.executable, "-m", "fedsched.aggregator", "--config", str(self._folder / "aggregator.yaml")]
        self.process = subprocess.Popen(program, cwd=ROOT)

    def kill(self) -> None:
        """kill -9."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def total(self) -> SpeedStatistics:
        """What the version in force holds."""
        active = self.store.get(keys.policy_active("learned_speed"))
        if active is None:
            return SpeedStatistics()
        entry = self.store.get(keys.policy_version("learned_speed", int(active.value)))
        assert entry is not None
        record = codec.loads(PolicyRecord, entry.value)
        return speed_pool.load(self._folder / "state" / record.location).total

    def rounds(self) -> list[RoundRecord]:
        return [codec.loads(RoundRecord, entry.value) for entry in self.store.list(keys.ROUNDS).entries]


@contextmanager
def federation(folder: Path) -> Iterator[Federation]:
    etcd = etcd_server.start(folder / "etcd")
    try:
        running = Federation(folder, etcd.address)
        try:
            yield running
        finally:
            running.kill()
            running.store.close()
    finally:
        etcd_server.stop(etcd.pid)


@contextmanager
def taking_part(address: str, cluster: Cluster, *, lies: bool = False, term: int = 1) -> Iterator[FederationClient]:
    """The cluster's agent, as far as the federation sees it."""
    sharing = cluster.sharing

    def hello() -> Hello:
        return Hello(cluster.name, term, "0.1.0", "learned_speed", sharing.version, sharing.samples)

    client = FederationClient(address, hello=hello, learner=_Liar(cluster) if lies else sharing, on_policy=sharing.take)
    try:
        yield client
    finally:
        client.close()


class _Liar:
    """Sends what nobody can have seen."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def gradient(self, arrays: Arrays, batch_size: int, seed: int) -> Shared:
        part = part_of(self._cluster.sharing.gradient(arrays, batch_size, seed).gradients)
        negative = SpeedStatistics(
            (cell, SpeedSums(-sums.count, sums.total, sums.squares)) for cell, sums in part.statistics
        )
        array = Part(part.epoch, part.term, part.number, part.period_s, negative).to_array()
        return Shared({STATISTICS: array}, 1)


def test_what_one_cluster_sees_the_other_knows_and_a_killed_aggregator_forgets_nothing(tmp_path: Path) -> None:
    """The sums are what the federation has learned; a crash of the server must not cost a single job of them."""
    east, west = Cluster(EAST, 1).run(30), Cluster(WEST, 2)
    with federation(tmp_path) as running, taking_part(running.address, east), taking_part(running.address, west):
        eventually(lambda: west.sharing.version > 1, "the fresh cluster was offered what the other has seen", WAIT_S)
        west.run(1)
        assert {cell.job_type for cell, _ in west.policy.statistics} == set(TYPES)
        west.run(20)
        both = east.policy.observed.merged([west.policy.observed])
        eventually(lambda: running.total() == both, "the federation knows exactly what both have seen", WAIT_S)

        running.kill()
        east.run(10)
        running.start()
        assert running.total() == both
        both = east.policy.observed.merged([west.policy.observed])
        eventually(lambda: running.total() == both, "what was seen meanwhile has come", WAIT_S)
        again = Cluster(EAST, 1, state=east.policy.state(), term=2)
        again.cluster = east.cluster
        with taking_part(running.address, again.run(10), term=2):
            both = again.policy.observed.merged([west.policy.observed])
            eventually(lambda: running.total() == both, "a restarted agent goes on where it was", WAIT_S)


def test_a_cluster_that_sends_nonsense_is_refused_and_told_and_teaches_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its operator must hear of it, and nobody else must feel it."""
    east, west, liar = Cluster(EAST, 1).run(30), Cluster(WEST, 2), Cluster(ClusterName("north"), 3).run(20)
    with (
        federation(tmp_path) as running,
        taking_part(running.address, liar, lies=True),
        taking_part(running.address, east),
        taking_part(running.address, west),
    ):
        eventually(lambda: west.sharing.version > 1, "the fresh cluster was offered what the other has seen", WAIT_S)
        eventually(lambda: "what this cluster gave does not count" in caplog.text, "the liar was told", WAIT_S)
        rejected = [gone for one in running.rounds() for gone in one.absent if gone.absence is Absence.REJECTED]
        assert {gone.cluster for gone in rejected} == {"north"}
        assert "observations; 1 to 1000000 were expected" in rejected[0].why
        west.run(1)
        expected = east.policy.observed.merged([west.policy.observed])
        assert {cell for cell, _ in running.total()} <= {cell for cell, _ in expected}
