"""What every executor does, wherever its tasks run: one suite for processes, Slurm, Kubernetes and Ray."""

from __future__ import annotations

import errno
import gc
import logging
import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fedsched.core.cluster import Node
from fedsched.core.commands import AdoptJobs, AskPolicy, StartJob
from fedsched.core.decision import Decision
from fedsched.core.events import (
    JobAdopted,
    JobExited,
    JobScaled,
    JobStarted,
    PolicyDecided,
    ProgressReported,
    ScaleFailed,
    SlotStarted,
    TermTaken,
)
from fedsched.core.ids import ClusterName, JobId, NodeName, TaskName
from fedsched.core.job import COORDINATOR, JobPhase, JobStatus, Range, Reason, TaskPlacement
from fedsched.core.resources import Resources
from fedsched.core.scheduler import Scheduler
from fedsched.core.state import SchedulerConfig
from fedsched.executor import records
from fedsched.executor.backend import TaskBackend
from fedsched.executor.orders import Programs
from fedsched.executor.processes import identify
from fedsched.executor.records import FenceRecord, TaskOrder, TaskRecord
from tests.executor.cluster import JOB, STAND_IN, Cluster, Local, ended, placement, stand_in_programs
from tests.executor.test_elastic import SCRIPT
from tests.waiting import eventually

pytestmark = [pytest.mark.live, pytest.mark.timeout(400)]

PLACES = [
    "local",
    "kubernetes",
    pytest.param("slurm", marks=pytest.mark.xdist_group("slurm")),
    pytest.param("ray", marks=pytest.mark.xdist_group("ray")),
]


def on(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster]:
    place = Local() if request.param == "local" else request.getfixturevalue(request.param)
    with ended(Cluster(tmp_path / "root", place)) as cluster:
        yield cluster


@pytest.fixture(params=PLACES[1:])
def placed(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster]:
    """A cluster whose tasks another system places, and may take away."""
    yield from on(request, tmp_path)


@pytest.fixture(params=PLACES)
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster]:
    yield from on(request, tmp_path)


def run(how: str) -> str:
    return f"python {STAND_IN} {how}"


def test_a_job_starts_reports_progress_and_finishes(cluster: Cluster) -> None:
    """The plain life of a job, and nothing of it stays behind."""
    cluster.programs = stand_in_programs(steps=30)
    cluster.start(cluster.spec(), placement(2, 1))

    cluster.wait_for(JobStarted)
    exited = cluster.wait_for(JobExited)

    assert (exited.reason, exited.message) == (Reason.FINISHED, "")
    assert exited.progress is not None
    assert exited.progress.steps == 30
    assert exited.progress.checkpoint_step == 30
    steps = [event.progress.steps for event in cluster.all_of(ProgressReported)]
    assert steps == sorted(steps)
    assert 2 <= len(steps) <= 8, "at most about two reports a second"
    assert cluster.alive() == set()
    assert len(cluster.all_of(JobExited)) == 1


def test_a_resize_adds_and_removes_tasks_while_the_others_keep_running(cluster: Cluster) -> None:
    """Growing or shrinking a job must never restart the tasks that stay."""
    cluster.start(cluster.spec(), placement(1, 1))
    cluster.wait_for(JobStarted)
    before = cluster.pids()

    cluster.scale(placement(3, 2))
    grown = cluster.wait_for(JobScaled)
    during = cluster.pids()
    mark = cluster.mark()
    cluster.scale(placement(1, 2))
    shrunk = cluster.wait_for(JobScaled, after=mark)

    assert grown.placement == placement(3, 2)
    assert grown.pause_s == pytest.approx(0.01)
    assert before.items() <= during.items()
    assert set(during) == {"coordinator", "worker-0", "worker-1", "worker-2", "ps-0", "ps-1"}
    assert shrunk.placement == placement(1, 2)
    assert cluster.alive() == {"coordinator", "worker-0", "ps-0", "ps-1"}, "what was removed has ended"
    assert before.items() <= cluster.pids().items()


