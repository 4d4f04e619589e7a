"""Goodput in the form of Pollux (Qiao et al., OSDI 2021): throughput times statistical efficiency, at the best batch.

`K` GPUs with a batch of `m` samples each and `s` accumulated steps need for one iteration

    gradient = compute_base + compute_sample * m
    network  = base + further * max(K - 2, 0), of one node or of several; 0 for K = 1
    s * gradient + (gradient ** gamma + network ** gamma) ** (1 / gamma)

seconds, with 1 <= gamma <= 10 for how far both overlap. Of the M = K m (s + 1) samples an iteration trains, one counts
as (noise + M0) / (noise + M) samples at the job's own batch M0; noise is the gradient noise scale in samples, taken as
constant over a job's life. The job itself adapts its batch, as Pollux's agent does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedsched.errors import InvalidInput
from fedsched.sim.ports import Setting, SimulatedJob
from fedsched.sim.speeds.scaling import gpus_of

GAMMA_MAX = 10.0
STEPS_MAX = 8
"""Most steps whose gradients are accumulated before an update."""
BATCHES = 64
"""Batches per GPU that are compared, spread evenly on a logarithmic scale."""


@dataclass(frozen=True, slots=True)
class Timing:
    """How long one iteration takes on one type of GPU; see the module. Seconds, but for `gamma`."""

    compute_base_s: float
    compute_sample_s: float
    local_base_s: float
    local_further_s: float
    network_base_s: float
    network_further_s: float
    gamma: float

    def iteration_s(
        self, gpus: int, nodes: int, batch: NDArray[np.float64], steps: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """For batches per GPU and accumulated steps."""
        gradient = self.compute_base_s + self.compute_sample_s * batch
        if gpus <= 1:
            return (steps + 1) * gradient
        base, further = (
            (self.network_base_s, self.network_further_s) if nodes > 1 else (self.local_base_s, self.local_further_s)
        )
        network = base + further * max(gpus - 2, 0)
        # The larger of the two is taken out, or high powers of milliseconds vanish.
        larger = np.maximum(gradient, network)
        overlapped = larger * ((gradient / larger) ** self.gamma + (network / larger) ** self.gamma) ** (1 / self.gamma)
        return steps * gradient + overlapped


@dataclass(frozen=True, slots=True)
class BatchEfficiency:
    """What a job's batch does to its training, whatever it runs on."""

    batch: int
    """M0: the batch that it was tuned for, over all GPUs."""
    batch_max: int
    """Largest batch, over all GPUs, that it still trains well with."""
    gpu_batch_max: int
    """Largest batch that one GPU's memory holds."""
    noise: float
    """Gradient noise scale in samples: up to about as many, a larger batch needs that much fewer iterations."""
    epoch_samples: float
    """Samples in an epoch at the batch M0."""


def goodput(timing: Timing, training: BatchEfficiency, gpus: int, nodes: int) -> float:
    """Samples at the job's own batch that the best batch trains per second; 0 where no batch is possible."""
    if gpus < 1:
        return 0.0
    steps = np.arange(STEPS_MAX + 1, dtype=np.float64)[:, None]
    low = np.maximum(1.0, training.batch / (gpus * (steps + 1)))
    high = np.minimum(float(training.gpu_batch_max), training.batch_max / (gpus * (steps + 1)))
    # Of rows without any batch nothing is left but their smallest, which is then struck out.
    batch = low * np.maximum(high / low, 1.0) ** np.linspace(0, 1, BATCHES)[None, :]
    total = gpus * batch * (steps + 1)
    throughput = total / timing.iteration_s(gpus, nodes, batch, steps)
    efficiency = (training.noise + training.batch) / (training.noise + total)
    return float(np.max(np.where(low <= high, throughput * efficiency, 0.0)))


@dataclass(frozen=True, slots=True)
class Iteration:
    """One observed iteration without accumulation."""

    gpus: int
    nodes: int
    gpu_batch: float
    seconds: float


def fit_timing(iterations: Sequence[Iteration]) -> Timing:
    """The timing nearest to what was observed, in the logarithm of seconds.

    Where only one of the two networks was observed, the other counts as equally fast.

    Raises:
        ValueError: nothing was observed on several GPUs.
    """
    local = any(one.gpus > 1 and one.nodes == 1 for one in iterations)
    network = any(one.nodes > 1 for one in iterations)
    if not local and not network:
        raise ValueError("at least one iteration on several GPUs was expected")
    observed = np.log([one.seconds for one in iterations])
    fastest = min(one.seconds for one in iterations)

    def residuals(values: NDArray[np.float64]) -> NDArray[np.float64]:
        timing = _timing(values)
        predicted = [
            timing.iteration_s(one.gpus, one.nodes, np.array(one.gpu_batch), np.array(0.0)) for one in iterations
        ]
        return np.asarray(np.log(np.array(predicted)) - observed, dtype=np.float64)

    largest = max(one.gpu_batch for one in iterations)
    start = np.array([fastest / 2, fastest / (2 * largest), fastest / 4, 0, fastest / 4, 0, 2.0])
    low = np.array([1e-9, 1e-12, 0, 0, 0, 0, 1.0])
    from scipy.optimize import least_squares  # takes long to load, and few runs need it

    found = least_squares(residuals, np.maximum(start, low), bounds=(low, [np.inf] * 6 + [GAMMA_MAX]), x_scale="jac").x
    if not local:
        found[2:4] = found[4:6]
    if not network:
        found[4:6] = found[2:4]
    return _timing(found)


def _timing(values: NDArray[np.float64]) -> Timing:
    return Timing(*(float(value) for value in values))


class GoodputSpeeds:
    """Speeds by GPU type and job type.

    Args:
        timings: by GPU type, then job type; GPU types count alike in upper and lower case.
        trainings: by job type.
    """

    def __init__(self, timings: Mapping[str, Mapping[str, Timing]], trainings: Mapping[str, BatchEfficiency]) -> None:
        self._timings = {
            (accelerator.casefold(), job_type): timing
            for accelerator, by_type in timings.items()
            for job_type, timing in by_type.items()
        }
        self._trainings = trainings
        self._known: dict[tuple[str, str, int, bool], float] = {}

    def epochs(self, job: SimulatedJob, setting: Setting, elapsed_s: float) -> float:
        """Epochs in `elapsed_s`; nothing where no batch is possible.

        Raises:
            InvalidInput: this job's timing on these GPUs is not known, or its workers hold parts of a GPU.
        """
        job_type, held = job.spec.job_type, gpus_of(job, setting.allocation.workers)
        gpus = int(held)
        if gpus != held:
            raise InvalidInput(
                f"no goodput is known of job type {job_type} on {held:g} GPUs; whole ones were expected",
                "give its workers whole GPUs, or choose another form of speeds",
            )
        key = (job_type, setting.accelerator, gpus, setting.nodes > 1)
        rate = self._known.get(key)
        if rate is None:
            timing = self._timings.get((setting.accelerator.casefold(), job_type))
            training = self._trainings.get(job_type)
            if timing is None or training is None:
                known = ", ".join(sorted(f"{kind} on {accelerator}" for accelerator, kind in self._timings))
                where = setting.accelerator or "no GPU"
                raise InvalidInput(
                    f"no goodput is known of job type {job_type} on {where}; known are {known}",
                    "choose one of these, or add its coefficients",
                )
            rate = self._known[key] = goodput(timing, training, gpus, setting.nodes) / training.epoch_samples
        return rate * elapsed_s
