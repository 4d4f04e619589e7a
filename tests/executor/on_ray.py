"""A real Ray cluster on this machine, and a cluster under test whose tasks are its actors."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil

from fedsched.executor.backend import TaskBackend
from fedsched.executor.orders import Programs
from fedsched.executor.ray import RayOptions, RayTasks
from fedsched.executor.records import Attempt
from tests.executor.cluster import Cluster, Recorded, told_to_run
from tests.waiting import eventually

USER = """
import json, logging, sys, time
import ray
from ray._raylet import PlacementGroupID
from ray.util import list_named_actors, placement_group_table, remove_placement_group
from ray.util.placement_group import PlacementGroup

ray.init(address=sys.argv[1], namespace="test", log_to_driver=False, logging_level=logging.ERROR)


def actors(namespace):
    return [found["name"] for found in list_named_actors(all_namespaces=True) if found["namespace"] == namespace]


def groups():
    return {key: group for key, group in placement_group_table().items() if group["state"] != "REMOVED"}


def kept(namespace):
    return [*actors(namespace), *(group["name"] for group in groups().values() if group["name"])]


def kill(namespace, name):
    ray.kill(ray.get_actor(name, namespace=namespace))


def end(namespace):
    for name in actors(namespace):
        kill(namespace, name)
    for key in groups():
        remove_placement_group(PlacementGroup(PlacementGroupID.from_hex(key)))


def wait_for_nodes(*names):
    while {node["NodeName"] for node in ray.nodes() if node["Alive"]} != set(names):
        time.sleep(0.2)


for line in sys.stdin:
    verb, arguments = json.loads(line)
    print(json.dumps({"told": globals()[verb](*arguments)}), flush=True)
"""
"""Another user of the cluster. One for all tests: to reach Ray takes some seconds of processor time."""
ALONE = {"RAY_DISABLE_IMPORT_WARNING": "1", "RAY_USAGE_STATS_ENABLED": "0", "RAY_health_check_period_ms": "500"}


class Ray:
    """A head, which is a node, too, and another node, each with processes of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with socket.socket() as made:
            made.bind(("127.0.0.1", 0))
            port = made.getsockname()[1]
        self.port = port
        self.address = f"127.0.0.1:{port}"
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._user: subprocess.Popen[str] | None = None

    def start(self) -> None:
        self.daemons["n1"] = self._start("--head", "--port", str(self.port), "--num-cpus", "8", "--node-name", "n1")
        eventually(lambda: _answers(self.port), "the head answers", 90.0)
        self.wait_for_nodes("n1")
        self.start_node("n2")
        self.wait_for_nodes("n1", "n2")

    def wait_for_nodes(self, *names: str) -> None:
        self.ask("wait_for_nodes", *names)

    def ask(self, verb: str, *arguments: str) -> list[str]:
        """What another user of the cluster does, or is told."""
        if self._user is None:
            command = [sys.executable, "-c", USER, self.address]
            self._user = subprocess.Popen(
                command, env=os.environ | ALONE, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
        assert self._user.stdin is not None
        assert self._user.stdout is not None
        self._user.stdin.write(json.dumps([verb, arguments]) + "\n")
        self._user.stdin.flush()
        for line in self._user.stdout:
            if line.startswith('{"told"'):  # Ray itself may print
                told: list[str] | None = json.loads(line)["told"]
                return told or []
        raise AssertionError(f"the process that asks Ray for the tests ended with {self._user.wait()}")

    def start_node(self, node: str) -> None:
        self.daemons[node] = self._start("--address", self.address, "--num-cpus", "8", "--node-name", node)

    def _start(self, *options: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *options]
        command += ["--object-store-memory", "80000000", "--memory", "6000000000", "--disable-usage-stats"]
        if "--head" in options:
            command += ["--include-dashboard=false", "--temp-dir", str(self.folder)]
        with (self.folder / "start.log").open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | ALONE, start_new_session=True)

    def kill(self, node: str) -> None:
        """All of a node's own processes; the tasks are children of its workers and see for themselves."""
        _kill_family(self.daemons[node])

    def stop(self) -> None:
        if self._user is not None:
            self._user.kill()
            self._user.communicate()
        for daemon in reversed(self.daemons.values()):
            _kill_family(daemon)


def _kill_family(daemon: subprocess.Popen[bytes]) -> None:
    if daemon.poll() is not None:
        return  # its number may be another's by now
    with suppress(psutil.Error):
        family = [*psutil.Process(daemon.pid).children(recursive=True), psutil.Process(daemon.pid)]
        for process in family:
            with suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)
        psutil.wait_procs(family, timeout=20)
    daemon.wait()


def _answers(port: int) -> bool:
    with socket.socket() as made:
        return made.connect_ex(("127.0.0.1", port)) == 0


class OnRay:
    join_s = 90.0

    def __init__(self, ray: Ray) -> None:
        self.ray = ray
        self.namespace = ""

    def open(self, root: Path, programs: Programs) -> TaskBackend:
        self.namespace = f"test-{root.parent.name}"
        return RayTasks(RayOptions(self.ray.address, self.namespace), root / "ray.log")

    def end(self, root: Path) -> None:
        if self.ray.daemons["n2"].poll() is not None:
            self.ray.start_node("n2")
            self.ray.wait_for_nodes("n1", "n2")
        self.ray.ask("end", self.namespace)
        log = root / "ray.log"
        sys.stdout.write(log.read_text() if log.exists() else "")

    def pids(self, attempt: Attempt) -> dict[str, int]:
        return told_to_run(attempt)

    def preempt(self, cluster: Recorded, task: str) -> None:
        self.ray.ask("kill", self.namespace, cluster.record(task).handle)

    def kept(self, cluster: Cluster) -> set[str]:
        return set(self.ray.ask("kept", self.namespace))

    def lose(self, cluster: Recorded, task: str) -> None:
        self.ray.kill(cluster.record(task).node)
