"""One job's coordinator: `python -m fedsched.elastic.coordinator`, started by an executor before the job's members.

Wraps the scaling core: carries views to members and their reports to the core, answers the executor, completes
checkpoints. Needs no torch, and no agent: it goes on while the executor that started it is away.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import assert_never

import grpc
from google.protobuf.json_format import MessageToDict
from opentelemetry.trace import Span

from fedsched import tracing
from fedsched.core import membership
from fedsched.core.ids import TaskName
from fedsched.core.membership import Phase, Plan, View
from fedsched.core.scaling import Scaling, ScalingConfig
from fedsched.elastic import checkpoint, ending, environment, memory
from fedsched.elastic.attendance import SERVER_OPTIONS
from fedsched.elastic.checkpoint import ShardFile
from fedsched.elastic.environment import TaskEnvironment
from fedsched.elastic.memory import Layout, Segment
from fedsched.elastic.model import ModelSpec, block_difference
from fedsched.errors import CorruptCheckpoint, FedschedError
from fedsched.files import write_whole
from fedsched.pb import training_pb2 as pb
from fedsched.pb.training_pb2_grpc import (
    JobControlServicer,
    MembershipServicer,
    add_JobControlServicer_to_server,
    add_MembershipServicer_to_server,
)

_THREADS_MAX = 512
"""Each member's stream holds a thread; threads are made as they are needed."""
_TICK_S = 0.1
"""How often the core hears of the time."""
_FOLLOW_S = 0.2
"""Least time between two reports to the executor."""
_NAME_S = 10.0
"""How long a newcomer waits for the stream of an earlier process of its name to end."""
_LEAVE_S = 12.0
"""How long members may take to leave at the end."""

_PHASES = {
    Phase.JOINING: pb.JobReport.JOINING,
    Phase.TRAINING: pb.JobReport.TRAINING,
    Phase.FINISHED: pb.JobReport.FINISHED,
    Phase.STOPPED: pb.JobReport.STOPPED,
    Phase.FAILED: pb.JobReport.FAILED,
}


class _Link:
    """The coordinator's end of one member's stream."""

    def __init__(self, hello: pb.MemberReport) -> None:
        self.task = TaskName(hello.task)
        self.address = hello.address
        self.shares = hello.machine == memory.machine()
        """Whether it is on the coordinator's machine."""
        self.gradients = ""
        self.parameters = ""
        self.error = ""
        self.loss: float | None = None
        self.told_model = False
        self.views: queue.SimpleQueue[pb.MemberView | None] = queue.SimpleQueue()


