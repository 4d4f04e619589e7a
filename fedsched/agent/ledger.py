"""Writes job records to the store, in order, in transactions that hold only under the agent's own term."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Sequence

from fedsched.agent.inbox import Inbox, Stop, Written
from fedsched.core.commands import SaveJob
from fedsched.core.ids import ClusterName, JobId
from fedsched.core.job import TERMINAL
from fedsched.errors import Conflict, StoreUnavailable
from fedsched.runtime import codec, keys
from fedsched.runtime.backoff import Backoff
from fedsched.runtime.ports import Delete, Put, Store, ValueIs, Write

BACKOFF_S = (0.1, 2.0)
"""First and longest pause before a write is tried again."""

PENDING_STEPS_MAX = 100
"""Steps that may wait before those that only tell progress are left out."""
JOBS_PER_TRANSACTION = 30
"""Jobs whose records go into one transaction; etcd takes 128 writes, and a job needs two or three."""

_log = logging.getLogger(__name__)


class StoreLedger:
    """A thread that writes while the loop goes on.

    While the store is away it tries again and again, so the world stands still as far as new orders are concerned and
    jobs run on. Writing the same records twice (the answer to the first try was lost) changes nothing. Once another
    agent holds the cluster's term, nothing is written any more and the agent ends.
    """

    def __init__(self, store: Store, cluster: ClusterName, term: int, inbox: Inbox) -> None:
        self._store = store
        self._cluster = cluster
        self._guard = ValueIs(keys.term(cluster), str(term).encode())
        self._term = term
        self._inbox = inbox
        self._queue: queue.Queue[tuple[int, tuple[SaveJob, ...]] | None] = queue.Queue()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ledger", daemon=True)
        self._thread.start()

    def save(self, ticket: int, records: Sequence[SaveJob]) -> None:
        """Write the step's records soon; `Written` follows.

        While the store is away for long, progress alone is not kept: what is newer follows when it is back.
        """
        if self._queue.qsize() > PENDING_STEPS_MAX and all(record.transition is None for record in records):
            self._inbox.post(Written(ticket))
            return
        self._queue.put((ticket, tuple(records)))

    def close(self, timeout_s: float = 5.0) -> None:
        """Write what waits, if the store answers within `timeout_s`, and end."""
        self._queue.put(None)
        self._thread.join(timeout_s)
        self._closing.set()
        self._thread.join(BACKOFF_S[1])

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            ticket, records = item
            for part in _parts(records):
                if not self._write(part):
                    return
            self._inbox.post(Written(ticket))

    def _write(self, records: Sequence[SaveJob]) -> bool:
        writes = self._writes(records)
        backoff = Backoff(*BACKOFF_S)
        while True:
            try:
                committed = self._store.commit((self._guard,), writes)
            except StoreUnavailable as problem:
                _log.warning("cannot write %d record(s), trying again: %s", len(records), problem.message)
                if self._closing.wait(backoff.pause_s()):
                    return False
                continue
            if not committed.ok:
                self._inbox.post(Stop(taken_over(self._cluster, self._term)))
            return committed.ok

    def _writes(self, records: Sequence[SaveJob]) -> tuple[Write, ...]:
        """The newest status of each job, every transition, and no assignment any more for a job that is over."""
        writes: dict[str, Write] = {}
        for record in records:
            status, transition = record.status, record.transition
            writes[keys.job_status(status.job_id)] = Put(keys.job_status(status.job_id), codec.dumps(status))
            if transition is not None:
                key = keys.job_transition(status.job_id, transition.seq)
                writes[key] = Put(key, codec.dumps(transition))
            if status.phase in TERMINAL:
                key = keys.assignment(self._cluster, status.job_id)
                writes[key] = Delete(key)
        return tuple(writes.values())


def taken_over(cluster: ClusterName, term: int) -> Conflict:
    """Why an agent ends whose term is not the cluster's newest any more."""
    return Conflict(
        f"another agent has taken over cluster {cluster}; this one held term {term}",
        "nothing, if that was meant; otherwise give each cluster's agent its own name",
    )


def _parts(records: Sequence[SaveJob]) -> list[list[SaveJob]]:
    """The records cut at jobs, never between a status and the transitions that led there."""
    by_job: dict[JobId, list[SaveJob]] = {}
    for record in records:
        by_job.setdefault(record.status.job_id, []).append(record)
    groups = list(by_job.values())
    return [
        [record for group in groups[start : start + JOBS_PER_TRANSACTION] for record in group]
        for start in range(0, len(groups), JOBS_PER_TRANSACTION)
    ]
