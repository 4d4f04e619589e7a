"""The `speeds` section of an experiment: which model of the truth, and what slows jobs down on top of it.

speeds:
  form: measured                # or analytic, elastic, scaling, goodput, recorded
  table: data:dl2/speed.csv
  spread: {cost: 0.3}           # each of these is optional
  stragglers: {probability: 0.02, slowdown_max: 3}
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import Field

from fedsched.config import Tree
from fedsched.policy.optimus import SpeedCurve
from fedsched.sim.datafiles import resolve
from fedsched.sim.dl2_workload import EPOCH_SAMPLES
from fedsched.sim.ports import TrueSpeeds, Workload
from fedsched.sim.speed import SPEEDS
from fedsched.sim.speeds.analytic import AnalyticSpeeds
from fedsched.sim.speeds.coefficients import Five, load_analytic, load_goodput, load_scaling, shipped
from fedsched.sim.speeds.declared import Misdeclared
from fedsched.sim.speeds.goodput import GoodputSpeeds
from fedsched.sim.speeds.interference import Interference
from fedsched.sim.speeds.noise import NoisySpeeds
from fedsched.sim.speeds.points import read_points
from fedsched.sim.speeds.recorded import RecordedSpeeds
from fedsched.sim.speeds.scaling import ScalingSpeeds
from fedsched.sim.speeds.spread import SpreadPenalty
from fedsched.sim.speeds.stragglers import Stragglers
from fedsched.sim.speeds.table import DIGITS, MeasuredSpeeds

T = TypeVar("T")
Cost = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]


class ByTypeConfig(Tree):
    """A slowdown as a fraction: 0.3 is 30 % longer."""

    cost: Cost
    by_type: dict[str, Cost] = Field(default={})
    """Instead of `cost`, for single job types."""


class StragglersConfig(Tree):
    """Workers that are slow for no visible reason."""

    probability: float = Field(ge=0, le=1)
    """Of a worker to be slow."""
    slowdown_max: float = Field(ge=1)
    """A slow worker takes 1 to so many times as long."""


class _Speeds(Tree, ABC):
    """What every form may have on top."""

    spread: ByTypeConfig | None = None
    """How much slower a job is with its tasks spread over very many nodes."""
    interference: ByTypeConfig | None = None
    """How much slower it is for each task of another job on its nodes."""
    stragglers: StragglersConfig | None = None
    noise: float = Field(default=0.0, ge=0, lt=1)
    """How far a job's speed may be from its type's, either way, as a fraction; drawn anew for every allocation."""

    def model(self, seed: int = 0, base: Path = Path()) -> TrueSpeeds:
        """The speeds.

        Args:
            seed: of whatever is random.
            base: folder that relative paths start from.

        Raises:
            NotFound: a file is not there.
            InvalidInput: a file cannot be used.
        """
        model = self._bare(base)
        if self.spread is not None:
            model = SpreadPenalty(model, self.spread.cost, self.spread.by_type)
        if self.interference is not None:
            model = Interference(model, self.interference.cost, self.interference.by_type)
        if self.stragglers is not None:
            model = Stragglers(model, seed, self.stragglers.probability, self.stragglers.slowdown_max)
        return NoisySpeeds(model, seed, self.noise) if self.noise else model

    @abstractmethod
    def _bare(self, base: Path) -> TrueSpeeds:
        """The model without anything on top."""


class MeasuredConfig(_Speeds):
    """A table of measurements."""

    form: Literal["measured"]
    table: str
    """Path of a CSV file, or `data:<folder>/<file>` for public data."""
    epoch_samples: dict[str, Positive] = Field(default={})
    """Samples in an epoch, by job type; those of DL2's job types are known."""
    keep_failed: bool = True
    """Whether measurements of 0 count as speeds, as in DL2's reference, or are left out."""
    digits: int | None = Field(default=DIGITS, ge=0, le=15)
    """Decimals that speeds are rounded to; null: not at all."""

    def _bare(self, base: Path) -> TrueSpeeds:
        points = read_points(resolve(self.table, base))
        epoch_samples = {**EPOCH_SAMPLES, **self.epoch_samples}
        return MeasuredSpeeds(points, epoch_samples, keep_failed=self.keep_failed, digits=self.digits)


