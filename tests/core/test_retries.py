"""What becomes of a job whose attempt has failed: it holds no place, and is tried again later and later."""

from __future__ import annotations

import pytest

from fedsched.core.events import CancelRequested, JobAssigned, JobExited, SlotStarted
from fedsched.core.explain import explain
from fedsched.core.ids import JobId
from fedsched.core.job import JobPhase, JobStatus, Progress, Reason
from fedsched.core.views import Job
from tests.core.test_ranked import Ranked
from tests.core.world import World, dispatched, node, spec

FIRST_S, LONGEST_S = 2.0, 300.0
"""What a scheduler does unless it is told otherwise."""


def assign(world: World, *names: str) -> None:
    for number, name in enumerate(names):
        job = spec(name, submitted_s=float(number), max_attempts=100, workers=(1, 1), ps=(1, 1))
        world.specs[job.job_id], world.statuses[job.job_id] = job, dispatched(job)
        world.tell(JobAssigned(world.now_s, job, world.statuses[job.job_id]))


def slot(world: World, at_s: float) -> set[str]:
    """A slot begins at this time; the jobs that its policy sees."""
    world.now_s = at_s
    world.tell(SlotStarted(at_s, world.scheduler.state.slot + 1))
    if not world.questions:
        return set()
    seen = {str(view.job_id) for view in world.questions[-1].observation.jobs}
    world.decide()
    return seen


def fail(world: World, name: str, reason: Reason = Reason.TASK_KILLED, epochs: float = 0.0) -> float:
    """The attempt ends badly; how long the next one is held back."""
    world.finish(JobId(name), reason, Progress(epochs=epochs))
    retry_s = status(world, name).retry_s
    return 0.0 if retry_s is None else retry_s - world.now_s


def status(world: World, name: str) -> JobStatus:
    return world.statuses[JobId(name)]


def run_until_it_fails(world: World, name: str, reason: Reason = Reason.TASK_KILLED, epochs: float = 0.0) -> float:
    slot(world, max(world.now_s, status(world, name).retry_s or 0.0))
    world.settle()
    assert status(world, name).phase is JobPhase.RUNNING
    return fail(world, name, reason, epochs)


def test_attempts_that_fail_in_a_row_begin_later_and_later_up_to_a_limit() -> None:
    """What fails at once would be started many times a minute, at the cost of everybody's places."""
    world = World((node("n1", 2),))
    assign(world, "a")
    pauses = [run_until_it_fails(world, "a") for _ in range(12)]

    for number, pause_s in enumerate(pauses):
        longest_s = min(FIRST_S * 2**number, LONGEST_S)
        assert longest_s / 2 <= pause_s <= longest_s
    assert status(world, "a").setbacks == 12


def test_a_job_that_is_held_back_keeps_nobody_from_its_place() -> None:
    """A retry that waits on its place wastes what others could use."""
    world = World((node("n1", 2),))
    assign(world, "a", "b")
    slot(world, 1000.0)
    world.settle()
    assert status(world, "b").phase is JobPhase.DISPATCHED, "there is room for one"
    fail(world, "a")

    assert slot(world, world.now_s) == {"b"}, "no policy sees it"
    world.settle()
    assert status(world, "b").phase is JobPhase.RUNNING
    assert slot(world, world.now_s + FIRST_S) == {"a", "b"}


def test_a_job_that_got_further_starts_again_as_after_a_first_failure() -> None:
    """A job that makes progress between two crashes of its machine is not one that cannot work."""
    world = World((node("n1", 2),))
    assign(world, "a")
    for _ in range(5):
        run_until_it_fails(world, "a")

    assert FIRST_S / 2 <= run_until_it_fails(world, "a", epochs=1.0) <= FIRST_S
    assert status(world, "a").setbacks == 1


@pytest.mark.parametrize("reason", [Reason.PREEMPTED, Reason.NODE_LOST])
def test_what_others_ended_while_it_trained_goes_on_at_once(reason: Reason) -> None:
    """Only failures are paid for with waiting."""
    world = World((node("n1", 2),))
    assign(world, "a")
    assert run_until_it_fails(world, "a", reason) == 0.0
    slot(world, world.now_s)
    world.settle()
    assert status(world, "a").phase is JobPhase.RUNNING


