"""Answers why a job is where it is: one dominant reason, numbers, who is ahead, and one next step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil, isfinite

from fedsched.core.ids import ClusterName
from fedsched.core.job import TERMINAL, JobPhase, JobSpec, JobStatus, Progress, Reason
from fedsched.core.resources import total
from fedsched.core.routing import CandidateCluster, Routing, least_of, route
from fedsched.core.views import Explanation, Job, JobAhead

AHEAD_MAX = 10
"""How many of the jobs ahead are listed."""

_WAITING = (JobPhase.QUEUED, JobPhase.DISPATCHED)

_NEXT_STEPS = {
    Reason.NO_MATCHING_CLUSTER: "correct placement in the job file, or start an agent for that cluster",
    Reason.NO_MATCHING_ACCELERATOR: "ask for an accelerator that `fedsched info -o json` lists",
    Reason.EXCEEDS_LARGEST_CLUSTER: "lower the minimum of elastic.workers or resources, and submit again",
    Reason.CLUSTER_CORDONED: "wait until the cluster's platform team opens its nodes again",
    Reason.CLUSTER_UNREACHABLE: "start the cluster's agent again; it adopts what still runs there",
    Reason.WAITING_FOR_CAPACITY: "wait, or cancel a job that runs on the cluster",
    Reason.FRAGMENTED: "wait, or submit again with smaller resources per worker so that they fit on single nodes",
    Reason.WAITING_FOR_GANG: "wait, or submit again with a smaller minimum of elastic.workers",
    Reason.POLICY_DEFERRED: "wait for the next slots; the policy gave this one to other jobs",
    Reason.PREEMPTED: "nothing: it goes on from its checkpoint as soon as it has its place",
    Reason.GUARDRAIL_FALLBACK: "nothing: the heuristic decides until the learned policy answers well again",
    Reason.PENDING_EVALUATION: "wait for the cluster's next slot",
    Reason.USER_ERROR: "read `fedsched logs {id}`, correct the script and submit again",
    Reason.OUT_OF_MEMORY: "raise resources.memory and submit again",
    Reason.START_FAILED: (
        "check run and workdir in the job file, and that the script calls fedsched.elastic.join "
        "and goes through the session's batches; "
        "`fedsched logs {id}` has what it printed"
    ),
    Reason.ATTEMPTS_EXHAUSTED: "read `fedsched logs {id}`; raise limits.maxAttempts if the cause has passed",
    Reason.TIME_LIMIT: "raise limits.maxRuntime and submit again",
    Reason.TASK_KILLED: "read `fedsched logs {id}` and submit again",
    Reason.NODE_LOST: "submit again",
    Reason.LOST: "submit again; the cluster's agent log tells when the tasks vanished",
}


def candidates(records: Iterable[CandidateCluster], jobs: Iterable[Job]) -> list[CandidateCluster]:
    """The clusters with what the jobs that wait there have been promised, sorted by name."""
    waiting: dict[ClusterName, list[JobSpec]] = {}
    for job in jobs:
        status = job.status
        if status.phase is JobPhase.DISPATCHED and status.cluster is not None and not status.placement:
            waiting.setdefault(status.cluster, []).append(job.spec)
    return [
        CandidateCluster(
            state.name,
            state.record,
            state.reachable,
            total([least_of(spec, state.record) for spec in waiting.get(state.name, [])]),
            len(waiting.get(state.name, [])),
        )
        for state in sorted(records, key=lambda state: state.name)
    ]


def explain(job: Job, jobs: Sequence[Job], clusters: Iterable[CandidateCluster], time_s: float) -> Explanation:
    """Explain `job`.

    Args:
        time_s: now, on whichever clock; it only says how long a retry is still held back.
        jobs: all live jobs.
        clusters: all known clusters, as `candidates` gives them.
    """
    known = list(clusters)
    routing = route(job.spec, known)
    reason, message = _dominant(job.status, routing, known, time_s)
    waiting = job.status.phase in _WAITING
    ahead = _ahead(job, jobs) if waiting else []
    return Explanation(
        job=job,
        reason=reason,
        message=message,
        evidence=tuple(_evidence(job, known)),
        ahead=tuple(ahead[:AHEAD_MAX]),
        ahead_count=len(ahead),
        routing=routing,
        next_step=_next_step(job, reason),
        trace_id=trace_id(job.spec.traceparent),
    )


def trace_id(traceparent: str) -> str:
    """The trace id in a W3C traceparent; empty if there is none."""
    parts = traceparent.split("-")
    return parts[1] if len(parts) == 4 else ""


def _dominant(
    status: JobStatus, routing: Routing, clusters: list[CandidateCluster], time_s: float
) -> tuple[Reason, str]:
    if status.phase in TERMINAL or status.phase is JobPhase.HELD:
        return status.reason, status.message
    if status.phase is JobPhase.QUEUED:
        if routing.choice is None:
            return routing.reason, routing.message
        return Reason.PENDING_EVALUATION, f"goes to {routing.choice} as soon as a controller leads"
    gone = next((state for state in clusters if state.name == status.cluster and not state.reachable), None)
    if status.phase is JobPhase.UNREACHABLE or gone is not None:
        return Reason.CLUSTER_UNREACHABLE, f"the agent of {status.cluster} is not connected; what runs there goes on"
    if status.retry_s is not None:
        left_s = ceil(status.retry_s - time_s)
        return status.reason, f"{status.message}; tries again {f'in {left_s} s' if left_s > 0 else 'in the next slot'}"
    return status.reason, status.message


def _ahead(job: Job, jobs: Sequence[Job]) -> list[JobAhead]:
    """Jobs that wait in the same place and came earlier, in order of arrival."""
    place = job.status.cluster
    earlier = [
        other
        for other in jobs
        if other.status.phase in _WAITING and other.status.cluster == place and arrival(other.spec) < arrival(job.spec)
    ]
    return [
        JobAhead(other.spec.job_id, other.spec.name, other.spec.user, other.status.phase, other.spec.minimum)
        for other in sorted(earlier, key=lambda other: arrival(other.spec))
    ]


def arrival(spec: JobSpec) -> tuple[float, int, str]:
    """Sorts jobs by submission; ids that are numbers break ties as numbers."""
    return (spec.submitted_s, int(spec.job_id) if spec.job_id.isdecimal() else 0, spec.job_id)


def _evidence(job: Job, clusters: list[CandidateCluster]) -> list[str]:
    spec, status = job.spec, job.status
    lines = [
        f"minimum {spec.minimum} needs {spec.demand_of(spec.minimum)}; maximum {spec.maximum}",
    ]
    state = next((state for state in clusters if state.name == status.cluster), None)
    if status.retry_s is not None:
        lines.append(f"attempts: {status.attempt}, failed: {status.failures}, in a row: {status.setbacks}")
    if status.phase in TERMINAL:
        lines.append(f"attempts: {status.attempt}, failed: {status.failures}, resizes: {status.resizes}")
        if status.progress.steps:
            lines.append(f"trained {_reached(status.progress)}")
        return lines + _worries(status.progress, is_over=True)
    if state is not None and state.record is not None:
        record = state.record
        age = "" if state.reachable else " when last seen"
        lines.append(f"{state.name}: {record.usage} of {record.capacity} used{age}")
        lines.append(
            f"{state.name}: {record.running} running, {record.queued} queued, "
            f"policy {record.policy}{f' v{record.policy_version}' if record.policy_version else ''}{age}"
        )
        if record.fallback:
            lines.append(f"{state.name}: the heuristic decided its newest slot{age}: {record.fallback}")
        if record.fallbacks:
            lines.append(f"{state.name}: the heuristic decided {record.fallbacks} of {record.decisions} slots{age}")
    if status.placement:
        lines.append(f"holds {status.allocation} now; attempt: {status.attempt}, resizes: {status.resizes}")
        if status.progress.steps:
            lines.append(f"trained {_reached(status.progress)} so far")
        lines += _worries(status.progress)
    return lines


def _worries(progress: Progress, *, is_over: bool = False) -> list[str]:
    """What its user should look at, best while the job still runs."""
    lines = []
    if progress.idle_s and not is_over:
        lines.append(
            f"no step for {progress.idle_s:.0f} s when it was last heard of: does the script wait for something?"
        )
    if progress.complaint:
        lines.append(progress.complaint)
    if progress.loss is not None and not isfinite(progress.loss):
        lines.append(f"the loss is {progress.loss}: the training has diverged; a lower learning rate may help")
    return lines


def _reached(progress: Progress) -> str:
    parts = [f"{progress.epochs:.4g} epochs in {progress.steps} steps"]
    if progress.loss is not None:
        parts.append(f"loss {progress.loss:.4g}")
    if progress.accuracy is not None:
        parts.append(f"accuracy {progress.accuracy:.4g}")
    return ", ".join(parts)


def _next_step(job: Job, reason: Reason) -> str:
    status = job.status
    if status.phase in (JobPhase.SUCCEEDED, JobPhase.CANCELLED):
        return "nothing: the job is over"
    if status.retry_s is not None:
        return f"wait, or read `fedsched logs {job.spec.job_id}`: attempts that fail in a row begin later and later"
    if reason in _NEXT_STEPS:
        return _NEXT_STEPS[reason].format(id=job.spec.job_id)
    if status.phase is JobPhase.FAILED:
        return f"read `fedsched logs {job.spec.job_id}` and submit again"
    return f"nothing: it goes on; follow it with `fedsched logs {job.spec.job_id} -f`"
