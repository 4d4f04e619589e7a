"""Whole rounds: a real aggregator, real gRPC and Flower between it and two or three agents' clients."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import yaml

from fedsched import tracing
from fedsched.adapters import spans
from fedsched.adapters.etcd import EtcdStore
from fedsched.adapters.memory import MemoryStore
from fedsched.addresses import free_address
from fedsched.config import RoundConfig
from fedsched.core.rounds import Absence, RoundOutcome, RoundRecord
from fedsched.errors import AddressInUse, CorruptCheckpoint, InvalidConfiguration, StoreUnavailable
from fedsched.federation.averaging import norm
from fedsched.federation.optimiser import ServerOptimiser
from fedsched.federation.source import WIRE_VERSION, Arrays
from fedsched.pb import federation_pb2 as pb
from fedsched.pb import federation_pb2_grpc as pb_grpc
from fedsched.policy import checkpoint
from fedsched.policy.dl2 import initial
from fedsched.runtime import keys
from fedsched.runtime.ports import Committed, Delete, Guard, Put, Write
from tests.live.federation import SHAPE, Agent, Learner, Running, agents, aggregator, gradient_of
from tests.waiting import eventually

pytestmark = pytest.mark.live

ONCE = RoundConfig(interval_s=3600, quorum=2, deadline_s=15)
"""The first round, which comes as soon as both agents are ready, and no other."""
STARTS_S_MAX = 240.0
"""A process loads torch and Flower before its first word: four seconds of a core, for which it waited 99 seconds on a
machine whose two cores had thirty processes to run."""
OFTEN = RoundConfig(interval_s=0.1, quorum=2, deadline_s=15)


@pytest.fixture
def store() -> Iterator[MemoryStore]:
    store = MemoryStore()
    yield store
    store.close()


def test_a_round_combines_both_gradients_exactly_and_both_agents_run_the_result(
    store: MemoryStore, tmp_path: Path
) -> None:
    """The product's promise: what two clusters learnt becomes one policy, by the arithmetic that is documented."""
    with aggregator(store, tmp_path, ONCE) as running:
        east, west = Agent(running.address, "east", Learner(100)), Agent(running.address, "west", Learner(300))
        with agents(east, west):
            record = running.round(1)
            eventually(lambda: east.version == west.version == 2, "both agents run version 2")

        asked = {str(agent.cluster): agent.learner.asked[0] for agent in (east, west)}
        given = {cluster: gradient_of(arrays, seed) for cluster, (arrays, _, seed) in asked.items()}
        first = initial(SHAPE, 1)
        mean = {}
        for name in first:
            by_samples = 100 * given["east"][name].astype(np.float64) + 300 * given["west"][name].astype(np.float64)
            mean[name] = (by_samples / 400).astype(np.float32)
        expected, _ = ServerOptimiser(ONCE.learning_rate).step(first, mean)
        found = checkpoint.from_bytes(east.offers[0].checkpoint)

        assert all(found.arrays[name].tobytes() == expected[name].tobytes() for name in expected)
        assert found.made["contributors"] == "east, west"
        assert record.outcome is RoundOutcome.COMBINED
        assert [(entry.cluster, entry.samples) for entry in record.contributions] == [("east", 100), ("west", 300)]
        assert record.contributions[0].norm == pytest.approx(norm(given["east"]))
        assert dict(record.contributions[0].metrics) == {"loss": 0.5, "entropy": 1.5, "mean_reward": 0.25}
        assert running.active() == 2
        assert running.policy(2).contributors == ("east", "west")
        assert running.file(2).read_bytes() == east.offers[0].checkpoint == west.offers[0].checkpoint
        assert asked["east"][1] == ONCE.batch_size
        assert asked["east"][2] != asked["west"][2], "each agent draws its batch with a seed of its own"


