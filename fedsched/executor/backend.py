"""What differs between the places where tasks run: starting one, watching it, signalling it, and why it ended."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from fedsched.core.ids import NodeName
from fedsched.core.job import JobSpec
from fedsched.core.resources import Resources
from fedsched.executor.records import Attempt, ExitRecord, TaskOrder, TaskRecord


class TaskBackend(Protocol):
    """Runs the tasks of one cluster. Everything else of an attempt's life is the same wherever they run.

    All back ends keep what they know in the cluster's directory, which its machines share: a task's order, its record,
    its log, its exit. They are called from the threads of all attempts.
    """

    is_this_machine: bool
    """Tasks are processes beside the agent: they inherit its environment, and nodes are only names, so that a task that
    runs can be counted to another one."""
    coordinator: Resources
    """What a job's coordinator takes of a node."""

    def taken(self, spec: JobSpec) -> JobSpec:
        """The job with what its tasks and its coordinator will really take of nodes here: clusters count some things
        in whole numbers only, and each task for itself. The scheduler must count as they do, or promises places that
        the cluster then refuses."""

    def warm_up(self) -> None:
        """Prepare for the first start; does not wait for it."""

    def fence(self, term: int) -> None:
        """Refuse starts of older terms that are still on their way."""

    def take_over(self, attempt: Attempt, term: int) -> None:
        """Tasks of the attempt that have yet to begin may do so: an agent with this term has adopted it."""

    def start(self, term: int, order: TaskOrder) -> TaskRecord:
        """Start a task; its record is on disk before the task's first instruction runs.

        Raises:
            StartFailed: it could not be started, and the message says why.
            MachineTrouble: any task would have met the same.
        """

    def ended(self, attempt: Attempt, record: TaskRecord) -> ExitRecord | None:
        """How the task ended; None while it runs, or may still. Does not wait.

        The exit has neither code nor signal nor reason where nobody saw it.
        """

    def waiting(self, record: TaskRecord) -> str:
        """Why the task has no place yet, as the cluster says it; empty once it has one."""

    def closed(self, nodes: Sequence[NodeName]) -> Mapping[NodeName, str] | None:
        """Those of the nodes that take no tasks now, each with why, as the cluster says it; None where it does not
        answer. May wait for the answer.

        Tasks that wait for a place on such a node end: they would not get it.
        """

    def signal(self, records: Iterable[TaskRecord], signum: signal.Signals) -> None:
        """Have all processes of the tasks receive a signal; tasks that are gone are fine. Does not wait."""

    def sweep(self, attempt: Attempt, records: Iterable[TaskRecord]) -> bool:
        """End what an attempt's ended tasks left behind; whether there may be more, so that it is to be asked again."""

    def forget(self, records: Iterable[TaskRecord]) -> None:
        """Keep nothing of these tasks: their ends are on record, and nobody will ask about them again."""

    def close(self) -> None:
        """Let go of the tasks: they keep running."""
