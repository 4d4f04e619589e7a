"""One parameter server of a job: `python -m fedsched.elastic.server`, started by an executor."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import NoReturn

import grpc
import torch

from fedsched import tracing
from fedsched.elastic import ending, environment
from fedsched.elastic.attendance import CHANNEL_OPTIONS, SERVER_OPTIONS, Attendance
from fedsched.elastic.checkpoint import partial_folder, sha256_of, verified
from fedsched.elastic.environment import TaskEnvironment
from fedsched.elastic.model import ModelSpec
from fedsched.elastic.shard import BlockState, Contribution, Shard, ShardSnapshot, read_blocks
from fedsched.elastic.tensors import decode, encode
from fedsched.errors import FedschedError
from fedsched.pb import training_pb2 as pb
from fedsched.pb.training_pb2_grpc import (
    ParametersServicer,
    ParametersStub,
    add_ParametersServicer_to_server,
)

_THREADS_MAX = 256
"""Each worker's exchange holds a thread while it waits for the others'; threads are made as they are needed."""


@dataclass(slots=True)
class _Step:
    """One step's contributions, and the answer once all have come."""

    pushes: dict[str, tuple[pb.Push, Contribution]] = field(default_factory=dict)
    reply: pb.Blocks | None = None


class ParameterServer(ParametersServicer):
    """Holds the blocks that the active plan gives it.

    Threads: gRPC's handlers, the attendance thread (`see`) and the main thread (`run`), which carries out what plans
    ask for. All state is guarded by one condition.
    """

    def __init__(self, task: str, checkpoint_dir: Path, wait_s: float, report: Callable[..., None]) -> None:
        self._task = task
        self._checkpoint_dir = checkpoint_dir
        self._wait_s = wait_s
        self._report = report
        self._changed = threading.Condition()
        self._plans: dict[int, pb.PlanView] = {}
        self._shard: Shard | None = None
        self._model: ModelSpec | None = None
        self._checkpoint = ""
        self._active: pb.PlanView | None = None
        self._version = -1
        self._filled: pb.Blocks | None = None
        self._given: set[int] = set()
        """Plans for which this server has given its moving blocks away."""
        self._incoming: dict[int, list[pb.Handover]] = {}
        self._steps: dict[int, _Step] = {}
        self._failure = ""
        self._leaving = False
        self._writer = ThreadPoolExecutor(1, "checkpoint")

    # What the coordinator says.

    def see(self, view: pb.MemberView) -> None:
        """Take a new view."""
        with self._changed:
            if view.model:
                self._model = ModelSpec.loads(view.model)
                self._shard = Shard(self._model)
                self._checkpoint = view.checkpoint
            for plan in view.plans:
                self._plans[plan.number] = plan
            self._leaving = self._leaving or view.leave
            self._changed.notify_all()

    # What workers and other servers ask for.

    def Fill(self, request: pb.Blocks, context: grpc.ServicerContext) -> pb.Done:
        """Take the chief's initial values."""
        with self._changed:
            self._filled = request
            self._changed.notify_all()
        return pb.Done()

    def Hand(self, request: pb.Handover, context: grpc.ServicerContext) -> pb.Done:
        """Take blocks for a plan that is not active yet."""
        with self._changed:
            given = self._incoming.setdefault(request.plan, [])
            if all(other.server != request.server for other in given):
                given.append(request)
            self._changed.notify_all()
        return pb.Done()

    def Pull(self, request: pb.PullRequest, context: grpc.ServicerContext) -> pb.Blocks:
        """All values at a version, for a worker that joins."""
        with self._changed:
            self._await(context, lambda: self._at(request.plan, request.version))
            assert self._shard is not None
            tensors = [encode(index, value) for index, value in self._shard.values(buffers=True)]
            return pb.Blocks(version=self._version, tensors=tensors)

    def Exchange(self, request: pb.Push, context: grpc.ServicerContext) -> pb.Blocks:
        """One worker's part of a step; a repeated one changes nothing."""
        gradients = {message.block: decode(message) for message in request.gradients}
        with self._changed:
            self._await(context, lambda: self._at(request.plan, request.step) or self._replied(request.step))
            step = self._steps.setdefault(request.step, _Step())
            if step.reply is None:
                step.pushes[request.worker] = (request, Contribution(request.weight, gradients))
                self._apply_when_complete(request.step, step)
            self._await(context, lambda: step.reply is not None)
            assert step.reply is not None
            return step.reply

    def _at(self, plan: int, version: int) -> bool:
        return self._active is not None and self._active.number == plan and self._version == version

    def _replied(self, number: int) -> bool:
        return number in self._steps and self._steps[number].reply is not None

    def _await(self, context: grpc.ServicerContext, condition: Callable[[], bool]) -> None:
        """Wait under the lock; ends the call where it can never come true."""
        until_s = time.monotonic() + self._wait_s
        while not condition():
            if self._failure:
                context.abort(grpc.StatusCode.INTERNAL, self._failure)
            if self._leaving or not context.is_active():
                context.abort(grpc.StatusCode.UNAVAILABLE, f"{self._task} is leaving")
            if time.monotonic() > until_s:
                context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"{self._task} waited {self._wait_s:g} s for others")
            self._changed.wait(timeout=1.0)

    def _apply_when_complete(self, number: int, step: _Step) -> None:
        assert self._active is not None
        assert self._shard is not None
        if any(worker not in step.pushes for worker in self._active.workers):
            return
        chief = step.pushes[self._active.workers[0]][0]
        try:
            self._shard.set_buffers({message.block: decode(message) for message in chief.buffers})
            parts = [step.pushes[worker][1] for worker in self._active.workers]
            self._shard.apply(parts, tuple(json.loads(chief.hyperparameters)))
        except (
            Exception
        ) as problem:  # The optimiser is the user's choice; whatever it raises ends the job with its words.
            self._failure = f"the optimiser failed on {self._task}: {type(problem).__name__}: {problem}"
            self._report(lambda report: setattr(report, "error", self._failure))
            self._changed.notify_all()
            return
        self._version = number + 1
        # Encoded once, sent to every worker.
        tensors = [encode(index, value) for index, value in self._shard.values(buffers=False)]
        step.reply = pb.Blocks(version=self._version, tensors=tensors)
        step.pushes.clear()
        # A worker can be one step behind another at most; its answer must still be there.
        self._steps = {n: s for n, s in self._steps.items() if n >= number - 1}
        if chief.save:
            self._writer.submit(self._write_shard, self._version, self._shard.snapshot())
        self._changed.notify_all()

    def _write_shard(self, step: int, snapshot: ShardSnapshot) -> None:
        folder = partial_folder(self._checkpoint_dir, step)
        path = folder / f"{self._task}.safetensors"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            snapshot.write(path)
            with path.open("rb") as file:
                os.fsync(file.fileno())
            written = pb.ShardWritten(step=step, file=path.name, sha256=sha256_of(path), size_bytes=path.stat().st_size)
        except Exception as problem:  # A full disk comes as whatever the writer makes of it.
            written = pb.ShardWritten(step=step, error=f"{self._task} could not write {path}: {problem}")
        self._report(lambda report: report.saved.CopyFrom(written))

    # What plans ask for: the main thread.

    def run(self) -> None:
        """Follow the plans until it is time to leave.

        Raises:
            FedschedError: the job's checkpoint does not fit.
        """
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._leaving or self._due() is not None, timeout=1.0)
                if self._leaving:
                    break
                due = self._due()
            if due is not None:
                due()
        self._writer.shutdown(wait=True)

    def _due(self) -> Callable[[], None] | None:
        """What is to be done next, if anything."""
        if self._shard is None or not self._plans:
            return None
        if self._active is None and 1 in self._plans:
            return self._start if self._checkpoint or self._filled or not self._owned(self._plans[1]) else None
        plan = self._plans.get(self._active.number + 1 if self._active else min(self._plans))
        if plan is None:
            return None
        at_clock = self._active is None or not self._owned(self._active) or self._version == plan.from_step
        if at_clock and plan.number not in self._given:
            return lambda: self._give(plan)
        if at_clock and self._complete(plan):
            return lambda: self._activate(plan)
        return None

    def _owned(self, plan: pb.PlanView) -> frozenset[int]:
        names = list(plan.servers)
        if self._task not in names:
            return frozenset()
        mine = names.index(self._task)
        return frozenset(index for index, owner in enumerate(plan.owners) if owner == mine)

    def _start(self) -> None:
        """The first plan: blocks come from the checkpoint or from the chief."""
        plan = self._plans[1]
        assert self._model is not None
        assert self._shard is not None
        owned = self._owned(plan)
        if owned and self._checkpoint:
            blocks, settings = read_blocks(self._model, verified(Path(self._checkpoint)).files, owned)
            with self._changed:
                self._shard.add(blocks, settings)
        elif self._filled:
            with self._changed:
                self._shard.add({m.block: BlockState(decode(m), {}, {}) for m in self._filled.tensors})
        self._activate(plan)

    def _give(self, plan: pb.PlanView) -> None:
        """Hand over the blocks that another server owns under the plan."""
        assert self._shard is not None
        with self._changed:
            moving = self._shard.remove(self._shard.blocks - self._owned(plan))
            settings = json.dumps(self._shard.hyperparameters)
            self._given.add(plan.number)
        by_owner: dict[int, dict[int, BlockState]] = {}
        for index, block in moving.items():
            by_owner.setdefault(plan.owners[index], {})[index] = block
        for owner, blocks in sorted(by_owner.items()):
            handover = pb.Handover(
                server=self._task,
                plan=plan.number,
                version=plan.from_step,
                tensors=[
                    encode(index, tensor, key)
                    for index, block in blocks.items()
                    for key, tensor in [("", block.value), *sorted(block.tensors.items())]
                ],
                scalars=json.dumps({index: block.scalars for index, block in blocks.items()}),
                hyperparameters=settings,
            )
            with grpc.insecure_channel(plan.addresses[owner], CHANNEL_OPTIONS) as channel:
                ParametersStub(channel).Hand(handover, timeout=self._wait_s)

    def _complete(self, plan: pb.PlanView) -> bool:
        """Whether every block of the plan is here or waits to be taken in."""
        assert self._shard is not None
        arrived = {message.block for given in self._incoming.get(plan.number, []) for message in given.tensors}
        return self._owned(plan) <= self._shard.blocks | arrived

    def _activate(self, plan: pb.PlanView) -> None:
        """Take in what others handed over and serve the plan."""
        assert self._shard is not None
        with self._changed:
            for given in self._incoming.pop(plan.number, []):
                scalars = json.loads(given.scalars)
                blocks: dict[int, BlockState] = {}
                for message in (message for message in given.tensors if not message.key):
                    blocks[message.block] = BlockState(decode(message), {}, scalars.get(str(message.block), {}))
                for message in (message for message in given.tensors if message.key):
                    blocks[message.block].tensors[message.key] = decode(message)
                self._shard.add(blocks, tuple(json.loads(given.hyperparameters)))
            self._active, self._version = plan, plan.from_step
            self._filled = None
            self._plans = {number: known for number, known in self._plans.items() if number >= plan.number}
            self._changed.notify_all()
        self._report(lambda report: setattr(report, "holds", plan.number))


