"""The words between one job's scaling protocol and the world: plans, views, what happens, and what is to be done."""

from __future__ import annotations

from enum import StrEnum

from fedsched.core.blocks import Block
from fedsched.core.ids import TaskName
from fedsched.core.record import Record


class Plan(Record, frozen=True):
    """Who does what from a step on."""

    number: int
    """1 for the attempt's first plan, then growing by one."""
    from_step: int
    workers: tuple[TaskName, ...]
    """In the order in which their gradients are added; the first is the chief."""
    servers: tuple[TaskName, ...]
    """None where workers reduce their gradients among themselves; then each has all blocks, and the chief's count."""
    owners: tuple[TaskName, ...]
    """The server of each block, in the order of the job's blocks."""

    @property
    def tasks(self) -> tuple[TaskName, ...]:
        """All members, workers first."""
        return self.workers + self.servers


class View(Record, frozen=True):
    """All that one member must know now; the one with the highest number counts."""

    number: int
    plans: tuple[Plan, ...]
    """The current plan and, while a switch is under way, the next one. Each holds from its first step on."""
    granted: int
    """Steps below this may be run."""
    saves: tuple[int, ...]
    """Versions at which servers write a checkpoint: after all steps below were applied, before any other."""
    leave: bool
    """The member's part is over: it ends itself."""
    message: str = ""
    """Why, when the job failed."""
    finished: bool = False
    """Worker: it is known to have taken the last step. It ends only after it has read this: a last report that is lost
    with its process would make a complete training look like a crash."""


# Events. Times come from the coordinator's monotonic clock.


class ModelDescribed(Record, frozen=True):
    """The first worker told what is trained; comes before any worker is ready."""

    time_s: float
    blocks: tuple[Block, ...]
    steps: int
    """Steps of the whole training."""
    asynchronous: bool = False
    """A step is one worker's: under a plan with W workers, the one of rank r takes every W-th step from the plan's
    first plus r on, and waits for nobody. Only plans and checkpoints have everybody's steps below them taken first."""


class TaskReported(Record, frozen=True):
    """A member said how things stand with it. Values never shrink; an older report changes nothing."""

    time_s: float
    task: TaskName
    seen: int = 0
    """Number of the newest view it knows."""
    done: int = 0
    """Worker: all steps below this that are its to take are finished, their results pulled."""
    holds: int = 0
    """Server: the newest plan of which it has all its blocks."""
    saved: int = -1
    """Server: the newest checkpoint version of which it has written its shard."""
    pause_s: float = 0.0
    """Worker: how long the last switch held it up."""
    shares: bool = False
    """Server: keeps its blocks in the coordinator's memory. Between two such servers they move without a byte sent."""


class TaskGone(Record, frozen=True):
    """A member's process has ended or cannot be reached; with an error text when it told one."""

    time_s: float
    task: TaskName
    error: str = ""


class NewcomerLost(Record, frozen=True):
    """The executor knows that a task which an order waits for will not join: its process has ended."""

    time_s: float
    seq: int
    """Of the order."""
    task: TaskName
    message: str


class ScaleRequested(Record, frozen=True):
    """The executor wants exactly these members; new ones must be ready by the deadline."""

    time_s: float
    seq: int
    tasks: tuple[TaskName, ...]
    deadline_s: float
    """A duration, counted from the event."""


class StopRequested(Record, frozen=True):
    """The executor wants the job to end, with a checkpoint first if it can be had within the grace."""

    time_s: float
    checkpoint: bool
    grace_s: float


class CheckpointWritten(Record, frozen=True):
    """The manifest is on disk: the checkpoint is complete."""

    time_s: float
    step: int


class CheckpointFailed(Record, frozen=True):
    """A checkpoint could not be written, a full disk say. Training goes on with the one before, but for the last."""

    time_s: float
    step: int
    message: str


class Tick(Record, frozen=True):
    """Time has passed."""

    time_s: float


Event = (
    ModelDescribed
    | TaskReported
    | TaskGone
    | NewcomerLost
    | ScaleRequested
    | StopRequested
    | CheckpointWritten
    | CheckpointFailed
    | Tick
)


# Commands.


class Send(Record, frozen=True):
    """Give a member its newest view."""

    task: TaskName
    view: View


class CompleteCheckpoint(Record, frozen=True):
    """All shards of this step are on disk: write the manifest."""

    step: int
    servers: tuple[TaskName, ...]
    """Whose shards belong to it."""


class AnswerScale(Record, frozen=True):
    """Tell the executor what came of its order."""

    seq: int
    ok: bool
    tasks: tuple[TaskName, ...]
    """Members now."""
    pause_s: float = 0.0
    message: str = ""


class End(Record, frozen=True):
    """The job is over; members are leaving."""

    phase: Phase
    message: str


Command = Send | CompleteCheckpoint | AnswerScale | End


class Phase(StrEnum):
    """Where the attempt is."""

    JOINING = "joining"
    TRAINING = "training"
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"
