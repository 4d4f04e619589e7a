"""Whatever stands under a key of etcd, or in the history, each call is answered or is one clear error."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from fedsched.adapters.memory import MemoryStore
from fedsched.adapters.rpc import JobsClient
from fedsched.controller.history import History, Past
from fedsched.core.gate import GateOutcome, GateVerdict
from fedsched.core.ids import ClusterName, JobId
from fedsched.core.job import JobPhase, JobSpec, JobStatus
from fedsched.core.rounds import PolicyRecord, RoundOutcome, RoundRecord
from fedsched.core.versions import Candidate, Comparison, Version, VersionName
from fedsched.core.views import Job
from fedsched.errors import CorruptRecord, FedschedError
from fedsched.runtime import codec, keys
from fedsched.runtime.ports import Entry, Put
from tests.controller.conftest import StartController
from tests.controller.stand_in import StandInAgent
from tests.waiting import eventually

EAST = ClusterName("east")
GARBAGE = (b"", b"not a record", b"{}", b"[1, 2]", b"\xff\xfe", b'"\xed\xa0\x80"', b"[" * 200_000, b"-7e999")


def populated(store: MemoryStore, client: JobsClient, spec: JobSpec) -> JobId:
    """One of everything that a federation keeps, as its processes write it."""
    agent = StandInAgent(store, "east")
    record = replace(agent.record, policy="dl2", policy_version=1)
    store.commit((), (Put(keys.cluster(EAST), codec.dumps(record), agent.lease),))
    first = Version("dl2", 1, "d1")
    undecided = GateVerdict(GateOutcome.UNDECIDED, 0, 0, 0.0, None, "too few")
    compared = Comparison(
        EAST, first, Candidate(first, "ana", 1.0), undecided, 1, 1, 1.0, 1.0, 1.0, (1.0, 1.0), (1.0, 1.0), 2.0
    )
    made = RoundRecord(1, "dl2", 1, 2, RoundOutcome.COMBINED, 1, (EAST,), (), (), 1.5, 2.0)
    store.commit(
        (),
        (
            Put(keys.policy_version("dl2", 1), codec.dumps(PolicyRecord("dl2", 1, "d1", "000001", 9, 1.5))),
            Put(keys.policy_version("dl2", 2), codec.dumps(PolicyRecord("dl2", 2, "d2", "000002", 9, 1.5))),
            Put(keys.policy_active("dl2"), b"2"),
            Put(keys.round_record(1), codec.dumps(made)),
            Put(keys.comparison(EAST), codec.dumps(compared)),
        ),
    )
    eventually(lambda: client.clusters() and client.clusters()[0].record, "the cluster is known")
    job_id = client.submit(spec, "run-1").job.spec.job_id
    eventually(lambda: client.get(job_id).status.phase is JobPhase.DISPATCHED, "the job is dispatched")
    client.promote("east", VersionName(version=1), "ana")
    client.shadow("east", VersionName(version=2), "ana")
    return job_id


def calls(client: JobsClient, spec: JobSpec, job_id: JobId) -> tuple[Callable[[], object], ...]:
    return (
        client.list,
        client.clusters,
        client.rounds,
        client.policies,
        client.comparisons,
        lambda: client.comparisons("east"),
        lambda: client.promotions("east"),
        lambda: client.get(job_id),
        lambda: client.explain(job_id),
        lambda: list(client.events()),
        lambda: list(client.events(job_id)),
        lambda: client.submit(spec, "run-1"),
        lambda: client.submit(spec, dry_run=True),
        lambda: client.promote("east", VersionName(version=2), "ana"),
        lambda: client.promote("east", VersionName(newest=True), "ana"),
        lambda: client.promote("east", VersionName(version=77), "ana"),
        lambda: client.shadow("east", VersionName(version=2), "ana"),
        lambda: client.rollback("east", "ana"),
        lambda: client.cancel(job_id),
    )


def told(call: Callable[[], object]) -> FedschedError | None:
    """The error that a call ends with, if any."""
    try:
        call()
    except FedschedError as problem:
        return problem
    return None


@pytest.mark.parametrize("garbage", GARBAGE, ids=lambda garbage: repr(garbage[:12]))
def test_an_unreadable_record_is_never_an_internal_error(
    start_controller: StartController, spec: JobSpec, garbage: bytes
) -> None:
    """Another release, a restore by hand or a stray etcdctl writes anything; an operator needs to know which key."""
    store = MemoryStore()
    _, client = start_controller(store)
    job_id = populated(store, client, spec)
    entries: tuple[Entry, ...] = store.list(keys.ROOT).entries
    damaged = [entry.key for entry in entries if "/leader/" not in entry.key and "/controllers/" not in entry.key]
    assert len(damaged) >= 15
    for key in damaged:
        kept = store.get(key)
        assert kept is not None
        store.commit((), (Put(key, garbage),))
        for call in calls(client, spec, job_id):
            problem = told(call)
            assert problem is None or problem.code != FedschedError.code, f"{key}: {problem}"
        store.commit((), (Put(key, kept.value),))
    assert client.get(job_id).spec.name == spec.name
    store.close()


def test_a_version_with_an_unreadable_record_cannot_be_promoted_and_the_error_names_its_key(
    store: MemoryStore, client: JobsClient, spec: JobSpec
) -> None:
    """It was an internal error, which told the operator to read the controller's log."""
    populated(store, client, spec)
    store.commit((), (Put(keys.policy_version("dl2", 2), b"not a record"),))
    with pytest.raises(CorruptRecord, match=keys.policy_version("dl2", 2)) as refused:
        client.promote("east", VersionName(version=2), "ana")
    assert "etcdctl get" in refused.value.hint
    with pytest.raises(CorruptRecord, match="cannot be read"):
        client.promote("east", VersionName(newest=True), "ana")
    assert client.promote("east", VersionName(version=1), "ana").version.version == 1


def test_one_unreadable_order_hides_no_other_and_its_number_is_not_given_again(
    store: MemoryStore, client: JobsClient, spec: JobSpec
) -> None:
    """A number given twice would write over what the agent may yet be asked about."""
    populated(store, client, spec)
    client.promote("east", VersionName(version=2), "ana")
    store.commit((), (Put(keys.promotion(EAST, 2), b"{}"),))
    assert [order.seq for order in client.promotions("east")] == [1]
    assert client.promote("east", VersionName(version=2), "ana").seq == 3


def test_a_job_that_the_history_cannot_read_hides_no_other(tmp_path: Path, spec: JobSpec) -> None:
    """A row that a later release wrote, or a disk damaged, took `fedsched queue --all` from everybody."""
    history = History(tmp_path / "history.sqlite")
    for number in ("1", "2"):
        status = JobStatus(JobId(number), phase=JobPhase.SUCCEEDED)
        history.add(Past(Job(replace(spec, job_id=JobId(number)), status), f"run-{number}", ()))
    with sqlite3.connect(tmp_path / "history.sqlite") as connection:
        connection.execute("UPDATE jobs SET status = '{}' WHERE job_id = '1'")
    connection.close()
    assert [job.spec.job_id for job in history.jobs()] == ["2"]
    with pytest.raises(CorruptRecord, match=r"job 1 in the history .*history\.sqlite cannot be read"):
        history.get(JobId("1"))
    with pytest.raises(CorruptRecord, match="job 1 in the history"):
        history.by_key("run-1")
    history.close()
