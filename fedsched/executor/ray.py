"""The back end `ray`: each task is a detached actor in a placement group of its own on a Ray cluster.

Ray is spoken to by a process beside the agent (`ray_driver`), which may be lost with the cluster's head and is started
anew. Ray counts memory and does not enforce it, so the shepherds do. Nodes bear the names, host names or addresses that
`ray status` and `ray list nodes` show.
"""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, assert_never

from fedsched.core.ids import NodeName
from fedsched.core.job import Reason
from fedsched.core.resources import Resources
from fedsched.executor import ray_talk
from fedsched.executor.launching import MachineTrouble
from fedsched.executor.records import TaskOrder
from fedsched.executor.shepherded import COORDINATOR_NEEDS, Known, Shepherded, TaskCondition
from fedsched.runtime.backoff import Backoff

REACH_S = 60.0
"""How long a new driver may take to reach the cluster's head."""
ASK_S = 30.0
"""Longest wait until Ray has taken a task."""
BACKOFF_S = (1.0, 30.0)
"""First and longest wait before a driver that ended is started anew."""
LEAVE_S = 5.0
"""How long a driver may take to end by itself."""
MIB = 1 << 20

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RayOptions:
    """Which cluster, and under which name."""

    address: str
    """`host:port` of the head's GCS, or `auto` for the cluster that this machine is part of."""
    namespace: str = "fedsched"
    """Names of actors are unique in it."""
    coordinator: Resources = COORDINATOR_NEEDS


