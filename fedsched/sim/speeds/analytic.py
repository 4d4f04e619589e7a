"""Optimus's form of the speed of a job with parameter servers, fitted to measurements."""

from __future__ import annotations

from collections.abc import Mapping

from fedsched.core.decision import SpeedSample
from fedsched.errors import InvalidInput
from fedsched.policy.optimus import SpeedCurve, fit
from fedsched.sim.ports import Setting, SimulatedJob
from fedsched.sim.speeds.points import Points


class AnalyticSpeeds:
    """Epochs per second by job type, each a curve of five coefficients; see `SpeedCurve`."""

    def __init__(self, curves: Mapping[str, SpeedCurve]) -> None:
        self._curves = curves
        self._known: dict[tuple[str, int, int], float] = {}

    def epochs(self, job: SimulatedJob, setting: Setting, elapsed_s: float) -> float:
        """Epochs in `elapsed_s`; nothing without workers, or without parameter servers where the job needs some.

        Raises:
            InvalidInput: there is no curve for the job's type.
        """
        spec, allocation = job.spec, setting.allocation
        if not allocation.ps and spec.ps.minimum:
            return 0.0
        key = (spec.job_type, allocation.workers, allocation.ps)
        rate = self._known.get(key)
        if rate is None:
            if spec.job_type not in self._curves:
                known = ", ".join(sorted(self._curves))
                raise InvalidInput(f"no speed is known for job type {spec.job_type}; known are {known}", "add a curve")
            rate = self._known[key] = self._curves[spec.job_type](allocation)
        return rate * elapsed_s


def fit_curves(points: Mapping[str, Points], epoch_samples: Mapping[str, float]) -> dict[str, SpeedCurve]:
    """The curve nearest to each model's measurements in relative error; failed ones (0) do not count.

    Args:
        points: samples per second, by model.
        epoch_samples: samples in an epoch, by model; it must know every one.
    """
    return {
        model: fit(
            [
                SpeedSample(workers, ps, speed / epoch_samples[model])
                for (ps, workers), speed in sorted(measured.items())
            ]
        )
        for model, measured in sorted(points.items())
    }
