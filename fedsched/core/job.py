"""What a job is, what may happen to it and in which order: its specification, its status, its life as a table."""

from __future__ import annotations

from bisect import bisect_left
from enum import StrEnum
from functools import lru_cache

from fedsched.core.ids import ClusterName, JobId, NodeName, TaskName
from fedsched.core.record import Record
from fedsched.core.resources import Resources

EPOCHS_MAX = 1e9
TASKS_MAX = 10_000
"""Most tasks of one role that a job may ask for."""
LENGTH_MAX_S = 10 * 365 * 86400.0
"""Longest time that a job may name."""


class Role(StrEnum):
    """What a task does in its job."""

    __hash__ = str.__hash__  # see `JobPhase`; every task that is placed hashes some

    WORKER = "worker"
    PS = "ps"
    COORDINATOR = "coordinator"
    """Keeps the job's books. There is one per job, it is part of no allocation, and it stays where it started."""


COORDINATOR = TaskName(Role.COORDINATOR.value)
"""The name of every job's coordinator; sorts before all other tasks."""


class Range(Record, frozen=True):
    """How few and how many tasks of one role a job can use, both ends included."""

    minimum: int
    maximum: int

    def __post_init__(self) -> None:
        if self.minimum < 0:
            raise ValueError(f"minimum {self.minimum} is negative")
        if self.minimum > self.maximum:
            raise ValueError(f"minimum {self.minimum} is above maximum {self.maximum}")

    def __contains__(self, count: object) -> bool:
        return isinstance(count, int) and self.minimum <= count <= self.maximum

    def __str__(self) -> str:
        return f"{self.minimum}..{self.maximum}"


class Allocation(Record, frozen=True):
    """How many tasks a job holds during one slot. Says nothing about where they run."""

    workers: int = 0
    ps: int = 0

    def __post_init__(self) -> None:
        if self.workers < 0 or self.ps < 0:
            raise ValueError(f"an allocation cannot be negative: {self}")

    def __add__(self, other: Allocation) -> Allocation:
        return Allocation(self.workers + other.workers, self.ps + other.ps)

    def __bool__(self) -> bool:
        return self.workers > 0 or self.ps > 0

    def __str__(self) -> str:
        return f"{self.workers}w+{self.ps}ps"


NO_TASKS = Allocation()
"""What a job has that does not run."""


class TaskPlacement(Record, frozen=True, order=True):
    """One task and the node it runs on."""

    task: TaskName
    node: NodeName

    @property
    def role(self) -> Role:
        """The role, read off the task's name."""
        return role_of(self.task)


Placement = tuple[TaskPlacement, ...]
"""Where all tasks of a job run, sorted by task name. The coordinator is among them where it has a place of its own."""


def task_name(role: Role, index: int) -> TaskName:
    """The name of a job's `index`-th task of `role`; there is only one coordinator."""
    return COORDINATOR if role is Role.COORDINATOR else TaskName(f"{role.value}-{index}")


def role_of(task: TaskName) -> Role:
    """The role that a task's name begins with."""
    if task.startswith("worker-"):
        return Role.WORKER
    return Role.COORDINATOR if task == COORDINATOR else Role.PS


def allocation_of(placement: Placement) -> Allocation:
    """How many tasks of each role a placement, which is sorted by task name, holds."""
    if not placement or placement[0].task.startswith("worker-"):
        return sized(len(placement), 0)
    before_workers = bisect_left(placement, _BEFORE_WORKERS)
    return sized(len(placement) - before_workers, before_workers - (placement[0].task == COORDINATOR))


def members_of(placement: Placement) -> Placement:
    """The tasks that train: all but the coordinator."""
    return placement[1:] if placement and placement[0].task == COORDINATOR else placement


def coordinator_of(placement: Placement) -> Placement:
    """The coordinator alone; nothing where it has no place of its own."""
    return placement[:1] if placement and placement[0].task == COORDINATOR else ()


