"""One decision of a policy, as text that a reader can check by hand."""

from __future__ import annotations

from fedsched.core.decision import JobView, Policy
from fedsched.core.placement import TentativePlacement
from tests.policy.observations import node, observation


def decide(policy: Policy, cpus: list[int], jobs: list[JobView], *, keep_running: bool = True) -> dict[str, str]:
    """Allocations by job on nodes of so many cores."""
    seen = observation([node(f"n{index}", count) for index, count in enumerate(cpus)], jobs)
    decision = policy.decide(seen, TentativePlacement(seen, keep_running))
    return {str(job_id): str(allocation) for job_id, allocation in decision.allocations}
