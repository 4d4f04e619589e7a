"""Placement sensitivity: a job whose tasks are spread over nodes is slower."""

from __future__ import annotations

from collections.abc import Mapping

from fedsched.sim.ports import Setting, SimulatedJob, TrueSpeeds


class SpreadPenalty:
    """Divides a model's speeds by `1 + cost * (1 - 1/nodes)`.

    That is nothing on one node, half the cost on two, and the whole cost in the limit: with `k` equal parts, `1 - 1/k`
    is the share of traffic that leaves its node.

    Args:
        inner: speeds on a single node.
        cost: how much longer everything takes when all traffic crosses the network, as a fraction.
        by_type: the same for single job types.
    """

    def __init__(self, inner: TrueSpeeds, cost: float, by_type: Mapping[str, float] | None = None) -> None:
        self._inner = inner
        self._cost = cost
        self._by_type = by_type or {}

    def epochs(self, job: SimulatedJob, setting: Setting, elapsed_s: float) -> float:
        """Epochs in `elapsed_s`."""
        alone = self._inner.epochs(job, setting, elapsed_s)
        if setting.nodes <= 1:
            return alone
        cost = self._by_type.get(job.spec.job_type, self._cost)
        return alone / (1 + cost * (1 - 1 / setting.nodes))
