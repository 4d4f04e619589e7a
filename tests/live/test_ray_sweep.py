"""Sweeps on a real Ray cluster, which is started here: the same bytes as on this machine, and nothing lost."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from fedsched.errors import Unreachable
from fedsched.sim import on_ray
from fedsched.sim.on_ray import over_ray
from fedsched.sim.workers import INTERRUPTED, Share
from tests.waiting import eventually

pytestmark = [pytest.mark.live, pytest.mark.xdist_group("ray"), pytest.mark.timeout(300)]

EXPERIMENT = """\
clusters: [{name: one, nodes: [{name: n, count: 2, cpus: 6}]}]
workload: {jobs: 6, gap_s: 5, alone_s_max: 60}
policies: {drf: {name: drf}, srtf: {name: srtf}, fifo: {name: fifo}}
"""


def free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return int(made.getsockname()[1])


@contextlib.contextmanager
def started() -> Iterator[tuple[str, Callable[[], None]]]:
    """A cluster of two cores: the address of its head, and what ends all of it; nothing is left of it afterwards."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:  # short: Ray puts sockets into it
        head = subprocess.Popen(
            [
                *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--num-cpus", "2"),
                *("--port", str(port), "--ray-client-server-port", str(free_port()), "--temp-dir", folder),
                *("--include-dashboard=false", "--disable-usage-stats", "--object-store-memory", "100000000"),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

        def end() -> None:
            if head.poll() is None:
                family = [*psutil.Process(head.pid).children(recursive=True), psutil.Process(head.pid)]
                for process in family:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()
                head.wait()
                psutil.wait_procs(family, timeout=20)

        try:
            eventually(lambda: _answers(port), "Ray's head answers", 60)
            yield f"127.0.0.1:{port}", end
        finally:
            end()


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    with started() as (address, _):
        yield address


def _answers(port: int) -> bool:
    with socket.socket() as made:
        return made.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def on_cluster(cluster: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", cluster)


def compare(engine: str, folder: Path, address: str = "") -> tuple[object, dict[str, bytes]]:
    """The output of a comparison, without what is measured, and the bytes of all files that it writes."""
    folder.mkdir()
    for name in ("one", "two"):
        gap = "" if name == "one" else "costs: {start_s: 5}\n"
        (folder.parent / f"{name}.yaml").write_text(EXPERIMENT + gap)
    files = {kind: folder / f"jobs.{kind}" for kind in ("csv", "parquet", "html")}
    done = subprocess.run(
        [
            *(sys.executable, "-m", "fedsched.cli.main", "sim", "compare"),
            *(str(folder.parent / f"{name}.yaml") for name in ("one", "two")),
            *("--seeds", "2", "--engine", engine, "-o", "json", "--per-job", str(files["csv"])),
            *("--parquet", str(files["parquet"]), "--html", str(files["html"])),
        ],
        env={**os.environ, "RAY_ADDRESS": address},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    for one in told["results"]:
        assert one.pop("cpu_s") > 0  # the one thing that is measured and not computed
    return told, {kind: file.read_bytes() for kind, file in files.items()}


def test_a_sweep_on_ray_gives_the_same_bytes_as_on_this_machine(cluster: str, tmp_path: Path) -> None:
    """Policies x seeds x scenarios: who moves a sweep to a cluster must be able to compare with yesterday's."""
    here, files_here = compare("local", tmp_path / "here")
    there, files_there = compare("ray", tmp_path / "there", cluster)
    assert here == there
    assert files_here == files_there
    rows = list(csv.DictReader(files_there["csv"].decode().splitlines()))
    assert len(rows) == 2 * 3 * 2 * 6


def linger(task: tuple[str, int], share: Share) -> str:
    """Says where it is, and takes its time."""
    folder, number = task
    with (Path(folder) / f"task-{number}").open("a") as file:
        file.write(f"{os.getpid()}\n")
    time.sleep(3)
    return f"made {number}"


def begun(folder: Path, number: int) -> list[int]:
    """Processes in which a task was begun, one after the other."""
    file = folder / f"task-{number}"
    return [int(line) for line in file.read_text().split()] if file.exists() else []


def test_a_worker_that_is_killed_in_mid_sweep_costs_nothing(on_cluster: None, tmp_path: Path) -> None:
    """Cheap machines are taken away while they work; the run is begun anew on another."""

    def kill() -> None:
        eventually(lambda: begun(tmp_path, 1), "task 1 begins", 60)
        os.kill(begun(tmp_path, 1)[0], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    told: list[float] = []
    made = over_ray(linger, [(str(tmp_path), n) for n in range(4)], lambda task, why: why, told=told.append)
    killer.join()
    assert made == ("made 0", "made 1", "made 2", "made 3")
    assert len(begun(tmp_path, 1)) == 2
    assert [len(begun(tmp_path, n)) for n in (0, 2, 3)] == [1, 1, 1]
    assert told == [1, 2, 3, 4]


def die(number: int, share: Share) -> int:
    """Kills its worker where it is asked for 1, and has a fault where it is asked for 2."""
    if number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if number == 2:
        raise ValueError("two is not a number\nof ours")
    return number


def test_a_run_that_kills_every_worker_is_marked_and_the_others_are_kept(on_cluster: None) -> None:
    """It cannot be begun anew for ever."""
    made = over_ray(die, [0, 1, 2, 3], lambda number, why: why)
    assert made == (
        *(0, "its worker on the Ray cluster died, 3 times (WorkerCrashedError)"),
        *("ValueError on the Ray cluster: two is not a number", 3),
    )


def test_an_interruption_keeps_what_has_come_back(on_cluster: None, tmp_path: Path) -> None:
    made = over_ray(
        linger,
        [(str(tmp_path), n) for n in range(6)],
        lambda task, why: why,
        told=lambda done: signal.raise_signal(signal.SIGINT),
    )
    assert sum(one.startswith("made") for one in made) == 1
    assert made.count(INTERRUPTED) == 5
    # Nothing goes on there without us.
    pids = {pid for n in range(6) for pid in begun(tmp_path, n)}
    eventually(lambda: not any(psutil.pid_exists(pid) for pid in pids), "all workers are gone", 30)


@contextlib.contextmanager
def silent(kind: str) -> Iterator[str]:
    """Where nothing listens, or something that accepts connections and never says a word."""
    if kind == "closed":
        yield f"127.0.0.1:{free_port()}"
        return
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        made.listen()
        yield f"127.0.0.1:{made.getsockname()[1]}"


@pytest.mark.parametrize("kind", ["closed", "deaf"])
def test_a_head_that_does_not_answer_is_said_after_the_deadline(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray by itself waits for two minutes and then ends the process, without a word of what was tried."""
    monkeypatch.setattr(on_ray, "REACH_S", 5.0)
    expected = r"the Ray cluster at 127\.0\.0\.1:\d+ \(from RAY_ADDRESS\) has not answered within 5 s"
    with silent(kind) as address:
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(Unreachable, match=expected):
            over_ray(die, [0], lambda number, why: why)


def test_a_cluster_that_ends_in_mid_sweep_leaves_what_has_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray ends the process of a client that has lost its cluster; results must not be in that process."""
    with started() as (address, end):
        monkeypatch.setenv("RAY_ADDRESS", address)
        monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "5")  # Ray's default is a minute
        tasks = [(str(tmp_path), n) for n in range(8)]
        made = over_ray(linger, tasks, lambda task, why: why, told=lambda done: end() if done == 2 else None)
    kept = [one for one in made if one.startswith("made")]
    assert 2 <= len(kept) < 8
    assert all(one in kept or "the Ray cluster was lost before it ended" in one for one in made)
