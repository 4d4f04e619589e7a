"""Registrations and elections, over memory and a real etcd."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator

import pytest

from fedsched.adapters.election import Election
from fedsched.adapters.etcd import EtcdStore
from fedsched.adapters.lease import LeaseKeeper
from fedsched.adapters.memory import MemoryStore
from fedsched.errors import Conflict, StoreUnavailable
from fedsched.runtime import keys
from fedsched.runtime.ports import (
    Committed,
    Delete,
    Entry,
    Guard,
    KeyChanged,
    Put,
    RevisionIs,
    Snapshot,
    Store,
    ValueIs,
    Watch,
    Write,
)
from tests.recorder import Recorder
from tests.waiting import eventually

TTL_S = 2


@pytest.fixture(params=["memory", pytest.param("etcd", marks=pytest.mark.live)])
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    made: Store = MemoryStore() if request.param == "memory" else EtcdStore(request.getfixturevalue("etcd_address"))
    yield made
    made.close()


@pytest.fixture
def key() -> str:
    return f"/test/{uuid.uuid4().hex}"


@pytest.fixture
def role() -> str:
    return uuid.uuid4().hex


def value(store: Store, key: str) -> bytes | None:
    found = store.get(key)
    return found.value if found else None


def lease_is_renewed_past(store: Store, key: str, ttl_s: float) -> None:
    """Watch the key for longer than its lease: it must not go away."""
    recorder = Recorder(store, key).wait_listed()
    assert not threading.Event().wait(ttl_s * 1.8)
    assert [change for change in recorder.changes if change.entry is None] == []


def test_a_registration_is_there_from_start_to_close(store: Store, key: str) -> None:
    """A cluster is known as long as its agent lives, and no longer."""
    keeper = LeaseKeeper(store, TTL_S, {key: b"1", f"{key}/more": b"2"})
    assert not keeper.held

    keeper.start()
    assert keeper.held
    assert (value(store, key), value(store, f"{key}/more")) == (b"1", b"2")
    lease_is_renewed_past(store, key, TTL_S)

    keeper.close()
    keeper.close()
    assert not keeper.held
    assert store.list(key).entries == ()


def test_an_update_is_written_under_the_lease(store: Store, key: str) -> None:
    """A cluster's free capacity changes each slot; the last word counts."""
    keeper = LeaseKeeper(store, 60, {key: b"0"})
    keeper.start()

    for number in range(1, 20):
        keeper.update(key, str(number).encode())

    eventually(lambda: value(store, key) == b"19", "the last update")
    keeper.close()
    assert value(store, key) is None


def test_a_lost_lease_is_told_and_taken_again_with_the_latest_values(store: Store, key: str) -> None:
    """An agent that was cut off for long comes back by itself."""
    told: list[str] = []
    keeper = LeaseKeeper(
        store, TTL_S, {key: b"old"}, on_lost=lambda: told.append("lost"), on_regained=lambda: told.append("regained")
    )
    keeper.start()
    keeper.update(key, b"new")
    eventually(lambda: value(store, key) == b"new", "the update")
    assert keeper._lease is not None

    store.revoke(keeper._lease)

    eventually(lambda: told == ["lost", "regained"], "both are told")
    assert value(store, key) == b"new"
    assert keeper.held
    keeper.close()
    assert told == ["lost", "regained"]


def test_an_agent_whose_term_has_passed_does_not_register_again(store: Store, key: str) -> None:
    """Two agents of one cluster: the older must not write itself over the newer."""
    store.commit((), (Put(f"{key}-term", b"1"),))
    told: list[str] = []
    keeper = LeaseKeeper(
        store, 60, {key: b"first"}, guards=(ValueIs(f"{key}-term", b"1"),), on_lost=lambda: told.append("lost")
    )
    keeper.start()

    store.commit((), (Put(f"{key}-term", b"2"), Put(key, b"second")))
    keeper.update(key, b"first again")

    eventually(lambda: told == ["lost"], "the loss is told")
    assert keeper.refused
    assert not keeper.held
    keeper.close()
    assert value(store, key) == b"second"


def test_a_registration_that_another_holds_is_refused_at_once(store: Store, key: str) -> None:
    """Starting with a term that is over is a mistake to be told, not to be waited on."""
    store.commit((), (Put(f"{key}-term", b"2"),))
    keeper = LeaseKeeper(store, 60, {key: b"x"}, guards=(ValueIs(f"{key}-term", b"1"),))

    with pytest.raises(Conflict, match="another process has taken over"):
        keeper.start()

    assert value(store, key) is None


class Candidate:
    """A process that campaigns."""

    def __init__(self, store: Store, role: str, name: str, ttl_s: int = TTL_S) -> None:
        self.told: list[bool] = []
        self.election = Election(store, role, name, ttl_s, self.told.append)


