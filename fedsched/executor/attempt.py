"""Drives one attempt of a job from its first task to the last: starts, joins, resizes, stops, and says how it ended."""

from __future__ import annotations

import logging
import queue
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import assert_never

from fedsched import tracing
from fedsched.core.commands import AdoptJobs, ScaleJob, StartJob, StopJob
from fedsched.core.events import Event, JobAdopted, JobExited, JobScaled, JobStarted, ProgressReported, ScaleFailed
from fedsched.core.ids import NodeName, TaskName
from fedsched.core.job import COORDINATOR, JobSpec, Placement, Reason, TaskPlacement, coordinator_of, members_of
from fedsched.errors import FedschedError
from fedsched.executor import orders, records
from fedsched.executor.backend import TaskBackend
from fedsched.executor.blame import Blame
from fedsched.executor.control import Control, MemberOrder
from fedsched.executor.hearing import Heard
from fedsched.executor.launching import MACHINE_ERRORS, MachineTrouble
from fedsched.executor.orders import Surroundings
from fedsched.executor.records import Attempt, AttemptRecord, CoordinatorRecord, ExitRecord
from fedsched.executor.resizing import Resize
from fedsched.executor.roster import Roster, SeenTask
from fedsched.executor.stopping import Ending
from fedsched.pb.training_pb2 import JobReport, ScaleReply
from fedsched.runtime.ports import Post

TICK_S = 0.1
"""How often tasks are looked at when nothing else happens."""
CULPRIT_S = 5.0
"""How long after a coordinator's complaint the exit of the task that caused it may come."""
SWEEP_S = 30.0
"""Longest wait for what ended tasks left behind."""
STUCK_S = 10.0
"""How often it is told of tasks that do not die of SIGKILL."""
JOIN_MARGIN_S = 2.0
"""How much later than the coordinator the executor gives up on tasks that do not join: the coordinator knows names."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Deadlines:
    """How long things may take."""

    join_s: float = 60.0
    """From a start, until the coordinator listens and until all members train."""
    scale_s: float = 30.0
    """From the order of a resize until the switch."""
    settle_s: float = 30.0
    """From a job's end, as it says itself, until its tasks have ended."""


@dataclass(frozen=True, slots=True)
class Context:
    """What all attempts of a cluster share."""

    post: Post
    clock: Callable[[], float]
    tasks: TaskBackend
    surroundings: Surroundings
    deadlines: Deadlines


@dataclass(frozen=True, slots=True)
class Discard:
    """End the attempt at once and tell nobody: no job is known that it belongs to."""


@dataclass(frozen=True, slots=True)
class _LetGo:
    """Leave the attempt as it is."""


@dataclass(slots=True)
class _Restore:
    """What an adoption found: who is a member, and the answer that settles it where other tasks run."""

    members: tuple[TaskName, ...]
    asked: MemberOrder | None


Mail = ScaleJob | StopJob | AdoptJobs | Discard | _LetGo | JobReport


