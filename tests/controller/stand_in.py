"""An agent reduced to what it writes: its record under a lease, and its jobs' statuses under its term."""

from __future__ import annotations

import time

from msgspec.structs import replace

from fedsched.core.cluster import Assignment, ClusterRecord, Node
from fedsched.core.ids import ClusterName, JobId, NodeName
from fedsched.core.job import (
    TERMINAL,
    JobPhase,
    JobSpec,
    JobStatus,
    Reason,
    Role,
    TaskPlacement,
    Transition,
    task_name,
)
from fedsched.core.resources import Resources
from fedsched.runtime import codec, keys
from fedsched.runtime.ports import Delete, Put, RevisionIs, Store, ValueIs, Write

TTL_S = 30


class StandInAgent:
    """Registers a cluster of equal nodes at once."""

    def __init__(self, store: Store, name: str, nodes: int = 2, cpus: int = 4) -> None:
        self._store = store
        self.name = ClusterName(name)
        entry = store.get(keys.term(self.name))
        self.term = int(entry.value) + 1 if entry else 1
        self.record = ClusterRecord(
            self.name,
            self.term,
            f"{name}/1/1",
            "0.1.0",
            name,
            1,
            tuple(Node(NodeName(f"{name}-{n}"), Resources(cpus * 1000, 16 * 1024)) for n in range(nodes)),
            Resources(),
            0,
            0,
            "drf",
            0,
            0,
            time.time(),
        )
        self.lease = store.grant_lease(TTL_S)
        store.commit(
            (),
            (
                Put(keys.term(self.name), str(self.term).encode()),
                Put(keys.cluster(self.name), codec.dumps(self.record), self.lease),
            ),
        )

    def vanish(self) -> None:
        """Lose the lease, as an agent that died or was cut off does."""
        self._store.revoke(self.lease)

    def assigned(self) -> dict[JobId, Assignment]:
        """What the controllers gave this cluster."""
        found = self._store.list(keys.assignments(self.name)).entries
        return {JobId(entry.key.rsplit("/", 1)[1]): codec.loads(Assignment, entry.value) for entry in found}

    def run(self, job_id: JobId) -> None:
        """Start the job's minimum on the first node."""
        entry = self._store.get(keys.job_spec(job_id))
        assert entry is not None
        minimum = codec.loads(JobSpec, entry.value).minimum
        tasks = [task_name(Role.WORKER, n) for n in range(minimum.workers)]
        tasks += [task_name(Role.PS, n) for n in range(minimum.ps)]
        placement = tuple(sorted(TaskPlacement(task, self.record.nodes[0].name) for task in tasks))
        self.move(job_id, JobPhase.RUNNING, Reason.NONE, placement=placement, attempt=1, started_s=time.time())

    def end(self, job_id: JobId, phase: JobPhase = JobPhase.SUCCEEDED, reason: Reason = Reason.FINISHED) -> None:
        """Make the job terminal."""
        self.move(job_id, phase, reason, placement=(), finished_s=time.time())

    def move(self, job_id: JobId, phase: JobPhase, reason: Reason, **changes: object) -> None:
        """Write the job's next status with its transition, as the holder of the term."""
        entry = self._store.get(keys.job_status(job_id))
        assert entry is not None
        before = codec.loads(JobStatus, entry.value)
        after = replace(
            before,
            phase=phase,
            reason=reason,
            message="",
            seq=before.seq + 1,
            term=self.term,
            **changes,
        )
        step = Transition(
            after.seq, time.time(), f"agent/{self.name}", job_id, after.attempt, self.term, before.phase, phase, reason
        )
        writes: list[Write] = [
            Put(keys.job_status(job_id), codec.dumps(after)),
            Put(keys.job_transition(job_id, after.seq), codec.dumps(step)),
        ]
        if phase in TERMINAL:
            writes.append(Delete(keys.assignment(self.name, job_id)))
        guards = (
            RevisionIs(keys.job_status(job_id), entry.mod_revision),
            ValueIs(keys.term(self.name), str(self.term).encode()),
        )
        assert self._store.commit(guards, tuple(writes)).ok
