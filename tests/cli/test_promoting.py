"""Who decides where, from the command line: against a controller, and the part of an agent that carries it out."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from fedsched.adapters.memory import MemoryStore
from fedsched.agent.versions import LiveVersions
from fedsched.config import AgentConfig, parse
from fedsched.core.commands import AskPolicy
from fedsched.core.placement import TentativePlacement
from fedsched.core.rounds import PolicyRecord
from fedsched.core.versions import Version
from fedsched.policy import checkpoint, registry
from fedsched.policy.checkpoint import Checkpoint
from fedsched.policy.dl2 import DL2, initial
from fedsched.runtime import codec, keys
from fedsched.runtime.ports import Put
from tests.cli.conftest import Run
from tests.controller.stand_in import StandInAgent
from tests.policy.observations import job, node, observation
from tests.waiting import eventually

pytestmark = [pytest.mark.live, pytest.mark.timeout(180)]

SHIPPED = checkpoint.load(checkpoint.BUILTIN)


class Agent:
    """The part of an agent that has to do with versions, and its record."""

    def __init__(self, store: MemoryStore, home: Path, name: str = "east") -> None:
        self.registered = StandInAgent(store, name)
        record = replace(self.registered.record, policy="dl2", policy_version=1)
        store.commit((), (Put(keys.cluster(record.name), codec.dumps(record), self.registered.lease),))
        self.config = parse(
            AgentConfig,
            {
                "cluster": name,
                "state_dir": str(home),
                "etcd": "127.0.0.1:1",
                "nodes": [{"name": "n", "cpus": 4}],
                "slot": {"length_s": 60.0, "decision_s_max": 30.0},
                "policy": {"explore": False},
                "promotion": {"slots_min": 3, "slots_max": 30},
            },
            "the test",
        )
        self.policy = registry.make(self.config.policy)
        self.versions = LiveVersions(self.config, store, self.policy, self.registered.term)

    def decide(self, slot: int) -> None:
        """A slot with two jobs."""
        seen = observation([node("n", 8)], [job("a"), job("b")], slot=slot)
        decision = self.policy.decide(seen, TentativePlacement(seen))
        self.versions.look(AskPolicy(seen, True), decision, 0.001)

    @property
    def digest(self) -> str:
        """Of what really decides."""
        assert isinstance(self.policy, DL2)
        return checkpoint.digest(self.policy.weights)


@pytest.fixture
def east(store: MemoryStore, server: str, tmp_path: Path, run: Run) -> Iterator[Agent]:
    home = tmp_path / "east"
    home.mkdir()
    agent = Agent(store, home)
    eventually(lambda: "dl2" in run("info").out, "the controller knows the cluster")
    yield agent
    agent.versions.close()


def make_version(store: MemoryStore, agent: Agent, number: int) -> Checkpoint:
    """The federation makes a version; the agent is offered it."""
    made = Checkpoint(initial(SHIPPED.shape, number), SHIPPED.shape, {"round": number})
    record = PolicyRecord("dl2", number, made.digest, f"policies/dl2/{number}", 1, 1.0)
    store.commit(
        (),
        (
            Put(keys.policy_version("dl2", number), codec.dumps(record)),
            Put(keys.policy_active("dl2"), str(number).encode()),
        ),
    )
    agent.versions.offered(Version("dl2", number, made.digest), made.to_bytes())
    return made


def compared(run: Run, agent: Agent, holds: Callable[[dict[str, object]], bool]) -> dict[str, object]:
    """The cluster's comparison, once it is as it should be; slots go by meanwhile."""
    seen: list[dict[str, object]] = [{}]
    slots = iter(range(1, 100_000))

    def look() -> bool:
        agent.decide(next(slots))
        found = json.loads(run("policy", "diff", "east", "-o", "json").out)
        seen[0] = found[0] if found else {}
        return bool(found) and holds(found[0])

    eventually(look, "the comparison is there", 90.0)
    return seen[0]


def test_a_version_is_promoted_shown_and_rolled_back(store: MemoryStore, east: Agent, run: Run, tmp_path: Path) -> None:
    """The words are the field's: promote, rollback, history."""
    seventh = make_version(store, east, 7)
    done = run("policy", "promote", "east", "v7", "--why", "asked for by the lab")
    assert (done.code, done.out) == (0, "dl2 v7 decides in cluster east from the next slot on\n"), done.err
    assert east.digest == seventh.digest
    done = run("policy", "rollback", "east", "-o", "json")
    order = json.loads(done.out)
    assert (order["action"], order["state"], order["version"]["digest"]) == (
        "rolled back",
        "active",
        SHIPPED.digest,
    )
    assert re.fullmatch(r"\d{4}-.*Z", order["time_at"])
    assert east.digest == SHIPPED.digest
    head, *rows = run("policy", "history", "east").out.splitlines()
    assert head.split() == ["ORDER", "VERSION", "DIGEST", "ACTION", "BY", "AGE", "STATE", "WHY"]
    assert [row.split()[0] for row in rows] == ["1", "2", "3"]
    assert "asked for by the lab" in rows[1]
    assert "decides" in rows[2]
    assert run("policy", "history", "east", "-o", "name").out.split()[-1] == "promotion/east/3"


