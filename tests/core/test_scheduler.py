"""Stories of one cluster's scheduler."""

from __future__ import annotations

from typing import Any, get_args, get_type_hints

import pytest

from fedsched.core.commands import AdoptJobs, SaveJob, ScaleJob, StartJob, StopJob
from fedsched.core.events import (
    CancelRequested,
    Event,
    JobAssigned,
    JobExited,
    LeaseLost,
    LeaseRegained,
    NodeChanged,
    NodeLost,
    ProgressReported,
    ScaleFailed,
    SlotStarted,
)
from fedsched.core.ids import JobId, NodeName
from fedsched.core.job import Allocation, JobPhase, JobStatus, Progress, Reason
from fedsched.core.scheduler import _HANDLERS
from tests.core.world import World, dispatched, node, spec


def assign(world: World, *names: str, **changes: Any) -> None:
    for index, name in enumerate(names):
        job = spec(name, submitted_s=float(index), **changes)
        world.specs[job.job_id] = job
        world.statuses[job.job_id] = dispatched(job)
        world.tell(JobAssigned(world.now_s, job, world.statuses[job.job_id]))


def slot(world: World, number: int, allocations: dict[str, tuple[int, int]] | None = None) -> None:
    world.now_s += 10.0
    world.tell(SlotStarted(world.now_s, number))
    if world.questions:
        world.decide(allocations)


def status(world: World, name: str) -> JobStatus:
    return world.statuses[JobId(name)]


@pytest.fixture
def world() -> World:
    return World((node("n1", 4), node("n2", 4)))


def test_a_job_is_persisted_before_its_tasks_start(world: World) -> None:
    """An agent that dies between the two must find the job in the store, not tasks that nobody knows."""
    assign(world, "a")
    world.tell(SlotStarted(world.now_s, 1))
    world.decide({"a": (2, 1)})
    assert status(world, "a").phase is JobPhase.STARTING
    assert [type(order) for order in world.inbox if not isinstance(order, AdoptJobs)] == [StartJob]
    world.settle()
    assert status(world, "a").phase is JobPhase.RUNNING
    assert status(world, "a").allocation == Allocation(2, 1)


def test_a_resize_keeps_running_tasks_where_they_are(world: World) -> None:
    """Moving a task costs the user training time; a larger job must not be reshuffled."""
    assign(world, "a")
    slot(world, 1, {"a": (1, 1)})
    world.settle()
    before = status(world, "a").placement
    slot(world, 2, {"a": (3, 2)})
    world.settle()
    assert set(before) <= set(status(world, "a").placement)
    assert status(world, "a").allocation == Allocation(3, 2)
    assert status(world, "a").resizes == 1


def test_freed_places_are_given_on_only_when_the_tasks_have_left(world: World) -> None:
    """Two jobs on one core is what users call a noisy neighbour."""
    assign(world, "a", "b", workers=(1, 7), ps=(1, 1))
    slot(world, 1, {"a": (7, 1)})
    world.settle()
    slot(world, 2, {"a": (5, 1), "b": (1, 1)})
    assert [type(order) for order in world.inbox] == [ScaleJob]
    assert status(world, "b").reason is Reason.WAITING_FOR_CAPACITY
    world.carry_out()
    assert [type(order) for order in world.inbox] == [StartJob]
    world.settle()
    assert status(world, "b").phase is JobPhase.RUNNING


def test_one_resize_in_flight_per_job(world: World) -> None:
    """A second order to a job that is half-way through the first would race with it."""
    assign(world, "a")
    slot(world, 1, {"a": (1, 1)})
    world.settle()
    slot(world, 2, {"a": (2, 1)})
    slot(world, 3, {"a": (4, 1)})
    assert len(world.inbox) == 1
    world.settle()
    assert status(world, "a").allocation == Allocation(2, 1)
    slot(world, 4, {"a": (4, 1)})
    world.settle()
    assert status(world, "a").allocation == Allocation(4, 1)


def test_a_cooldown_holds_a_job_as_it_is(world: World) -> None:
    """A job that is resized every slot trains less than one that is left alone."""
    assign(world, "a", resize_cooldown_s=25.0)
    slot(world, 1, {"a": (1, 1)})
    world.settle()
    slot(world, 2, {"a": (4, 1)})
    assert not world.inbox
    slot(world, 3, {"a": (4, 1)})
    slot(world, 4, {"a": (4, 1)})
    world.settle()
    assert status(world, "a").allocation == Allocation(4, 1)


