"""What users may rely on when they talk to a controller, through real gRPC over a store in memory."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from msgspec.structs import replace

from fedsched.adapters.attach import AttachClient
from fedsched.adapters.memory import MemoryStore
from fedsched.adapters.rpc import READERS_MAX, STREAMS_MAX, JobsClient, channel_options, serve
from fedsched.controller.admission import Admission, transition
from fedsched.controller.cache import Cache
from fedsched.controller.dispatcher import HISTORY_PAUSE_S, Dispatcher
from fedsched.controller.history import History
from fedsched.core.ids import ClusterName, JobId
from fedsched.core.job import JobPhase, JobSpec, JobStatus, Range, Reason
from fedsched.core.rounds import Absence, Absentee, Contribution, PolicyRecord, RoundOutcome, RoundRecord
from fedsched.errors import (
    AddressInUse,
    Conflict,
    Failed,
    ImpossibleJob,
    InvalidInput,
    NotFound,
    StartFailed,
    TimedOut,
    Unreachable,
    VersionSkew,
)
from fedsched.pb import jobs_pb2 as pb
from fedsched.pb.jobs_pb2_grpc import JobsStub
from fedsched.runtime import codec, keys
from fedsched.runtime.ports import Committed, Entry, Guard, LogPiece, Put, RevisionIs, Write
from tests.controller.conftest import StartController
from tests.controller.stand_in import StandInAgent
from tests.waiting import eventually, soon

EAST = ClusterName("east")


def submitted(client: JobsClient, spec: JobSpec) -> JobId:
    return client.submit(spec).job.spec.job_id


def dispatched(client: JobsClient, spec: JobSpec) -> JobId:
    job_id = submitted(client, spec)
    eventually(lambda: client.get(job_id).status.phase is JobPhase.DISPATCHED, f"job {job_id} is dispatched")
    return job_id


def test_a_submitted_job_is_given_to_one_cluster(store: MemoryStore, client: JobsClient, spec: JobSpec) -> None:
    """The whole point: what a user submits reaches an agent, once, with all that was asked for."""
    east, west = StandInAgent(store, "east", cpus=2), StandInAgent(store, "west", cpus=8)
    answer = client.submit(spec)
    job_id = answer.job.spec.job_id
    assert answer.created
    assert (answer.routing.choice, job_id) == ("east", "1")  # equally free: by name

    eventually(lambda: client.get(job_id).status.phase is JobPhase.DISPATCHED, "it is dispatched")

    assert list(east.assigned()) == [job_id]
    assert west.assigned() == {}
    kept = client.get(job_id)
    assert kept.spec == replace(spec, job_id=job_id, submitted_s=kept.spec.submitted_s)
    assert abs(kept.spec.submitted_s - time.time()) < 60
    assert [(step.source, step.target) for step in client.events(job_id)] == [
        (None, JobPhase.QUEUED),
        (JobPhase.QUEUED, JobPhase.DISPATCHED),
    ]


def test_a_burst_of_jobs_is_spread_before_any_of_them_has_started(
    store: MemoryStore, client: JobsClient, spec: JobSpec
) -> None:
    """Agents report what runs, not what was promised; a dispatcher that forgets its promises floods one cluster."""
    agents = [StandInAgent(store, name) for name in ("east", "west")]
    for _ in range(4):
        submitted(client, spec)
    eventually(lambda: sum(len(agent.assigned()) for agent in agents) == 4, "all are dispatched")
    assert [len(agent.assigned()) for agent in agents] == [2, 2]


def test_the_same_key_with_the_same_contents_is_the_same_job(client: JobsClient, spec: JobSpec) -> None:
    """A client that lost the answer submits again; running the job twice would cost its owner twice."""
    first = client.submit(spec, "run-17")
    again = client.submit(replace(spec, traceparent="00-" + "a" * 32 + "-" + "b" * 16 + "-01"), "run-17")
    assert (first.created, again.created) == (True, False)
    assert again.job.spec.job_id == first.job.spec.job_id
    assert len(client.list()) == 1


def test_the_same_key_with_other_contents_is_refused(client: JobsClient, spec: JobSpec) -> None:
    """Answering with the old job would hide from the user that the changed one never ran."""
    client.submit(spec, "run-17")
    with pytest.raises(Conflict, match="was used for job 1, which has other contents"):
        client.submit(replace(spec, run="python other.py"), "run-17")
    with pytest.raises(InvalidInput, match="printable characters"):
        client.submit(spec, "two words")


def test_the_same_key_from_many_threads_makes_one_job(client: JobsClient, spec: JobSpec) -> None:
    """Retries overlap with what they retry."""
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: client.submit(spec, "k"), range(8)))
    assert {answer.job.spec.job_id for answer in answers} == {"1"}
    assert sum(answer.created for answer in answers) == 1


def test_ids_are_short_numbers_and_never_given_twice(client: JobsClient, spec: JobSpec) -> None:
    """People type them."""
    with ThreadPoolExecutor(6) as pool:
        ids = sorted(pool.map(lambda _: int(submitted(client, spec)), range(12)))
    assert ids == list(range(1, 13))


def test_a_job_that_no_cluster_can_ever_hold_is_refused_with_the_largest_cluster_and_the_shortfall(
    store: MemoryStore, client: JobsClient, spec: JobSpec
) -> None:
    """Otherwise it waits for ever while its owner hopes."""
    StandInAgent(store, "east", nodes=1, cpus=2)
    StandInAgent(store, "west", nodes=2, cpus=4)
    with pytest.raises(ImpossibleJob, match=r"largest cluster, west, holds 8 cpu.*needs 3 cpu.* more"):
        client.submit(replace(spec, workers=Range(10, 12)))
    assert client.list() == ()


def test_a_mistyped_cluster_is_refused_with_the_name_that_was_meant(
    store: MemoryStore, client: JobsClient, spec: JobSpec
) -> None:
    """A job for a cluster that does not exist would wait silently."""
    StandInAgent(store, "east")
    with pytest.raises(ImpossibleJob) as refused:
        client.submit(replace(spec, clusters=(ClusterName("eest"),)))
    assert "did you mean east?" in refused.value.hint


def test_without_any_cluster_a_job_waits_with_its_reason_and_goes_when_one_joins(
    store: MemoryStore, client: JobsClient, spec: JobSpec
) -> None:
    """Users may be there before the platform team; they must see what they wait for."""
    job_id = submitted(client, spec)
    eventually(lambda: client.get(job_id).status.reason is Reason.NO_MATCHING_CLUSTER, "the reason is shown")
    assert client.explain(job_id).message == "no cluster has joined the federation yet"
    east = StandInAgent(store, "east")
    eventually(lambda: job_id in east.assigned(), "it is dispatched")


def test_a_dry_run_says_where_and_writes_nothing(store: MemoryStore, client: JobsClient, spec: JobSpec) -> None:
    """Kueue and Volcano users miss a dry run that asks the real scheduler."""
    StandInAgent(store, "east")
    StandInAgent(store, "west", cpus=1, nodes=1)
    answer = client.submit(spec, dry_run=True)
    assert answer.routing.choice == "east"
    assert [verdict.reason for verdict in answer.routing.verdicts] == [Reason.NONE, Reason.EXCEEDS_LARGEST_CLUSTER]
    assert client.list() == ()
    with pytest.raises(ImpossibleJob):
        client.submit(replace(spec, workers=Range(99, 99)), dry_run=True)


def test_what_no_client_should_send_is_refused_with_every_problem(client: JobsClient, spec: JobSpec) -> None:
    """Other clients than ours exist; one round trip per mistake wastes their users' time."""
    with pytest.raises(InvalidInput) as refused:
        client.submit(replace(spec, name="A b", run=" ", epochs=float("inf"), ps=Range(0, 2)))
    assert "4 problem(s)" in refused.value.message


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"checkpoint_every_s": float("nan")}, "a time is negative, no number"),
        ({"max_runtime_s": 1e300}, "a time is negative, no number or above"),
        ({"workers": Range(1, 2**30)}, "at most 10000 tasks"),
        ({"env": (("A", "b\0c"),)}, "zero byte"),
    ],
)
def test_what_no_record_or_process_can_hold_is_refused(
    client: JobsClient, spec: JobSpec, change: dict[str, Any], told: str
) -> None:
    """A job file's own checks do not protect from other clients; a clock that waits for NaN never wakes."""
    with pytest.raises(InvalidInput, match=told):
        client.submit(replace(spec, **change))