@lru_cache(maxsize=4096)
def sized(workers: int, ps: int) -> Allocation:
    """An allocation that is made once, for where thousands of equal ones are asked for."""
    return Allocation(workers, ps)


_BEFORE_WORKERS = TaskPlacement(TaskName(Role.WORKER.value), NodeName(""))
"""Sorts behind every parameter server and before every worker."""


class JobSpec(Record, frozen=True):
    """What a user asked for; it never changes after submission."""

    job_id: JobId
    name: str
    run: str
    """Shell-style command of one worker task; parameter servers run the product's own program."""
    workers: Range
    ps: Range
    worker_demand: Resources
    ps_demand: Resources
    epochs: float
    """Declared passes over the job's data, the policy's estimate of its length."""
    job_type: str = "unknown"
    """Class of the model being trained; jobs of one class scale alike, which is what a policy learns."""
    queue: str = "default"
    user: str = ""
    priority: int = 50
    workdir: str = ""
    env: tuple[tuple[str, str], ...] = ()
    accelerators: tuple[str, ...] = ()
    """Accelerator types that will do, best first; empty means any node."""
    clusters: tuple[ClusterName, ...] = ()
    """Clusters that will do, best first; empty means any cluster."""
    clusters_ranked: bool = True
    """Whether the order of `clusters` counts; else they are equally good."""
    max_attempts: int = 3
    max_runtime_s: float | None = None
    checkpoint_every_s: float = 10.0
    resize_cooldown_s: float = 0.0
    """Least time between two resizes of the job."""
    grace_s: float = 10.0
    """How long a stopping task may take before it is killed."""
    expected_s: float | None = None
    """How long the user expects the whole job to train at its minimum; None: not said."""
    deadline_s: float | None = None
    """Unix time by which it should have ended; None: none."""
    submitted_s: float = 0.0
    """Unix time of the submission."""
    traceparent: str = ""
    """W3C trace context of the submission."""
    coordinator_demand: Resources = Resources()
    """What its coordinator takes of a node. Not the user's to say: the agent that takes the job up fills it in, because
    clusters differ in it. Nothing: the coordinator runs where it may and is not placed."""

    def demand(self, role: Role) -> Resources:
        """What one task of `role` needs."""
        if role is Role.WORKER:
            return self.worker_demand
        return self.ps_demand if role is Role.PS else self.coordinator_demand

    def demand_of(self, allocation: Allocation) -> Resources:
        """What all tasks of `allocation` need together."""
        return self.worker_demand * allocation.workers + self.ps_demand * allocation.ps

    @property
    def minimum(self) -> Allocation:
        """The least that lets the job train: never less than one worker."""
        return Allocation(max(1, self.workers.minimum), self.ps.minimum)

    @property
    def maximum(self) -> Allocation:
        """The most the job can use."""
        return Allocation(self.workers.maximum, self.ps.maximum)

    @property
    def rigid(self) -> bool:
        """Whether there is only one allocation that it can run with."""
        return max(1, self.workers.minimum) == self.workers.maximum and self.ps.minimum == self.ps.maximum


class JobPhase(StrEnum):
    """Where a job is in its life."""

    __hash__ = str.__hash__  # an enum's own is Python code, and every move of every job hashes some

    QUEUED = "Queued"
    DISPATCHED = "Dispatched"
    STARTING = "Starting"
    RUNNING = "Running"
    RESIZING = "Resizing"
    COMPLETING = "Completing"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    CANCELLED = "Cancelled"
    PREEMPTING = "Preempting"
    HELD = "Held"
    UNREACHABLE = "Unreachable"
    """Shown when the job's cluster has lost its lease; never stored, because only the agent writes the status."""


TERMINAL = frozenset({JobPhase.SUCCEEDED, JobPhase.FAILED, JobPhase.CANCELLED})
ACTIVE = frozenset({JobPhase.STARTING, JobPhase.RUNNING, JobPhase.RESIZING, JobPhase.COMPLETING, JobPhase.PREEMPTING})
"""Phases in which tasks of the job may exist on nodes."""


