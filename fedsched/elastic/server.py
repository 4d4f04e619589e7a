"""One parameter server of a job: `python -m fedsched.elastic.server`, started by an executor."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import NoReturn

import grpc
import torch
import torch._dynamo  # Loaded by the first optimiser otherwise: in the middle of a switch, with all workers waiting.

from fedsched import tracing
from fedsched.elastic import ending, environment, memory, optimizers
from fedsched.elastic.arena import Arena, parts
from fedsched.elastic.attendance import CHANNEL_OPTIONS, SERVER_OPTIONS, Attendance
from fedsched.elastic.checkpoint import verified, write_shard
from fedsched.elastic.environment import TaskEnvironment
from fedsched.elastic.handing import pack, unpack
from fedsched.elastic.model import ModelSpec
from fedsched.elastic.shard import BlockState, Gradients, Shard, read_blocks
from fedsched.elastic.streams import put, serve
from fedsched.elastic.tensors import sparse_of
from fedsched.errors import FedschedError
from fedsched.pb import training_pb2 as pb
from fedsched.pb.training_pb2_grpc import ParametersStub

_THREADS_MAX = 256
"""Each worker's exchange holds a thread while it waits for the others'; threads are made as they are needed."""


@dataclass(slots=True)
class _Step:
    """One step's contributions, and the answer once all have come."""

    pushes: dict[str, pb.Push] = field(default_factory=dict)
    reply: pb.Stepped | None = None


@dataclass(frozen=True, slots=True)
class _Gradients:
    """Where a worker's gradients are."""

    handle: str
    """What led to the worker's own memory; empty for a buffer here, which it sends them to."""
    arena: Arena | None
    problem: str = ""
    """Why they cannot be reached, where they cannot."""


