"""`up` and `down` with real processes: what is started is stopped, whatever goes wrong in between."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from fedsched.addresses import free_address
from tests.waiting import eventually

pytestmark = [pytest.mark.live, pytest.mark.xdist_group("federation"), pytest.mark.timeout(400)]

COMMAND_S = 180


class Federation:
    """A federation of one cluster in a home of its own, driven by the installed command."""

    def __init__(self, folder: Path) -> None:
        self.home = folder / "home"
        self.file = folder / "federation.yaml"
        self.plain: dict[str, Any] = {
            "name": "tiny",
            "controller": free_address(),
            "aggregator": free_address(),
            "clusters": [{"name": "east", "nodes": [{"name": "n1", "cpus": 2}], "policy": {"name": "fifo"}}],
        }
        self.write()

    def write(self) -> None:
        self.file.write_text(yaml.safe_dump(self.plain))

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "FEDSCHED_HOME": str(self.home)}
        environment.pop("FEDSCHED_SERVER", None)
        return subprocess.run(
            [sys.executable, "-m", "fedsched.cli.main", *arguments],
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
            env=environment,
        )

    def processes(self) -> dict[str, int]:
        """Pids of what the state file names, by name."""
        state = json.loads((self.home / "tiny" / "federation.json").read_text())
        return {process["name"]: process["pid"] for process in state["processes"]}

    def left(self) -> list[str]:
        """Living processes that have to do with this federation."""
        found = []
        for process in psutil.process_iter(["cmdline", "status"]):
            line = " ".join(process.info["cmdline"] or [])
            if str(self.home) in line and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(line)
        return found


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[Federation]:
    found = Federation(tmp_path)
    yield found
    if found.home.exists():
        found.run("down", "--purge")


def test_a_federation_comes_up_is_found_is_mended_and_goes_down_without_a_trace(federation: Federation) -> None:
    """The first hour with the product: no address to type, nothing left over, and `up` again is always safe."""
    up = federation.run("up", str(federation.file))
    assert up.returncode == 0, up.stderr
    assert "agent east is ready" in up.stdout
    names = {"etcd", "controller", "aggregator", "agent east"}
    before = federation.processes()
    assert set(before) == names
    assert "Ready" in federation.run("info").stdout

    again = federation.run("up", str(federation.file), "-o", "json")
    assert (again.returncode, federation.processes()) == (0, before)
    assert "runs already" in again.stderr
    told = json.loads(again.stdout)
    assert {process["name"]: process["pid"] for process in told["processes"]} == before
    assert told["controller"] == federation.plain["controller"]

    os.kill(before["agent east"], signal.SIGKILL)
    eventually(lambda: not psutil.pid_exists(before["agent east"]), "the agent is dead")
    mended = federation.run("up", str(federation.file))
    assert mended.returncode == 0, mended.stderr
    after = federation.processes()
    assert after["agent east"] != before["agent east"]
    assert {name: pid for name, pid in after.items() if name != "agent east"} == {
        name: pid for name, pid in before.items() if name != "agent east"
    }

    federation.plain["lease_ttl_s"] = 7
    federation.write()
    other = federation.run("up", str(federation.file))
    assert (other.returncode, other.stderr.split()[0]) == (5, "[FS201]")

    down = federation.run("down", "-o", "json")
    assert down.returncode == 0, down.stderr
    assert json.loads(down.stdout) == {"name": "tiny", "stopped": [*after], "purged": False}
    assert federation.left() == []
    assert (federation.home / "tiny" / "etcd" / "data").is_dir(), "the data stays"
    idle = federation.run("down")
    assert idle.returncode == 0, "nothing to do is fine"
    assert idle.stdout == ("federation tiny did not run; `fedsched down --name tiny --purge` deletes what it left\n"), (
        "and is said"
    )
    assert federation.run("down", "--purge").returncode == 0
    assert not (federation.home / "tiny").exists()


def test_a_port_in_use_and_a_process_that_fails_are_told_and_nothing_is_left_running(federation: Federation) -> None:
    """Half a federation that nobody knows of is the worst outcome of a failed start."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        good = federation.plain["controller"]
        federation.plain["controller"] = f"127.0.0.1:{taken.getsockname()[1]}"
        federation.write()
        result = federation.run("up", str(federation.file))
        assert (result.returncode, result.stderr.split()[0]) == (5, "[FS202]")
        assert federation.left() == []

    federation.plain["controller"] = good
    federation.plain["clusters"][0]["policy"] = {"name": "dl2", "checkpoint": "/nowhere/weights"}
    federation.write()
    result = federation.run("up", str(federation.file))
    assert result.returncode == 1
    # Both need the weights; either may be found dead first.
    assert re.match(r"\[FS302\] (agent east|aggregator) ended at once; the end of ", result.stderr)
    assert "/nowhere/weights" in result.stderr, "the failing process's own words"
    assert "Traceback" not in result.stderr
    assert federation.left() == []


def test_an_up_that_was_killed_leaves_nothing_that_down_or_the_next_up_does_not_find(federation: Federation) -> None:
    """Its etcd, which nobody had noted yet, held its data and kept every later `up` from starting."""

    def killed() -> None:
        environment = {**os.environ, "FEDSCHED_HOME": str(federation.home)}
        up = subprocess.Popen([sys.executable, "-m", "fedsched.cli.main", "up", federation.file], env=environment)
        eventually(lambda: any("--data-dir=" in line for line in federation.left()), "etcd is started", 60.0)
        up.kill()
        up.wait()

    killed()
    down = federation.run("down")
    assert down.returncode == 0, down.stderr
    assert federation.left() == []

    killed()
    up = federation.run("up", str(federation.file))
    assert up.returncode == 0, up.stderr
    assert sum("--data-dir=" in line for line in federation.left()) == 1


def test_an_etcd_that_does_not_answer_is_told_before_anything_starts(federation: Federation) -> None:
    """Exit code 7."""
    federation.plain["etcd"] = {"address": free_address()}
    federation.write()
    result = federation.run("up", str(federation.file))
    assert (result.returncode, result.stderr.split()[0]) == (7, "[FS221]")
    assert federation.left() == []
