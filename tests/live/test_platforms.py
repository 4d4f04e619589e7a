"""A whole federation whose agent drives what a platform team has: Slurm, Kubernetes, Ray; and processes, to compare.

etcd, controller, agent and every command are what a user runs, the agents' configurations are the shipped ones with
other addresses and folders, and the jobs train for real.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedsched.core.job import Allocation, JobPhase, Reason
from tests.executor.cluster import Place, told_to_run
from tests.executor.on_kubernetes import NAMESPACE, OnKubernetes
from tests.executor.on_ray import OnRay
from tests.executor.slurm import OnSlurm
from tests.live.serving import Served, Tasks, serving
from tests.waiting import eventually

pytestmark = [pytest.mark.live, pytest.mark.timeout(500)]

DEPLOYMENTS = Path(__file__).parents[2] / "deployments"
PLACES = [
    pytest.param("kubernetes", marks=pytest.mark.xdist_group("kubernetes")),
    pytest.param("slurm", marks=pytest.mark.xdist_group("slurm")),
    pytest.param("ray", marks=pytest.mark.xdist_group("ray")),
]
TRAIN = """
import os, threading, torch
from torch import nn
from torch.utils.data import TensorDataset
from fedsched import elastic

torch.manual_seed(0)
inputs = torch.randn(512, 8)
data = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
model = nn.Linear(8, 1)
print("the data is there", flush=True)
session = elastic.join(model, torch.optim.SGD(model.parameters(), lr=0.01), seed=0)
for step, (x, y) in enumerate(session.batches(data, batch_size=32, epochs=100_000)):
    threading.Event().wait(0.02)  # a step of some length
    session.step(nn.functional.mse_loss(model(x), y))
"""
CRASH = """
    if os.path.exists("crash"):
        raise RuntimeError("the data has a hole")
"""


def shipped(kind: str) -> dict[str, Any]:
    """The agent's configuration that comes with the product."""
    documents = list(yaml.safe_load_all((DEPLOYMENTS / kind / "agent.yaml").read_text()))
    if kind != "kubernetes":
        found: dict[str, Any] = documents[0]
        return found
    config = next(document for document in documents if document["kind"] == "ConfigMap")
    return dict(yaml.safe_load(config["data"]["agent.yaml"]))


def agent_on(place: Place, home: Path) -> dict[str, Any]:
    """The shipped configuration, led to the cluster of the tests."""
    match place:
        case OnSlurm():
            config = shipped("slurm")
            config["executor"] |= {"partition": "usual"}
        case OnKubernetes():
            config = shipped("kubernetes")
            config["executor"] |= {"mount": str(home), "python": sys.executable, "namespace": NAMESPACE}
            config["executor"] |= {"kubeconfig": str(place.kube.kubeconfig)}
        case OnRay():
            config = shipped("ray")
            config["executor"] |= {"address": place.ray.address}
        case _:
            raise AssertionError(place)
    # Slurm gives coordinators a whole processor in any case; with the same elsewhere there is as much room.
    config["executor"] |= {"directory": str(home / "shared"), "coordinator": {"cpus": 1}}
    config["nodes"] = [{"name": name, "cpus": cpus, "memory_gb": 6} for name, cpus in (("n1", 3), ("n2", 2))]
    return config


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest) -> Place:
    found: Place = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def served(place: Place, tmp_path: Path) -> Iterator[Served]:
    (tmp_path / "train.py").write_text(TRAIN)
    config = agent_on(place, tmp_path)
    with serving(tmp_path, config | {"policy": {"name": "drf"}}, tmp_path / "shared" / config["cluster"]) as served:
        if isinstance(place, OnRay):
            place.namespace = f"fedsched-{served.cluster}"
        try:
            yield served
        finally:
            served.kill("agent")
            place.end(served.jobs.root)


def test_a_job_lives_its_whole_life_on_what_the_platform_team_has(served: Served, place: Place) -> None:
    """It starts, makes room for another one (without servers, this one), survives the agent's death, grows, and ends;
    nothing is started twice and nothing stays behind."""
    run = f"{sys.executable} train.py"
    job = served.submit("elastic", run, elastic={"workers": "1..2", "ps": "1..1"})
    served.phase(job, JobPhase.RUNNING)
    served.wait(job, "it has both workers", lambda now: now.allocation == Allocation(2, 1))
    first = served.starts(job)

    guest = served.submit("guest", run, elastic={"workers": 1, "ps": 0})
    served.phase(guest, JobPhase.RUNNING)
    small = served.wait(job, "it made room", lambda now: now.phase is JobPhase.RUNNING and now.resizes == 1)
    assert small.allocation == Allocation(1, 1)

    assert "the data is there" in served.told("logs", job)
    rows = {row["status"]["job_id"]: row["status"]["phase"] for row in served.ask("queue")}
    assert rows == {job: "Running", guest: "Running"}

    served.restart("agent")
    served.trains_on(job)
    served.trains_on(guest)
    served.told("cancel", guest)
    assert served.phase(guest, JobPhase.CANCELLED).attempt == 1
    grown = served.wait(job, "it grew again", lambda now: now.phase is JobPhase.RUNNING and now.resizes == 2)
    assert (grown.attempt, grown.allocation) == (1, Allocation(2, 1))
    kept = {"coordinator", "worker-0", "ps-0"}
    now = served.starts(job)
    assert {task: now[task] for task in kept} == {task: first[task] for task in kept}, "they were started again"

    served.told("cancel", job)
    assert served.phase(job, JobPhase.CANCELLED).reason is Reason.CANCELLED_BY_USER
    eventually(lambda: not told_to_run(served.attempt(job)), "no process of the job is left", 30.0)
    served.processes["agent"].terminate()
    assert served.processes["agent"].wait(30) == 0
    assert served.replayed().agents == 2


def test_what_the_platform_takes_away_goes_on_elsewhere_and_what_the_user_broke_does_not(
    served: Served, place: Place, tmp_path: Path
) -> None:
    """Preemption costs the user nothing but time; a script that crashes is told in its own words, and not tried again
    for ever."""
    (tmp_path / "train.py").write_text(TRAIN + CRASH)
    run = f"{sys.executable} train.py"
    job = served.submit(
        "taken", run, elastic={"workers": 1, "ps": 0}, limits={"maxAttempts": 1}, checkpoint={"every": 1}
    )
    before = served.wait(job, "there is a checkpoint", lambda now: now.progress.checkpoint_step > 0)

    place.preempt(Tasks(served.attempt(job)), "worker-0")
    after = served.wait(job, "it trains again", lambda now: now.attempt == 2 and now.phase is JobPhase.RUNNING)
    assert after.failures == 0
    assert after.progress.steps >= before.progress.checkpoint_step
    served.trains_on(job)
    told = served.ask("events", "--job", job)
    assert "Preempted" in {step["reason"] for step in told}

    (tmp_path / "crash").touch()
    failed = served.phase(job, JobPhase.FAILED)
    assert failed.reason is Reason.ATTEMPTS_EXHAUSTED
    # Its own word comes first where its process takes long to end.
    assert re.search(r"worker-0( failed with exit code 1)?: RuntimeError: the data has a hole", failed.message)
    assert "the data has a hole" in served.told("explain", job)
