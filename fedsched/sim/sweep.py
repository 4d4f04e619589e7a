"""Makes many runs: over all cores of this machine, or on a Ray cluster; results come back in the order asked for."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from fedsched.sim.on_ray import over_ray
from fedsched.sim.results import RunResult
from fedsched.sim.running import Request, lost, perform
from fedsched.sim.workers import Told, over_cores


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
    if engine is Engine.RAY:
        return over_ray(perform, requests, lost, told=told)
    return over_cores(perform, requests, lost, workers=workers, told=told)