class ParameterServer:
    """Holds the blocks that the active plan gives it.

    Threads: gRPC's handlers, the attendance thread (`see`) and the main thread (`run`), which carries out what plans
    ask for. All state is guarded by one condition.

    Args:
        wait_s: longest wait of a call for others, in seconds.
        report: changes and sends this server's report to the coordinator; called with a function that changes it.
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
        self._arena: Arena | None = None
        self._parameters = ""
        """Handle of the job's arena; empty when this server keeps one of its own."""
        self._checkpoint = ""
        self._active: pb.PlanView | None = None
        self._version = -1
        self._is_filled = False
        self._is_greeted = False
        self._is_ready = False
        self._given: set[int] = set()
        """Plans for which this server has given its moving blocks away."""
        self._incoming: dict[int, list[pb.Handover]] = {}
        self._gradients: dict[str, _Gradients] = {}
        """Of each worker."""
        self._buffers: dict[str, Arena] = {}
        """For workers that will send theirs and have not begun: memory that is in place before a step waits for it."""
        self._steps: dict[int, _Step] = {}
        self._alone: dict[str, tuple[int, _Step]] = {}
        """Of each asynchronous worker: its newest step."""
        self._saves: set[int] = set()
        """Versions at which a checkpoint is due, as far as pushes have told."""
        self._copying = False
        """A checkpoint is being copied: nothing may change until that is done."""
        self._failure = ""
        self._leaving = False
        self._writer = ThreadPoolExecutor(1, "checkpoint")

    # What the coordinator says.

    def see(self, view: pb.MemberView) -> None:
        """Take a new view."""
        with self._changed:
            if view.model:
                self._model = ModelSpec.loads(view.model)
                self._parameters = view.parameters if view.machine == memory.machine() else ""
                self._checkpoint = view.checkpoint
            for plan in view.plans:
                self._plans[plan.number] = plan
            self._is_greeted = True
            self._leaving = self._leaving or view.leave
            self._changed.notify_all()

    # What workers and other servers ask for.

    def Put(self, request_iterator: Iterator[bytes], context: grpc.ServicerContext) -> pb.Done:
        """Fill a buffer: a worker's gradients, the chief's initial values, or blocks that move here."""
        pieces, chunks = parts(request_iterator)
        with self._changed:
            self._await(context, lambda: self._arena is not None)
            arena = self._sent_gradients(pieces.gradients_of) if pieces.gradients_of else self._arena
        assert arena is not None
        arena.write(pieces, chunks)
        return pb.Done()

    def Get(self, request: pb.Pieces, context: grpc.ServicerContext) -> Iterator[bytes]:
        """The values of blocks; who asks knows that they do not change meanwhile."""
        assert self._arena is not None
        yield from self._arena.read(request.blocks)

    def Fill(self, request: pb.Done, context: grpc.ServicerContext) -> pb.Done:
        """The chief's initial values are in the arena."""
        with self._changed:
            self._is_filled = True
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

    def Pull(self, request: pb.PullRequest, context: grpc.ServicerContext) -> pb.Stepped:
        """Wait for a version, for a worker that joins."""
        with self._changed:
            self._await(context, lambda: self._at(request.plan, request.version))
            return pb.Stepped(version=self._version)

    def Exchange(self, request: pb.Push, context: grpc.ServicerContext) -> pb.Stepped:
        """One worker's part of a step; a repeated one changes nothing."""
        since_s = time.monotonic()
        with self._changed:
            if self._model is not None and self._model.asynchronous:
                return self._exchange_alone(request, context, since_s)
            self._await(context, lambda: self._at(request.plan, request.step) or self._replied(request.step))
            waited_s = time.monotonic() - since_s
            step = self._steps.setdefault(request.step, _Step())
            if step.reply is None:
                self._await(context, lambda: not self._copying)
                step.pushes[request.worker] = request
                self._apply_when_complete(request.step, step)
            self._await(context, lambda: step.reply is not None)
            assert step.reply is not None
            return pb.Stepped(version=step.reply.version, skipped=step.reply.skipped, waited_s=waited_s)

    def _exchange_alone(self, request: pb.Push, context: grpc.ServicerContext, since_s: float) -> pb.Stepped:
        """An asynchronous step: taken at once, but not before all steps below a checkpoint that it comes after."""
        self._saves.update(request.saves)
        self._await(context, lambda: self._active is not None and self._active.number >= request.plan)
        waited_s = time.monotonic() - since_s
        below = max((save for save in self._saves if save <= request.step), default=0)
        self._await(context, lambda: self._version >= below and not self._copying)
        newest, step = self._alone.get(request.worker, (-1, _Step()))
        if request.step > newest:
            step = _Step()
            self._take_step(step, [request], self._version)
            self._alone[request.worker] = (request.step, step)
        self._await(context, lambda: step.reply is not None)
        assert step.reply is not None
        return pb.Stepped(version=step.reply.version, skipped=step.reply.skipped, waited_s=waited_s)

    def _at(self, plan: int, version: int) -> bool:
        """Whether the plan is in force and its blocks have come to the version; asynchronous ones may be beyond it."""
        if self._active is None or self._active.number != plan:
            return False
        asynchronous = self._model is not None and self._model.asynchronous
        return self._version >= version if asynchronous else self._version == version

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
        if any(worker not in step.pushes for worker in self._active.workers):
            return
        self._take_step(step, [step.pushes[worker] for worker in self._active.workers], number)
        # A worker can be one step behind another at most; its answer must still be there.
        self._steps = {n: s for n, s in self._steps.items() if n >= number - 1}

    def _take_step(self, step: _Step, pushes: Sequence[pb.Push], version: int) -> None:
        """From a version to the next one, and a checkpoint where it is due there."""
        skipped = any(push.overflow for push in pushes)
        try:
            self._apply(pushes, skipped)
        except (
            Exception
        ) as problem:  # The optimiser is the user's choice; whatever it raises ends the job with its words.
            self._failure = f"the optimiser failed on {self._task}: {type(problem).__name__}: {problem}"
            self._report(lambda report: setattr(report, "error", self._failure))
            self._changed.notify_all()
            return
        self._version = version + 1
        step.reply = pb.Stepped(version=self._version, skipped=skipped)
        step.pushes.clear()
        self._saves.update(save for push in pushes for save in push.saves)
        if self._version in self._saves:
            # Copied while workers compute the next step; the optimiser waits for it, and so does a switch.
            self._copying = True
            self._writer.submit(self._write_shard, self._version)
        self._saves = {save for save in self._saves if save > self._version}
        self._changed.notify_all()

    def _apply(self, pushes: Sequence[pb.Push], skipped: bool) -> None:
        assert self._shard is not None
        chief = pushes[0]
        here = self._shard.blocks
        self._shard.set_buffers(self._values_of(chief.worker, chief.buffers, here))
        if not skipped:
            gradients = [self._gradients_of(push, here) for push in pushes]
            self._shard.apply(gradients, tuple(json.loads(chief.hyperparameters)))

    def _gradients_of(self, push: pb.Push, here: frozenset[int]) -> Gradients:
        assert self._model is not None
        dense = self._values_of(push.worker, push.gradients, here)
        sparse = sparse_of(push.sparse, self._model)
        return dense | {index: gradient for index, gradient in sparse.items() if index in here}

    def _values_of(self, worker: str, indexes: Iterable[int], here: frozenset[int]) -> dict[int, torch.Tensor]:
        """What the worker has written for some of the blocks that are here. To make up what is missing would train
        the model wrongly and tell nobody."""
        wanted = [index for index in indexes if index in here]
        if not wanted:
            return {}
        found = self._gradients.get(worker, _Gradients("", None, "it has sent none"))
        if found.arena is None:
            raise LookupError(f"the gradients of {worker} cannot be reached: {found.problem}")
        return {index: found.arena.value(index) for index in wanted}

    def _sent_gradients(self, worker: str) -> Arena:
        """The buffer for what a worker sends."""
        assert self._model is not None
        arena = self._gradients[worker].arena if worker in self._gradients else None
        if arena is None:
            arena = self._buffers.pop(worker, None) or Arena.of_gradients(self._model)
            self._gradients[worker] = _Gradients("", arena)
        return arena

    def _write_shard(self, step: int) -> None:
        assert self._shard is not None
        try:
            snapshot = self._shard.snapshot()
        finally:
            with self._changed:
                self._copying = False
                self._changed.notify_all()
        written = write_shard(self._checkpoint_dir, step, self._task, snapshot.write)
        self._report(lambda report: report.saved.CopyFrom(written))

    # What plans ask for: the main thread.

    def run(self) -> None:
        """Follow the plans until it is time to leave.

        Raises:
            FedschedError: the job's checkpoint does not fit.
            OSError: another process' memory cannot be reached.
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
        if self._model is not None and self._shard is None:
            return self._prepare
        if self._is_greeted and not self._is_ready:
            return self._get_ready
        if self._model is None or not self._plans:
            return None
        unattached = self._unattached()
        if unattached:
            return lambda: self._attach(unattached)
        unprovided = self._unprovided()
        if unprovided:
            return lambda: self._provide(unprovided)
        if self._active is None and 1 in self._plans:
            return self._start if self._checkpoint or self._is_filled or not self._owned(self._plans[1]) else None
        plan = self._plans.get(self._active.number + 1 if self._active else min(self._plans))
        if plan is None or self._copying:
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

    def _prepare(self) -> None:
        """Have the memory in place: in a job that trains already, before this server says that it is ready."""
        assert self._model is not None
        arena = Arena.of_parameters(self._model, self._parameters)
        optimizers.rehearse(self._model.optimizer, self._model.hyperparameters)
        with self._changed:
            self._arena = arena
            self._shard = Shard(self._model, arena)
            self._changed.notify_all()

    def _get_ready(self) -> None:
        with self._changed:
            self._is_ready = True
        self._report(lambda report: setattr(report, "ready", True))

    def _unprovided(self) -> list[str]:
        """Workers of every plan that is known who will send their gradients, and for whom there is no buffer yet."""
        senders = {
            worker
            for plan in self._plans.values()
            for worker, handle in zip(plan.workers, plan.gradients, strict=True)
            if not (handle and self._parameters)
        }
        return sorted(senders - self._gradients.keys() - self._buffers.keys())

    def _provide(self, workers: Sequence[str]) -> None:
        assert self._model is not None
        for worker in workers:
            buffer = Arena.of_gradients(self._model)
            with self._changed:
                if worker not in self._gradients:
                    self._buffers[worker] = buffer

    def _unattached(self) -> dict[str, str]:
        """Workers of this machine, of every plan that is known, whose gradients are not within reach yet.

        A plan may be known before the one that comes first has begun: both must find their workers' gradients.
        """
        handles: dict[str, str] = {}
        for number in sorted(self._plans) if self._parameters else ():
            plan = self._plans[number]
            told = zip(plan.workers, plan.gradients, strict=True)
            handles |= {worker: handle for worker, handle in told if handle}
        known = {worker: kept.handle for worker, kept in self._gradients.items()}
        return {worker: handle for worker, handle in handles.items() if known.get(worker) != handle}

    def _attach(self, handles: Mapping[str, str]) -> None:
        assert self._model is not None
        for worker, handle in handles.items():
            try:
                found = _Gradients(handle, Arena.of_gradients(self._model, handle))
            except OSError as problem:
                # Mostly it has ended. The coordinator will say what follows from that.
                found = _Gradients(handle, None, str(problem))
            with self._changed:
                # A later process of the name comes only after the steps of this one are over.
                self._gradients[worker] = found

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
        elif owned:
            with self._changed:
                self._shard.add({index: BlockState(self._shard.arena.value(index), {}, {}) for index in owned})
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
            self._hand(plan, owner, blocks, settings)

    def _hand(self, plan: pb.PlanView, owner: int, blocks: Mapping[int, BlockState], settings: str) -> None:
        """What lies in the arena is there already on the same machine, and is streamed to another."""
        assert self._shard is not None
        shard = self._shard
        handover = pack(shard, blocks)
        handover.server, handover.plan, handover.version = self._task, plan.number, plan.from_step
        handover.hyperparameters = settings
        held = {int(index): keys for index, keys in json.loads(handover.held).items()}
        with grpc.insecure_channel(plan.addresses[owner], CHANNEL_OPTIONS) as channel:
            if not (self._parameters and plan.shared[owner]):
                keys = shard.arena.layout.keys
                pieces = [(index, 0) for index in blocks]
                for region, key in enumerate(keys, 1):
                    pieces += [(index, region) for index in blocks if key in held[index]]
                indexes, regions = [index for index, _ in pieces], [region for _, region in pieces]
                put(channel, shard.arena.read(indexes, regions), self._wait_s)
            ParametersStub(channel).Hand(handover, timeout=self._wait_s)

    def _complete(self, plan: pb.PlanView) -> bool:
        """Whether every block of the plan is here or waits to be taken in."""
        assert self._shard is not None
        arrived = {int(index) for given in self._incoming.get(plan.number, []) for index in json.loads(given.held)}
        return self._owned(plan) <= self._shard.blocks | arrived

    def _activate(self, plan: pb.PlanView) -> None:
        """Take in what others handed over and serve the plan."""
        assert self._shard is not None
        with self._changed:
            for given in self._incoming.pop(plan.number, []):
                self._shard.add(unpack(self._shard.arena, given), tuple(json.loads(given.hyperparameters)))
            self._active, self._version = plan, plan.from_step
            self._plans = {number: known for number, known in self._plans.items() if number >= plan.number}
            workers = {worker for known in self._plans.values() for worker in known.workers}
            self._gradients = {name: kept for name, kept in self._gradients.items() if name in workers}
            self._buffers = {name: buffer for name, buffer in self._buffers.items() if name in workers}
            self._changed.notify_all()
        self._report(lambda report: setattr(report, "holds", plan.number))


def main() -> int:
    """Serve until the coordinator says that the job is over."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    # Rows out of range would be written into other memory.
    torch.sparse.check_sparse_tensor_invariants.enable()  # type: ignore[no-untyped-call]
    signal.signal(signal.SIGTERM, _exit_at_once)
    try:
        task = environment.read(os.environ)
        tracing.setup(task.task, endpoint=task.trace_endpoint, file=task.trace_file)
        try:
            _serve(task)
        finally:
            tracing.shutdown()
    except FedschedError as problem:
        ending.say(str(problem))
        return problem.exit_code
    return 0


def _serve(task: TaskEnvironment) -> None:
    attendance: Attendance
    server = ParameterServer(
        task.task, task.checkpoint_dir, task.join_s + task.stall_s, lambda change: attendance.update(change)
    )
    endpoint = grpc.server(ThreadPoolExecutor(_THREADS_MAX), options=SERVER_OPTIONS)
    serve(server, endpoint)
    port = endpoint.add_insecure_port(f"{task.host}:0")
    endpoint.start()
    hello = pb.MemberReport(task=task.task, address=f"{task.host}:{port}", machine=memory.machine())
    attendance = Attendance(task.coordinator, hello, server.see)
    with tracing.span("task.join", parent=task.traceparent, attributes={"job": task.job_id, "task": task.task}):
        attendance.open()
    try:
        server.run()
    except (FedschedError, grpc.RpcError, OSError) as problem:
        words = f"a server does not answer: {problem}" if isinstance(problem, grpc.RpcError) else str(problem)
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
