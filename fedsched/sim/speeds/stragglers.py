"""Stragglers: some workers are slow for no visible reason, and a synchronous job waits for its slowest."""

from __future__ import annotations

from functools import lru_cache

from fedsched.core.ids import JobId, stream
from fedsched.sim.ports import Setting, SimulatedJob, TrueSpeeds

JOBS_KEPT = 100_000
"""Jobs whose draws are remembered; those of others are drawn again, to the same result."""


class Stragglers:
    """Divides a model's speeds by the slowdown of the job's slowest worker.

    A worker of a job is slow for the job's whole life. Every job draws from a stream of its own, so what becomes of one
    depends neither on the others nor on how often anybody asks.

    Args:
        inner: speeds when all workers are equally fast.
        seed: of the draws.
        probability: of a worker to be slow, 0 to 1.
        slowdown_max: a slow worker takes 1 to so many times as long, all equally likely.
    """

    def __init__(self, inner: TrueSpeeds, seed: int, probability: float, slowdown_max: float) -> None:
        self._inner = inner
        self._seed = seed
        self._probability = probability
        self._slowdown_max = slowdown_max
        self._of_job = lru_cache(maxsize=JOBS_KEPT)(self._draw)

    def epochs(self, job: SimulatedJob, setting: Setting, elapsed_s: float) -> float:
        """Epochs in `elapsed_s`."""
        alone = self._inner.epochs(job, setting, elapsed_s)
        workers = setting.allocation.workers
        return alone / self._of_job(job.spec.job_id, job.spec.workers.maximum)[workers] if workers else 0.0

    def _draw(self, job_id: JobId, workers_max: int) -> tuple[float, ...]:
        """By number of workers: the slowdown of the slowest of them."""
        draw = stream(self._seed, f"stragglers/{job_id}").random
        slowest = [1.0]
        for _ in range(workers_max):
            slow, by = draw() < self._probability, 1 + draw() * (self._slowdown_max - 1)
            slowest.append(max(slowest[-1], by if slow else 1.0))
        return tuple(slowest)
