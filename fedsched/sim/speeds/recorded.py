"""Speeds of a trace's jobs, of which nothing is known but how long they ran on what they asked for."""

from __future__ import annotations

from fedsched.sim.ports import Setting, SimulatedJob


class RecordedSpeeds:
    """One epoch is one second of training with all workers that the job can use; its epochs are its duration.

    Args:
        exponent: with a fraction `f` of its workers a job runs at `f ** exponent` of its speed: 1 divides the work
            perfectly; below 1 the last workers help less, so a job with half of them keeps more than half its speed.
    """

    def __init__(self, exponent: float = 1.0) -> None:
        self._exponent = exponent

    def epochs(self, job: SimulatedJob, setting: Setting, elapsed_s: float) -> float:
        """Epochs, which are seconds at full size, in `elapsed_s`."""
        workers, most = setting.allocation.workers, job.spec.workers.maximum
        if workers == most:
            return elapsed_s
        return (workers / most) ** self._exponent * elapsed_s if workers else 0.0