def test_a_waiting_job_is_cancelled_at_once(client: JobsClient, spec: JobSpec) -> None:
    """Nothing runs, so nobody else has to agree."""
    job_id = submitted(client, spec)
    assert client.cancel(job_id).status.phase is JobPhase.CANCELLED
    assert client.cancel(job_id).status.phase is JobPhase.CANCELLED
    last = list(client.events(job_id))[-1]
    assert (last.target, last.reason) == (JobPhase.CANCELLED, Reason.CANCELLED_BY_USER)


def test_a_dispatched_job_is_cancelled_by_its_agent(store: MemoryStore, client: JobsClient, spec: JobSpec) -> None:
    """Only the holder of the term may write the status; two writers would end with a cancelled job that runs."""
    east = StandInAgent(store, "east")
    job_id = dispatched(client, spec)
    assert client.cancel(job_id).status.phase is JobPhase.DISPATCHED
    assert east.assigned()[job_id].cancel
    east.end(job_id, JobPhase.CANCELLED, Reason.CANCELLED_BY_USER)
    eventually(lambda: client.get(job_id).status.phase is JobPhase.CANCELLED, "the agent's word is shown")
    assert client.cancel(job_id).status.phase is JobPhase.CANCELLED
    assert east.assigned() == {}


def test_a_job_is_unreachable_while_its_cluster_is_and_what_it_was_after(
    store: MemoryStore, client: JobsClient, spec: JobSpec
) -> None:
    """A blink of the connection must neither move nor fail a job, and must not look like progress either."""
    east = StandInAgent(store, "east")
    job_id = dispatched(client, spec)
    east.run(job_id)
    seen: list[JobPhase] = []
    watching = threading.Thread(target=lambda: seen.extend(job.status.phase for job in client.watch(job_id)))
    watching.start()
    eventually(lambda: JobPhase.RUNNING in seen, "the watch shows it running")
    east.vanish()
    eventually(lambda: JobPhase.UNREACHABLE in seen, "the watch shows it unreachable")
    assert client.explain(job_id).reason is Reason.CLUSTER_UNREACHABLE
    assert [view.reachable for view in client.clusters()] == [False]
    assert client.clusters()[0].record is not None
    back = StandInAgent(store, "east")
    eventually(lambda: seen[-1] is JobPhase.RUNNING, "the watch shows it running again")
    back.end(job_id)
    watching.join(20)
    assert not watching.is_alive()
    assert seen[-1] is JobPhase.SUCCEEDED


