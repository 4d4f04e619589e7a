"""Speeds that are not what a model says, by a random factor that stays."""

from __future__ import annotations

from functools import lru_cache

from fedsched.core.ids import JobId, stream
from fedsched.sim.ports import Setting, SimulatedJob, TrueSpeeds

FACTORS_KEPT = 200_000
"""Factors that are remembered; others are drawn again, to the same result."""


class NoisySpeeds:
    """Multiplies a model's speeds by 1 plus or minus up to `error`, drawn once per job and allocation.

    Around the truth it makes jobs differ from their type; around an oracle's speeds (`oracle`) it makes estimates wrong
    while the truth stays. Two of them need names of their own, or they draw the same.

    Args:
        inner: the speeds that are varied.
        seed: of the draws.
        error: largest deviation as a fraction, at least 0 and below 1.
        name: of the stream of draws.
    """

    def __init__(self, inner: TrueSpeeds, seed: int, error: float, name: str = "noise") -> None:
        self._inner = inner
        self._seed = seed
        self._error = error
        self._name = name
        self._factor = lru_cache(maxsize=FACTORS_KEPT)(self._draw)

    def epochs(self, job: SimulatedJob, setting: Setting, elapsed_s: float) -> float:
        """Epochs in `elapsed_s`."""
        allocation = setting.allocation
        factor = self._factor(job.spec.job_id, allocation.workers, allocation.ps)
        return self._inner.epochs(job, setting, elapsed_s) * factor

    def _draw(self, job_id: JobId, workers: int, ps: int) -> float:
        return 1 + self._error * (2 * stream(self._seed, f"{self._name}/{job_id}/{workers}/{ps}").random() - 1)
