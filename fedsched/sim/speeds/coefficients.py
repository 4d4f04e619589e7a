"""Files of speed coefficients: those that ship with the package, fitted by us, and those that users fit themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from fedsched.config import Tree, load
from fedsched.policy.optimus import SpeedCurve
from fedsched.sim.speeds.goodput import GAMMA_MAX, BatchEfficiency, Timing
from fedsched.sim.speeds.scaling import ScalingCurve

FOLDER = Path(__file__).parent / "coefficients"

Seconds = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]


def _takes_time(coefficients: tuple[float, ...]) -> tuple[float, ...]:
    # Without divided or undivided work, one worker would take no time at all.
    if coefficients[0] + coefficients[1] <= 0:
        raise ValueError(f"{list(coefficients)} takes no time on one worker; one of the first two must be above 0")
    return coefficients


Five = Annotated[tuple[Seconds, Seconds, Seconds, Seconds, Seconds], AfterValidator(_takes_time)]
"""Coefficients a to e of `SpeedCurve`."""
Seven = Annotated[tuple[Seconds, Seconds, Seconds, Seconds, Seconds, Seconds, Seconds], AfterValidator(_takes_time)]
"""Coefficients of `ScalingCurve`, in its order."""


class AnalyticFile(Tree):
    """Optimus's form: seconds per epoch."""

    curves: dict[str, Five] = Field(min_length=1)
    """By job type."""

    def parsed(self) -> dict[str, SpeedCurve]:
        """The curves by job type."""
        return {job_type: SpeedCurve(five) for job_type, five in self.curves.items()}


class ScalingFile(Tree):
    """Scaling curves: seconds per iteration."""

    curves: dict[str, dict[str, Seven]] = Field(min_length=1)
    """By GPU type, then job type."""

    def parsed(self) -> dict[str, dict[str, ScalingCurve]]:
        """The curves by GPU type, then job type."""
        return {
            accelerator: {job_type: ScalingCurve(*seven) for job_type, seven in by_type.items()}
            for accelerator, by_type in self.curves.items()
        }


class TimingConfig(Tree):
    """Iteration times of one job type on one GPU type; see `Timing`."""

    compute: tuple[Seconds, Annotated[float, Field(gt=0)]]
    """Base, and per sample."""
    local: tuple[Seconds, Seconds]
    """Base, and per GPU past the second, within a node."""
    network: tuple[Seconds, Seconds]
    """The same over nodes."""
    gamma: float = Field(ge=1, le=GAMMA_MAX)

    def parsed(self) -> Timing:
        """The timing."""
        return Timing(*self.compute, *self.local, *self.network, self.gamma)


class BatchEfficiencyConfig(Tree):
    """How one job type takes to other batches; see `BatchEfficiency`."""

    batch: Count
    batch_max: Count
    gpu_batch_max: Count
    noise: float = Field(ge=0)
    epoch_samples: float = Field(gt=0)

    def parsed(self) -> BatchEfficiency:
        """The training."""
        return BatchEfficiency(self.batch, self.batch_max, self.gpu_batch_max, self.noise, self.epoch_samples)


class GoodputFile(Tree):
    """Pollux's form."""

    timings: dict[str, dict[str, TimingConfig]] = Field(min_length=1)
    """By GPU type, then job type."""
    trainings: dict[str, BatchEfficiencyConfig] = Field(min_length=1)
    """By job type."""


def shipped(name: str) -> Path:
    """The file of coefficients that ships under this name."""
    return FOLDER / f"{name}.yaml"


def load_analytic(path: Path) -> dict[str, SpeedCurve]:
    """Curves by job type.

    Raises:
        InvalidConfiguration: the file cannot be used.
    """
    return load(AnalyticFile, path).parsed()


def load_scaling(path: Path) -> dict[str, dict[str, ScalingCurve]]:
    """Curves by GPU type, then job type.

    Raises:
        InvalidConfiguration: the file cannot be used.
    """
    return load(ScalingFile, path).parsed()


def load_goodput(path: Path) -> tuple[dict[str, dict[str, Timing]], dict[str, BatchEfficiency]]:
    """Timings by GPU type, then job type, and trainings by job type.

    Raises:
        InvalidConfiguration: the file cannot be used.
    """
    file = load(GoodputFile, path)
    timings = {
        accelerator: {job_type: timing.parsed() for job_type, timing in by_type.items()}
        for accelerator, by_type in file.timings.items()
    }
    return timings, {job_type: training.parsed() for job_type, training in file.trainings.items()}
