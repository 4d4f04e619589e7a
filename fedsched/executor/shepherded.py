"""What Slurm, Kubernetes and Ray have in common: each task is a shepherd that the cluster places, watches and ends."""

from __future__ import annotations

import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from fedsched.core.ids import NodeName
from fedsched.core.job import COORDINATOR, JobSpec, Reason
from fedsched.core.resources import Resources
from fedsched.executor import records
from fedsched.executor.records import Attempt, ExitRecord, TaskOrder, TaskRecord

VERDICT_S = 3.0
"""How long after a task died of a signal the cluster may take to say that it was the one who sent it."""
REPEAT_S = 5.0
"""Least time between two equal signals to one task: each is a request to the cluster."""
COORDINATOR_NEEDS = Resources(cpu_milli=100, memory_mib=512)
"""What a coordinator is given where nothing else is configured: it keeps books and moves no parameters."""


@dataclass(frozen=True, slots=True)
class TaskCondition:
    """What the cluster says of a task."""

    waiting: str = ""
    """Why it has no place yet."""
    ended: bool = False
    reason: Reason = Reason.NONE
    """Why it ended, where the cluster was the cause; see `ExitRecord`."""
    message: str = ""


@dataclass(slots=True)
class Known:
    """What is kept of a task from its start, or the first question about it, until it is forgotten."""

    since_s: float
    """On this process' clock."""
    died_s: float | None = None
    """When its shepherd was found to have seen it die of a signal."""
    told: dict[signal.Signals, float] = field(default_factory=dict)
    """When each signal was passed on last."""

    @property
    def ended_by_us(self) -> bool:
        """Whether it was told to end."""
        return bool(self.told)