def test_a_client_that_hangs_does_not_hold_up_the_round(store: MemoryStore, tmp_path: Path) -> None:
    """One stuck cluster must not stop the learning of all others."""
    armed, release = threading.Event(), threading.Event()

    def hang(arrays: Arrays, seed: int) -> Arrays:
        if armed.is_set():
            release.wait(60)
        return gradient_of(arrays, seed)

    rules = RoundConfig(interval_s=0.1, quorum=2, deadline_s=2)
    with aggregator(store, tmp_path, rules) as running:
        stuck = Agent(running.address, "north", Learner(100, hang))

        def missed() -> list[RoundRecord]:
            absences = [(entry, [gone.absence for gone in entry.absent]) for entry in running.rounds()]
            return [entry for entry, seen in absences if seen == [Absence.MISSING] and len(entry.asked) == 3]

        trio = stuck, Agent(running.address, "east", Learner(100)), Agent(running.address, "west", Learner(100))
        with agents(*trio):
            # A round of fewer would miss the stuck agent just as well, but below its quorum.
            eventually(lambda: any(len(entry.contributions) == 3 for entry in running.rounds()), "all three take part")
            armed.set()
            eventually(lambda: bool(missed()), "a round missed the stuck agent")
            record = missed()[0]
            after = running.round(record.number + 1)
            release.set()

    assert record.outcome is RoundOutcome.COMBINED
    assert [entry.cluster for entry in record.contributions] == ["east", "west"]
    assert record.absent[0].why == "no answer within 2 s"
    assert record.finished_s - record.started_s >= 2
    assert "still computes the gradient of an earlier round" in after.absent[0].why


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda arrays: {**arrays, "policy.0.bias": arrays["policy.0.bias"] * np.float32("nan")}, "NaN"),
        (lambda arrays: {name: 1e6 + array for name, array in arrays.items()}, "norm_max is 100"),
        (lambda arrays: {**arrays, "policy.0.bias": np.zeros(3, np.float32)}, "policy.0.bias has shape [3]"),
        (lambda arrays: {"policy.0.bias": arrays["policy.0.bias"]}, "is missing"),
        (lambda arrays: {name: array.astype(np.float64) for name, array in arrays.items()}, "float64"),
    ],
)
def test_a_broken_update_is_refused_and_the_rest_is_combined(
    store: MemoryStore, tmp_path: Path, spoil: Any, why: str
) -> None:
    """One faulty learner must neither poison the policy nor stop the round."""
    rules = RoundConfig(interval_s=0.1, quorum=2, deadline_s=15)

    def broken(arrays: Arrays, seed: int) -> Arrays:
        return {**spoil(gradient_of(arrays, seed))}

    with aggregator(store, tmp_path, rules) as running:
        faulty = Agent(running.address, "north", Learner(10**6, broken))
        eventually(lambda: faulty.client.connected, "the faulty agent takes part")
        sound = Agent(running.address, "east", Learner(100)), Agent(running.address, "west", Learner(300))
        with agents(faulty, *sound):
            eventually(lambda: any(len(entry.asked) == 3 for entry in running.rounds()), "a round asked all three")
        record = next(entry for entry in running.rounds() if len(entry.asked) == 3)
        weights = checkpoint.load(running.file(record.version))

    assert record.outcome is RoundOutcome.COMBINED
    assert [entry.cluster for entry in record.contributions] == ["east", "west"]
    (absent,) = record.absent
    assert (absent.cluster, absent.absence) == ("north", Absence.REJECTED)
    assert why in absent.why
    assert all(np.isfinite(array).all() for array in weights.arrays.values())


def test_without_a_quorum_the_policy_stays(store: MemoryStore, tmp_path: Path) -> None:
    """An agent without decisions declines; what is left is too little to speak for the federation."""
    with aggregator(store, tmp_path, RoundConfig(interval_s=0.1, quorum=2, deadline_s=120)) as running:
        east, west = Agent(running.address, "east", Learner(100)), Agent(running.address, "west", Learner(0))
        with agents(east, west):
            record = running.round(1)

        assert record.outcome is RoundOutcome.NO_QUORUM
        assert (record.absent[0].absence, record.absent[0].why) == (
            Absence.DECLINED,
            "0 decisions have a reward; the federation asks for at least 32",
        )
        assert record.finished_s - record.started_s < 60, "nobody waits for the deadline once all have answered"
        assert running.active() == 1
        assert east.offers == []


