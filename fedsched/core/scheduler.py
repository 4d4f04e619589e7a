"""Decides for one cluster which tasks every job holds: events in, commands out."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from msgspec.structs import replace

from fedsched.core import invariants
from fedsched.core.choosing import Gang, Rooms
from fedsched.core.cluster import Node
from fedsched.core.commands import AdoptJobs, AskPolicy, Command, RewardSlot, SaveJob, ScaleJob, StartJob, StopJob
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
    IllegalTransition,
    JobPhase,
    JobSpec,
    JobStatus,
    Placement,
    Progress,
    Reason,
    TaskPlacement,
    Transition,
    Trigger,
    allocation_of,
    next_phase,
)
from fedsched.core.moving import renumbered, stuck
from fedsched.core.observing import VISIBLE, deferred, observe, observe_some, waiting_reason
from fedsched.core.placement import place
from fedsched.core.ranking import RankedQueue
from fedsched.core.resources import OVERDRAWN
from fedsched.core.state import STORY_MAX, ClusterState, LiveJob, SchedulerConfig

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
        self._ranked = config.ranked
        self._actor = f"agent/{config.cluster}"
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
        return self._advance(event.time_s)

    def _take_job(self, event: JobAssigned) -> list[Command]:
        self._admit(event.time_s, event.spec, event.status)
        return []

    def _change_node(self, event: NodeChanged) -> list[Command]:
        self.state.change_node(event.node)
        return [*self._relieve(event.time_s), *self._advance(event.time_s)]

    def _lose_node(self, event: NodeLost) -> list[Command]:
        self.state.lose_node(event.name, event.time_s)
        return [*self._relieve(event.time_s), *self._advance(event.time_s)]

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
        save = self._move(event.time_s, job, Trigger.STARTED, changed_s=event.time_s)
        return [save, *self._advance(event.time_s)] if self.state.unsettled else [save]

    def _hear_resize(self, event: JobScaled) -> list[Command]:
        return self._finish_resize(event, Reason.NONE, f"paused {event.pause_s:.3f} s")

    def _hear_rollback(self, event: ScaleFailed) -> list[Command]:
        return self._finish_resize(event, Reason.RESIZE_FAILED, event.message)

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
            self._settle(event.time_s, job)
        adopt = AdoptJobs(event.term, self._next_seq(), tuple((job.spec, job.status.attempt) for job in active))
        return [adopt, *self._relieve(event.time_s)]

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
        self._settle(time_s, job)

    def _cancel(self, event: CancelRequested) -> list[Command]:
        time_s, job = event.time_s, self.state.jobs.get(event.job_id)
        if job is None or job.cancelled:
            return []
        job.cancelled = True
        if job.status.phase is JobPhase.DISPATCHED:
            return [self._move(time_s, job, Trigger.CANCELLED, Reason.CANCELLED_BY_USER, finished_s=time_s)]
        if job.status.phase is JobPhase.COMPLETING:
            return []
        return self._stop(time_s, job, JobPhase.CANCELLED, Reason.CANCELLED_BY_USER)

    def _stop(self, time_s: float, job: LiveJob, outcome: JobPhase, reason: Reason, message: str = "") -> list[Command]:
        """Order the job's end; it leads to `outcome` once no task is left."""
        job.stopping_for, job.leaving, job.in_flight, job.target = outcome, job.held, (), ()
        return [
            self._move(time_s, job, Trigger.STOP, reason, message),
            self._stop_command(job, reason, checkpoint=outcome is not JobPhase.CANCELLED),
        ]

    def _preempt(
        self, time_s: float, job: LiveJob, reason: Reason, message: str, target: Placement = ()
    ) -> list[Command]:
        """Stop the job; it waits for its next attempt, in `target` if that is known."""
        job.leaving, job.in_flight, job.target = job.held, (), target
        return [
            self._move(time_s, job, Trigger.PREEMPT, reason, message),
            self._stop_command(job, reason, checkpoint=reason is Reason.PREEMPTED),
        ]

    def _stop_command(self, job: LiveJob, reason: Reason, *, checkpoint: bool) -> StopJob:
        return StopJob(
            self.state.term,
            self._next_seq(),
            job.spec.job_id,
            job.status.attempt,
            reason,
            checkpoint,
            job.spec.grace_s,
        )

    def _adopt(self, event: JobAdopted) -> list[Command]:
        job = self._current(event)
        if job is None or not job.adopting:
            return []
        job.adopting = False
        if job.status.phase in (JobPhase.COMPLETING, JobPhase.PREEMPTING):
            job.status = replace(job.status, placement=event.placement)
            job.leaving = event.placement
            self._settle(event.time_s, job)
            wants_checkpoint = job.status.phase is JobPhase.PREEMPTING or job.stopping_for is JobPhase.FAILED
            return [self._stop_command(job, job.status.reason, checkpoint=wants_checkpoint)]
        job.target = event.placement
        if job.status.phase is JobPhase.RUNNING:
            job.status = replace(job.status, placement=event.placement, term=self.state.term)
            self._settle(event.time_s, job)
            return [SaveJob(job.status, None), *self._relieve(event.time_s), *self._advance(event.time_s)]
        trigger = Trigger.STARTED if job.status.phase is JobPhase.STARTING else Trigger.RESIZED
        save = self._move(event.time_s, job, trigger, message="adopted by a restarted agent", placement=event.placement)
        return [save, *self._relieve(event.time_s), *self._advance(event.time_s)]

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
            command = self._move(event.time_s, job, Trigger.PREEMPTED, reason, message, placement=())
        else:
            command = self._fail_attempt(job, event)
        return [command, *self._advance(event.time_s)] if self.state.unsettled else [command]

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
        return self._move(event.time_s, job, Trigger.RETRY, event.reason, event.message, placement=())

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
                self._settle(time_s, job)

    def _finish(self, event: JobExited, job: LiveJob, trigger: Trigger, reason: Reason, message: str) -> SaveJob:
        state, spec = self.state, job.spec
        done = max(0.0, job.status.progress.epochs - job.slot_epochs)
        state.ended.append((spec.job_id, done / spec.epochs))
        if trigger is Trigger.SUCCEEDED:
            state.finished.append((spec.job_id, sum(state.attained(job, event.time_s).values())))
        return self._move(event.time_s, job, trigger, reason, message, placement=(), finished_s=event.time_s)

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
            kinds = {self.state.nodes[entry.node].accelerator for entry in placement}
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
        return self._stop(time_s, job, JobPhase.FAILED, Reason.TIME_LIMIT, message)

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
        self._forget_plans(JobPhase.PREEMPTING)
        observation = observe(state)
        budget = place(
            observation,
            decision.allocations,
            state.config.keep_running,
            decision.accelerators,
            state.config.placement,
        )
        for view in observation.jobs:
            self._aim(state.jobs[view.job_id], budget.placement(view.job_id))
        commands = self._advance(time_s)
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
                self._aim(job, placements.get(job.spec.job_id, ()))
        return self._advance(time_s)

    def _follow_ranks(self, time_s: float) -> list[Command]:
        """Start whoever is first and fits, stop whoever has to make room."""
        state = self.state
        # What was meant for a job that still waits for tasks to leave is decided anew.
        if state.unsettled:
            self._forget_plans(JobPhase.DISPATCHED, JobPhase.PREEMPTING)
        heads = self.queue.heads(state.jobs)
        if heads:
            rooms = Rooms(state.nodes, state.free_once_settled(), state.config.placement, self._chance)
            starts, stops = self.queue.pass_over(heads, rooms, time_s, preempt=not state.config.keep_running)
            for job, places in starts:
                self._aim(job, places)
            for job in stops:
                self._aim(job, ())
        commands = self._advance(time_s)
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

    def _forget_plans(self, *phases: JobPhase) -> None:
        """Places that an older decision had in mind for jobs which the newest does not know of."""
        for job in self.state.pick(self.state.unsettled):
            if job.status.phase in phases:
                self._aim(job, ())

    def _aim(self, job: LiveJob, target: Placement) -> None:
        job.target = target
        if target == job.status.placement:
            self.state.unsettled.discard(job.spec.job_id)
        else:
            self.state.unsettled.add(job.spec.job_id)

    def _explain(self, job: LiveJob, reason: Reason, message: str) -> list[Command]:
        """Note why the job waits; only a new reason is worth a write."""
        changed = job.status.reason is not reason
        job.status = replace(job.status, reason=reason, message=message)
        return [SaveJob(job.status, None)] if changed else []

    # --- carrying targets out

    def _advance(self, time_s: float) -> list[Command]:
        """Order what the targets want and real capacity allows now; what does not fit waits for tasks to leave."""
        if not self.state.unsettled or not self.state.leased or self.state.unsure:
            return []
        commands: list[Command] = []
        shut_in: list[LiveJob] = []
        for job in self.state.pick(self.state.unsettled):
            if job.in_flight is not None or job.adopting:
                continue
            phase = job.status.phase
            if phase is _DISPATCHED and self._fits_now(job, job.target):
                commands += self._start(time_s, job)
            elif phase is _RUNNING:
                commands += self._resize(time_s, job, shut_in)
        return commands + self._let_out(time_s, shut_in) if shut_in else commands

    def _start(self, time_s: float, job: LiveJob) -> list[Command]:
        status, target = job.status, job.target
        job.in_flight = target
        job.attempt_epochs = status.progress.epochs
        first = status.started_s if status.started_s is not None else time_s
        attempt = status.attempt + 1
        save = self._move(time_s, job, Trigger.PLACED, attempt=attempt, placement=target, started_s=first)
        return [save, StartJob(self.state.term, self._next_seq(), job.spec, attempt, target)]

    def _resize(self, time_s: float, job: LiveJob, shut_in: list[LiveJob]) -> list[Command]:
        """Order what can be done now; a job that can neither move nor shrink goes to `shut_in`."""
        if not job.target:
            return self._preempt(time_s, job, Reason.PREEMPTED, "the policy gave its place to other jobs")
        if self.state.config.rebuild:
            # The whole slot was placed at once, so what is in the way leaves in this instant too.
            return self._scale(time_s, job, job.target)
        stay = tuple(entry for entry in job.status.placement if entry in job.target)
        added = tuple(entry for entry in job.target if entry not in stay)
        if self._fits_now(job, added):
            return self._scale(time_s, job, job.target)
        if stay != job.status.placement and self._is_enough(job, stay):
            # Leave first, so that two jobs which wait for each other's places both get them.
            return self._scale(time_s, job, stay)
        if stay != job.status.placement and not self.state.config.keep_running:
            shut_in.append(job)
        return []

    def _let_out(self, time_s: float, jobs: list[LiveJob]) -> list[Command]:
        """Stop those of these jobs that wait for each other's places; they start again in their new ones."""
        state = self.state
        free = {name: amount for name, amount in state.free_once_settled().items() if state.nodes[name].schedulable}
        commands: list[Command] = []
        for job in stuck(jobs, free):
            target = renumbered(job.target)
            nodes = ", ".join(sorted({entry.node for entry in target}))
            why = f"moves to {nodes}, where others leave for its own place; it starts again there"
            commands += self._preempt(time_s, job, Reason.PREEMPTED, why, target)
        return commands

    def _scale(self, time_s: float, job: LiveJob, placement: Placement, reason: Reason = Reason.NONE) -> list[Command]:
        job.in_flight = placement
        message = f"{job.status.allocation} -> {allocation_of(placement)}"
        save = self._move(time_s, job, Trigger.RESIZE, reason, message)
        job.resize_order = (self.state.term, self._next_seq())
        order = ScaleJob(*job.resize_order, job.spec.job_id, job.status.attempt, placement)
        return [save, order]

    def _fits_now(self, job: LiveJob, added: Placement) -> bool:
        """Whether there is room for new tasks, all of them."""
        if self.state.config.rebuild:
            return True
        free, nodes = self.state.free, self.state.nodes
        for name, amount in job.footprint_of(added):
            node = nodes.get(name)
            if node is None or not node.schedulable or (free[name] - amount) & OVERDRAWN:
                return False
        return True

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
        save = self._move(
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
            self._aim(job, placement)  # try again only when a later slot decides so
        return [save, *self._relieve(time_s), *self._advance(time_s)]

    # --- nodes

    def _relieve(self, time_s: float) -> list[Command]:
        """Take tasks off nodes that are gone or offer less than is promised on them.

        Promised capacity must not outlive real capacity, not even until the next slot: the newest jobs give way.
        """
        if not self.state.gone and not self.state.short:
            return []
        commands: list[Command] = []
        for job in reversed(self.state.ordered()):
            if any(entry.node not in self.state.nodes for entry in job.target):
                self._aim(job, job.settled)  # the next slot finds another place
            if job.status.phase in (JobPhase.STARTING, JobPhase.RUNNING, JobPhase.RESIZING):
                commands += self._vacate(time_s, job)
        return commands

    def _vacate(self, time_s: float, job: LiveJob) -> list[Command]:
        """Take as many of the job's tasks away as their nodes need; all of the job where its minimum would be hurt."""
        lost = sorted({entry.node for entry in job.held if entry.node not in self.state.nodes})
        if lost:
            return self._preempt(time_s, job, Reason.NODE_LOST, f"node {', '.join(lost)} is gone")
        keep = self._what_fits(job)
        if keep == job.settled:
            return []
        failed_before = job.status.reason is Reason.RESIZE_FAILED
        if (
            job.status.phase is JobPhase.RUNNING
            and not job.adopting
            and not failed_before
            and self._is_enough(job, keep)
        ):
            self._aim(job, keep)
            return self._scale(time_s, job, keep, Reason.NODE_LOST)
        return self._preempt(time_s, job, Reason.NODE_LOST, "its nodes offer less than they did")

    def _what_fits(self, job: LiveJob) -> Placement:
        """The job's tasks less those, highest index first, that its nodes are short of."""
        keep = job.settled
        for name in sorted({entry.node for entry in keep} & self.state.short):
            promised, capacity = self.state.settled_on(name), self.state.nodes[name].capacity
            for entry in reversed([entry for entry in keep if entry.node == name]):
                if promised.fits_in(capacity):
                    break
                keep = _without(keep, entry)
                promised = promised - job.spec.demand(entry.role)
        return keep

    def _is_enough(self, job: LiveJob, placement: Placement) -> bool:
        size = allocation_of(placement)
        return size.workers >= job.spec.minimum.workers and size.ps >= job.spec.minimum.ps

    # --- bookkeeping

    def _move(
        self,
        time_s: float,
        job: LiveJob,
        trigger: Trigger,
        reason: Reason = Reason.NONE,
        message: str = "",
        *,
        attempt: int | None = None,
        placement: Placement | None = None,
        resizes: int | None = None,
        started_s: float | None = None,
        changed_s: float | None = None,
        finished_s: float | None = None,
    ) -> SaveJob:
        """Take the job to its next phase; the transition is persisted together with the status.

        What is not given stays as it is.
        """
        state, before = self.state, job.status
        try:
            phase = next_phase(before.job_id, before.phase, trigger)
        except IllegalTransition as problem:
            lines = [f"  {at_s:.3f} slot {slot}: {cause} -> {to} {said}" for at_s, slot, cause, to, said in job.story]
            story = "\n".join(lines)
            raise IllegalTransition(f"{problem}\n{story}") from problem
        status = job.status = replace(
            before,
            phase=phase,
            reason=reason,
            message=message,
            cluster=state.config.cluster,
            attempt=before.attempt if attempt is None else attempt,
            term=state.term,
            seq=before.seq + 1,
            placement=before.placement if placement is None else placement,
            resizes=before.resizes if resizes is None else resizes,
            started_s=before.started_s if started_s is None else started_s,
            changed_s=before.changed_s if changed_s is None else changed_s,
            finished_s=before.finished_s if finished_s is None else finished_s,
        )
        job.story.append((time_s, state.slot, trigger, phase, message))
        if len(job.story) > STORY_MAX:
            del job.story[0]
        settled = status.placement if job.in_flight is None else job.in_flight
        if phase in TERMINAL:
            state.dismiss(job, time_s)
            if self._ranked:
                self.queue.forget(before.job_id, time_s)
        else:
            state.account(job, time_s)
            if self._ranked:
                self.queue.follow(job, time_s)
        transition = Transition(
            status.seq,
            time_s,
            self._actor,
            before.job_id,
            status.attempt,
            state.term,
            before.phase,
            phase,
            reason,
            message,
            allocation_of(settled),
            job.spec.traceparent,
        )
        return SaveJob(status, transition)

    def _settle(self, time_s: float, job: LiveJob) -> None:
        """What the job holds, wants or waits for may have changed."""
        self.state.account(job, time_s)
        if self._ranked:
            self.queue.follow(job, time_s)

    def _next_seq(self) -> int:
        self.state.seq += 1
        return self.state.seq


def _without(placement: Placement, gone: TaskPlacement) -> Placement:
    return tuple(entry for entry in placement if entry != gone)


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