class AttemptDriver:
    """One attempt and the thread that looks after it.

    Everything but the mailbox is touched by this thread alone. It waits for nothing longer than a tick but for the back
    end to take a task, so that an order to stop is obeyed also while the attempt starts or is resized.

    Args:
        start: the order that begins the attempt; None to take up what an earlier executor left.
        after: the driver of the job's attempt before, whose tasks must be gone first.
    """

    def __init__(
        self,
        context: Context,
        spec: JobSpec,
        files: Attempt,
        *,
        term: int,
        start: StartJob | None = None,
        adopt: AdoptJobs | None = None,
        after: AttemptDriver | None = None,
    ) -> None:
        self.key = (spec.job_id, files.number)
        self.name = f"{spec.job_id}/{files.number}"
        self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
        self._context = context
        self._spec = spec
        self._files = files
        self._term = term
        self._start_order = start
        self._adopting: AdoptJobs | None = adopt
        self._after = after
        self._mail: queue.SimpleQueue[Mail] = queue.SimpleQueue()
        self._tasks = Roster(context.tasks, files)
        self._placement: Placement = ()
        """Of the members; the coordinator stays where it started."""
        self._coordinator: Placement = ()
        """Empty where it was given no place of its own: it runs where the cluster will have it."""
        self._waiting: list[ScaleJob] = []
        self._control: Control | None = None
        self._heard = Heard(self.name, files.result, is_new=start is not None)
        self._blame = Blame(self._heard, self._tasks)
        self._training = False
        self._members_started = False
        self._join_until_s = float("inf")
        self._settle_until_s = float("inf")
        self._complaint_at_s = float("inf")
        self._resize: Resize | None = None
        self._restore: _Restore | None = None
        self._ending: Ending | None = None
        self._silent = False
        self._let_go = False

    def tell(self, mail: Mail) -> None:
        """Hand over an order."""
        self._mail.put(mail)

    def let_go(self) -> None:
        """Stop looking after the attempt; its tasks go on."""
        self._mail.put(_LetGo())

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def is_alive(self) -> bool:
        """Whether the attempt is still looked after."""
        return self._thread.is_alive()

    def join(self, timeout_s: float) -> None:
        """Wait until it no longer is, but not longer than this."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        """Look after the attempt until none of its tasks exists any more."""
        try:
            self._begin()
            while not self._let_go and not self._is_over():
                self._tick()
        except (FedschedError, OSError) as problem:
            self._give_up(_reason_of(problem), _text(problem))
        except Exception as problem:
            _log.exception("a fault of fedsched ended attempt %s", self.name)
            self._give_up(Reason.TASK_KILLED, f"a fault of fedsched ended the attempt: {problem!r}")
        finally:
            if self._control is not None:
                self._control.close()
        if not self._let_go:
            self._conclude()

    def _tick(self) -> None:
        self._read_mail()
        self._tasks.look()
        self._judge()
        if self._ending is not None:
            self._ending.push(self._tasks)
        elif not self._training:
            self._push_start()
        elif self._restore is not None:
            self._push_restore(self._restore)
        elif self._resize is not None:
            self._push_resize(self._resize)
        elif self._waiting:
            self._begin_resize(self._waiting.pop(0))
        self._post_progress()

    def _read_mail(self) -> None:
        try:
            self._take(self._mail.get(timeout=TICK_S))
            while True:
                self._take(self._mail.get_nowait())
        except queue.Empty:
            pass

    def _take(self, mail: Mail) -> None:
        match mail:
            case ScaleJob():
                self._term = mail.term
                self._waiting.append(mail)
            case StopJob():
                self._stop(mail)
            case AdoptJobs():
                self._term = mail.term
                self._adopting = mail
                self._context.tasks.take_over(self._files, mail.term)
                self._answer_adoption()
            case Discard():
                self._silent = True
                self._fail(Reason.LOST, "no job is known that this attempt belongs to")
            case _LetGo():
                self._let_go = True
            case JobReport():
                self._hear(mail)
            case _:
                assert_never(mail)

    def _begin(self) -> None:
        if self._start_order is not None:
            for directory in (self._files.tasks, self._files.logs):
                directory.mkdir(parents=True, exist_ok=True)
        while self._after is not None and self._after.is_alive() and not self._let_go:
            self._read_mail()
        self._after = None
        self._join_until_s = time.monotonic() + self._context.deadlines.join_s
        if self._start_order is None:
            self._take_up()
            return
        if self._ending is not None or self._let_go:
            return
        whole = tuple(sorted(self._start_order.placement))
        self._placement, self._coordinator = members_of(whole), coordinator_of(whole)
        records.write(self._files.order, AttemptRecord(self._spec, whole, self._context.clock()))
        anywhere = TaskPlacement(COORDINATOR, NodeName(""))
        self._start(next(iter(self._coordinator), anywhere), seq=self._start_order.seq)
        # Counted from here: a launcher that had to load first is not the job's fault.
        self._join_until_s = time.monotonic() + self._context.deadlines.join_s

    def _take_up(self) -> None:
        """Find out what an earlier executor left: the tasks on record, and a stop that was under way."""
        ordered = records.read(AttemptRecord, self._files.order)
        whole = ordered.placement if ordered else ()
        self._placement, self._coordinator = members_of(whole), coordinator_of(whole)
        self._tasks.recall()
        if self._adopting is not None:
            self._context.tasks.take_over(self._files, self._term)
        stop = records.read(StopJob, self._files.stop)
        if stop is not None:
            self._stop(stop)

    @property
    def _whole(self) -> Placement:
        """All that runs of the attempt, as its orders and answers name it."""
        return (*self._coordinator, *self._placement)

    def _start(self, entry: TaskPlacement, *, seq: int) -> None:
        """Start a task. Raises StartFailed."""
        order = orders.order(
            self._context.surroundings,
            self._spec,
            self._files,
            entry,
            seq=seq,
            address=self._address(),
            members=tuple(placed.task for placed in self._placement),
        )
        attributes: dict[str, tracing.Value] = {
            "job": self._spec.job_id,
            "attempt": self._files.number,
            "task": order.task,
            "node": order.node,
        }
        with tracing.span("task.start", parent=self._spec.traceparent, attributes=attributes):
            self._tasks[order.task] = SeenTask(self._context.tasks.start(self._term, order))

    def _address(self) -> str:
        """Where this attempt's coordinator listens; empty until it does."""
        found = records.read(CoordinatorRecord, self._files.coordinator)
        coordinator = self._tasks.get(COORDINATOR)
        if found is None or coordinator is None:
            return ""
        # Where a cluster keeps its own names for tasks, it starts each only once, and numbers say nothing.
        return found.address if coordinator.record.handle or found.pid == coordinator.record.pid else ""

    def _push_start(self) -> None:
        if self._control is None:
            address = self._address()
            if address:
                self._control = Control(address, self.name, self.tell)
        if self._control is not None and not self._members_started and self._adopting is None:
            self._members_started = True
            self._join_until_s = time.monotonic() + self._context.deadlines.join_s + JOIN_MARGIN_S
            for entry in self._placement:
                if entry.task not in self._tasks:
                    self._start(entry, seq=self._start_order.seq if self._start_order else 0)
        if time.monotonic() > self._join_until_s:
            self._fail_to_join()

    def _fail_to_join(self) -> None:
        within = f"within {self._context.deadlines.join_s:g} s"
        if self._fail_to_be_placed(within):
            return
        if self._control is None:
            self._fail(Reason.START_FAILED, f"{COORDINATOR} did not begin to listen {within}")
            return
        joined = set(self._heard.report.tasks) if self._heard.report else set()
        missing = [entry.task for entry in self._placement if entry.task not in joined]
        names = ", ".join(missing or [entry.task for entry in self._placement])
        self._fail(
            Reason.START_FAILED,
            f"{names} did not join the job {within}; expected: the script calls fedsched.elastic.join and asks the"
            " session for its first batch by then (executor.start_s_max of the cluster's agent)",
        )

    def _fail_to_be_placed(self, within: str) -> bool:
        """Whether the cluster had no room for a task: not the job's fault, and no failure of its user's."""
        for task, seen in sorted(self._tasks.items()):
            why = self._context.tasks.waiting(seen.record) if seen.exit is None else ""
            if why:
                self._fail(Reason.NODE_LOST, f"the cluster had no place for {task} {within}: {why}")
                return True
        return False

    def _hear(self, report: JobReport) -> None:
        self._heard.take(report)
        if self._heard.is_ending:
            until_s = time.monotonic() + self._context.deadlines.settle_s
            self._settle_until_s = min(self._settle_until_s, until_s)
            if report.phase == JobReport.FAILED:
                self._complaint_at_s = min(self._complaint_at_s, time.monotonic() + CULPRIT_S)
        if report.phase == JobReport.TRAINING and not self._training:
            self._training = True
            if self._start_order is not None or self._members_started:
                self._post(JobStarted(self._context.clock(), self._spec.job_id, self._files.number))
        self._answer_adoption()

    def _post_progress(self) -> None:
        progress = self._heard.news()
        if progress is not None:
            self._post(ProgressReported(self._context.clock(), self._spec.job_id, self._files.number, progress))

    def _answer_adoption(self) -> None:
        """Say what runs, once that is settled: a half-done start is completed, a half-done resize is resolved first."""
        if self._adopting is None or self._heard.report is None or self._ending is not None or self._resize is not None:
            return
        if self._heard.report.phase == JobReport.JOINING:
            self._post_adopted()  # from here on it is a start like any other
        elif self._heard.report.phase == JobReport.TRAINING and self._restore is None:
            members = tuple(sorted(TaskName(task) for task in self._heard.report.tasks))
            # Asked even where they all are members: some may be on their way out, for as long as their blocks travel.
            self._restore = _Restore(members, self._ask(self._adopting, members))

    def _push_restore(self, restore: _Restore) -> None:
        """A task that is no member was starting or leaving when the executor before went: settle it, then answer."""
        if restore.asked is not None:
            reply = self._reply(restore.asked)
            if reply is None:
                return
            if isinstance(reply, ScaleReply):
                restore.members = tuple(sorted(TaskName(task) for task in reply.tasks))
            restore.asked = None
        strangers = [task for task in self._tasks if self._is_stranger(task)]
        if self._tasks.signal(strangers, signal.SIGKILL):
            return
        self._tasks.forget(strangers)
        nodes = {entry.task: entry.node for entry in self._placement}
        nodes |= {task: seen.record.node for task, seen in self._tasks.items()}
        self._placement = tuple(TaskPlacement(task, nodes.get(task, NodeName(""))) for task in restore.members)
        self._restore = None
        self._post_adopted()

    def _post_adopted(self) -> None:
        self._adopting = None
        self._post(JobAdopted(self._context.clock(), self._spec.job_id, self._files.number, self._whole))

    def _begin_resize(self, order: ScaleJob) -> None:
        resize = self._resize = Resize(order, {entry.task for entry in self._placement}, self._tasks)
        moved = self._moved(order)
        if moved:
            resize.roll_back(f"{', '.join(moved)} cannot move to another node while it runs")
            return
        try:
            for entry in sorted(order.placement):
                if entry.task in resize.added:
                    self._start(entry, seq=order.seq)
        except (FedschedError, OSError) as problem:
            resize.roll_back(_text(problem))
            return
        resize.asked = self._ask(order, resize.wanted)

    def _moved(self, order: ScaleJob) -> list[TaskName]:
        """Tasks that would have to run elsewhere from now on."""
        if self._context.tasks.is_this_machine:
            return []
        nodes = {entry.task: entry.node for entry in self._placement}
        return [entry.task for entry in order.placement if nodes.get(entry.task, entry.node) != entry.node]

    def _ask(self, order: ScaleJob | AdoptJobs, members: tuple[TaskName, ...]) -> MemberOrder:
        if self._control is None:
            raise AssertionError("a job that trains has a coordinator that was reached")
        # The coordinator knows one growing number; orders are numbered anew in each term.
        number = (order.term << 32) + order.seq
        return MemberOrder(self._control, number, members, self._context.deadlines.scale_s)

    def _reply(self, asked: MemberOrder) -> ScaleReply | str | None:
        return asked.reply(expected=self._tasks.runs(COORDINATOR) and not self._heard.is_ending)

    def _push_resize(self, resize: Resize) -> None:
        if resize.asked is not None:
            reply = self._reply(resize.asked)
            if reply is None:
                return
            resize.hear(reply, self._spec.grace_s)
        if resize.push():
            self._finish_resize(resize)

    def _finish_resize(self, resize: Resize) -> None:
        self._resize = None
        self._tasks.forget(resize.leaving)
        now_s, job_id, attempt = self._context.clock(), self._spec.job_id, self._files.number
        order = resize.order
        if not resize.failure:
            self._placement = members_of(tuple(sorted(order.placement)))
            for entry in self._placement:
                self._tasks.move(entry.task, entry.node)
            self._post(JobScaled(now_s, job_id, attempt, self._whole, resize.pause_s, order.term, order.seq))
        elif not self._heard.is_ending and self._tasks.runs(COORDINATOR):
            self._post(ScaleFailed(now_s, job_id, attempt, self._whole, resize.failure, order.term, order.seq))
        self._answer_adoption()

    def _judge(self) -> None:
        """Decide what the ends of tasks mean for the attempt; the first task that failed is the cause."""
        if self._adopting is not None and self._heard.report is None and self._tasks.runs(COORDINATOR):
            return  # only the coordinator knows which tasks are members
        ended = [(seen.exit.ended_s, task, seen) for task, seen in self._tasks.items() if seen.exit and not seen.judged]
        for _, task, seen in sorted(ended, key=lambda entry: entry[:2]):
            seen.judged = True
            if seen.exit is not None and self._ending is None:
                self._judge_exit(task, seen.exit)
        now_s = time.monotonic()
        if self._ending is None and now_s > self._complaint_at_s:
            self._fail(*self._blame.as_complained())
        if self._ending is None and now_s > self._settle_until_s:
            self._fail_to_settle()

    def _judge_exit(self, task: TaskName, record: ExitRecord) -> None:
        if (self._resize is not None and self._resize.expects(task, record)) or self._is_stranger(task):
            return
        if record.code == 0:
            # Either the job's end has begun, or the task left too early; time will tell.
            self._settle_until_s = min(self._settle_until_s, time.monotonic() + self._context.deadlines.settle_s)
        elif self._heard.says(JobReport.FINISHED, JobReport.STOPPED):
            pass
        elif self._blame.is_victim(task, record):
            self._complaint_at_s = min(self._complaint_at_s, time.monotonic() + CULPRIT_S)
        else:
            self._fail(*self._blame.explain(task, record))

    def _is_stranger(self, task: TaskName) -> bool:
        """Whether the task is one that an adoption ends: it was starting or leaving and is no member."""
        return self._restore is not None and task not in self._restore.members and task != COORDINATOR

    def _fail_to_settle(self) -> None:
        within = f"within {self._context.deadlines.settle_s:g} s"
        left = [(task, seen.exit) for task, seen in sorted(self._tasks.items()) if seen.exit is not None]
        if self._heard.is_ending or not left:
            running = ", ".join(task for task in sorted(self._tasks) if self._tasks.runs(task))
            self._fail(Reason.LOST, f"{running} did not end {within} after the training")
        else:
            self._fail(*self._blame.explain(*left[0]))

    def _stop(self, order: StopJob) -> None:
        """Obey an order to stop."""
        try:
            records.write(self._files.stop, order)
        except OSError as problem:  # only an adoption would miss it
            _log.warning("cannot take note that %s is to stop: %s", self.name, problem)
        if self._ending is not None:
            self._ending.hasten(order)
            return
        answer = None
        if self._control is not None and self._training and not self._heard.is_ending:
            answer = self._control.stop(order.checkpoint, order.grace_s)
        self._ending = Ending.ordered(order, answer)

    def _fail(self, reason: Reason, message: str) -> None:
        if self._ending is None:
            self._ending = Ending.failed(reason, message)

    def _is_over(self) -> bool:
        begun = self._tasks or self._start_order is None or self._ending is not None
        return bool(begun) and all(seen.exit is not None for seen in self._tasks.values())

    def _give_up(self, reason: Reason, message: str) -> None:
        """Kill whatever is on record: nothing better can be done. Not when the executor was closed meanwhile."""
        while not self._mail.empty():
            self._let_go = isinstance(self._mail.get(), _LetGo) or self._let_go
        if self._let_go:
            return
        self._fail(reason, message)
        self._tasks.recall()
        told_at_s = time.monotonic()
        while self._tasks.signal(self._tasks, signal.SIGKILL):
            time.sleep(TICK_S)
            self._tasks.look()
            if time.monotonic() - told_at_s > STUCK_S:
                told_at_s = time.monotonic()
                _log.warning("tasks of %s do not die of SIGKILL; waiting for them", self.name)

    def _conclude(self) -> None:
        """Nothing of the attempt runs any more: say so, once, and for good."""
        left = [seen.record for seen in self._tasks.values()]
        until_s = time.monotonic() + SWEEP_S
        while self._context.tasks.sweep(self._files, left) and time.monotonic() < until_s:
            time.sleep(TICK_S)
        progress = self._heard.reached()
        given = (self._ending.reason, self._ending.message) if self._ending is not None else None
        reason, message = self._blame.verdict(given)
        message = "; ".join(filter(None, [message, self._heard.remark]))
        event = JobExited(self._context.clock(), self._spec.job_id, self._files.number, reason, message, progress)
        try:
            records.write(self._files.exited, event)
        except OSError as problem:
            _log.warning("cannot record how %s ended: %s", self.name, problem)
        self._context.tasks.forget(left)
        self._post(event)

    def _post(self, event: Event) -> None:
        if not self._silent:
            self._context.post(event)


def _reason_of(problem: FedschedError | OSError) -> Reason:
    """Whether the machine or the job is to blame: only the job's own faults would come again elsewhere and later."""
    of_machine = isinstance(problem, MachineTrouble) or getattr(problem, "errno", None) in MACHINE_ERRORS
    return Reason.NODE_LOST if of_machine else Reason.START_FAILED


def _text(problem: FedschedError | OSError) -> str:
    if isinstance(problem, FedschedError):
        return problem.message
    return f"{problem.filename or 'the job could not be started'}: {problem.strerror}"
