"""All that can happen to a cluster's scheduler, in the past tense.

Times are unix seconds live, virtual seconds simulated.
"""

from __future__ import annotations

from fedsched.core.cluster import Node
from fedsched.core.decision import Decision
from fedsched.core.ids import JobId, NodeName
from fedsched.core.job import JobSpec, JobStatus, Placement, Progress, Reason
from fedsched.core.record import Record


class TermTaken(Record, frozen=True):
    """The agent holds the cluster's lease under a new fencing number; everything it does carries it.

    Always the first event. `jobs` are all that the store has assigned to the cluster: the scheduler takes them up where
    the agent before left them.
    """

    time_s: float
    term: int
    jobs: tuple[tuple[JobSpec, JobStatus], ...] = ()


class LeaseLost(Record, frozen=True):
    """The agent is cut off from the store: what runs keeps running, nothing new is placed."""

    time_s: float


class LeaseRegained(Record, frozen=True):
    """The store answers again and the term is still ours."""

    time_s: float


class JobAssigned(Record, frozen=True):
    """The controller gave this cluster a job."""

    time_s: float
    spec: JobSpec
    status: JobStatus


class CancelRequested(Record, frozen=True):
    """The user wants the job to end."""

    time_s: float
    job_id: JobId


class SlotStarted(Record, frozen=True):
    """A scheduling interval begins."""

    time_s: float
    slot: int


class PolicyDecided(Record, frozen=True):
    """The policy (or, past its deadline, the heuristic) answered."""

    time_s: float
    decision: Decision


class JobStarted(Record, frozen=True):
    """All tasks of the attempt have joined and train."""

    time_s: float
    job_id: JobId
    attempt: int


class JobScaled(Record, frozen=True):
    """A resize is complete: exactly `placement` runs now and what was removed has ended."""

    time_s: float
    job_id: JobId
    attempt: int
    placement: Placement
    pause_s: float
    """How long workers stood still."""
    term: int = 0
    """With `seq`: the order that this answers. 0 in journals of before answers named their orders."""
    seq: int = 0


class ScaleFailed(Record, frozen=True):
    """A resize was rolled back: exactly `placement` runs, as before it."""

    time_s: float
    job_id: JobId
    attempt: int
    placement: Placement
    message: str
    term: int = 0
    """With `seq`: the order that this answers, as in `JobScaled`."""
    seq: int = 0


class ProgressReported(Record, frozen=True):
    """The job says how far it is."""

    time_s: float
    job_id: JobId
    attempt: int
    progress: Progress


class JobExited(Record, frozen=True):
    """No task of the attempt exists any more. `reason` is FINISHED when the training came to its end."""

    time_s: float
    job_id: JobId
    attempt: int
    reason: Reason
    message: str
    progress: Progress | None = None


class JobAdopted(Record, frozen=True):
    """After a restart the agent found the attempt's tasks still running, exactly these."""

    time_s: float
    job_id: JobId
    attempt: int
    placement: Placement


class NodeChanged(Record, frozen=True):
    """A node joined or changed its capacity or state."""

    time_s: float
    node: Node


class NodeLost(Record, frozen=True):
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