def test_a_resize_whose_new_task_crashes_is_rolled_back(cluster: Cluster) -> None:
    """A failed resize must cost the job nothing: it goes on as it was, and its user reads why."""
    cluster.scale_deadline_s = max(2.0, cluster.place.join_s / 6)
    cluster.start(cluster.spec(run("crash-if-added")), placement(1, 1))
    cluster.wait_for(JobStarted)

    cluster.scale(placement(2, 1))
    failed = cluster.wait_for(ScaleFailed)

    assert failed.placement == placement(1, 1)
    assert failed.message == "worker-1 failed with exit code 1: ValueError: no room for another one"
    assert cluster.alive() == {"coordinator", "worker-0", "ps-0"}
    assert cluster.all_of(JobExited) == []


def test_tasks_that_have_ended_are_kept_neither_here_nor_by_the_platform(cluster: Cluster) -> None:
    """An agent runs for months: what accumulates with each task that ever ran ends it, or the platform, one day."""
    cluster.start(cluster.spec(), placement(1, 1))
    cluster.wait_for(JobStarted)
    cluster.scale(placement(2, 1))
    cluster.wait_for(JobScaled)
    tasks = cluster.attempt.records()
    left = tasks.pop(TaskName("worker-1"))
    kept = cluster.place.kept(cluster)
    mark = cluster.mark()

    cluster.scale(placement(1, 1))
    cluster.wait_for(JobScaled, after=mark)
    assert not mentions(cluster.tasks[-1], [left]), "a task that left a job that runs on"
    eventually(lambda: len(cluster.place.kept(cluster)) < len(kept), "the platform does not keep it either")
    cluster.stop(Reason.CANCELLED_BY_USER, checkpoint=False)
    cluster.wait_for(JobExited)

    assert not mentions(cluster.tasks[-1], tasks.values())
    eventually(lambda: not cluster.place.kept(cluster) & kept, "the platform keeps none", 40.0)
    assert not mentions(cluster.tasks[-1], [left, *tasks.values()]), "news of forgotten tasks are not kept"


def mentions(tasks: TaskBackend, ended: Iterable[TaskRecord]) -> set[str]:
    """Which of these tasks the back end's memory names anywhere."""
    names = {name for record in ended for name in (record.handle, record.request) if name}
    found, seen, left = set(), set(), [tasks.__dict__]
    while left:
        each: object = left.pop()
        if isinstance(each, str):
            found |= {each} & names
        elif id(each) not in seen:
            seen.add(id(each))
            is_ours = type(each).__module__.startswith("fedsched.")
            if is_ours or isinstance(each, dict | list | tuple | set | frozenset | deque):
                left += gc.get_referents(each)
    return found


def test_a_stop_during_a_resize_ends_the_job_and_only_that_is_told(cluster: Cluster) -> None:
    """A cancel must not wait for a resize, and the scheduler must not hear of a resize of a job that is over."""
    cluster.programs = stand_in_programs(scale_s=60.0)
    cluster.start(cluster.spec(), placement(1, 1))
    cluster.wait_for(JobStarted)

    cluster.scale(placement(2, 1))
    eventually(lambda: "worker-1" in cluster.alive(), "the resize has begun", cluster.place.join_s)
    cluster.stop(Reason.CANCELLED_BY_USER, checkpoint=False)
    exited = cluster.wait_for(JobExited)

    assert exited.reason is Reason.CANCELLED_BY_USER
    assert cluster.alive() == set()


def test_a_preempted_job_writes_a_checkpoint_first(cluster: Cluster) -> None:
    """Work that was done must survive the preemption."""
    cluster.start(cluster.spec(), placement(2, 1))
    cluster.wait_for(JobStarted)

    cluster.stop(Reason.PREEMPTED, checkpoint=True)
    exited = cluster.wait_for(JobExited)

    assert exited.reason is Reason.PREEMPTED
    assert exited.progress is not None
    assert exited.progress.checkpoint_step == exited.progress.steps > 0
    assert cluster.alive() == set()


