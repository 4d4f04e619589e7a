"""A worker's side of the job: waits for grants, exchanges gradients for parameters with the servers."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import grpc
import torch
from google.protobuf.message import Message
from torch.optim import Optimizer

from fedsched import tracing
from fedsched.elastic import memory, optimizers, printing
from fedsched.elastic.arena import Arena, parts
from fedsched.elastic.attendance import CHANNEL_OPTIONS, Attendance
from fedsched.elastic.checkpoint import write_shard
from fedsched.elastic.environment import TaskEnvironment
from fedsched.elastic.model import ModelSpec
from fedsched.elastic.reducing import Reduction
from fedsched.elastic.shard import ShardSnapshot
from fedsched.elastic.streams import get, put
from fedsched.elastic.tensors import encode_sparse
from fedsched.errors import Failed, InvalidInput, StartFailed, TimedOut
from fedsched.pb import training_pb2 as pb
from fedsched.pb.training_pb2_grpc import ParametersStub

_REPORT_S = 0.2
"""Longest time between two reports of progress."""
_HELLO_S = 20.0
"""The coordinator greets a worker within this."""
_VERDICT_S = 10.0
"""A failed call to a server is followed by the coordinator's word within this, or is an error of its own."""
_SEE = "see the logs of the job's tasks, the coordinator's first"


@dataclass(frozen=True, slots=True)
class Turn:
    """A step and this process' place among those that take it."""

    step: int
    rank: int
    workers: int


