"""Makes many runs: over all cores of this machine, or on a Ray cluster; results come back in the order asked for."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from enum import StrEnum
from functools import partial
from typing import Any, TypeVar

from fedsched.errors import InvalidInput, Unreachable
from fedsched.sim.results import RunResult
from fedsched.sim.running import INTERRUPTED, Request, lost, perform

T = TypeVar("T")
R = TypeVar("R")
Told = Callable[[float], None]
"""Hears how much has been done, in runs; fractions of a run included."""

THREADS = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""A run computes on one core: as many runs as there are cores go on at once."""

PARENT_CHECK_S = 1.0
"""How often a worker looks whether who started it is still there."""
DIED = "its process died: killed, out of memory, or ended by the policy itself"


class Engine(StrEnum):
    """Where runs are made."""

    LOCAL = "local"
    RAY = "ray"


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def sweep(
    requests: Sequence[Request],
    *,
    engine: Engine = Engine.LOCAL,
    workers: int | None = None,
    told: Told = lambda _: None,
) -> tuple[RunResult, ...]:
    """Make the runs; results are in the order of `requests`, however they came in.

    A run that fails takes no other with it: it is partial. When the user interrupts, what is not done is partial.

    Args:
        workers: how many runs go on at once on this machine; as many as there are cores if None. With 1 all of them
            are made in this process.

    Raises:
        InvalidInput: Ray is asked for and not installed.
        Unreachable: there is no Ray cluster.
    """
    if engine is Engine.RAY:
        return _on_ray(requests, told)
    if min(workers or cores(), len(requests)) <= 1:
        return _one_by_one(requests, told)
    return over_cores(perform, requests, lost, workers=workers, told=told)


# --- On this machine ---------------------------------------------------------------------------------------------


def over_cores(
    make: Callable[[T], R],
    tasks: Sequence[T],
    lost: Callable[[T, str], R],
    *,
    workers: int | None = None,
    told: Told = lambda _: None,
) -> tuple[R, ...]:
    """Make one thing of each task, several at once; what is made is in the order of the tasks.

    Args:
        make: a function of a module.
        lost: makes it of a task that came to nothing, and of the reason why.
        workers: how many are made at once; as many as there are cores if None. With 1 all are made in this process.
    """
    at_once = min(workers or cores(), len(tasks))
    results: dict[int, R] = {}
    # An interruption ends it; what is done is kept.
    with suppress(KeyboardInterrupt):
        if at_once <= 1:
            for index, task in enumerate(tasks):
                results[index] = make(task)
                told(len(results))
        else:
            _in_processes(make, tasks, lost, at_once, results, told)
    return tuple(results[index] if index in results else lost(task, INTERRUPTED) for index, task in enumerate(tasks))


def _one_by_one(requests: Sequence[Request], told: Told) -> tuple[RunResult, ...]:
    """In this process, where runs can tell how far they are, and an interrupted one leaves what it did."""
    results: list[RunResult] = []
    for request in requests:
        if results and results[-1].partial == INTERRUPTED:
            results.append(lost(request, INTERRUPTED))
        else:
            results.append(perform(request, partial(_tell_share, told, len(results))))
            told(len(results))
    return tuple(results)


def _tell_share(told: Told, done: int, share: float) -> None:
    told(done + share)


def _in_processes(
    make: Callable[[T], R],
    tasks: Sequence[T],
    lost: Callable[[T, str], R],
    at_once: int,
    results: dict[int, R],
    told: Told,
) -> None:
    with _pool(at_once) as pool:
        _gather({pool.submit(make, task): index for index, task in enumerate(tasks)}, results, told)
    for index, task in enumerate(tasks):
        if index not in results:
            # A process died and took the pool with it. Alone, only the run that is to blame dies again.
            results[index] = _alone(make, task, lost)
            told(len(results))


def _gather(futures: dict[Future[R], int], results: dict[int, R], told: Told) -> None:
    waiting = set(futures)
    while waiting:
        done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
        for future in done:
            with suppress(BrokenProcessPool):
                results[futures[future]] = future.result()
                told(len(results))


def _alone(make: Callable[[T], R], task: T, lost: Callable[[T, str], R]) -> R:
    with _pool(1) as pool:
        try:
            return pool.submit(make, task).result()
        except BrokenProcessPool:
            return lost(task, DIED)


@contextmanager
def _pool(at_once: int) -> Iterator[ProcessPoolExecutor]:
    """Fresh interpreters with one thread each; none is left when the block ends, however it ends."""
    others = set(multiprocessing.active_children())
    with _environment(THREADS):  # libraries read it when they are loaded, before any code of ours runs there
        pool = ProcessPoolExecutor(at_once, multiprocessing.get_context("spawn"), initializer=_begin)
        try:
            yield pool
        except KeyboardInterrupt:
            for process in set(multiprocessing.active_children()) - others:
                process.terminate()
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


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


def _begin() -> None:
    """An interruption is for the process that the user sees; it ends the others, and they end when it is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(os.getppid(),), name="parent", daemon=True).start()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(PARENT_CHECK_S)
    os._exit(1)


# --- On a Ray cluster --------------------------------------------------------------------------------------------


def _on_ray(requests: Sequence[Request], told: Told) -> tuple[RunResult, ...]:
    try:
        import ray
    except ImportError as problem:
        raise InvalidInput("--engine ray needs Ray, which is not installed", "pip install 'fedsched[ray]'") from problem
    try:
        ray.init(address="auto", log_to_driver=False, ignore_reinit_error=True, configure_logging=False)
    except ConnectionError as problem:
        hint = "start one with `ray start --head`, or name it in RAY_ADDRESS"
        raise Unreachable("there is no Ray cluster to run on", hint) from problem
    task = ray.remote(num_cpus=1, runtime_env={"env_vars": THREADS})(perform)
    asked = {task.remote(request): index for index, request in enumerate(requests)}
    results: dict[int, RunResult] = {}
    waiting: list[Any] = list(asked)
    try:
        while waiting:
            done, waiting = ray.wait(waiting)
            for answer in done:
                index = asked[answer]
                try:
                    results[index] = ray.get(answer)
                except ray.exceptions.RayError as problem:
                    results[index] = lost(requests[index], f"{DIED} ({type(problem).__name__})")
                told(len(results))
    except KeyboardInterrupt:
        for answer in waiting:
            ray.cancel(answer, force=True)
    finally:
        ray.shutdown()
    return tuple(results.get(index) or lost(request, INTERRUPTED) for index, request in enumerate(requests))