def test_an_agent_that_dies_in_a_round_is_noticed_at_once(store: MemoryStore, tmp_path: Path) -> None:
    """A connection that breaks will bring no answer; waiting for it would cost the deadline each time."""
    release, computing = threading.Event(), threading.Event()

    def hang(arrays: Arrays, seed: int) -> Arrays:
        computing.set()
        release.wait(60)
        return gradient_of(arrays, seed)

    with aggregator(store, tmp_path, RoundConfig(interval_s=0.1, quorum=2, deadline_s=60)) as running:
        east, west = Agent(running.address, "east", Learner(100)), Agent(running.address, "west", Learner(90, hang))
        with agents(east):
            assert computing.wait(20)
            west.client.close()
            record = running.round(1)
            release.set()

    assert record.outcome is RoundOutcome.NO_QUORUM
    assert record.absent[0].why == "the connection was lost"


def digests(running: Running, versions: int) -> list[tuple[str, str]]:
    records = [running.policy(version) for version in range(1, versions + 1)]
    return [(record.digest, record.optimiser_digest) for record in records]


def test_a_restart_of_the_aggregator_changes_no_bit_of_what_is_learnt(tmp_path: Path) -> None:
    """Versions, optimiser and round numbers are the federation's memory; a restart must not cost or bend any of it."""
    stores = MemoryStore(), MemoryStore()
    try:
        with aggregator(stores[0], tmp_path / "straight", OFTEN) as running:
            pair = Agent(running.address, "east", Learner(100)), Agent(running.address, "west", Learner(300))
            with agents(*pair):
                eventually(lambda: running.active() >= 5, "version 5 is in force")
            straight = digests(running, 5)
        with aggregator(stores[1], tmp_path / "restarted", OFTEN) as running:
            address = running.address
            pair = Agent(address, "east", Learner(100)), Agent(address, "west", Learner(300))
            eventually(lambda: running.active() >= 3, "version 3 is in force")
        with agents(*pair):
            before = running.active()
            with aggregator(stores[1], tmp_path / "restarted", OFTEN, listen=address) as running:
                eventually(lambda: running.active() >= max(5, before + 2), "two more versions are in force")
                eventually(lambda: all(agent.version > before for agent in pair), "the agents came back and run them")
                restarted = digests(running, 5)
                numbers = [record.number for record in running.rounds()]
    finally:
        for store in stores:
            store.close()

    assert restarted == straight
    assert numbers == list(range(1, len(numbers) + 1))


def test_an_agent_that_joins_late_receives_the_version_in_force(store: MemoryStore, tmp_path: Path) -> None:
    """A new cluster starts with what the others have learnt."""
    with aggregator(store, tmp_path, ONCE) as running:
        pair = Agent(running.address, "east", Learner(100)), Agent(running.address, "west", Learner(300))
        with agents(*pair):
            running.round(1)
            eventually(lambda: running.active() == 2, "version 2 is in force")
            late = Agent(running.address, "north", Learner(0))
            current = Agent(running.address, "south", Learner(0), version=2)
            with agents(late, current):
                eventually(lambda: late.version == 2, "the late agent runs version 2")
                eventually(lambda: current.client.connected, "the other one takes part")
                assert [offer.version for offer in late.offers] == [2]
                assert current.offers == [], "who runs it already is not sent it again"


def test_an_agent_may_refuse_a_version_and_stays(store: MemoryStore, tmp_path: Path) -> None:
    """An agent checks what it is offered; a refusal is its right and must not break the federation."""
    with aggregator(store, tmp_path, OFTEN) as running:
        east, west = Agent(running.address, "east", Learner(100)), Agent(running.address, "west", Learner(300))
        west.refuse = "worse than the heuristic in shadow"
        with agents(east, west):
            eventually(lambda: east.version >= 3, "two rounds are held")
            assert west.version == 1
            assert west.client.connected


def test_a_corrupt_file_makes_the_aggregator_fall_back_and_say_so(store: MemoryStore, tmp_path: Path) -> None:
    """A damaged disk block must not take the federation's learning down, nor be handed to the agents."""
    with aggregator(store, tmp_path, OFTEN) as running:
        pair = Agent(running.address, "east", Learner(100)), Agent(running.address, "west", Learner(300))
        with agents(*pair):
            eventually(lambda: running.active() >= 3, "version 3 is in force")
    newest, file = running.active(), running.file(running.active())
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))

    with aggregator(store, tmp_path, ONCE) as running:
        agent = Agent(running.address, "east", Learner(0), version=newest)
        with agents(agent):
            eventually(lambda: agent.version == newest - 1, "the agent is back on the sound version")
        assert running.active() == newest - 1
        marked = running.policy(newest).message
        assert f"version {newest - 1} is in force instead" in marked
        assert "damaged" in marked

    with aggregator(store, tmp_path, OFTEN) as running:
        pair = Agent(running.address, "east", Learner(100)), Agent(running.address, "west", Learner(300))
        with agents(*pair):
            eventually(lambda: running.active() > newest, "the next version is made")
        made = running.policy(newest + 1)
        assert made.parent_version == newest - 1, "a number is not given twice"


