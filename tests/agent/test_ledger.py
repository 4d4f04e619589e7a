"""Records reach the store in order, under the agent's own term only, whatever the store does meanwhile."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from fedsched.adapters.etcd import EtcdStore
from fedsched.adapters.memory import MemoryStore
from fedsched.agent.inbox import Inbox, Stop, Written
from fedsched.agent.ledger import PENDING_STEPS_MAX, StoreLedger
from fedsched.core.cluster import Assignment
from fedsched.core.commands import SaveJob
from fedsched.core.ids import ClusterName, JobId
from fedsched.core.job import JobPhase, JobStatus, Reason, Transition
from fedsched.errors import Conflict, StoreUnavailable
from fedsched.runtime import codec, keys
from fedsched.runtime.ports import Committed, Guard, Put, Write
from tests.core.world import dispatched, spec

EAST = ClusterName("east")
WAIT_S = 10.0


class MovedAway(MemoryStore):
    """A memory store that can be made unreachable."""

    away = False

    def commit(self, guards: tuple[Guard, ...], writes: tuple[Write, ...]) -> Committed:
        if self.away:
            raise StoreUnavailable("away")
        return super().commit(guards, writes)


@pytest.fixture
def store() -> Iterator[MovedAway]:
    store = MovedAway()
    store.commit((), (Put(keys.term(EAST), b"3"),))
    yield store
    store.close()


def saved(seq: int, phase: JobPhase) -> SaveJob:
    status: JobStatus = replace(dispatched(spec("a")), seq=seq, phase=phase, term=3)
    step = Transition(seq, 1.0, "agent/east", status.job_id, 1, 3, JobPhase.DISPATCHED, phase, Reason.NONE)
    return SaveJob(status, step)


def next_message(inbox: Inbox) -> object:
    return inbox._queue.get(timeout=WAIT_S)


def test_a_step_is_one_transaction_with_its_transition(store: MovedAway) -> None:
    """A status without the transition that explains it is a riddle to its owner."""
    inbox = Inbox()
    ledger = StoreLedger(store, EAST, 3, inbox)
    ledger.save(7, [saved(3, JobPhase.STARTING), saved(4, JobPhase.RUNNING)])
    assert next_message(inbox) == Written(7)
    job_id = spec("a").job_id
    entry = store.get(keys.job_status(job_id))
    assert entry is not None
    assert codec.loads(JobStatus, entry.value).phase is JobPhase.RUNNING
    steps = [store.get(keys.job_transition(job_id, seq)) for seq in (3, 4)]
    assert [step.mod_revision for step in steps if step] == [entry.mod_revision] * 2
    ledger.close()


def test_a_step_about_more_jobs_than_a_transaction_takes_is_written_whole(etcd_address: str) -> None:
    """A cluster of many jobs saves all their progress at each slot; etcd refuses more than 128 writes at once."""
    store = EtcdStore(etcd_address)
    cluster = ClusterName("many")
    store.commit((), (Put(keys.term(cluster), b"1"),))
    inbox = Inbox()
    ledger = StoreLedger(store, cluster, 1, inbox)
    records = [
        replace(
            saved(4, JobPhase.RUNNING), status=replace(dispatched(spec(f"many-{n}")), seq=4, phase=JobPhase.RUNNING)
        )
        for n in range(150)
    ]
    ledger.save(1, records)
    assert next_message(inbox) == Written(1)
    assert len(store.list(keys.job(JobId("many-"))[:-1]).entries) == 300  # a status and a transition each
    ledger.close()
    store.close()


def test_the_end_of_a_job_ends_its_assignment_in_the_same_transaction(store: MovedAway) -> None:
    """An assignment that outlives its job would make the next agent look for it."""
    inbox = Inbox()
    key = keys.assignment(EAST, spec("a").job_id)
    store.commit((), (Put(key, codec.dumps(Assignment(spec("a").job_id))),))
    ledger = StoreLedger(store, EAST, 3, inbox)
    ledger.save(1, [saved(9, JobPhase.SUCCEEDED)])
    assert next_message(inbox) == Written(1)
    assert store.get(key) is None
    ledger.close()


def test_while_the_store_is_away_records_wait_and_then_come_in_order(store: MovedAway) -> None:
    """An etcd that blinks must not lose a transition or let an order go out before its record."""
    inbox = Inbox()
    store.away = True
    ledger = StoreLedger(store, EAST, 3, inbox)
    ledger.save(1, [saved(3, JobPhase.STARTING)])
    ledger.save(2, [saved(4, JobPhase.RUNNING)])
    assert inbox._queue.empty()
    store.away = False
    assert [next_message(inbox), next_message(inbox)] == [Written(1), Written(2)]
    ledger.close()


def test_an_outage_of_hours_keeps_every_transition_and_not_every_report(store: MovedAway) -> None:
    """An agent must not fill its memory with progress that newer progress makes worthless."""
    inbox = Inbox()
    store.away = True
    ledger = StoreLedger(store, EAST, 3, inbox)
    report = replace(saved(3, JobPhase.STARTING), transition=None)
    for ticket in range(1, 2 * PENDING_STEPS_MAX):
        ledger.save(ticket, [report])
    ledger.save(1000, [saved(4, JobPhase.RUNNING)])
    assert ledger._queue.qsize() <= PENDING_STEPS_MAX + 2
    store.away = False
    while next_message(inbox) != Written(1000):
        pass
    assert store.get(keys.job_transition(spec("a").job_id, 4)) is not None
    ledger.close()


def test_an_agent_whose_term_is_over_writes_nothing_and_is_told_to_end(store: MovedAway) -> None:
    """Two agents that both write would run jobs twice."""
    inbox = Inbox()
    store.commit((), (Put(keys.term(EAST), b"4"),))
    ledger = StoreLedger(store, EAST, 3, inbox)
    ledger.save(1, [saved(3, JobPhase.STARTING)])
    message = next_message(inbox)
    assert isinstance(message, Stop)
    assert isinstance(message.error, Conflict)
    assert store.get(keys.job_status(spec("a").job_id)) is None
    ledger.close()
