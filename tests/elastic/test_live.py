"""Whole jobs in real processes: what a resize, a restart or a death does to the training."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import runpy
import shutil
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
import safetensors.torch
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from fedsched.core.ids import stream
from fedsched.elastic.checkpoint import Checkpoint, verified
from fedsched.elastic.shard import read_blocks
from fedsched.pb import training_pb2 as pb
from fedsched.pb.training_pb2_grpc import MembershipStub
from tests.elastic.conftest import DEADLINE_S, SCRIPT, Job

pytestmark = [pytest.mark.live, pytest.mark.xdist_group("elastic")]

JobOf = Callable[..., Job]
FIRST: tuple[str, ...] = ("ps-0", "worker-0")
RESIZES = 6


def parameters(path: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(path)


def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **env: str) -> dict[str, torch.Tensor]:
    """The same script run by hand: the reference."""
    for name, value in {"OUT": str(tmp_path), **env}.items():
        monkeypatch.setenv(name, value)
    assert "FEDSCHED_COORDINATOR" not in os.environ
    runpy.run_path(str(SCRIPT), run_name="__main__")
    return parameters(tmp_path / "alone.safetensors")


def assert_same(mine: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> None:
    assert mine.keys() == reference.keys()
    assert all(value.isfinite().all() for value in reference.values()), "a training that diverges proves nothing"
    for name in sorted(set(mine) - {"seen"}):
        torch.testing.assert_close(mine[name], reference[name], rtol=1e-9, atol=1e-11, msg=name)


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adagrad"])
def test_a_job_of_one_worker_computes_exactly_what_the_script_does_by_hand(
    job_of: JobOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str
) -> None:
    """Who develops a script by hand must get the same model, bit by bit, when it becomes a job."""
    reference = alone(tmp_path, monkeypatch, OPTIMIZER=optimizer)
    job = job_of(OPTIMIZER=optimizer).start("ps-0", "ps-1", "worker-0")

    assert set(job.ended().values()) == {0}, job.logs()
    result = job.result()
    assert result["phase"] == "FINISHED"
    assert (result["steps"], result["epochs"], result["checkpoint_step"]) == (70, 10.0, 70)
    assert result["accuracy"] == 0.5
    mine = parameters(job.out / "worker-0.safetensors")
    for name, value in reference.items():
        assert torch.equal(mine[name], value), name


TOGETHER: dict[str, str] = {}
APART = {f"worker-{n}": f"host-{n}" for n in range(4)} | {f"ps-{n}": f"host-{9 + n}" for n in range(4)}
MIXED = {"worker-1": "away", "ps-1": "away", "ps-2": "far"}
LARGE = 50_000
"""Width of a model of which half travels for longer than a step takes."""


@pytest.mark.parametrize(
    ("seed", "machines", "optimizer", "width"),
    [
        (1, TOGETHER, "adam", 6),
        (2, TOGETHER, "sgd", 5000),
        (3, APART, "adam", 5000),
        (4, MIXED, "adam", 5000),
        (5, APART, "sgd", LARGE),
    ],
)
def test_a_run_resized_at_drawn_moments_ends_with_the_parameters_of_an_unscaled_one(
    job_of: JobOf,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
    machines: dict[str, str],
    optimizer: str,
    width: int,
) -> None:
    """A scheduler may resize a job as it likes only if the user's result does not depend on it.

    Whether tasks share memory or exchange streams, and whether tensors are small or cut for several servers.
    """
    env = {"EPOCHS": "20" if width == LARGE else "45", "OPTIMIZER": optimizer, "WIDTH": str(width)}
    reference = alone(tmp_path, monkeypatch, **env)
    trace = tmp_path / "trace.jsonl"
    job = job_of(**env, HURRY=str(tmp_path / "hurry"), FEDSCHED_TRACE_FILE=str(trace))
    job.machines = machines
    job.start(*FIRST)
    members: tuple[str, ...] = FIRST
    for step, members in _schedule(seed):
        job.until_step(step)
        reply = job.scale(*members)
        assert reply.ok, reply.message
        assert list(reply.tasks) == sorted(members)
        assert 0.0 <= reply.pause_s < 10.0
    (tmp_path / "hurry").touch()

    assert set(job.ended().values()) == {0}, job.logs()
    assert job.result()["phase"] == "FINISHED"
    stayed = {task for task in members if task.startswith("worker")}
    for worker in sorted(stayed):
        assert_same(parameters(job.out / f"{worker}.safetensors"), reference)
    # Whoever left had only half-trained parameters, and its script must not have gone on with them.
    assert {path.stem for path in job.out.glob("*.safetensors")} == stayed
    spans = Counter(json.loads(line)["name"] for line in trace.read_text().splitlines())
    if width == LARGE:
        assert spans["resize.switch"] > RESIZES, "its blocks travel in several switches"
    else:
        assert spans["resize.switch"] == RESIZES
    assert spans["task.join"] >= len(members)
    assert spans["checkpoint"] >= 1


def _schedule(seed: int) -> list[tuple[int, tuple[str, ...]]]:
    """Resizes by at least one task each, at drawn steps."""
    chance = stream(seed, "schedule")
    schedule: list[tuple[int, tuple[str, ...]]] = []
    step, before = 0, FIRST
    while len(schedule) < RESIZES:
        workers = [f"worker-{index}" for index in range(3) if chance.random() < 0.6]
        servers = [f"ps-{index}" for index in range(3) if chance.random() < 0.6]
        members = (*servers, *workers)
        if workers and servers and members != before:
            step += 3 + int(chance.random() * 12)
            schedule.append((step, members))
            before = members
    return schedule


def test_more_workers_than_samples_still_train_as_one(
    job_of: JobOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last, short batch of an epoch leaves some workers with nothing to do; they must neither hang nor count."""
    env = {"BATCH": "3", "SAMPLES": "7"}
    reference = alone(tmp_path, monkeypatch, **env)
    job = job_of(**env).start(*FIRST, "worker-1", "worker-2", "worker-3")

    assert set(job.ended().values()) == {0}, job.logs()
    assert_same(parameters(job.out / "worker-3.safetensors"), reference)