def test_a_stop_while_tasks_still_join_ends_them_within_the_grace(cluster: Cluster) -> None:
    """A user who cancels early must not wait for the join deadline; a task that ignores SIGTERM must not matter."""
    cluster.start(cluster.spec(run("ignore-sigterm")), placement(1, 1))
    log = cluster.attempt.logs / "worker-0.log"
    eventually(
        lambda: log.exists() and "cannot be asked" in log.read_text(),
        "the worker ignores SIGTERM",
        cluster.place.join_s,
    )

    cluster.stop(Reason.CANCELLED_BY_USER, grace_s=0.5)
    exited = cluster.wait_for(JobExited, deadline_s=10.0)

    assert exited.reason is Reason.CANCELLED_BY_USER
    assert cluster.all_of(JobStarted) == []
    assert cluster.alive() == set()


@pytest.mark.parametrize(
    ("how", "reason", "message"),
    [
        (
            run("crash"),
            Reason.START_FAILED,
            "worker-0 failed with exit code 1: ValueError: learning rate -1 is no learning rate",
        ),
        (run("out-of-memory"), Reason.OUT_OF_MEMORY, "worker-0 failed with exit code 1: MemoryError"),
        ("sh -c 'kill -9 $$'", Reason.TASK_KILLED, "worker-0 was killed by SIGKILL"),
        ("no-such-command --fast", Reason.START_FAILED, "worker-0: command not found: no-such-command"),
        ("python missing.py", Reason.START_FAILED, "worker-0: script missing.py does not exist in "),
        ("python -m no_such_module", Reason.START_FAILED, "worker-0: there is no module named no_such_module"),
        ("echo 'unbalanced", Reason.START_FAILED, 'worker-0: the command "echo \'unbalanced" cannot be split'),
        ("", Reason.START_FAILED, "worker-0: the command is empty"),
        (
            run("never-join"),
            Reason.START_FAILED,
            "worker-0 did not join the job within",
        ),
        (
            run("leave-at-once"),
            Reason.START_FAILED,
            "worker-0 ended with exit code 0 before the training was done: nothing to do",
        ),
    ],
)
def test_each_bad_start_is_told_apart(cluster: Cluster, how: str, reason: Reason, message: str) -> None:
    """A user must read what went wrong, not that something did."""
    cluster.settle_s = 0.5
    if "never-join" in how:
        cluster.join_deadline_s = max(4.0, cluster.place.join_s / 6)
    cluster.start(cluster.spec(how), placement(1, 1))

    exited = cluster.wait_for(JobExited)

    if "never-join" in how:  # the stand-in's coordinator counts a member as such from the start
        assert "worker-0" in exited.message
        assert f"did not join the job within {cluster.join_deadline_s:g} s" in exited.message
    else:
        assert exited.message.startswith(message)
    assert exited.reason is reason
    assert cluster.alive() == set()
    assert len(cluster.all_of(JobExited)) == 1


@pytest.mark.parametrize("victim", ["worker-1", "ps-0", "coordinator"])
def test_killing_any_task_ends_the_attempt_and_names_the_task(cluster: Cluster, victim: str) -> None:
    """Half a job must never linger: its resources are wanted for the next attempt."""
    cluster.start(cluster.spec(), placement(2, 1))
    cluster.wait_for(JobStarted)

    os.kill(cluster.pids()[victim], signal.SIGKILL)
    exited = cluster.wait_for(JobExited)

    assert exited.reason is Reason.TASK_KILLED
    assert exited.message.startswith(f"{victim} was killed by SIGKILL")
    assert cluster.alive() == set()


def test_daemons_of_a_task_live_as_long_as_the_task(cluster: Cluster, tmp_path: Path) -> None:
    """A script's helpers that detach themselves would hold memory and GPUs that the cluster has given to others."""
    daemons = tmp_path / "daemons"
    daemons.mkdir()
    cluster.start(cluster.spec(run(f"leave-daemons {daemons}")), placement(1, 1))
    cluster.wait_for(JobStarted)
    eventually(lambda: len(list(daemons.iterdir())) == 2, "both daemons run", 10.0)
    pids = [int(path.name) for path in daemons.iterdir()]
    assert all(identify(pid) for pid in pids), "the task that they serve still runs"

    cluster.stop(checkpoint=False, grace_s=0.5)
    cluster.wait_for(JobExited)

    eventually(lambda: not any(identify(pid) for pid in pids), "they end with their task", 10.0)


