"""Versions of an agent whose store goes away, whose term is taken, or whose files are lost."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from fedsched.adapters.memory import MemoryStore
from fedsched.agent.versions import LiveVersions
from fedsched.config import AgentConfig, parse
from fedsched.core.ids import ClusterName
from fedsched.core.versions import Action, Candidate, Comparison, Promotion, State, Version, Wish
from fedsched.errors import StoreUnavailable
from fedsched.federation.source import PolicyOffer
from fedsched.policy import checkpoint, registry
from fedsched.policy.checkpoint import Checkpoint
from fedsched.policy.dl2 import DL2, initial
from fedsched.runtime import codec, keys
from fedsched.runtime.ports import Committed, Entry, Guard, Put, Write
from tests.waiting import eventually, soon

T = TypeVar("T")

EAST = ClusterName("east")
SHIPPED = checkpoint.load(checkpoint.BUILTIN)


class Fickle(MemoryStore):
    """A store that can be away for writers, or lose its answers."""

    away = False
    refused = 0
    """Writes that came while it was away."""
    lost: frozenset[int] | set[int] = frozenset()
    """Which of the next calls are carried out without an answer."""
    calls = 0

    def commit(self, guards: tuple[Guard, ...], writes: tuple[Write, ...]) -> Committed:
        if self.away:
            self.refused += 1
            raise StoreUnavailable("etcd does not answer")
        return self._answered(super().commit(guards, writes))

    def get(self, key: str) -> Entry | None:
        return self._answered(super().get(key))

    def _answered(self, answer: T) -> T:
        number, self.calls = self.calls, self.calls + 1
        if number in self.lost:
            raise StoreUnavailable("etcd does not answer")
        return answer


@pytest.fixture
def store() -> Iterator[Fickle]:
    memory = Fickle()
    memory.commit((), (Put(keys.term(EAST), b"3"),))
    yield memory
    memory.close()


def config_of(home: Path, **fields: object) -> AgentConfig:
    plain = {
        "cluster": "east",
        "state_dir": str(home),
        "etcd": "127.0.0.1:1",
        "nodes": [{"name": "n", "cpus": 4}],
        "promotion": {"accept": "at_once"},
        **fields,
    }
    return parse(AgentConfig, plain, "the test")


class Agent:
    """The part of an agent that has to do with versions."""

    def __init__(self, store: Fickle, home: Path, term: int = 3, **fields: object) -> None:
        config = config_of(home, **fields)
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
    with soon("it does not wait for its store"):
        agent.versions.close()


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


@pytest.mark.parametrize("what", ["a device without end", "a pipe that nobody writes to", "a folder", "a huge file"])
@pytest.mark.parametrize("how", ["promoted", "in the shadow"])
def test_a_checkpoint_that_is_no_file_of_weights_is_refused_and_not_read(
    store: Fickle, tmp_path: Path, what: str, how: str
) -> None:
    """An order names a path on the agent's machine. One that was read to its end took seven gigabytes in ten seconds,
    and would have again after each restart; a pipe would have held up every later order."""
    path = Path("/dev/zero") if what == "a device without end" else tmp_path / "weights"
    if what == "a pipe that nobody writes to":
        os.mkfifo(path)
    elif what == "a folder":
        path.mkdir()
    elif what == "a huge file":
        with path.open("wb") as file:
            file.truncate(2**40)
    version = Version("dl2", checkpoint=str(path))
    agent = Agent(store, tmp_path / "home")
    eventually(lambda: len(orders(store)) == 1, "the first order is kept")
    if how == "promoted":
        order = Promotion(EAST, 2, version, Action.PROMOTED, "ana", 0.0, "")
        store.commit((), (Put(keys.promotion(EAST, 2), codec.dumps(order)),))
        eventually(lambda: orders(store)[-1].state is State.REFUSED, "the order is refused")
        assert str(path) in orders(store)[-1].message
    else:
        wish = Wish(Candidate(version, "ana", 0.0, False))
        store.commit((), (Put(keys.candidate(EAST), codec.dumps(wish)),))
        eventually(lambda: str(path) in compared(store), "the comparison says why there is none")
    assert agent.digest == SHIPPED.digest
    agent.versions.close()


@pytest.mark.parametrize("policy", ["drf", "fifo", "constant"])
@pytest.mark.parametrize("source", ["builtin", "a file"])
def test_an_order_for_a_policy_without_weights_is_refused_and_the_agent_lives(
    store: Fickle, tmp_path: Path, policy: str, source: str
) -> None:
    """One word too many on the command line ended the agent of a cluster that ran a heuristic."""
    weights = tmp_path / "weights.safetensors"
    shutil.copyfile(checkpoint.BUILTIN, weights)
    version = Version(policy, checkpoint=str(weights) if source == "a file" else source)
    agent = Agent(store, tmp_path / "home", policy={"name": policy})
    eventually(lambda: len(orders(store)) == 1, "the first order is kept")
    for seq in (2, 3):  # whoever refused one is there for the next
        order = Promotion(EAST, seq, version, Action.PROMOTED, "ana", 0.0, "")
        store.commit((), (Put(keys.promotion(EAST, seq), codec.dumps(order)),))
        eventually(lambda: orders(store)[-1].state is State.REFUSED, "the order is refused")
        assert f"policy {policy} has no weights" in orders(store)[-1].message
    agent.versions.close()


def compared(store: Fickle) -> str:
    """What is wrong with the candidate."""
    entry = store.get(keys.comparison(EAST))
    return codec.loads(Comparison, entry.value).problem if entry is not None else ""


def test_an_order_whose_weights_came_and_cannot_be_kept_is_refused_with_the_reason(
    store: Fickle, tmp_path: Path
) -> None:
    """A full disk: an order that went on waiting for what had come would wait for ever."""
    agent = Agent(store, tmp_path, aggregator="127.0.0.1:1")
    asked: list[int] = []
    agent.versions.take_requests(asked.append)
    made = Checkpoint(initial(SHIPPED.shape, 7), SHIPPED.shape, {})
    order = Promotion(EAST, 2, Version("dl2", 7, made.digest), Action.PROMOTED, "ana", 0.0, "")
    store.commit((), (Put(keys.promotion(EAST, 2), codec.dumps(order)),))
    eventually(lambda: 7 in asked, "the federation is asked for version 7")
    (tmp_path / "versions").rmdir()
    (tmp_path / "versions").write_text("in the way, as a full disk is")

    agent.versions.requested(PolicyOffer("dl2", 7, made.digest, made.to_bytes()), "")

    eventually(lambda: orders(store)[-1].state is State.REFUSED, "the order is refused")
    assert "it cannot be kept here: " in orders(store)[-1].message
    assert agent.digest == SHIPPED.digest
    agent.versions.close()


def test_weights_are_kept_again_after_their_folder_was_deleted(store: Fickle, tmp_path: Path) -> None:
    """A careless cleaning of the disk costs what was there, not what comes."""
    agent = Agent(store, tmp_path)
    shutil.rmtree(tmp_path / "versions")
    digest = agent.offer(2)
    eventually(lambda: agent.digest == digest, "version 2 decides")
    agent.versions.close()


def test_weights_that_somebody_else_deletes_meanwhile_keep_no_version_from_deciding(
    store: Fickle, tmp_path: Path
) -> None:
    """Old weights are tidied away at each change; a file may be gone between two looks at it, as this one always is."""
    agent = Agent(store, tmp_path)
    (tmp_path / "versions" / "gone.safetensors").symlink_to(tmp_path / "nowhere")
    second = agent.offer(2)
    eventually(lambda: agent.digest == second, "version 2 decides")
    third = agent.offer(3)
    eventually(lambda: agent.digest == third, "version 3 decides")
    agent.versions.close()


@pytest.mark.parametrize("lost", [{0}, {1}, {0, 2}, {0, 2, 4}, {0, 1, 2, 3}])
def test_an_order_is_kept_once_whichever_answers_of_the_store_are_lost(
    store: Fickle, tmp_path: Path, lost: set[int]
) -> None:
    """Versions are a thread of the agent's: an exception that leaves it takes the whole agent along."""
    agent = Agent(store, tmp_path)
    eventually(lambda: orders(store)[-1].state is State.ACTIVE, "the first order is kept")
    store.lost, store.calls = lost, 0
    digest = agent.offer(2)
    eventually(lambda: agent.digest == digest and orders(store)[-1].state is State.ACTIVE, "version 2 decides")
    assert [order.version.version for order in orders(store)] == [0, 2]
    agent.versions.close()
