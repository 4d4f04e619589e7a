"""The executor with the product's own elastic runtime: real training, steered through its whole life."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from fedsched.core.events import JobAdopted, JobExited, JobScaled, JobStarted, ProgressReported, ScaleFailed
from fedsched.core.job import Range, Reason
from fedsched.executor import records
from fedsched.executor.orders import Programs
from fedsched.executor.records import LauncherRecord
from tests.executor.cluster import JOB, Cluster, placement
from tests.waiting import eventually

pytestmark = [pytest.mark.live, pytest.mark.timeout(240)]

SCRIPT = """
import os, threading, torch
from torch import nn
from torch.utils.data import TensorDataset
from fedsched import elastic

torch.manual_seed(0)
inputs = torch.randn(512, 8)
data = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
model = nn.Linear(8, 1)
session = elastic.join(model, torch.optim.SGD(model.parameters(), lr=0.01), seed=0)
for step, (x, y) in enumerate(session.batches(data, batch_size=32, epochs=int(os.environ["EPOCHS"]))):
    threading.Event().wait(0.02)  # a step of some length
    if step == int(os.environ.get("CRASH_AT", "-1")):
        raise RuntimeError("the data has a hole")
    session.step(nn.functional.mse_loss(model(x), y))
"""

NEWCOMERS_END = """torch.manual_seed(0)
if os.environ["FEDSCHED_TASK"] == "worker-1":
    raise RuntimeError("this machine has no data")
"""


@pytest.fixture
def training(cluster: Cluster, tmp_path: Path) -> Cluster:
    cluster.programs = Programs(launcher_idle_s=1.0)
    cluster.join_deadline_s = 60.0
    (tmp_path / "train.py").write_text(SCRIPT)
    return cluster


def test_a_real_job_survives_resizes_a_restarted_agent_and_a_killed_launcher(training: Cluster, tmp_path: Path) -> None:
    """What users get: one training run that goes on through all of this, and ends with a checkpoint to go on from."""
    spec = training.spec("python train.py", workdir=str(tmp_path), env=(("EPOCHS", "100000"),), grace_s=10.0)
    training.start(spec, placement(1, 1))
    training.wait_for(JobStarted, deadline_s=90.0)
    first = training.pids()

    training.scale(placement(3, 2))
    grown = training.wait_for(JobScaled)
    assert grown.placement == placement(3, 2)

    training.executor.close()
    training.open()
    training.adopt((spec, 1))
    assert training.wait_for(JobAdopted).placement == placement(3, 2)

    launcher = records.read(LauncherRecord, training.layout.launcher)
    assert launcher is not None
    os.kill(launcher.pid, signal.SIGKILL)
    mark = training.mark()
    training.scale(placement(1, 1))
    assert training.wait_for(JobScaled, after=mark).placement == placement(1, 1)
    assert training.pids() == first, "the tasks that stayed were never restarted"

    mark = training.mark()
    training.wait_for(ProgressReported, after=mark)
    training.stop(Reason.PREEMPTED, checkpoint=True, grace_s=20.0)
    stopped = training.wait_for(JobExited)
    assert stopped.reason is Reason.PREEMPTED
    assert stopped.progress is not None
    assert stopped.progress.checkpoint_step == stopped.progress.steps > 0
    steps = [event.progress.steps for event in training.all_of(ProgressReported)]
    assert steps == sorted(steps)

    mark = training.mark()
    training.start(spec, placement(2, 1), attempt=2)
    training.wait_for(JobStarted, after=mark, deadline_s=90.0)
    resumed = training.wait_for(ProgressReported, after=mark)
    assert resumed.progress.steps >= stopped.progress.checkpoint_step, "it goes on from the checkpoint"

    os.kill(training.pids(attempt=2)["worker-1"], signal.SIGKILL)
    killed = training.wait_for(JobExited, after=mark)
    assert (killed.reason, killed.attempt) == (Reason.TASK_KILLED, 2)
    assert killed.message.startswith("worker-1 was killed by SIGKILL")
    assert training.alive(attempt=2) == set()


def test_a_newcomer_that_ends_before_it_joins_is_not_waited_for(training: Cluster, tmp_path: Path) -> None:
    """A resize that fails at once can be tried elsewhere; the job trains on, and the reason is the script's own."""
    training.scale_deadline_s = 600.0
    (tmp_path / "train.py").write_text(SCRIPT.replace("torch.manual_seed(0)", NEWCOMERS_END))
    spec = training.spec("python train.py", workdir=str(tmp_path), env=(("EPOCHS", "100000"),), grace_s=5.0)
    training.start(spec, placement(1, 1))
    training.wait_for(JobStarted, deadline_s=90.0)
    training.scale(placement(2, 2))
    failed = training.wait_for(ScaleFailed, deadline_s=90.0)

    assert failed.placement == placement(1, 1)
    assert "worker-1" in failed.message
    assert "RuntimeError: this machine has no data" in failed.message
    mark = training.mark()
    training.wait_for(ProgressReported, after=mark)
    assert training.alive() == {"coordinator", "worker-0", "ps-0"}