def test_a_new_executor_adopts_what_the_old_one_left_running(cluster: Cluster) -> None:
    """Restarting an agent must cost its jobs nothing: same processes, still driven."""
    spec = cluster.spec()
    cluster.start(spec, placement(2, 1))
    cluster.wait_for(JobStarted)
    cluster.scale(placement(3, 1))
    cluster.wait_for(JobScaled)
    before = cluster.pids()
    cluster.executor.close()
    assert cluster.alive() == set(before)

    cluster.open()
    cluster.adopt((spec, 1))
    adopted = cluster.wait_for(JobAdopted)
    mark = cluster.mark()
    cluster.scale(placement(1, 1))
    cluster.wait_for(JobScaled, after=mark)
    kept = cluster.pids()
    cluster.stop(Reason.TIME_LIMIT)

    assert adopted.placement == placement(3, 1)
    assert set(kept) == {"coordinator", "worker-0", "ps-0"}
    assert kept.items() <= before.items()
    assert cluster.wait_for(JobExited).reason is Reason.TIME_LIMIT


def test_an_end_that_nobody_heard_of_is_told_after_the_restart(cluster: Cluster) -> None:
    """A job that finished while its agent was down has finished; it is not lost and not run again."""
    cluster.programs = stand_in_programs(steps=20)
    spec = cluster.spec()
    cluster.start(spec, placement(1, 1))
    cluster.wait_for(JobStarted)
    cluster.executor.close()
    eventually(lambda: not cluster.alive(), "the job has ended unwatched")
    assert cluster.all_of(JobExited) == []

    cluster.open()
    cluster.adopt((spec, 1))
    exited = cluster.wait_for(JobExited)
    mark = cluster.mark()
    cluster.adopt((spec, 1))
    again = cluster.wait_for(JobExited, after=mark)

    assert exited.reason is Reason.FINISHED
    assert again == exited


def test_what_no_job_is_known_for_is_killed_at_adoption(cluster: Cluster) -> None:
    """Tasks of an attempt that was replaced must go: nothing runs twice."""
    cluster.start(cluster.spec(), placement(1, 1))
    cluster.wait_for(JobStarted)
    cluster.executor.close()
    mark = cluster.mark()

    cluster.open()
    cluster.adopt()
    eventually(lambda: not cluster.alive(), "the strays are gone")
    eventually(lambda: cluster.attempt.exited.exists(), "the attempt is closed")

    assert cluster.events[mark:] == [], "nobody asked about it"


def test_a_stop_that_was_under_way_is_completed_after_a_restart(cluster: Cluster) -> None:
    """An agent that dies between the order and the end must not turn a cancelled job into one that runs on."""
    spec = cluster.spec(run("ignore-sigterm"))
    cluster.start(spec, placement(1, 1))
    log = cluster.attempt.logs / "worker-0.log"
    eventually(
        lambda: log.exists() and "cannot be asked" in log.read_text(),
        "the worker ignores SIGTERM",
        cluster.place.join_s,
    )
    cluster.stop(Reason.CANCELLED_BY_USER, grace_s=2.0)
    eventually(lambda: cluster.attempt.stop.exists(), "the stop is under way")
    cluster.executor.close()
    assert "worker-0" in cluster.alive()

    cluster.open()
    cluster.adopt((spec, 1))

    assert cluster.wait_for(JobExited).reason is Reason.CANCELLED_BY_USER
    assert cluster.alive() == set()


def test_a_start_that_was_under_way_is_completed_after_a_restart(cluster: Cluster) -> None:
    """A job whose first tasks run already is completed, not thrown away."""
    spec = cluster.spec()
    cluster.start(spec, placement(1, 1))
    eventually(lambda: cluster.attempt.coordinator.exists(), "the coordinator runs", cluster.place.join_s)
    cluster.executor.close()

    cluster.open()
    cluster.adopt((spec, 1))
    adopted = cluster.wait_for(JobAdopted)
    eventually(lambda: cluster.all_of(ProgressReported), "the job trains", 60.0)

    assert adopted.placement == placement(1, 1)
    assert cluster.alive() == {"coordinator", "worker-0", "ps-0"}


