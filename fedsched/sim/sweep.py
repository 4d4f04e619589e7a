"""Makes many runs: over all cores of this machine, or on a Ray cluster; results come back in the order asked for."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import TypeVar

from fedsched.sim.on_ray import over_ray
from fedsched.sim.results import RunResult
from fedsched.sim.running import Request, lost, perform
from fedsched.sim.workers import Lost, Make, Told, over_cores

T = TypeVar("T")
R = TypeVar("R")


class Engine(StrEnum):
    """Where runs are made."""

    LOCAL = "local"
    RAY = "ray"


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
            are made in this process. Ray decides for itself.

    Raises:
        InvalidInput: Ray is asked for and not installed.
        Unreachable: there is no Ray cluster.
    """
    return make_all(perform, requests, lost, engine=engine, workers=workers, told=told)


def make_all(
    make: Make[T, R],
    tasks: Sequence[T],
    lost: Lost[T, R],
    *,
    engine: Engine,
    workers: int | None,
    told: Told,
) -> tuple[R, ...]:
    """Make one thing of each task, as `sweep` makes runs.

    Raises:
        InvalidInput, Unreachable: as there.
    """
    if engine is Engine.RAY:
        return over_ray(make, tasks, lost, told=told)
    return over_cores(make, tasks, lost, workers=workers, told=told)