def test_a_version_whose_record_is_unreadable_costs_that_version_only(store: MemoryStore, tmp_path: Path) -> None:
    """Another release, or somebody's hand, may have written there; to end with a traceback would stop all learning."""
    with aggregator(store, tmp_path, OFTEN) as running:
        pair = Agent(running.address, "east", Learner(100)), Agent(running.address, "west", Learner(300))
        with agents(*pair):
            eventually(lambda: running.active() > 2, "version 3 is made")
    newest = running.active()
    assert store.commit((), (Put(keys.policy_version("dl2", newest), b"not a record"),)).ok

    with aggregator(store, tmp_path, OFTEN) as running:
        eventually(lambda: running.active() == newest - 1, "the one before is in force")
        pair = Agent(running.address, "east", Learner(100)), Agent(running.address, "west", Learner(300))
        with agents(*pair):
            eventually(lambda: running.active() > newest, "the next version is made")
        assert running.policy(newest + 1).parent_version == newest - 1, "a number is not given twice"


@pytest.mark.parametrize(
    "damaged", [keys.policy_active("dl2"), keys.round_record(1), f"{keys.POLICIES}dl2/notes", f"{keys.ROUNDS}notes"]
)
def test_what_somebody_wrote_into_the_aggregators_keys_does_not_keep_it_from_starting(
    store: MemoryStore, tmp_path: Path, damaged: str
) -> None:
    """A key of nobody's, or a number that is none, ended the process with a traceback at every start."""
    with aggregator(store, tmp_path, ONCE) as running:
        eventually(lambda: running.active() == 1, "version 1 is there")
    assert store.commit((), (Put(damaged, b"not a number"),)).ok

    with aggregator(store, tmp_path, ONCE) as running:
        eventually(lambda: running.address, "it serves")
        assert running.active() == 1


def test_without_any_sound_version_the_aggregator_says_what_to_restore(store: MemoryStore, tmp_path: Path) -> None:
    """Starting anew by itself would throw away what was learnt, perhaps only because a disk is not mounted."""
    with aggregator(store, tmp_path, ONCE) as running:
        file = running.address and running.file(1)
    assert isinstance(file, Path)
    file.unlink()

    with aggregator(store, tmp_path, ONCE) as running:
        eventually(lambda: running.problem is not None, "the aggregator gives up")

    assert isinstance(running.problem, CorruptCheckpoint)
    assert "none of the 1 versions of policy dl2" in running.problem.message
    assert "restore" in running.problem.hint


def test_a_lost_optimiser_state_costs_only_its_moments(store: MemoryStore, tmp_path: Path) -> None:
    """The weights are what counts."""
    with aggregator(store, tmp_path, ONCE) as running:
        location = running.address and running.policy(1).optimiser_location
    (tmp_path / location).unlink()

    with aggregator(store, tmp_path, ONCE) as running:
        assert running.address
        assert running.active() == 1


class Unsteady(MemoryStore):
    """A store whose commits fail while it is told so, before or after they took effect."""

    def __init__(self) -> None:
        super().__init__()
        self.fail = ""
        self.failed = 0

    def commit(self, guards: tuple[Guard, ...], writes: tuple[Write, ...]) -> Committed:
        """Commit, or raise."""
        if not self.fail or not any(write.key.startswith(keys.ROUNDS) for write in writes):
            return super().commit(guards, writes)
        self.failed += 1
        if self.fail == "after":
            super().commit(guards, writes)
        raise StoreUnavailable("the store is away")


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_round_waits_for_etcd_and_is_saved_once(tmp_path: Path, when: str) -> None:
    """An answer of etcd that got lost must neither lose the round nor make it look like another leader's."""
    store = Unsteady()
    store.fail = when
    try:
        with aggregator(store, tmp_path, ONCE) as running:
            east, west = Agent(running.address, "east", Learner(100)), Agent(running.address, "west", Learner(300))
            with agents(east, west):
                eventually(lambda: store.failed >= 2, "saving was tried twice")
                assert east.offers == [], "what is not durable is not offered"
                store.fail = ""
                eventually(lambda: east.version == west.version == 2, "both agents run version 2")
            assert running.round(1).outcome is RoundOutcome.COMBINED
            assert running.active() == 2
    finally:
        store.close()


