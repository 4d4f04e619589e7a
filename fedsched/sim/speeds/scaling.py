"""How iterations per second grow with the number of GPUs, by job type and GPU type: a form of our own, and its fit.

One iteration on `n` GPUs in `k` nodes takes

    compute/n + fixed + [n > 1] sync/n + [k > 1] (network/n + shared) + log2(n) per_doubling + log2(k) per_node_doubling

seconds, all coefficients non-negative: work that is divided and work that is not, what each GPU's share of an iteration
takes longer among several GPUs and over several nodes, what all wait for together over several nodes, and what every
doubling adds, as with reductions along a tree. It suits jobs that divide a fixed batch over their GPUs as well as those
whose GPUs each add one, if the latter count an iteration per GPU.

Of the forms that were tried (among them prices per GPU in place of doublings, and interpolation between logarithms)
this one says best what it has not seen: see the head of `coefficients/scaling_fitted.yaml`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass

import numpy as np
from numpy.typing import NDArray

from fedsched.errors import InvalidInput
from fedsched.sim.ports import Setting, SimulatedJob


@dataclass(frozen=True, slots=True)
class Measurement:
    """One observed speed."""

    gpus: int
    nodes: int
    iterations_per_s: float


@dataclass(frozen=True, slots=True)
class ScalingCurve:
    """Seconds per iteration; see the module for what each coefficient multiplies."""

    compute_s: float
    fixed_s: float = 0.0
    sync_s: float = 0.0
    network_s: float = 0.0
    shared_s: float = 0.0
    per_doubling_s: float = 0.0
    per_node_doubling_s: float = 0.0

    def __call__(self, gpus: float, nodes: int) -> float:
        """Iterations per second; 0 without GPUs. A share of one GPU slows the divided work alone."""
        if gpus <= 0:
            return 0.0
        return 1 / float(_terms(gpus, nodes) @ np.array(astuple(self)))


def _terms(gpus: float, nodes: int) -> NDArray[np.float64]:
    """What the coefficients multiply."""
    several, spread = gpus > 1, nodes > 1
    doublings = math.log2(max(1.0, gpus)), math.log2(max(1, nodes))
    return np.array([1 / gpus, 1.0, several / gpus, spread / gpus, spread, *doublings], dtype=np.float64)


def fit_curve(measurements: Sequence[Measurement]) -> ScalingCurve:
    """The curve nearest to the measurements in relative error; those without progress do not count.

    Raises:
        ValueError: none of them shows any progress.
    """
    seen = [one for one in measurements if one.iterations_per_s > 0]
    if not seen:
        raise ValueError("at least one measurement with progress was expected")
    # Speed times predicted seconds is 1 for a perfect fit: residuals are relative errors.
    rows = np.array([_terms(one.gpus, one.nodes) * one.iterations_per_s for one in seen])
    from scipy.optimize import nnls  # takes long to load, and few runs need it

    solution, _ = nnls(rows, np.ones(len(seen)))
    return ScalingCurve(*(float(value) for value in solution))


class ScalingSpeeds:
    """Speeds by GPU type and job type. An epoch is one iteration, unless it is said to have more.

    Args:
        curves: by GPU type, then job type; GPU types count alike in upper and lower case.
        epoch_iterations: iterations in an epoch, by job type; 1 where it is not named.
        otherwise: job type whose curves hold for those that have none; empty: that is an error.
    """

    def __init__(
        self,
        curves: Mapping[str, Mapping[str, ScalingCurve]],
        epoch_iterations: Mapping[str, float] | None = None,
        otherwise: str = "",
    ) -> None:
        self._curves = {accelerator.casefold(): by_type for accelerator, by_type in curves.items()}
        self._names = sorted(curves)
        self._epoch_iterations = epoch_iterations or {}
        self._otherwise = otherwise
        self._known: dict[tuple[str, str, int, int, int], float] = {}

    def epochs(self, job: SimulatedJob, setting: Setting, elapsed_s: float) -> float:
        """Epochs in `elapsed_s`; nothing without workers.

        Raises:
            InvalidInput: there is no curve for this job on these GPUs.
        """
        spec, workers = job.spec, setting.allocation.workers
        key = (spec.job_type, setting.accelerator, workers, spec.worker_demand.gpu_milli, setting.nodes)
        rate = self._known.get(key)
        if rate is None:
            curve = self._curve(spec.job_type, setting.accelerator)
            iterations = curve(gpus_of(job, workers), setting.nodes)
            rate = self._known[key] = iterations / self._epoch_iterations.get(spec.job_type, 1.0)
        return rate * elapsed_s

    def _curve(self, job_type: str, accelerator: str) -> ScalingCurve:
        by_type = self._curves.get(accelerator.casefold())
        if by_type is None:
            known = ", ".join(self._names)
            raise InvalidInput(
                f"no speed is known on GPUs of type {accelerator or '(none)'}; known are {known}",
                "give the nodes one of these accelerators, or add curves for theirs",
            )
        curve = by_type.get(job_type) or by_type.get(self._otherwise)
        if curve is None:
            known = ", ".join(sorted(by_type))
            raise InvalidInput(
                f"no speed is known for job type {job_type} on {accelerator}; known are {known}",
                "add a curve, or name one of these as `otherwise`",
            )
        return curve


def gpus_of(job: SimulatedJob, workers: int) -> float:
    """GPUs under so many workers; a worker without any counts as one."""
    return workers * (job.spec.worker_demand.gpu_milli or 1000) / 1000