class Coordinator(MembershipServicer, JobControlServicer):
    """The shell around the scaling core. One lock guards the core; nothing slow happens under it."""

    def __init__(self, task: TaskEnvironment, resume: checkpoint.Checkpoint | None) -> None:
        self._root = task.checkpoint_dir
        self._complaint = ""
        """Of the newest checkpoint, where it could not be written."""
        self._complaints: dict[TaskName, str] = {}
        """Of each worker that has one; they stay, for what they tell of is lost."""
        self._traceparent = task.traceparent
        self._resume = resume
        self._lock = threading.Condition()
        config = ScalingConfig(join_s=task.join_s, stall_s=task.stall_s, checkpoint_every_s=task.checkpoint_every_s)
        self._core = Scaling(task.tasks, time.monotonic(), resume.step if resume else 0, config)
        self._links: dict[TaskName, _Link] = {}
        self._model: ModelSpec | None = None
        self._parameters: Segment | None = None
        """Held here because the coordinator is there from the first step to the last."""
        self._loss: float | None = None
        """Mean of the workers' newest losses."""
        self._accuracy: float | None = None
        self._shards: dict[tuple[int, TaskName], ShardFile] = {}
        self._answers: dict[int, Future[pb.ScaleReply]] = {}
        self._to_complete: queue.SimpleQueue[membership.CompleteCheckpoint] = queue.SimpleQueue()
        self._pace: deque[tuple[float, int]] = deque(maxlen=50)
        self._switch: Span | None = None

    # Members.

    def Attend(
        self, request_iterator: Iterator[pb.MemberReport], context: grpc.ServicerContext
    ) -> Iterator[pb.MemberView]:
        """One member's stream."""
        try:
            hello = next(request_iterator)
        except (StopIteration, grpc.RpcError):
            return
        link = _Link(hello)
        with self._lock:
            # An executor may have seen the earlier process end before this side has seen its stream end.
            free = self._lock.wait_for(lambda: link.task not in self._links, timeout=_NAME_S)
            if free:
                self._links[link.task] = link
                training = len(self._core.plan.workers) if self._core.plan else 0
                greeting = pb.MemberView(machine=memory.machine(), training=training, reducing=self._core.reducing)
                self._tell_model(link, greeting)
                link.views.put(greeting)
        if not free:
            yield _refusal(f"{link.task} is here already; two processes cannot have one name")
            return
        reader = threading.Thread(target=self._listen, args=(link, hello, request_iterator), daemon=True)
        reader.start()
        while (view := link.views.get()) is not None:
            yield view

    def _listen(self, link: _Link, hello: pb.MemberReport, reports: Iterator[pb.MemberReport]) -> None:
        try:
            self._take(link, hello)
            for report in reports:
                self._take(link, report)
        except grpc.RpcError:
            pass  # The process is gone; the stream's end says so.
        finally:
            link.views.put(None)
            with self._lock:
                del self._links[link.task]
                self._lock.notify_all()
                self._handle(membership.TaskGone(time.monotonic(), link.task, link.error))

    def _take(self, link: _Link, report: pb.MemberReport) -> None:
        now_s = time.monotonic()
        with self._lock:
            link.error = report.error or link.error
            link.gradients = report.gradients or link.gradients
            link.parameters = report.parameters or link.parameters
            link.address = report.address or link.address
            if report.complaint and link.task not in self._complaints:
                self._complaints[link.task] = report.complaint
                ending.say(f"{link.task}: {report.complaint}")
            if report.HasField("loss"):
                link.loss = report.loss
                losses = [other.loss for other in self._links.values() if other.loss is not None]
                self._loss = sum(losses) / len(losses)
            if report.HasField("accuracy"):
                self._accuracy = report.accuracy
            if report.model:
                refusal = self._meet(ModelSpec.loads(report.model), now_s)
                if refusal:
                    link.error = refusal
                    link.views.put(_refusal(refusal))
                    return
            if report.error and self._core.phase in (Phase.JOINING, Phase.TRAINING):
                self._handle(membership.TaskGone(now_s, link.task, report.error))
            elif report.ready:
                saved = self._shard_written(link.task, report.saved, now_s)
                self._handle(
                    membership.TaskReported(
                        now_s,
                        link.task,
                        seen=report.seen,
                        done=report.done,
                        holds=report.holds,
                        saved=saved,
                        pause_s=report.pause_s,
                        shares=link.shares,
                    )
                )

    def _meet(self, model: ModelSpec, now_s: float) -> str:
        """Learn what is trained, or say why a worker that trains something else cannot take part."""
        if self._model is not None:
            return self._model.difference(model)
        if self._resume is not None:
            other = block_difference(self._resume.model.blocks, model.blocks)
            if other:
                return f"the checkpoint in {self._resume.folder} is of another model: {other}"
            if self._resume.model.steps_per_epoch != model.steps_per_epoch:
                return (
                    f"the checkpoint in {self._resume.folder} has epochs of {self._resume.model.steps_per_epoch} steps"
                )
        self._model = model
        self._parameters = Segment.create("parameters", Layout.of(model).total_bytes)
        self._handle(membership.ModelDescribed(now_s, model.core_blocks(), model.steps, model.asynchronous))
        return ""

    def _shard_written(self, task: TaskName, saved: pb.ShardWritten, now_s: float) -> int:
        if saved.error:
            self._handle(membership.CheckpointFailed(now_s, saved.step, saved.error))
            return -1
        if not saved.file:
            return -1
        self._shards[saved.step, task] = ShardFile(saved.file, saved.sha256, saved.size_bytes)
        return saved.step

    # The executor.

    def Scale(self, request: pb.ScaleRequest, context: grpc.ServicerContext) -> pb.ScaleReply:
        """Change the members; a repeated order gets the first one's answer."""
        with self._lock:
            answer = self._answers.get(request.seq)
            if answer is None:
                answer = self._answers[request.seq] = Future()
                tasks = tuple(TaskName(task) for task in request.tasks)
                self._handle(membership.ScaleRequested(time.monotonic(), request.seq, tasks, request.deadline_s))
        # The core answers every order: at its deadline, when the switch is done, or when the job ends.
        return answer.result()

    def Lose(self, request: pb.LostTask, context: grpc.ServicerContext) -> pb.LostTaskNoted:
        """Wait for a newcomer no longer."""
        with self._lock:
            lost = membership.NewcomerLost(time.monotonic(), request.seq, TaskName(request.task), request.message)
            self._handle(lost)
        return pb.LostTaskNoted()

    def Follow(self, request: pb.FollowRequest, context: grpc.ServicerContext) -> Iterator[pb.JobReport]:
        """The job's state now and after every change."""
        last: pb.JobReport | None = None
        while context.is_active():
            with self._lock:
                report, ended = self.report(), self._core.ended
            if report != last:
                last = report
                yield report
            if ended:
                return
            with self._lock:
                self._lock.wait_for(lambda: self._core.ended, timeout=_FOLLOW_S)

    def Stop(self, request: pb.StopRequest, context: grpc.ServicerContext) -> pb.StopReply:
        """End the job, with a checkpoint first if asked."""
        with self._lock:
            self._handle(membership.StopRequested(time.monotonic(), request.checkpoint, request.grace_s))
            self._lock.wait_for(lambda: self._core.ended, timeout=request.grace_s + 1.0)
            return pb.StopReply(checkpoint_step=self._core.checkpoint_step)

    def report(self) -> pb.JobReport:
        """How the job stands."""
        report = pb.JobReport(
            phase=_PHASES[self._core.phase],
            steps=self._core.done,
            checkpoint_step=self._core.checkpoint_step,
            tasks=self._core.members,
            message=self._core.message or self._all_complaints(),
            loss=self._loss,
            accuracy=self._accuracy,
        )
        if self._model is not None:
            report.epochs = self._core.done / self._model.steps_per_epoch
            report.samples_per_s = self._samples_per_s(self._model)
        return report

    def _all_complaints(self) -> str:
        workers = [f"{task}: {complaint}" for task, complaint in sorted(self._complaints.items())]
        return "; ".join(filter(None, [self._complaint, *workers]))

    def _samples_per_s(self, model: ModelSpec) -> float:
        if len(self._pace) < 2:
            return 0.0
        (first_s, first), (last_s, last) = self._pace[0], self._pace[-1]
        steps_per_s = (last - first) / (last_s - first_s) if last_s > first_s else 0.0
        return steps_per_s * model.samples / model.steps_per_epoch

    # The core.

    def _handle(self, event: membership.Event) -> None:
        """One event through the core, under the lock, and what it orders."""
        if isinstance(event, membership.CheckpointFailed):
            self._complaint = f"the checkpoint of step {event.step} could not be written: {event.message}"
            ending.say(self._complaint)
        elif isinstance(event, membership.CheckpointWritten):
            self._complaint = ""
        before, pause = self._core.next_plan, 0.0
        for command in self._core.handle(event):
            match command:
                case membership.Send(task, view):
                    self._send(task, view)
                case membership.AnswerScale(seq, ok, tasks, pause_s, message):
                    reply = pb.ScaleReply(ok=ok, tasks=tasks, pause_s=pause_s, message=message)
                    self._answers.setdefault(seq, Future()).set_result(reply)
                    pause = max(pause, pause_s)
                case membership.CompleteCheckpoint():
                    self._to_complete.put(command)
                case membership.End():
                    self._lock.notify_all()
                case _:
                    assert_never(command)
        self._trace_switch(before, pause)

    def _trace_switch(self, before: Plan | None, pause_s: float) -> None:
        after = self._core.next_plan
        if self._switch is not None and (after is not before or self._core.ended):
            self._switch.set_attribute("pause_s", pause_s)
            self._switch.end()
            self._switch = None
        if after is not None and after is not before:
            attributes: dict[str, str | int | float | bool] = {
                "from": " ".join(self._core.members),
                "to": " ".join(after.tasks),
                "step": after.from_step,
            }
            self._switch = tracing.start("resize.switch", parent=self._traceparent, attributes=attributes)

    def _send(self, task: TaskName, view: View) -> None:
        link = self._links.get(task)
        if link is None:
            return
        message = pb.MemberView(
            number=view.number,
            plans=[self._plan_view(plan) for plan in view.plans],
            granted=view.granted,
            saves=view.saves,
            leave=view.leave,
            message=view.message,
            finished=view.finished,
        )
        if view.plans:
            message.checkpoint = str(self._resume.folder) if self._resume else ""
            self._tell_model(link, message)
        link.views.put(message)

    def _tell_model(self, link: _Link, message: pb.MemberView) -> None:
        """Say once what is trained, where that is known: a newcomer has all its memory in place before it is ready."""
        if link.told_model or self._model is None:
            return
        message.model = self._model.dumps()
        message.machine = memory.machine()
        message.training = len(self._core.plan.workers) if self._core.plan else 0
        message.checkpoint = str(self._resume.folder) if self._resume else ""
        message.parameters = self._parameters.handle if self._parameters and link.shares else ""
        link.told_model = True

    def _plan_view(self, plan: Plan) -> pb.PlanView:
        index = {server: number for number, server in enumerate(plan.servers)}
        links = [self._links.get(task) for task in plan.servers]
        chief = self._links.get(plan.workers[0])
        return pb.PlanView(
            number=plan.number,
            from_step=plan.from_step,
            workers=plan.workers,
            servers=plan.servers,
            addresses=[link.address if link else "" for link in links],
            shared=[bool(link and link.shares) for link in links],
            gradients=[self._links[task].gradients if task in self._links else "" for task in plan.workers],
            owners=[index[owner] for owner in plan.owners],
            rendezvous=chief.address if chief and not plan.servers else "",
            parameters=chief.parameters if chief and chief.shares and not plan.servers else "",
        )

    # The main thread.

    def run(self, terminated: threading.Event) -> None:
        """Keep time and complete checkpoints until the job is over and its members have left."""
        until_s: float | None = None
        while until_s is None or (self._links and time.monotonic() < until_s):
            with contextlib.suppress(queue.Empty):
                self._complete(self._to_complete.get(timeout=_TICK_S))
            with self._lock:
                now_s = time.monotonic()
                if terminated.is_set():
                    self._handle(membership.StopRequested(now_s, checkpoint=False, grace_s=0.0))
                self._pace.append((now_s, self._core.done))
                self._handle(membership.Tick(now_s))
                if self._core.ended and until_s is None:
                    until_s = now_s + _LEAVE_S

    def _complete(self, order: membership.CompleteCheckpoint) -> None:
        """Add the manifest and make the checkpoint visible."""
        assert self._model is not None
        with tracing.span("checkpoint", parent=self._traceparent, attributes={"step": order.step}):
            with self._lock:
                shards = [self._shards[order.step, server] for server in order.servers]
                self._shards = {key: shard for key, shard in self._shards.items() if key[0] > order.step}
            event: membership.Event
            try:
                checkpoint.complete(self._root, order.step, self._model, shards)
                event = membership.CheckpointWritten(time.monotonic(), order.step)
            except OSError as problem:
                event = membership.CheckpointFailed(time.monotonic(), order.step, str(problem))
        with self._lock:
            self._handle(event)


