"""The judges find what they are there for, and name it; a judge that never objects protects nobody."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from fedsched.core.cluster import Node
from fedsched.core.commands import AskPolicy, Command, SaveJob, StartJob
from fedsched.core.decision import JobView, Observation
from fedsched.core.events import Event, JobAssigned, JobExited, NodeLost, SlotStarted, TermTaken
from fedsched.core.ids import ClusterName, JobId, NodeName
from fedsched.core.job import (
    Allocation,
    JobPhase,
    JobSpec,
    JobStatus,
    Range,
    Reason,
    Role,
    TaskPlacement,
    Transition,
    task_name,
)
from fedsched.core.resources import Resources
from fedsched.sim.collecting import Collector
from fedsched.sim.judges import BrokenPromise, Judges

NODE = NodeName("n")
P = JobPhase


class Stage:
    """A cluster of one node with two GPUs, told by hand."""

    def __init__(self, *, rebuilt: bool = False) -> None:
        self.judges, self.collector = Judges(rebuilt=rebuilt), Collector()
        nodes = [Node(NODE, Resources(cpu_milli=8000, gpu_milli=2000))]
        self._observers = [watch.on(ClusterName("c"), nodes) for watch in (self.judges, self.collector)]
        self._seq = 0
        self.see(TermTaken(0.0, 1))

    def see(self, event: Event, *commands: Command) -> None:
        for observe in self._observers:
            observe(event, commands)

    def spec(self, name: str) -> JobSpec:
        gpu = Resources(cpu_milli=1000, gpu_milli=1000)
        return JobSpec(JobId(name), name, "x", Range(1, 4), Range(0, 0), gpu, Resources(), 1.0)

    def assign(self, name: str) -> None:
        self.see(JobAssigned(0.0, self.spec(name), JobStatus(JobId(name), phase=P.DISPATCHED)))

    def save(self, name: str, time_s: float, source: P, target: P, **changes: Any) -> SaveJob:
        fields = {"seq": 1, "attempt": 1, "term": 1, "allocation": Allocation(1, 0), **changes}
        status = JobStatus(JobId(name), phase=target, seq=fields["seq"], attempt=fields["attempt"])
        step = Transition(
            actor="agent/c",
            time_s=time_s,
            job_id=JobId(name),
            source=source,
            target=target,
            reason=Reason.NONE,
            **fields,
        )
        return SaveJob(status, step)

    def start(self, name: str, time_s: float, tasks: int = 1) -> None:
        self._seq += 1
        placement = tuple(TaskPlacement(task_name(Role.WORKER, index), NODE) for index in range(tasks))
        save = self.save(name, time_s, P.DISPATCHED, P.STARTING, allocation=Allocation(tasks, 0))
        self.see(SlotStarted(time_s, self._seq), save, StartJob(1, self._seq, self.spec(name), 1, placement))

    def finish(self, name: str, time_s: float, seq: int = 2, source: P = P.STARTING) -> None:
        exited = JobExited(time_s, JobId(name), 1, Reason.FINISHED, "")
        self.see(exited, self.save(name, time_s, source, P.SUCCEEDED, seq=seq))

    def close(self, until_s: float, submitted: int) -> None:
        self.judges.close(self.collector.jobs(until_s), until_s, submitted=submitted)


def started(*tasks: int) -> Stage:
    stage = Stage()
    for index in range(len(tasks)):
        stage.assign(f"job-{index}")
    for index, count in enumerate(tasks):
        stage.start(f"job-{index}", 1.0, count)
    return stage


def test_a_run_in_which_all_is_well_is_passed() -> None:
    stage = started(1, 1)
    stage.finish("job-0", 5.0)
    stage.finish("job-1", 7.0)
    stage.close(7.0, 2)


def test_more_than_a_node_has_is_found() -> None:
    """Somebody's training would be killed for lack of memory."""
    with pytest.raises(BrokenPromise, match=r"cluster c at 1\.0 s: node n holds 3000 gpu_milli and has 2000; .* job-1"):
        started(1, 2)


def test_a_task_on_a_node_that_is_gone_is_found() -> None:
    stage = Stage()
    stage.assign("a")
    stage.see(NodeLost(0.5, NODE))
    with pytest.raises(BrokenPromise, match="job a got a task on node n, which is not there"):
        stage.start("a", 1.0)


