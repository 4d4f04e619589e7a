"""The controller's end of the agents' lines: which agents are attached, and log requests sent over them."""

from __future__ import annotations

import itertools
import logging
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import grpc

from fedsched.core.ids import ClusterName, JobId
from fedsched.errors import Failed, TimedOut, Unreachable
from fedsched.pb import agents_pb2 as pb
from fedsched.pb import agents_pb2_grpc as pb_grpc

CREDIT = 16
"""Chunks of one request that may be on their way."""
ANSWER_S = 20.0
"""An agent that says nothing for so long about a request that does not follow has failed at it."""
POLL_S = 0.5
"""How often it is looked whether a log's reader is still there."""

_log = logging.getLogger(__name__)

_Piece = pb.LogData | None
"""A chunk of a log, or None at its end."""


class _Line:
    """One attached agent."""

    def __init__(self) -> None:
        self.outgoing: queue.SimpleQueue[pb.ToAgent | None] = queue.SimpleQueue()
        self.requests: dict[int, _Request] = {}


class _Request:
    """One log request and what has come of it. The credit bounds its length."""

    def __init__(self) -> None:
        self.pieces: queue.SimpleQueue[_Piece] = queue.SimpleQueue()
        self.error = ""
        self.broken = ""
        """What came between, so that it is worth while to ask again."""


class Lines(pb_grpc.AgentsServicer):
    """The Agents service. A newer line of a cluster takes the place of an older one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lines: dict[ClusterName, _Line] = {}
        self._numbers = itertools.count(1)

    def Attach(self, request_iterator: Iterator[pb.FromAgent], context: grpc.ServicerContext) -> Iterator[pb.ToAgent]:
        """Serve one agent's line until it ends."""
        hello = next(request_iterator, None)
        if hello is None or hello.WhichOneof("kind") != "hello":
            return
        cluster = ClusterName(hello.hello.cluster)
        line = _Line()
        with self._lock:
            older = self._lines.get(cluster)
            self._lines[cluster] = line
        if older is not None:
            older.outgoing.put(None)
        context.add_callback(lambda: line.outgoing.put(None))
        reader = threading.Thread(target=self._read, args=(request_iterator, line), name=f"line {cluster}", daemon=True)
        reader.start()
        # Tells the agent that it is attached.
        yield pb.ToAgent()
        try:
            yield from iter(line.outgoing.get, None)
        finally:
            with self._lock:
                if self._lines.get(cluster) is line:
                    del self._lines[cluster]
            self._end_all(line, f"the line to the agent of {cluster} broke")

    def close(self) -> None:
        """End all lines."""
        with self._lock:
            for line in self._lines.values():
                line.outgoing.put(None)

    def logs(
        self, cluster: ClusterName, job_id: JobId, follow: bool, read: Mapping[str, int], active: Callable[[], bool]
    ) -> Iterator[pb.LogData]:
        """What the job's tasks printed on `cluster`, as its agent sends it, while `active()`.

        Args:
            read: bytes of each log file that are not wanted.

        Raises:
            Unreachable: the agent is not attached, or its line broke.
            Failed: the agent could not read it.
            TimedOut: it said nothing for `ANSWER_S`, and there is nothing to follow.
        """
        with self._lock:
            line = self._lines.get(cluster)
            if line is None:
                raise Unreachable(
                    f"the agent of {cluster} is not attached to this controller, so its logs cannot be read",
                    f"check `fedsched info`; the log files lie in the state directory of {cluster}'s agent",
                )
            number = next(self._numbers)
            request = line.requests[number] = _Request()
        line.outgoing.put(
            pb.ToAgent(read_logs=pb.ReadLogs(request=number, job_id=job_id, follow=follow, credit=CREDIT, read=read))
        )
        try:
            yield from self._pieces(line, number, request, follow, active)
        finally:
            with self._lock:
                line.requests.pop(number, None)
            line.outgoing.put(pb.ToAgent(stop_logs=pb.StopLogs(request=number)))

    def _pieces(
        self, line: _Line, number: int, request: _Request, follow: bool, active: Callable[[], bool]
    ) -> Iterator[pb.LogData]:
        silent_s = 0.0
        while active():
            try:
                piece = request.pieces.get(timeout=POLL_S)
            except queue.Empty:
                silent_s += POLL_S
                if silent_s >= ANSWER_S and not follow:
                    raise TimedOut(f"the agent sent nothing for {ANSWER_S:.0f} s", "try again") from None
                continue
            silent_s = 0.0
            if piece is None:
                if request.broken:
                    raise Unreachable(f"the log ended early: {request.broken}", "try again")
                if request.error:
                    raise Failed(f"the log ended early: {request.error}", "try again")
                return
            yield piece
            line.outgoing.put(pb.ToAgent(more_logs=pb.MoreLogs(request=number, credit=1)))

    def _read(self, messages: Iterator[pb.FromAgent], line: _Line) -> None:
        try:
            for message in messages:
                self._take(line, message)
        except grpc.RpcError:
            # The line broke; `Attach` ends by the same cause.
            pass
        finally:
            line.outgoing.put(None)

    def _take(self, line: _Line, message: pb.FromAgent) -> None:
        kind = message.WhichOneof("kind")
        part: Any = message.log_data if kind == "log_data" else message.log_end
        with self._lock:
            request = line.requests.get(part.request)
        if request is None:
            return
        if kind == "log_data":
            request.pieces.put(part)
        elif kind == "log_end":
            request.error = part.error
            request.pieces.put(None)

    def _end_all(self, line: _Line, why: str) -> None:
        with self._lock:
            requests, line.requests = list(line.requests.values()), {}
        for request in requests:
            request.broken = why
            request.pieces.put(None)
