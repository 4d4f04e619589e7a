"""The executor's side of a job's coordinator: follows its reports and gives it orders, never waiting."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import grpc

from fedsched.core.ids import TaskName
from fedsched.pb import training_pb2, training_pb2_grpc
from fedsched.runtime.backoff import Backoff

BACKOFF_S = (0.1, 2.0)
"""First and longest wait before a broken stream of reports is asked for again."""
AGAIN_S = 1.0
"""Between two questions to a coordinator that has not answered."""
MARGIN_S = 5.0
"""How much later than its own deadline for a resize a coordinator that lives has answered."""
ANSWER_S = 400.0
"""How much later than a resize's deadline its answer may come. A switch that has begun takes as long as some steps do,
and a coordinator ends a job in which none ends for long."""

_log = logging.getLogger(__name__)


class Answer(Protocol):
    """An answer that will come."""

    def done(self) -> bool:
        """Whether it, or a failure, is there."""

    def exception(self) -> Exception | None:
        """The failure, once done."""

    def result(self) -> Any:
        """The answer, once done."""

    def cancel(self) -> bool:
        """No longer wanted."""


class Control:
    """A coordinator that listens at `address`; `on_report` is called from a thread of its own until `close`."""

    def __init__(self, address: str, name: str, on_report: Callable[[training_pb2.JobReport], None]) -> None:
        self._channel = grpc.insecure_channel(
            address,
            options=[
                ("grpc.enable_http_proxy", 0),  # a proxy in the environment does not lead into the cluster
                ("grpc.use_local_subchannel_pool", 1),  # ports are used again by other jobs' coordinators
                ("grpc.max_reconnect_backoff_ms", 1000),
            ],
        )
        self._stub = training_pb2_grpc.JobControlStub(self._channel)
        self._on_report = on_report
        self._closed = threading.Event()
        self._stream: Any = None
        self._thread = threading.Thread(target=self._follow, name=f"follow-{name}", daemon=True)
        self._thread.start()

    def scale(self, seq: int, tasks: Sequence[TaskName], deadline_s: float) -> Answer:
        """Order exactly these members."""
        request = training_pb2.ScaleRequest(seq=seq, tasks=tasks, deadline_s=deadline_s)
        # The coordinator keeps the deadline itself; a little later it must have answered.
        answer: Answer = self._stub.Scale.future(request, timeout=deadline_s + MARGIN_S)
        return answer

    def lose(self, seq: int, task: TaskName, message: str) -> None:
        """Tell that a task which the order waits for has ended before it joined."""
        self._stub.Lose.future(training_pb2.LostTask(seq=seq, task=task, message=message), timeout=AGAIN_S)

    def stop(self, checkpoint: bool, grace_s: float) -> Answer:
        """Order the job's end."""
        request = training_pb2.StopRequest(checkpoint=checkpoint, grace_s=grace_s)
        answer: Answer = self._stub.Stop.future(request, timeout=max(grace_s, 0.1))
        return answer

    def close(self) -> None:
        """Stop listening; the job goes on."""
        self._closed.set()
        stream = self._stream
        if stream is not None:
            stream.cancel()
        self._channel.close()
        if self._thread is not threading.current_thread():
            self._thread.join(5.0)

    def _follow(self) -> None:
        backoff = Backoff(*BACKOFF_S)
        while not self._closed.is_set():
            try:
                self._stream = self._stub.Follow(training_pb2.FollowRequest())
                for report in self._stream:
                    backoff.reset()
                    self._on_report(report)
            except grpc.RpcError as problem:
                _log.debug("reports broke off: %s", problem)
            except ValueError:
                return  # the channel was closed between two tries
            self._closed.wait(backoff.pause_s())


class MemberOrder:
    """Who shall be a member, asked of a coordinator until it answers: it carries out each number once.

    No answer is no refusal: where steps are slow the members have the new plan already, and to end the newcomers then
    would end the job.
    """

    def __init__(self, control: Control, number: int, members: Sequence[TaskName], deadline_s: float) -> None:
        self._control = control
        self._number = number
        self._members = members
        self._deadline_s = deadline_s
        now_s = time.monotonic()
        self._until_s = now_s + deadline_s + ANSWER_S
        self._answer = control.scale(number, members, deadline_s)
        self._again_s = now_s + AGAIN_S
        self._lost: tuple[TaskName, str] | None = None

    def lose(self, task: TaskName, message: str) -> None:
        """One of the newcomers has ended: the others need not wait for it."""
        self._lost, self._again_s = (task, message), time.monotonic()

    def reply(self, *, expected: bool) -> training_pb2.ScaleReply | str | None:
        """The coordinator's, or why there is none; None while it may still come.

        Args:
            expected: the coordinator runs, and has a job to look after.
        """
        if not self._answer.done():
            # Told again, because it may have come there before the order itself.
            if self._lost is not None and time.monotonic() >= self._again_s:
                self._control.lose(self._number, *self._lost)
                self._again_s = time.monotonic() + AGAIN_S
            return None
        problem = self._answer.exception()
        if problem is None:
            reply: training_pb2.ScaleReply = self._answer.result()
            return reply
        now_s = time.monotonic()
        if now_s > self._until_s or not expected:
            return problem.details() or problem.code().name if isinstance(problem, grpc.Call) else str(problem)
        if now_s >= self._again_s:
            self._answer = self._control.scale(self._number, self._members, self._deadline_s)
            self._again_s = now_s + AGAIN_S
        return None
