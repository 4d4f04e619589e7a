"""Makes many things at once in processes of this machine; one that dies takes nothing else along."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from types import FrameType
from typing import Any, Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")
Told = Callable[[float], None]
"""Hears how much has been done, in tasks; fractions of a task included."""
Share = Callable[[float], None]
"""Hears which share of one task is done."""
Make = Callable[[T, Share], R]
"""Makes one thing of a task; a function of a module. A `KeyboardInterrupt` asks it for what it has so far."""
Lost = Callable[[T, str], R]
"""Makes it of a task that came to nothing, and of the reason why."""

THREADS = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""A task computes on one core: as many tasks as there are cores go on at once."""

PARENT_CHECK_S = 1.0
"""How often a worker looks whether who started it is still there."""
LAST_WORDS_S = 10.0
"""After an interruption, how long workers have to hand over what they have so far."""
INTERRUPTED = "interrupted before it ended"


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def over_cores(
    make: Make[T, R],
    tasks: Sequence[T],
    lost: Lost[T, R],
    *,
    workers: int | None = None,
    told: Told = lambda _: None,
) -> tuple[R, ...]:
    """Make one thing of each task, several at once; what is made is in the order of the tasks.

    A task whose process dies is lost, and known to be at once; the others go on. An interruption ends all of it: tasks
    that are under way have `LAST_WORDS_S` to hand over what they have, those that never began are lost.

    Args:
        workers: how many are made at once; as many as there are cores if None. With 1 all are made in this process.

    Raises:
        Exception: whatever `make` raises.
    """
    results: dict[int, R] = {}
    at_once = min(workers or cores(), len(tasks))
    if at_once <= 1:
        _in_turn(make, tasks, results, told)
    else:
        with _started(at_once, make) as crew:
            _Work(crew, tasks, lost, results, told).do()
    return tuple(results[index] if index in results else lost(task, INTERRUPTED) for index, task in enumerate(tasks))


def _in_turn(make: Make[T, R], tasks: Sequence[T], results: dict[int, R], told: Told) -> None:
    """In this process, until the user interrupts; the task that is under way then may still give what it has."""
    with _interruptions() as interrupted, suppress(KeyboardInterrupt):
        for index, task in enumerate(tasks):
            results[index] = make(task, partial(_tell_share, told, index))
            if interrupted.is_set():
                return
            told(len(results))


def _tell_share(told: Told, before: int, share: float) -> None:
    told(before + share)


@contextmanager
def _interruptions() -> Iterator[threading.Event]:
    """Notes that there was one, also where what is interrupted ends in good order."""
    noted = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield noted  # no interruption comes here
        return

    def note(signum: int, frame: FrameType | None) -> None:
        noted.set()
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, note)
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, before)


class _Work(Generic[T, R]):
    """Hands tasks out to workers and takes in what comes back."""

    def __init__(
        self, crew: _Crew[T, R], tasks: Sequence[T], lost: Lost[T, R], results: dict[int, R], told: Told
    ) -> None:
        self._crew = crew
        self._tasks = tasks
        self._lost = lost
        self._results = results
        self._told = told
        self._ahead = iter(range(len(tasks)))
        self._shares: dict[int, float] = {}
        self._stopping = False

    def do(self) -> None:
        """All of it, or until the user interrupts."""
        try:
            for worker in self._crew.workers:
                self._hand_out(worker)
            self._take_in(None)
        except KeyboardInterrupt:
            # A second one ends the waiting.
            with suppress(KeyboardInterrupt):
                self._ahead, self._stopping = iter(()), True
                for worker in self._busy():
                    worker.interrupt()
                self._take_in(time.monotonic() + LAST_WORDS_S)

    def _busy(self) -> list[_Worker[T, R]]:
        return [worker for worker in self._crew.workers if worker.task is not None]

    def _take_in(self, until_s: float | None) -> None:
        while busy := self._busy():
            left_s = None if until_s is None else until_s - time.monotonic()
            if left_s is not None and left_s <= 0:
                return
            ready = wait([thing for worker in busy for thing in (worker.connection, worker.process.sentinel)], left_s)
            for worker in busy:
                if worker.connection in ready or worker.process.sentinel in ready:
                    self._hear(worker)

    def _hear(self, worker: _Worker[T, R]) -> None:
        """One message of the worker; where it is dead without a last one, its task is lost and another takes over."""
        index = worker.task
        assert index is not None
        kind, content = worker.message()
        match kind:
            case "share":
                self._shares[index] = content
            case "raised":
                raise content
            case "done":
                self._end(worker, index, content)
            case _ if self._stopping:
                worker.task = None
            case _:
                death = worker.death()
                self._end(self._crew.replace(worker), index, self._lost(self._tasks[index], death))
        self._told(len(self._results) + sum(self._shares.values()))

    def _end(self, worker: _Worker[T, R], index: int, result: R) -> None:
        self._results[index] = result
        self._shares.pop(index, None)
        self._hand_out(worker)

    def _hand_out(self, worker: _Worker[T, R]) -> None:
        worker.task = next(self._ahead, None)
        if worker.task is not None:
            # If it dies before it reads this, that is heard like any other death.
            with suppress(OSError):
                worker.connection.send(self._tasks[worker.task])