def test_a_machine_that_can_start_nothing_is_asked_less_and_less_often_at_nobodys_fault() -> None:
    """A full disk or a full platform would be asked for the same again and again."""
    world = World((node("n1", 2),))
    assign(world, "a")
    pauses = []
    for _ in range(4):
        slot(world, max(world.now_s, status(world, "a").retry_s or 0.0))
        world.inbox.clear()  # the order to start is answered with this
        attempt = status(world, "a").attempt
        world.tell(JobExited(world.now_s, JobId("a"), attempt, Reason.NODE_LOST, "no space left on device"))
        pauses.append((status(world, "a").retry_s or 0.0) - world.now_s)

    assert [FIRST_S * 2**n / 2 <= pause_s <= FIRST_S * 2**n for n, pause_s in enumerate(pauses)] == [True] * 4
    assert status(world, "a").failures == 0


def test_jobs_that_failed_together_do_not_come_back_together_and_always_at_the_same_times() -> None:
    """A node that takes twenty jobs along would be stormed by them; and a journal must replay."""
    pauses = []
    for _ in range(2):
        world = World((node("n1", 16),))
        assign(world, *"abcdef")
        slot(world, 1000.0)
        world.settle()
        pauses.append([fail(world, name) for name in "abcdef"])

    assert len(set(pauses[0])) == 6
    assert pauses[0] == pauses[1]


def test_a_restarted_agent_holds_back_what_the_one_before_did() -> None:
    """Else every restart would start at once what keeps failing."""
    world = World((node("n1", 2),))
    assign(world, "a")
    for _ in range(6):
        run_until_it_fails(world, "a")
    held_until_s = status(world, "a").retry_s
    assert held_until_s is not None

    world.restart()
    world.settle()
    assert slot(world, held_until_s - 0.1) == set()
    assert slot(world, held_until_s) == {"a"}


def test_a_discipline_does_not_rank_what_is_held_back_until_its_time_has_come() -> None:
    """The first in line would block all others for minutes."""
    world = Ranked((node("n1", 1),))
    world.assign("a", max_attempts=9)
    world.assign("b")
    world.next_slot()
    world.settle()
    assert world.running_now() == {"a"}
    world.finish(JobId("a"), Reason.TASK_KILLED)
    retry_s = world.status("a").retry_s
    assert retry_s is not None
    world.now_s = retry_s - 10.5

    world.next_slot()
    world.settle()
    assert world.running_now() == {"b"}
    world.next_slot()
    world.finish(JobId("b"))
    world.next_slot()
    world.settle()
    assert world.running_now() == {"a"}


def test_a_job_that_is_held_back_can_be_cancelled_at_once() -> None:
    """Whoever sees a job fail cancels it; that must not take as long as the pause."""
    world = World((node("n1", 2),))
    assign(world, "a")
    run_until_it_fails(world, "a")
    world.tell(CancelRequested(world.now_s, JobId("a")))

    assert status(world, "a").phase is JobPhase.CANCELLED
    assert slot(world, world.now_s + 60.0) == set()


def test_whoever_asks_is_told_what_failed_and_when_it_is_tried_again() -> None:
    """A job that just sits there looks forgotten."""
    world = World((node("n1", 2),))
    assign(world, "a")
    for _ in range(3):
        pause_s = run_until_it_fails(world, "a")
    job = Job(world.specs[JobId("a")], status(world, "a"))

    told = explain(job, [job], [], world.now_s)
    assert told.reason is Reason.TASK_KILLED
    assert told.message.endswith(f"; tries again in {int(pause_s) + 1} s")
    assert told.next_step == "wait, or read `fedsched logs a`: attempts that fail in a row begin later and later"
    assert "attempts: 3, failed: 3, in a row: 3" in told.evidence
    assert explain(job, [job], [], world.now_s + pause_s).message.endswith("; tries again in the next slot")
