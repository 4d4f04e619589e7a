"""Measured speeds with interpolation between them, as DL2's reference does it.

A model's speed surface is a sum of distances to its measured points, with the coefficients that make it pass through
all of them (radial basis functions with the linear kernel, no smoothing). Two cautions that come with the method:
outside the measured points speed rises with distance, so extrapolated numbers are invented; and failed measurements,
kept as zeros, drag their neighbourhood down.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from fedsched.errors import InvalidInput
from fedsched.sim.ports import Setting, SimulatedJob
from fedsched.sim.speeds.points import Points

DIGITS = 6
"""Speeds are rounded to so many decimals, so that no scheduler's choice hangs on the last bits of the solution."""


class MeasuredSurface:
    """One model's measured speeds and what lies between them."""

    def __init__(self, points: Points, digits: int | None = DIGITS) -> None:
        self._points = points
        self._digits = digits
        self._where = np.array(sorted(points), dtype=np.float64)

    @cached_property
    def _coefficients(self) -> NDArray[np.float64]:
        """One per measured point. Solved when first needed: a table that is a full grid never needs them."""
        speeds = np.array([self._points[at] for at in sorted(self._points)], dtype=np.float64)
        distances = np.linalg.norm(self._where[:, None] - self._where[None], axis=2)
        return np.linalg.solve(distances, speeds)

    def __call__(self, ps: int, workers: int) -> float:
        """Samples per second, never below 0."""
        speed = self._points.get((ps, workers))
        if speed is None:
            speed = max(0.0, self._between(ps, workers))
        return speed if self._digits is None else round(speed, self._digits)

    def _between(self, ps: int, workers: int) -> float:
        if len(self._points) == 1:  # One point alone has no slope: its speed holds everywhere.
            return next(iter(self._points.values()))
        distances = np.linalg.norm(self._where - np.array([ps, workers], dtype=np.float64), axis=1)
        return float(distances @ self._coefficients)


class MeasuredSpeeds:
    """Speeds by job type, from a table; every job type is a model of the table.

    Args:
        points: what was measured, by model.
        epoch_samples: samples in an epoch, by model.
        keep_failed: count measurements of 0 as speeds, as DL2's reference does, instead of leaving them out.
        digits: decimals that speeds are rounded to; None: not at all.
    """

    def __init__(
        self,
        points: Mapping[str, Points],
        epoch_samples: Mapping[str, float],
        *,
        keep_failed: bool = True,
        digits: int | None = DIGITS,
    ) -> None:
        self._points = {
            model: {at: speed for at, speed in measured.items() if keep_failed or speed > 0}
            for model, measured in points.items()
        }
        self._epoch_samples = epoch_samples
        self._digits = digits
        self._surfaces: dict[str, MeasuredSurface] = {}
        self._known: dict[tuple[str, int, int], float] = {}

    def epochs(self, job: SimulatedJob, setting: Setting, elapsed_s: float) -> float:
        """Epochs in `elapsed_s`; nothing without workers or without parameter servers.

        The order of operations is the reference's: near-ties between its schedulers hang on the last bit.

        Raises:
            InvalidInput: the job's type is not in the table, or it is not known how long its epochs are.
        """
        allocation, model = setting.allocation, job.spec.job_type
        speed = self.samples_per_s(model, allocation.ps, allocation.workers)
        return speed * elapsed_s / self._epoch_samples[model]

    def samples_per_s(self, model: str, ps: int, workers: int) -> float:
        """The speed of a whole job; 0 without workers or without parameter servers.

        Raises:
            InvalidInput: see `epochs`.
        """
        key = (model, ps, workers)
        speed = self._known.get(key)
        if speed is None:
            surface = self._surface(model)
            speed = self._known[key] = surface(ps, workers) if ps and workers else 0.0
        return speed

    def _surface(self, model: str) -> MeasuredSurface:
        if model not in self._surfaces:
            if not self._points.get(model) or model not in self._epoch_samples:
                what = "epoch is given" if self._points.get(model) else "speed is known"
                known = ", ".join(sorted(set(self._points) & set(self._epoch_samples)))
                raise InvalidInput(f"no {what} for job type {model}; known are {known}", "add it to the table")
            self._surfaces[model] = MeasuredSurface(self._points[model], self._digits)
        return self._surfaces[model]