def test_a_second_aggregator_stands_by_and_takes_over(store: MemoryStore, tmp_path: Path) -> None:
    """Two that hold rounds at once would both give out version 2."""
    with aggregator(store, tmp_path, ONCE) as first:
        assert first.address
        with aggregator(store, tmp_path, ONCE) as second:
            entry = store.get(keys.leader("aggregator"))
            assert entry is not None
            assert second.service.address == ""

            first.stop()

            assert second.address
            assert second.active() == 1


def test_an_aggregator_that_lost_the_lead_writes_nothing(store: MemoryStore, tmp_path: Path) -> None:
    """It may learn of its loss late; the guard in each transaction is what protects the records."""
    leader = keys.leader("aggregator")
    taken = threading.Event()

    def usurp(arrays: Arrays, seed: int) -> Arrays:
        if not taken.is_set():
            store.commit((), (Delete(leader),))
            taken.set()
        return gradient_of(arrays, seed)

    with aggregator(store, tmp_path, ONCE) as running:
        address = running.address
        east, west = Agent(address, "east", Learner(100, usurp)), Agent(address, "west", Learner(300))
        with agents(east, west):
            assert taken.wait(20)
            eventually(lambda: running.service.address not in ("", address), "it leads again, on a new port")
        assert running.rounds() == []
        assert running.active() == 1
    assert running.problem is None


def test_a_port_in_use_is_one_clear_error(store: MemoryStore, tmp_path: Path) -> None:
    """The operator must read which address it is, not a stack trace."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        with aggregator(store, tmp_path, ONCE, listen=listen) as running:
            eventually(lambda: running.problem is not None, "the aggregator gives up")
    assert isinstance(running.problem, AddressInUse)
    assert listen in running.problem.message


def test_a_successor_waits_for_the_address_of_one_that_hangs(
    store: MemoryStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One that ended because the stopped leader still held their address left the federation with none at all."""
    leader = keys.leader("aggregator")
    with caplog.at_level(logging.INFO), socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        store.commit((), (Put(leader, b"one that hangs"),))
        with aggregator(store, tmp_path, ONCE, listen=listen) as running:
            eventually(lambda: "standing by" in caplog.text, "it stands by")
            store.commit((), (Delete(leader),))
            eventually(lambda: "as soon as it is free" in caplog.text, "it leads without an address")
            taken.close()

            assert running.address == listen


def test_a_policy_without_weights_is_refused(store: MemoryStore, tmp_path: Path) -> None:
    """A heuristic has no gradients; an aggregator for it would wait for ever."""
    with aggregator(store, tmp_path, ONCE) as running:
        heuristic = running.config.model_copy(
            update={"policy": running.config.policy.model_copy(update={"name": "drf"})}
        )
        problem = "drf, which has nothing to combine; dl2, learned_speed or set was expected"
        with pytest.raises(InvalidConfiguration, match=problem):
            Running(heuristic, store)


def say(address: str, *messages: pb.AgentMessage) -> list[pb.ServerMessage]:
    """Send these by hand and return all that comes until the server ends the stream."""
    with grpc.insecure_channel(address) as channel:
        return list(pb_grpc.FederationStub(channel).Connect(iter(messages), timeout=20))


def hello(**changes: Any) -> pb.AgentMessage:
    usual = {"wire_version": WIRE_VERSION, "agent_version": "0.1.0", "cluster": "east", "term": 1, "policy": "dl2"}
    return pb.AgentMessage(hello=pb.AgentHello(**{**usual, "policy_version": 1, **changes}))


