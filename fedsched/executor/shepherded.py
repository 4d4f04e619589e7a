"""What Slurm, Kubernetes and Ray have in common: each task is a shepherd that the cluster places, watches and ends."""

from __future__ import annotations

import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from fedsched.core.job import Reason
from fedsched.executor import records
from fedsched.executor.records import Attempt, ExitRecord, TaskOrder, TaskRecord

VERDICT_S = 3.0
"""How long after a task died of a signal the cluster may take to say that it was the one who sent it."""
REPEAT_S = 5.0
"""Least time between two equal signals to one task: each is a request to the cluster."""
COORDINATOR_CPU_MILLI = 100
COORDINATOR_MEMORY_MIB = 512
"""What a coordinator is given: it keeps books and moves no parameters."""


@dataclass(frozen=True, slots=True)
class Standing:
    """What the cluster says of a task."""

    waiting: str = ""
    """Why it has no place yet."""
    ended: bool = False
    reason: Reason = Reason.NONE
    """Why it ended, where the cluster was the cause; see `ExitRecord`."""
    message: str = ""


class Shepherded(ABC):
    """A back end whose tasks the cluster places; see `TaskBackend`. A subclass knows one kind of cluster."""

    is_this_machine = False
    limits_memory = False
    """The cluster does not keep tasks to the memory that they were given: the shepherds do."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._died: dict[str, float] = {}
        self._told: dict[tuple[str, int], float] = {}

    # --- what a subclass knows

    @abstractmethod
    def _submit(self, order: TaskOrder, program: tuple[str, ...]) -> str:
        """Have the cluster run the program in a place for the task, and return the cluster's name for it.

        Raises:
            StartFailed: the cluster refused it.
            MachineTrouble: the cluster does not answer.
        """

    @abstractmethod
    def _standing(self, record: TaskRecord) -> Standing:
        """What is known of the task; does not wait."""

    @abstractmethod
    def _tell(self, handles: list[str], signum: signal.Signals) -> None:
        """Send SIGTERM, or end the tasks at once with SIGKILL; does not wait."""

    # --- TaskBackend

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
        attempt = Attempt.at(Path(order.attempt_dir))
        attempt.exit(order.task).unlink(missing_ok=True)
        log = attempt.log(order.task)
        offset = log.stat().st_size if log.exists() else 0
        order = replace(order, term=term)
        records.write(attempt.ordered(order.task), order)
        module = ("-m", "fedsched.executor.shepherd", "--attempt", order.attempt_dir)
        limit = ("--limit-memory",) if self.limits_memory else ()
        handle = self._submit(order, (*module, "--task", order.task, "--request", order.request, *limit))
        record = TaskRecord(0, "", order.task, order.node, order.seq, order.request, offset, handle)
        try:
            records.write(attempt.task(order.task), record)
        except OSError:
            self._tell([handle], signal.SIGKILL)
            raise
        return record

    def ended(self, attempt: Attempt, record: TaskRecord) -> ExitRecord | None:
        """What the shepherd wrote down, and the cluster's own word where it was the cause."""
        standing = self._standing(record)
        found = records.read(ExitRecord, attempt.exit(record.task))
        if found is None or found.request != record.request:
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

    def signal(self, records: Iterable[TaskRecord], signum: signal.Signals) -> None:
        """Pass the signal on, unless it was passed on a moment ago."""
        now = time.monotonic()
        with self._lock:
            self._told = {key: at for key, at in self._told.items() if now - at < REPEAT_S}
            handles = [record.handle for record in records if (record.handle, signum) not in self._told]
            self._told |= {(handle, int(signum)): now for handle in handles}
        if handles:
            self._tell(handles, signum)

    def sweep(self, attempt: Attempt, records: Iterable[TaskRecord]) -> bool:
        """A task's place is free only once the cluster says so."""
        left = [record for record in records if not self._standing(record).ended]
        self.signal(left, signal.SIGKILL)
        return bool(left)

    def close(self) -> None:  # noqa: B027
        """Let go of the tasks."""

    def _may_still_say(self, record: TaskRecord) -> bool:
        with self._lock:
            return time.monotonic() - self._died.setdefault(record.request, time.monotonic()) < VERDICT_S
