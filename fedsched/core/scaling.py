"""Decides the life of one elastic job: who trains, who holds which parameters, and at which step that changes.

The protocol is level-triggered. Every member has one `View`: all that it must know now. Views are numbered; a member
obeys the newest and says which it has seen; a lost one is sent again. Members' reports are levels too ("all steps
below 40 are done"), so losing, repeating or reordering messages costs time and never correctness.

A worker may run a step only below `View.granted` and only under the plan that covers the step. A change of plan gets
a *scaling clock*: the first step of the new plan, always one that nobody has been granted. The view that lets a worker
reach the clock is therefore also the one that shows the new plan: nobody can run past it under the old one, and no
acknowledgement has to be waited for. Checkpoints use the same trick: a step that ends with a checkpoint is announced
before anybody may run it.

Blocks that move between servers without common memory take time, and a step under the new plan cannot end before they
have come. Dense gradients change every block in every step, so a copy made ahead would be out of date at once, and
all of it would have to be sent again at the clock. Such blocks therefore move for good, a part at a time: a resize is
then several switches, each of so many bytes as travel while workers compute, and the last one completes the order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import assert_never

from msgspec.structs import replace

from fedsched.core.blocks import Block, assign, index_of, stage, travelling
from fedsched.core.ids import TaskName
from fedsched.core.job import Role, role_of
from fedsched.core.membership import (
    AnswerScale,
    CheckpointFailed,
    CheckpointWritten,
    Command,
    CompleteCheckpoint,
    End,
    Event,
    ModelDescribed,
    NewcomerLost,
    Phase,
    Plan,
    ScaleRequested,
    Send,
    StopRequested,
    TaskGone,
    TaskReported,
    Tick,
    View,
)
from fedsched.core.record import Record


class ScalingConfig(Record, frozen=True):
    """The limits of one job's protocol."""

    join_s: float = 120.0
    """The first members must be ready within this."""
    stall_s: float = 300.0
    """A job in which no step ends for so long, or whose switch is not complete after so long, has failed."""
    checkpoint_every_s: float = 10.0
    window_s: float = 0.2
    """How far ahead workers are granted steps. Longer saves calls, shorter makes a switch come sooner."""
    window_steps_min: int = 2
    window_steps_max: int = 64
    resend_s: float = 2.0
    """A view that was not seen for so long is sent again."""
    pause_s: float = 0.02
    """A switch for which workers waited longer than this is followed by one that moves half as much, else by one that
    moves `growth` times as much: nobody knows beforehand how fast blocks travel."""
    pause_part: float = 0.05
    """Or longer than such a part of a step: on a machine that is so busy, everything takes longer."""
    growth: float = 4.0
    switches_max: int = 16
    """Of one resize: none moves less than such a part of what travels, and the first one no more."""
    switch_bytes_min: float = 1e6
    """So little travels at once: it would gain nothing in parts."""


@dataclass(slots=True)
class _Member:
    """A task that is connected and ready to work."""

    since_s: float
    seen: int = 0
    done: int = 0
    holds: int = 0
    saved: int = -1
    pause_s: float = 0.0
    shares: bool = False
    view: View | None = None
    """Sent last."""
    sent_s: float = 0.0

    @property
    def told_to_leave(self) -> bool:
        """Such a member ends and never comes back; a later one of the same name is another process."""
        return self.view is not None and self.view.leave


class _Order(Record, frozen=True):
    """A resize that was asked for and not answered."""

    seq: int
    tasks: tuple[TaskName, ...]
    until_s: float


@dataclass(slots=True)
class _Move:
    """A resize whose first switch is committed: all who come have come, and it is not rolled back any more."""

    owners: tuple[TaskName, ...]
    """Of each block, in the end."""
    least_bytes: float
    """That a switch moves, if there is so much left."""
    stage_bytes: float
    """That the next switch moves at most."""
    pause_s: float = 0.0
    """Longest so far."""
    switched_s: float = -math.inf
    """When the last switch was complete."""


@dataclass(slots=True)
class _Pace:
    """How fast steps go, measured over stretches long enough to mean something."""

    time_s: float
    done: int
    step_s: float | None = None

    def measure(self, time_s: float, done: int) -> None:
        """Take note of progress."""
        if done > self.done and time_s - self.time_s >= 0.2:
            self.step_s = (time_s - self.time_s) / (done - self.done)
            self.time_s, self.done = time_s, done