class Worker:
    """Takes a session's steps together with the job's other tasks."""

    def __init__(self, task: TaskEnvironment, optimizer: Optimizer) -> None:
        """Join the job.

        Raises:
            StartFailed: the coordinator does not answer.
        """
        self.rank = -1
        self._task = task
        self._optimizer = optimizer
        self._wait_s = task.join_s + task.stall_s
        self._changed = threading.Condition()
        self._view = pb.MemberView()
        self._spec: ModelSpec | None = None
        self._tensors: Sequence[torch.Tensor] = ()
        self._sent_buffers: dict[int, torch.Tensor] = {}
        self._tensor_blocks: list[list[int]] = []
        """Of each tensor: its blocks, in order."""
        self._arena: Arena | None = None
        """The job's parameters: shared on the coordinator's machine, else this process' own copy."""
        self._own: Arena | None = None
        """What the model sees: the same, or, in an asynchronous job, a copy from between two steps."""
        self._in_arena: set[int] = set()
        """Tensors of the model that are that arena's own: they are not copied once more."""
        self._gradients: Arena | None = None
        self._reduction: Reduction | None = None
        """In a job without servers: what they would do."""
        self._before: frozenset[str] = frozenset()
        """Workers of the step before."""
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._shared = False
        """Whether this process and the coordinator are on one machine."""
        self._channels: dict[str, grpc.Channel] = {}
        self.wire_bytes = 0
        self._step = -1
        """The step whose parameters the model holds; -1 before it has any from the job."""
        self._report_at = 0
        self._reported_s = 0.0
        self._reported = -1
        self._loss: float | torch.Tensor | None = None
        self._seen_plan = 0
        """The plan of the step before; 0 before the first."""
        self._is_switching = False
        """Whether the present step is the first one under its plan, and not this worker's first."""
        self._pause_s = 0.0
        tracing.setup(task.task, endpoint=task.trace_endpoint, file=task.trace_file)
        self._joining = tracing.start(
            "task.join", parent=task.traceparent, attributes={"job": task.job_id, "task": task.task}
        )
        self._attendance = Attendance(
            task.coordinator, pb.MemberReport(task=task.task, machine=memory.machine()), self._see
        )
        try:
            self._attendance.open()
        except grpc.FutureTimeoutError as problem:
            raise StartFailed(
                f"the job's coordinator at {task.coordinator} does not answer", "let the executor start the job again"
            ) from problem

    def begin(self, spec: ModelSpec, tensors: Sequence[torch.Tensor]) -> int:
        """Say what is trained. Returns how many workers share a step already when a running job is joined, else 0."""
        self._spec, self._tensors = spec, tensors
        self._tensor_blocks = [[] for _ in tensors]
        for index, block in enumerate(spec.blocks):
            self._tensor_blocks[block.tensor].append(index)
        self._gradients = Arena.of_gradients(spec)
        with self._changed:
            if not self._changed.wait_for(lambda: self._view.machine or self._view.leave, timeout=_HELLO_S):
                raise TimedOut(f"the coordinator did not greet this worker within {_HELLO_S:g} s", _SEE)
            if self._view.leave:
                self._leave(self._view.message)
            self._shared = self._view.machine == memory.machine()
            training = self._view.training
            if self._view.reducing:
                self._reduction = Reduction(self._task.task, spec, self._wait_s, self._task.host)
            elif not self._shared or self._view.parameters:
                self._the_arena()  # Now, while nobody waits for this worker.
        return training

    def ready(self) -> None:
        """Say that this worker can take steps."""
        assert self._spec is not None
        spec, handle = self._spec, self._gradients.handle if self._gradients and self._shared else ""

        def ready(report: pb.MemberReport) -> None:
            if self._reduction is not None:
                report.address = self._reduction.address
                report.parameters = self._reduction.arena.handle if self._shared else ""
            report.model = spec.dumps()
            report.gradients = handle
            report.ready = True

        self._attendance.update(ready)

    def turn(self) -> Turn | None:
        """Wait until the next step may be run. Ends the process when this worker's part is over."""
        assert self._spec is not None
        if self._step >= self._spec.steps:
            self._await_finished()
            self._release()
            return None
        since_s = time.monotonic()
        plan = self._await_plan()
        if plan is None:
            self._await_finished()
            self._release()
            return None
        self.rank = list(plan.workers).index(self._task.task)
        if self._step < 0:
            self._start(plan)
            if self._step >= self._spec.steps or self._is_asynchronous:
                return self.turn()  # There may be no step left, or none of its own for now.
        if self._reduction is not None and plan.number > self._seen_plan > 0:
            self._meet(self._reduction, plan)
        self._before = frozenset(plan.workers)
        if plan.number > self._seen_plan > 0:
            self._pause_s = time.monotonic() - since_s
        self._is_switching = plan.number > self._seen_plan > 0
        self._seen_plan = plan.number
        return Turn(self._step, self.rank, len(plan.workers))

    def step(self, turn: Turn, weight: float, loss: float | torch.Tensor | None, *, overflow: bool = False) -> bool:
        """Push this worker's gradients, take the new parameters; False when they are as before."""
        assert self._spec is not None
        plan = self._await_plan()
        assert plan is not None
        replies = self._exchange(plan, turn, weight, overflow)
        if self._is_switching:
            # Standing still for a switch is to wait for the plan and, at a server, for its blocks to have come.
            self._pause_s += max(reply.waited_s for reply in replies)
        self._step = turn.step + 1
        self._loss = loss if loss is not None else self._loss
        self._report_progress(self._is_switching)
        return not any(reply.skipped for reply in replies)

    def report(self, accuracy: float) -> None:
        """Tell the coordinator."""
        self._attendance.update(lambda report: setattr(report, "accuracy", accuracy))

    def close(self, error: str) -> None:
        """Leave the job."""
        if not error and not self._view.leave and (self._spec is None or self._step < self._spec.steps):
            steps = f"of {self._spec.steps} steps" if self._spec else "steps, without calling batches()"
            error = f"the script ended after {max(self._step, 0)} {steps}"
        self._writer.shutdown(wait=True)
        if self._reduction is not None:
            self._reduction.close()
        self._attendance.close(error)
        for channel in self._channels.values():
            channel.close()
        tracing.shutdown()

    # Views and reports.

    def _see(self, view: pb.MemberView) -> None:
        with self._changed:
            if not view.machine:
                # Told in the greeting only.
                view.machine, view.training = self._view.machine, self._view.training
            view.parameters = view.parameters or self._view.parameters
            self._view = view
            for plan in view.plans:
                for address in plan.addresses:
                    # Connected before the first step that needs it.
                    self._channel(address)
                if self._reduction is not None:
                    self._reduction.prepare(plan)
            self._report_at = (self._step + view.granted) // 2
            self._changed.notify_all()

    @property
    def _is_asynchronous(self) -> bool:
        return self._spec is not None and self._spec.asynchronous

    def _await_plan(self) -> pb.PlanView | None:
        """The plan of the next step, once it is granted; None after the last. Ends the process when told to."""
        assert self._spec is not None
        until_s = time.monotonic() + self._wait_s
        with self._changed:
            while True:
                if self._view.leave:
                    self._leave(self._view.message)
                plan = self._granted_plan()
                if plan is not None:
                    return plan
                if self._step >= self._spec.steps:
                    return None
                if self._reported < self._step:
                    # Whoever waits must have said where it stands: that may be what the coordinator waits for.
                    self._report_progress(urgent=True)
                if time.monotonic() > until_s:
                    raise TimedOut(f"no step was granted within {self._wait_s:g} s", _SEE)
                self._changed.wait(timeout=1.0)

    def _await_finished(self) -> None:
        """After the last step: wait until the coordinator knows of it. From then on this process may end in any way."""
        self._writer.shutdown(wait=True)
        until_s = time.monotonic() + self._wait_s
        with self._changed:
            if self._reported < self._step:
                self._report_progress(urgent=True)
            while not self._view.finished:
                if self._view.leave:
                    if self._view.message:
                        self._leave(self._view.message)
                    return
                if time.monotonic() > until_s:
                    raise TimedOut(f"the coordinator did not confirm the last step within {self._wait_s:g} s", _SEE)
                self._changed.wait(timeout=1.0)

    def _granted_plan(self) -> pb.PlanView | None:
        """The plan that covers the next step, if this worker is in it and may run it."""
        view = self._view
        if self._step < 0:
            # Pulling parameters needs no grant: the servers answer when they have come to the plan's first step.
            return next((plan for plan in view.plans if self._task.task in plan.workers), None)
        covering = [plan for plan in view.plans if plan.from_step <= self._step]
        if covering and self._is_asynchronous:
            return self._granted_plan_alone(covering[-1])
        if not covering or self._step >= view.granted or self._task.task not in covering[-1].workers:
            return None
        return covering[-1]

    def _granted_plan_alone(self, plan: pb.PlanView) -> pb.PlanView | None:
        """The same where workers take steps in turn: moves on to this worker's next step."""
        assert self._spec is not None
        if self._task.task not in plan.workers:
            return None
        rank = list(plan.workers).index(self._task.task)
        behind = self._step - plan.from_step - rank
        mine = plan.from_step + rank + max(0, -(-behind // len(plan.workers))) * len(plan.workers)
        following = [later for later in self._view.plans if later.from_step > plan.from_step]
        end = following[0].from_step if following else self._spec.steps
        if mine >= end:
            # Nothing is left for it under this plan.
            self._step = end
            return self._granted_plan_alone(following[0]) if following else None
        self._step = mine
        return plan if mine < self._view.granted else None

    def _leave(self, message: str) -> NoReturn:
        """End the process, as ordered: cleanly when taken out or stopped, with the reason when the job failed."""
        raise SystemExit(f"the job ended: {message}" if message else 0)

    def _report_progress(self, urgent: bool) -> None:
        now_s = time.monotonic()
        done, spec = self._step, self._spec
        assert spec is not None
        if not (urgent or done >= min(self._report_at, spec.steps) or now_s - self._reported_s >= _REPORT_S):
            return
        self._reported_s, self._reported = now_s, done

        def progress(report: pb.MemberReport) -> None:
            report.done = done
            report.pause_s = self._pause_s
            report.complaint = printing.complaint()
            if self._loss is not None:
                report.loss = float(self._loss)

        self._attendance.update(progress)

    # Servers.

    def _start(self, plan: pb.PlanView) -> None:
        """Get the parameters of the plan's first step; the chief of a fresh job brings them along."""
        assert self._spec is not None
        if self._reduction is not None:
            self._start_reducing(self._reduction, plan)
            return
        arena = self._the_arena()
        servers = sorted(set(plan.owners))
        if plan.number == 1 and not self._view.checkpoint and plan.workers[0] == self._task.task:
            for number, tensor in enumerate(self._tensors):
                self._whole(arena, number).copy_(tensor.detach())
            self._put(plan, range(len(self._spec.blocks)), arena, "")
            self._call(plan, dict.fromkeys(servers, pb.Done()), "Fill")
        request = pb.PullRequest(plan=plan.number, version=plan.from_step)
        self._call(plan, dict.fromkeys(servers, request), "Pull")
        self._get(plan, range(len(self._spec.blocks)))
        self._refresh()
        self._begin_at(plan)

    def _begin_at(self, plan: pb.PlanView) -> None:
        """The parameters of the plan's first step are there."""
        self._adopt()
        self._sent_buffers = {index: self._tensors[index].detach().clone() for index in self._buffers()}
        self._step = plan.from_step
        self._report_progress(urgent=True)
        self._joining.end()

    def _start_reducing(self, reduction: Reduction, plan: pb.PlanView) -> None:
        """The same without servers: from a checkpoint, from this process' own model, or from the chief."""
        chief = plan.workers[0] == self._task.task
        with self._changed:
            reduction.prepare(plan)
        try:
            if plan.number == 1 and self._view.checkpoint:
                reduction.resume(Path(self._view.checkpoint))
            elif chief:
                for number, tensor in enumerate(self._tensors):
                    self._whole(reduction.arena, number).copy_(tensor.detach())
                reduction.fill()
                reduction.give(plan, plan.workers[1:])
            else:
                reduction.take(plan)
        except RuntimeError as problem:
            self._explain(str(problem))
        self._arena = self._own = reduction.arena
        self._begin_at(plan)

    def _meet(self, reduction: Reduction, plan: pb.PlanView) -> None:
        """The first step under a new plan: the group is complete, and its newcomers get the parameters."""
        try:
            reduction.group(plan)
            newcomers = [worker for worker in plan.workers if worker not in self._before]
            if plan.workers[0] == self._task.task and newcomers:
                reduction.keep_buffers(self._buffer_of)
                reduction.give(plan, newcomers)
        except RuntimeError as problem:
            self._explain(str(problem))

    def _buffer_of(self, index: int) -> torch.Tensor | None:
        """A block's newest value where no optimiser changes it."""
        assert self._spec is not None
        number = self._spec.blocks[index].tensor
        return None if self._is_optimised(number) else self._tensors[number].detach()

    def _reduce(self, reduction: Reduction, plan: pb.PlanView, turn: Turn, dense: list[int], overflow: bool) -> bool:
        """One step without servers; the chief writes the checkpoints."""
        assert self._gradients is not None
        assert self._spec is not None
        settings = optimizers.hyperparameters(self._optimizer)
        try:
            taken = reduction.step(plan, self._gradients, dense, overflow, settings)
        except RuntimeError as problem:
            self._explain(str(problem))
        version = turn.step + 1
        if turn.rank == 0 and (version in self._view.saves or version == self._spec.steps):
            reduction.keep_buffers(self._buffer_of)
            self._writer.submit(self._write_shard, version, reduction.shard.snapshot())
        return taken

    def _write_shard(self, step: int, snapshot: ShardSnapshot) -> None:
        written = write_shard(self._task.checkpoint_dir, step, self._task.task, snapshot.write)
        self._attendance.update(lambda report: report.saved.CopyFrom(written))

    def _the_arena(self) -> Arena:
        """The parameters' buffer, from the first view on that tells of it."""
        assert self._spec is not None
        if self._arena is None:
            handle = self._view.parameters if self._shared else ""
            self._arena = Arena.of_parameters(self._spec, handle)
            # Who waits for nobody would see parameters change while it computes.
            self._own = Arena.of_parameters(self._spec) if handle and self._spec.asynchronous else self._arena
        return self._arena

    def _whole(self, arena: Arena, number: int) -> torch.Tensor:
        return arena.whole(self._tensor_blocks[number][0], self._tensors[number])

    def _refresh(self) -> None:
        """Copy the newest values to where the model sees them, unless it sees them already."""
        assert self._own is not None
        if self._own is not self._arena:
            self._own.copy_values(self._the_arena())

    def _adopt(self) -> None:
        """Let the model's parameters be the arena's own wherever that can be; copy the others' values."""
        assert self._own is not None
        arena = self._own
        with torch.no_grad():
            for number, tensor in enumerate(self._tensors):
                value = self._whole(arena, number)
                plain = tensor.device.type == "cpu" and tensor.is_contiguous() and tensor.numel() > 0
                if plain and isinstance(tensor, torch.nn.Parameter) and self._is_optimised(number):
                    tensor.data = value
                    self._in_arena.add(number)
                else:
                    tensor.copy_(value)

    def _release(self) -> None:
        """After the last step the model is the script's alone."""
        with torch.no_grad():
            for number in sorted(self._in_arena):
                self._tensors[number].data = self._tensors[number].detach().clone()
        self._in_arena.clear()

    def _is_optimised(self, number: int) -> bool:
        assert self._spec is not None
        return self._spec.blocks[self._tensor_blocks[number][0]].group >= 0

    def _exchange(self, plan: pb.PlanView, turn: Turn, weight: float, overflow: bool) -> list[pb.Stepped]:
        assert self._spec is not None
        assert self._gradients is not None
        chief = turn.rank == 0
        speaks = chief or self._spec.asynchronous
        settings = json.dumps(optimizers.hyperparameters(self._optimizer)) if speaks else ""
        saves = [*self._view.saves, self._spec.steps]
        dense, sparse = self._write_gradients(self._gradients, weight)
        if self._reduction is not None:
            if sparse:
                raise InvalidInput(
                    "the model has sparse gradients, which workers without parameter servers do not exchange",
                    "make its layers with sparse=False, or let the job have servers (ps: 1)",
                )
            taken = self._reduce(self._reduction, plan, turn, dense, overflow)
            self._take()
            return [pb.Stepped(version=turn.step + 1, skipped=not taken)]
        owners = list(plan.owners)
        changed = [number for number in self._buffers() if chief and self._buffer_changed(number)]
        buffers = [index for number in changed for index in self._tensor_blocks[number]]
        for number in changed:
            self._whole(self._gradients, number).copy_(self._tensors[number].detach())
        self._put(plan, sorted([*dense, *buffers]), self._gradients, self._task.task)
        pushes = {
            server: pb.Push(
                worker=self._task.task,
                plan=plan.number,
                step=turn.step,
                hyperparameters=settings,
                saves=saves,
                gradients=[index for index in dense if owners[index] == server],
                sparse=[message for index, told in sparse.items() if owners[index] == server for message in told],
                buffers=[index for index in buffers if owners[index] == server],
                overflow=overflow,
            )
            for server in sorted(set(owners))
        }
        replies: list[pb.Stepped] = self._call(plan, pushes, "Exchange")
        self.wire_bytes += sum(push.ByteSize() for push in pushes.values())
        self._get(plan, [index for index, block in enumerate(self._spec.blocks) if block.group >= 0])
        self._refresh()
        self._take()
        return replies

    def _write_gradients(self, buffer: Arena, weight: float) -> tuple[list[int], dict[int, list[pb.Tensor]]]:
        """Put this worker's part of the sum into its buffer; gradients of few rows become messages."""
        dense: list[int] = []
        sparse: dict[int, list[pb.Tensor]] = {}
        for number, tensor in enumerate(self._tensors):
            if tensor.grad is None or not self._is_optimised(number):
                continue
            if tensor.grad.layout is torch.sparse_coo:
                for index, part in self._rows(number, tensor.grad.cpu().coalesce() * weight):
                    sparse[index] = encode_sparse(index, part)
                continue
            whole = self._whole(buffer, number)
            if weight == 1.0 or tensor.grad.device.type != "cpu":
                whole.copy_(tensor.grad if weight == 1.0 else tensor.grad * weight)
            else:
                torch.mul(tensor.grad, weight, out=whole)
            dense += self._tensor_blocks[number]
        return dense, sparse

    def _rows(self, number: int, gradient: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """A sparse gradient cut as its tensor is."""
        assert self._spec is not None
        gradient = gradient.coalesce()
        if gradient.sparse_dim() != 1:
            name = self._spec.blocks[self._tensor_blocks[number][0]].name
            raise InvalidInput(
                f"the gradient of {name} is sparse in more than its rows, which is not exchanged",
                "make the layer with sparse=False",
            )
        rows, values = gradient.indices()[0], gradient.values()
        for index in self._tensor_blocks[number]:
            block = self._spec.blocks[index]
            count = block.shape[0] if block.shape else 1
            here = (rows >= block.start) & (rows < block.start + count)
            indices = (rows[here] - block.start).unsqueeze(0)
            yield index, torch.sparse_coo_tensor(indices, values[here], block.shape, is_coalesced=True)

    def _take(self) -> None:
        """Bring the new values to where the model keeps its own."""
        assert self._own is not None
        with torch.no_grad():
            for number, tensor in enumerate(self._tensors):
                if number not in self._in_arena and self._is_optimised(number):
                    tensor.copy_(self._whole(self._own, number))

    def _buffers(self) -> list[int]:
        """Tensors that are not optimised."""
        return [number for number in range(len(self._tensors)) if not self._is_optimised(number)]

    def _buffer_changed(self, number: int) -> bool:
        now = self._tensors[number].detach()
        if number in self._sent_buffers and torch.equal(self._sent_buffers[number], now):
            return False
        self._sent_buffers[number] = now.clone()
        return True

    def _by_stream(self, plan: pb.PlanView, blocks: Iterable[int]) -> dict[int, list[int]]:
        """Those blocks, by server, whose servers do not share memory with this worker."""
        result: dict[int, list[int]] = {}
        if self._shared and all(plan.shared):
            return result
        owners = list(plan.owners)
        for index in blocks:
            owner = owners[index]
            if not (self._shared and plan.shared[owner]):
                result.setdefault(owner, []).append(index)
        return result

    def _put(self, plan: pb.PlanView, blocks: Iterable[int], buffer: Arena, gradients_of: str) -> None:
        """Send what lies in a buffer to the servers that cannot see it."""

        def send(server: int, some: list[int]) -> None:
            stream = buffer.read(some, gradients_of=gradients_of)
            put(self._channel(plan.addresses[server]), self._counted(stream), self._wait_s)

        self._all(send, self._by_stream(plan, blocks))

    def _get(self, plan: pb.PlanView, blocks: Iterable[int]) -> None:
        """Fetch the values of blocks from the servers whose memory this worker cannot see."""
        arena = self._the_arena()

        def fetch(server: int, some: list[int]) -> None:
            stream = get(self._channel(plan.addresses[server]), pb.Pieces(blocks=some), self._wait_s)
            arena.write(*parts(self._counted(stream)))

        self._all(fetch, self._by_stream(plan, blocks))

    def _counted(self, messages: Iterable[bytes]) -> Iterator[bytes]:
        for message in messages:
            self.wire_bytes += len(message)
            yield message

    def _all(self, act: Callable[[int, list[int]], None], work: dict[int, list[int]]) -> None:
        """With all servers at once."""
        if not work:
            return
        try:
            with ThreadPoolExecutor(len(work)) as pool:
                for done in [pool.submit(act, server, some) for server, some in sorted(work.items())]:
                    done.result()
        except grpc.RpcError as problem:
            self._explain(_words(problem))

    def _call(self, plan: pb.PlanView, requests: Mapping[int, Message], name: str) -> list[Any]:
        """Call several servers at once."""
        calls = []
        for server, request in requests.items():
            call: Callable[..., Any] = getattr(ParametersStub(self._channel(plan.addresses[server])), name).future
            calls.append(call(request, timeout=self._wait_s))
        try:
            return [call.result() for call in calls]
        except grpc.RpcError as problem:
            self._explain(_words(problem))

    def _channel(self, address: str) -> grpc.Channel:
        if address not in self._channels:
            self._channels[address] = grpc.insecure_channel(address, CHANNEL_OPTIONS)
            grpc.channel_ready_future(self._channels[address])  # Connects; by itself only the first call would.
        return self._channels[address]

    def _explain(self, details: str) -> NoReturn:
        """Another task is away: the coordinator says whether the job is over, was stopped or failed."""
        with self._changed:
            self._changed.wait_for(lambda: self._view.leave, timeout=_VERDICT_S)
            if self._view.leave:
                self._leave(self._view.message)
        raise Failed(f"another task of the job does not answer: {details}", _SEE)


def _words(problem: grpc.RpcError) -> str:
    return (problem.details() or problem.code().name) if isinstance(problem, grpc.Call) else str(problem)
