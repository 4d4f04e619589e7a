"""The tasks of one attempt: which of them run, how the others ended, and what they said last."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from fedsched.core.ids import NodeName, TaskName
from fedsched.executor import records
from fedsched.executor.backend import TaskBackend
from fedsched.executor.records import Attempt, ExitRecord, TaskRecord

_log = logging.getLogger(__name__)
EXIT_RECORD_S = 1.5
"""How long after a task's end its exit record may come; later, nobody saw the end."""
LOG_TAIL_BYTES = 16384
"""How much of a log's end is read for the words that a task ended with."""


@dataclass(slots=True)
class SeenTask:
    """What is known of one task."""

    record: TaskRecord
    exit: ExitRecord | None = None
    gone_at_s: float | None = None
    judged: bool = False


class Roster(dict[TaskName, SeenTask]):
    """By name. Whoever is on it runs, or its end has still a meaning for the attempt."""

    def __init__(self, backend: TaskBackend, files: Attempt) -> None:
        super().__init__()
        self._backend = backend
        self._files = files
        self._unwritten: set[TaskName] = set()
        """Tasks whose records on disk are older than those here: there was no room."""

    def recall(self) -> None:
        """Add what is on record and not here."""
        for task, record in self._files.records().items():
            self.setdefault(task, SeenTask(record))

    def look(self) -> None:
        """Note which tasks have ended since, and put on record what could not be before."""
        for task in sorted(self._unwritten):
            self._write(task)
        for seen in self.values():
            if seen.exit is not None:
                continue
            found = self._backend.ended(self._files, seen.record)
            if found is None:
                seen.gone_at_s = None
                continue
            seen.gone_at_s = seen.gone_at_s or time.monotonic()
            if found.is_seen or time.monotonic() - seen.gone_at_s > EXIT_RECORD_S:
                seen.exit = found

    def runs(self, task: TaskName) -> bool:
        """Whether the task was started and has not ended."""
        return task in self and self[task].exit is None

    def signal(self, tasks: Iterable[TaskName], signum: signal.Signals) -> bool:
        """Signal those of `tasks` that still run; whether there were any."""
        running = [self[task].record for task in tasks if self.runs(task)]
        if running:
            self._backend.signal(running, signum)
        return bool(running)

    def move(self, task: TaskName, node: NodeName) -> None:
        """Where nodes are shares of one machine a task that moves between them goes on, under another name."""
        seen = self.get(task)
        if seen is not None and seen.record.node != node:
            seen.record = replace(seen.record, node=node)
            self._write(task)

    def _write(self, task: TaskName) -> None:
        """Put a task's record on disk, now or, where that is full, as soon as it is not: the task goes on meanwhile."""
        try:
            if task in self:
                records.write(self._files.task(task), self[task].record)
            self._unwritten.discard(task)
        except OSError as problem:
            if task not in self._unwritten:
                _log.warning("cannot put on record where %s runs, trying again: %s", task, problem)
            self._unwritten.add(task)

    def forget(self, tasks: Iterable[TaskName]) -> None:
        """Tasks that have left for good are no longer part of the attempt; their exits stay on record."""
        gone = {task: self.pop(task).record for task in list(tasks) if task in self}
        for task in gone:
            self._files.task(task).unlink(missing_ok=True)
        self._backend.forget(gone.values())

    def log_tail(self, task: TaskName) -> str:
        """The end of what the task printed since this start of it."""
        seen = self.get(task)
        return _tail(self._files.log(task), seen.record.log_offset if seen else 0)


def _tail(path: Path, offset: int) -> str:
    """The end of a log, from `offset` on at the earliest."""
    try:
        with path.open("rb") as log:
            log.seek(max(offset, path.stat().st_size - LOG_TAIL_BYTES))
            return log.read().decode(errors="replace")
    except OSError:
        return ""