def test_a_second_attempt_goes_on_from_the_checkpoint_with_another_number_of_servers(
    job_of: JobOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A preempted job loses no work, and gets back whatever the cluster can spare then."""
    env = {"EPOCHS": "20", "OPTIMIZER": "adam"}
    reference = alone(tmp_path, monkeypatch, **env)
    job = job_of(**env, HURRY=str(tmp_path / "hurry")).start(*FIRST, "worker-1")
    job.until_step(30)
    stopped = job.control.Stop(pb.StopRequest(checkpoint=True, grace_s=20.0), timeout=30.0)
    assert set(job.ended().values()) == {0}, job.logs()
    first = job.result()
    assert first["phase"] == "STOPPED"
    assert 30 <= first["steps"] <= stopped.checkpoint_step == first["checkpoint_step"]

    (tmp_path / "hurry").touch()
    job.start("ps-0", "ps-1", "ps-2", "worker-5")
    assert set(job.ended().values()) == {0}, job.logs()
    assert job.result()["phase"] == "FINISHED"
    assert_same(parameters(job.out / "worker-5.safetensors"), reference)


def test_a_damaged_checkpoint_is_passed_over_and_only_without_any_valid_one_the_start_fails(
    job_of: JobOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training on with silently damaged parameters is worse than losing some steps."""
    reference = alone(tmp_path, monkeypatch)
    job = job_of(FEDSCHED_CHECKPOINT_EVERY_S="0.0").start(*FIRST)
    assert set(job.ended().values()) == {0}, job.logs()
    _, newest = sorted(job.root.glob("checkpoint/step-*"))
    assert newest.name == "step-00000070"
    _flip_a_byte(newest / "ps-0.safetensors")

    job.start("ps-0", "ps-1", "worker-0")
    assert set(job.ended().values()) == {0}, job.logs()
    assert "passing over a damaged checkpoint" in job.log("coordinator")
    assert_same(parameters(job.out / "worker-0.safetensors"), reference)

    for folder in job.root.glob("checkpoint/step-*"):
        _flip_a_byte(folder / "ps-0.safetensors")
    job.start(*FIRST)
    assert job.result()["phase"] == "FAILED"
    assert "no checkpoint of this job is valid" in job.log("coordinator")
    assert job.processes["coordinator"].exitcode == 1


State = dict[str, tuple[torch.Tensor, dict[str, torch.Tensor]]]
"""Of each parameter: its value, and what the optimiser keeps for it."""


def test_every_checkpoint_that_a_run_writes_is_exactly_the_state_after_its_step(
    job_of: JobOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any of them may be the one that a user must go on from: values, moments and schedule have to be of one step."""
    env = {"EPOCHS": "30", "OPTIMIZER": "adam"}
    states: list[State] = []
    hook = register_optimizer_step_post_hook(lambda optimizer, *_: states.append(_state_of(optimizer)))
    reference = alone(tmp_path, monkeypatch, **env)
    hook.remove()
    job = job_of(**env, HURRY=str(tmp_path / "hurry"), FEDSCHED_CHECKPOINT_EVERY_S="0.0")
    over = threading.Event()
    catching = threading.Thread(target=_catch, args=(job.root / "checkpoint", tmp_path / "caught", over))
    catching.start()
    try:
        job.start(*FIRST, "ps-1", "worker-1")
        for step, members in ((10, (*FIRST, "ps-2", "worker-1")), (25, ("ps-1", "ps-2", "worker-1"))):
            job.until_step(step)
            reply = job.scale(*members)
            assert reply.ok, reply.message
        (tmp_path / "hurry").touch()
        assert set(job.ended().values()) == {0}, job.logs()
    finally:
        over.set()
        catching.join()

    caught = [verified(folder) for folder in sorted((tmp_path / "caught").iterdir())]
    assert len(caught) > 5
    assert caught[-1].step == len(states)
    for found in caught:
        _assert_holds(found, states[found.step - 1])
    # The first one was cut for other servers and written by another chief than the last.
    for found in (caught[0], caught[-2]):
        later = job_of(found.folder.name, **env, HURRY="/")
        shutil.copytree(found.folder, later.root / "checkpoint" / found.folder.name)
        later.start(*FIRST, "ps-1")
        assert set(later.ended().values()) == {0}, later.logs()
        assert_same(parameters(later.out / "worker-0.safetensors"), reference)


def _state_of(optimizer: torch.optim.Optimizer) -> State:
    tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    names = ("first.weight", "first.bias", "second.weight", "second.bias")
    return {
        name: (tensor.detach().clone(), {key: kept.clone() for key, kept in optimizer.state[tensor].items()})
        for name, tensor in zip(names, tensors, strict=True)
    }


def _catch(root: Path, into: Path, over: threading.Event) -> None:
    """Copy each checkpoint before newer ones push it out."""
    into.mkdir()
    while True:
        last = over.wait(0.005)
        for folder in root.glob("step-????????"):
            if not (into / folder.name).exists():
                draft = into.parent / "draft"
                shutil.rmtree(draft, ignore_errors=True)
                with contextlib.suppress(OSError):  # It was removed at this moment.
                    shutil.copytree(folder, draft)
                    draft.rename(into / folder.name)
        if last:
            return


def _assert_holds(found: Checkpoint, state: State) -> None:
    names = [block.name for block in found.model.blocks]
    blocks, _ = read_blocks(found.model, found.files, range(len(names)))
    held = {names[index]: block for index, block in blocks.items()}
    assert held["seen"].value.item() == found.step
    for name, (value, kept) in state.items():
        assert held[name].tensors.keys() == kept.keys()
        for mine, theirs in [(held[name].value, value), *((held[name].tensors[key], kept[key]) for key in kept)]:
            torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11, msg=f"{name} at step {found.step}")


def _flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(bytes(data))


def test_a_resize_whose_new_task_never_joins_is_rolled_back_while_training_goes_on(
    job_of: JobOf, tmp_path: Path
) -> None:
    """A node that cannot start a task must cost the job nothing but the resize."""
    hurry = tmp_path / "hurry"
    job = job_of(EPOCHS="20", HURRY=str(hurry)).start(*FIRST)
    job.until_step(5)
    reply = job.scale(*FIRST, "worker-1", deadline_s=0.3, start=False)
    hurry.touch()

    assert not reply.ok
    assert "worker-1 did not join" in reply.message
    assert list(reply.tasks) == list(FIRST)
    assert set(job.ended().values()) == {0}, job.logs()
    assert job.result()["phase"] == "FINISHED"


def test_scripts_that_end_without_a_word_after_their_last_step_are_no_loss(job_of: JobOf) -> None:
    """The training is complete: to call it failed would throw it away because of the manner of a good-bye."""
    job = job_of(ABRUPT="1", EPOCHS="3").start(*FIRST, "worker-1", "worker-2")

    assert set(job.ended().values()) == {0}, job.logs()
    assert job.result()["phase"] == "FINISHED"


@pytest.mark.parametrize(
    ("victim", "servers"), [("worker-1", ("ps-0", "ps-1")), ("ps-1", ("ps-0", "ps-1")), ("worker-1", ())]
)
def test_a_killed_member_fails_the_attempt_and_nothing_hangs(
    job_of: JobOf, victim: str, servers: tuple[str, ...]
) -> None:
    """The next attempt can start only when this one is seen to be over."""
    job = job_of(EPOCHS="100000").start(*servers, "worker-0", "worker-1")
    job.until_step(10)
    job.processes[victim].kill()

    codes = job.ended()
    assert codes.pop(victim) == -9
    assert codes.pop("coordinator") == 1
    assert codes.pop("worker-0") == 1
    result = job.result()
    assert result["phase"] == "FAILED"
    assert result["message"] == f"{victim} ended unexpectedly"
    assert f"the job ended: {victim} ended unexpectedly" in job.log("worker-0")


@pytest.mark.parametrize(
    ("seed", "machines", "width"),
    [*((seed, TOGETHER, 5000) for seed in (1, 2, 3, 4)), *((seed, APART, LARGE) for seed in (5, 6, 7, 8))],
)
def test_a_kill_at_any_moment_of_a_resize_costs_at_most_the_steps_since_the_last_checkpoint(
    job_of: JobOf,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
    machines: dict[str, str],
    width: int,
) -> None:
    """Machines die when they like, also while blocks change hands: the job ends as if nothing had been."""
    env = {"EPOCHS": "45" if width < LARGE else "20", "OPTIMIZER": "sgd" if width == LARGE else "adam"}
    env |= {"WIDTH": str(width)}
    reference = alone(tmp_path, monkeypatch, **env)
    chance = stream(seed, "kill")
    job = job_of(**env, HURRY=str(tmp_path / "hurry"))
    job.machines = machines
    before = ("ps-0", "ps-1", "worker-0", "worker-1")
    after = ("ps-1", "ps-2", "worker-1", "worker-2")
    job.start(*before)
    job.until_step(20)
    reply = job.scale_soon(*after, deadline_s=10.0)
    # From the order, over the newcomers' start, to some steps after the switch.
    threading.Event().wait(chance.random() * 4.0)
    everybody = sorted({*before, *after})
    job.processes[everybody[int(chance.random() * len(everybody))]].kill()
    with contextlib.suppress(grpc.RpcError, AssertionError):
        reply.result(DEADLINE_S)
    (tmp_path / "hurry").touch()

    job.ended()
    if job.result()["phase"] == "FAILED":
        job.start("ps-3", "worker-3")
        job.ended()
    assert job.result()["phase"] == "FINISHED", job.logs()
    trained = sorted(job.out.glob("*.safetensors"))
    assert trained
    for path in trained:
        assert_same(parameters(path), reference)
    assert not [process for process in job.processes.values() if process.is_alive()]


def test_members_of_a_dead_coordinator_end_themselves(job_of: JobOf) -> None:
    """An orphan would burn a machine that the scheduler gives to others."""
    job = job_of(EPOCHS="100000").start(*FIRST)
    job.until_step(10)
    job.processes["coordinator"].kill()

    assert job.ended() == {"coordinator": -9, "ps-0": 1, "worker-0": 1}
    assert "coordinator is gone" in job.log("worker-0") + job.log("ps-0")


def test_a_script_that_crashes_is_reported_with_its_own_words(job_of: JobOf) -> None:
    """Who wrote the script needs to see its fault, not a timeout of somebody else."""
    job = job_of(CRASH_AT="12").start(*FIRST)

    assert job.ended()["worker-0"] == 1
    result = job.result()
    assert result["phase"] == "FAILED"
    assert "worker-0" in result["message"]
    assert "RuntimeError: the script has a fault" in job.log("worker-0")


def test_a_newcomer_waits_until_the_stream_of_its_name_has_ended_and_is_not_refused(job_of: JobOf) -> None:
    """On a busy machine a task that is taken out and back comes before the coordinator has seen it go."""
    job = job_of(EPOCHS="100000").start(*FIRST)
    job.until_step(5)
    hello = pb.MemberReport(task="worker-7", ready=True)
    held = [queue.SimpleQueue[pb.MemberReport]() for _ in range(2)]
    with grpc.insecure_channel(job.address) as channel:
        first, second = (cast(Any, MembershipStub(channel).Attend(iter(reports.get, None))) for reports in held)
        held[0].put(hello)
        assert not next(first).leave
        held[1].put(hello)
        job.until_step(job.report().steps + 5)
        first.cancel()
        assert not next(second).leave
        second.cancel()


def test_sigterm_ends_every_task_at_once(job_of: JobOf) -> None:
    """A cluster that is being shut down sends it to everybody."""
    job = job_of(EPOCHS="100000").start(*FIRST)
    job.until_step(10)
    for process in job.processes.values():
        process.terminate()

    codes = job.ended()
    assert codes["ps-0"] == 143
    assert codes["worker-0"] == -15
    assert job.result()["phase"] in ("STOPPED", "FAILED")


def test_an_overflow_in_one_workers_half_precision_is_a_step_that_nobody_takes(
    job_of: JobOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One infinite gradient in the sum would be the end of all parameters."""
    env = {"SCALED": "1", "OVERFLOW_AT": "5,20,21", "OPTIMIZER": "adam"}
    reference = alone(tmp_path, monkeypatch, **env)
    job = job_of(**env).start("ps-0", "ps-1", "worker-0", "worker-1")

    assert set(job.ended().values()) == {0}, job.logs()
    for worker in ("worker-0", "worker-1"):
        assert_same(parameters(job.out / f"{worker}.safetensors"), reference)


WORKERS = ("worker-0",)


@pytest.mark.parametrize(
    ("machines", "optimizer", "width"), [(TOGETHER, "adam", 6), (TOGETHER, "sgd", 5000), (MIXED, "adam", 5000)]
)
def test_workers_without_servers_that_come_and_go_end_with_the_parameters_of_one_alone(
    job_of: JobOf,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    machines: dict[str, str],
    optimizer: str,
    width: int,
) -> None:
    """The same script and the same promise where gradients are reduced among the workers; the chief may leave too."""
    env = {"EPOCHS": "45", "OPTIMIZER": optimizer, "WIDTH": str(width)}
    reference = alone(tmp_path, monkeypatch, **env)
    job = job_of(**env, HURRY=str(tmp_path / "hurry"))
    job.machines = machines
    job.start(*WORKERS)
    for step, members in (
        (5, ("worker-0", "worker-1")),
        (15, ("worker-0", "worker-1", "worker-2", "worker-3")),
        (30, ("worker-1", "worker-3")),
        (40, ("worker-0", "worker-1", "worker-3")),
    ):
        job.until_step(step)
        reply = job.scale(*members)
        assert reply.ok, reply.message
    refused = job.scale("ps-0", "worker-0", start=False)
    assert refused.message == "the job was started without parameter servers and cannot get any"
    refused = job.scale("worker-8", start=False)
    assert "needs one worker that stays" in refused.message
    (tmp_path / "hurry").touch()

    assert set(job.ended().values()) == {0}, job.logs()
    assert job.result()["phase"] == "FINISHED"
    for worker in ("worker-0", "worker-1", "worker-3"):
        assert_same(parameters(job.out / f"{worker}.safetensors"), reference)


def test_a_checkpoint_fits_a_next_attempt_with_servers_and_one_without(
    job_of: JobOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a cluster can spare later decides how a job goes on, not how it began."""
    env = {"EPOCHS": "40", "OPTIMIZER": "adam", "WIDTH": "5000"}
    reference = alone(tmp_path, monkeypatch, **env)
    job = job_of(**env, HURRY=str(tmp_path / "hurry"))
    for members in (("worker-0", "worker-1"), ("ps-0", "ps-1", "worker-0"), ("worker-2", "worker-3")):
        job.start(*members)
        job.until_step(job.report().steps + 20)
        if members[0] == "worker-2":
            (tmp_path / "hurry").touch()
        else:
            job.control.Stop(pb.StopRequest(checkpoint=True, grace_s=20.0), timeout=30.0)
        assert set(job.ended().values()) == {0}, job.logs()
    assert job.result()["phase"] == "FINISHED"
    assert_same(parameters(job.out / "worker-3.safetensors"), reference)


@pytest.mark.parametrize("machines", [TOGETHER, MIXED])
def test_an_asynchronous_job_takes_every_batch_once_and_whole_however_it_is_resized(
    job_of: JobOf, tmp_path: Path, machines: dict[str, str]
) -> None:
    """The batch size that a user chose is each worker's own, and no sample of an epoch counts twice or never."""
    recording = tmp_path / "recording"
    recording.mkdir()
    job = job_of(ASYNCHRONOUS="1", EPOCHS="60", RECORD=str(recording), HURRY=str(tmp_path / "hurry"))
    job.machines = machines
    job.start(*FIRST)
    for step, members in (
        (15, ("ps-0", "worker-0", "worker-1", "worker-2")),
        (60, ("ps-0", "ps-1", "worker-0", "worker-1", "worker-2")),
        (120, ("ps-1", "worker-1")),
        (180, ("ps-1", "ps-2", "worker-1", "worker-3")),
    ):
        job.until_step(step)
        reply = job.scale(*members)
        assert reply.ok, reply.message
    (tmp_path / "hurry").touch()

    assert set(job.ended().values()) == {0}, job.logs()
    taken: dict[int, list[str]] = {}
    for path in recording.iterdir():
        for line in path.read_text().splitlines():
            number, *samples = line.split()
            assert int(number) not in taken, "a batch is one worker's"
            taken[int(number)] = samples
    assert sorted(taken) == list(range(420))
    for epoch in range(60):
        batches = [taken[step] for step in range(7 * epoch, 7 * epoch + 7)]
        assert [len(batch) for batch in batches] == [8, 8, 8, 8, 8, 8, 2]
        assert len({sample for batch in batches for sample in batch}) == 50
    assert len({path.name.split(".")[0] for path in recording.iterdir()}) == 4, "all of them worked"
    final = [parameters(job.out / f"{worker}.safetensors") for worker in ("worker-1", "worker-3")]
    assert min(_loss(found) for found in final) < 0.05


def _loss(found: dict[str, torch.Tensor]) -> float:
    inputs = torch.randn(50, 12, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    hidden = (inputs @ found["first.weight"].T + found["first.bias"]) * found["frozen"]
    outputs = hidden @ found["second.weight"].T + found["second.bias"]
    return float(((outputs.squeeze(1) - inputs.sum(dim=1)) ** 2).mean())