def test_a_failed_resize_leaves_the_job_running_and_says_why(world: World) -> None:
    """A pending worker must never kill a healthy job."""
    assign(world, "a")
    slot(world, 1, {"a": (1, 1)})
    world.settle()
    slot(world, 2, {"a": (3, 1)})
    world.carry_out(well=False)
    assert status(world, "a").phase is JobPhase.RUNNING
    assert status(world, "a").reason is Reason.RESIZE_FAILED
    assert status(world, "a").allocation == Allocation(1, 1)
    assert status(world, "a").resizes == 0


def test_a_late_answer_to_an_older_resize_is_not_taken_for_one_to_the_newest(world: World) -> None:
    """The same places may fail to grow twice; freeing the second order's tasks at the first's news doubles them."""
    assign(world, "a")
    slot(world, 1, {"a": (1, 1)})
    world.settle()
    slot(world, 2, {"a": (2, 1)})
    (order,) = world.inbox
    assert isinstance(order, ScaleJob)
    world.carry_out(well=False)
    slot(world, 3, {"a": (2, 1)})
    assert status(world, "a").phase is JobPhase.RESIZING
    holds = status(world, "a").placement
    late = ScaleFailed(world.now_s, order.job_id, order.attempt, holds, "once more", order.term, order.seq)
    assert world.tell(late) == []
    assert status(world, "a").phase is JobPhase.RESIZING
    world.settle()
    assert (status(world, "a").phase, status(world, "a").allocation) == (JobPhase.RUNNING, Allocation(2, 1))


def test_a_resize_that_is_rolled_back_is_told_with_what_the_job_holds_then(world: World) -> None:
    """Bills and charts are made of the steps of a job's life."""
    assign(world, "a")
    slot(world, 1, {"a": (1, 1)})
    world.settle()
    slot(world, 2, {"a": (2, 1)})
    world.carry_out(well=False)
    last = world.transitions[-1]
    assert (last.reason, last.allocation) == (Reason.RESIZE_FAILED, Allocation(1, 1))


def test_a_cancelled_job_ends_when_its_tasks_have_ended(world: World) -> None:
    assign(world, "a")
    slot(world, 1)
    world.settle()
    world.tell(CancelRequested(world.now_s, JobId("a")))
    assert status(world, "a").phase is JobPhase.COMPLETING
    assert isinstance(world.inbox[0], StopJob)
    world.settle()
    assert status(world, "a").phase is JobPhase.CANCELLED
    assert JobId("a") not in world.scheduler.state.jobs


def test_a_job_that_finishes_while_it_is_being_cancelled_has_succeeded(world: World) -> None:
    """The result is there; calling it cancelled would make its owner run it again."""
    assign(world, "a")
    slot(world, 1)
    world.settle()
    world.tell(CancelRequested(world.now_s, JobId("a")))
    world.finish(JobId("a"))
    assert status(world, "a").phase is JobPhase.SUCCEEDED


def test_a_script_that_crashes_before_its_first_step_is_not_tried_again(world: World) -> None:
    """A typo would only crash again; its owner wants to know now."""
    assign(world, "a")
    slot(world, 1)
    world.settle()
    world.finish(JobId("a"), Reason.USER_ERROR)
    assert status(world, "a").phase is JobPhase.FAILED
    assert status(world, "a").reason is Reason.USER_ERROR


def test_a_job_that_crashes_after_progress_is_tried_again_as_often_as_allowed(world: World) -> None:
    assign(world, "a", max_attempts=2)
    for attempt in (1, 2):
        slot(world, attempt)
        world.settle()
        assert status(world, "a").attempt == attempt
        world.finish(JobId("a"), Reason.USER_ERROR, Progress(epochs=float(attempt)))
    assert status(world, "a").phase is JobPhase.FAILED
    assert status(world, "a").reason is Reason.ATTEMPTS_EXHAUSTED


def test_a_job_whose_tasks_vanish_again_and_again_is_given_up_as_lost(world: World) -> None:
    """A loop of starts that nobody sees end would hold its place for ever."""
    assign(world, "a", max_attempts=2)
    for attempt in (1, 2):
        slot(world, attempt)
        world.settle()
        world.finish(JobId("a"), Reason.LOST)
    assert status(world, "a").phase is JobPhase.FAILED
    assert status(world, "a").reason is Reason.LOST


