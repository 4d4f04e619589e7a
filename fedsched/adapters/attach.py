"""The agent's end of the line to the controllers: it attaches to each of them and answers their log requests."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import grpc

from fedsched.adapters.rpc import channel_options
from fedsched.core.cluster import ControllerRecord
from fedsched.core.ids import ClusterName, JobId
from fedsched.errors import FedschedError
from fedsched.pb import agents_pb2 as pb
from fedsched.pb import agents_pb2_grpc as pb_grpc
from fedsched.runtime import keys, stored
from fedsched.runtime.backoff import Backoff
from fedsched.runtime.ports import Entry, KeyChanged, LogPiece, Snapshot, Store

ReadLogs = Callable[[JobId, bool, Mapping[str, int]], Iterator[LogPiece]]
"""Reads what a job printed, each file from the offset that is given for it; with True also what it will print, until it
is over. While there is nothing new it yields empty pieces at least once a second, so that a reader who has gone is
noticed."""

CHUNK_BYTES_MAX = 64 * 1024
"""Of one message; a longer piece of a log is sent in several."""
REQUESTS_MAX = 32
"""Log requests that are answered at once for one controller."""
CREDIT_S = 60.0
"""A reader that takes nothing for so long is given up."""
BACKOFF_S = (0.2, 5.0)
"""First and longest pause before a controller is called again."""
JOIN_S = 5.0
"""How long `close` waits for each line's thread."""

_log = logging.getLogger(__name__)


class AttachClient:
    """Stays attached to every controller that is registered, from threads of its own, until closed.

    A controller that goes or does not answer disturbs nobody: the attempt is repeated with growing pauses.
    """

    def __init__(self, store: Store, cluster: ClusterName, agent_id: str, read_logs: ReadLogs) -> None:
        self._hello = pb.Hello(cluster=cluster, agent_id=agent_id)
        self._read_logs = read_logs
        self._lock = threading.Lock()
        self._lines: dict[str, _Line] = {}
        self._watch = store.watch(keys.CONTROLLERS, self._on_snapshot, self._on_change)

    def close(self) -> None:
        """Detach from all controllers."""
        self._watch.close()
        with self._lock:
            lines, self._lines = list(self._lines.values()), {}
        for line in lines:
            line.stop()
        for line in lines:
            line.join()

    def _on_snapshot(self, snapshot: Snapshot) -> None:
        present = {entry.key for entry in snapshot.entries}
        for key in sorted(set(self._lines) - present):
            self._drop(key)
        for entry in snapshot.entries:
            self._attach(entry)

    def _on_change(self, change: KeyChanged) -> None:
        if change.entry is None:
            self._drop(change.key)
        else:
            self._attach(change.entry)

    def _attach(self, entry: Entry) -> None:
        for record in stored.readable(ControllerRecord, [entry]):
            with self._lock:
                known = self._lines.get(entry.key)
                if known is not None and known.address == record.address:
                    continue
                self._lines[entry.key] = _Line(record.address, self._hello, self._read_logs)
            if known is not None:
                known.stop()

    def _drop(self, key: str) -> None:
        with self._lock:
            line = self._lines.pop(key, None)
        if line is not None:
            line.stop()


class _Line:
    """One controller: connects, answers, connects again."""

    def __init__(self, address: str, hello: pb.Hello, read_logs: ReadLogs) -> None:
        self.address = address
        self._hello = hello
        self._read_logs = read_logs
        self._stopped = threading.Event()
        self._call: Any = None
        self._thread = threading.Thread(target=self._run, name=f"attach {address}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Hang up; does not wait."""
        self._stopped.set()
        call = self._call
        if call is not None:
            call.cancel()

    def join(self) -> None:
        """Wait until the thread has ended."""
        self._thread.join(JOIN_S)

    def _run(self) -> None:
        backoff = Backoff(*BACKOFF_S)
        while not self._stopped.is_set():
            if self._attached():
                backoff.reset()
            self._stopped.wait(backoff.pause_s())

    def _attached(self) -> bool:
        """Stay attached until the connection ends; whether there was one."""
        outgoing: queue.SimpleQueue[pb.FromAgent | None] = queue.SimpleQueue()
        outgoing.put(pb.FromAgent(hello=self._hello))
        requests: dict[int, _LogRequest] = {}
        with grpc.insecure_channel(self.address, options=channel_options(self.address)) as channel:
            call: Any = pb_grpc.AgentsStub(channel).Attach(iter(outgoing.get, None))
            self._call = call
            answered = False
            try:
                if not self._stopped.is_set():
                    for message in call:
                        answered = True
                        self._answer(message, requests, outgoing)
            except grpc.RpcError as problem:
                if not self._stopped.is_set():
                    _log.debug("line to controller %s ended: %s", self.address, problem)
            finally:
                self._call = None
                for request in requests.values():
                    request.stop()
                outgoing.put(None)
                call.cancel()
        return answered

    def _answer(
        self,
        message: pb.ToAgent,
        requests: dict[int, _LogRequest],
        outgoing: queue.SimpleQueue[pb.FromAgent | None],
    ) -> None:
        kind = message.WhichOneof("kind")
        if kind == "read_logs":
            order = message.read_logs
            for number in [number for number, request in requests.items() if request.ended]:
                del requests[number]
            if len(requests) >= REQUESTS_MAX:
                end = pb.LogEnd(request=order.request, error=f"{REQUESTS_MAX} log requests are being answered already")
                outgoing.put(pb.FromAgent(log_end=end))
                return
            requests[order.request] = _LogRequest(order, self._read_logs, outgoing.put)
        elif kind == "more_logs" and message.more_logs.request in requests:
            requests[message.more_logs.request].allow(message.more_logs.credit)
        elif kind == "stop_logs" and message.stop_logs.request in requests:
            requests.pop(message.stop_logs.request).stop()


class _LogRequest:
    """Reads one job's log in a thread and sends it as fast as the reader takes it."""

    def __init__(self, order: pb.ReadLogs, read_logs: ReadLogs, send: Callable[[pb.FromAgent], None]) -> None:
        self._order = order
        self._read_logs = read_logs
        self._send = send
        self._credit = threading.Semaphore(order.credit)
        self._stopped = threading.Event()
        self.ended = False
        threading.Thread(target=self._run, name=f"logs {order.job_id}", daemon=True).start()

    def allow(self, credit: int) -> None:
        """The reader takes so many chunks more."""
        self._credit.release(credit)

    def stop(self) -> None:
        """Nobody reads any more."""
        self._stopped.set()
        self._credit.release()

    def _run(self) -> None:
        error = ""
        try:
            self._copy()
        except FedschedError as problem:
            error = problem.message
        except Exception as problem:
            _log.exception("reading the log of job %s failed", self._order.job_id)
            error = f"reading it failed: {problem}"
        finally:
            self.ended = True
            self._send(pb.FromAgent(log_end=pb.LogEnd(request=self._order.request, error=error)))

    def _copy(self) -> None:
        for piece in self._read_logs(JobId(self._order.job_id), self._order.follow, self._order.read):
            for begin in range(0, len(piece.data), CHUNK_BYTES_MAX):
                if not self._credit.acquire(timeout=CREDIT_S):
                    return
                if self._stopped.is_set():
                    return
                part = pb.LogData(request=self._order.request, data=piece.data[begin : begin + CHUNK_BYTES_MAX])
                if begin + CHUNK_BYTES_MAX < len(piece.data):
                    part.partial = True
                else:
                    part.file, part.offset = piece.file, piece.offset
                self._send(pb.FromAgent(log_data=part))
            if self._stopped.is_set():
                return
