"""Interference: a job is slower beside other jobs' tasks on its nodes."""

from __future__ import annotations

from collections.abc import Mapping

from fedsched.sim.ports import Setting, SimulatedJob, TrueSpeeds


class Interference:
    """Divides a model's speeds by `1 + cost * neighbours per node`.

    Args:
        inner: speeds of a job that has its nodes for itself.
        cost: how much longer everything takes for each task of another job on a node, as a fraction.
        by_type: the same for single job types.
    """

    def __init__(self, inner: TrueSpeeds, cost: float, by_type: Mapping[str, float] | None = None) -> None:
        self._inner = inner
        self._cost = cost
        self._by_type = by_type or {}

    def epochs(self, job: SimulatedJob, setting: Setting, elapsed_s: float) -> float:
        """Epochs in `elapsed_s`."""
        alone = self._inner.epochs(job, setting, elapsed_s)
        if not setting.neighbours:
            return alone
        cost = self._by_type.get(job.spec.job_type, self._cost)
        return alone / (1 + cost * setting.neighbours / max(1, setting.nodes))