def test_explain_names_who_is_ahead_and_what_to_do(store: MemoryStore, client: JobsClient, spec: JobSpec) -> None:
    """ "Pending" is not an answer."""
    east = StandInAgent(store, "east")
    first = dispatched(client, replace(spec, name="first", user="li"))
    second = dispatched(client, replace(spec, traceparent="00-" + "a" * 32 + "-" + "b" * 16 + "-01"))
    for job_id in (first, second):
        east.move(job_id, JobPhase.DISPATCHED, Reason.WAITING_FOR_CAPACITY)
    eventually(lambda: client.explain(second).reason is Reason.WAITING_FOR_CAPACITY, "the agent's reason is shown")
    found = client.explain(second)
    assert [(job.job_id, job.name, job.user) for job in found.ahead] == [(first, "first", "li")]
    assert found.ahead_count == 1
    assert "cancel a job" in found.next_step
    assert any("0 cpu, 0 MiB of 8 cpu" in line for line in found.evidence)
    assert found.trace_id == "a" * 32
    assert [verdict.cluster for verdict in found.routing.verdicts] == ["east"]


def test_events_can_be_followed_to_the_end_of_a_job(store: MemoryStore, client: JobsClient, spec: JobSpec) -> None:
    """Scripts wait on it; it must neither miss the last step nor hang after it."""
    east = StandInAgent(store, "east")
    job_id = dispatched(client, spec)
    found: list[JobPhase] = []
    reading = threading.Thread(target=lambda: found.extend(step.target for step in client.events(job_id, follow=True)))
    reading.start()
    eventually(lambda: len(found) == 2, "what was is shown")
    east.run(job_id)
    eventually(lambda: len(found) == 3, "what comes is shown")
    east.end(job_id)
    reading.join(20)
    assert found == [JobPhase.QUEUED, JobPhase.DISPATCHED, JobPhase.RUNNING, JobPhase.SUCCEEDED]