class Trigger(StrEnum):
    """What moves a job from one phase to the next."""

    __hash__ = str.__hash__

    DISPATCHED = "dispatched"
    PLACED = "placed"
    STARTED = "started"
    RESIZE = "resize"
    RESIZED = "resized"
    STOP = "stop"
    """An end was ordered (cancel, time limit) or is near (all epochs done); tasks are leaving."""
    PREEMPT = "preempt"
    PREEMPTED = "preempted"
    RETRY = "retry"
    """The attempt ended badly and another one is allowed."""
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    HOLD = "hold"
    RELEASE = "release"


_P, _T = JobPhase, Trigger
LIFECYCLE: dict[tuple[JobPhase, Trigger], JobPhase] = {
    (_P.QUEUED, _T.DISPATCHED): _P.DISPATCHED,
    (_P.QUEUED, _T.CANCELLED): _P.CANCELLED,
    (_P.QUEUED, _T.FAILED): _P.FAILED,
    (_P.QUEUED, _T.HOLD): _P.HELD,
    (_P.HELD, _T.RELEASE): _P.QUEUED,
    (_P.HELD, _T.CANCELLED): _P.CANCELLED,
    (_P.DISPATCHED, _T.PLACED): _P.STARTING,
    (_P.DISPATCHED, _T.CANCELLED): _P.CANCELLED,
    (_P.DISPATCHED, _T.FAILED): _P.FAILED,
    (_P.STARTING, _T.STARTED): _P.RUNNING,
    (_P.STARTING, _T.STOP): _P.COMPLETING,
    (_P.STARTING, _T.PREEMPT): _P.PREEMPTING,
    (_P.STARTING, _T.RETRY): _P.DISPATCHED,
    (_P.STARTING, _T.FAILED): _P.FAILED,
    (_P.STARTING, _T.SUCCEEDED): _P.SUCCEEDED,
    (_P.RUNNING, _T.RESIZE): _P.RESIZING,
    (_P.RUNNING, _T.STOP): _P.COMPLETING,
    (_P.RUNNING, _T.PREEMPT): _P.PREEMPTING,
    (_P.RUNNING, _T.RETRY): _P.DISPATCHED,
    (_P.RUNNING, _T.FAILED): _P.FAILED,
    (_P.RUNNING, _T.SUCCEEDED): _P.SUCCEEDED,
    (_P.RESIZING, _T.RESIZED): _P.RUNNING,
    (_P.RESIZING, _T.STOP): _P.COMPLETING,
    (_P.RESIZING, _T.PREEMPT): _P.PREEMPTING,
    (_P.RESIZING, _T.RETRY): _P.DISPATCHED,
    (_P.RESIZING, _T.FAILED): _P.FAILED,
    (_P.RESIZING, _T.SUCCEEDED): _P.SUCCEEDED,
    (_P.COMPLETING, _T.SUCCEEDED): _P.SUCCEEDED,
    (_P.COMPLETING, _T.FAILED): _P.FAILED,
    (_P.COMPLETING, _T.CANCELLED): _P.CANCELLED,
    (_P.PREEMPTING, _T.PREEMPTED): _P.DISPATCHED,
    (_P.PREEMPTING, _T.STOP): _P.COMPLETING,
    (_P.PREEMPTING, _T.SUCCEEDED): _P.SUCCEEDED,
    (_P.PREEMPTING, _T.FAILED): _P.FAILED,
}
"""What is not in the table cannot happen."""


_MOVES = {
    phase: {trigger: target for (source, trigger), target in LIFECYCLE.items() if source is phase} for phase in _P
}


class IllegalTransition(AssertionError):
    """A job was asked to do what its phase does not allow: a fault of ours."""


def next_phase(job_id: JobId, phase: JobPhase, trigger: Trigger) -> JobPhase:
    """The phase after `trigger`.

    Raises:
        IllegalTransition: the table has no such move; the message names what would have been allowed.
    """
    target = _MOVES[phase].get(trigger)
    if target is None:
        allowed = ", ".join(t.name for (p, t) in LIFECYCLE if p is phase) or "nothing, it is over"
        raise IllegalTransition(f"job {job_id}: {trigger.name} cannot happen while {phase.value} (allowed: {allowed})")
    return target


