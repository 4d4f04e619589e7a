"""Decides for one cluster which tasks every job holds: events in, commands out."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from msgspec.structs import replace

from fedsched.core import invariants
from fedsched.core.choosing import Gang, Rooms
from fedsched.core.cluster import Node
from fedsched.core.commands import AdoptJobs, AskPolicy, Command, RewardSlot, SaveJob
from fedsched.core.decision import Decision, SpeedSample
from fedsched.core.events import (
    CancelRequested,
    Event,
    JobAdopted,
    JobAssigned,
    JobExited,
    JobScaled,
    JobStarted,
    LeaseLost,
    LeaseRegained,
    NodeChanged,
    NodeLost,
    PolicyDecided,
    ProgressReported,
    ScaleFailed,
    SlotStarted,
    TermTaken,
)
from fedsched.core.ids import stream
from fedsched.core.job import (
    ACTIVE,
    TERMINAL,
    JobPhase,
    JobSpec,
    JobStatus,
    Placement,
    Progress,
    Reason,
    Trigger,
    members_of,
)
from fedsched.core.observing import VISIBLE, deferred, observe, observe_some, waiting_reason
from fedsched.core.orders import Orders
from fedsched.core.placement import place
from fedsched.core.ranking import RankedQueue
from fedsched.core.state import ClusterState, LiveJob, SchedulerConfig

BLAMELESS = frozenset({Reason.NODE_LOST, Reason.PREEMPTED})
"""Bad ends of an attempt that are not counted against the job. Being lost is one too, if the attempt got further."""
LIKELY_TO_REPEAT = frozenset({Reason.USER_ERROR, Reason.START_FAILED})
"""Bad ends that another attempt would only repeat, when this one got nowhere."""


_DISPATCHED, _STARTING, _RUNNING = JobPhase.DISPATCHED, JobPhase.STARTING, JobPhase.RUNNING
_COMPLETING, _PREEMPTING = JobPhase.COMPLETING, JobPhase.PREEMPTING
_FINISHED = Reason.FINISHED
"""To look a member up in its enum takes longer than to compare it, and every event compares some."""

News = JobStarted | JobScaled | ScaleFailed | ProgressReported | JobExited | JobAdopted
"""What the executor says of one attempt of a job."""


class Scheduler:
    """The core of a cluster's agent and of a simulated cluster.

    Args:
        config: how it behaves.
        nodes: the cluster's nodes at the start.
        check: look at the invariants of all that an event touches, after every event (tests, `--check`).
    """

    def __init__(self, config: SchedulerConfig, nodes: tuple[Node, ...], *, check: bool = False) -> None:
        self.state = ClusterState(config, {node.name: node for node in sorted(nodes, key=lambda node: node.name)})
        self.queue = RankedQueue()
        self._ranked_by: Decision | None = None
        """The newest answer with ranks, or for want of them."""
        self._invariants = invariants.Invariants(self.state) if check else None
        self._orders = Orders(self.state, self.queue)
        self._chance = stream(config.seed, f"placement/{config.cluster}")

    def handle(self, event: Event) -> list[Command]:
        """Take one event in; return what is to be done because of it, in order.

        Raises:
            IllegalTransition, BrokenInvariant: a fault of ours; the process must stop.
        """
        kind = type(event)
        if not self.state.term and kind not in _BEFORE_THE_FIRST_TERM:
            return []
        commands = _HANDLERS[kind](self, event)
        if self._invariants is not None:
            self._invariants.after(event, commands)
        return commands

    def verify(self) -> None:
        """Look at all invariants of the whole state, if they are looked at at all.

        Raises:
            BrokenInvariant: a fault of ours.
        """
        if self._invariants is not None:
            self._invariants.everything()

    # --- what the store, the controller and the nodes say

    def _lose_lease(self, event: LeaseLost) -> list[Command]:
        self.state.leased = False
        return []

    def _regain_lease(self, event: LeaseRegained) -> list[Command]:
        self.state.leased = True
        return self._orders.advance(event.time_s)

    def _take_job(self, event: JobAssigned) -> list[Command]:
        self._admit(event.time_s, event.spec, event.status)
        return []

    def _change_node(self, event: NodeChanged) -> list[Command]:
        self.state.change_node(event.node)
        return [*self._orders.relieve(event.time_s), *self._orders.advance(event.time_s)]

    def _lose_node(self, event: NodeLost) -> list[Command]:
        self.state.lose_node(event.name, event.time_s)
        return [*self._orders.relieve(event.time_s), *self._orders.advance(event.time_s)]

    # --- what the executor says

    def _current(self, event: News) -> LiveJob | None:
        """The job that the news is about; None if it is of an attempt that is over."""
        job = self.state.jobs.get(event.job_id)
        if job is None:
            return None
        status = job.status
        return job if status.attempt == event.attempt and status.phase in ACTIVE else None

    def _hear_progress(self, event: ProgressReported) -> list[Command]:
        job = self._current(event)
        if job is not None:
            self._note_progress(event.time_s, job, event.progress)
        return []

    def _hear_start(self, event: JobStarted) -> list[Command]:
        job = self._current(event)
        if job is None or job.status.phase is not _STARTING:
            return []
        job.in_flight = None
        save = self._orders.move(event.time_s, job, Trigger.STARTED, changed_s=event.time_s)
        return [save, *self._orders.advance(event.time_s)] if self.state.unsettled else [save]

    def _hear_resize(self, event: JobScaled) -> list[Command]:
        return self._finish_resize(event, Reason.NONE, f"paused {event.pause_s:.3f} s")

    def _hear_rollback(self, event: ScaleFailed) -> list[Command]:
        return self._finish_resize(event, Reason.RESIZE_FAILED, event.message)

    def _finish_resize(self, event: JobScaled | ScaleFailed, reason: Reason, message: str) -> list[Command]:
        job, time_s, placement = self._current(event), event.time_s, event.placement
        if job is None or job.status.phase is not JobPhase.RESIZING:
            return []  # an end was ordered meanwhile; the tasks are counted when they are gone
        if event.seq and (event.term, event.seq) != job.resize_order:
            return []  # an older order may have wanted, or have failed to leave, the very same places
        expected = job.status.placement if reason is Reason.RESIZE_FAILED else job.in_flight
        if job.adopting or placement != expected:
            return []  # an answer to an older order, or one that the adoption will confirm
        grew = placement != job.status.placement
        job.in_flight = None
        save = self._orders.move(
            time_s,
            job,
            Trigger.RESIZED,
            reason,
            message,
            placement=placement,
            resizes=job.status.resizes + grew,
            changed_s=time_s,
        )
        if reason is Reason.RESIZE_FAILED:
            self._orders.aim(job, placement)  # try again only when a later slot decides so
        return [save, *self._orders.relieve(time_s), *self._orders.advance(time_s)]

    # --- arrivals and departures

    def _take_up(self, event: TermTaken) -> list[Command]:
        self.state.term = event.term
        self.state.seq = 0
        self.state.leased = True
        for spec, status in event.jobs:
            self._admit(event.time_s, spec, status)
        active = [job for job in self.state.ordered() if job.status.phase in ACTIVE]
        for job in active:
            job.adopting = True
            if job.status.phase in (JobPhase.COMPLETING, JobPhase.PREEMPTING):
                job.in_flight, job.leaving, job.target = (), job.status.placement, ()
                ends_failed = job.status.reason is Reason.TIME_LIMIT
                job.stopping_for = JobPhase.FAILED if ends_failed else JobPhase.CANCELLED
            self._orders.settle(event.time_s, job)
        adopt = AdoptJobs(event.term, self._orders.next_seq(), tuple((job.spec, job.status.attempt) for job in active))
        return [adopt, *self._orders.relieve(event.time_s)]

    def _admit(self, time_s: float, spec: JobSpec, status: JobStatus) -> None:
        state = self.state
        if spec.job_id in state.jobs or status.phase in TERMINAL:
            return
        job = LiveJob(
            spec,
            status,
            arrived_slot=max(0, state.slot),
            number=state.arrivals,
            target=status.placement,
            slot_epochs=status.progress.epochs,
        )
        state.arrivals += 1
        state.elastic += job.elastic
        state.jobs[spec.job_id] = job
        if spec.max_runtime_s is not None:
            state.limited.add(spec.job_id)
        if status.retry_s is not None:
            state.held_back.add(spec.job_id)
        self._orders.settle(time_s, job)

    def _cancel(self, event: CancelRequested) -> list[Command]:
        time_s, job = event.time_s, self.state.jobs.get(event.job_id)
        if job is None or job.cancelled:
            return []
        job.cancelled = True
        if job.status.phase is JobPhase.DISPATCHED:
            return [self._orders.move(time_s, job, Trigger.CANCELLED, Reason.CANCELLED_BY_USER, finished_s=time_s)]
        if job.status.phase is JobPhase.COMPLETING:
            return []
        return self._orders.stop(time_s, job, JobPhase.CANCELLED, Reason.CANCELLED_BY_USER)

    def _adopt(self, event: JobAdopted) -> list[Command]:
        job = self._current(event)
        if job is None or not job.adopting:
            return []
        job.adopting = False
        if job.status.phase in (JobPhase.COMPLETING, JobPhase.PREEMPTING):
            job.status = replace(job.status, placement=event.placement)
            job.leaving = event.placement
            self._orders.settle(event.time_s, job)
            wants_checkpoint = job.status.phase is JobPhase.PREEMPTING or job.stopping_for is JobPhase.FAILED
            return [self._orders.stop_command(job, job.status.reason, checkpoint=wants_checkpoint)]
        job.target = event.placement
        if job.status.phase is JobPhase.RUNNING:
            job.status = replace(job.status, placement=event.placement, term=self.state.term)
            self._orders.settle(event.time_s, job)
            return [SaveJob(job.status, None), *self._orders.relieve(event.time_s), *self._orders.advance(event.time_s)]
        trigger = Trigger.STARTED if job.status.phase is JobPhase.STARTING else Trigger.RESIZED
        save = self._orders.move(
            event.time_s, job, trigger, message="adopted by a restarted agent", placement=event.placement
        )
        return [save, *self._orders.relieve(event.time_s), *self._orders.advance(event.time_s)]

    def _end_attempt(self, event: JobExited) -> list[Command]:
        job = self._current(event)
        if job is None:
            return []
        if event.progress is not None:
            self._note_progress(event.time_s, job, event.progress)
        phase = job.status.phase
        job.adopting, job.in_flight, job.leaving = False, None, ()
        if phase is not _PREEMPTING:
            job.target = ()
        if event.reason is _FINISHED:
            command = self._finish(event, job, Trigger.SUCCEEDED, _FINISHED, event.message)
        elif phase is _COMPLETING:
            trigger = Trigger.FAILED if job.stopping_for is JobPhase.FAILED else Trigger.CANCELLED
            command = self._finish(event, job, trigger, job.status.reason, job.status.message)
        elif phase is _PREEMPTING:
            reason, message = job.status.reason, job.status.message
            command = self._orders.move(event.time_s, job, Trigger.PREEMPTED, reason, message, placement=())
        else:
            command = self._fail_attempt(job, event)
        return [command, *self._orders.advance(event.time_s)] if self.state.unsettled else [command]

    def _fail_attempt(self, job: LiveJob, event: JobExited) -> SaveJob:
        gained = job.status.progress.epochs > job.attempt_epochs
        blameless = event.reason in BLAMELESS or (event.reason is Reason.LOST and gained)
        failures = job.status.failures + (not blameless)
        # What could not even be started would mostly meet the same again, whoever is to blame.
        repeats = not blameless or job.status.phase is JobPhase.STARTING
        setbacks = (1 if gained else job.status.setbacks + 1) if repeats else 0
        job.status = replace(job.status, failures=failures, setbacks=setbacks)
        if event.reason in LIKELY_TO_REPEAT and not gained:
            return self._finish(event, job, Trigger.FAILED, event.reason, event.message)
        if failures >= job.spec.max_attempts:
            message = f"{failures} attempts failed, as many as allowed; the last: {event.reason.value}: {event.message}"
            reason = Reason.LOST if event.reason is Reason.LOST else Reason.ATTEMPTS_EXHAUSTED
            return self._finish(event, job, Trigger.FAILED, reason, message)
        if setbacks:
            job.status = replace(job.status, retry_s=event.time_s + self._pause_s(job.status))
            self.state.held_back.add(job.spec.job_id)
        return self._orders.move(event.time_s, job, Trigger.RETRY, event.reason, event.message, placement=())

    def _pause_s(self, status: JobStatus) -> float:
        """How long the next attempt is held back. Drawn, so that jobs which failed together do not come together."""
        config = self.state.config
        longest_s = min(config.retry_first_s * 2.0 ** min(status.setbacks - 1, 30), config.retry_max_s)
        # Of the attempt and not of what was drawn before: the same after a restart.
        return longest_s * (1.0 + stream(config.seed, f"retry/{status.job_id}/{status.attempt}").random()) / 2

    def _release(self, time_s: float) -> None:
        """Let those be seen again whose time for another attempt has come."""
        for job in self.state.pick(self.state.held_back):
            if job.status.retry_s is not None and job.status.retry_s <= time_s:
                job.status = replace(job.status, retry_s=None)
                self.state.held_back.discard(job.spec.job_id)
                self._orders.settle(time_s, job)

    def _finish(self, event: JobExited, job: LiveJob, trigger: Trigger, reason: Reason, message: str) -> SaveJob:
        state, spec = self.state, job.spec
        done = max(0.0, job.status.progress.epochs - job.slot_epochs)
        state.ended.append((spec.job_id, done / spec.epochs))
        if trigger is Trigger.SUCCEEDED:
            state.finished.append((spec.job_id, sum(state.attained(job, event.time_s).values())))
        return self._orders.move(event.time_s, job, trigger, reason, message, placement=(), finished_s=event.time_s)

    # --- slots

    def _start_slot(self, event: SlotStarted) -> list[Command]:
        state, time_s = self.state, event.time_s
        commands: list[Command] = []
        if state.slot >= 0:
            commands.append(self._measure(time_s))
        if state.progressed:
            for job in state.pick(state.progressed):
                job.slot_epochs = job.status.progress.epochs
                commands.append(SaveJob(job.status, None))
            state.progressed.clear()
        if state.limited:
            for job in state.pick(state.limited):
                commands += self._enforce_time_limit(time_s, job)
        state.slot, state.slot_started_s = event.slot, time_s
        if state.held_back:
            self._release(time_s)
        if state.leased and state.jobs:
            commands += self._decide(time_s)
        return commands

    def _measure(self, time_s: float) -> RewardSlot:
        """Close the slot: what each job did in it, and how fast it was with what it held."""
        state = self.state
        elapsed_s = time_s - state.slot_started_s
        progress, state.ended = state.ended, []
        for job_id in state.progressed:
            job = state.jobs[job_id]
            done = job.status.progress.epochs - job.slot_epochs
            if done <= 0 or elapsed_s <= 0:
                continue
            progress.append((job_id, done / job.spec.epochs))
            if job.steady_since_s is not None and job.steady_slot < state.slot:
                size = job.status.allocation
                kind = self._kind_under(job.status.placement)
                job.speeds.pop((size, kind), None)
                job.speeds[size, kind] = SpeedSample(size.workers, size.ps, done / elapsed_s, kind)
        return RewardSlot(state.slot, tuple(sorted(progress)))

    def _kind_under(self, placement: Placement) -> str:
        """Accelerator type of the nodes that tasks run on; empty if they differ."""
        kinds = self.state.kinds
        if len(kinds) > 1:
            kinds = {self.state.nodes[entry.node].accelerator for entry in members_of(placement)}
        return next(iter(kinds)) if len(kinds) == 1 else ""

    def _note_progress(self, time_s: float, job: LiveJob, progress: Progress) -> None:
        before = job.status.progress
        worries = progress.idle_s != before.idle_s or progress.complaint != before.complaint
        if progress.epochs != before.epochs or worries:
            self.state.progressed.add(job.spec.job_id)
        job.status = replace(job.status, progress=progress)
        job.reported_s = time_s

    def _enforce_time_limit(self, time_s: float, job: LiveJob) -> list[Command]:
        limit_s, started_s = job.spec.max_runtime_s, job.status.started_s
        running = job.status.phase in (JobPhase.STARTING, JobPhase.RUNNING, JobPhase.RESIZING)
        if limit_s is None or started_s is None or not running or time_s - started_s <= limit_s:
            return []
        message = f"ran for {time_s - started_s:.0f} s; its limit is {limit_s:.0f} s"
        return self._orders.stop(time_s, job, JobPhase.FAILED, Reason.TIME_LIMIT, message)

    def _decide(self, time_s: float) -> list[Command]:
        """Ask the policy, or do what follows from the ranks that it has given."""
        state = self.state
        # Where every slot is placed anew nobody keeps his places, whatever his rank.
        state.asked_ranks = state.config.ranked and not state.config.rebuild and not state.elastic
        if not state.asked_ranks:
            observation = observe(state)
            if not observation.jobs:
                return []
            state.asked_slot = state.slot
            state.finished.clear()
            config = state.config
            return [AskPolicy(observation, config.keep_running, rebuild=config.rebuild, placement=config.placement)]
        asked = self.queue.to_ask()
        if not asked:
            return self._follow_ranks(time_s)
        state.asked_slot = state.slot
        question = AskPolicy(observe_some(state, asked), state.config.keep_running, ranks=True)
        state.finished.clear()
        return [question]

    def _carry_out(self, event: PolicyDecided) -> list[Command]:
        state, time_s, decision = self.state, event.time_s, event.decision
        if decision.slot != state.asked_slot:
            return []  # the answer to an older question
        state.asked_slot = None
        if state.asked_ranks:
            self._ranked_by = decision
            if decision.ranking is not None:
                self.queue.learn(decision.ranking, state.jobs, time_s)
            return self._follow_ranks(time_s)
        if state.config.rebuild:
            return self._rebuild(time_s, decision)
        self._orders.forget_plans(JobPhase.PREEMPTING)
        observation = observe(state)
        budget = place(
            observation,
            decision.allocations,
            state.config.keep_running,
            decision.accelerators,
            state.config.placement,
        )
        for view in observation.jobs:
            self._orders.aim(state.jobs[view.job_id], budget.placement(view.job_id))
        commands = self._orders.advance(time_s)
        if state.config.explain:
            free, chosen = budget.free(), deferred(decision)
            for job in state.waiting():
                fits = partial(budget.would_fit, job.spec.job_id)
                commands += self._explain(job, *waiting_reason(job, free, fits, chosen))
        return commands

    def _rebuild(self, time_s: float, decision: Decision) -> list[Command]:
        """Take the budget's own places over; it has begun with an empty cluster as every slot does."""
        placements = dict(decision.placements)
        for job in self.state.ordered():
            if job.status.phase in VISIBLE:
                self._orders.aim(job, placements.get(job.spec.job_id, ()))
        return self._orders.advance(time_s)

    def _follow_ranks(self, time_s: float) -> list[Command]:
        """Start whoever is first and fits, stop whoever has to make room."""
        state = self.state
        # What was meant for a job that still waits for tasks to leave is decided anew.
        if state.unsettled:
            self._orders.forget_plans(JobPhase.DISPATCHED, JobPhase.PREEMPTING)
        heads = self.queue.heads(state.jobs)
        if heads:
            rooms = Rooms(state.nodes, state.free_once_settled(), state.config.placement, self._chance)
            starts, stops = self.queue.pass_over(heads, rooms, time_s, preempt=not state.config.keep_running)
            for job, places in starts:
                self._orders.aim(job, places)
            for job in stops:
                self._orders.aim(job, ())
        commands = self._orders.advance(time_s)
        if state.config.explain:
            commands += self._explain_ranked()
        return commands

    def _explain_ranked(self) -> list[Command]:
        """Say of each job that waits why it does; jobs of one demand fit or do not fit together."""
        state, waiting = self.state, self.state.waiting()
        if not waiting or self._ranked_by is None:
            return []
        rooms = Rooms(state.nodes, state.free_once_settled(), state.config.placement, self._chance)
        for job in waiting:
            rooms.take([job.footprint_of(job.target)])
        free, chosen = rooms.left(), deferred(self._ranked_by)
        fits: dict[Gang, bool] = {}
        commands: list[Command] = []
        for job in waiting:
            gang = self.queue.gang_of(job)
            if gang not in fits:
                fits[gang] = rooms.would_hold(gang)
            commands += self._explain(job, *waiting_reason(job, free, partial(fits.__getitem__, gang), chosen))
        return commands

    def _explain(self, job: LiveJob, reason: Reason, message: str) -> list[Command]:
        """Note why the job waits; only a new reason is worth a write."""
        changed = job.status.reason is not reason
        job.status = replace(job.status, reason=reason, message=message)
        return [SaveJob(job.status, None)] if changed else []


_BEFORE_THE_FIRST_TERM = (TermTaken, NodeChanged, NodeLost)
_HANDLERS: dict[type[Event], Callable[[Scheduler, Any], list[Command]]] = {
    TermTaken: Scheduler._take_up,
    LeaseLost: Scheduler._lose_lease,
    LeaseRegained: Scheduler._regain_lease,
    JobAssigned: Scheduler._take_job,
    CancelRequested: Scheduler._cancel,
    SlotStarted: Scheduler._start_slot,
    PolicyDecided: Scheduler._carry_out,
    NodeChanged: Scheduler._change_node,
    NodeLost: Scheduler._lose_node,
    JobStarted: Scheduler._hear_start,
    JobScaled: Scheduler._hear_resize,
    ScaleFailed: Scheduler._hear_rollback,
    ProgressReported: Scheduler._hear_progress,
    JobExited: Scheduler._end_attempt,
    JobAdopted: Scheduler._adopt,
}
"""One for every kind of event; a table, because a chain of patterns costs as much as handling the event."""