def _refusal(message: str) -> pb.MemberView:
    return pb.MemberView(leave=True, message=message)


def main() -> int:
    """Coordinate one attempt; 0 when it finished or was stopped as ordered, else 1."""
    terminated = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: terminated.set())
    try:
        task = environment.read(os.environ)
        tracing.setup("coordinator", endpoint=task.trace_endpoint, file=task.trace_file)
        try:
            return _coordinate(task, terminated)
        finally:
            tracing.shutdown()
    except FedschedError as problem:
        ending.say(str(problem))
        return problem.exit_code


def _coordinate(task: TaskEnvironment, terminated: threading.Event) -> int:
    task.attempt_dir.mkdir(parents=True, exist_ok=True)
    checkpoint.discard_partial(task.checkpoint_dir)
    try:
        resume, problems = checkpoint.newest(task.checkpoint_dir)
    except CorruptCheckpoint as problem:
        _write_json(task.attempt_dir / "result.json", pb.JobReport(phase=pb.JobReport.FAILED, message=problem.message))
        raise
    for line in problems:
        ending.say(f"passing over a damaged checkpoint: {line}")
    coordinator = Coordinator(task, resume)
    endpoint = grpc.server(ThreadPoolExecutor(_THREADS_MAX), options=SERVER_OPTIONS)
    add_MembershipServicer_to_server(coordinator, endpoint)
    add_JobControlServicer_to_server(coordinator, endpoint)
    port = endpoint.add_insecure_port(f"{task.host}:0")
    endpoint.start()
    ready = {"address": f"{task.host}:{port}", "pid": os.getpid()}
    write_whole(task.attempt_dir / "coordinator.json", json.dumps(ready).encode())
    coordinator.run(terminated)
    result = coordinator.report()
    _write_json(task.attempt_dir / "result.json", result)
    endpoint.stop(grace=1.0).wait()
    return 0 if result.phase in (pb.JobReport.FINISHED, pb.JobReport.STOPPED) else 1


def _write_json(path: Path, report: pb.JobReport) -> None:
    plain = MessageToDict(report, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    # Protobuf spells 64-bit numbers as text, for readers without such numbers.
    plain |= {"steps": report.steps, "checkpoint_step": report.checkpoint_step}
    write_whole(path, json.dumps(plain).encode())


if __name__ == "__main__":
    ending.run(main)