class Reason(StrEnum):
    """Why a job is where it is; stable names, part of the public interface."""

    NONE = ""
    HELD = "Held"
    INVALID_SPEC = "InvalidSpec"
    NO_MATCHING_CLUSTER = "NoMatchingCluster"
    NO_MATCHING_ACCELERATOR = "NoMatchingAccelerator"
    EXCEEDS_LARGEST_CLUSTER = "ExceedsLargestCluster"
    CLUSTER_CORDONED = "ClusterCordoned"
    CLUSTER_UNREACHABLE = "ClusterUnreachable"
    WAITING_FOR_CAPACITY = "WaitingForCapacity"
    FRAGMENTED = "Fragmented"
    WAITING_FOR_GANG = "WaitingForGang"
    POLICY_DEFERRED = "PolicyDeferred"
    GUARDRAIL_FALLBACK = "GuardrailFallback"
    PENDING_EVALUATION = "PendingEvaluation"
    # How an attempt or a job ended.
    FINISHED = "Finished"
    CANCELLED_BY_USER = "CancelledByUser"
    USER_ERROR = "UserError"
    START_FAILED = "StartFailed"
    OUT_OF_MEMORY = "OutOfMemory"
    TASK_KILLED = "TaskKilled"
    NODE_LOST = "NodeLost"
    LOST = "Lost"
    """The tasks are gone and nobody saw how they ended."""
    PREEMPTED = "Preempted"
    TIME_LIMIT = "TimeLimit"
    ATTEMPTS_EXHAUSTED = "AttemptsExhausted"
    # Why a resize did not happen.
    RESIZE_FAILED = "ResizeFailed"


class Progress(Record, frozen=True):
    """How far a job has come, as the job itself reports it."""

    epochs: float = 0.0
    steps: int = 0
    samples_per_s: float = 0.0
    loss: float | None = None
    accuracy: float | None = None
    checkpoint_step: int = -1
    """Step of the newest complete checkpoint; -1 before the first."""
    idle_s: float = 0.0
    """How long no step had ended when this was reported; 0 while steps end as usual."""
    complaint: str = ""
    """What the job itself complains about while it goes on: checkpoints or logs that cannot be written, say."""


class JobStatus(Record, frozen=True):
    """Where a job stands. Written by the controller until it is dispatched, then by the agent that holds the term."""

    job_id: JobId
    phase: JobPhase = JobPhase.QUEUED
    reason: Reason = Reason.PENDING_EVALUATION
    message: str = ""
    cluster: ClusterName | None = None
    attempt: int = 0
    """How many times the job was started; the first start makes it 1."""
    failures: int = 0
    """Attempts that ended badly; a preemption is none."""
    term: int = 0
    seq: int = 0
    """Grows by one with each transition of the job."""
    placement: Placement = ()
    progress: Progress = Progress()
    resizes: int = 0
    dispatched_s: float | None = None
    started_s: float | None = None
    """Unix time of the first start of tasks."""
    changed_s: float | None = None
    """Unix time of the last change of the allocation."""
    finished_s: float | None = None
    setbacks: int = 0
    """Attempts in a row that ended badly and brought the job no further."""
    retry_s: float | None = None
    """Unix time before which no further attempt begins; None while none is held back."""

    @property
    def allocation(self) -> Allocation:
        """How many tasks of each role the job holds now."""
        return allocation_of(self.placement)


class Transition(Record, frozen=True):
    """One step in a job's life, as `fedsched events` shows it."""

    seq: int
    time_s: float
    actor: str
    job_id: JobId
    attempt: int
    term: int
    source: JobPhase | None
    target: JobPhase
    reason: Reason
    message: str = ""
    allocation: Allocation = Allocation()
    traceparent: str = ""