def test_a_vanished_attempt_that_got_further_is_not_counted(world: World) -> None:
    """A job that makes progress between two crashes of its machine will end."""
    assign(world, "a", max_attempts=2)
    for attempt in (1, 2, 3):
        slot(world, attempt)
        world.settle()
        world.finish(JobId("a"), Reason.LOST, Progress(epochs=float(attempt)))
    assert status(world, "a").phase is JobPhase.DISPATCHED
    assert status(world, "a").failures == 0


def test_losing_a_node_is_not_counted_against_the_job(world: World) -> None:
    """Users complain of jobs that fail because machines did."""
    assign(world, "a", max_attempts=1)
    slot(world, 1, {"a": (4, 2)})
    world.settle()
    world.tell(NodeLost(world.now_s, NodeName("n1")))
    world.settle()
    assert status(world, "a").phase is JobPhase.DISPATCHED
    slot(world, 2, {"a": (1, 1)})
    world.settle()
    assert status(world, "a").phase is JobPhase.RUNNING
    assert {entry.node for entry in status(world, "a").placement} == {"n2"}


def test_losing_capacity_within_a_slot_shrinks_jobs_before_the_next_slot(world: World) -> None:
    """Promised capacity must never outlive real capacity, not even for part of a slot."""
    assign(world, "a")
    slot(world, 1, {"a": (4, 2)})
    world.settle()
    world.tell(NodeChanged(world.now_s, node("n1", 1)))
    world.settle()
    world.judge()
    assert status(world, "a").phase is JobPhase.RUNNING
    assert status(world, "a").allocation.workers < 4


def test_nothing_on_a_cordoned_node_is_touched_and_nothing_new_comes(world: World) -> None:
    assign(world, "a", "b")
    slot(world, 1, {"a": (2, 1)})
    world.settle()
    before = status(world, "a").placement
    world.tell(NodeChanged(world.now_s, node("n1", 4, schedulable=False)))
    slot(world, 2, {"a": (2, 1), "b": (1, 1)})
    world.settle()
    assert status(world, "a").placement == before
    assert {entry.node for entry in status(world, "b").placement} == {"n2"}


def test_without_the_lease_nothing_new_is_placed_and_nothing_is_stopped(world: World) -> None:
    """A control plane that blinks must not cost anybody a job."""
    assign(world, "a", "b")
    slot(world, 1, {"a": (1, 1)})
    world.settle()
    world.tell(LeaseLost(world.now_s))
    slot(world, 2, {"a": (3, 1), "b": (1, 1)})
    assert not world.inbox
    assert status(world, "a").phase is JobPhase.RUNNING
    world.tell(LeaseRegained(world.now_s))
    slot(world, 3, {"a": (1, 1), "b": (1, 1)})
    world.settle()
    assert status(world, "b").phase is JobPhase.RUNNING


def test_a_restarted_agent_adopts_what_runs_and_restarts_what_is_gone(world: World) -> None:
    """Nothing lost, nothing run twice."""
    assign(world, "a", "b")
    slot(world, 1, {"a": (2, 1), "b": (1, 1)})
    world.settle()
    placement = status(world, "a").placement
    del world.running[JobId("b")]
    world.restart()
    world.settle()
    assert status(world, "a").placement == placement
    assert status(world, "a").attempt == 1
    assert status(world, "b").phase is JobPhase.DISPATCHED
    slot(world, 2)
    world.settle()
    assert status(world, "b").phase is JobPhase.RUNNING
    assert status(world, "b").attempt == 2


def test_news_of_an_attempt_that_is_over_changes_nothing(world: World) -> None:
    """A late exit of the first attempt must not end the second."""
    assign(world, "a")
    slot(world, 1)
    world.settle()
    world.finish(JobId("a"), Reason.LOST)
    slot(world, 2)
    world.settle()
    world.tell(JobExited(world.now_s, JobId("a"), 1, Reason.FINISHED, ""))
    assert status(world, "a").phase is JobPhase.RUNNING
    assert status(world, "a").attempt == 2


