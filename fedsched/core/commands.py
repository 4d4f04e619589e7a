"""All that a cluster's scheduler can order, in the imperative.

`SaveJob` is carried out first; the others go out only after it is confirmed (persist, then act). Orders to the executor
carry `(term, seq)`: it refuses an older term and ignores a repeated seq.
"""

from __future__ import annotations

from fedsched.core.choosing import Rule
from fedsched.core.decision import Observation
from fedsched.core.ids import JobId
from fedsched.core.job import JobSpec, JobStatus, Placement, Reason, Transition
from fedsched.core.record import Record


class SaveJob(Record, frozen=True):
    """Persist the status and, with it in one transaction, the transition that led there."""

    status: JobStatus
    transition: Transition | None
    """None when only the progress is new."""


class StartJob(Record, frozen=True):
    """Start an attempt with these tasks, from the newest checkpoint of the attempt before if there is one."""

    term: int
    seq: int
    spec: JobSpec
    attempt: int
    placement: Placement


class ScaleJob(Record, frozen=True):
    """Make exactly `placement` the attempt's tasks while training goes on."""

    term: int
    seq: int
    job_id: JobId
    attempt: int
    placement: Placement


class StopJob(Record, frozen=True):
    """End all tasks of the attempt, with a checkpoint first when `checkpoint`; kill after `grace_s`.

    The `JobExited` that follows carries `reason`, unless the job ended by itself before the order reached it.
    """

    term: int
    seq: int
    job_id: JobId
    attempt: int
    reason: Reason
    checkpoint: bool
    grace_s: float


class AdoptJobs(Record, frozen=True):
    """Find what runs of these attempts: answer each with `JobAdopted` or, when nothing is left, `JobExited`.

    Tasks of any other attempt are strays of an agent before this one and are ended.
    """

    term: int
    seq: int
    jobs: tuple[tuple[JobSpec, int], ...]
    """Specification and attempt of each job that the store says is active."""


class AskPolicy(Record, frozen=True):
    """Have the policy decide this slot; the answer comes as `PolicyDecided`."""

    observation: Observation
    keep_running: bool
    """Running jobs hold at least their minimum before the policy spends anything."""
    ranks: bool = False
    """Only the ranks of the observation's jobs are wanted."""
    rebuild: bool = False
    """The budget begins with an empty cluster."""
    placement: Rule = "spread"
    """How the budget chooses nodes."""


class RewardSlot(Record, frozen=True):
    """What the slot brought: each job's progress in it as a fraction of its declared epochs (DL2's reward)."""

    slot: int
    progress: tuple[tuple[JobId, float], ...]


ExecutorCommand = StartJob | ScaleJob | StopJob | AdoptJobs
Order = ExecutorCommand | AskPolicy | RewardSlot
Command = SaveJob | Order