def main() -> int:
    """Serve until the coordinator says that the job is over."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    signal.signal(signal.SIGTERM, _exit_at_once)
    try:
        task = environment.read(os.environ)
        tracing.setup(task.task, endpoint=task.trace_endpoint, file=task.trace_file)
        try:
            _serve(task)
        finally:
            tracing.shutdown()
    except FedschedError as problem:
        sys.stderr.write(f"{problem}\n")
        return problem.exit_code
    return 0


def _serve(task: TaskEnvironment) -> None:
    attendance: Attendance
    server = ParameterServer(
        task.task, task.checkpoint_dir, task.join_s + task.stall_s, lambda change: attendance.update(change)
    )
    endpoint = grpc.server(ThreadPoolExecutor(_THREADS_MAX), options=SERVER_OPTIONS)
    add_ParametersServicer_to_server(server, endpoint)
    port = endpoint.add_insecure_port("127.0.0.1:0")
    endpoint.start()
    hello = pb.MemberReport(task=task.task, address=f"127.0.0.1:{port}", ready=True)
    attendance = Attendance(task.coordinator, hello, server.see)
    with tracing.span("task.join", parent=task.traceparent, attributes={"job": task.job_id, "task": task.task}):
        attendance.open()
    try:
        server.run()
    except (FedschedError, grpc.RpcError) as problem:
        words = problem.message if isinstance(problem, FedschedError) else f"a server does not answer: {problem}"
        attendance.close(words)
        raise
    finally:
        # Workers may still be reading the answers to their last exchange.
        endpoint.stop(grace=5.0).wait()
    attendance.close()


def _exit_at_once(number: int, frame: FrameType | None) -> NoReturn:
    """All that matters is in checkpoints; a clean end would only be slower."""
    os._exit(128 + number)


if __name__ == "__main__":
    ending.run(main)
