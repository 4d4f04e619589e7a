"""Finished jobs in a SQLite file, so that etcd holds live state only."""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from fedsched.core.ids import JobId
from fedsched.core.job import JobSpec, JobStatus, Transition
from fedsched.core.views import Job
from fedsched.errors import CorruptRecord, Failed, StartFailed
from fedsched.runtime import codec

T = TypeVar("T")

_log = logging.getLogger(__name__)

OPEN_S_MAX = 10.0
"""How long the file may be another's when it is opened."""
WRITE_S_MAX = 0.5
"""How long a write waits for whoever has the file locked: dispatching waits with it."""
READ_S_MAX = 2.0
"""How long a read does."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS jobs (
    job_id TEXT PRIMARY KEY,
    idempotency_key TEXT NOT NULL,
    spec TEXT NOT NULL,
    status TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS jobs_by_key ON jobs (idempotency_key);
CREATE TABLE IF NOT EXISTS transitions (
    job_id TEXT NOT NULL,
    seq INTEGER NOT NULL,
    transition TEXT NOT NULL,
    PRIMARY KEY (job_id, seq)
);
"""


@dataclass(frozen=True, slots=True)
class Past:
    """A finished job with its whole story."""

    job: Job
    idempotency_key: str
    transitions: tuple[Transition, ...]


class History:
    """Every controller writes down each finished job that it sees; the leader then removes it from etcd.

    Safe from several threads. Writing a job again changes nothing that matters: a finished job never changes.

    Raises:
        StartFailed: the file is damaged, or no history.
        Failed: by every method, while the file cannot be read or written.
    """

    def __init__(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        self._file = file
        # Of its own each: who only reads does not wait while a write does.
        self._writing = _Connection(file)
        self._reading = _Connection(file)
        try:
            with self._writing.alone() as connection, connection:
                connection.execute("PRAGMA journal_mode=WAL")
                connection.executescript(_SCHEMA)
            self._writing.wait_at_most(WRITE_S_MAX)
            self._reading.wait_at_most(READ_S_MAX)
        except sqlite3.DatabaseError as problem:
            self.close()
            raise StartFailed(
                f"the history of finished jobs in {file} cannot be used: {problem}",
                "restore it from a backup, or move it away to start with an empty one; running jobs are not in it",
            ) from problem

    def add(self, past: Past) -> None:
        """Write a finished job down."""
        job_id = past.job.spec.job_id
        with self._using(self._writing) as connection, connection:
            connection.execute(
                "INSERT OR REPLACE INTO jobs VALUES (?, ?, ?, ?)",
                (job_id, past.idempotency_key, _text(past.job.spec), _text(past.job.status)),
            )
            connection.executemany(
                "INSERT OR REPLACE INTO transitions VALUES (?, ?, ?)",
                [(job_id, step.seq, _text(step)) for step in past.transitions],
            )

    def get(self, job_id: JobId) -> Job | None:
        """The job, if it is written down here.

        Raises:
            CorruptRecord: what is written down of it cannot be read.
        """
        return self._one("WHERE job_id = ?", job_id)

    def by_key(self, idempotency_key: str) -> Job | None:
        """The job that was submitted with this key.

        Raises:
            CorruptRecord: what is written down of it cannot be read.
        """
        return self._one("WHERE idempotency_key = ?", idempotency_key)

    def jobs(self) -> list[Job]:
        """All of them that can be read; one that cannot is told of in the log."""
        return _readable(self._job, self._rows("job_id, spec, status FROM jobs"))

    def transitions(self, job_id: JobId | None = None) -> list[Transition]:
        """The steps of one job or of all, by job and number; one that cannot be read is told of in the log."""
        where, values = ("WHERE job_id = ?", (job_id,)) if job_id else ("", ())
        rows = self._rows(f"job_id, transition FROM transitions {where} ORDER BY job_id, seq", values)
        return _readable(self._transition, rows)

    def close(self) -> None:
        """Close the file."""
        for file in (self._writing, self._reading):
            with file.alone() as connection:
                connection.close()

    @contextlib.contextmanager
    def _using(self, file: _Connection) -> Iterator[sqlite3.Connection]:
        try:
            with file.alone() as connection:
                yield connection
        except sqlite3.Error as problem:
            raise Failed(
                f"the history of finished jobs in {self._file} does not answer: {problem}",
                "check that file and the free space there; finished jobs stay in etcd until it does",
            ) from problem

    def _rows(self, what: str, values: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
        with self._using(self._reading) as connection:
            return connection.execute(f"SELECT {what}", values).fetchall()

    def _one(self, where: str, value: str) -> Job | None:
        rows = self._rows(f"job_id, spec, status FROM jobs {where}", (value,))
        return self._job(*rows[0]) if rows else None

    def _job(self, job_id: str, spec: str, status: str) -> Job:
        try:
            return Job(codec.loads(JobSpec, spec), codec.loads(JobStatus, status))
        except ValueError as problem:
            raise self._corrupt(job_id, problem) from problem

    def _transition(self, job_id: str, step: str) -> Transition:
        try:
            return codec.loads(Transition, step)
        except ValueError as problem:
            raise self._corrupt(job_id, problem) from problem

    def _corrupt(self, job_id: str, problem: ValueError) -> CorruptRecord:
        return CorruptRecord(
            f"job {job_id} in the history {self._file} cannot be read: {problem}", "restore that file from a backup"
        )


class _Connection:
    """One to the file, for one thread at a time."""

    def __init__(self, file: Path) -> None:
        self._lock = threading.Lock()
        self._connection = sqlite3.connect(file, check_same_thread=False, timeout=OPEN_S_MAX)

    @contextlib.contextmanager
    def alone(self) -> Iterator[sqlite3.Connection]:
        """The connection, while no other thread has it."""
        with self._lock:
            yield self._connection

    def wait_at_most(self, seconds: float) -> None:
        """How long to wait from now on where another process has the file locked."""
        with self.alone() as connection:
            connection.execute(f"PRAGMA busy_timeout={round(seconds * 1000)}")


def _readable(read: Callable[..., T], rows: Iterable[tuple[str, ...]]) -> list[T]:
    found = []
    for row in rows:
        try:
            found.append(read(*row))
        except CorruptRecord as problem:
            _log.error("%s", problem.message)
    return found


def _text(value: object) -> str:
    return codec.dumps(value).decode()
