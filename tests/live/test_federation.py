"""The whole product on one machine: etcd, controller, aggregator, two agents, real elastic training jobs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from fedsched.adapters.rpc import JobsClient
from fedsched.addresses import free_address
from fedsched.core.ids import JobId
from fedsched.executor.processes import Identity, is_alive
from fedsched.runtime import codec
from fedsched.sim.replaying import replay
from tests.waiting import eventually

pytestmark = [pytest.mark.live, pytest.mark.xdist_group("federation"), pytest.mark.timeout(300)]

FEDSCHED = Path(sys.executable).with_name("fedsched")
LONG = 120.0
NODES = {name: [f"{name}-1", f"{name}-2"] for name in ("east", "west")}
ENDLESS = """
import threading, torch
from torch import nn
from torch.utils.data import TensorDataset
from fedsched import elastic

torch.manual_seed(0)
inputs = torch.randn(512, 8)
data = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
model = nn.Linear(8, 1)
session = elastic.join(model, torch.optim.SGD(model.parameters(), lr=0.01), seed=0)
for x, y in session.batches(data, batch_size=16, epochs=100000):
    threading.Event().wait(0.03)
    session.step(nn.functional.mse_loss(model(x), y))
"""
"""Trains for as long as a test wants, and leaves the processor to what the test waits for."""


class Federation:
    """A federation in a directory of its own, used as a person would: through the command line."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.env = {**os.environ, "FEDSCHED_HOME": str(home / "state"), "COLUMNS": "200"}
        self.controller = free_address()
        self.file = home / "federation.yaml"
        self.file.write_text(
            yaml.safe_dump(
                {
                    "name": "test",
                    "controller": self.controller,
                    "aggregator": free_address(),
                    "slot": {"length_s": 1.0, "decision_s_max": 0.8},
                    "promotion": {"accept": "at_once"},
                    "rounds": {"interval_s": 5.0, "quorum": 2, "deadline_s": 10.0, "samples_min": 1},
                    "clusters": [
                        {"name": name, "nodes": [{"name": machine, "cpus": 2} for machine in machines]}
                        for name, machines in NODES.items()
                    ],
                }
            )
        )

    @property
    def state(self) -> Path:
        return self.home / "state" / "test"

    def call(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [FEDSCHED, *arguments], env=self.env, capture_output=True, text=True, timeout=LONG, check=False
        )

    def ask(self, *arguments: str) -> Any:
        done = self.call(*arguments, "-o", "json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def submit(self, **fields: Any) -> str:
        """Submit a job of the digits example; `fields` go over its file."""
        job = {
            "name": "digits",
            "type": "mlp",
            "run": f"{sys.executable} -m fedsched.examples.digits_mlp",
            "env": {"EPOCHS": "4"},
            "resources": {"cpus": 1, "memory": "0.5GB"},
            "elastic": {"workers": "1..2", "ps": "1..1"},
            "estimate": {"epochs": 4},
            **fields,
        }
        path = self.home / f"{job['name']}.yaml"
        path.write_text(yaml.safe_dump(job))
        return str(self.ask("submit", str(path))["job"]["status"]["job_id"])

    def endless(self, name: str) -> str:
        """Submit a job that ends with its test only."""
        script = self.home / "endless.py"
        script.write_text(ENDLESS)
        return self.submit(name=name, run=f"{sys.executable} {script}", env={}, estimate={"epochs": 100000})

    def status(self, job: str) -> dict[str, Any]:
        """Asked without starting a command: this is polled."""
        with JobsClient(self.controller) as client:
            found: dict[str, Any] = json.loads(codec.dumps(client.get(JobId(job)).status))
        return found

    def wait(self, job: str, holds: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
        seen: list[dict[str, Any]] = [{}]

        def look() -> bool:
            seen[0] = self.status(job)
            return holds(seen[0])

        try:
            eventually(look, what, LONG)
        except AssertionError as problem:
            raise AssertionError(f"{problem}\n{seen[0]}\n{self.call('logs', job).stdout[-3000:]}") from None
        return seen[0]

    def succeeded(self, job: str) -> dict[str, Any]:
        status = self.wait(job, lambda now: now["phase"] in ("Succeeded", "Failed"), f"job {job} ends")
        assert status["phase"] == "Succeeded", status
        return status

    def pid(self, name: str) -> int:
        state = json.loads((self.state / "federation.json").read_text())
        return int(next(process["pid"] for process in state["processes"] if process["name"] == name))

    def tasks(self, job: str) -> set[int]:
        """Pids of the job's living processes: what was ever started for it and is still there."""
        files = sorted(self.state.glob(f"clusters/*/executor/jobs/{job}/attempt-*/tasks/*.json"))
        records = [json.loads(path.read_text()) for path in files if not path.name.endswith(".exit.json")]
        return {record["pid"] for record in records if is_alive(Identity(record["pid"], record["started"]))}


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    made = Federation(tmp_path_factory.mktemp("federation"))
    try:
        done = made.call("up", str(made.file))
        assert done.returncode == 0, done.stderr
        yield made
    finally:
        down = made.call("down")
        left = [
            process.pid
            for process in psutil.process_iter(["cmdline"])
            if str(made.home) in " ".join(process.info["cmdline"] or [])
        ]
    assert down.returncode == 0, down.stderr
    assert left == [], f"`down` left processes: {left}"


def test_a_job_trains_to_its_end_and_its_story_is_legal(federation: Federation) -> None:
    job = federation.submit()
    status = federation.succeeded(job)
    assert status["progress"]["accuracy"] > 0.5
    steps = federation.ask("events", "--job", job)
    assert [step["seq"] for step in steps] == list(range(1, len(steps) + 1))
    assert steps[-1]["target"] == "Succeeded"
    assert [step["target"] for step in steps].count("Starting") == 1


def test_a_job_is_one_trace_from_the_submission_to_its_completion(federation: Federation) -> None:
    job = federation.submit(name="traced")
    federation.succeeded(job)
    wanted = {"submit", "dispatch", "agent.accept", "job.start", "task.start", "job.complete"}
    names: set[str] = set()

    def traced() -> bool:
        spans = federation.ask("trace", "show", job)
        names.update(span["name"] for span in spans)
        assert len({span["trace_id"] for span in spans}) == 1
        return wanted <= names

    eventually(traced, f"all of {wanted} in the trace, there: {names}", LONG)


def test_two_clusters_gradients_make_a_policy_that_both_then_run(federation: Federation) -> None:
    """Federation is the product's promise; a version nobody runs is none."""

    def both_run_a_new_version() -> bool:
        with JobsClient(federation.controller) as client:
            versions = [cluster.record.policy_version for cluster in client.clusters() if cluster.record is not None]
        return len(versions) == 2 and min(versions) >= 2

    jobs = [federation.submit(name=f"learn-{index}", env={"EPOCHS": "8"}, estimate={"epochs": 8}) for index in range(4)]
    eventually(both_run_a_new_version, "both agents run version 2 or newer", LONG)
    rounds = federation.ask("federation", "rounds")
    assert any(set(NODES) <= {part["cluster"] for part in made["contributions"]} for made in rounds), rounds
    for job in jobs:
        federation.succeeded(job)


def test_a_crashing_script_fails_alone_and_says_why(federation: Federation) -> None:
    script = federation.home / "crash.py"
    script.write_text("raise ValueError('the data is not there')\n")
    bad = federation.submit(name="crash", run=f"{sys.executable} {script}")
    good = federation.submit(name="fine")
    status = federation.wait(bad, lambda now: now["phase"] == "Failed", "the crashing job fails")
    assert status["reason"] == "StartFailed", "it never took a step"
    assert "the data is not there" in status["message"]
    federation.succeeded(good)
    eventually(lambda: federation.tasks(bad) == set(), "no task of the failed job is left")


def test_a_cancelled_job_leaves_no_process(federation: Federation) -> None:
    job = federation.endless("cancelled")
    federation.wait(job, lambda now: now["phase"] == "Running", "the job runs")
    assert federation.tasks(job), "the test would see no process"
    assert federation.call("cancel", job).returncode == 0
    federation.wait(job, lambda now: now["phase"] == "Cancelled", "the job is cancelled")
    assert federation.tasks(job) == set()


@pytest.mark.parametrize("victims", [("agent",), ("etcd", "controller", "aggregator")], ids=["agent", "server side"])
def test_killed_processes_cost_no_job_and_double_none(federation: Federation, victims: tuple[str, ...]) -> None:
    """A control plane that dies must be nobody's problem but its operator's."""
    job = federation.endless("survives")
    before = federation.wait(job, lambda now: now["progress"]["steps"] > 0, "the job trains")
    tasks = federation.tasks(job)
    assert len(tasks) >= 3, "a coordinator, a worker and a parameter server"
    for victim in victims:
        os.kill(federation.pid(f"agent {before['cluster']}" if victim == "agent" else victim), signal.SIGKILL)
    assert federation.call("up", str(federation.file)).returncode == 0
    steps = federation.status(job)["progress"]["steps"]
    after = federation.wait(job, lambda now: now["progress"]["steps"] > steps, "the job trains on")
    try:
        assert after["attempt"] == 1
        assert len(tasks & federation.tasks(job)) >= 3, "its tasks were started again"
    finally:
        assert federation.call("cancel", job).returncode == 0
        federation.wait(job, lambda now: now["phase"] == "Cancelled", "the job is cancelled")


def test_jobs_that_run_when_the_federation_is_stopped_go_on_from_a_checkpoint_after_it_is_up_again(
    federation: Federation,
) -> None:
    """Maintenance of the machine must cost a job seconds, not its attempts."""
    job = federation.endless("resumed")
    before = federation.wait(job, lambda now: now["progress"]["steps"] > 50, "the job trains")
    assert federation.call("down").returncode == 0
    assert federation.tasks(job) == set()
    assert federation.call("up", str(federation.file)).returncode == 0
    after = federation.wait(
        job, lambda now: now["attempt"] == 2 and now["progress"]["steps"] > 0, "the second attempt trains"
    )
    assert after["failures"] == 0
    assert after["progress"]["steps"] >= before["progress"]["steps"]
    assert federation.call("cancel", job).returncode == 0
    federation.wait(job, lambda now: now["phase"] == "Cancelled", "the job is cancelled")


def test_what_the_agents_did_is_repeated_by_a_fresh_scheduler(federation: Federation) -> None:
    """A journal that does not replay explains nothing. Runs last: it reads what all tests before it caused."""
    for name in NODES:
        found = replay(federation.state / "clusters" / name / "journal.jsonl")
        assert found.skipped == 0
        assert found.agents >= 2, "agents were killed and restarted before"
        assert found.events > 30, "a quick machine lives through the stories in few slots"
        assert found.decisions > 3