def test_a_job_that_ends_twice_is_found() -> None:
    """Its user would be told two different things."""
    stage = started(1)
    stage.finish("job-0", 5.0)
    with pytest.raises(BrokenPromise, match="job job-0 became Succeeded after it was Succeeded"):
        stage.finish("job-0", 6.0, seq=3, source=P.SUCCEEDED)


def test_a_lost_job_is_found() -> None:
    stage = started(1, 1)
    stage.finish("job-1", 5.0)
    with pytest.raises(BrokenPromise, match=r"1 jobs are lost, the first is job job-0, still Starting at 9\.0 s"):
        stage.close(9.0, 2)
    with pytest.raises(BrokenPromise, match="3 jobs were submitted and 2 came"):
        stage.close(9.0, 3)


@pytest.mark.parametrize(
    ("source", "target", "changes", "expected"),
    [
        (P.RUNNING, P.RESIZING, {}, "went from Running to Resizing; it was Dispatched"),
        (P.DISPATCHED, P.RUNNING, {}, "went from Dispatched to Running; it was Dispatched"),
        (P.DISPATCHED, P.STARTING, {"attempt": 2}, "is in attempt 2; 1 was expected"),
        (P.DISPATCHED, P.STARTING, {"seq": 3}, "step 3 of term 1 of job a came after step 0, in term 1"),
        (P.DISPATCHED, P.STARTING, {"term": 2}, "step 1 of term 2 of job a came after step 0, in term 1"),
    ],
)
def test_a_step_that_no_table_allows_is_found(source: P, target: P, changes: dict[str, Any], expected: str) -> None:
    """Whoever reads a job's story relies on its order."""
    stage = Stage()
    stage.assign("a")
    with pytest.raises(BrokenPromise, match=expected):
        stage.see(SlotStarted(1.0, 0), stage.save("a", 1.0, source, target, **changes))


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([SlotStarted(5.0, 0), SlotStarted(4.0, 1)], r"an event of 4\.0 s came after one of 5\.0 s"),
        ([SlotStarted(5.0, 3), SlotStarted(6.0, 3)], "slot 3 started after slot 3"),
        ([TermTaken(5.0, 1)], "term 1 was taken after term 1"),
    ],
)
def test_what_should_only_grow_is_watched(events: Sequence[Event], expected: str) -> None:
    stage = Stage()
    for event in events[:-1]:
        stage.see(event)
    with pytest.raises(BrokenPromise, match=expected):
        stage.see(events[-1])


def test_an_order_that_does_not_follow_the_last_one_is_found() -> None:
    """The executor ignores an order that it takes for a repetition; the job would wait for ever."""
    stage = started(1)
    again = StartJob(1, 1, stage.spec("job-0"), 1, (TaskPlacement(task_name(Role.WORKER, 0), NODE),))
    with pytest.raises(BrokenPromise, match=r"order \(1, 1\) was given after order \(1, 1\)"):
        stage.see(SlotStarted(2.0, 2), again)


def test_gpu_seconds_that_nobody_got_are_found() -> None:
    """Utilisation would be told wrong, and bills with it."""
    stage = started(2)
    stage.finish("job-0", 5.0)
    jobs = stage.collector.jobs(5.0)
    jobs.gpu_s[0] -= 1
    with pytest.raises(BrokenPromise, match=r"nodes gave 8\.0+ GPU-seconds and jobs got 7\.0+"):
        stage.judges.close(jobs, 5.0, submitted=1)


def test_core_seconds_that_nobody_got_are_found() -> None:
    stage = started(2)
    stage.finish("job-0", 5.0)
    jobs = stage.collector.jobs(5.0)
    jobs.core_s[0] += 1
    with pytest.raises(BrokenPromise, match=r"nodes gave 8\.0+ core-seconds and jobs got 9\.0+"):
        stage.judges.close(jobs, 5.0, submitted=1)


def test_a_result_that_is_not_the_truth_is_found() -> None:
    """A job that is counted as over and runs, or one that nobody counted."""
    stage = started(1)
    stage.finish("job-0", 5.0)
    running = started(1)
    running.see(SlotStarted(5.0, 9))
    with pytest.raises(BrokenPromise, match="job job-0 is over in the results and not in truth"):
        stage.judges.close(running.collector.jobs(5.0), 5.0, submitted=1)
    with pytest.raises(BrokenPromise, match="1 jobs came and 0 are in the results"):
        stage.judges.close(Collector().jobs(5.0), 5.0, submitted=1)


