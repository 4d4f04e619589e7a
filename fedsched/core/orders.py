"""Gives a cluster's orders: brings what jobs hold in line with what they are meant to hold, within real capacity."""

from __future__ import annotations

from msgspec.structs import replace

from fedsched.core.commands import Command, SaveJob, ScaleJob, StartJob, StopJob
from fedsched.core.job import (
    TERMINAL,
    IllegalTransition,
    JobPhase,
    Placement,
    Reason,
    TaskPlacement,
    Transition,
    Trigger,
    allocation_of,
    coordinator_of,
    next_phase,
)
from fedsched.core.moving import renumbered, stuck
from fedsched.core.ranking import RankedQueue
from fedsched.core.resources import OVERDRAWN
from fedsched.core.state import STORY_MAX, ClusterState, LiveJob

_DISPATCHED, _RUNNING = JobPhase.DISPATCHED, JobPhase.RUNNING
"""To look a member up in its enum takes longer than to compare it."""


class Orders:
    """Orders to the executor, each with the transition that is persisted before it goes out.

    Args:
        state: of the cluster; jobs' targets are what is carried out.
        queue: follows every job's phase while the policy is a discipline.
    """

    def __init__(self, state: ClusterState, queue: RankedQueue) -> None:
        self._state = state
        self._queue = queue
        self._ranked = state.config.ranked
        self._actor = f"agent/{state.config.cluster}"

    # --- carrying targets out

    def advance(self, time_s: float) -> list[Command]:
        """Order what the targets want and real capacity allows now; what does not fit waits for tasks to leave."""
        if not self._state.unsettled or not self._state.leased or self._state.unsure:
            return []
        commands: list[Command] = []
        shut_in: list[LiveJob] = []
        for job in self._state.pick(self._state.unsettled):
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
        save = self.move(time_s, job, Trigger.PLACED, attempt=attempt, placement=target, started_s=first)
        return [save, StartJob(self._state.term, self.next_seq(), job.spec, attempt, target)]

    def _resize(self, time_s: float, job: LiveJob, shut_in: list[LiveJob]) -> list[Command]:
        """Order what can be done now; a job that can neither move nor shrink goes to `shut_in`."""
        if not job.target:
            return self._preempt(time_s, job, Reason.PREEMPTED, "the policy gave its place to other jobs")
        if self._state.config.rebuild:
            # The whole slot was placed at once, so what is in the way leaves in this instant too.
            return self._scale(time_s, job, job.target)
        stay = tuple(entry for entry in job.status.placement if entry in job.target)
        added = tuple(entry for entry in job.target if entry not in stay)
        if self._fits_now(job, added):
            return self._scale(time_s, job, job.target)
        if stay != job.status.placement and self._is_enough(job, stay):
            # Leave first, so that two jobs which wait for each other's places both get them.
            return self._scale(time_s, job, stay)
        if stay != job.status.placement and not self._state.config.keep_running:
            shut_in.append(job)
        return []

    def _let_out(self, time_s: float, jobs: list[LiveJob]) -> list[Command]:
        """Stop those of these jobs that wait for each other's places; they start again in their new ones."""
        state = self._state
        free = {name: amount for name, amount in state.free_once_settled().items() if state.nodes[name].schedulable}
        commands: list[Command] = []
        for job in stuck(jobs, free):
            target = renumbered(job.target)
            nodes = ", ".join(sorted({entry.node for entry in target}))
            why = f"moves to {nodes}, where others leave for its own place; it starts again there"
            commands += self._preempt(time_s, job, Reason.PREEMPTED, why, target)
        return commands

    def _fits_now(self, job: LiveJob, added: Placement) -> bool:
        """Whether there is room for new tasks, all of them."""
        if self._state.config.rebuild:
            return True
        free, nodes = self._state.free, self._state.nodes
        for name, amount in job.footprint_of(added):
            node = nodes.get(name)
            if node is None or not node.schedulable or (free[name] - amount) & OVERDRAWN:
                return False
        return True

    def _scale(self, time_s: float, job: LiveJob, placement: Placement, reason: Reason = Reason.NONE) -> list[Command]:
        job.in_flight = placement
        message = f"{job.status.allocation} -> {allocation_of(placement)}"
        save = self.move(time_s, job, Trigger.RESIZE, reason, message)
        job.resize_order = (self._state.term, self.next_seq())
        order = ScaleJob(*job.resize_order, job.spec.job_id, job.status.attempt, placement)
        return [save, order]

    # --- ends

    def stop(self, time_s: float, job: LiveJob, outcome: JobPhase, reason: Reason, message: str = "") -> list[Command]:
        """Order the job's end; it leads to `outcome` once no task is left."""
        job.stopping_for, job.leaving, job.in_flight, job.target = outcome, job.held, (), ()
        return [
            self.move(time_s, job, Trigger.STOP, reason, message),
            self.stop_command(job, reason, checkpoint=outcome is not JobPhase.CANCELLED),
        ]

    def _preempt(
        self, time_s: float, job: LiveJob, reason: Reason, message: str, target: Placement = ()
    ) -> list[Command]:
        """Stop the job; it waits for its next attempt, in `target` if that is known."""
        job.leaving, job.in_flight, job.target = job.held, (), target
        return [
            self.move(time_s, job, Trigger.PREEMPT, reason, message),
            self.stop_command(job, reason, checkpoint=reason is Reason.PREEMPTED),
        ]

    def stop_command(self, job: LiveJob, reason: Reason, *, checkpoint: bool) -> StopJob:
        """The order to end all of the job's tasks, again where an agent before this one has given it."""
        return StopJob(
            self._state.term,
            self.next_seq(),
            job.spec.job_id,
            job.status.attempt,
            reason,
            checkpoint,
            job.spec.grace_s,
        )

    # --- nodes

    def relieve(self, time_s: float) -> list[Command]:
        """Take tasks off nodes that are gone or offer less than is promised on them.

        Promised capacity must not outlive real capacity, not even until the next slot: the newest jobs give way.
        """
        if not self._state.gone and not self._state.short:
            return []
        commands: list[Command] = []
        for job in reversed(self._state.ordered()):
            if any(entry.node not in self._state.nodes for entry in job.target):
                self.aim(job, job.settled)  # the next slot finds another place
            if job.status.phase in (JobPhase.STARTING, JobPhase.RUNNING, JobPhase.RESIZING):
                commands += self._vacate(time_s, job)
        return commands

    def _vacate(self, time_s: float, job: LiveJob) -> list[Command]:
        """Take as many of the job's tasks away as their nodes need; all of the job where its minimum would be hurt."""
        lost = sorted({entry.node for entry in job.held if entry.node not in self._state.nodes})
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
            self.aim(job, keep)
            return self._scale(time_s, job, keep, Reason.NODE_LOST)
        return self._preempt(time_s, job, Reason.NODE_LOST, "its nodes offer less than they did")

    def _what_fits(self, job: LiveJob) -> Placement:
        """The job's tasks less those, highest index first, that its nodes are short of."""
        keep = job.settled
        for name in sorted({entry.node for entry in keep} & self._state.short):
            promised, capacity = self._state.settled_on(name), self._state.nodes[name].capacity
            for entry in reversed([entry for entry in keep if entry.node == name]):
                if promised.fits_in(capacity):
                    break
                keep = _without(keep, entry)
                promised = promised - job.spec.demand(entry.role)
        return keep

    def _is_enough(self, job: LiveJob, placement: Placement) -> bool:
        size = allocation_of(placement)
        has_coordinator = coordinator_of(placement) == coordinator_of(job.status.placement)
        return has_coordinator and size.workers >= job.spec.minimum.workers and size.ps >= job.spec.minimum.ps

    # --- bookkeeping

    def aim(self, job: LiveJob, target: Placement) -> None:
        """Mean the job to hold these places; `advance` orders it when there is room."""
        job.target = target
        if target == job.status.placement:
            self._state.unsettled.discard(job.spec.job_id)
        else:
            self._state.unsettled.add(job.spec.job_id)

    def forget_plans(self, *phases: JobPhase) -> None:
        """Places that an older decision had in mind for jobs which the newest does not know of."""
        for job in self._state.pick(self._state.unsettled):
            if job.status.phase in phases:
                self.aim(job, ())

    def move(
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
        state, before = self._state, job.status
        try:
            phase = next_phase(before.job_id, before.phase, trigger)
        except IllegalTransition as problem:
            raise IllegalTransition(f"{problem}\n{_story(job)}") from problem
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
                self._queue.forget(before.job_id, time_s)
        else:
            state.account(job, time_s)
            if self._ranked:
                self._queue.follow(job, time_s)
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

    def settle(self, time_s: float, job: LiveJob) -> None:
        """What the job holds, wants or waits for may have changed."""
        self._state.account(job, time_s)
        if self._ranked:
            self._queue.follow(job, time_s)

    def next_seq(self) -> int:
        """The next order's number in this term."""
        self._state.seq += 1
        return self._state.seq


def _without(placement: Placement, gone: TaskPlacement) -> Placement:
    return tuple(entry for entry in placement if entry != gone)


def _story(job: LiveJob) -> str:
    lines = [f"  {at_s:.3f} slot {slot}: {cause} -> {to} {said}" for at_s, slot, cause, to, said in job.story]
    return "\n".join(lines)
