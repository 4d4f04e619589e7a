"""Versions of an agent whose store goes away, whose term is taken, or whose files are lost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedsched.adapters.memory import MemoryStore
from fedsched.agent.versions import LiveVersions
from fedsched.config import AgentConfig, parse
from fedsched.core.ids import ClusterName
from fedsched.core.versions import Action, Promotion, State, Version
from fedsched.errors import StoreUnavailable
from fedsched.policy import checkpoint, registry
from fedsched.policy.checkpoint import Checkpoint
from fedsched.policy.dl2 import DL2, initial
from fedsched.runtime import codec, keys
from fedsched.runtime.ports import Committed, Guard, Put, Write
from tests.waiting import eventually

EAST = ClusterName("east")
SHIPPED = checkpoint.load(checkpoint.BUILTIN)


class Fickle(MemoryStore):
    """A store that can be away for writers."""

    away = False
    refused = 0
    """Writes that came while it was away."""

    def commit(self, guards: tuple[Guard, ...], writes: tuple[Write, ...]) -> Committed:
        if self.away:
            self.refused += 1
            raise StoreUnavailable("etcd does not answer")
        return super().commit(guards, writes)


@pytest.fixture
def store() -> Iterator[Fickle]:
    memory = Fickle()
    memory.commit((), (Put(keys.term(EAST), b"3"),))
    yield memory
    memory.close()


def config_of(home: Path) -> AgentConfig:
    plain = {
        "cluster": "east",
        "state_dir": str(home),
        "etcd": "127.0.0.1:1",
        "nodes": [{"name": "n", "cpus": 4}],
        "promotion": {"accept": "at_once"},
    }
    return parse(AgentConfig, plain, "the test")


class Agent:
    """The part of an agent that has to do with versions."""

    def __init__(self, store: Fickle, home: Path, term: int = 3) -> None:
        config = config_of(home)
        self.policy = registry.make(config.policy)
        self.versions = LiveVersions(config, store, self.policy, term)

    @property
    def digest(self) -> str:
        """Of what really decides."""
        assert isinstance(self.policy, DL2)
        return checkpoint.digest(self.policy.weights)

    def offer(self, number: int) -> str:
        made = Checkpoint(initial(SHIPPED.shape, number), SHIPPED.shape, {})
        self.versions.offered(Version("dl2", number, made.digest), made.to_bytes())
        return made.digest


def orders(store: Fickle) -> list[Promotion]:
    return [codec.loads(Promotion, entry.value) for entry in store.list(keys.promotions(EAST)).entries]


def test_nothing_takes_effect_that_could_not_be_written_down_and_it_does_once_it_can(
    store: Fickle, tmp_path: Path
) -> None:
    """Persist, then act: a restart in between must not bring an older version back without a trace."""
    agent = Agent(store, tmp_path)
    store.away = True
    digest = agent.offer(2)
    eventually(lambda: store.refused, "version 2 could not be written down", 30.0)
    assert agent.digest == SHIPPED.digest
    store.away = False
    eventually(lambda: agent.digest == digest, "version 2 decides", 30.0)
    eventually(lambda: orders(store)[-1].state is State.ACTIVE, "and it is written down", 30.0)
    agent.versions.close()


def test_an_agent_ends_at_once_though_its_store_is_away(store: Fickle, tmp_path: Path) -> None:
    agent = Agent(store, tmp_path)
    store.away = True
    agent.offer(2)
    eventually(lambda: store.refused, "it waits for its store", 30.0)
    began_s = time.monotonic()
    agent.versions.close()
    assert time.monotonic() - began_s < 10.0


def test_an_agent_whose_term_is_over_changes_nothing(store: Fickle, tmp_path: Path) -> None:
    """Its successor decides which version decides."""
    agent = Agent(store, tmp_path / "old")
    store.commit((), (Put(keys.term(EAST), b"4"),))
    before = orders(store)
    agent.offer(2)
    agent.versions.close()  # after what was offered
    assert orders(store) == before
    assert agent.digest == SHIPPED.digest


@pytest.mark.parametrize("what", ["deleted", "torn"])
def test_an_agent_whose_files_are_lost_begins_with_the_configured_weights_and_says_so(
    store: Fickle, tmp_path: Path, what: str
) -> None:
    """A new disk must not keep a cluster's agent from starting."""
    agent = Agent(store, tmp_path)
    agent.offer(2)
    eventually(lambda: orders(store)[-1].state is State.ACTIVE and len(orders(store)) == 2, "version 2 decides", 30.0)
    agent.versions.close()
    for path in (tmp_path / "versions").iterdir():
        path.unlink() if what == "deleted" else path.write_bytes(b"torn")
    (tmp_path / "shadow.json").write_text("{")
    again = Agent(store, tmp_path)
    assert again.digest == SHIPPED.digest
    newest = orders(store)[-1]
    assert (newest.action, newest.state) == (Action.CONFIGURED, State.ACTIVE)
    assert newest.why.startswith("dl2 v2 cannot be used any more: ")
    again.versions.close()


def test_a_version_that_decided_before_a_restart_decides_again_before_anybody_is_asked(
    store: Fickle, tmp_path: Path
) -> None:
    """Without the aggregator, which may be away."""
    agent = Agent(store, tmp_path)
    digest = agent.offer(2)
    eventually(lambda: agent.digest == digest and orders(store)[-1].state is State.ACTIVE, "version 2 decides", 30.0)
    agent.versions.close()
    again = Agent(store, tmp_path)
    assert (again.digest, again.policy.version) == (digest, 2)
    assert len(orders(store)) == 2
    again.versions.close()
