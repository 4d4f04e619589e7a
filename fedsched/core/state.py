"""What a cluster's scheduler remembers: its nodes and the jobs that are not over."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from fedsched.core.cluster import Node
from fedsched.core.decision import SpeedSample
from fedsched.core.ids import ClusterName, JobId, NodeName
from fedsched.core.job import Allocation, JobPhase, JobSpec, JobStatus, Placement
from fedsched.core.record import Record
from fedsched.core.resources import Resources


class SchedulerConfig(Record, frozen=True):
    """How a cluster's scheduler behaves."""

    cluster: ClusterName
    slot_length_s: float
    """Length of a slot, told to policies; the slots themselves come as events."""
    keep_running: bool = True
    """A running job keeps at least its minimum; False lets the policy stop it."""


@dataclass(slots=True)
class LiveJob:
    """A job of this cluster that is not over."""

    spec: JobSpec
    status: JobStatus
    arrived_slot: int
    target: Placement = ()
    """What the last decision wants; equals `status.placement` once carried out."""
    in_flight: Placement | None = None
    """What the order that the executor works on will leave: empty for a stop. None when nothing is in flight."""
    adopting: bool = False
    """The executor is looking for the tasks of an agent before this one."""
    cancelled: bool = False
    stopping_for: JobPhase | None = None
    """Terminal phase that the ordered end leads to; None while no end is ordered."""
    speeds: dict[tuple[Allocation, str], SpeedSample] = field(default_factory=dict)
    """Newest observed speed per allocation and accelerator type, oldest first."""
    attained_s: float = 0.0
    attained_by: dict[str, float] = field(default_factory=dict)
    """Task-seconds by accelerator type of the node."""
    attempt_epochs: float = 0.0
    """Progress when the attempt was started."""
    slot_epochs: float = 0.0
    """Progress at the start of the slot."""
    slot_allocation: Allocation | None = None
    """Allocation held since the slot began; None when it changed within the slot."""
    story: deque[str] = field(default_factory=lambda: deque(maxlen=20))
    """The last transitions in words, for the message of an illegal one."""

    @property
    def held(self) -> Placement:
        """Tasks that may exist on nodes now: those that run, and those that an order in flight is starting."""
        if not self.in_flight:
            return self.status.placement
        return tuple(sorted({*self.status.placement, *self.in_flight}))

    @property
    def settled(self) -> Placement:
        """Tasks that will exist once the order in flight is done."""
        return self.status.placement if self.in_flight is None else self.in_flight

    @property
    def order_key(self) -> tuple[float, JobId]:
        """Jobs are always taken in this order."""
        return (self.spec.submitted_s, self.spec.job_id)


@dataclass(slots=True)
class ClusterState:
    """Everything that the next decision depends on."""

    config: SchedulerConfig
    nodes: dict[NodeName, Node]
    jobs: dict[JobId, LiveJob] = field(default_factory=dict)
    """Live jobs only: a job leaves with the transaction that makes it terminal."""
    term: int = 0
    """0 until the first term is taken; nothing is done before."""
    seq: int = 0
    """Grows with each order to the executor."""
    leased: bool = False
    """Whether the cluster's lease is ours; without it nothing new is placed."""
    slot: int = -1
    slot_started_s: float = 0.0
    asked_slot: int | None = None
    """The slot that the policy is deciding; None when no question is open."""
    ended: list[tuple[JobId, float]] = field(default_factory=list)
    """Jobs that ended in this slot, with what they did in it as a fraction of their declared epochs."""

    def ordered(self) -> list[LiveJob]:
        """Live jobs by `(submitted_s, job_id)`."""
        return sorted(self.jobs.values(), key=lambda job: job.order_key)

    def held_on(self, node: NodeName) -> Resources:
        """What tasks may take of a node now."""
        return self._sum(node, lambda job: job.held)

    def settled_on(self, node: NodeName) -> Resources:
        """What tasks will take of a node once all orders in flight are done."""
        return self._sum(node, lambda job: job.settled)

    def usage(self) -> Resources:
        """What tasks may take of the whole cluster now."""
        result = Resources()
        for job in self.jobs.values():
            for entry in job.held:
                result = result + job.spec.demand(entry.role)
        return result

    def _sum(self, node: NodeName, tasks: Callable[[LiveJob], Placement]) -> Resources:
        result = Resources()
        for job in self.jobs.values():
            for entry in tasks(job):
                if entry.node == node:
                    result = result + job.spec.demand(entry.role)
        return result
