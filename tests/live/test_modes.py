"""Jobs that train otherwise, over a whole federation: without servers (all-reduce), and asynchronously."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from fedsched.core.job import Allocation, JobPhase, Reason
from fedsched.executor.local import shut_down
from tests.live.serving import Served, serving

pytestmark = [pytest.mark.live, pytest.mark.xdist_group("modes"), pytest.mark.timeout(400)]

TRAIN = """
import os, threading, torch
from torch import nn
from torch.utils.data import TensorDataset
from fedsched import elastic

torch.manual_seed(0)
inputs = torch.randn(512, 8)
data = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
session = elastic.join(model, optimizer, seed=0, asynchronous=os.environ["MODE"] == "asynchronous")
for x, y in session.batches(data, batch_size=16, epochs=int(os.environ["EPOCHS"])):
    threading.Event().wait(0.001 if os.path.exists("fast") else 0.05)
    session.step(nn.functional.mse_loss(model(x), y))
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    home = tmp_path_factory.mktemp("modes")
    (home / "train.py").write_text(TRAIN)
    config = {"cluster": "east", "nodes": [{"name": "n1", "cpus": 3, "memory_gb": 6}], "policy": {"name": "drf"}}
    with serving(home, config, home / "agent" / "executor") as served:
        try:
            yield served
        finally:
            served.kill("agent")
            shut_down(served.jobs.root, grace_s=1.0)


@pytest.mark.parametrize(("mode", "ps"), [("synchronous", 0), ("asynchronous", 1)])
def test_a_job_of_each_mode_shrinks_and_grows_while_it_trains_and_ends_by_itself(
    served: Served, mode: str, ps: int
) -> None:
    """What a job is made of is its user's business; the cluster resizes them all alike."""
    fast = served.home / "fast"
    fast.unlink(missing_ok=True)
    run = f"{sys.executable} train.py"
    most = 3 - ps
    job = served.submit(
        f"{mode}-{ps}",
        run,
        env={"MODE": mode, "EPOCHS": "60"},
        resources={"cpus": 1, "memory": "1GB"},
        elastic={"workers": f"1..{most}", "ps": ps},
    )
    served.wait(job, "it has all workers", lambda now: now.allocation == Allocation(most, ps))
    served.phase(job, JobPhase.RUNNING)
    guest = served.submit("guest", run, env={"MODE": "synchronous", "EPOCHS": "100"}, elastic={"workers": 1, "ps": 0})
    served.phase(guest, JobPhase.RUNNING)
    small = served.wait(job, "it made room", lambda now: now.phase is JobPhase.RUNNING and now.resizes == 1)
    assert small.allocation == Allocation(most - 1, ps)
    served.trains_on(job)
    served.told("cancel", guest)
    grown = served.wait(job, "it grew again", lambda now: now.phase is JobPhase.RUNNING and now.resizes == 2)
    assert (grown.allocation, grown.attempt) == (Allocation(most, ps), 1)
    served.trains_on(job)
    fast.touch()
    ended = served.phase(job, JobPhase.SUCCEEDED, JobPhase.FAILED)
    assert (ended.phase, ended.attempt, ended.message) == (JobPhase.SUCCEEDED, 1, "")
    assert ended.progress.epochs == pytest.approx(60, abs=0.01)


def test_what_cannot_train_asynchronously_says_so_at_once_and_is_not_tried_again(served: Served) -> None:
    """Workers that reduce among themselves wait for each other: whoever wants both must read which one to give up."""
    env = {"MODE": "asynchronous", "EPOCHS": "60"}
    job = served.submit("neither", f"{sys.executable} train.py", env=env, elastic={"workers": 1, "ps": 0})
    failed = served.phase(job, JobPhase.FAILED)
    assert (failed.reason, failed.attempt) == (Reason.START_FAILED, 1)
    assert failed.message == "workers without parameter servers cannot train asynchronously"


@pytest.mark.parametrize("ps", [0, 1])
def test_an_agent_that_is_killed_in_the_middle_of_a_resize_costs_the_job_nothing(served: Served, ps: int) -> None:
    """The job trains on in the size that it has, the resize is settled, and a later one is carried out."""
    (served.home / "fast").unlink(missing_ok=True)
    run = f"{sys.executable} train.py"
    env = {"MODE": "synchronous", "EPOCHS": "1000"}
    guest = served.submit("guest", run, env=env, elastic={"workers": 1, "ps": 0})
    served.phase(guest, JobPhase.RUNNING)
    job = served.submit(f"resized-{ps}", run, env=env, elastic={"workers": f"1..{3 - ps}", "ps": ps})
    served.phase(job, JobPhase.RUNNING)
    first = served.starts(job)
    assert served.status(job).allocation == Allocation(2 - ps, ps)

    served.told("cancel", guest)
    served.wait(job, "it is being resized", lambda now: now.phase is JobPhase.RESIZING)
    served.restart("agent")
    served.trains_on(job)
    settled = served.wait(
        job,
        "it is as large as it may be",
        lambda now: now.phase is JobPhase.RUNNING and now.allocation.workers == 3 - ps,
    )
    assert settled.attempt == 1
    assert {task: served.starts(job)[task] for task in first} == first, "tasks were started again"
    served.trains_on(job)
    served.told("cancel", job)
    served.phase(job, JobPhase.CANCELLED)
    assert served.replayed().skipped == 0
