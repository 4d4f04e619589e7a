"""Makes many things on a Ray cluster; whatever becomes of the cluster, what has come back is kept.

A process of its own talks to Ray. Ray's client waits minutes for a head that does not answer, and ends its process when
a head is lost: that process can be given a deadline, and lost.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import re
import signal
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import FrameType
from typing import Any, Generic, TypeVar

from fedsched import __version__
from fedsched.errors import InvalidInput, Unreachable
from fedsched.sim.workers import INTERRUPTED, THREADS, Lost, Make, Told, end_with_parent

T = TypeVar("T")
R = TypeVar("R")

REACH_S = 30.0
"""How long the cluster's head has to answer."""
RETRIES = 2
"""How often a task is begun anew when its worker or its node dies: nodes come and go on a cluster."""
LAST_WORDS_S = 5.0
"""After an interruption, how long it takes at most to tell the cluster."""
SHOWN = 300
"""Characters of what Ray says."""
LOG_PREFIX = re.compile(r"^\[[^]]*\]\s+(\(\S+\)\s+)?(\S+:\d+:\s+)?")


def over_ray(make: Make[T, R], tasks: Sequence[T], lost: Lost[T, R], *, told: Told = lambda _: None) -> tuple[R, ...]:
    """Make one thing of each task, each on one core of the cluster; what is made is in the order of the tasks.

    The cluster is the one that `RAY_ADDRESS` names, else the one that was started on this machine. Its nodes need this
    version of the package, and the files that tasks name. A task whose worker dies is begun anew, `RETRIES` times; then
    it is lost. An interruption, or the cluster's end, leaves what has come back until then.

    Raises:
        InvalidInput: Ray is not installed.
        Unreachable: no cluster answers in time, or it will not have us.
    """
    if importlib.util.find_spec("ray") is None:
        raise InvalidInput("--engine ray needs Ray, which is not installed", "pip install 'fedsched[ray]'")
    results: dict[int, R] = {}
    with _driver(make, tasks) as driver:
        try:
            driver.reach()
            reason = _take_in(driver, tasks, lost, results, told)
        except KeyboardInterrupt:
            reason = INTERRUPTED
    return tuple(results[index] if index in results else lost(task, reason) for index, task in enumerate(tasks))


def _take_in(driver: _Driver[T, R], tasks: Sequence[T], lost: Lost[T, R], results: dict[int, R], told: Told) -> str:
    """All that comes, until all is there; else why there is no more."""
    while len(results) < len(tasks):
        message = driver.hear(None)
        match message:
            case _Done(index, result):
                results[index] = result
            case _Lost(index, reason):
                results[index] = lost(tasks[index], reason)
            case _:
                return f"the Ray cluster was lost before it ended: {driver.last_words()}"
        told(len(results))
    return ""


@dataclass(frozen=True, slots=True)
class _Reached:
    """The cluster is there."""


@dataclass(frozen=True, slots=True)
class _Refused:
    """It is not, or will not have us."""

    why: str


@dataclass(frozen=True, slots=True)
class _Done:
    """One thing is made."""

    index: int
    result: Any


@dataclass(frozen=True, slots=True)
class _Lost:
    """One task came to nothing."""

    index: int
    reason: str


