"""A worker's side of the job: waits for grants, exchanges gradients for parameters with the servers."""

from __future__ import annotations

import json
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc
import torch
from torch.optim import Optimizer

from fedsched import tracing
from fedsched.elastic import optimizers
from fedsched.elastic.attendance import CHANNEL_OPTIONS, Attendance
from fedsched.elastic.environment import TaskEnvironment
from fedsched.elastic.model import ModelSpec
from fedsched.elastic.tensors import decode, encode
from fedsched.errors import Failed, InvalidInput, StartFailed, TimedOut
from fedsched.pb import training_pb2 as pb
from fedsched.pb.training_pb2_grpc import ParametersStub

_REPORT_S = 0.2
"""Longest time between two reports of progress."""
_VERDICT_S = 10.0
"""A failed call to a server is followed by the coordinator's word within this, or is an error of its own."""


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
        self._channels: dict[str, grpc.Channel] = {}
        self._step = -1
        """The step whose parameters the model holds; -1 before it has any from the job."""
        self._report_at = 0
        self._reported_s = 0.0
        self._reported = -1
        self._loss: float | torch.Tensor | None = None
        self._exchange_s: deque[float] = deque(maxlen=20)
        self._pause_s = 0.0
        tracing.setup(task.task, endpoint=task.trace_endpoint, file=task.trace_file)
        self._joining = tracing.start(
            "task.join", parent=task.traceparent, attributes={"job": task.job_id, "task": task.task}
        )
        self._attendance = Attendance(task.coordinator, pb.MemberReport(task=task.task), self._see)
        try:
            self._attendance.open()
        except grpc.FutureTimeoutError as problem:
            raise StartFailed(
                f"the job's coordinator at {task.coordinator} does not answer", "let the executor start the job again"
            ) from problem

    def begin(self, spec: ModelSpec, tensors: Sequence[torch.Tensor]) -> None:
        """Say what is trained, and that this worker is ready to."""
        self._spec, self._tensors = spec, tensors

        def ready(report: pb.MemberReport) -> None:
            report.model = spec.dumps()
            report.ready = True

        self._attendance.update(ready)

    def turn(self) -> Turn | None:
        """Wait until the next step may be run. Ends the process when this worker's part is over."""
        assert self._spec is not None
        if self._step >= self._spec.steps:
            self._await_finished()
            return None
        since_s = time.monotonic()
        plan = self._await_plan()
        self.rank = list(plan.workers).index(self._task.task)
        if self._step < 0:
            self._start(plan)
            if self._step >= self._spec.steps:
                self._await_finished()
                return None
        elif self._step == plan.from_step:
            self._pause_s = time.monotonic() - since_s
        return Turn(self._step, self.rank, len(plan.workers))

    def step(self, turn: Turn, weight: float, loss: float | torch.Tensor | None) -> None:
        """Push this worker's gradients, take the new parameters."""
        assert self._spec is not None
        plan = self._await_plan()
        began_s = time.monotonic()
        self._exchange(plan, turn, weight)
        took_s = time.monotonic() - began_s
        if turn.step == plan.from_step and plan.number > 1 and self._exchange_s:
            # Whatever the first exchange under a new plan took longer than usual was spent waiting for the switch.
            self._pause_s += max(0.0, took_s - statistics.median(self._exchange_s))
        self._exchange_s.append(took_s)
        self._step = turn.step + 1
        self._loss = loss if loss is not None else self._loss
        self._report_progress(turn.step == plan.from_step)

    def report(self, accuracy: float) -> None:
        """Tell the coordinator."""
        self._attendance.update(lambda report: setattr(report, "accuracy", accuracy))

    def close(self, error: str) -> None:
        """Leave the job."""
        if not error and not self._view.leave and (self._spec is None or self._step < self._spec.steps):
            steps = f"of {self._spec.steps} steps" if self._spec else "steps, without calling batches()"
            error = f"the script ended after {max(self._step, 0)} {steps}"
        self._attendance.close(error)
        for channel in self._channels.values():
            channel.close()
        tracing.shutdown()

    # Views and reports.

    def _see(self, view: pb.MemberView) -> None:
        with self._changed:
            self._view = view
            self._report_at = (self._step + view.granted) // 2
            self._changed.notify_all()

    def _await_plan(self) -> pb.PlanView:
        """The plan of the next step, once it is granted; ends the process when told to."""
        until_s = time.monotonic() + self._wait_s
        with self._changed:
            while True:
                if self._view.leave:
                    self._leave(self._view.message)
                plan = self._granted_plan()
                if plan is not None:
                    return plan
                if self._reported < self._step:
                    # Whoever waits must have said where it stands: that may be what the coordinator waits for.
                    self._report_progress(urgent=True)
                if time.monotonic() > until_s:
                    raise TimedOut(f"no step was granted within {self._wait_s:g} s")
                self._changed.wait(timeout=1.0)

    def _await_finished(self) -> None:
        """After the last step: wait until the coordinator knows of it. From then on this process may end in any way."""
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
                    raise TimedOut(f"the coordinator did not confirm the last step within {self._wait_s:g} s")
                self._changed.wait(timeout=1.0)

    def _granted_plan(self) -> pb.PlanView | None:
        """The plan that covers the next step, if this worker is in it and may run it."""
        view = self._view
        if self._step < 0:
            # Pulling parameters needs no grant: the servers answer when they have come to the plan's first step.
            return next((plan for plan in view.plans if self._task.task in plan.workers), None)
        covering = [plan for plan in view.plans if plan.from_step <= self._step]
        if not covering or self._step >= view.granted or self._task.task not in covering[-1].workers:
            return None
        return covering[-1]

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
            if self._loss is not None:
                report.loss = float(self._loss)

        self._attendance.update(progress)

    # Servers.

    def _start(self, plan: pb.PlanView) -> None:
        """Get the parameters of the plan's first step; the chief of a fresh job brings them along."""
        if plan.number == 1 and not self._view.checkpoint and plan.workers[0] == self._task.task:
            messages = self._by_server(plan, range(len(self._tensors)), self._tensors)
            self._call(plan, {server: pb.Blocks(version=0, tensors=some) for server, some in messages.items()}, "Fill")
        request = pb.PullRequest(plan=plan.number, version=plan.from_step)
        replies = self._call(plan, dict.fromkeys(sorted(set(plan.owners)), request), "Pull")
        self._take(replies)
        self._sent_buffers = {index: self._tensors[index].detach().clone() for index in self._buffers()}
        self._step = plan.from_step
        self._report_progress(urgent=True)
        self._joining.end()

    def _exchange(self, plan: pb.PlanView, turn: Turn, weight: float) -> None:
        assert self._spec is not None
        chief = turn.rank == 0
        settings = json.dumps(optimizers.hyperparameters(self._optimizer)) if chief else ""
        save = turn.step + 1 in self._view.saves or turn.step + 1 == self._spec.steps
        with_gradient = [i for i, tensor in enumerate(self._tensors) if tensor.grad is not None]
        gradients = self._by_server(plan, with_gradient, [self._gradient(index) for index in with_gradient])
        changed = [index for index in self._buffers() if chief and self._buffer_changed(index)]
        buffers = self._by_server(plan, changed, [self._tensors[index] for index in changed])
        pushes = {
            server: pb.Push(
                worker=self._task.task,
                plan=plan.number,
                step=turn.step,
                weight=weight,
                hyperparameters=settings,
                save=save,
                gradients=gradients.get(server, ()),
                buffers=buffers.get(server, ()),
            )
            for server in sorted(set(plan.owners))
        }
        self._take(self._call(plan, pushes, "Exchange"))

    def _gradient(self, index: int) -> torch.Tensor:
        gradient = self._tensors[index].grad
        assert gradient is not None
        if gradient.is_sparse:
            assert self._spec is not None
            raise InvalidInput(
                f"the gradient of {self._spec.blocks[index].name} is sparse, which is not exchanged",
                "make the layer with sparse=False",
            )
        return gradient

    def _buffers(self) -> list[int]:
        assert self._spec is not None
        return [index for index, block in enumerate(self._spec.blocks) if block.group < 0]

    def _buffer_changed(self, index: int) -> bool:
        now = self._tensors[index].detach()
        if index in self._sent_buffers and torch.equal(self._sent_buffers[index], now):
            return False
        self._sent_buffers[index] = now.clone()
        return True

    def _by_server(
        self, plan: pb.PlanView, indexes: Sequence[int], tensors: Sequence[torch.Tensor]
    ) -> dict[int, list[pb.Tensor]]:
        result: dict[int, list[pb.Tensor]] = {}
        for index, tensor in zip(indexes, tensors, strict=True):
            result.setdefault(plan.owners[index], []).append(encode(index, tensor))
        return result

    def _call(
        self,
        plan: pb.PlanView,
        requests: dict[int, pb.Blocks] | dict[int, pb.PullRequest] | dict[int, pb.Push],
        name: str,
    ) -> list[pb.Blocks]:
        """Call several servers at once."""
        calls = []
        for server, request in requests.items():
            call: Callable[..., Any] = getattr(self._stub(plan.addresses[server]), name).future
            calls.append((server, call(request, timeout=self._wait_s)))
        try:
            return [call.result() for _, call in calls]
        except grpc.RpcError as problem:
            self._explain(problem)

    def _stub(self, address: str) -> ParametersStub:
        if address not in self._channels:
            self._channels[address] = grpc.insecure_channel(address, CHANNEL_OPTIONS)
        return ParametersStub(self._channels[address])

    def _explain(self, problem: grpc.RpcError) -> NoReturn:
        """A server is away: the coordinator says whether the job is over, was stopped or failed."""
        with self._changed:
            self._changed.wait_for(lambda: self._view.leave, timeout=_VERDICT_S)
            if self._view.leave:
                self._leave(self._view.message)
        details = problem.details() if isinstance(problem, grpc.Call) else str(problem)
        raise Failed(f"a parameter server does not answer: {details}", "see the logs of the job's servers") from problem

    def _take(self, replies: Sequence[pb.Blocks]) -> None:
        with torch.no_grad():
            for reply in replies:
                for message in reply.tensors:
                    self._tensors[message.block].copy_(decode(message))