@pytest.mark.parametrize(
    ("changes", "code", "why", "hint"),
    [
        ({"wire_version": WIRE_VERSION + 1}, pb.Refusal.VERSION_SKEW, "speaks version 2", "upgrade the aggregator"),
        ({"wire_version": 0}, pb.Refusal.VERSION_SKEW, "speaks version 0", "upgrade the agent"),
        ({"policy": "drf"}, pb.Refusal.OTHER_POLICY, "learns policy drf", "set policy.name alike"),
    ],
)
def test_an_agent_that_does_not_fit_is_told_why(
    store: MemoryStore, tmp_path: Path, changes: dict[str, Any], code: int, why: str, hint: str
) -> None:
    """Versions are mixed during every upgrade; the message must say which side to upgrade."""
    with aggregator(store, tmp_path, ONCE) as running:
        (answer,) = say(running.address, hello(**changes))

    assert answer.refusal.code == code
    assert why in answer.refusal.why
    assert hint in answer.refusal.hint


def test_an_agent_of_an_older_term_is_refused_and_the_newer_one_stays(store: MemoryStore, tmp_path: Path) -> None:
    """The twin that lost its cluster must not push out the one that holds it."""
    with aggregator(store, tmp_path, ONCE) as running:
        holder = Agent(running.address, "east", Learner(0), term=5)
        with agents(holder):
            eventually(lambda: holder.client.connected, "the holder takes part")

            answers = say(running.address, hello(term=4))

            assert answers[-1].refusal.code == pb.Refusal.OLD_TERM
            assert "term 4 is over" in answers[-1].refusal.why
            assert holder.client.connected


def test_nonsense_on_a_stream_ends_that_stream_only(store: MemoryStore, tmp_path: Path) -> None:
    """A broken agent must not take the federation with it."""
    with aggregator(store, tmp_path, ONCE) as running:
        address = running.address
        assert say(address, pb.AgentMessage(reply=b"no hello before")) == []
        answers = say(address, hello(), pb.AgentMessage(reply=b"no Flower message"))
        assert [answer.WhichOneof("body") for answer in answers] == ["welcome"]

        east, west = Agent(address, "east", Learner(100)), Agent(address, "west", Learner(300))
        with agents(east, west):
            assert running.round(1).outcome is RoundOutcome.COMBINED


@pytest.mark.parametrize("name", ["", "a/b", "../east", "EAST", "e" * 64, "e" * 2_000_000])
def test_an_agent_of_no_cluster_takes_no_part(store: MemoryStore, tmp_path: Path, name: str) -> None:
    """Names are parts of keys and of every round's record; one that nothing can be called must not be among them."""
    with aggregator(store, tmp_path, OFTEN) as running:
        assert say(running.address, hello(cluster=name)) == []


def test_a_stream_is_one_clusters(store: MemoryStore, tmp_path: Path) -> None:
    """The end of a stream ends one cluster's part; another that it had spoken for would be asked for ever."""
    with aggregator(store, tmp_path, ONCE) as running:
        answers = say(running.address, hello(), hello(cluster="west"))
        assert [answer.WhichOneof("body") for answer in answers] == ["welcome"]


def test_a_client_without_an_aggregator_harms_nobody_and_closes_at_once() -> None:
    """An agent must start, schedule and stop as if there were no federation."""
    before = set(threading.enumerate())
    with socket.socket() as silent:  # Accepts connections and never answers, like a hanging aggregator.
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        for address in (f"127.0.0.1:{silent.getsockname()[1]}", "127.0.0.1:1"):
            agent = Agent(address, "east", Learner(100))
            assert not agent.client.connected
            assert set(threading.enumerate()) > before
            agent.client.close()
            # A stream that waits for its peer gives up after twenty seconds at the earliest.
            eventually(lambda: set(threading.enumerate()) <= before, "its threads have ended", 15.0)


