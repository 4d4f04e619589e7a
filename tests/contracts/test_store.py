"""What every store promises: one suite over memory (threaded and inline) and a real etcd."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from fedsched.adapters.etcd import PAGE_KEYS, EtcdStore
from fedsched.adapters.memory import OPERATIONS_MAX, REQUEST_BYTES_MAX, MemoryStore
from fedsched.errors import NotFound, StoreUnavailable
from fedsched.runtime.ports import (
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


@pytest.fixture(params=["memory", "inline", pytest.param("etcd", marks=pytest.mark.live)])
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    made: Store
    if request.param == "etcd":
        made = EtcdStore(request.getfixturevalue("etcd_address"))
    else:
        made = MemoryStore(inline=request.param == "inline")
    yield made
    made.close()


@pytest.fixture
def at() -> str:
    """A prefix of the test's own: tests share one etcd."""
    return f"/test/{uuid.uuid4().hex}/"


def put(store: Store, key: str, value: bytes = b"v", lease: int | None = None) -> int:
    outcome = store.commit((), (Put(key, value, lease),))
    assert outcome.ok
    return outcome.revision


def test_a_written_key_is_read_back_with_its_revisions(store: Store, at: str) -> None:
    """Guards are made from these revisions: a wrong one lets two agents own one job."""
    assert store.get(f"{at}a") is None

    first = put(store, f"{at}a", b"1")
    second = put(store, f"{at}a", b"2")

    assert second > first
    assert store.get(f"{at}a") == Entry(f"{at}a", b"2", mod_revision=second, create_revision=first)


def test_a_key_written_again_after_removal_is_a_new_one(store: Store, at: str) -> None:
    """A leader's key that came back is another leadership."""
    first = put(store, f"{at}a")
    store.commit((), (Delete(f"{at}a"),))
    again = put(store, f"{at}a")

    found = store.get(f"{at}a")

    assert found is not None
    assert found.create_revision == again > first


def test_a_listing_has_all_under_the_prefix_sorted_and_nothing_else(store: Store, at: str) -> None:
    """Everything that is chosen from a listing depends on its order."""
    for name in ("b", "a/2", "a/10", "é", "a"):
        put(store, f"{at}x/{name}", name.encode())
    put(store, f"{at}x0", b"beside")
    put(store, f"{at}w", b"before")

    snapshot = store.list(f"{at}x/")

    assert [entry.key.removeprefix(f"{at}x/") for entry in snapshot.entries] == ["a", "a/10", "a/2", "b", "é"]
    assert snapshot.entries[1].value == b"a/10"
    assert snapshot.revision >= max(entry.mod_revision for entry in snapshot.entries)


def test_a_listing_longer_than_a_page_is_complete(store: Store, at: str) -> None:
    """A federation with a thousand jobs must not lose those after the first page."""
    names = [f"{at}{number:06d}" for number in range(PAGE_KEYS + 10)]
    for start in range(0, len(names), OPERATIONS_MAX):
        store.commit((), tuple(Put(name, b"v") for name in names[start : start + OPERATIONS_MAX]))

    assert [entry.key for entry in store.list(at).entries] == names


def test_the_listing_of_nothing_has_a_revision_to_watch_from(store: Store, at: str) -> None:
    """The first agent of a federation lists an empty store."""
    before = put(store, f"{at}other")

    snapshot = store.list(f"{at}none/")

    assert snapshot.entries == ()
    assert snapshot.revision >= before


def test_all_of_a_transaction_is_written_at_one_revision(store: Store, at: str) -> None:
    """A job whose spec is there has its status too."""
    put(store, f"{at}old")

    outcome = store.commit((), (Put(f"{at}a", b"1"), Put(f"{at}b", b"2"), Delete(f"{at}old")))

    snapshot = store.list(at)
    assert [(entry.key, entry.value) for entry in snapshot.entries] == [(f"{at}a", b"1"), (f"{at}b", b"2")]
    assert {entry.mod_revision for entry in snapshot.entries} == {outcome.revision}


