"""What is always true of a cluster's scheduler between two events."""

from __future__ import annotations

from fedsched.core.job import TERMINAL, JobPhase
from fedsched.core.resources import resources_of
from fedsched.core.state import NOTHING, ClusterState, LiveJob


class BrokenInvariant(AssertionError):
    """The scheduler's state contradicts itself: a fault of ours."""


def check(state: ClusterState) -> None:
    """Look at the whole state.

    Raises:
        BrokenInvariant: names the job or node and the promise that does not hold.
    """
    for job in state.jobs.values():
        _check_job(job, state.config.rebuild)
    promised, held = state.count(lambda job: job.settled), state.count(lambda job: job.held)
    for name, node in state.nodes.items():
        amount = promised.get(name, NOTHING)
        _require(amount.fits_in(node.capacity), f"node {name} holds {node.capacity}, promised is {amount}")
        if not state.config.rebuild:
            free = node.capacity - held.get(name, NOTHING)
            booked = resources_of(state.free[name])
            _require(booked == free, f"node {name} has {free} free, the books say {booked}")


def _check_job(job: LiveJob, rebuild: bool) -> None:
    status, name = job.status, f"job {job.spec.job_id}"
    _require(status.phase not in TERMINAL, f"{name} is {status.phase.value} and still live")
    tasks = [entry.task for entry in job.held]
    # Where every slot is placed anew a task that moves is, for an instant, in both places.
    _require(rebuild or len(set(tasks)) == len(tasks), f"{name} holds a task twice: {job.held}")
    _require(list(status.placement) == sorted(status.placement), f"{name} has an unsorted placement")
    if status.phase is JobPhase.DISPATCHED:
        _require(not job.held, f"{name} waits and holds {job.held}")
        _require(job.in_flight is None, f"{name} waits with an order in flight")
    if status.phase in (JobPhase.STARTING, JobPhase.RUNNING, JobPhase.RESIZING):
        _check_size(job, name)
        _require(status.attempt >= 1, f"{name} is {status.phase.value} without an attempt")
    if status.phase is JobPhase.RUNNING and not job.adopting:
        _require(job.in_flight is None, f"{name} is Running with an order in flight")
    if status.phase is JobPhase.RESIZING and not job.adopting:
        _require(bool(job.in_flight), f"{name} is Resizing without an order in flight")
    if status.phase in (JobPhase.COMPLETING, JobPhase.PREEMPTING):
        _require(job.in_flight == (), f"{name} is {status.phase.value} and its tasks are not leaving")


def _check_size(job: LiveJob, name: str) -> None:
    size, minimum, maximum = job.status.allocation, job.spec.minimum, job.spec.maximum
    _require(
        size.workers >= minimum.workers and size.ps >= minimum.ps,
        f"{name} runs with {size}, below its minimum {minimum}",
    )
    _require(
        size.workers <= maximum.workers and size.ps <= maximum.ps,
        f"{name} runs with {size}, above its maximum {maximum}",
    )


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise BrokenInvariant(message)
