"""A real Ray cluster on this machine, and a cluster under test whose tasks are its actors."""

from __future__ import annotations

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

    def start(self) -> None:
        self.daemons["n1"] = self._start("--head", "--port", str(self.port), "--num-cpus", "8", "--node-name", "n1")
        eventually(lambda: _answers(self.port), "the head answers", 90.0)
        self.wait_for_nodes("n1")
        self.start_node("n2")
        self.wait_for_nodes("n1", "n2")

    def wait_for_nodes(self, *names: str) -> None:
        self.run(
            """
import time
while {node["NodeName"] for node in ray.nodes() if node["Alive"]} != set(sys.argv[3:]):
    time.sleep(0.2)
""",
            "test",
            *names,
        )

    def run(self, code: str, namespace: str = "test", *arguments: str) -> str:
        """As another user of the cluster would; what the code prints."""
        begin = """
import logging, ray, sys
ray.init(address=sys.argv[1], namespace=sys.argv[2], log_to_driver=False, logging_level=logging.ERROR)
"""
        command = [sys.executable, "-c", begin + code, self.address, namespace, *arguments]
        ran = subprocess.run(
            command, timeout=120, check=True, env=os.environ | ALONE, stdout=subprocess.PIPE, text=True
        )
        return ran.stdout

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
        self.ray.run(
            """
from ray.util import list_named_actors, placement_group_table, get_placement_group, remove_placement_group
for name in list_named_actors():
    ray.kill(ray.get_actor(name))
for group in placement_group_table().values():
    if group["state"] != "REMOVED" and group["name"]:
        remove_placement_group(get_placement_group(group["name"]))
""",
            self.namespace,
        )
        log = root / "ray.log"
        sys.stdout.write(log.read_text() if log.exists() else "")

    def pids(self, attempt: Attempt) -> dict[str, int]:
        return told_to_run(attempt)

    def preempt(self, cluster: Recorded, task: str) -> None:
        self.ray.run("ray.kill(ray.get_actor(sys.argv[3]))", self.namespace, cluster.record(task).handle)

    def kept(self, cluster: Cluster) -> set[str]:
        told = self.ray.run(
            """
from ray.util import list_named_actors, placement_group_table
groups = [group["name"] for group in placement_group_table().values() if group["state"] != "REMOVED"]
print(*list_named_actors(), *filter(None, groups), sep="\\n")
""",
            self.namespace,
        )
        return set(told.split())

    def lose(self, cluster: Recorded, task: str) -> None:
        self.ray.kill(cluster.record(task).node)
