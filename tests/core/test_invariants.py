"""Every invariant is broken once, and the check names it: one that never objects protects nobody."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from fedsched.core.events import JobAssigned, ProgressReported, SlotStarted
from fedsched.core.ids import JobId, NodeName, TaskName
from fedsched.core.invariants import BrokenInvariant
from fedsched.core.job import JobPhase, Progress, TaskPlacement
from fedsched.core.resources import Resources
from fedsched.core.state import LiveJob
from tests.core.world import World, dispatched, node, spec

JOB, N1 = JobId("a"), NodeName("n1")
Break = Callable[[World, LiveJob], None]


def running() -> tuple[World, LiveJob]:
    """A cluster on which two jobs run, each one worker and one parameter server, and another one waits."""
    world = World((node("n1", 4), node("n2", 4)))
    for index, name in enumerate(("a", "b", "c")):
        job = spec(name, submitted_s=float(index))
        world.specs[job.job_id], world.statuses[job.job_id] = job, dispatched(job)
        world.tell(JobAssigned(world.now_s, job, world.statuses[job.job_id]))
    world.tell(SlotStarted(world.now_s, 1))
    world.decide({"a": (1, 1), "b": (1, 1)})
    world.settle()
    return world, world.scheduler.state.jobs[JOB]


def status(**changes: Any) -> Break:
    def tamper(world: World, job: LiveJob) -> None:
        job.status = replace(job.status, **changes)

    return tamper


def in_flight(phase: JobPhase, placement: tuple[TaskPlacement, ...] | None) -> Break:
    def tamper(world: World, job: LiveJob) -> None:
        job.status, job.in_flight = replace(job.status, phase=phase), placement

    return tamper


def shrunk_node(world: World, job: LiveJob) -> None:
    nodes = world.scheduler.state.nodes
    for name in nodes:
        nodes[name] = replace(nodes[name], capacity=Resources())


def wrong_books(world: World, job: LiveJob) -> None:
    for name in world.scheduler.state.free:
        world.scheduler.state.free[name] += 1


def twice(world: World, job: LiveJob) -> None:
    job.status = replace(job.status, placement=(*job.status.placement, *job.status.placement))


def reversed_places(world: World, job: LiveJob) -> None:
    job.status = replace(job.status, placement=tuple(reversed(job.status.placement)))


def grown(world: World, job: LiveJob) -> None:
    more = tuple(TaskPlacement(TaskName(f"worker-{index}"), N1) for index in range(5))
    job.status = replace(job.status, placement=(job.status.placement[0], *more))


ELSEWHERE = (TaskPlacement(TaskName("worker-7"), N1),)
BREAKS: dict[str, tuple[Break, str]] = {
    "a job that is over lives on": (status(phase=JobPhase.SUCCEEDED), "is Succeeded and still live"),
    "a task is held twice": (twice, "holds a task twice"),
    "a placement is not sorted": (reversed_places, "has an unsorted placement"),
    "a job that waits holds tasks": (status(phase=JobPhase.DISPATCHED), "waits and holds"),
    "a job that waits is being started": (in_flight(JobPhase.DISPATCHED, ()), "waits with an order in flight"),
    "below its minimum": (status(placement=()), "below its minimum"),
    "above its maximum": (grown, "above its maximum"),
    "it runs without an attempt": (status(attempt=0), "is Running without an attempt"),
    "it runs and changes": (in_flight(JobPhase.RUNNING, ELSEWHERE), "is Running with an order in flight"),
    "it changes without an order": (in_flight(JobPhase.RESIZING, None), "is Resizing without an order in flight"),
    "it stops and nothing leaves": (in_flight(JobPhase.PREEMPTING, None), "its tasks are not leaving"),
    "a node is promised twice": (shrunk_node, "promised is"),
    "the books are wrong": (wrong_books, "the books say"),
}


@pytest.mark.parametrize("name", sorted(BREAKS))
def test_a_broken_invariant_is_found_with_the_next_event_that_names_the_job(name: str) -> None:
    """Found later, nobody could say which event did it."""
    tamper, message = BREAKS[name]
    world, job = running()
    tamper(world, job)
    with pytest.raises(BrokenInvariant, match=message):
        world.scheduler.handle(ProgressReported(world.now_s, JOB, job.status.attempt, Progress(epochs=0.5)))


@pytest.mark.parametrize("name", sorted(BREAKS))
def test_a_broken_invariant_that_no_event_names_is_found_when_all_is_looked_at(name: str) -> None:
    """At the end of a run, that is."""
    tamper, message = BREAKS[name]
    world, job = running()
    tamper(world, job)
    with pytest.raises(BrokenInvariant, match=message):
        world.scheduler.verify()


def test_a_slot_looks_at_everything_once_as_many_events_have_passed_as_there_are_jobs() -> None:
    """A fault that no event names must not live until the end of a long run."""
    world, job = running()
    twice(world, job)
    other = JobId("b")
    for _ in range(3):
        world.scheduler.handle(ProgressReported(world.now_s, other, 1, Progress(epochs=0.5)))
    with pytest.raises(BrokenInvariant, match="holds a task twice"):
        world.scheduler.handle(SlotStarted(world.now_s + 10, 2))