def test_a_job_that_comes_back_after_it_was_over_is_found() -> None:
    stage = started(1)
    stage.finish("job-0", 5.0)
    with pytest.raises(BrokenPromise, match="job job-0 was assigned again after it was Succeeded"):
        stage.see(JobAssigned(5.0, stage.spec("job-0"), JobStatus(JobId("job-0"), phase=P.DISPATCHED)))


def test_a_job_that_is_over_and_holds_tasks_is_found() -> None:
    """Nobody else could use what they hold, and nobody would be billed for it."""
    stage = started(2)
    ended = stage.save("job-0", 2.0, P.STARTING, P.SUCCEEDED, seq=2)
    with pytest.raises(BrokenPromise, match="job job-0 is Succeeded and holds 2 tasks"):
        stage.see(SlotStarted(2.0, 2), ended)


def test_a_step_of_a_job_that_never_came_or_with_a_date_of_its_own_is_found() -> None:
    stage = Stage()
    stage.assign("a")
    with pytest.raises(BrokenPromise, match="job b became Starting and never came here"):
        stage.see(SlotStarted(1.0, 0), stage.save("b", 1.0, P.DISPATCHED, P.STARTING))
    with pytest.raises(BrokenPromise, match=r"a step of job a is dated 7\.0 s"):
        stage.see(SlotStarted(2.0, 1), stage.save("a", 7.0, P.DISPATCHED, P.STARTING))


def test_a_store_that_knows_more_than_was_ever_done_is_found() -> None:
    stage = started(1)
    ahead = JobStatus(JobId("job-0"), phase=P.RUNNING, seq=5, attempt=1)
    with pytest.raises(BrokenPromise, match="the store is ahead of job job-0: seq 5 of 1"):
        stage.see(TermTaken(3.0, 2, ((stage.spec("job-0"), ahead),)))


def test_tasks_for_a_job_that_does_not_run_or_twice_the_same_are_found() -> None:
    stage = Stage()
    stage.assign("a")
    task = TaskPlacement(task_name(Role.WORKER, 0), NODE)
    with pytest.raises(BrokenPromise, match="attempt 1 of job a got tasks and is none that runs"):
        stage.see(SlotStarted(1.0, 1), StartJob(1, 1, stage.spec("a"), 1, (task,)))
    save = stage.save("a", 2.0, P.DISPATCHED, P.STARTING)
    with pytest.raises(BrokenPromise, match="job a got a task twice"):
        stage.see(SlotStarted(2.0, 2), save, StartJob(1, 2, stage.spec("a"), 1, (task, task)))


def test_an_order_of_another_term_is_found() -> None:
    """The executor would obey an agent that has been replaced, or none."""
    stage = started(1)
    order = StartJob(2, 1, stage.spec("job-0"), 1, (TaskPlacement(task_name(Role.WORKER, 0), NODE),))
    with pytest.raises(BrokenPromise, match=r"order \(2, 1\) was given after order \(1, 1\)"):
        stage.see(SlotStarted(2.0, 2), order)


def test_a_policy_that_is_asked_about_a_job_that_is_over_is_found() -> None:
    stage = started(1)
    view = JobView(
        JobId("job-0"), "x", Range(1, 4), Range(0, 0), Resources(), Resources(), 1.0, 0.0, arrived_s=0.0, waited_slots=0
    )
    question = AskPolicy(Observation(3, 10.0, (), (view,), 6.0), keep_running=True)
    stage.see(SlotStarted(2.0, 2), question)
    stage.finish("job-0", 5.0)
    with pytest.raises(BrokenPromise, match="the policy was asked about job job-0, which is over"):
        stage.see(SlotStarted(6.0, 3), question)


def test_where_slots_are_rebuilt_a_node_is_judged_when_the_instant_is_over() -> None:
    """Within it tasks change places; after it too much is too much."""
    stage = Stage(rebuilt=True)
    for name in ("a", "b"):
        stage.assign(name)
    stage.start("a", 1.0, 1)
    stage.start("b", 1.0, 2)
    with pytest.raises(BrokenPromise, match="node n holds 3000 gpu_milli and has 2000"):
        stage.see(SlotStarted(2.0, 9))
