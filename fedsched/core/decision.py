"""What a policy sees, what it may spend and what it answers."""

from __future__ import annotations

from typing import Literal, Protocol

from fedsched.core.cluster import Node, capacity_of
from fedsched.core.ids import JobId
from fedsched.core.job import Allocation, Placement, Range, sized
from fedsched.core.record import Record
from fedsched.core.resources import Resources


class SpeedSample(Record, frozen=True):
    """An observed training speed: what a policy may know of how a job scales."""

    workers: int
    ps: int
    epochs_per_s: float
    accelerator: str = ""
    """Accelerator type under all of the tasks; empty where there is none, or where they differed."""


class JobView(Record, frozen=True):
    """One live job as the policy sees it at the start of a slot."""

    job_id: JobId
    job_type: str
    workers: Range
    ps: Range
    worker_demand: Resources
    ps_demand: Resources
    epochs: float
    """Declared length."""
    progress_epochs: float
    arrived_s: float
    """Unix time (live) or virtual time (simulated) of arrival; policies order by `(arrived_s, job_id)`."""
    waited_slots: int
    """Slots since arrival at this cluster."""
    priority: int = 50
    placement: Placement = ()
    """Tasks running now; not the coordinator."""
    pinned: bool = False
    """Cannot change in this slot (a resize in flight, or its cooldown); the budget already holds it as it is."""
    accelerators: tuple[str, ...] = ()
    unreported_s: float = 0.0
    """How long it has trained since its progress was last heard of."""
    attained_s: float = 0.0
    """Task-seconds received so far."""
    attained_by: tuple[tuple[str, float], ...] = ()
    """The same by accelerator type of the node, sorted by type."""
    expected_s: float | None = None
    """How long the user expects the whole job to train at its minimum; None: not said."""
    deadline_s: float | None = None
    """By when it should have ended; None: none."""
    speeds: tuple[SpeedSample, ...] = ()
    """Newest observation per allocation and accelerator type tried, oldest first."""
    coordinator: Placement = ()
    """Where its coordinator runs; nothing where it has no place of its own."""
    coordinator_demand: Resources = Resources()

    @property
    def minimum(self) -> Allocation:
        """The least that lets the job train."""
        return sized(max(1, self.workers.minimum), self.ps.minimum)

    @property
    def remaining_epochs(self) -> float:
        """Declared epochs still to do, never below zero."""
        return max(0.0, self.epochs - self.progress_epochs)


class Observation(Record, frozen=True):
    """Everything a policy may base a slot's decision on. Jobs are sorted by `(arrived_s, job_id)`.

    Where only ranks are asked for, `jobs` are those that need a new one, and nodes are left out.
    """

    slot: int
    slot_length_s: float
    nodes: tuple[Node, ...]
    jobs: tuple[JobView, ...]
    time_s: float = 0.0
    """When the slot started."""
    finished: tuple[tuple[JobId, float], ...] = ()
    """Jobs that have succeeded since the last question, with the task-seconds that each took in all."""

    @property
    def capacity(self) -> Resources:
        """What all nodes hold together."""
        return capacity_of(self.nodes)


class Budget(Protocol):
    """The slot's capacity, spent by tentative placement: what was granted can really be placed.

    A slot starts with nothing granted, but for pinned jobs (fixed as they are) and, where the scheduler is configured
    not to preempt, the minimum of every running job.
    """

    def grant(self, job_id: JobId, workers: int = 0, ps: int = 0, accelerator: str = "") -> bool:
        """Give the job this many more tasks; all or nothing. False changes nothing: no room, or above its maximum,
        or the job is pinned. The first grant of a job must reach its minimum. With an accelerator type these tasks go
        on nodes of that type only; then name it in `Decision.accelerators` too."""

    def allocation(self, job_id: JobId) -> Allocation:
        """What the job has been granted so far."""

    def allocations(self) -> tuple[tuple[JobId, Allocation], ...]:
        """All grants, sorted by job id; jobs with nothing are left out."""


class Ranking(Record, frozen=True):
    """Who comes first: the answer of a discipline that orders jobs and leaves the rest to the scheduler.

    The scheduler remembers ranks, so an answer names only the jobs that it was asked about. In the order of their keys,
    ties by arrival, jobs get their whole allocation where it fits; one that does not fit is passed over.
    """

    ranks: tuple[tuple[JobId, tuple[float, ...]], ...]
    """Keys, smallest first; all of one discipline are equally long."""
    blocking: bool = False
    """Nobody passes a job that does not fit (head of line)."""
    preemptive: bool = False
    """Running jobs make room for waiting ones that rank before them."""
    drifting: bool = False
    """A key starts with a remaining time: it shrinks while the job runs, and the scheduler sees to that."""
    rerank: Literal["none", "running", "all"] = "none"
    """Whose ranks to ask for again at every slot."""
    review_s: float | None = None
    """When ranks change though nothing happens; a slot should start then at the latest."""


class Decision(Record, frozen=True):
    """A policy's answer for one slot: the allocation of every job that gets one, or a ranking."""

    slot: int
    allocations: tuple[tuple[JobId, Allocation], ...]
    policy: str
    version: int = 0
    """Version of the learned policy; 0 for heuristics."""
    fallback: str = ""
    """Why the heuristic answered instead of the configured policy; empty when it did not."""
    placements: tuple[tuple[JobId, Placement], ...] = ()
    """Where the budget has put the allocations; only where every slot begins with an empty cluster."""
    ranking: Ranking | None = None
    """In place of allocations, if ranks were asked for."""
    notes: tuple[tuple[JobId, str], ...] = ()
    """What the policy says about single jobs, for `explain`."""
    accelerators: tuple[tuple[JobId, str], ...] = ()
    """Jobs whose tasks belong on nodes of one accelerator type in this slot, with the type."""


class Policy(Protocol):
    """Observation in, decision out. Sleeps never, talks to nobody, keeps no clock."""

    @property
    def name(self) -> str:
        """The name it is configured by."""

    @property
    def version(self) -> int:
        """Version of the learned weights; 0 for heuristics."""

    def decide(self, observation: Observation, budget: Budget) -> Decision:
        """Spend the budget and say what came of it."""