class AnalyticConfig(_Speeds):
    """Optimus's form."""

    form: Literal["analytic"]
    coefficients: str = "kinds"
    """`kinds`: eight made-up kinds of model; `dl2_fitted`: DL2's eight, fitted to its table; or a file's path."""
    curves: dict[str, Five] = Field(default={})
    """More job types, or other coefficients of the same, in seconds per epoch."""

    def _bare(self, base: Path) -> TrueSpeeds:
        curves = (
            SPEEDS if self.coefficients == "kinds" else _loaded(self.coefficients, ("dl2_fitted",), base, load_analytic)
        )
        return AnalyticSpeeds({**curves, **{job_type: SpeedCurve(five) for job_type, five in self.curves.items()}})


class ScalingCurvesConfig(_Speeds):
    """Curves per GPU type."""

    form: Literal["scaling"]
    coefficients: str = "scaling_fitted"
    """`scaling_fitted`: fitted to public measurements on A100, K80, P100, T4 and V100; or a file's path."""
    epoch_iterations: dict[str, Positive] = Field(default={})
    """Iterations in an epoch, by job type; 1 where it is not named."""
    otherwise: str = ""
    """Job type whose curves hold for those that have none."""

    def _bare(self, base: Path) -> TrueSpeeds:
        curves = _loaded(self.coefficients, ("scaling_fitted",), base, load_scaling)
        return ScalingSpeeds(curves, self.epoch_iterations, self.otherwise)


class ElasticSpeedsConfig(_Speeds):
    """What goes with the workload `elastic`: curves of models with and without parameter servers."""

    form: Literal["elastic"]

    def _bare(self, base: Path) -> TrueSpeeds:
        from fedsched.sim.elastic_workload import ElasticSpeeds

        return ElasticSpeeds()


class GoodputConfig(_Speeds):
    """Pollux's form."""

    form: Literal["goodput"]
    coefficients: str = "goodput_fitted"
    """`goodput_fitted`: iteration times fitted to public measurements, batches and noise assumed; or a file's path."""

    def _bare(self, base: Path) -> TrueSpeeds:
        return GoodputSpeeds(*_loaded(self.coefficients, ("goodput_fitted",), base, load_goodput))


class RecordedConfig(_Speeds):
    """A trace's own durations."""

    form: Literal["recorded"]
    exponent: float = Field(default=1.0, ge=0, le=1)
    """With a fraction `f` of its workers a job has `f ** exponent` of its speed."""

    def _bare(self, base: Path) -> TrueSpeeds:
        return RecordedSpeeds(self.exponent)


def _loaded(name: str, known: tuple[str, ...], base: Path, load: Callable[[Path], T]) -> T:
    """Coefficients that ship under this name, or those in the file of this path."""
    return load(shipped(name) if name in known else resolve(name, base))


SpeedsConfig = Annotated[
    MeasuredConfig | AnalyticConfig | ElasticSpeedsConfig | ScalingCurvesConfig | GoodputConfig | RecordedConfig,
    Field(discriminator="form"),
]
"""The section; it always says its form."""

Error = Annotated[float, Field(ge=0, lt=1)]


class EstimatesConfig(Tree):
    """How wrong schedulers are about jobs, whose truth stays what it is. Errors are fractions, either way."""

    length_error: Error = 0.0
    """Of the lengths that jobs declare."""
    speed_error: Error = 0.0
    """Of the speeds that an oracle tells."""

    def declared(self, workload: Workload) -> Workload:
        """The workload with what its jobs declare."""
        return Misdeclared(workload, self.length_error) if self.length_error else workload

    def told(self, truth: TrueSpeeds, seed: int) -> TrueSpeeds:
        """The speeds that `oracle` is to be made of."""
        return NoisySpeeds(truth, seed, self.speed_error, "estimates") if self.speed_error else truth
