"""The executor's line to its cluster's launcher: starts one when there is none, and asks it to start tasks."""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import sys
import threading
import time
from typing import Any

from fedsched.errors import StartFailed
from fedsched.executor import records
from fedsched.executor.processes import is_alive
from fedsched.executor.records import LauncherRecord, Layout, TaskOrder, TaskRecord
from fedsched.runtime import codec

ANSWER_S = 120.0
"""Longest wait for an answer: a new launcher loads first, which takes some ten seconds of processor time."""
SPAWN_S = 30.0
"""Longest wait for a new launcher to detach itself."""

MACHINE_ERRORS = frozenset(
    {
        errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO,
        errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM,
    }
)  # fmt: skip
"""What the operating system says when the machine has run out of something, whatever job asks."""

RETRIES_S = (0.05, 0.2, 0.5, 1.0)
"""Waits after failed tries to start a task: a launcher that was killed may take connections for a moment longer."""


class MachineTrouble(StartFailed):
    """The machine, not the job, keeps a task from being started: another try later may succeed."""


class Launching:
    """One connection, shared by all jobs' threads.

    Args:
        layout: the cluster's files.
        preload: modules that a new launcher loads once for all tasks.
        idle_s: how long a launcher without connection and children stays.
        deadline_s: how long a new launcher may take to listen.
        cgroup: below which a new launcher keeps tasks to what they were given; it looks for one itself if empty.
    """

    def __init__(
        self, layout: Layout, preload: tuple[str, ...], idle_s: float, deadline_s: float = 30.0, cgroup: str = ""
    ) -> None:
        self._layout = layout
        self._preload = preload
        self._idle_s = idle_s
        self._deadline_s = deadline_s
        self._cgroup = cgroup
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None
        self._closed = False
        self._spawned_s = float("-inf")

    def start(self, term: int, order: TaskOrder) -> TaskRecord:
        """Start a task.

        Raises:
            StartFailed: it could not be started, and the message says why.
            MachineTrouble: any task would have met the same.
        """
        with self._lock:
            for wait_s in RETRIES_S:
                try:
                    return self._ask_to_start(term, order)
                except OSError as problem:
                    # The launcher died with the order: the record tells whether it still carried it out.
                    done = records.read(TaskRecord, order.attempt.task(order.task))
                    if done is not None and done.request == order.request:
                        return done
                    last = problem
                self._disconnect()
                time.sleep(wait_s)
            raise MachineTrouble(f"{order.task} could not be started: no launcher stays: {last}", self._hint())

    def fence(self, term: int) -> None:
        """Have orders of older terms refused that may still be on their way to the launcher, if there is one."""
        with self._lock:
            try:
                if self._connection is None:
                    self._connection = connect(self._layout)
                if self._connection is not None:
                    self._exchange({"op": "fence", "term": term})
            except OSError:
                self._disconnect()

    def warm_up(self) -> None:
        """Have a launcher load before the first job needs it; does not wait for it."""
        with self._lock:
            self._spawn_if_none()

    def close(self) -> None:
        """Let the launcher go; it stays while it has tasks."""
        self._closed = True
        with self._lock:
            self._disconnect()

    def _ask_to_start(self, term: int, order: TaskOrder) -> TaskRecord:
        self._ensure()
        answer = self._exchange({"op": "start", "term": term, "order": json.loads(codec.dumps(order))})
        if answer["error"]:
            kind = MachineTrouble if answer.get("errno") in MACHINE_ERRORS else StartFailed
            raise kind(f"{order.task} could not be started: {answer['error']}", self._hint())
        return codec.loads(TaskRecord, json.dumps(answer["record"]))

    def _hint(self) -> str:
        return f"see {self._layout.launcher_log}"

    def _exchange(self, request: dict[str, Any]) -> dict[str, Any]:
        if self._connection is None:
            raise ConnectionError("there is no connection")
        return exchange(self._connection, request)

    def _ensure(self) -> None:
        """Raises StartFailed when no launcher comes up within the deadline."""
        until_s = time.monotonic() + self._deadline_s
        while self._connection is None:
            self._connection = connect(self._layout)
            if self._connection is not None:
                return
            if time.monotonic() > until_s:
                raise StartFailed(f"the launcher did not come up within {self._deadline_s:g} s", self._hint())
            if self._closed:
                raise StartFailed("the executor is closed", "start the agent again")
            self._spawn_if_none()
            time.sleep(0.02)

    def _spawn_if_none(self) -> None:
        record = records.read(LauncherRecord, self._layout.launcher)
        # One that loads has no record yet. Should two come up, the lock file lets one of them stay.
        loads = time.monotonic() - self._spawned_s < self._deadline_s / 3
        if self._closed or loads or (record is not None and is_alive(record.identity)):
            return
        self._spawned_s = time.monotonic()
        command = [sys.executable, "-m", "fedsched.executor.launcher", "--root", str(self._layout.root)]
        command += ["--idle-s", str(self._idle_s), "--cgroup", self._cgroup]
        command += ["--preload", *self._preload]
        # Libraries with threads of their own start them when they are loaded, and threads do not survive a fork.
        # torch's number of threads is set anew in each task.
        single = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        with self._layout.launcher_log.open("ab") as log:
            try:
                subprocess.run(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd="/",
                    env=os.environ | single,
                    check=True,
                    timeout=SPAWN_S,
                )
            except subprocess.SubprocessError as problem:
                raise StartFailed(f"the launcher could not be started: {problem}", self._hint()) from problem

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
            self._spawned_s = float("-inf")  # it did come up, so a new one may be needed at once


def connect(layout: Layout) -> socket.socket | None:
    """A connection to the cluster's launcher; None when none listens."""
    record = records.read(LauncherRecord, layout.launcher)
    if record is None or not is_alive(record.identity):
        return None
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(ANSWER_S)
    try:
        connection.connect(record.socket)
    except OSError:
        connection.close()
        return None
    return connection


def exchange(connection: socket.socket, request: dict[str, Any]) -> dict[str, Any]:
    """Ask and return the answer.

    Raises:
        OSError: the launcher is gone or does not answer in time.
    """
    connection.sendall(json.dumps(request).encode() + b"\n")
    answer = b""
    while not answer.endswith(b"\n"):
        data = connection.recv(65536)
        if not data:
            raise ConnectionError("the launcher has gone")
        answer += data
    return dict(json.loads(answer))