def test_of_several_candidates_one_leads_and_stays(store: Store, role: str) -> None:
    """Two controllers that both dispatch would give one job to two clusters."""
    candidates = [Candidate(store, role, f"c{number}") for number in range(3)]
    eventually(lambda: any(candidate.election.leading for candidate in candidates), "somebody leads")
    lease_is_renewed_past(store, keys.leader(role), TTL_S)

    leaders = [candidate for candidate in candidates if candidate.election.leading]
    assert len(leaders) == 1
    assert sorted(candidate.told for candidate in candidates) == [[], [], [True]]
    for candidate in candidates:
        candidate.election.close()
    assert leaders[0].told == [True, False]


def test_a_leader_that_resigns_is_replaced_at_once(store: Store, role: str) -> None:
    """An upgrade of controllers must not stop dispatching for a whole lease."""
    first = Candidate(store, role, "first", ttl_s=60)
    eventually(lambda: first.election.leading, "the first leads")
    second = Candidate(store, role, "second", ttl_s=60)

    first.election.close()

    # A third of the lease, when it looks again anyway, would be 20 seconds.
    eventually(lambda: second.election.leading, "the second leads", deadline_s=5)
    assert first.told == [True, False]
    second.election.close()


def test_a_guard_holds_only_while_its_maker_leads(store: Store, role: str, key: str) -> None:
    """A leader that was cut off and still believes must not write."""
    first = Candidate(store, role, "first")
    other = Candidate(store, role, "other")
    eventually(lambda: first.election.leading or other.election.leading, "somebody leads")
    leader, follower = (first, other) if first.election.leading else (other, first)
    guard = leader.election.guard()
    assert store.commit((guard,), (Put(key, b"leader"),)).ok
    assert not store.commit((follower.election.guard(),), (Put(key, b"follower"),)).ok

    store.commit((), (Delete(keys.leader(role)),))

    eventually(lambda: False in leader.told, "the leader steps down")
    assert not store.commit((guard,), (Put(key, b"old leader"),)).ok
    eventually(lambda: first.election.leading or other.election.leading, "somebody leads again")
    for candidate in (first, other):
        candidate.election.close()
    assert not store.commit((leader.election.guard(),), (Put(key, b"closed"),)).ok


def test_roles_whose_names_begin_alike_have_leaders_of_their_own(store: Store, role: str) -> None:
    """`controller` and `controller-history` are two offices."""
    one, two = Candidate(store, role, "one"), Candidate(store, f"{role}-more", "two")

    eventually(lambda: one.election.leading and two.election.leading, "both lead")
    for candidate in (one, two):
        candidate.election.close()


class Link:
    """A process's way to a store that lives on while the way is cut."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.cut = False

    @property
    def _there(self) -> Store:
        if self.cut:
            raise StoreUnavailable("cut off")
        return self._store

    def get(self, key: str) -> Entry | None:
        return self._there.get(key)

    def list(self, prefix: str) -> Snapshot:
        return self._there.list(prefix)

    def commit(self, guards: tuple[Guard, ...], writes: tuple[Write, ...]) -> Committed:
        return self._there.commit(guards, writes)

    def watch(
        self, prefix: str, on_snapshot: Callable[[Snapshot], None], on_change: Callable[[KeyChanged], None]
    ) -> Watch:
        return self._there.watch(prefix, on_snapshot, on_change)

    def grant_lease(self, ttl_s: int) -> int:
        return self._there.grant_lease(ttl_s)

    def keep_alive(self, lease: int) -> bool:
        return self._there.keep_alive(lease)

    def revoke(self, lease: int) -> None:
        self._there.revoke(lease)

    def close(self) -> None:
        self._store.close()


def test_without_the_store_a_lease_counts_as_lost_after_its_length(key: str, role: str) -> None:
    """Nobody tells a process that is cut off; its own clock must."""
    store = Link(MemoryStore())
    told: list[str] = []
    keeper = LeaseKeeper(
        store, 1, {key: b"1"}, on_lost=lambda: told.append("lost"), on_regained=lambda: told.append("regained")
    )
    keeper.start()
    candidate = Candidate(store, role, "c", ttl_s=1)
    eventually(lambda: candidate.election.leading, "it leads")

    store.cut = True
    eventually(lambda: told == ["lost"] and candidate.told == [True, False], "both are lost")
    assert not keeper.held
    assert not candidate.election.leading

    store.cut = False
    eventually(lambda: told == ["lost", "regained"] and candidate.election.leading, "both are back")
    assert store.get(key) is not None
    assert store.commit((candidate.election.guard(), RevisionIs(f"{key}-none", 0)), ()).ok
    candidate.election.close()
    keeper.close()
    store.close()


def test_starting_without_the_store_is_one_clear_error(key: str) -> None:
    """An agent that cannot reach etcd must say so and end."""
    store = Link(MemoryStore())
    store.cut = True

    with pytest.raises(StoreUnavailable, match="cut off"):
        LeaseKeeper(store, 1, {key: b"1"}).start()
