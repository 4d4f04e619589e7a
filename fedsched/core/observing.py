"""Turns a cluster's state into what a policy sees, and a decision into reasons that users read."""

from __future__ import annotations

from collections.abc import Callable, Collection

from fedsched.core.decision import Decision, JobView, Observation
from fedsched.core.ids import JobId
from fedsched.core.job import JobPhase, JobStatus, Reason, coordinator_of, members_of
from fedsched.core.resources import Resources
from fedsched.core.state import ClusterState, LiveJob

VISIBLE = frozenset({JobPhase.DISPATCHED, JobPhase.STARTING, JobPhase.RUNNING, JobPhase.RESIZING})
"""Phases of jobs that a policy decides about; the others are leaving."""


def observe(state: ClusterState) -> Observation:
    """The cluster as the policy sees it now."""
    return Observation(
        slot=state.slot,
        slot_length_s=state.config.slot_length_s,
        nodes=state.machines,
        jobs=tuple([_view(state, job) for job in state.ordered() if _is_visible(job.status)]),
        time_s=state.slot_started_s,
        finished=tuple(state.finished),
    )


def _is_visible(status: JobStatus) -> bool:
    return status.phase in VISIBLE and status.retry_s is None


def observe_some(state: ClusterState, job_ids: Collection[JobId]) -> Observation:
    """These jobs only, as a discipline sees them that is asked for their ranks."""
    return Observation(
        slot=state.slot,
        slot_length_s=state.config.slot_length_s,
        nodes=(),
        jobs=tuple([_view(state, job) for job in state.pick(job_ids)]),
        time_s=state.slot_started_s,
        finished=tuple(state.finished),
    )


def _view(state: ClusterState, job: LiveJob) -> JobView:
    spec, status = job.spec, job.status
    attained = state.attained(job, state.slot_started_s)
    return JobView(
        spec.job_id,
        spec.job_type,
        spec.workers,
        spec.ps,
        spec.worker_demand,
        spec.ps_demand,
        spec.epochs,
        status.progress.epochs,
        spec.submitted_s,
        state.slot - job.arrived_slot,
        priority=spec.priority,
        placement=members_of(job.settled),
        pinned=job.in_flight is not None or job.adopting or job.cools_down(state.slot_started_s),
        accelerators=spec.accelerators,
        unreported_s=0.0 if job.steady_since_s is None else _unreported_s(state, job, job.steady_since_s),
        attained_s=sum(attained.values()) if attained else 0.0,
        attained_by=tuple(sorted(attained.items())) if attained else (),
        expected_s=spec.expected_s,
        deadline_s=spec.deadline_s,
        speeds=tuple(job.speeds.values()),
        coordinator=coordinator_of(job.settled),
        coordinator_demand=spec.coordinator_demand,
    )


def _unreported_s(state: ClusterState, job: LiveJob, steady_since_s: float) -> float:
    return state.slot_started_s - max(steady_since_s, job.reported_s)


def waiting_reason(
    job: LiveJob, free: Resources, would_fit: Callable[[], bool], deferred: tuple[Reason, str]
) -> tuple[Reason, str]:
    """Why a job that waits got nothing, or not yet, from a decision.

    Args:
        free: what the decision has left of the cluster.
        would_fit: whether nodes have room for the job's minimum in that.
        deferred: the reason if they have.
    """
    minimum = job.spec.demand_of(job.spec.minimum) + job.spec.coordinator_demand
    if job.target:
        nodes = ", ".join(sorted({entry.node for entry in job.target}))
        return Reason.WAITING_FOR_CAPACITY, f"planned on {nodes}; tasks there are still leaving"
    if not minimum.fits_in(free):
        return Reason.WAITING_FOR_CAPACITY, f"needs {minimum} for {job.spec.minimum}; free: {free}"
    if not would_fit():
        return (
            Reason.FRAGMENTED,
            f"needs {minimum} for {job.spec.minimum}; {free} is free but no node has enough for a task",
        )
    return deferred


def deferred(decision: Decision) -> tuple[Reason, str]:
    """Why a decision passed a job over that would have fitted."""
    by = f"{decision.policy} v{decision.version}"
    if decision.fallback:
        return Reason.GUARDRAIL_FALLBACK, f"{decision.policy} decided because {decision.fallback}, and chose other jobs"
    if decision.ranking is not None:
        return Reason.POLICY_DEFERRED, f"{by} lets nobody pass the first job in line, which does not fit yet"
    return Reason.POLICY_DEFERRED, f"{by} chose other jobs in slot {decision.slot}"
