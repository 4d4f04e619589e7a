"""Controllers as processes over a real etcd: leaders die, etcd goes away, and nobody notices more than a pause."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from fedsched.adapters import etcd_server
from fedsched.adapters.etcd import EtcdStore
from fedsched.adapters.rpc import JobsClient
from fedsched.core.cluster import ControllerRecord
from fedsched.core.job import JobPhase, JobSpec
from fedsched.errors import StoreUnavailable, Unreachable
from fedsched.runtime import codec, keys
from tests.controller.stand_in import StandInAgent
from tests.waiting import eventually

pytestmark = pytest.mark.live


@dataclass
class Etcd:
    """A server of the test's own, since the test kills it."""

    data: Path
    server: etcd_server.EtcdServer

    def kill(self) -> None:
        os.kill(self.server.pid, signal.SIGKILL)
        etcd_server.stop(self.server.pid)

    def start_again(self) -> None:
        self.server = etcd_server.start(self.data, self.server.address)


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[Etcd]:
    data = tmp_path / "etcd" / "data"
    found = Etcd(data, etcd_server.start(data))
    yield found
    etcd_server.stop(found.server.pid)


class Process:
    """A controller in a process of its own."""

    def __init__(self, folder: Path, etcd: str, listen: str = "127.0.0.1:0") -> None:
        folder.mkdir()
        config = {"listen": listen, "etcd": etcd, "state_dir": str(folder), "lease_ttl_s": 2}
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        self.log = folder / "log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "fedsched.controller", "--config", str(folder / "config.yaml")], stderr=log
            )

    def end(self) -> None:
        self.process.kill()
        self.process.wait(10)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def addresses(store: EtcdStore) -> dict[int, str]:
    """Where controllers serve, by pid."""
    records = [codec.loads(ControllerRecord, entry.value) for entry in store.list(keys.CONTROLLERS).entries]
    return {int(record.controller_id.rsplit("-", 2)[1]): record.address for record in records}


def test_when_the_leader_is_killed_the_other_controller_dispatches_and_nothing_goes_twice(
    etcd: Etcd, tmp_path: Path, stack: ExitStack, spec: JobSpec
) -> None:
    """A dead controller must cost users a pause of seconds, never a job or a second run of one."""
    store = stack.enter_context(closing(EtcdStore(etcd.server.address)))
    processes = {}
    for name in ("one", "two"):
        process = Process(tmp_path / name, etcd.server.address)
        stack.callback(process.end)
        processes[process.process.pid] = process
    eventually(lambda: set(addresses(store)) == set(processes), "both are registered", 60)
    clients = {pid: stack.enter_context(JobsClient(address)) for pid, address in addresses(store).items()}
    eventually(lambda: store.get(keys.leader("controller")) is not None, "one leads")
    east = StandInAgent(store, "east", cpus=32)
    ids = [clients[pid].submit(spec, f"key-{n}").job.spec.job_id for n, pid in enumerate([*clients, *clients])]
    eventually(lambda: sorted(east.assigned()) == sorted(ids), "the leader dispatches")

    entry = store.get(keys.leader("controller"))
    assert entry is not None
    leader = int(entry.value.decode().rsplit("-", 2)[1])
    processes[leader].process.send_signal(signal.SIGKILL)
    other = next(client for pid, client in clients.items() if pid != leader)
    late = [other.submit(spec, f"late-{n}").job.spec.job_id for n in range(3)]
    assert other.submit(spec, "key-0").job.spec.job_id == ids[0], "keys are known to every controller"
    eventually(lambda: set(late) <= set(east.assigned()), "the other one dispatches", 60)

    for job_id in (*ids, *late):
        steps = [step.target for step in other.events(job_id)]
        assert steps == [JobPhase.QUEUED, JobPhase.DISPATCHED]


def test_while_etcd_is_away_the_api_says_so_and_recovers_by_itself(
    etcd: Etcd, tmp_path: Path, stack: ExitStack, spec: JobSpec
) -> None:
    """The controller is the first thing that people restart; they must not have to."""
    process = Process(tmp_path / "one", etcd.server.address)
    stack.callback(process.end)
    store = stack.enter_context(closing(EtcdStore(etcd.server.address)))
    eventually(lambda: process.process.pid in addresses(store), "it is registered", 60)
    client = stack.enter_context(JobsClient(addresses(store)[process.process.pid]))
    east = StandInAgent(store, "east")
    first = client.submit(spec).job.spec.job_id
    eventually(lambda: first in east.assigned(), "it is dispatched")

    etcd.kill()
    with pytest.raises(StoreUnavailable):
        client.list()
    with pytest.raises(Unreachable):
        client.submit(spec, "while-away")
    assert process.process.poll() is None
    etcd.start_again()

    eventually(lambda: _answers(client), "the API answers again", 30)
    again = client.submit(spec, "while-away").job.spec.job_id
    eventually(lambda: again in east.assigned(), "it is dispatched")
    assert [step.target for step in client.events(first)] == [JobPhase.QUEUED, JobPhase.DISPATCHED]
    assert process.process.poll() is None


def _answers(client: JobsClient) -> bool:
    try:
        client.list()
        return True
    except Unreachable:
        return False


def test_a_controller_that_is_told_to_end_gives_up_its_place_at_once(
    etcd: Etcd, tmp_path: Path, stack: ExitStack
) -> None:
    """An upgrade must not cost the time of a lease."""
    process = Process(tmp_path / "one", etcd.server.address)
    stack.callback(process.end)
    store = stack.enter_context(closing(EtcdStore(etcd.server.address)))
    eventually(lambda: store.get(keys.leader("controller")) is not None, "it leads", 60)
    process.process.terminate()
    assert process.process.wait(10) == 0
    assert store.get(keys.leader("controller")) is None
    assert addresses(store) == {}


def test_starting_without_etcd_or_on_a_taken_port_is_one_clear_error(etcd: Etcd, tmp_path: Path) -> None:
    """Exit codes 7 and 5; whoever runs it under a supervisor sees the reason in the last lines of the log."""
    taken = Process(tmp_path / "taken", etcd.server.address, listen=etcd.server.address)
    try:
        assert taken.process.wait(60) == 5
        assert f"[FS202] cannot listen on {etcd.server.address}" in taken.log.read_text()
        assert "Traceback" not in taken.log.read_text()
    finally:
        taken.end()
    etcd.kill()
    alone = Process(tmp_path / "alone", etcd.server.address)
    try:
        assert alone.process.wait(60) == 7
        assert "[FS221]" in alone.log.read_text()
        assert "Traceback" not in alone.log.read_text()
    finally:
        alone.end()
