"""What a controller tells its users about jobs, clusters and policies."""

from __future__ import annotations

from fedsched.core.cluster import ClusterRecord
from fedsched.core.ids import ClusterName, JobId
from fedsched.core.job import Allocation, JobPhase, JobSpec, JobStatus, Reason
from fedsched.core.record import Record
from fedsched.core.rounds import PolicyRecord
from fedsched.core.routing import Routing


class Job(Record, frozen=True):
    """A job: what was asked for and where it stands."""

    spec: JobSpec
    status: JobStatus


class Submission(Record, frozen=True):
    """The answer to a submission."""

    job: Job
    routing: Routing
    created: bool
    """False: the idempotency key was known already, or it was a dry run."""


class JobAhead(Record, frozen=True):
    """A job that is served before another one in the same place."""

    job_id: JobId
    name: str
    user: str
    phase: JobPhase
    minimum: Allocation


class Explanation(Record, frozen=True):
    """Why a job is where it is and what can be done about it."""

    job: Job
    reason: Reason
    """The dominant one."""
    message: str
    evidence: tuple[str, ...]
    ahead: tuple[JobAhead, ...]
    """The nearest ones, in order."""
    ahead_count: int
    routing: Routing
    """Where the job would go if it were dispatched now."""
    next_step: str
    trace_id: str


class ClusterView(Record, frozen=True):
    """A cluster as a controller knows it."""

    name: ClusterName
    reachable: bool
    seen_age_s: float
    """Since its record was last written or, when it is unreachable, since it vanished."""
    record: ClusterRecord | None
    """The last known one while unreachable; None if this controller never saw one."""


class PolicyVersion(Record, frozen=True):
    """One stored version of a policy, with the aggregator's record of it."""

    name: str
    version: int
    active: bool
    """Whether it is the one in force."""
    record: PolicyRecord