def test_a_resize_that_was_under_way_is_resolved_after_a_restart(cluster: Cluster) -> None:
    """A new task that is no member when the agent comes back must not hold resources unseen."""
    cluster.scale_deadline_s = max(3.0, cluster.place.join_s / 6)
    spec = cluster.spec(run("never-join-if-added"))
    cluster.start(spec, placement(1, 1))
    cluster.wait_for(JobStarted)
    cluster.scale(placement(2, 1))
    eventually(lambda: "worker-1" in cluster.alive(), "the resize is under way", cluster.place.join_s)
    cluster.executor.close()

    cluster.open()
    cluster.adopt((spec, 1))
    adopted = cluster.wait_for(JobAdopted)

    assert adopted.placement == placement(1, 1)
    assert cluster.alive() == {"coordinator", "worker-0", "ps-0"}


def test_older_terms_are_refused_and_repeated_orders_ignored_across_restarts(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    """An agent that was replaced must not start a job that its successor has given away."""
    cluster.term = 7
    first = StartJob(7, 1, cluster.spec("no-such-command"), 1, placement(1, 1))
    cluster.executor.submit(first)
    cluster.wait_for(JobExited)
    cluster.executor.close()

    executor = cluster.open()
    with caplog.at_level(logging.WARNING):
        executor.submit(first)
        executor.submit(StartJob(6, 99, cluster.spec(job_id="job-old"), 1, placement(1, 1)))
        executor.submit(AdoptJobs(7, 2, ()))
        eventually(lambda: records.read(FenceRecord, cluster.layout.fence) == FenceRecord(7, 2), "all were looked at")

    assert "an order of term 6 was refused; this cluster already obeys term 7" in caplog.text
    assert not (cluster.root / "jobs" / "job-old").exists()
    assert len(cluster.all_of(JobExited)) == 1


def test_the_next_attempt_waits_until_the_tasks_of_the_one_before_are_gone(cluster: Cluster) -> None:
    """Two attempts of a job on one checkpoint directory would destroy each other's work."""
    spec = cluster.spec(run("ignore-sigterm"))
    cluster.start(spec, placement(1, 1))
    log = cluster.attempt.logs / "worker-0.log"
    eventually(
        lambda: log.exists() and "cannot be asked" in log.read_text(), "the first attempt runs", cluster.place.join_s
    )
    cluster.stop(grace_s=1.0)
    cluster.start(spec, placement(1, 1), attempt=2)

    cluster.wait_for(JobExited)
    assert cluster.alive() == set()
    eventually(lambda: "worker-0" in cluster.alive(attempt=2), "the second attempt runs", cluster.place.join_s)
    assert next(path.parent.parent.name for path in cluster.executor.log_files(JOB)) == "attempt-1"
    assert [path.name for path in cluster.executor.log_files(JOB)][:3] == [
        "coordinator.log",
        "ps-0.log",
        "worker-0.log",
    ]


def test_what_a_task_prints_is_in_its_log_while_it_runs_and_afterwards(cluster: Cluster) -> None:
    """`fedsched logs -f` must show a line when it is printed, wherever the task runs."""
    cluster.start(cluster.spec(run("ignore-sigterm")), placement(1, 1))

    eventually(lambda: b"cannot be asked" in b"".join(_logs(cluster, "worker-0")), "the line is there", 60.0)
    cluster.stop(grace_s=0.5)
    cluster.wait_for(JobExited)

    assert b"".join(_logs(cluster, "worker-0")).count(b"cannot be asked") == 1


def _logs(cluster: Cluster, task: str) -> list[bytes]:
    return [path.read_bytes() for path in cluster.executor.log_files(JOB) if path.stem == task]


@pytest.mark.parametrize("task", ["worker-1", "ps-0"])
def test_a_task_that_the_platform_takes_away_is_preempted(placed: Cluster, task: str) -> None:
    """A user must not be blamed, and lose an attempt, because others had a better claim to the place."""
    tasks = tuple(sorted((*placement(1, 0, "n1"), *placement(2, 1, "n2")[-1:], *placement(0, 1, "n1"))))
    node = {entry.task: entry.node for entry in tasks}
    placed.start(placed.spec(), tasks)
    placed.wait_for(JobStarted)
    assert task in node

    placed.place.preempt(placed, task)
    exited = placed.wait_for(JobExited)

    assert exited.reason is Reason.PREEMPTED, exited
    assert placed.alive() == set()


def test_a_node_that_is_lost_is_told_as_such_and_its_tasks_end_once_they_see_that(placed: Cluster) -> None:
    """The job goes on elsewhere, at nobody's fault; what runs on a node that was cut off must not run beside it."""
    tasks = tuple(sorted((*placement(1, 1, "n1"), *[e for e in placement(2, 0, "n2") if e.task == "worker-1"])))
    placed.start(placed.spec(), tasks)
    placed.wait_for(JobStarted)

    placed.place.lose(placed, "worker-1")
    exited = placed.wait_for(JobExited, deadline_s=90.0)

    assert exited.reason is Reason.NODE_LOST, exited
    assert "n2" in exited.message
    eventually(lambda: not placed.alive(), "nothing of the attempt runs any more")


def test_a_task_that_uses_more_memory_than_it_was_given_is_told_so(placed: Cluster) -> None:
    """Whoever reads `killed` looks for a killer; whoever reads `out of memory` asks for more."""
    spec = placed.spec(run("exhaust"), worker_demand=Resources(1000, 400))
    placed.start(spec, placement(1, 1))

    exited = placed.wait_for(JobExited)

    assert exited.reason is Reason.OUT_OF_MEMORY, exited
    assert placed.alive() == set()


def test_a_cluster_that_the_scheduler_has_filled_refuses_no_task_of_it(placed: Cluster) -> None:
    """Clusters count coordinators, and some count in whole processors: a scheduler that does not would promise places
    that are not there, and its jobs would wait half started until they are given up."""
    asked = [
        placed.executor.taken(
            placed.spec(
                job_id=JobId(f"job-{number}"),
                workers=Range(1, 1),
                ps=Range(1, 1),
                worker_demand=Resources(1600, 512),
                ps_demand=Resources(1600, 512),
            )
        )
        for number in range(1, 6)
    ]
    scheduler = Scheduler(
        SchedulerConfig(ClusterName("test"), 1.0),
        tuple(Node(NodeName(name), Resources(8000, 8000)) for name in ("n1", "n2")),
        check=True,
    )
    jobs = tuple((spec, JobStatus(spec.job_id, JobPhase.DISPATCHED)) for spec in asked)
    scheduler.handle(TermTaken(0.0, 1, jobs))
    (question,) = scheduler.handle(SlotStarted(1.0, 1))
    assert isinstance(question, AskPolicy)
    everything = tuple((spec.job_id, spec.minimum) for spec in asked)
    commands = scheduler.handle(PolicyDecided(2.0, Decision(1, everything, "test")))
    starts = [command for command in commands if isinstance(command, StartJob)]
    assert 3 <= len(starts) < len(asked)

    for start in starts:
        placed.executor.submit(start)

    eventually(lambda: len(placed.all_of(JobStarted)) == len(starts), "all of them train", placed.place.join_s)
    for start in starts:
        running = placed.layout.attempt(start.spec.job_id, 1).records()
        assert {task: record.node for task, record in running.items()} == {
            entry.task: entry.node for entry in start.placement
        }


def test_a_coordinator_stays_where_it_was_placed_and_every_answer_names_it(cluster: Cluster) -> None:
    """The scheduler keeps room for it there, and must hear of it from whoever finds the job after a restart."""
    spec = cluster.executor.taken(cluster.spec())
    coordinator = TaskPlacement(COORDINATOR, NodeName("n2"))
    cluster.start(spec, (coordinator, *placement(1, 1)))
    cluster.wait_for(JobStarted)
    assert cluster.record(COORDINATOR).node == "n2"

    cluster.scale((coordinator, *placement(2, 1)))
    assert cluster.wait_for(JobScaled).placement == (coordinator, *placement(2, 1))
    mark = cluster.mark()
    cluster.executor.close()
    cluster.open()
    cluster.adopt((spec, 1))

    assert cluster.wait_for(JobAdopted, after=mark).placement == (coordinator, *placement(2, 1))


def test_a_cluster_without_a_place_is_not_the_jobs_fault(placed: Cluster) -> None:
    """Others may use the cluster, too: the job waits, then goes back to the queue, and reads what was missing."""
    placed.join_deadline_s = 15.0
    placed.start(placed.spec(worker_demand=Resources(1000, 512), ps_demand=Resources(64_000, 512)), placement(1, 1))

    exited = placed.wait_for(JobExited, deadline_s=90.0)

    assert exited.reason in (Reason.NODE_LOST, Reason.START_FAILED), exited
    assert "ps-0" in exited.message
    assert placed.alive() == set()


def test_an_order_of_a_replaced_agent_that_waits_in_the_platforms_queue_starts_nothing(placed: Cluster) -> None:
    """A task may get its place long after its agent was replaced, and the job may run elsewhere by then."""
    placed.term = 3
    placed.start(placed.spec(), placement(1, 1))
    placed.wait_for(JobStarted)
    order = records.read(TaskOrder, placed.attempt.ordered(TaskName("worker-0")))
    assert order is not None
    files = placed.layout.attempt(JobId("job-late"), 1)
    for folder in (files.tasks, files.logs):
        folder.mkdir(parents=True)
    tasks = placed.place.open(placed.root, placed.programs)
    late = replace(order, request="late", task=TaskName("worker-9"), attempt_dir=str(files.path))

    record = tasks.start(2, late)
    eventually(lambda: tasks.ended(files, record), "it has ended", 60.0)
    ended = tasks.ended(files, record)
    tasks.close()

    assert ended is not None
    assert ended.start_error == "the order is of term 2; this cluster already obeys term 3"


def test_a_task_whose_start_was_never_put_on_record_does_not_run(
    placed: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent that dies between the order and its note must not leave a task behind that nobody knows of."""
    monkeypatch.setattr(records, "write", _all_but_task_records(records.write))
    placed.start(placed.spec(), placement(1, 1))

    exited = placed.wait_for(JobExited)

    assert exited.reason is Reason.NODE_LOST
    assert "No space left" in exited.message
    assert placed.alive() == set()


def _all_but_task_records(write: Callable[[Path, object], None]) -> Callable[[Path, object], None]:
    def fail(path: Path, record: object) -> None:
        if isinstance(record, TaskRecord):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        write(path, record)

    return fail


def test_a_real_training_is_resized_stopped_and_resumed_on_every_platform(placed: Cluster, tmp_path: Path) -> None:
    """The stand-in proves the executor; this proves that the product's own runtime trains where the tasks are put."""
    (tmp_path / "train.py").write_text(SCRIPT)
    placed.programs = Programs()
    placed.join_deadline_s = placed.scale_deadline_s = 150.0
    demand = Resources(1000, 1200)
    spec = placed.spec(
        "python train.py",
        workdir=str(tmp_path),
        env=(("EPOCHS", "100000"),),
        grace_s=20.0,
        worker_demand=demand,
        ps_demand=demand,
    )
    placed.start(spec, placement(1, 1, "n1"))
    placed.wait_for(JobStarted, deadline_s=150.0)
    placed.scale(placement(2, 1, "n1"))
    assert placed.wait_for(JobScaled, deadline_s=150.0).placement == placement(2, 1, "n1")
    placed.stop(Reason.PREEMPTED, checkpoint=True, grace_s=30.0)
    stopped = placed.wait_for(JobExited, deadline_s=90.0)
    mark = placed.mark()
    placed.start(spec, placement(1, 1, "n2"), attempt=2)
    resumed = placed.wait_for(ProgressReported, after=mark, deadline_s=150.0)

    assert stopped.reason is Reason.PREEMPTED, stopped
    assert stopped.progress is not None
    assert stopped.progress.checkpoint_step > 0
    assert resumed.progress.steps >= stopped.progress.checkpoint_step, "it goes on from the checkpoint, on another node"