class RayTasks(Shepherded):
    """Tasks as actors.

    Args:
        log: where the driver's own words go.
    """

    limits_memory = True

    def __init__(self, options: RayOptions, log: Path) -> None:
        super().__init__(options.coordinator)
        self._options = options
        self._log_file = log
        self._news = threading.Condition(self._lock)
        self._states: dict[str, ray_talk.TaskState] = {}
        self._started: dict[str, str] = {}
        """Answers to starts that are waited for."""
        self._watched: set[str] = set()
        """What the present driver tells of."""
        self._nodes: frozenset[str] | None = None
        """Names of those that live; None until the present driver has told."""
        self._driver: subprocess.Popen[bytes] | None = None
        self._ready = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._keep_driver, name="ray", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Let go: the actors go on."""
        self._closing.set()
        with self._news:
            if self._driver is not None:
                self._hang_up(self._driver)
            self._news.notify_all()  # whoever waits for an answer need not wait longer
        self._thread.join(LEAVE_S)
        with self._news:
            if self._driver is not None:
                self._driver.kill()  # it waits for a cluster that does not answer
        self._thread.join(LEAVE_S)

    def _submit(self, order: TaskOrder, program: tuple[str, ...]) -> str:
        attempt = order.attempt
        name = f"{attempt.job_dir.name}/{attempt.number}/{order.task}/{order.request[:8]}"
        counted = self._counted(order.demand)
        cpus, gpus, memory = counted.cpu_milli / 1000, counted.gpu_milli // 1000, counted.memory_mib * MIB
        with self._news:
            if not self._news.wait_for(lambda: self._ready or self._closing.is_set(), REACH_S):
                why = f"no Ray cluster at {self._options.address} has answered within {REACH_S:g} s"
                raise MachineTrouble(f"{order.task} could not be started: {why}", f"see {self._log_file}")
            self._watched.add(name)
            self._send(ray_talk.Start(name, order.node, program, cpus, gpus, memory))
            if not self._news.wait_for(lambda: name in self._started or self._closing.is_set(), ASK_S):
                self._send(ray_talk.Tell((name,), signal.SIGKILL))
                self._drop(name)
                raise MachineTrouble(
                    f"{order.task} could not be started: Ray did not take it within {ASK_S:g} s", "see `ray status`"
                )
            problem = self._started.pop(name, "the executor was closed")
            if problem:
                self._drop(name)
        if problem:
            raise MachineTrouble(f"{order.task} could not be started: {problem}", "see `ray list nodes`")
        return name

    def _says(self, handle: str, known: Known) -> TaskCondition:
        if self._ready and handle not in self._watched:
            self._watched.add(handle)
            self._send(ray_talk.Watch(handle))
        state = self._states.get(handle, ray_talk.TaskState())
        if state.reason is Reason.PREEMPTED and known.ended_by_us:
            return TaskCondition(ended=True)
        waiting = "Ray has no room for it" if state.waiting else ""
        return TaskCondition(waiting, state.ended, state.reason, state.message)

    def _drop(self, handle: str) -> None:
        self._states.pop(handle, None)
        if handle in self._watched:
            self._watched.discard(handle)
            self._send(ray_talk.Forget(handle))

    def _tell(self, handles: list[str], signum: signal.Signals) -> None:
        with self._lock:
            self._send(ray_talk.Tell(tuple(handles), signum))

    def _closed_of(self, nodes: Sequence[NodeName]) -> Mapping[NodeName, str] | None:
        with self._lock:
            living = self._nodes
        return None if living is None else {node: "Ray has no such node alive" for node in nodes if node not in living}

    def _send(self, order: ray_talk.Order) -> None:
        """To the driver, under the lock. One that is gone misses it; its successor is asked about each task anew."""
        driver = self._driver
        if driver is not None and driver.stdin is not None and not driver.stdin.closed:
            try:
                driver.stdin.write(ray_talk.line(order))
                driver.stdin.flush()
            except OSError as problem:
                _log.warning("the process that talks to Ray does not listen: %s", problem)

    def _keep_driver(self) -> None:
        backoff = Backoff(*BACKOFF_S)
        while not self._closing.is_set():
            began_s = time.monotonic()
            try:
                self._run_driver()
            except OSError as problem:  # no process could be started, or its log has no room: it may pass
                _log.error("no process that talks to Ray could be started: %s", problem)
            if self._closing.is_set():
                return
            if time.monotonic() - began_s > 2 * BACKOFF_S[1]:
                backoff.reset()
            wait_s = backoff.pause_s()
            _log.warning("the process that talks to Ray has ended; the next one begins in %.1f s", wait_s)
            self._closing.wait(wait_s)

    def _run_driver(self) -> None:
        command = [sys.executable, "-m", "fedsched.executor.ray_driver"]
        command += ["--address", self._options.address, "--namespace", self._options.namespace]
        self._log_file.parent.mkdir(parents=True, exist_ok=True)
        with self._log_file.open("ab") as log:
            driver = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log)
        with self._news:
            self._driver = driver
            if self._closing.is_set():
                self._hang_up(driver)
        try:
            if driver.stdout is not None:
                self._hear(driver.stdout)
        finally:
            with self._news:
                self._ready, self._driver = False, None
                self._watched.clear()
                self._nodes = None
            try:
                driver.wait(LEAVE_S)
            except subprocess.TimeoutExpired:
                driver.kill()
                driver.wait()
            self._hang_up(driver)
            if driver.stdout is not None:
                driver.stdout.close()

    def _hang_up(self, driver: subprocess.Popen[bytes]) -> None:
        if driver.stdin is not None:
            with suppress(OSError):  # what was still to be written is for one that is gone
                driver.stdin.close()

    def _hear(self, lines: IO[bytes]) -> None:
        for line in lines:
            news = ray_talk.news_of(line)
            if news is not None:
                with self._news:
                    self._take(news)
                    self._news.notify_all()

    def _take(self, news: ray_talk.News) -> None:
        match news:
            case ray_talk.Ready():
                self._ready = True
            case ray_talk.Started(name, problem):
                if name in self._watched:
                    self._started[name] = problem
            case ray_talk.Stands(name, state):
                if name in self._watched:
                    self._states[name] = state
            case ray_talk.Nodes(names):
                self._nodes = frozenset(names)
            case _:
                assert_never(news)