def test_a_real_job_finishes_or_names_the_script_that_failed(training: Cluster, tmp_path: Path) -> None:
    """The end of the training is told from a crash, and a crash is told with the script's own words."""
    spec = training.spec("python train.py", workdir=str(tmp_path), env=(("EPOCHS", "3"),))
    training.start(spec, placement(2, 1))
    finished = training.wait_for(JobExited, deadline_s=90.0)
    mark = training.mark()
    broken = training.spec("python train.py", workdir=str(tmp_path), env=(("EPOCHS", "9"), ("CRASH_AT", "20")))
    training.start(broken, placement(2, 2), attempt=2)
    crashed = training.wait_for(JobExited, after=mark)

    assert (finished.reason, finished.message) == (Reason.FINISHED, "")
    assert finished.progress is not None
    assert finished.progress.epochs == pytest.approx(3.0)
    assert crashed.reason is Reason.USER_ERROR
    assert crashed.message.startswith("worker-")
    assert crashed.message.endswith("RuntimeError: the data has a hole")
    assert any("the data has a hole" in path.read_text() for path in training.executor.log_files(JOB))


def test_the_loaded_launcher_has_one_thread(training: Cluster) -> None:
    """A fork copies one thread only: a lock that another one held would stay locked in every task."""
    executor = training.executor
    eventually(lambda: training.layout.launcher.exists(), "the launcher has loaded", 90.0)
    launcher = records.read(LauncherRecord, training.layout.launcher)
    assert launcher is not None
    threads = Path(f"/proc/{launcher.pid}/status").read_text().partition("Threads:")[2].split()[0]
    executor.close()

    assert threads == "1"


def test_a_worker_that_leaves_long_before_the_others_have_taken_their_step_is_no_loss(
    training: Cluster, tmp_path: Path
) -> None:
    """With long steps it ends before the switch is told; half a minute later its job was given up."""
    training.settle_s = 1.0
    (tmp_path / "train.py").write_text(SCRIPT.replace("wait(0.02)", "wait(2.5 if session.is_chief else 0.02)"))
    spec = training.spec("python train.py", workdir=str(tmp_path), env=(("EPOCHS", "100000"),), grace_s=10.0)
    training.start(spec, placement(2, 1))
    training.wait_for(JobStarted, deadline_s=90.0)
    training.scale(placement(1, 1))
    training.wait_for(JobScaled, deadline_s=90.0)
    mark = training.mark()
    training.wait_for(ProgressReported, after=mark)
    training.wait_for(ProgressReported, after=training.mark())
    assert not training.all_of(JobExited)


def test_a_job_without_parameter_servers_is_started_resized_and_finished_like_any_other(
    training: Cluster, tmp_path: Path
) -> None:
    """Its script is the same: whether gradients go through servers is written in the job file only."""
    spec = training.spec("python train.py", workdir=str(tmp_path), env=(("EPOCHS", "10"),), ps=Range(0, 0))
    training.start(spec, placement(2, 0))
    training.wait_for(JobStarted, deadline_s=90.0)
    training.scale(placement(1, 0))
    assert training.wait_for(JobScaled).placement == placement(1, 0)
    finished = training.wait_for(JobExited, deadline_s=90.0)
    assert (finished.reason, finished.message) == (Reason.FINISHED, "")