class _Driver(Generic[T, R]):
    """The process that talks to Ray, seen from outside."""

    def __init__(self, process: Any, connection: Connection[Any, Any], says: Path) -> None:
        self.process = process
        self._connection = connection
        self._says = says

    def reach(self) -> None:
        """Wait until the cluster is there.

        Raises:
            Unreachable: it is not, or will not have us.
        """
        match self.hear(REACH_S):
            case _Reached():
                return
            case _Refused(why):
                raise Unreachable(f"{_named()} cannot be used: {why}", HINT)
            case None if self.process.is_alive():
                raise Unreachable(f"{_named()} has not answered within {REACH_S:g} s", HINT)
            case _:
                raise Unreachable(f"{_named()} cannot be used: {self.last_words()}", HINT)

    def hear(self, within_s: float | None) -> _Reached | _Refused | _Done | _Lost | None:
        """The next message; None where none comes in time, or the process is dead."""
        try:
            if self._connection in wait([self._connection, self.process.sentinel], within_s):
                message: _Reached | _Refused | _Done | _Lost = self._connection.recv()
                return message
            return self._connection.recv() if self._connection.poll() else None
        except (EOFError, OSError):
            return None

    def last_words(self) -> str:
        """What the last line that Ray printed begins with, without the time and place that it has from Ray's log."""
        lines = [line.strip() for line in self._says.read_text(errors="replace").splitlines() if line.strip()]
        return _begin(LOG_PREFIX.sub("", lines[-1])) if lines else "its client ended without a word"

    def end(self) -> None:
        """Leave nothing of it; Ray stops what a process asked for that is gone."""
        self.process.terminate()
        self.process.join(LAST_WORDS_S)
        self.process.kill()
        self.process.join()
        self._connection.close()


HINT = "start a cluster with `ray start --head`, or name its head in RAY_ADDRESS, as host:port"


def _named() -> str:
    address = os.environ.get("RAY_ADDRESS", "")
    return f"the Ray cluster at {address} (from RAY_ADDRESS)" if address else "the Ray cluster of this machine"


@contextmanager
def _driver(make: Make[T, R], tasks: Sequence[T]) -> Iterator[_Driver[T, R]]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with tempfile.TemporaryDirectory(prefix="fedsched-ray-") as folder:
        says = Path(folder) / "says"
        says.touch()
        process = context.Process(target=_drive, args=(theirs, make, tuple(tasks), str(says)), daemon=True)
        process.start()
        theirs.close()
        driver: _Driver[T, R] = _Driver(process, ours, says)
        try:
            yield driver
        finally:
            driver.end()


# In the process that talks to Ray.


def _drive(connection: Connection[Any, Any], make: Make[Any, Any], tasks: Sequence[Any], says: str) -> None:
    """Have all tasks made, and tell of each; what Ray prints goes to the file `says`."""
    end_with_parent()
    signal.signal(signal.SIGTERM, _leave)
    with open(says, "ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    import ray

    try:
        ray.init(address="auto", log_to_driver=False, configure_logging=False)
    except Exception as problem:
        connection.send(_Refused(_begin(str(problem))))
        return
    try:
        connection.send(_Reached())
        _ask(ray, connection, make, tasks)
    finally:
        ray.shutdown()


def _ask(ray: Any, connection: Connection[Any, Any], make: Make[Any, Any], tasks: Sequence[Any]) -> None:
    there = ray.remote(num_cpus=1, max_retries=RETRIES, runtime_env={"env_vars": THREADS})(_make_there)
    asked = {there.remote(make, task, __version__): index for index, task in enumerate(tasks)}
    waiting = list(asked)
    while waiting:
        done, waiting = ray.wait(waiting)
        for answer in done:
            index = asked.pop(answer)
            try:
                connection.send(_Done(index, ray.get(answer)))
            except ray.exceptions.RayError as problem:
                connection.send(_Lost(index, _told(problem)))


def _make_there(make: Make[Any, Any], task: Any, version: str) -> Any:
    """On a node of the cluster."""
    if __version__ != version:
        raise RuntimeError(f"the node has fedsched {__version__}; {version} was expected, as where the sweep was begun")
    return make(task, _unheard)


def _unheard(share: float) -> None:
    """Nobody hears how far a task is while it is under way on another machine."""


def _told(problem: Exception) -> str:
    cause = getattr(problem, "cause", None) or problem
    kind = type(cause).__name__
    if kind in ("WorkerCrashedError", "NodeDiedError", "OutOfMemoryError"):
        return f"its worker on the Ray cluster died, {RETRIES + 1} times ({kind})"
    return f"{kind} on the Ray cluster: {_begin(str(cause))}"


def _begin(told: str) -> str:
    """The first sentence of it, on one line; the rest is advice on Ray's own tools."""
    first = next((line.strip() for line in told.splitlines() if line.strip()), "")
    return first.split(". ")[0][:SHOWN].rstrip(".")


def _leave(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(0)
