"""Turns what the scheduler was told and ordered into spans of each job's trace.

The core knows no tracing; this observer sees every step. A start or a resize is one span from the order to the news of
its end; it is a child of the job's submission and linked to the decision that it came from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from opentelemetry.trace import Span, Status, StatusCode

from fedsched import tracing
from fedsched.core.commands import Command, SaveJob, ScaleJob, StartJob, StopJob
from fedsched.core.events import Event, JobAssigned, JobExited, JobScaled, JobStarted, ScaleFailed, TermTaken
from fedsched.core.ids import JobId
from fedsched.core.job import TERMINAL, JobPhase, Reason, allocation_of

EXPECTED_ENDS = frozenset({Reason.FINISHED, Reason.PREEMPTED, Reason.CANCELLED_BY_USER, Reason.TIME_LIMIT})
"""Ends that are no error in a trace."""


class JobTraces:
    """An observer of the loop.

    Args:
        cluster: put on every span.
        decision: the traceparent of the newest decision.
    """

    def __init__(self, cluster: str, decision: Callable[[], str]) -> None:
        self._cluster = cluster
        self._decision = decision
        self._parents: dict[JobId, str] = {}
        self._open: dict[JobId, Span] = {}

    def __call__(self, event: Event, commands: Sequence[Command]) -> None:
        """See one step."""
        match event:
            case TermTaken(jobs=jobs):
                self._parents.update({spec.job_id: spec.traceparent for spec, _ in jobs})
            case JobAssigned(_, spec, _):
                self._parents[spec.job_id] = spec.traceparent
                self._point("agent.accept", spec.job_id, {})
            case JobStarted(_, job_id, _):
                self._close(job_id)
            case JobScaled(_, job_id, _, placement, pause_s):
                self._close(job_id, {"to": str(allocation_of(placement)), "pause_s": pause_s})
            case ScaleFailed(_, job_id, _, _, message):
                self._close(job_id, error=message)
            case JobExited(_, job_id, attempt, reason, message):
                self._close(job_id, error="" if reason in EXPECTED_ENDS else f"{reason.value}: {message}")
                self._point("job.exit", job_id, {"attempt": attempt, "reason": reason.value})
        for command in commands:
            self._see(command)

    def _see(self, command: Command) -> None:
        match command:
            case StartJob(_, _, spec, attempt, placement):
                size = str(allocation_of(placement))
                self._begin("job.start", spec.job_id, {"attempt": attempt, "to": size})
            case ScaleJob(_, _, job_id, attempt, placement):
                self._begin("job.resize", job_id, {"attempt": attempt, "to": str(allocation_of(placement))})
            case StopJob(_, _, job_id, attempt, reason):
                self._close(job_id)
                self._begin("job.stop", job_id, {"attempt": attempt, "reason": reason.value})
            case SaveJob(status, transition):
                if transition is not None and status.phase in TERMINAL:
                    self._complete(status.job_id, status.phase, status.message)

    def _begin(self, name: str, job_id: JobId, attributes: dict[str, tracing.Value]) -> None:
        decision = self._decision()
        self._open[job_id] = tracing.start(
            name,
            parent=self._parents.get(job_id, ""),
            links=[decision] if decision else [],
            attributes={"job": job_id, "cluster": self._cluster, **attributes},
        )

    def _close(self, job_id: JobId, attributes: dict[str, tracing.Value] | None = None, *, error: str = "") -> None:
        span = self._open.pop(job_id, None)
        if span is None:
            return
        span.set_attributes(attributes or {})
        if error:
            span.set_status(Status(StatusCode.ERROR, error))
        span.end()

    def _point(self, name: str, job_id: JobId, attributes: dict[str, tracing.Value]) -> None:
        tracing.start(
            name,
            parent=self._parents.get(job_id, ""),
            attributes={"job": job_id, "cluster": self._cluster, **attributes},
        ).end()

    def _complete(self, job_id: JobId, phase: JobPhase, message: str) -> None:
        self._close(job_id)
        self._point("job.complete", job_id, {"phase": phase.value, "message": message})
        self._parents.pop(job_id, None)