def test_what_is_wrong_is_one_clear_error_with_its_exit_code(
    store: MemoryStore, east: Agent, run: Run, tmp_path: Path
) -> None:
    def refused(code: int, *arguments: str) -> str:
        done = run("policy", *arguments)
        assert done.code == code, done
        assert done.out == ""
        return done.err

    assert "no version decided in cluster east before" in refused(3, "rollback", "east")
    assert "did you mean east?" in refused(3, "promote", "eest", "7")
    assert "the federation has no versions of policy dl2" in refused(3, "promote", "east", "7")
    assert "7.5 is no version" in refused(2, "promote", "east", "7.5")
    assert "no version is named" in refused(2, "promote", "east")
    assert "no candidate is named" in refused(2, "shadow", "east")
    assert "there is no policy 'sett'; did you mean set?" in refused(2, "shadow", "east", "--policy", "sett")
    assert "cannot be promoted there" in refused(2, "shadow", "east", "--policy", "set", "--accept")
    gone = tmp_path / "gone.safetensors"
    assert f"cannot read {gone}: No such file" in refused(1, "promote", "east", "--checkpoint", str(gone))
    made = make_version(store, east, 7)
    assert "there are 7 to 7" in refused(3, "promote", "east", "8")
    record = codec.loads(PolicyRecord, store.get(keys.policy_version("dl2", 7)).value)  # type: ignore[union-attr]
    wrong = replace(record, version=8, digest="0" * 64)
    store.commit((), (Put(keys.policy_version("dl2", 8), codec.dumps(wrong)),))
    made.save(tmp_path / "east" / "versions" / f"{wrong.digest}.safetensors")
    assert "was announced" in refused(1, "promote", "east", "8")
    assert east.digest == SHIPPED.digest


def test_a_candidate_is_compared_shown_and_ended(store: MemoryStore, east: Agent, run: Run) -> None:
    """Whether to change to another policy is seen before anything is changed."""
    done = run("policy", "shadow", "east", "--policy", "set")
    assert (done.code, done.out) == (
        0,
        "set of builtin is to decide in the shadow of east; "
        "`fedsched policy diff east` tells how it does, or why it cannot\n",
    ), done.err
    found = compared(run, east, lambda item: item["cases"] >= 3)  # type: ignore[operator]
    assert found["valid"] == found["cases"]
    assert found["active"]["policy"] == "dl2"  # type: ignore[index]
    assert found["running"] is True
    head, row = run("policy", "diff").out.splitlines()
    assert head.split()[:7] == ["CLUSTER", "ACTIVE", "CANDIDATE", "STATE", "SLOTS", "USABLE", "AGREES"]
    assert row.split()[0] == "east"
    assert "100%" in row
    again = run("policy", "shadow", "east", "--policy", "set").out
    other = run("policy", "shadow", "east", "--policy", "fifo").out
    assert "in place of" not in again
    assert "is to decide in the shadow of east in place of set of builtin; " in other, "what was compared is given up"
    assert run("policy", "shadow", "east", "--stop").out == "nothing runs in the shadow of east any more\n"
    eventually(lambda: "ended" in run("policy", "diff", "east").out, "it is ended")
    assert east.digest == SHIPPED.digest


def test_an_offered_version_is_compared_first_and_accepted_by_the_cluster_itself(
    store: MemoryStore, east: Agent, run: Run
) -> None:
    """Slots in which both answer alike show no harm; three are enough here."""
    same = SHIPPED.replaced(SHIPPED.arrays, {"round": 2})
    nudged = {name: array + (name.startswith("value.")) * 1e-3 for name, array in same.arrays.items()}
    made = same.replaced({name: array.astype("float32") for name, array in nudged.items()}, {"round": 2})
    east.versions.offered(Version("dl2", 2, made.digest), made.to_bytes())
    found = compared(run, east, lambda item: item["running"] is False)
    assert found["verdict"]["outcome"] == "accepted"  # type: ignore[index]
    assert found["agreement"] == 1.0
    eventually(lambda: east.digest == made.digest, "it decides")
    orders = json.loads(run("policy", "history", "east", "-o", "json").out)
    assert (orders[-1]["action"], orders[-1]["by"], orders[-1]["state"]) == ("accepted", "agent/east", "active")
