"""A federation of one cluster, each part a process of its own, used as a person would: through the command line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fedsched.adapters import etcd_server
from fedsched.adapters.etcd import EtcdStore
from fedsched.adapters.rpc import JobsClient
from fedsched.addresses import free_address
from fedsched.core.ids import ClusterName, JobId, TaskName
from fedsched.core.job import TERMINAL, JobPhase, JobStatus
from fedsched.errors import StoreUnavailable, Unreachable
from fedsched.executor.records import Attempt, Layout, TaskRecord
from fedsched.runtime import keys
from fedsched.sim.replaying import Replayed, replay
from tests.waiting import eventually

FEDSCHED = Path(sys.executable).with_name("fedsched")
LONG_S = 150.0


@dataclass(frozen=True)
class Tasks:
    """An attempt's, as those who take them away look for them."""

    attempt: Attempt

    def record(self, task: str) -> TaskRecord:
        return self.attempt.records()[TaskName(task)]


class Served:
    """etcd, a controller and the agent of one cluster.

    Args:
        home: a folder of its own.
        agent: the agent's configuration; addresses and `state_dir` are filled in.
        jobs: the cluster's directory, where its executor keeps what it knows.
    """

    def __init__(self, home: Path, agent: dict[str, Any], jobs: Path) -> None:
        self.home = home
        self.jobs = Layout(jobs)
        self.cluster = ClusterName(agent["cluster"])
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.etcd = etcd_server.start(home / "etcd")
        self.controller = free_address()
        self.env = {**os.environ, "FEDSCHED_HOME": str(home), "FEDSCHED_SERVER": self.controller, "COLUMNS": "200"}
        self.configs: dict[str, dict[str, Any]] = {
            "server": {
                "listen": self.controller,
                "etcd": self.etcd.address,
                "state_dir": str(home / "controller"),
                "lease_ttl_s": 3,
            },
            "agent": {
                "slot": {"length_s": 1.0, "decision_s_max": 0.8},
                "lease_ttl_s": 5,
                **agent,
                "etcd": self.etcd.address,
                "state_dir": str(home / "agent"),
            },
        }

    def begin(self, name: str, **env: str) -> None:
        """Start the process `server` or `agent`."""
        file = self.home / f"{name}.yaml"
        file.write_text(yaml.safe_dump(self.configs[name]))
        with (self.home / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [FEDSCHED, name, "run", "--config", file], stdout=log, stderr=log, env=self.env | env
            )

    def kill(self, name: str) -> None:
        """End a process as a crash of its machine would; what it started goes on."""
        self.processes[name].send_signal(signal.SIGKILL)
        self.processes[name].wait()

    def restart(self, name: str, **env: str) -> None:
        self.kill(name)
        self.begin(name, **env)

    def stop(self) -> None:
        for process in reversed(list(self.processes.values())):
            process.terminate()
        for process in self.processes.values():
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        etcd_server.stop(self.etcd.pid)

    def say(self) -> None:
        """Print what the processes said, for whoever reads about a test that failed."""
        for name in self.processes:
            sys.stdout.write(f"--- {name}\n{(self.home / f'{name}.log').read_text()[-8000:]}\n")

    # --- what a user does

    def call(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [FEDSCHED, *arguments], env=self.env, capture_output=True, text=True, timeout=LONG_S, check=False
        )

    def told(self, *arguments: str) -> str:
        """What a command that must succeed prints."""
        done = self.call(*arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def ask(self, *arguments: str) -> Any:
        return json.loads(self.told(*arguments, "-o", "json"))

    def submit(self, name: str, run: str, **fields: Any) -> str:
        """Submit a job of one worker and one server; `fields` go over its file."""
        job = {
            "name": name,
            "run": run,
            "resources": {"cpus": 1, "memory": "1.2GB"},
            "psResources": {"cpus": 1, "memory": "1.2GB"},
            "elastic": {"workers": "1..1", "ps": "1..1"},
            **fields,
        }
        path = self.home / f"{name}.yaml"
        path.write_text(yaml.safe_dump(job))
        return str(self.ask("submit", str(path))["job"]["status"]["job_id"])

    def status(self, job: str) -> JobStatus:
        """Asked without starting a command: this is polled."""
        with JobsClient(self.controller) as client:
            return client.get(JobId(job)).status

    def wait(self, job: str, what: str, holds: Callable[[JobStatus], bool], deadline_s: float = LONG_S) -> JobStatus:
        seen = JobStatus(JobId(job))

        def look() -> bool:
            nonlocal seen
            try:
                seen = self.status(job)
            except Unreachable:  # a controller that was killed comes back
                return False
            if holds(seen):
                return True
            assert seen.phase not in TERMINAL, f"it has ended, waited for: {what}"
            return False

        try:
            eventually(look, f"{what} (job {job})", deadline_s)
        except AssertionError as problem:
            raise AssertionError(f"{problem}\n{seen}\n{self.call('logs', job).stdout[-3000:]}") from None
        return seen

    def phase(self, job: str, *phases: JobPhase, deadline_s: float = LONG_S) -> JobStatus:
        return self.wait(job, f"it is {' or '.join(phases)}", lambda now: now.phase in phases, deadline_s)

    def trains_on(self, job: str) -> JobStatus:
        """Once it has taken further steps than it has now."""
        steps = self.status(job).progress.steps
        return self.wait(job, "it trains on", lambda now: now.progress.steps > steps)

    # --- what there is

    def attempt(self, job: str, number: int = 1) -> Attempt:
        return self.jobs.attempt(JobId(job), number)

    def starts(self, job: str, number: int = 1) -> dict[str, str]:
        """Which start each task of an attempt is from: another one after a restart."""
        return {str(task): record.request for task, record in self.attempt(job, number).records().items()}

    def is_served(self) -> bool:
        store = EtcdStore(self.etcd.address)
        try:
            return store.get(keys.cluster(self.cluster)) is not None
        except StoreUnavailable:  # a busy machine may take its time to connect
            return False
        finally:
            store.close()

    def replayed(self) -> Replayed:
        """What the agents recorded, done again by a fresh scheduler."""
        return replay(self.home / "agent" / "journal.jsonl")


@contextmanager
def serving(home: Path, agent: dict[str, Any], jobs: Path) -> Iterator[Served]:
    """A federation whose agent serves."""
    home.mkdir(parents=True, exist_ok=True)
    served = Served(home, agent, jobs)
    try:
        served.begin("server")
        served.begin("agent")
        eventually(served.is_served, "the agent serves its cluster", 90.0)
        yield served
    except BaseException:
        served.say()
        raise
    finally:
        served.stop()