def test_finished_jobs_leave_the_store_and_are_still_shown(
    store: MemoryStore, start_controller: StartController, spec: JobSpec
) -> None:
    """etcd must stay small, and nobody may lose the record of what ran."""
    _, client = start_controller(store, history_after_s=0.0)
    east = StandInAgent(store, "east")
    job_id = client.submit(spec, "run-1").job.spec.job_id
    eventually(lambda: job_id in east.assigned(), "it is dispatched")
    east.run(job_id)
    east.end(job_id)
    eventually(lambda: not store.list(keys.JOBS).entries, "it leaves the store")

    assert client.get(job_id).status.phase is JobPhase.SUCCEEDED
    assert [job.spec.job_id for job in client.list()] == [job_id]
    assert client.list(live_only=True) == ()
    assert [step.target for step in client.events(job_id, follow=True)][-1] is JobPhase.SUCCEEDED
    assert [job.status.phase for job in client.watch(job_id)] == [JobPhase.SUCCEEDED]
    assert client.explain(job_id).reason is Reason.FINISHED
    assert client.cancel(job_id).status.phase is JobPhase.SUCCEEDED
    again = client.submit(spec, "run-1")
    assert (again.created, again.job.spec.job_id) == (False, job_id)
    assert not store.list(keys.IDEMPOTENCY).entries
    assert submitted(client, spec) == "2"


def test_a_damaged_history_is_one_clear_error(tmp_path: Path) -> None:
    """A controller that starts with a stack trace helps nobody; one that starts without its history loses it."""
    file = tmp_path / "history.sqlite"
    file.write_bytes(b"no database " * 1000)
    with pytest.raises(StartFailed, match="history of finished jobs") as damaged:
        History(file)
    assert "backup" in damaged.value.hint


def test_a_history_that_cannot_be_written_stops_no_dispatch_and_loses_no_job(
    store: MemoryStore, spec: JobSpec, tmp_path: Path
) -> None:
    """A full disk beside the controller must not be an outage of every cluster."""
    mine = store.commit((), (Put(keys.leader("controller"), b"me"),)).revision
    east = StandInAgent(store, "east")
    file = tmp_path / "history.sqlite"
    history, cache = History(file), Cache()
    watch = cache.follow(store)
    admission = Admission(store, cache, history, "test")
    now_s = time.monotonic()
    dispatcher = Dispatcher(store, cache, history, Believer(mine), "me", 0.0, monotonic=lambda: now_s)
    first = admission.submit(spec, "", dry_run=False).job.spec.job_id
    eventually(lambda: cache.clusters(), "the cluster is known")
    dispatcher.work()
    east.run(first)
    east.end(first)
    eventually(lambda: cache.job(first).status.phase is JobPhase.SUCCEEDED, "its end is known")  # type: ignore[union-attr]
    with sqlite3.connect(file) as connection:
        connection.execute("ALTER TABLE jobs RENAME TO away")
    connection.close()

    second = admission.submit(spec, "", dry_run=False).job.spec.job_id
    dispatcher.work()
    assert second in east.assigned()
    assert store.get(keys.job_status(first)) is not None, "a job that is not written down stays in etcd"
    with pytest.raises(Failed, match="history of finished jobs"):
        history.jobs()

    with sqlite3.connect(file) as connection:
        connection.execute("ALTER TABLE away RENAME TO jobs")
    connection.close()
    now_s += HISTORY_PAUSE_S
    dispatcher.work()
    assert store.get(keys.job_status(first)) is None
    assert [job.spec.job_id for job in history.jobs()] == [first]
    watch.close()
    history.close()


