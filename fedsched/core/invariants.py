"""What is always true of a cluster's scheduler between two events."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fedsched.core.choosing import Footprint
from fedsched.core.commands import Command, SaveJob
from fedsched.core.events import Event, JobAssigned, NodeChanged, NodeLost, SlotStarted, TermTaken
from fedsched.core.ids import JobId, NodeName
from fedsched.core.job import TERMINAL, JobPhase, coordinator_of
from fedsched.core.resources import OVERDRAWN, amount_of, resources_of
from fedsched.core.state import ClusterState, LiveJob


class BrokenInvariant(AssertionError):
    """The scheduler's state contradicts itself: a fault of ours."""


class Invariants:
    """Looks at what each event has touched, and from time to time at everything.

    An event is charged for the jobs that it names or saves and for their nodes. The whole state is looked at when nodes
    or the term change, and at slots as soon as as many events have passed as there are jobs; so a large cluster costs
    no more per event than a small one, and what an event touches without saying so is found soon.
    """

    def __init__(self, state: ClusterState) -> None:
        self._state = state
        self._passed = 0
        self._counted: dict[JobId, tuple[Footprint, Footprint]] = {}
        """What each job will hold and may hold now, as it is in the sums below."""
        self._promised: dict[NodeName, int] = {}
        self._held: dict[NodeName, int] = {}

    def after(self, event: Event, commands: Sequence[Command]) -> None:
        """Look at what this event has touched.

        Raises:
            BrokenInvariant: names the job or node and the promise that does not hold.
        """
        self._passed += 1
        kind = type(event)
        if kind in _TOUCHES_ALL or (kind is SlotStarted and self._passed >= len(self._state.jobs)):
            self.everything()
            return
        touched = {command.status.job_id for command in commands if isinstance(command, SaveJob)}
        if isinstance(event, JobAssigned):
            touched.add(event.spec.job_id)
        else:
            touched.add(getattr(event, "job_id", JobId("")))
        nodes: set[NodeName] = set()
        for job_id in sorted(touched):
            nodes |= self._recount(job_id)
        for name in sorted(nodes):
            self._check_node(name)

    def everything(self) -> None:
        """Look at the whole state, counted anew.

        Raises:
            BrokenInvariant: as `after`.
        """
        self._passed = 0
        self._counted.clear()
        self._promised.clear()
        self._held.clear()
        for job_id in self._state.jobs:
            self._recount(job_id)
        for name in self._state.nodes:
            self._check_node(name)

    def _recount(self, job_id: JobId) -> set[NodeName]:
        """Judge one job and bring the sums up to date; returns the nodes that it is or was on."""
        job = self._state.jobs.get(job_id)
        before = self._counted.pop(job_id, ((), ()))
        after: tuple[Footprint, Footprint] = ((), ())
        if job is not None:
            _check_job(job, self._state.config.rebuild)
            after = self._counted[job_id] = (job.footprint_of(job.settled), job.footprint_of(job.held))
        for sums, old, new in zip((self._promised, self._held), before, after, strict=True):
            for name, amount in old:
                sums[name] -= amount
            for name, amount in new:
                sums[name] = sums.get(name, 0) + amount
        return {name for footprint in (*before, *after) for name, _ in footprint}

    def _check_node(self, name: NodeName) -> None:
        node = self._state.nodes.get(name)
        if node is None:
            return
        capacity = amount_of(node.capacity)
        promised, free = self._promised.get(name, 0), capacity - self._held.get(name, 0)
        _require(
            not (capacity - promised) & OVERDRAWN,
            lambda: f"node {name} holds {node.capacity}, promised is {resources_of(promised)}",
        )
        if not self._state.config.rebuild:
            books = self._state.free[name]
            _require(
                books == free,
                lambda: f"node {name} has {resources_of(free)} free, the books say {resources_of(books)}",
            )


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
        _require(
            coordinator_of(job.settled) == coordinator_of(status.placement),
            f"{name} is Resizing and its coordinator moves",
        )
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


def _require(holds: bool, message: str | Callable[[], str]) -> None:
    if not holds:
        raise BrokenInvariant(message if isinstance(message, str) else message())


_TOUCHES_ALL = (TermTaken, NodeChanged, NodeLost)
