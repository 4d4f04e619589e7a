"""The executor's simulated side: tasks that exist only as numbers, progress by a speed model, verbs that take time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fedsched.core.cluster import Node
from fedsched.core.commands import AdoptJobs, ExecutorCommand, ScaleJob, StartJob, StopJob
from fedsched.core.events import JobAdopted, JobExited, JobScaled, JobStarted, ProgressReported, ScaleFailed
from fedsched.core.ids import JobId, NodeName
from fedsched.core.job import Placement, Progress, Reason, allocation_of
from fedsched.runtime.ports import Post
from fedsched.sim.clock import VirtualClock
from fedsched.sim.ports import Setting, SimulatedJob, TrueSpeeds
from fedsched.sim.speeds.costs import Costs, VerbCosts


class _Running:
    """One attempt of a job that has tasks."""

    __slots__ = (
        "attempt", "busy", "costs", "epochs", "job", "placement", "setting", "since_s", "sought", "training", "version"
    )  # fmt: skip

    def __init__(
        self,
        job: SimulatedJob,
        attempt: int,
        placement: Placement,
        epochs: float,
        since_s: float,
        costs: VerbCosts,
        setting: Setting,
    ) -> None:
        self.job = job
        self.attempt = attempt
        self.placement = placement
        self.epochs = epochs
        """Done up to `since_s`."""
        self.since_s = since_s
        self.costs = costs
        self.setting = setting
        self.training = False
        self.busy = True
        """Starts, resizes or stops."""
        self.sought = False
        """A new agent asks for it; it is told once what is in progress is done."""
        self.version = 0
        """Grows with every change, so that what was planned before it is void."""


class SimulatedExecutor:
    """Carries orders out in virtual time and posts what a real executor would.

    A job restarted after a stop goes on where it was: its checkpoint is always complete.

    Args:
        post: takes events, at any time, also while an order is given.
        truth: the jobs as they really are.
        speeds: how fast they train.
        nodes: of the cluster, by name.
        costs: how long orders take; a job makes no progress meanwhile.
        pace_s: the time over which speeds are asked for; the length of a slot, say.
        crowded: whether a job's speed depends on who else is on its nodes.
        resize_fails: whether the next resize is rolled back in the end; None: no resize is.
    """

    def __init__(
        self,
        clock: VirtualClock,
        post: Post,
        truth: Mapping[JobId, SimulatedJob],
        speeds: TrueSpeeds,
        nodes: Mapping[NodeName, Node],
        *,
        costs: Costs,
        pace_s: float = 1.0,
        crowded: bool = False,
        resize_fails: Callable[[], bool] | None = None,
    ) -> None:
        self._clock = clock
        self._post = post
        self._truth = truth
        self._speeds = speeds
        self._nodes = nodes
        self._costs = costs
        self._pace_s = pace_s
        self._crowded = crowded
        self._resize_fails = resize_fails
        self._jobs: dict[JobId, _Running] = {}
        self._checkpoints: dict[JobId, float] = {}
        self._obeyed = (0, 0)
        kinds = {node.accelerator for node in nodes.values()}
        self._accelerator = kinds.pop() if len(kinds) == 1 else None
        """Of all nodes; None if they differ."""
        self._verbs: dict[type[ExecutorCommand], Callable[[Any], None]] = {
            StartJob: self._start,
            ScaleJob: self._scale,
            StopJob: self._stop,
            AdoptJobs: self._adopt,
        }

    def submit(self, command: ExecutorCommand) -> None:
        """Begin to carry an order out; one of an older term, or one seen before, is ignored."""
        if (command.term, command.seq) <= self._obeyed:
            return
        self._obeyed = (command.term, command.seq)
        self._verbs[type(command)](command)

    def report(self) -> list[ProgressReported]:
        """The progress of every job that trains."""
        now_s, reports = self._clock.now_s, []
        for job_id in sorted(self._jobs):
            running = self._jobs[job_id]
            if running.training:
                self._settle(running)
                reports.append(ProgressReported(now_s, job_id, running.attempt, Progress(epochs=running.epochs)))
        return reports

    def close(self) -> None:
        """Nothing to let go of."""

    def forget(self, job_id: JobId) -> None:
        """The job is over for good: its checkpoint can go."""
        self._checkpoints.pop(job_id, None)

    def _start(self, command: StartJob) -> None:
        job_id, placement = command.spec.job_id, command.placement
        running = self._jobs[job_id] = _Running(
            self._truth[job_id],
            command.attempt,
            placement,
            self._checkpoints.get(job_id, 0.0),
            self._clock.now_s,
            self._costs.of(command.spec.job_type),
            self._setting(placement),
        )
        if self._crowded:
            self._disturb(placement)
        self._later(running, running.costs.start_s, self._started)

    def _started(self, running: _Running) -> None:
        self._train(running)
        self._post(JobStarted(self._clock.now_s, running.job.spec.job_id, running.attempt))
        self._tell_who_seeks(running)

    def _scale(self, command: ScaleJob) -> None:
        running = self._jobs.get(command.job_id)
        if running is None or running.attempt != command.attempt:
            return
        self._pause(running)
        fails = self._resize_fails is not None and self._resize_fails()
        self._later(running, running.costs.scale_s, self._roll_back if fails else self._scaled, command)

    def _scaled(self, running: _Running, order: ScaleJob) -> None:
        before, placement = running.placement, order.placement
        running.placement = placement
        running.setting = self._setting(placement)
        self._train(running)
        now_s, pause_s = self._clock.now_s, running.costs.scale_s
        self._post(JobScaled(now_s, order.job_id, running.attempt, placement, pause_s, order.term, order.seq))
        self._tell_who_seeks(running)
        if self._crowded:
            self._disturb((*before, *placement))

    def _roll_back(self, running: _Running, order: ScaleJob) -> None:
        self._train(running)
        message = "the fault plan has this resize fail"
        failed = ScaleFailed(
            self._clock.now_s, order.job_id, running.attempt, running.placement, message, order.term, order.seq
        )
        self._post(failed)
        self._tell_who_seeks(running)

    def _stop(self, command: StopJob) -> None:
        running = self._jobs.get(command.job_id)
        if running is None or running.attempt != command.attempt:
            return
        self._pause(running)
        self._later(running, running.costs.stop_s, self._end, command.reason)

    def _adopt(self, command: AdoptJobs) -> None:
        now_s = self._clock.now_s
        for spec, attempt in command.jobs:
            running = self._jobs.get(spec.job_id)
            if running is None or running.attempt != attempt:
                self._post(JobExited(now_s, spec.job_id, attempt, Reason.LOST, "no task of it exists"))
                continue
            running.sought = True
            if not running.busy:
                self._tell_who_seeks(running)

    def _tell_who_seeks(self, running: _Running) -> None:
        running.busy = False
        if running.sought:
            running.sought = False
            job_id = running.job.spec.job_id
            self._post(JobAdopted(self._clock.now_s, job_id, running.attempt, running.placement))

    def _setting(self, placement: Placement) -> Setting:
        accelerator, neighbours = self._accelerator, 0
        if accelerator is not None and len(placement) == 1 and not self._crowded:
            return Setting(allocation_of(placement), accelerator)
        names = {entry.node for entry in placement}
        if accelerator is None:
            accelerator = min((self._nodes[name].accelerator for name in names if name in self._nodes), default="")
        if self._crowded:
            neighbours = max(0, self._neighbours(names) - len(placement))
        return Setting(allocation_of(placement), accelerator, len(names), neighbours)

    def _neighbours(self, names: set[NodeName]) -> int:
        return sum(entry.node in names for running in self._jobs.values() for entry in running.placement)

    def _disturb(self, placement: Placement) -> None:
        """Who shares these nodes has more or fewer neighbours now."""
        names = {entry.node for entry in placement}
        for job_id in sorted(self._jobs):
            running = self._jobs[job_id]
            if running.training and any(entry.node in names for entry in running.placement):
                self._settle(running)
                running.setting = self._setting(running.placement)
                self._train(running)

    def _settle(self, running: _Running) -> None:
        """Bring the job's progress up to now."""
        now_s = self._clock.now_s
        if running.training and now_s > running.since_s:
            done = self._speeds.epochs(running.job, running.setting, now_s - running.since_s)
            running.epochs = min(running.job.epochs, running.epochs + done)
        running.since_s = now_s

    def _pause(self, running: _Running) -> None:
        self._settle(running)
        running.training, running.busy = False, True
        running.version += 1

    def _train(self, running: _Running) -> None:
        running.since_s = self._clock.now_s
        running.training = True
        running.version += 1
        pace = self._speeds.epochs(running.job, running.setting, self._pace_s)
        if pace > 0:
            self._later(running, (running.job.epochs - running.epochs) / pace * self._pace_s, self._finish)

    def _finish(self, running: _Running) -> None:
        # Exactly the true length: the sum of its parts may miss it by a rounding error.
        running.training, running.epochs = False, running.job.epochs
        self._end(running, Reason.FINISHED)

    def _end(self, running: _Running, reason: Reason) -> None:
        job_id = running.job.spec.job_id
        running.version += 1
        self._checkpoints[job_id] = running.epochs
        del self._jobs[job_id]
        progress = Progress(epochs=running.epochs)
        self._post(JobExited(self._clock.now_s, job_id, running.attempt, reason, "simulated", progress))
        if self._crowded:
            self._disturb(running.placement)

    def _later(self, running: _Running, delay_s: float, action: Callable[..., None], *arguments: object) -> None:
        """Plan the job's next change; it is dropped if another change comes first."""
        self._clock.at(self._clock.now_s + delay_s, self._act, running, running.version, action, arguments)

    def _act(
        self, running: _Running, planned_at: int, action: Callable[..., None], arguments: tuple[object, ...]
    ) -> None:
        if running.version == planned_at:
            action(running, *arguments)