def test_a_round_is_one_trace_through_aggregator_and_agents(store: MemoryStore, tmp_path: Path) -> None:
    """Who asks why a round took long must see in one place where the time went."""
    file = tmp_path / "spans.jsonl"
    tracing.setup("test", file=str(file))
    try:
        with aggregator(store, tmp_path, ONCE) as running:
            pair = Agent(running.address, "east", Learner(100)), Agent(running.address, "west", Learner(300))
            with agents(*pair):
                record = running.round(1)
                eventually(lambda: all(agent.version == 2 for agent in pair), "both agents run version 2")
    finally:
        tracing.shutdown()
    found = spans.trace_of(spans.read(file), record.traceparent.split("-")[1])
    (root,) = [span for span in found if span.name == "round"]
    requests = {span.attributes["cluster"]: span for span in found if span.name == "round.request"}
    gradients = [span for span in found if span.name == "gradient"]

    assert sorted(requests) == ["east", "west"]
    assert {span.parent_id for span in requests.values()} == {root.span_id}
    assert {span.parent_id for span in gradients} == {span.span_id for span in requests.values()}
    assert {link.split("-")[2] for link in root.links} == {span.span_id for span in gradients}
    for name in ("round.combine", "policy.store"):
        (span,) = [span for span in found if span.name == name]
        assert span.parent_id == root.span_id
    assert root.attributes["outcome"] == "combined"
    taken = [span for span in found if span.name == "policy.take"]
    assert sorted(span.attributes["cluster"] for span in taken) == ["east", "west"]
    assert {span.parent_id for span in taken} == {root.span_id}


def start_process(folder: Path, etcd: str, listen: str) -> subprocess.Popen[bytes]:
    plain = {
        "listen": listen,
        "etcd": etcd,
        "state_dir": str(folder),
        "rounds": json.loads(OFTEN.model_dump_json()),
        "policy": {"checkpoint": str(folder / "first.safetensors")},
        "lease_ttl_s": 2,
    }
    file = folder / "aggregator.yaml"
    file.write_text(yaml.safe_dump(plain))
    with (folder / "log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "fedsched.aggregator", "--config", str(file)], stdout=log, stderr=log
        )


@pytest.mark.timeout(3 * STARTS_S_MAX)
def test_a_killed_aggregator_goes_on_where_it_was(own_etcd_address: str, tmp_path: Path) -> None:
    """kill -9 at any moment costs at most the round that was being held; agents come back by themselves."""
    listen = free_address()
    checkpoint.Checkpoint(initial(SHAPE, 1), SHAPE, {"by": "test"}).save(tmp_path / "first.safetensors")
    store = EtcdStore(own_etcd_address)
    pair = Agent(listen, "east", Learner(100)), Agent(listen, "west", Learner(300))

    def active() -> int:
        entry = store.get(keys.policy_active("dl2"))
        return int(entry.value) if entry is not None else 0

    def goes_beyond(version: int) -> bool:
        # One that has ended makes no more versions; one that only waits for a busy machine does.
        assert process.poll() is None, (tmp_path / "log").read_text()
        return active() > version

    process = start_process(tmp_path, own_etcd_address, listen)
    try:
        with agents(*pair):
            eventually(lambda: goes_beyond(2), "version 3 is in force", STARTS_S_MAX)
            process.kill()
            process.wait()
            reached = active()
            process = start_process(tmp_path, own_etcd_address, listen)
            eventually(lambda: goes_beyond(reached), "the next version is in force", STARTS_S_MAX)
            eventually(lambda: all(agent.version > reached for agent in pair), "both agents run it")
            numbers = [int(entry.key.removeprefix(keys.ROUNDS)) for entry in store.list(keys.ROUNDS).entries]
            assert numbers == list(range(1, len(numbers) + 1))
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0, (tmp_path / "log").read_text()
    finally:
        process.kill()
        process.wait()
        store.close()


def test_a_wrong_configuration_or_an_absent_etcd_is_one_clear_error(tmp_path: Path) -> None:
    """The exit code and one message must tell the operator which of the two it is."""
    file = tmp_path / "aggregator.yaml"
    command = [sys.executable, "-m", "fedsched.aggregator", "--config", str(file)]
    plain = {"listen": "127.0.0.1:0", "etcd": "127.0.0.1:1", "state_dir": str(tmp_path)}
    file.write_text(yaml.safe_dump({**plain, "rouds": {}}))
    wrong = subprocess.run(command, capture_output=True, text=True, timeout=60)
    file.write_text(yaml.safe_dump(plain))
    absent = subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ})

    assert wrong.returncode == 2
    assert "did you mean rounds?" in wrong.stderr
    assert absent.returncode == 7, absent.stderr
    assert "[FS221]" in absent.stderr
    assert "Traceback" not in wrong.stderr + absent.stderr
