"""Jobs that do what they should not: each ends, or goes on, with a reason that users can read, and leaves nothing."""

from __future__ import annotations

import itertools
import math
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from fedsched.core.events import JobExited, JobScaled, JobStarted, ProgressReported
from fedsched.core.job import Progress, Reason
from fedsched.executor import hearing
from fedsched.executor.orders import Programs
from tests.executor.cluster import JOB, Cluster, placement, stand_in_programs
from tests.waiting import eventually

pytestmark = [pytest.mark.live, pytest.mark.timeout(240)]

SCRIPT = """
import os, socket, subprocess, sys, time, torch
from torch import nn
from torch.utils.data import TensorDataset
from fedsched import elastic

torch.manual_seed(0)
inputs = torch.randn(2048, 8)
data = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
model = nn.Sequential(nn.Linear(8, int(os.environ.get("WIDTH", "8"))), nn.Linear(int(os.environ.get("WIDTH", "8")), 1))
session = elastic.join(model, torch.optim.SGD(model.parameters(), lr=0.01), seed=0)
for step, (x, y) in enumerate(session.batches(data, batch_size=32, epochs=int(os.environ.get("EPOCHS", "1000")))):
    time.sleep(0.01)
    loss = nn.functional.mse_loss(model(x), y)
    BAD
    session.step(loss)
"""


@pytest.fixture
def training(cluster: Cluster) -> Cluster:
    cluster.programs = Programs(launcher_idle_s=1.0)
    cluster.join_deadline_s = 90.0
    cluster.settle_s = 5.0
    return cluster


def start(cluster: Cluster, folder: Path, bad: str, workers: int = 1, **env: str) -> None:
    (folder / "train.py").write_text(SCRIPT.replace("BAD", bad.replace("\n", "\n    ")))
    spec = cluster.spec(
        "python train.py", workdir=str(folder), env=tuple(env.items()), grace_s=5.0, checkpoint_every_s=0.5
    )
    cluster.start(spec, placement(workers, 1))


def test_a_script_that_ends_well_before_the_training_does_is_told_from_one_that_finished(
    training: Cluster, tmp_path: Path
) -> None:
    """A `break` too much must not count as a trained model."""
    start(training, tmp_path, "if step == 20: sys.exit(0)")

    exited = training.wait_for(JobExited, deadline_s=120.0)

    assert exited.reason is Reason.USER_ERROR, exited
    assert exited.message.startswith("worker-0: the script ended after ")
    assert training.alive() == set()