@pytest.mark.parametrize(
    ("guard", "holds"),
    [
        pytest.param(lambda at, revision: RevisionIs(f"{at}a", revision), True, id="right revision"),
        pytest.param(lambda at, revision: RevisionIs(f"{at}a", revision - 1), False, id="older revision"),
        pytest.param(lambda at, revision: RevisionIs(f"{at}a", 0), False, id="absent, but it is there"),
        pytest.param(lambda at, revision: RevisionIs(f"{at}none", 0), True, id="absent"),
        pytest.param(lambda at, revision: RevisionIs(f"{at}none", revision), False, id="revision of nothing"),
        pytest.param(lambda at, revision: RevisionIs(f"{at}a", -1), False, id="revision that cannot be"),
        pytest.param(lambda at, revision: ValueIs(f"{at}a", b"7"), True, id="right value"),
        pytest.param(lambda at, revision: ValueIs(f"{at}a", b"8"), False, id="other value"),
        pytest.param(lambda at, revision: ValueIs(f"{at}none", b""), False, id="empty value of nothing"),
        pytest.param(lambda at, revision: ValueIs(f"{at}empty", b""), True, id="empty value"),
    ],
)
def test_a_guard_decides_whether_a_transaction_is_written(store: Store, at: str, guard: object, holds: bool) -> None:
    """The fence between an old and a new agent is nothing but this."""
    put(store, f"{at}empty", b"")
    revision = put(store, f"{at}a", b"7")
    assert callable(guard)

    outcome = store.commit((guard(at, revision),), (Put(f"{at}b", b"new"), Delete(f"{at}a")))

    assert outcome.ok is holds
    assert (store.get(f"{at}b") is not None) is holds
    assert (store.get(f"{at}a") is None) is holds


def test_one_guard_that_fails_stops_the_whole_transaction(store: Store, at: str) -> None:
    """Half of a dispatch would be a job that runs twice or never."""
    revision = put(store, f"{at}a", b"7")

    outcome = store.commit((ValueIs(f"{at}a", b"7"), RevisionIs(f"{at}a", revision + 1)), (Put(f"{at}b", b""),))

    assert not outcome.ok
    assert store.get(f"{at}b") is None


def test_of_many_who_take_the_same_number_one_gets_it(store: Store, at: str) -> None:
    """Two controllers count jobs at once; no job id may be given twice."""
    got: list[int] = []

    def take() -> None:
        for _ in range(10):
            while True:
                found = store.get(f"{at}counter")
                number = int(found.value) if found else 0
                guard = RevisionIs(f"{at}counter", found.mod_revision if found else 0)
                if store.commit((guard,), (Put(f"{at}counter", str(number + 1).encode()),)).ok:
                    got.append(number)
                    break

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)

    assert sorted(got) == list(range(40))


def test_removing_what_is_not_there_is_fine_and_no_change(store: Store, at: str) -> None:
    """Cleaning up twice must be safe."""
    recorder = Recorder(store, at).wait_listed()
    before = put(store, f"{at}a")

    outcome = store.commit((), (Delete(f"{at}none"),))
    put(store, f"{at}b")

    assert outcome.ok
    assert outcome.revision >= before
    recorder.wait_changes(2)
    assert [change.key for change in recorder.changes] == [f"{at}a", f"{at}b"]


@pytest.mark.parametrize(
    "writes",
    [
        pytest.param((Put("/k", b"1"), Put("/k", b"2")), id="twice"),
        pytest.param((Put("/k", b"1"), Delete("/k")), id="put and removed"),
        pytest.param((Put("", b"1"),), id="empty key"),
        pytest.param((Put("/k", b"x" * (REQUEST_BYTES_MAX + 1)),), id="too large"),
        pytest.param(tuple(Put(f"/k{n}", b"") for n in range(OPERATIONS_MAX + 1)), id="too many"),
    ],
)
def test_a_transaction_that_no_etcd_takes_is_refused_at_once(store: Store, writes: tuple[Write, ...]) -> None:
    """What passes in memory must not fail in production."""
    with pytest.raises(ValueError, match=r"key|bytes|transaction"):
        store.commit((), writes)