class _Worker(Generic[T, R]):
    """One process that makes one thing after the other."""

    def __init__(self, make: Make[T, R]) -> None:
        context = multiprocessing.get_context("spawn")
        self.task: int | None = None
        self.connection, theirs = context.Pipe()
        self.process: SpawnProcess = context.Process(target=_serve, args=(theirs, make), daemon=True)
        # Libraries read the environment when they are loaded, before any code of ours runs there; an interruption of
        # the whole group that comes before then would end it with a traceback on the user's screen.
        with _environment(THREADS), _interruptions_later():
            self.process.start()
        theirs.close()

    def message(self) -> tuple[str, Any]:
        """What it has to say: `share`, `done` or `raised`, each with what, or `dead`."""
        try:
            return self.connection.recv() if self.connection.poll() else ("dead", None)
        except (EOFError, OSError):
            return "dead", None

    def interrupt(self) -> None:
        """Ask for what there is of its task."""
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGTERM)

    def death(self) -> str:
        """How it ended."""
        self.process.join(PARENT_CHECK_S)
        code = self.process.exitcode
        if code is None:
            return "its process closed its connection"
        if code >= 0:
            return f"its process ended with exit code {code} in the middle of it"
        name = signal.Signals(-code).name
        return f"its process was killed by {name}" + (", perhaps for want of memory" if name == "SIGKILL" else "")

    def end(self) -> None:
        """Leave nothing of it."""
        self.process.kill()
        self.process.join()
        self.connection.close()


class _Crew(Generic[T, R]):
    """The workers that are there."""

    def __init__(self, make: Make[T, R]) -> None:
        self._make = make
        self.workers: list[_Worker[T, R]] = []

    def add(self) -> _Worker[T, R]:
        """One more."""
        self.workers.append(_Worker(self._make))
        return self.workers[-1]

    def replace(self, worker: _Worker[T, R]) -> _Worker[T, R]:
        """A new one in place of one that is dead."""
        self.workers.remove(worker)
        worker.end()
        return self.add()


@contextmanager
def _started(count: int, make: Make[T, R]) -> Iterator[_Crew[T, R]]:
    """Fresh interpreters with one thread each; none is left when the block ends, however it ends."""
    crew = _Crew(make)
    try:
        for _ in range(count):
            crew.add()
        yield crew
    finally:
        for worker in crew.workers:
            worker.end()


@contextmanager
def _interruptions_later() -> Iterator[None]:
    """Keeps them back; who is started meanwhile does so, too, until it says what becomes of them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


# In a worker.


def end_with_parent() -> None:
    """An interruption is for the process that the user sees; this one ends when that is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.Thread(target=_watch_parent, args=(os.getppid(),), name="parent", daemon=True).start()


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(PARENT_CHECK_S)
    os._exit(1)


def _serve(connection: Connection[Any, Any], make: Make[Any, Any]) -> None:
    """Make things until nobody asks for more."""
    end_with_parent()
    while True:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        try:
            task = connection.recv()
        except (EOFError, OSError):
            return
        signal.signal(signal.SIGTERM, _interrupt)
        try:
            answer = ("done", make(task, lambda share: connection.send(("share", share))))
        except KeyboardInterrupt:
            return
        except Exception as error:
            answer = ("raised", error)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the answer goes out whole
        try:
            connection.send(answer)
        except OSError:  # nobody waits for it: the process that asked was killed
            return


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
