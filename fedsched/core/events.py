"""All that can happen to a cluster's scheduler, in the past tense.

Times are unix seconds live, virtual seconds simulated.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedsched.core.cluster import Node
from fedsched.core.decision import Decision
from fedsched.core.ids import JobId, NodeName
from fedsched.core.job import JobSpec, JobStatus, Placement, Progress, Reason


@dataclass(frozen=True, slots=True)
class TermTaken:
    """The agent holds the cluster's lease under a new fencing number; everything it does carries it.

    Always the first event. `jobs` are all that the store has assigned to the cluster: the scheduler takes them up where
    the agent before left them.
    """

    time_s: float
    term: int
    jobs: tuple[tuple[JobSpec, JobStatus], ...] = ()


@dataclass(frozen=True, slots=True)
class LeaseLost:
    """The agent is cut off from the store: what runs keeps running, nothing new is placed."""

    time_s: float


@dataclass(frozen=True, slots=True)
class LeaseRegained:
    """The store answers again and the term is still ours."""

    time_s: float


@dataclass(frozen=True, slots=True)
class JobAssigned:
    """The controller gave this cluster a job."""

    time_s: float
    spec: JobSpec
    status: JobStatus


@dataclass(frozen=True, slots=True)
class CancelRequested:
    """The user wants the job to end."""

    time_s: float
    job_id: JobId


@dataclass(frozen=True, slots=True)
class SlotStarted:
    """A scheduling interval begins."""

    time_s: float
    slot: int


@dataclass(frozen=True, slots=True)
class PolicyDecided:
    """The policy (or, past its deadline, the heuristic) answered."""

    time_s: float
    decision: Decision


@dataclass(frozen=True, slots=True)
class JobStarted:
    """All tasks of the attempt have joined and train."""

    time_s: float
    job_id: JobId
    attempt: int


@dataclass(frozen=True, slots=True)
class JobScaled:
    """A resize is complete: exactly `placement` runs now and what was removed has ended."""

    time_s: float
    job_id: JobId
    attempt: int
    placement: Placement
    pause_s: float
    """How long workers stood still."""


@dataclass(frozen=True, slots=True)
class ScaleFailed:
    """A resize was rolled back: exactly `placement` runs, as before it."""

    time_s: float
    job_id: JobId
    attempt: int
    placement: Placement
    message: str


@dataclass(frozen=True, slots=True)
class ProgressReported:
    """The job says how far it is."""

    time_s: float
    job_id: JobId
    attempt: int
    progress: Progress


@dataclass(frozen=True, slots=True)
class JobExited:
    """No task of the attempt exists any more. `reason` is FINISHED when the training came to its end."""

    time_s: float
    job_id: JobId
    attempt: int
    reason: Reason
    message: str
    progress: Progress | None = None


@dataclass(frozen=True, slots=True)
class JobAdopted:
    """After a restart the agent found the attempt's tasks still running, exactly these."""

    time_s: float
    job_id: JobId
    attempt: int
    placement: Placement


@dataclass(frozen=True, slots=True)
class NodeChanged:
    """A node joined or changed its capacity or state."""

    time_s: float
    node: Node


@dataclass(frozen=True, slots=True)
class NodeLost:
    """A node is gone with everything on it."""

    time_s: float
    name: NodeName


Event = (
    TermTaken
    | LeaseLost
    | LeaseRegained
    | JobAssigned
    | CancelRequested
    | SlotStarted
    | PolicyDecided
    | JobStarted
    | JobScaled
    | ScaleFailed
    | ProgressReported
    | JobExited
    | JobAdopted
    | NodeChanged
    | NodeLost
)