def test_an_answer_to_an_older_question_is_ignored(world: World) -> None:
    """A policy that was late must not overrule the slot that came after."""
    assign(world, "a")
    world.tell(SlotStarted(world.now_s, 1))
    late = world.questions.pop()
    world.tell(SlotStarted(world.now_s + 10, 2))
    world.questions = [late]
    world.decide({"a": (1, 1)})
    assert status(world, "a").phase is JobPhase.DISPATCHED


def test_the_reward_of_a_slot_is_each_jobs_share_of_its_epochs(world: World) -> None:
    """DL2's reward: all rewards of a job add up to one."""
    assign(world, "a", epochs=4.0)
    slot(world, 1)
    world.settle()
    world.tell(ProgressReported(world.now_s, JobId("a"), 1, Progress(epochs=1.0)))
    slot(world, 2)
    world.tell(ProgressReported(world.now_s, JobId("a"), 1, Progress(epochs=2.0)))
    world.finish(JobId("a"), progress=Progress(epochs=4.0))
    slot(world, 3)
    assert [reward.progress for reward in world.rewards[-2:]] == [(("a", 0.25),), (("a", 0.75),)]


def test_a_job_past_its_time_limit_is_stopped_with_a_checkpoint(world: World) -> None:
    assign(world, "a", max_runtime_s=15.0)
    slot(world, 1)
    world.settle()
    slot(world, 2)
    slot(world, 3)
    assert isinstance(world.inbox[0], StopJob)
    assert world.inbox[0].checkpoint
    world.settle()
    assert status(world, "a").phase is JobPhase.FAILED
    assert status(world, "a").reason is Reason.TIME_LIMIT


def test_a_waiting_job_says_what_it_waits_for(world: World) -> None:
    """ "Pending" alone is what users complain of most."""
    assign(world, "a", "b", workers=(3, 4), ps=(1, 1))
    slot(world, 1, {"a": (4, 1)})
    world.settle()
    assert status(world, "b").reason is Reason.WAITING_FOR_CAPACITY
    assert "3 cpu" in status(world, "b").message


def test_a_job_that_is_stopped_while_it_grows_keeps_the_room_of_what_it_was_adding() -> None:
    """The tasks of an unfinished resize may already run; who got their place would run out of memory beside them."""
    world = World((node("n1", 4),))
    assign(world, "a", workers=(1, 3), ps=(1, 1))
    assign(world, "b", workers=(1, 1), ps=(1, 1))
    slot(world, 1, {"a": (1, 1)})
    world.settle()
    slot(world, 2, {"a": (3, 1)})
    assert status(world, "a").phase is JobPhase.RESIZING
    world.tell(CancelRequested(world.now_s, JobId("a")))
    slot(world, 3, {"b": (1, 1)})
    assert status(world, "b").phase is JobPhase.DISPATCHED
    world.settle()
    assert status(world, "b").phase is JobPhase.RUNNING


def test_a_policy_that_may_preempt_takes_a_running_jobs_place() -> None:
    world = World((node("n1", 2),), keep_running=False)
    assign(world, "a", "b", workers=(1, 1), ps=(1, 1))
    slot(world, 1, {"a": (1, 1)})
    world.settle()
    slot(world, 2, {"b": (1, 1)})
    assert status(world, "a").phase is JobPhase.PREEMPTING
    world.settle()
    assert status(world, "a").phase is JobPhase.DISPATCHED
    assert status(world, "b").phase is JobPhase.RUNNING


def test_only_the_progress_is_written_while_a_job_just_runs(world: World) -> None:
    """The store holds live state; a write per slot and job, not per report."""
    assign(world, "a")
    slot(world, 1, {"a": (1, 1)})
    world.settle()
    saved = world.tell(ProgressReported(world.now_s, JobId("a"), 1, Progress(epochs=1.0)))
    assert saved == []
    commands = world.tell(SlotStarted(world.now_s + 10, 2))
    assert [command.transition for command in commands if isinstance(command, SaveJob)] == [None]


def test_every_event_has_a_handler_that_was_made_for_it() -> None:
    """The type checker does not look into the table: an event that is forgotten there would end the agent."""
    assert set(_HANDLERS) == set(get_args(Event))
    for kind, handler in _HANDLERS.items():
        assert get_type_hints(handler)["event"] is kind, f"{handler.__name__} is called with a {kind.__name__}"