def test_a_script_that_hangs_says_so_while_it_hangs_and_ends_at_its_deadline(
    training: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPUs that wait for nothing are the dearest of all; their user must see it before the bill."""
    monkeypatch.setattr(hearing, "IDLE_S", 1.0)
    start(training, tmp_path, "if step == 20: time.sleep(600)", FEDSCHED_STALL_S="10")
    training.wait_for(JobStarted, deadline_s=120.0)

    exited = training.wait_for(JobExited, deadline_s=60.0)

    idle = sorted({event.progress.idle_s for event in training.all_of(ProgressReported) if event.progress.idle_s})
    assert len(idle) >= 3
    assert all(later >= 2 * earlier for earlier, later in itertools.pairwise(idle)), idle
    assert exited.reason is Reason.USER_ERROR, exited
    assert "no step ended within 10 s" in exited.message
    assert training.alive() == set()


def test_a_script_that_joins_and_never_asks_for_a_batch_is_told_what_it_left_out(
    training: Cluster, tmp_path: Path
) -> None:
    """Told to call what it has called, its user would look in the wrong place."""
    training.join_deadline_s = 15.0
    (tmp_path / "train.py").write_text(
        SCRIPT.partition("for step")[0] + "print('joined', flush=True)\ntime.sleep(600)\n"
    )
    training.start(training.spec("python train.py", workdir=str(tmp_path), grace_s=2.0), placement(1, 1))

    exited = training.wait_for(JobExited, deadline_s=90.0)

    assert exited.reason is Reason.START_FAILED, exited
    assert "worker-0 did not join" in exited.message
    assert "asks the session for its first batch" in exited.message
    assert training.alive() == set()


def test_losses_that_are_no_numbers_reach_the_user_and_end_nothing(training: Cluster, tmp_path: Path) -> None:
    """Whether to stop is the user's decision; not to know is not."""
    start(training, tmp_path, "if step >= 10: loss = loss * float('nan')", EPOCHS="1")

    exited = training.wait_for(JobExited, deadline_s=120.0)

    assert exited.reason is Reason.FINISHED, exited
    assert exited.progress is not None
    assert exited.progress.loss is not None
    assert math.isnan(exited.progress.loss)


def test_steps_that_run_backwards_undo_nothing_and_are_told(cluster: Cluster) -> None:
    """The scheduler pays for progress: a job must not be paid twice, nor lose what it has done."""
    cluster.programs = stand_in_programs(steps=60, turns_back_at=40)
    cluster.start(cluster.spec(), placement(1, 1))

    exited = cluster.wait_for(JobExited)

    steps = [event.progress.steps for event in cluster.all_of(ProgressReported)]
    assert steps == sorted(steps)
    assert exited.reason is Reason.FINISHED
    assert "the job reported step" in exited.message


def test_children_of_a_script_end_with_it_and_so_do_their_ports(training: Cluster, tmp_path: Path) -> None:
    """A data loader that outlives its job holds memory, and the port that the next attempt wants."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    bad = f"""if step == 5:
    child = "import socket, time; s = socket.create_server(('127.0.0.1', {port})); time.sleep(600)"
    subprocess.Popen([sys.executable, "-c", child], start_new_session=True)
if step == 60: raise RuntimeError("the data has a hole")"""
    start(training, tmp_path, bad)

    exited = training.wait_for(JobExited, deadline_s=120.0)

    assert (exited.reason, exited.message.endswith("the data has a hole")) == (Reason.USER_ERROR, True), exited
    socket.create_server(("127.0.0.1", port)).close()


def test_an_address_that_is_taken_is_told_in_the_scripts_own_words(training: Cluster, tmp_path: Path) -> None:
    """Two workers on one machine that both open the port of a profiler: a common mistake, and a puzzling one."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        bad = f"socket.create_server(('127.0.0.1', {taken.getsockname()[1]}))"
        start(training, tmp_path, bad)
        exited = training.wait_for(JobExited, deadline_s=120.0)

    assert exited.reason is Reason.START_FAILED, exited
    assert "Address already in use" in exited.message
    assert training.alive() == set()


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[None]:
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_full_disk_at_a_checkpoint_costs_the_checkpoint_and_not_the_job(training: Cluster, tmp_path: Path) -> None:
    """Others' files must not end a training; but its user must not count on checkpoints that are not there."""
    with small_disk(training.layout.attempt(JOB, 1).job_dir / "checkpoint", "256k"):
        start(training, tmp_path, "pass", WIDTH="100000")
        training.wait_for(JobStarted, deadline_s=120.0)
        mark = training.mark()
        eventually(lambda: _steps(training, mark) > 200, "it trains on", 60.0)
        training.stop(Reason.CANCELLED_BY_USER, checkpoint=False, grace_s=2.0)
        exited = training.wait_for(JobExited)

    assert exited.reason is Reason.CANCELLED_BY_USER
    assert exited.progress is not None
    assert exited.progress.checkpoint_step == -1
    complaints = [event.progress.complaint for event in training.all_of(ProgressReported)]
    assert any("could not be written" in words and "No space left on device" in words for words in complaints), (
        complaints
    )
    assert b"No space left on device" in (training.attempt.logs / "coordinator.log").read_bytes()
    assert training.alive() == set()


@pytest.mark.parametrize("env", [{}, {"PYTHONHASHSEED": "0"}], ids=["forked", "fresh"])
def test_a_disk_that_is_full_for_checkpoints_and_logs_alike_costs_a_job_nothing_it_has(
    training: Cluster, tmp_path: Path, env: dict[str, str]
) -> None:
    """They mostly lie on one disk: then a script's own `print` must not end it either, and both are told."""
    with small_disk(training.layout.attempt(JOB, 1).job_dir, "2m"):
        start(training, tmp_path, "print('step', step, 'x' * 200)", 1, **env)
        training.wait_for(JobStarted, deadline_s=120.0)
        filler = training.layout.attempt(JOB, 1).job_dir / "filler"
        with suppress(OSError), filler.open("wb") as file:
            while True:
                file.write(bytes(4096))
        mark = training.mark()
        eventually(lambda: "could not be written" in _newest(training, mark).complaint, "its user can read of it", 60.0)
        unlogged = "worker-0: its log cannot be written, what it prints is lost: No space left on device"
        eventually(lambda: unlogged in _newest(training, mark).complaint, "and of the log", 60.0)
        full = _newest(training, mark)
        eventually(lambda: _newest(training, mark).steps > full.steps + 200, "it trains on", 60.0)
        filler.unlink()
        eventually(lambda: _newest(training, mark).checkpoint_step > full.steps, "there are checkpoints again", 60.0)
        assert _newest(training, mark).complaint == unlogged, "what was lost stays lost"
        training.stop(Reason.CANCELLED_BY_USER, checkpoint=False, grace_s=2.0)
        assert training.wait_for(JobExited).reason is Reason.CANCELLED_BY_USER
    told = [event.progress.complaint for event in training.all_of(ProgressReported)]
    assert len([words for words, _ in itertools.groupby(unlogged in words for words in told) if words]) == 1


def _newest(cluster: Cluster, mark: int) -> Progress:
    told = [event.progress for event in cluster.events[mark:] if isinstance(event, ProgressReported)]
    return told[-1] if told else Progress()


def test_a_disk_that_is_full_while_a_job_shrinks_costs_it_nothing(training: Cluster, tmp_path: Path) -> None:
    """Neither what nobody could put on record, the leaver's end and where the others count now, nor the attempt."""
    with small_disk(training.root, "32m"):
        start(training, tmp_path, "time.sleep(2.5 if session.is_chief else 0)", workers=2)
        training.wait_for(JobStarted, deadline_s=120.0)
        filler = training.root / "filler"
        with suppress(OSError), filler.open("wb") as file:
            while True:
                file.write(bytes(4096))
        mark = training.mark()
        training.scale(placement(1, 1, node="n2"))
        scaled = training.wait_for(JobScaled, after=mark, deadline_s=120.0)
        assert scaled.placement == placement(1, 1, node="n2")
        steps = _steps(training, 0)
        eventually(lambda: _steps(training, mark) > steps, "it trains on", 60.0)
        filler.unlink()
        eventually(lambda: training.record("worker-0").node == "n2", "what an adoption has to know is on record", 20.0)
        training.stop(Reason.CANCELLED_BY_USER, checkpoint=False, grace_s=2.0)
        assert training.wait_for(JobExited).reason is Reason.CANCELLED_BY_USER


def _steps(cluster: Cluster, mark: int) -> int:
    return max(
        (event.progress.steps for event in cluster.events[mark:] if isinstance(event, ProgressReported)), default=0
    )
