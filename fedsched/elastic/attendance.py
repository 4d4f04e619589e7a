"""A member's tie to its coordinator: one stream that carries its reports up and its views down.

The end of the stream means the end of the job: without its coordinator a task has nobody to work for, and it must not
go on burning a machine that was promised to others. The coordinator, for its part, needs no agent to be alive.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator

import grpc

from fedsched.elastic import ending
from fedsched.pb import training_pb2 as pb
from fedsched.pb.training_pb2_grpc import MembershipStub

CHANNEL_OPTIONS: list[tuple[str, int]] = [
    # A job's tasks run side by side; a proxy in the environment is for the user's script, not for them.
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    # A host that dies without a word is noticed within a minute.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
]
SERVER_OPTIONS: list[tuple[str, int]] = [
    *CHANNEL_OPTIONS,
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.so_reuseport", 0),
]
LEAVE_S = 10.0
"""A task that was told to leave and has not done so within this is ended."""


class Attendance:
    """The stream of one member."""

    def __init__(self, coordinator: str, report: pb.MemberReport, on_view: Callable[[pb.MemberView], None]) -> None:
        """Prepare; `on_view` is called from one thread with each new view."""
        self._channel = grpc.insecure_channel(coordinator, CHANNEL_OPTIONS)
        self._report = report
        self._on_view = on_view
        self._lock = threading.Lock()
        self._reports: queue.SimpleQueue[pb.MemberReport | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._listener = threading.Thread(target=self._listen, name="attendance", daemon=True)

    def open(self) -> None:
        """Say hello and start listening.

        Raises:
            grpc.FutureTimeoutError: nobody listens at the coordinator's address.
        """
        grpc.channel_ready_future(self._channel).result(timeout=20.0)
        self.update()
        self._listener.start()

    def update(self, change: Callable[[pb.MemberReport], None] = lambda report: None) -> None:
        """Change the report and send it."""
        with self._lock:
            change(self._report)
            copy = pb.MemberReport()
            copy.CopyFrom(self._report)
            # Told once; it may be long.
            self._report.ClearField("model")
            # Under the lock, so that no older report follows a newer one.
            self._reports.put(copy)

    def close(self, error: str = "") -> None:
        """Say good-bye, with the reason where there was an error."""
        if self._closed.is_set():
            return
        self._closed.set()

        def last(report: pb.MemberReport) -> None:
            report.error = error

        self.update(last)
        self._reports.put(None)
        self._listener.join(timeout=5.0)
        self._channel.close()

    def _listen(self) -> None:
        seen, told_to_leave = 0, False
        try:
            for view in MembershipStub(self._channel).Attend(self._outgoing()):
                told_to_leave = told_to_leave or view.leave
                if view.number >= seen:
                    seen = view.number
                    self._on_view(view)
                    self.update(lambda report, number=view.number: setattr(report, "seen", number))  # type: ignore[misc]
        except grpc.RpcError:
            pass  # The stream is over either way; what follows is the same.
        if self._closed.wait(LEAVE_S if told_to_leave else 0.0):
            return
        ending.say(
            "this task was told to leave and did not"
            if told_to_leave
            else "the job's coordinator is gone; this task ends"
        )
        os._exit(1)

    def _outgoing(self) -> Iterator[pb.MemberReport]:
        while (report := self._reports.get()) is not None:
            yield report
