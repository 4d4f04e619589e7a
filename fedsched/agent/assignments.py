"""Brings the controller's assignments to the loop: what was there at the start, then each new one and each cancel."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from fedsched.core.cluster import Assignment
from fedsched.core.events import CancelRequested, JobAssigned
from fedsched.core.ids import ClusterName, JobId
from fedsched.core.job import TERMINAL, JobSpec, JobStatus
from fedsched.errors import CorruptRecord, StoreUnavailable
from fedsched.runtime import keys, stored
from fedsched.runtime.backoff import Backoff
from fedsched.runtime.ports import Entry, KeyChanged, Post, Snapshot, Store

BACKOFF_S = (0.2, 2.0)
"""First and longest pause before a job is read again while the store is away."""

_log = logging.getLogger(__name__)

Taken = Callable[[JobSpec], JobSpec]
"""Gives a job what its tasks and its coordinator will really take here."""


def assigned(store: Store, cluster: ClusterName, taken: Taken) -> tuple[tuple[JobSpec, JobStatus], ...]:
    """All jobs that the store gives to the cluster now, sorted by submission."""
    found = [_job(store, JobId(entry.key.rsplit("/", 1)[1])) for entry in store.list(keys.assignments(cluster)).entries]
    jobs = [(taken(job[0]), job[1]) for job in found if job is not None and job[1].phase not in TERMINAL]
    return tuple(sorted(jobs, key=lambda job: (job[0].submitted_s, job[0].job_id)))


class AssignmentWatch:
    """Follows the cluster's assignments from a thread of the store's; the scheduler ignores what it knows already."""

    def __init__(
        self, store: Store, cluster: ClusterName, taken: Taken, post: Post, clock: Callable[[], float] = time.time
    ) -> None:
        self._store = store
        self._taken = taken
        self._post = post
        self._clock = clock
        self._closing = threading.Event()
        self._watch = store.watch(keys.assignments(cluster), self._on_snapshot, self._on_change)

    def close(self) -> None:
        """Stop watching."""
        self._closing.set()
        self._watch.close()

    def _on_snapshot(self, snapshot: Snapshot) -> None:
        for entry in snapshot.entries:
            self._take(entry)

    def _on_change(self, change: KeyChanged) -> None:
        if change.entry is not None:
            self._take(change.entry)

    def _take(self, entry: Entry) -> None:
        for assignment in stored.readable(Assignment, [entry]):
            job = self._read(assignment.job_id)
            if job is None:
                continue
            self._post(JobAssigned(self._clock(), self._taken(job[0]), job[1]))
            if assignment.cancel:
                self._post(CancelRequested(self._clock(), assignment.job_id))

    def _read(self, job_id: JobId) -> tuple[JobSpec, JobStatus] | None:
        backoff = Backoff(*BACKOFF_S)
        while not self._closing.is_set():
            try:
                return _job(self._store, job_id)
            except StoreUnavailable:
                self._closing.wait(backoff.pause_s())
        return None


def _job(store: Store, job_id: JobId) -> tuple[JobSpec, JobStatus] | None:
    """The job's records; None, with a word in the log, where they are missing or unreadable."""
    spec, status = store.get(keys.job_spec(job_id)), store.get(keys.job_status(job_id))
    if spec is None or status is None:
        _log.error("job %s is assigned but has no record; ignored", job_id)
        return None
    try:
        return stored.record(JobSpec, spec), stored.record(JobStatus, status)
    except CorruptRecord as problem:
        _log.error("job %s is ignored: %s", job_id, problem.message)
        return None