class Shepherded(ABC):
    """A back end whose tasks the cluster places; see `TaskBackend`.

    A subclass knows one kind of cluster: what it must say of it is abstract here.

    One lock guards what is known here and what a subclass keeps of the cluster's words.

    Args:
        coordinator: what a job's coordinator is given.
    """

    is_this_machine = False
    limits_memory = False
    """The cluster does not keep tasks to the memory that they were given: the shepherds do."""

    def __init__(self, coordinator: Resources = COORDINATOR_NEEDS) -> None:
        self.coordinator = self._counted(coordinator)
        self._lock = threading.Lock()
        self._known: dict[str, Known] = {}
        """By the cluster's name for the task, of those that nobody has forgotten yet."""
        self._closed: Mapping[NodeName, str] = {}

    @abstractmethod
    def _submit(self, order: TaskOrder, program: tuple[str, ...]) -> str:
        """Have the cluster run the program in a place for the task, and return the cluster's name for it.

        Raises:
            StartFailed: the cluster refused it.
            MachineTrouble: the cluster does not answer.
        """

    def _counted(self, demand: Resources) -> Resources:
        """What the cluster will count for a task of this demand; GPUs come whole."""
        return Resources(demand.cpu_milli, demand.memory_mib, -(-demand.gpu_milli // 1000) * 1000)

    @abstractmethod
    def _says(self, handle: str, known: Known) -> TaskCondition:
        """What the cluster said last of a task. Under the lock, so it does not wait."""

    @abstractmethod
    def _drop(self, handle: str) -> None:
        """Keep nothing of a task any more, nor of what the cluster may yet say of it. Under the lock."""

    @abstractmethod
    def _closed_of(self, nodes: Sequence[NodeName]) -> Mapping[NodeName, str] | None:
        """See `TaskBackend.closed`."""

    @abstractmethod
    def _tell(self, handles: list[str], signum: signal.Signals) -> None:
        """Send SIGTERM, or end the tasks at once with SIGKILL; does not wait."""

    def taken(self, spec: JobSpec) -> JobSpec:
        """As the cluster counts it, task by task."""
        return msgspec.structs.replace(
            spec,
            worker_demand=self._counted(spec.worker_demand),
            ps_demand=self._counted(spec.ps_demand),
            coordinator_demand=self.coordinator,
        )

    def warm_up(self) -> None:  # noqa: B027  a subclass may have nothing to prepare
        """Nothing has to be prepared."""

    def fence(self, term: int) -> None:  # noqa: B027
        """The shepherds look at the fence themselves before they start a task."""

    def take_over(self, attempt: Attempt, term: int) -> None:
        """Write the term into the orders, where shepherds that have just been placed look for it."""
        for task in attempt.records():
            order = records.read(TaskOrder, attempt.ordered(task))
            if order is not None and order.term < term and not attempt.exit(task).exists():
                records.write(attempt.ordered(task), replace(order, term=term))

    def start(self, term: int, order: TaskOrder) -> TaskRecord:
        """Write the order down, hand it to the cluster, and put the start on record, which lets it begin."""
        attempt = order.attempt
        offset = attempt.begin(order.task)
        is_uncounted = order.task == COORDINATOR and order.demand == Resources()
        order = replace(order, term=term, demand=self.coordinator if is_uncounted else order.demand)
        records.write(attempt.ordered(order.task), order)
        module = ("-m", "fedsched.executor.shepherd", "--attempt", order.attempt_dir)
        limit = ("--limit-memory",) if self.limits_memory else ()
        handle = self._submit(order, (*module, "--task", order.task, "--request", order.request, *limit))
        with self._lock:
            self._know(handle)
        record = TaskRecord(0, "", order.task, order.node, order.seq, order.request, offset, handle)
        try:
            records.write(attempt.task(order.task), record)
        except OSError:
            self.signal([record], signal.SIGKILL)
            self.forget([record])
            raise
        return record

    def ended(self, attempt: Attempt, record: TaskRecord) -> ExitRecord | None:
        """What the shepherd wrote down, and the cluster's own word where it was the cause."""
        standing = self._standing(record)
        found = records.read(ExitRecord, attempt.exit(record.task))
        if found is None or found.request != record.request:
            if standing.waiting and record.node in self._closed:
                words = f"waits for node {record.node}, which takes no tasks: {self._closed[record.node]}"
                return ExitRecord(0, record.request, time.time(), reason=Reason.NODE_LOST, message=words)
            if not standing.ended:
                return None
            found = ExitRecord(0, record.request, time.time())
        elif found.signal is not None and not standing.ended and self._may_still_say(record):
            return None
        if standing.reason is not Reason.NONE:
            return replace(found, reason=standing.reason, message=standing.message)
        return found

    def waiting(self, record: TaskRecord) -> str:
        """As the cluster says it."""
        return self._standing(record).waiting

    def closed(self, nodes: Sequence[NodeName]) -> Mapping[NodeName, str] | None:
        """As the cluster says it, and remembered for the tasks that wait."""
        found = self._closed_of(nodes)
        if found is not None:
            self._closed = found
        return found

    def signal(self, records: Iterable[TaskRecord], signum: signal.Signals) -> None:
        """Pass the signal on, unless it was passed on a moment ago."""
        now_s = time.monotonic()
        handles = []
        with self._lock:
            for record in records:
                known = self._know(record.handle)
                if now_s - known.told.get(signum, float("-inf")) >= REPEAT_S:
                    known.told[signum] = now_s
                    handles.append(record.handle)
        if handles:
            self._tell(handles, signum)

    def sweep(self, attempt: Attempt, records: Iterable[TaskRecord]) -> bool:
        """A task's place is free only once the cluster says so."""
        left = [record for record in records if not self._standing(record).ended]
        self.signal(left, signal.SIGKILL)
        return bool(left)

    def forget(self, records: Iterable[TaskRecord]) -> None:
        """Neither what was known here nor what the cluster said."""
        with self._lock:
            for record in records:
                self._known.pop(record.handle, None)
                self._drop(record.handle)

    def close(self) -> None:  # noqa: B027
        """Let go of the tasks."""

    def _know(self, handle: str) -> Known:
        return self._known.setdefault(handle, Known(time.monotonic()))

    def _standing(self, record: TaskRecord) -> TaskCondition:
        with self._lock:
            return self._says(record.handle, self._know(record.handle))

    def _may_still_say(self, record: TaskRecord) -> bool:
        with self._lock:
            known = self._know(record.handle)
            known.died_s = known.died_s or time.monotonic()
            return time.monotonic() - known.died_s < VERDICT_S
