"""The executor's simulated side: tasks that exist only as numbers, progress by a speed model, verbs that take time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import assert_never

from fedsched.core.commands import AdoptJobs, ExecutorCommand, ScaleJob, StartJob, StopJob
from fedsched.core.events import JobAdopted, JobExited, JobScaled, JobStarted, ProgressReported
from fedsched.core.ids import JobId
from fedsched.core.job import JobSpec, Placement, Progress, Reason, allocation_of
from fedsched.policy.optimus import SpeedCurve
from fedsched.runtime.ports import Post
from fedsched.sim.clock import VirtualClock


@dataclass(frozen=True, slots=True)
class VerbCosts:
    """How long orders take. A job makes no progress while it starts, resizes or stops."""

    start_s: float = 1.0
    scale_s: float = 0.2
    stop_s: float = 0.5


@dataclass(slots=True)
class _SimulatedJob:
    spec: JobSpec
    attempt: int
    placement: Placement
    epochs: float
    """Done up to `since_s`."""
    since_s: float
    training: bool = False
    version: int = 0
    """Grows with every change, so that what was planned before it is void."""


class SimulatedExecutor:
    """Carries orders out in virtual time and posts what a real executor would.

    A job restarted after a stop goes on where it was: its checkpoint is always complete.
    """

    def __init__(
        self, clock: VirtualClock, post: Post, speeds: Mapping[str, SpeedCurve], costs: VerbCosts | None = None
    ) -> None:
        self._clock = clock
        self._post = post
        self._speeds = speeds
        self._costs = costs or VerbCosts()
        self._jobs: dict[JobId, _SimulatedJob] = {}
        self._checkpoints: dict[JobId, float] = {}
        self._obeyed = (0, 0)
        self.held_cpu_s = 0.0
        """CPU seconds that tasks held, starts, resizes and stops included; complete once all jobs are over."""

    def submit(self, command: ExecutorCommand) -> None:
        """Begin to carry an order out; one of an older term, or one seen before, is ignored."""
        if (command.term, command.seq) <= self._obeyed:
            return
        self._obeyed = (command.term, command.seq)
        match command:
            case StartJob():
                self._start(command)
            case ScaleJob():
                self._scale(command)
            case StopJob():
                self._stop(command)
            case AdoptJobs():
                self._adopt(command)
            case _:
                assert_never(command)

    def report(self) -> None:
        """Post the progress of every job that trains."""
        for job_id in sorted(self._jobs):
            job = self._jobs[job_id]
            if job.training:
                self._settle(job)
                self._post(ProgressReported(self._clock.now_s, job_id, job.attempt, Progress(epochs=job.epochs)))

    def close(self) -> None:
        """Nothing to let go of."""

    def _start(self, command: StartJob) -> None:
        job_id = command.spec.job_id
        done = self._checkpoints.get(job_id, 0.0)
        job = _SimulatedJob(command.spec, command.attempt, command.placement, done, self._clock.now_s)
        self._jobs[job_id] = job

        def started() -> None:
            self._train(job)
            self._post(JobStarted(self._clock.now_s, job_id, job.attempt))

        self._later(job, self._costs.start_s, started)

    def _scale(self, command: ScaleJob) -> None:
        job = self._jobs.get(command.job_id)
        if job is None or job.attempt != command.attempt:
            return
        self._pause(job)

        def scaled() -> None:
            self._settle(job)
            job.placement = command.placement
            self._train(job)
            now_s = self._clock.now_s
            self._post(JobScaled(now_s, command.job_id, job.attempt, job.placement, self._costs.scale_s))

        self._later(job, self._costs.scale_s, scaled)

    def _stop(self, command: StopJob) -> None:
        job = self._jobs.get(command.job_id)
        if job is None or job.attempt != command.attempt:
            return
        self._pause(job)
        self._later(job, self._costs.stop_s, lambda: self._end(job, command.reason))

    def _adopt(self, command: AdoptJobs) -> None:
        for spec, attempt in command.jobs:
            job = self._jobs.get(spec.job_id)
            if job is not None and job.attempt == attempt:
                self._post(JobAdopted(self._clock.now_s, spec.job_id, attempt, job.placement))
            else:
                message = "no task of it exists"
                self._post(JobExited(self._clock.now_s, spec.job_id, attempt, Reason.LOST, message))

    def _settle(self, job: _SimulatedJob) -> None:
        """Bring the job's progress up to now."""
        if job.training:
            done = (self._clock.now_s - job.since_s) * self._speed(job)
            job.epochs = min(job.spec.epochs, job.epochs + done)
        held = job.spec.demand_of(allocation_of(job.placement))
        self.held_cpu_s += held.cpu_milli / 1000 * (self._clock.now_s - job.since_s)
        job.since_s = self._clock.now_s

    def _speed(self, job: _SimulatedJob) -> float:
        return self._speeds[job.spec.job_type](allocation_of(job.placement))

    def _pause(self, job: _SimulatedJob) -> None:
        self._settle(job)
        job.training = False
        job.version += 1

    def _train(self, job: _SimulatedJob) -> None:
        self._settle(job)
        job.training = True
        job.version += 1
        self._later(job, (job.spec.epochs - job.epochs) / self._speed(job), lambda: self._finish(job))

    def _finish(self, job: _SimulatedJob) -> None:
        self._settle(job)
        # Exactly the declared length: the sum of its parts may miss it by a rounding error.
        job.training, job.epochs = False, job.spec.epochs
        self._end(job, Reason.FINISHED)

    def _end(self, job: _SimulatedJob, reason: Reason) -> None:
        job_id = job.spec.job_id
        self._settle(job)
        job.version += 1
        self._checkpoints[job_id] = job.epochs
        del self._jobs[job_id]
        self._post(JobExited(self._clock.now_s, job_id, job.attempt, reason, "simulated", Progress(epochs=job.epochs)))

    def _later(self, job: _SimulatedJob, delay_s: float, action: Callable[[], None]) -> None:
        """Plan the job's next change; it is dropped if another change comes first."""
        planned_at = job.version

        def act() -> None:
            if job.version == planned_at:
                action()

        self._clock.after(delay_s, act)