@dataclass(slots=True)
class Scaling:
    """The protocol of one attempt: events in, commands out."""

    tasks: tuple[TaskName, ...]
    """The attempt's first members."""
    time_s: float
    start_step: int = 0
    """Steps that a checkpoint already holds."""
    config: ScalingConfig = field(default_factory=ScalingConfig)

    phase: Phase = Phase.JOINING
    message: str = ""
    plan: Plan | None = None
    next_plan: Plan | None = None
    """Committed and not yet complete: some member may still be on the way to its first step."""
    granted: int = 0
    done: int = 0
    """Steps that are finished for good: every later parameter contains them."""
    checkpoint_step: int = -1
    """Newest complete checkpoint."""
    steps: int = 0
    asynchronous: bool = False

    _blocks: tuple[Block, ...] | None = None
    _members: dict[TaskName, _Member] = field(default_factory=dict)
    _left: dict[TaskName, int] = field(default_factory=dict)
    """Workers that ended after their last step, and how many steps they had done."""
    _dismissed: set[TaskName] = field(default_factory=set)
    """Tasks that must leave, come when they may."""
    _order: _Order | None = None
    _move: _Move | None = None
    """How far the order is carried out; None before its first switch."""
    _waiting: _Order | None = None
    """Newest order that came while a switch was under way."""
    _saves: dict[int, tuple[TaskName, ...]] = field(default_factory=dict)
    """Checkpoints under way, and the servers whose shards they need."""
    _completing: set[int] = field(default_factory=set)
    _stop_step: int | None = None
    _stop_until_s: float = math.inf
    _saved_s: float = 0.0
    _progress_s: float = 0.0
    _pace: _Pace | None = None
    _committed_s: float = math.inf
    """Since when a switch is under way."""
    _views: int = 0
    _out: list[Command] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tasks = tuple(sorted(self.tasks, key=index_of))
        self.granted = self.done = self.start_step
        self._saved_s = self._progress_s = self.time_s
        if self.start_step:
            self.checkpoint_step = self.start_step

    @property
    def ended(self) -> bool:
        """Whether the attempt is over."""
        return self.phase in (Phase.FINISHED, Phase.STOPPED, Phase.FAILED)

    @property
    def reducing(self) -> bool:
        """Whether workers reduce their gradients among themselves, because there are no servers."""
        return all(role_of(task) is Role.WORKER for task in self.tasks)

    @property
    def members(self) -> tuple[TaskName, ...]:
        """Who takes part now."""
        return tuple(sorted(self.plan.tasks, key=index_of)) if self.plan else ()

    @property
    def _last_plan(self) -> Plan | None:
        """The plan of the last steps as far as is known."""
        return self.next_plan or self.plan

    def handle(self, event: Event) -> list[Command]:
        """Take in what happened, say what is to be done."""
        self.time_s = max(self.time_s, event.time_s)
        match event:
            case ModelDescribed():
                self._blocks, self.steps, self.asynchronous = event.blocks, event.steps, event.asynchronous
            case TaskReported():
                self._report(event)
            case TaskGone():
                self._gone(event)
            case NewcomerLost():
                self._lose_newcomer(event)
            case ScaleRequested():
                self._request(event)
            case StopRequested():
                self._stop(event)
            case CheckpointWritten(_, step):
                self._forget_save(step)
                self.checkpoint_step = max(self.checkpoint_step, step)
            case CheckpointFailed(_, step, message):
                self._forget_save(step)
                if step == self.steps and not self.ended:
                    self._end(Phase.FAILED, f"the last checkpoint could not be written: {message}")
            case Tick():
                pass
            case _:
                assert_never(event)
        if not self.ended:
            self._settle()
        self._send_views()
        out, self._out = self._out, []
        return out

    # What events change.

    def _report(self, event: TaskReported) -> None:
        if event.task not in self._members:
            self._members[event.task] = _Member(self.time_s)
            if event.task in self._needed() and self._left.get(event.task, -1) >= self.steps:
                # Its part is done. The job must not wait for this one to do it again, which it never could.
                self._dismissed.add(event.task)
            else:
                self._left.pop(event.task, None)
        member = self._members[event.task]
        member.seen = max(member.seen, event.seen)
        member.holds = max(member.holds, event.holds)
        member.saved = max(member.saved, event.saved)
        member.shares = event.shares
        if event.done >= member.done:
            member.done, member.pause_s = event.done, event.pause_s
        done = self._done_by_all(event.done) if self.plan else 0
        if self.plan and done > self.done:
            self.done, self._progress_s = done, self.time_s
        if self._pace:
            self._pace.measure(self.time_s, self.done)

    def _done_by_all(self, newest: int) -> int:
        """Below this, every step is finished. Synchronous workers finish a step only together."""
        assert self.plan is not None
        if not self.asynchronous:
            return newest
        here = [task for task in self.plan.workers if task in self._members or task in self._left]
        return min((self._done(task) for task in here), default=0)

    def _gone(self, event: TaskGone) -> None:
        trained = self._trained()
        member = self._members.pop(event.task, None)
        if self.ended or (member and member.told_to_leave):
            self._dismissed.discard(event.task)
            if member:
                self._left[event.task] = max(member.done, self._left.get(event.task, 0))
            return
        if not event.error and self.plan is not None:
            if member and role_of(event.task) is Role.WORKER and member.done >= self.steps:
                self._left[event.task] = member.done
                return
            if trained and role_of(event.task) is Role.PS and not self._saves:
                return  # Nobody needs this server any more.
        why = f"{event.task}: {event.error}" if event.error else f"{event.task} ended unexpectedly"
        if event.task in self._needed():
            self._end(Phase.FAILED, why)
        elif self._order and event.task in self._order.tasks:
            self._roll_back(f"{why} while joining")

    def _lose_newcomer(self, event: NewcomerLost) -> None:
        """One that has joined is missed by its stream's end, which also tells what it said last."""
        order = self._order
        if order and not self._move and order.seq == event.seq and event.task in self._missing(order):
            self._roll_back(f"{event.task} ended before it joined: {event.message}")
        elif self._waiting and self._waiting.seq == event.seq and event.task not in self._members:
            waiting, self._waiting = self._waiting, None
            self._answer(waiting, False, f"{event.task} ended before it joined: {event.message}")

    def _trained(self) -> bool:
        """Whether every worker has the final parameters."""
        plan = self._last_plan
        return not self.ended and plan is not None and all(self._done(task) >= self.steps for task in plan.workers)

    def _needed(self) -> set[TaskName]:
        if self.plan is None:
            return set(self.tasks)
        return set(self.plan.tasks) | set(self.next_plan.tasks if self.next_plan else ())

    def _request(self, event: ScaleRequested) -> None:
        order = _Order(event.seq, tuple(sorted(set(event.tasks), key=index_of)), self.time_s + event.deadline_s)
        problem = self._objection(order)
        if problem:
            self._answer(order, False, problem)
            return
        if self.next_plan is not None or self.plan is None:
            if self._waiting:
                self._answer(self._waiting, False, f"order {order.seq} took its place")
            self._waiting = order
            return
        self._take(order)

    def _take(self, order: _Order) -> None:
        if self._order:
            self._roll_back(f"order {order.seq} took its place", keep=order.tasks)
        self._dismissed -= set(order.tasks)
        self._order = order

    def _objection(self, order: _Order) -> str:
        if self.ended:
            return f"the job is over: {self.phase}"
        if self._stop_step is not None:
            return "the job is stopping"
        roles = [role_of(task) for task in order.tasks]
        if Role.WORKER not in roles:
            return "a job needs at least one worker"
        if self.reducing:
            if Role.PS in roles:
                return "the job was started without parameter servers and cannot get any"
            if not self._needed() & set(order.tasks):
                return (
                    "a job without parameter servers needs one worker that stays: the parameters are with the workers"
                )
        elif Role.PS not in roles:
            return "a job that was started with parameter servers needs at least one"
        return ""

    def _assigned(self, servers: tuple[TaskName, ...], before: tuple[TaskName, ...] = ()) -> tuple[TaskName, ...]:
        """The server of each block; without servers every worker has them all."""
        assert self._blocks is not None
        return assign(self._blocks, servers, before) if servers else ()

    def _stop(self, event: StopRequested) -> None:
        if self.ended:
            return
        for order in (self._order, self._waiting):
            if order and self.next_plan is None:
                self._answer(order, False, "the job is stopping")
                self._dismiss(set(order.tasks) - self._needed())
        if self.next_plan is None:
            self._order = self._waiting = self._move = None
        if self.plan is None or not event.checkpoint:
            self._end(Phase.STOPPED, "")
            return
        if self._stop_step is None:
            self._stop_step = min(self.granted + 1, self.steps)
            if self.checkpoint_step < self._stop_step:
                self._save_at(self._stop_step)
        self._stop_until_s = min(self._stop_until_s, self.time_s + event.grace_s)

    # What follows from the new state.

    def _settle(self) -> None:
        if self.phase is Phase.JOINING:
            self._settle_start()
        if self.phase is Phase.TRAINING:
            self._settle_switch()
            self._settle_checkpoints()
            self._settle_end()
        if not self.ended:
            self._grant()
            self._dismiss_strays()

    def _settle_start(self) -> None:
        missing = [task for task in self.tasks if task not in self._members]
        if not missing and self._blocks is not None:
            workers = tuple(task for task in self.tasks if role_of(task) is Role.WORKER)
            servers = tuple(task for task in self.tasks if role_of(task) is Role.PS)
            if not workers:
                self._end(Phase.FAILED, "a job needs at least one worker, and none was started")
                return
            if not servers and self.asynchronous:
                self._end(Phase.FAILED, "workers without parameter servers cannot train asynchronously")
                return
            self.plan = Plan(1, self.start_step, workers, servers, self._assigned(servers))
            self.phase = Phase.TRAINING
            self._progress_s = self._saved_s = self.time_s
            self._pace = _Pace(self.time_s, self.start_step)
            if self._waiting:
                self._order, self._waiting = self._waiting, None
        elif self.time_s - self._progress_s > self.config.join_s:
            self._end(Phase.FAILED, f"{', '.join(missing)} did not join within {self.config.join_s:g} s")

    def _settle_switch(self) -> None:
        if self.next_plan is not None and not self._not_over(self.next_plan):
            self._complete_switch(self.next_plan)
        if self.next_plan is None and (self._order is None or self._move) and self._waiting is not None:
            waiting, self._waiting = self._waiting, None
            self._take(waiting)
        if self._order is None or self.next_plan is not None:
            return
        if self._move and self._saved_s <= self._move.switched_s and self._checkpoint_is_due():
            return  # One checkpoint comes between two switches; the blocks stay where they are for so long.
        missing = self._missing(self._order)
        # A server that is leaving must not take a shard with it that a checkpoint still waits for.
        if not missing and not self._saves:
            self._commit(self._order)
        elif not self._move and self.time_s > self._order.until_s:
            late = f"{', '.join(missing)} did not join" if missing else "the checkpoint under way was not written"
            self._roll_back(f"{late} in time")

    def _missing(self, order: _Order) -> list[TaskName]:
        """Whom the order still waits for."""
        return [t for t in order.tasks if t not in self._members or self._members[t].told_to_leave]

    def _commit(self, order: _Order) -> None:
        assert self.plan is not None
        assert self._blocks is not None
        servers = self._in_order(self.plan.servers, order.tasks, Role.PS)
        owners = self._move.owners if self._move else self._assigned(servers, self.plan.owners)
        if set(order.tasks) == set(self.plan.tasks) and owners == self.plan.owners:
            self._order = None
            self._answer(order, True, "")
            return
        clock = self.granted + max(1, self._window() // 2)
        if clock >= self.steps:
            # A server that has got blocks already is needed to the end, which will be the answer.
            if not self._move:
                self._roll_back(f"the training ends at step {self.steps}, before the switch could be made")
            return
        if not servers and not set(self.plan.workers) & set(order.tasks):
            self._roll_back("no worker that has the parameters would stay")
            return
        together = {task for task, member in self._members.items() if member.shares}
        self._move = self._move or self._begin_move(owners, together)
        if clock + 2 * self._window() < self.steps:  # Otherwise this is the last occasion.
            owners = stage(self._blocks, self.plan.owners, owners, together, self._move.stage_bytes)
        if owners != self._move.owners:
            servers = self.plan.servers + tuple(server for server in servers if server not in self.plan.servers)
        workers = self._in_order(self.plan.workers, order.tasks, Role.WORKER)
        self.next_plan = Plan(self.plan.number + 1, clock, workers, servers, owners)
        self._committed_s = self.time_s

    def _begin_move(self, owners: tuple[TaskName, ...], together: set[TaskName]) -> _Move:
        assert self.plan is not None
        assert self._blocks is not None
        moving = travelling(self.plan.owners, owners, together)
        part = sum(self._blocks[index].size_bytes for index in moving) / self.config.switches_max
        least = max(part, self.config.switch_bytes_min)
        return _Move(owners, least, least)

    def _in_order(self, before: tuple[TaskName, ...], wanted: tuple[TaskName, ...], role: Role) -> tuple[TaskName, ...]:
        """Who stays keeps its place, so the chief changes only when it leaves; who is new comes last."""
        stay = tuple(task for task in before if task in wanted)
        return stay + tuple(task for task in wanted if role_of(task) is role and task not in stay)

    def _not_over(self, plan: Plan) -> list[TaskName]:
        """Whom a switch waits for: to take the step over the clock, to leave, or to have the blocks it shall have."""
        assert self.plan is not None
        stepping = [task for task in plan.workers if self._done(task) <= plan.from_step]
        leaving = [task for task in self.plan.workers if task not in plan.workers]
        staying = [task for task in leaving if self._done(task) < plan.from_step]
        return [*stepping, *staying, *(t for t in plan.servers if t in plan.owners and self._holds(t) < plan.number)]

    def _done(self, task: TaskName) -> int:
        return self._left[task] if task in self._left else self._members[task].done

    def _holds(self, task: TaskName) -> int:
        return self._members[task].holds if task in self._members else 0

    def _complete_switch(self, plan: Plan) -> None:
        assert self.plan is not None
        assert self._order is not None
        assert self._move is not None
        pause_s = max([self._members[task].pause_s for task in plan.workers if task in self._members], default=0.0)
        leaving = set(self.plan.tasks) - set(plan.tasks)
        self._dismiss(leaving)
        self.plan, self.next_plan, self._committed_s = plan, None, math.inf
        if self._waiting and leaving & set(self._waiting.tasks):
            # It was given before they left, so it cannot mean others that come under their names.
            waiting, self._waiting = self._waiting, None
            self._answer(waiting, False, f"{', '.join(sorted(leaving))} left at the switch before")
        move = self._move
        move.pause_s = max(move.pause_s, pause_s)
        if plan.owners == move.owners:
            order, self._order, self._move = self._order, None, None
            self._answer(order, True, "", move.pause_s)
        else:
            step_s = (self._pace.step_s if self._pace else None) or 0.0
            is_short = pause_s <= max(self.config.pause_s, self.config.pause_part * step_s)
            factor = self.config.growth if is_short else 0.5
            move.stage_bytes = max(move.least_bytes, factor * move.stage_bytes)
            move.switched_s = self.time_s

    def _checkpoint_is_due(self) -> bool:
        due = self.time_s - self._saved_s >= self.config.checkpoint_every_s
        return due and not self._saves and self._stop_step is None and self.granted + 1 < self.steps

    def _settle_checkpoints(self) -> None:
        if self._checkpoint_is_due() and self.next_plan is None:
            self._save_at(self.granted + 1)
        if self.granted >= self.steps and self.checkpoint_step < self.steps and self.steps not in self._saves:
            self._save_at(self.steps)
        for step, servers in sorted(self._saves.items()):
            saved = all(task in self._members and self._members[task].saved >= step for task in servers)
            if saved and step not in self._completing:
                self._completing.add(step)
                self._out.append(CompleteCheckpoint(step, servers))

    def _save_at(self, step: int) -> None:
        plan = self._plan_at(step - 1)
        writers = tuple(task for task in plan.servers if task in plan.owners) or plan.workers[:1]
        self._saves.setdefault(step, writers)
        self._saved_s = self.time_s

    def _forget_save(self, step: int) -> None:
        self._saves.pop(step, None)
        self._completing.discard(step)

    def _plan_at(self, step: int) -> Plan:
        assert self.plan is not None
        return self.next_plan if self.next_plan and step >= self.next_plan.from_step else self.plan

    def _settle_end(self) -> None:
        plan = self._last_plan
        assert plan is not None
        if self._stop_step is not None:
            if self._stop_step not in self._saves:
                self._end(Phase.STOPPED, "")
            elif self.time_s > self._stop_until_s:
                self._end(Phase.STOPPED, "no checkpoint could be written within the grace")
        elif self._trained() and self._left.keys() >= set(plan.workers) and not self._saves:
            self._end(Phase.FINISHED, "")
        elif self.done < self.steps and self.time_s - self._progress_s > self.config.stall_s:
            slowest = min(plan.workers, key=lambda task: (self._done(task), index_of(task)))
            self._end(Phase.FAILED, f"no step ended within {self.config.stall_s:g} s; {slowest} is furthest behind")
        elif self.next_plan is not None and self.time_s - self._committed_s > self.config.stall_s:
            missing = ", ".join(self._not_over(self.next_plan))
            within = f"within {self.config.stall_s:g} s"
            self._end(Phase.FAILED, f"the switch at step {plan.from_step} was not complete {within}: {missing}")

    def _grant(self) -> None:
        if self.phase is not Phase.TRAINING:
            return
        limit = self.steps if self._stop_step is None else self._stop_step
        self.granted = max(self.granted, min(self.done + self._window(), limit))
        # The last step always ends with a checkpoint, and who may run it has to know.
        if self.granted >= self.steps > self.checkpoint_step and self.steps not in self._saves:
            self._save_at(self.steps)

    def _window(self) -> int:
        assert self._pace is not None
        steps = round(self.config.window_s / self._pace.step_s) if self._pace.step_s else 0
        # Asynchronous workers are that many steps apart at most, and each needs some of its own under either plan.
        plans = [plan for plan in (self.plan, self.next_plan) if plan]
        each = max(len(plan.workers) for plan in plans) if self.asynchronous else 1
        return each * min(max(steps // each, self.config.window_steps_min), self.config.window_steps_max)

    def _dismiss_strays(self) -> None:
        """Who came and is wanted by no order within the time for joining goes again."""
        wanted = self._needed() | {task for order in (self._order, self._waiting) if order for task in order.tasks}
        for task, member in self._members.items():
            if task not in wanted and self.time_s - member.since_s > self.config.join_s:
                self._dismissed.add(task)

    # Answers and ends.

    def _answer(self, order: _Order, ok: bool, message: str, pause_s: float = 0.0) -> None:
        self._out.append(AnswerScale(order.seq, ok, self.members, pause_s, message))

    def _roll_back(self, message: str, keep: Iterable[TaskName] = ()) -> None:
        assert self._order is not None
        order, self._order, self._move = self._order, None, None
        self._dismiss(set(order.tasks) - self._needed() - set(keep))
        self._answer(order, False, message)

    def _dismiss(self, tasks: set[TaskName]) -> None:
        """Only who is here: a task that comes later may be a new one under an old name."""
        self._dismissed |= tasks & self._members.keys()

    def _end(self, phase: Phase, message: str) -> None:
        self.phase, self.message = phase, message
        for order in (self._order, self._waiting):
            if order:
                self._answer(order, False, f"the job is over: {message or phase}")
        self._order = self._waiting = None
        self._out.append(End(phase, message))

    # Views.

    def _send_views(self) -> None:
        for task in sorted(self._members, key=index_of):
            member = self._members[task]
            view = self._view_of(task, member)
            last = member.view
            if last is not None and view == replace(last, number=0):
                unseen = member.seen < last.number and self.time_s - member.sent_s >= self.config.resend_s
                if not unseen:
                    continue
                view = last
            else:
                self._views += 1
                view = replace(view, number=self._views)
            member.view, member.sent_s = view, self.time_s
            self._out.append(Send(task, view))

    def _view_of(self, task: TaskName, member: _Member) -> View:
        plans = tuple(plan for plan in (self.plan, self.next_plan) if plan is not None and not self.ended)
        worker = role_of(task) is Role.WORKER
        out = self.next_plan is not None and task not in self.next_plan.tasks
        crossed = worker and out and self.next_plan is not None and member.done >= self.next_plan.from_step
        return View(
            number=0,
            plans=plans,
            granted=self.granted if worker else 0,
            saves=tuple(sorted(self._saves)) if worker else (),
            leave=self.ended or task in self._dismissed or crossed or member.told_to_leave,
            message=self.message if self.phase is Phase.FAILED else "",
            finished=worker and self.plan is not None and member.done >= self.steps,
        )