def test_the_largest_transaction_that_is_allowed_is_written(store: Store, at: str) -> None:
    """The limits that we check must not be above etcd's own."""
    value = b"x" * ((REQUEST_BYTES_MAX - OPERATIONS_MAX * 100) // OPERATIONS_MAX)
    guards = tuple(RevisionIs(f"{at}{n}", 0) for n in range(OPERATIONS_MAX))

    assert store.commit(guards, tuple(Put(f"{at}{n}", value) for n in range(OPERATIONS_MAX))).ok


def test_a_watch_tells_what_is_there_and_then_each_change_once_and_in_order(store: Store, at: str) -> None:
    """A missed assignment is a job that never starts; a repeated one could start twice."""
    put(store, f"{at}old", b"0")
    recorder = Recorder(store, at).wait_listed()

    for number in range(50):
        put(store, f"{at}k{number % 3}", str(number).encode())
    store.commit((), (Delete(f"{at}old"), Put(f"{at}k0", b"last"), Delete(f"{at}k1")))
    put(store, "/elsewhere", b"not ours")

    recorder.wait_changes(53)
    assert isinstance(recorder.told[0], Snapshot)
    assert [(entry.key, entry.value) for entry in recorder.told[0].entries] == [(f"{at}old", b"0")]
    assert recorder.story() == [
        *((f"{at}k{number % 3}", str(number).encode()) for number in range(50)),
        (f"{at}old", None),
        (f"{at}k0", b"last"),
        (f"{at}k1", None),
    ]
    revisions = [change.revision for change in recorder.changes]
    assert revisions == sorted(revisions)
    assert revisions[0] > recorder.snapshots[0].revision
    assert len(set(revisions[-3:])) == 1
    assert len(recorder.snapshots) == 1


def test_a_change_carries_the_entry_as_it_was_then(store: Store, at: str) -> None:
    """A guard made from a watched entry must fit the store."""
    recorder = Recorder(store, at).wait_listed()
    first = put(store, f"{at}a", b"1")
    second = put(store, f"{at}a", b"2")

    changes = recorder.wait_changes(2)

    assert changes[0] == KeyChanged(f"{at}a", Entry(f"{at}a", b"1", first, first), first)
    assert changes[1] == KeyChanged(f"{at}a", Entry(f"{at}a", b"2", second, first), second)


def test_writes_beside_a_starting_watch_are_in_its_listing_or_told_after_it(store: Store, at: str) -> None:
    """Between listing and following there must be no gap for a job to fall into."""
    stop = threading.Event()
    written: list[str] = []

    def write() -> None:
        while not stop.is_set() and len(written) < 2000:
            written.append(f"{at}{len(written):04d}")
            put(store, written[-1])

    writer = threading.Thread(target=write)
    writer.start()
    try:
        eventually(lambda: len(written) > 5, "first writes")
        recorders = [Recorder(store, at).wait_listed() for _ in range(5)]
    finally:
        stop.set()
        writer.join(30)

    for recorder in recorders:
        listed = [entry.key for entry in recorder.snapshots[0].entries]
        changes = recorder.wait_changes(len(written) - len(listed))
        assert listed + [change.key for change in changes] == written


def test_callbacks_of_a_watch_never_run_at_once(store: Store, at: str) -> None:
    """The loop behind them takes no locks."""
    recorder = Recorder(store, at).wait_listed()

    writers = [threading.Thread(target=lambda n=n: [put(store, f"{at}{n}") for _ in range(10)]) for n in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(30)

    recorder.wait_changes(40)
    assert not recorder.overlapped


def test_a_closed_watch_is_silent_and_the_others_go_on(store: Store, at: str) -> None:
    """A cluster that leaves must not end what others follow."""
    closed, other = Recorder(store, at).wait_listed(), Recorder(store, at).wait_listed()
    put(store, f"{at}a")
    closed.wait_changes(1)

    closed.watch.close()
    closed.watch.close()
    put(store, f"{at}b")

    other.wait_changes(2)
    assert len(closed.changes) == 1


def test_a_callback_may_write_and_close_its_own_watch(store: Store, at: str) -> None:
    """A reaction to a change is often a write; it must not lock up."""
    done = threading.Event()
    watches: list[Watch] = []

    def react(change: KeyChanged) -> None:
        if change.key == f"{at}question":
            put(store, f"{at}answer")
        else:
            watches[0].close()
            done.set()

    listed = threading.Event()
    watches.append(store.watch(at, lambda snapshot: listed.set(), react))
    assert listed.wait(20)
    put(store, f"{at}question")

    assert done.wait(20)
    assert store.get(f"{at}answer") is not None


def test_keys_go_with_their_lease_and_only_those(store: Store, at: str) -> None:
    """A cluster whose agent died must vanish; its jobs' records must not."""
    lease = store.grant_lease(60)
    put(store, f"{at}kept")
    put(store, f"{at}moved", lease=lease)
    put(store, f"{at}moved")
    put(store, f"{at}b", lease=lease)
    put(store, f"{at}a", lease=lease)
    recorder = Recorder(store, at).wait_listed()

    store.revoke(lease)

    recorder.wait_changes(2)
    assert recorder.story() == [(f"{at}a", None), (f"{at}b", None)]
    assert len({change.revision for change in recorder.changes}) == 1
    assert [entry.key for entry in store.list(at).entries] == [f"{at}kept", f"{at}moved"]


def test_a_key_can_move_to_another_lease(store: Store, at: str) -> None:
    """An agent that starts again overwrites its key before the old lease has ended."""
    old, new = store.grant_lease(60), store.grant_lease(60)
    put(store, f"{at}a", lease=old)
    put(store, f"{at}a", lease=new)

    store.revoke(old)
    assert store.get(f"{at}a") is not None

    store.revoke(new)
    assert store.get(f"{at}a") is None


def test_an_ended_lease_can_be_revoked_but_neither_renewed_nor_used(store: Store, at: str) -> None:
    """A process that slept too long must notice."""
    lease = store.grant_lease(60)
    assert store.keep_alive(lease)

    store.revoke(lease)
    store.revoke(lease)

    assert not store.keep_alive(lease)
    with pytest.raises(NotFound, match="lease"):
        store.commit((), (Put(f"{at}a", b"", lease), Put(f"{at}b", b"")))
    assert store.list(at).entries == ()
    assert not store.commit((RevisionIs(f"{at}a", 7),), (Put(f"{at}a", b"", lease),)).ok


def test_a_lease_ends_when_nobody_renews_it(store: Store, at: str) -> None:
    """The death of an agent is noticed by nothing else."""
    kept, left = store.grant_lease(2), store.grant_lease(2)
    put(store, f"{at}kept", lease=kept)
    put(store, f"{at}left", lease=left)

    def gone() -> bool:
        assert store.keep_alive(kept)
        return store.get(f"{at}left") is None

    eventually(gone, "the key is gone")
    assert not store.keep_alive(left)
    assert store.get(f"{at}kept") is not None


def test_a_lease_needs_a_length(store: Store) -> None:
    """A lease of nothing would be a registration that is never there."""
    with pytest.raises(ValueError, match="at least 1 s"):
        store.grant_lease(0)


def test_a_closed_store_says_so_and_leaves_no_thread(store: Store, at: str) -> None:
    """A process that shuts down must end, and an error must tell why."""
    before = set(threading.enumerate())
    put(store, f"{at}a", lease=store.grant_lease(60))
    recorder = Recorder(store, at).wait_listed()
    Recorder(store, f"{at}other/").wait_listed()

    store.close()
    store.close()

    eventually(lambda: set(threading.enumerate()) <= before, "all threads have ended")
    assert len(recorder.told) == 1
    with pytest.raises(StoreUnavailable, match="closed"):
        store.get(f"{at}a")
    with pytest.raises(StoreUnavailable, match="closed"):
        store.watch(at, print, print)


def test_leases_of_the_inline_store_end_by_its_clock() -> None:
    """The simulator moves time; nothing else may."""
    now_s = [0.0]
    store = MemoryStore(lambda: now_s[0], inline=True)
    put(store, "/a", lease=store.grant_lease(10))
    recorder = Recorder(store, "/")

    now_s[0] = 9.9
    store.expire()
    assert recorder.changes == []

    now_s[0] = 10.0
    store.expire()
    assert recorder.story() == [("/a", None)]


def test_callbacks_of_the_inline_store_run_before_the_write_returns() -> None:
    """Two runs of one simulation must be the same, so nothing is left to another thread."""
    store = MemoryStore(inline=True)
    order: list[str] = []

    def react(change: KeyChanged) -> None:
        order.append(f"begin {change.key}")
        if change.key == "/a":
            put(store, "/b")
        order.append(f"end {change.key}")

    store.watch("/", lambda snapshot: order.append("snapshot"), react)
    put(store, "/a")

    assert order == ["snapshot", "begin /a", "end /a", "begin /b", "end /b"]


NAMES = st.sampled_from(["a", "b", "b/c", "d"])
VALUES = st.sampled_from([b"", b"1", b"2"])


class SameAsEtcd(RuleBasedStateMachine):
    """Does the same to a memory store and an etcd; revisions are compared by the order of the writes.

    Absolute revisions differ, since tests share the etcd.
    """

    address = ""

    def __init__(self) -> None:
        super().__init__()
        self.at = f"/same/{uuid.uuid4().hex}/"
        self.memory, self.etcd = MemoryStore(inline=True), EtcdStore(self.address)
        self.told = Recorder(self.memory, self.at), Recorder(self.etcd, self.at).wait_listed()
        self.leases: list[tuple[int, int]] = []
        self.memory_revision_of: dict[int, int] = {}

    @rule(
        writes=st.dictionaries(NAMES, st.tuples(st.one_of(st.none(), VALUES), st.integers(0, 3)), max_size=4),
        guards=st.lists(st.tuples(NAMES, st.sampled_from(["now", "absent", "changed", "value"]), VALUES), max_size=2),
    )
    def commit(self, writes: dict[str, tuple[bytes | None, int]], guards: list[tuple[str, str, bytes]]) -> None:
        stores: tuple[Store, Store] = (self.memory, self.etcd)
        outcomes: list[str] = []
        revisions: list[int] = []
        for side, store in enumerate(stores):
            try:
                outcome = store.commit(
                    tuple(self._guard(store, *guard) for guard in guards),
                    tuple(self._write(side, name, *write) for name, write in writes.items()),
                )
            except NotFound:
                outcomes.append("no lease")
                continue
            outcomes.append("written" if outcome.ok else "refused")
            revisions.append(outcome.revision)
        assert outcomes[0] == outcomes[1]
        if outcomes[0] == "written":
            self.memory_revision_of[revisions[1]] = revisions[0]

    @rule()
    def grant(self) -> None:
        self.leases.append((self.memory.grant_lease(600), self.etcd.grant_lease(600)))

    @precondition(lambda self: self.leases)
    @rule(which=st.integers(0, 3))
    def revoke(self, which: int) -> None:
        memory, etcd = self.leases[which % len(self.leases)]
        assert self.memory.keep_alive(memory) == self.etcd.keep_alive(etcd)
        self.memory.revoke(memory)
        self.etcd.revoke(etcd)

    @invariant()
    def both_hold_the_same(self) -> None:
        assert self.memory.list(self.at).entries == tuple(map(self._as_memory, self.etcd.list(self.at).entries))
        assert (self.memory.get(f"{self.at}b") is None) == (self.etcd.get(f"{self.at}b") is None)

    def teardown(self) -> None:
        try:
            memory, etcd = self.told
            for change, twin in zip(memory.changes, etcd.wait_changes(len(memory.changes)), strict=True):
                # A revoked lease's keys go at a revision that only the watch tells.
                at = self.memory_revision_of.setdefault(twin.revision, change.revision)
                assert (change.key, change.revision) == (twin.key, at)
                assert change.entry == (self._as_memory(twin.entry) if twin.entry else None)
        finally:
            for _, lease in self.leases:
                self.etcd.revoke(lease)
            self.memory.close()
            self.etcd.close()

    def _as_memory(self, entry: Entry) -> Entry:
        written, created = (self.memory_revision_of[r] for r in (entry.mod_revision, entry.create_revision))
        return Entry(entry.key, entry.value, written, created)

    def _guard(self, store: Store, name: str, kind: str, value: bytes) -> Guard:
        key = f"{self.at}{name}"
        if kind == "value":
            return ValueIs(key, value)
        found = store.get(key)
        revision = found.mod_revision if found and kind != "absent" else 0
        return RevisionIs(key, revision + (kind == "changed"))

    def _write(self, side: int, name: str, value: bytes | None, lease: int) -> Write:
        key = f"{self.at}{name}"
        if value is None:
            return Delete(key)
        return Put(key, value, self.leases[lease][side] if lease < len(self.leases) else None)


@pytest.mark.live
def test_memory_and_etcd_stay_the_same_through_any_story(etcd_address: str) -> None:
    """What is tested and simulated over memory must hold in production."""

    class Here(SameAsEtcd):
        address = etcd_address

    run_state_machine_as_test(Here, settings=settings(max_examples=25, stateful_step_count=25, database=None))