def test_a_history_that_somebody_has_locked_slows_no_dispatch_and_no_answer(
    store: MemoryStore, spec: JobSpec, tmp_path: Path
) -> None:
    """Somebody's backup of the file: each dispatch took twenty seconds, each list of jobs fifteen."""
    mine = store.commit((), (Put(keys.leader("controller"), b"me"),)).revision
    east = StandInAgent(store, "east", cpus=64)
    file = tmp_path / "history.sqlite"
    history, cache = History(file), Cache()
    watch = cache.follow(store)
    admission = Admission(store, cache, history, "test")
    dispatcher = Dispatcher(store, cache, history, Believer(mine), "me", 60.0)
    ended = admission.submit(spec, "", dry_run=False).job.spec.job_id
    eventually(lambda: cache.clusters(), "the cluster is known")
    dispatcher.work()
    east.run(ended)
    east.end(ended)
    eventually(lambda: cache.job(ended).status.phase is JobPhase.SUCCEEDED, "its end is known")  # type: ignore[union-attr]
    other = sqlite3.connect(file, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")

    def work() -> None:
        for _ in range(10):
            dispatcher.work()

    with soon("each of ten passes waited for the file"):
        passes = threading.Thread(target=work)
        passes.start()
        assert history.jobs() == []
        waiting = admission.submit(spec, "run-1", dry_run=False).job.spec.job_id
        passes.join()
        dispatcher.work()

    assert waiting in east.assigned()
    other.execute("ROLLBACK")
    other.close()
    watch.close()
    history.close()


class Dying(MemoryStore):
    """A store that ends its client after so many transactions."""

    left = 10**6

    def commit(self, guards: tuple[Guard, ...], writes: tuple[Write, ...]) -> Committed:
        if not self.left:
            raise ConnectionAbortedError("the controller was killed here")
        self.left -= 1
        return super().commit(guards, writes)


@pytest.mark.parametrize("steps", [2, 150, 350])
def test_a_finished_job_is_removed_whole_by_whoever_comes_after_a_controller_that_was_killed_at_it(
    spec: JobSpec, tmp_path: Path, steps: int
) -> None:
    """The next one took what was left for a job of which it had not heard all, and kept it in etcd for ever."""
    for killed_at in range(5):
        store = Dying()
        mine = store.commit((), (Put(keys.leader("controller"), b"me"),)).revision
        job_id = JobId("7")
        status = JobStatus(job_id, phase=JobPhase.CANCELLED, seq=steps)
        store.commit((), (Put(keys.job_spec(job_id), codec.dumps(replace(spec, job_id=job_id))),))
        store.commit((), (Put(keys.idempotency("run-7"), b"7"),))
        for seq in range(1, steps + 1):
            step = transition(status, replace(status, seq=seq), 0.0, "test")
            store.commit((), (Put(keys.job_transition(job_id, seq), codec.dumps(step)),))
        store.commit((), (Put(keys.job_status(job_id), codec.dumps(status)),))

        for number, left in enumerate((killed_at, 10**6)):
            history, cache = History(tmp_path / f"{killed_at}-{number}.sqlite"), Cache()
            watch = cache.follow(store)
            eventually(lambda: cache.loaded, "the store's contents are known")  # noqa: B023
            store.left = left
            with contextlib.suppress(ConnectionAbortedError):
                Dispatcher(store, cache, history, Believer(mine), "me", 0.0).work()
            watch.close()
            history.close()

        left_over = [
            entry.key for entry in store.list(keys.ROOT).entries if "/jobs/" in entry.key or "run-7" in entry.key
        ]
        assert left_over == [], f"killed at transaction {killed_at}"
        store.close()


def test_unknown_jobs_are_not_found_by_any_call(client: JobsClient) -> None:
    """A mistyped id must not look like an empty answer."""
    job_id = JobId("77")
    for call in (
        client.get,
        client.cancel,
        client.explain,
        lambda one: list(client.watch(one)),
        lambda one: list(client.events(one)),
        lambda one: list(client.logs(one)),
    ):
        with pytest.raises(NotFound, match="there is no job 77"):
            call(job_id)


def test_broken_values_in_the_store_disturb_nobody_else(store: MemoryStore, client: JobsClient, spec: JobSpec) -> None:
    """One bad write by anything must not take the API from everybody."""
    store.commit((), (Put(keys.job_status(JobId("9")), b"{"), Put(keys.cluster(ClusterName("odd")), b"[]")))
    east = StandInAgent(store, "east")
    job_id = submitted(client, spec)
    eventually(lambda: job_id in east.assigned(), "a good job is dispatched")
    assert [job.spec.job_id for job in client.list()] == [job_id]


def test_policies_and_rounds_are_shown_as_the_aggregator_wrote_them(store: MemoryStore, client: JobsClient) -> None:
    """Operators see who took part without reading etcd by hand."""
    east, west = ClusterName("east"), ClusterName("west")
    first = PolicyRecord("dl2", 1, "d1", "000001", 9, 1.5)
    second = PolicyRecord("dl2", 2, "d2", "000002", 9, 2.0, 1, 1, contributors=(east,), samples=64)
    gave = Contribution(east, 3, 64, 0.5, (("loss", 2.0),))
    missing = Absentee(west, Absence.MISSING, "no answer within 2 s")
    record = RoundRecord(1, "dl2", 1, 2, RoundOutcome.COMBINED, 1, (east, west), (gave,), (missing,), 1.5, 2.0)
    store.commit(
        (),
        (
            Put(keys.policy_version("dl2", 1), codec.dumps(first)),
            Put(keys.policy_version("dl2", 2), codec.dumps(second)),
            Put(keys.policy_active("dl2"), b"2"),
            Put(keys.round_record(1), codec.dumps(record)),
        ),
    )
    eventually(lambda: bool(client.rounds()), "the round is shown")
    assert [(item.name, item.version, item.active) for item in client.policies()] == [
        ("dl2", 1, False),
        ("dl2", 2, True),
    ]
    assert client.policies("dl2")[1].record == second
    assert client.policies("other") == ()
    assert client.rounds(limit=1) == (record,)


def test_a_negative_number_of_the_newest_is_refused(client: JobsClient, spec: JobSpec) -> None:
    """It gave all but the oldest so many, which nobody asks for; and jobs come in the order of their submission."""
    ids = [submitted(client, spec) for _ in range(12)]
    assert [job.spec.job_id for job in client.list()] == ids
    assert [job.spec.job_id for job in client.list(limit=2)] == ids[-2:]
    for ask in (client.list, client.rounds):
        with pytest.raises(InvalidInput, match="limit is -1"):
            ask(limit=-1)


def test_only_one_controller_leads_and_the_others_serve(
    store: MemoryStore, start_controller: StartController, spec: JobSpec
) -> None:
    """Users talk to whichever answers."""
    (_, one), (_, two) = start_controller(store), start_controller(store)
    east = StandInAgent(store, "east")
    ids = [submitted(client, spec) for client in (one, two, one, two)]
    eventually(lambda: sorted(east.assigned()) == sorted(ids), "all are dispatched")
    for client in (one, two):
        eventually(lambda client=client: len(client.list()) == 4, "both show all")  # type: ignore[misc]
        for job_id in ids:
            steps = [step.target for step in client.events(job_id)]
            assert steps == [JobPhase.QUEUED, JobPhase.DISPATCHED], "nothing is dispatched twice"


class Believer:
    """A controller that thinks it leads, since the revision at which it won."""

    leading = True

    def __init__(self, revision: int) -> None:
        self._revision = revision

    def guard(self) -> Guard:
        return RevisionIs(keys.leader("controller"), self._revision)


def test_a_leader_that_was_replaced_cannot_dispatch(store: MemoryStore, spec: JobSpec, tmp_path: Path) -> None:
    """A paused leader that wakes up still believes that it leads; its write must fail, not be late."""
    old = store.commit((), (Put(keys.leader("controller"), b"old"),)).revision
    new = store.commit((), (Put(keys.leader("controller"), b"new"),)).revision
    east = StandInAgent(store, "east")
    history, cache = History(tmp_path / "history.sqlite"), Cache()
    watch = cache.follow(store)
    job_id = Admission(store, cache, history, "test").submit(spec, "", dry_run=False).job.spec.job_id
    eventually(lambda: cache.clusters(), "the cluster is known")

    Dispatcher(store, cache, history, Believer(old), "old", 60.0).work()
    assert east.assigned() == {}
    Dispatcher(store, cache, history, Believer(new), "new", 60.0).work()
    assert list(east.assigned()) == [job_id]

    watch.close()
    history.close()


def test_an_address_that_is_taken_is_one_clear_error(client: JobsClient, start_controller: StartController) -> None:
    """Two servers on one port would each get half of the calls."""
    server, address = serve("127.0.0.1:0", lambda server: None)
    try:
        with pytest.raises(AddressInUse, match=f"cannot listen on {address}"):
            serve(address, lambda server: None)
        with JobsClient(address) as stranger, pytest.raises(VersionSkew, match="does not know this call"):
            stranger.list()
    finally:
        server.stop(None).wait(5)


def test_no_controller_is_unreachable_with_a_hint() -> None:
    """Exit code 7, and what to start."""
    with JobsClient("127.0.0.1:9") as client, pytest.raises(Unreachable, match=r"\.1:9 does not answer") as gone:
        client.list()
    assert "fedsched up" in gone.value.hint


def test_a_watch_ends_at_its_deadline(client: JobsClient, spec: JobSpec) -> None:
    """`submit --wait --timeout` promises it."""
    job_id = submitted(client, spec)
    with pytest.raises(TimedOut):
        list(client.watch(job_id, timeout_s=0.5))


class Logs:
    """What a job printed, growing under the reader."""

    def __init__(self) -> None:
        self.pieces = [b"one\n", b"two\n"]
        self.over = False
        self.left = threading.Event()

    def read(self, job_id: JobId, follow: bool, read: Mapping[str, int]) -> Iterator[LogPiece]:
        sent = 0
        try:
            while True:
                over = self.over
                yield from map(LogPiece, self.pieces[sent:])
                sent = len(self.pieces)
                if over or not follow:
                    return
                yield LogPiece()
                time.sleep(0.05)
        finally:
            self.left.set()


@pytest.fixture
def running(store: MemoryStore, client: JobsClient, spec: JobSpec) -> JobId:
    east = StandInAgent(store, "east")
    job_id = dispatched(client, spec)
    east.run(job_id)
    eventually(lambda: client.get(job_id).status.attempt == 1, "it runs")
    return job_id


def test_logs_come_over_the_line_that_the_agent_opened(store: MemoryStore, client: JobsClient, running: JobId) -> None:
    """Platform teams allow outbound connections only."""
    logs = Logs()
    line = AttachClient(store, EAST, "east/1/1", logs.read)
    try:
        eventually(lambda: _attached(client, running), "the agent is attached")
        assert b"".join(piece.data for piece in client.logs(running)) == b"one\ntwo\n"
        follow = (piece.data for piece in client.logs(running, follow=True))
        assert next(follow) + next(follow) == b"one\ntwo\n"
        logs.pieces.append(b"three" * 100_000)
        logs.over = True
        assert b"".join(follow) == b"three" * 100_000
        logs.over = False
        logs.left.clear()
        gone = client.logs(running, follow=True)
        next(gone)
        del gone
        assert logs.left.wait(10), "the agent stops reading for a reader who has gone"
    finally:
        line.close()
    eventually(lambda: not _attached(client, running), "the agent is detached")


def _attached(client: JobsClient, job_id: JobId) -> bool:
    try:
        list(client.logs(job_id))
        return True
    except Unreachable:
        return False


def test_a_log_that_cannot_be_read_says_why(store: MemoryStore, client: JobsClient, running: JobId) -> None:
    """An empty answer would look like a silent job."""

    def read(job_id: JobId, follow: bool, before: Mapping[str, int]) -> Iterator[LogPiece]:
        yield LogPiece(b"begin\n")
        raise NotFound("the disk is gone")

    with pytest.raises(Unreachable, match="not attached"):
        list(client.logs(running))
    line = AttachClient(store, EAST, "east/1/1", read)
    try:
        eventually(lambda: _attached_or_failing(client, running), "the agent is attached")
        with pytest.raises(Failed, match="the disk is gone"):
            list(client.logs(running))
    finally:
        line.close()


def _attached_or_failing(client: JobsClient, job_id: JobId) -> bool:
    try:
        return _attached(client, job_id)
    except Failed:
        return True


def test_an_agent_finds_every_controller_and_one_that_comes_later(
    store: MemoryStore, client: JobsClient, running: JobId, start_controller: StartController
) -> None:
    """Whichever controller a user talks to must be able to show the logs."""
    line = AttachClient(store, EAST, "east/1/1", Logs().read)
    try:
        _, second = start_controller(store)
        for one in (client, second):
            eventually(lambda one=one: _attached(one, running), "the agent is attached")  # type: ignore[misc]
    finally:
        line.close()


def test_logs_of_a_job_that_has_not_started_say_so(client: JobsClient, spec: JobSpec) -> None:
    """Not an empty page: the user would look for the fault in the script."""
    with pytest.raises(NotFound, match="has not started yet"):
        list(client.logs(submitted(client, spec)))


def test_the_spans_of_a_submission_are_one_trace(store: MemoryStore, client: JobsClient, spec: JobSpec) -> None:
    """A job's trace begins where the user pressed enter; `trace show` finds it by the context kept in the job."""
    StandInAgent(store, "east")
    root = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
    job_id = dispatched(client, replace(spec, traceparent=root))
    assert client.get(job_id).spec.traceparent == root
    assert all(step.traceparent.split("-")[1] == "a" * 32 for step in client.events(job_id))
    entry = store.get(keys.job_spec(job_id))
    assert entry is not None
    assert codec.loads(JobSpec, entry.value).traceparent == root


class Distant(MemoryStore):
    """A store whose answers take a while, so that whoever reads before writing is late among many."""

    def get(self, key: str) -> Entry | None:
        found = super().get(key)
        time.sleep(0.002)
        return found


def test_hundreds_of_submissions_at_once_are_all_taken(start_controller: StartController, spec: JobSpec) -> None:
    """A sweep is submitted by a loop over threads; two of five were told to try again, since each takes the next number
    from under the others."""
    store = Distant()
    try:
        StandInAgent(store, "east")
        controller, _ = start_controller(store)
        with JobsClient(controller.address, timeout_s=100.0) as client, ThreadPoolExecutor(400) as pool:
            ids = sorted(pool.map(lambda number: int(client.submit(spec, f"run-{number}").job.spec.job_id), range(400)))
            assert ids == list(range(1, 401))
            assert len(client.list()) == 400
    finally:
        store.close()


def test_watchers_that_hang_keep_nobody_from_the_rest(start_controller: StartController, spec: JobSpec) -> None:
    """A script that forgets its streams must be no outage for everybody else."""
    store = MemoryStore()
    try:
        controller, client = start_controller(store)
        job_id = submitted(client, spec)
        with grpc.insecure_channel(controller.address, options=channel_options(controller.address)) as channel:
            stub = JobsStub(channel)
            watchers: list[Any] = [stub.Watch(pb.WatchRequest()) for _ in range(STREAMS_MAX + 20)]
            eventually(lambda: sum(watcher.done() for watcher in watchers) == 20 + READERS_MAX, "the rest is refused")
            assert client.get(job_id).status.phase is JobPhase.QUEUED
            with pytest.raises(Unreachable, match="128 streams are being read"):
                next(iter(client.watch()))

        def is_served() -> bool:
            with contextlib.suppress(Unreachable):
                return next(iter(client.watch())).spec.job_id == job_id
            return False

        eventually(is_served, "streams are served again")
    finally:
        store.close()
