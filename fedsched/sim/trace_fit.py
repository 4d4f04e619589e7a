"""What is known of a trace once it is fitted: the parameters of a generator of jobs, and their files.

For each cluster of the trace:
- sizes: the shares of the GPU counts; counts that are rare are put together into classes;
- arrivals of each class: a Poisson process whose rate follows the cluster's hour of the day and day of the week, times
  a gamma factor of mean 1 for each day and another for each hour. Each class has factors of its own: the many small
  jobs come in bursts, those that hold most GPU-hours hardly do, and a queue depends on the latter;
- durations: for each class a quantile curve (linear in the logarithm between its knots), and above it a bounded Pareto
  tail whose exponent is chosen so that the class has the GPU-hours of the trace, most of which its longest jobs hold;
- likeness: jobs of a class come in batches, one after the other, of a geometric number of jobs that are of one size and
  whose durations resemble each other (a Gaussian copula, so that the curve of durations stays what it is); and they
  lean to the shorter or longer where many jobs come.

Hours and days count from the trace's own beginning, its second 0. What is not in the model: that users wait for earlier
jobs before they submit more, and that a cluster's use grows or shrinks over months.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray
from pydantic import Field, model_validator

from fedsched.config import Tree, load
from fedsched.errors import NotFound
from fedsched.files import write_whole

Floats = NDArray[np.float64]
HOUR_S = 3600.0
DAY_S = 86400.0
HOURS, WEEKDAYS = 24, 7
KNOTS = 29
NARROWING = 1.5
"""The steps of probability between knots narrow towards the long durations, where an error costs more GPU-hours."""
EXPONENT_MAX = 50.0
SHIPPED = Path(__file__).with_name("fitted")


def knots(count: int, body: float) -> Floats:
    """Probabilities from 0 to `body` of the knots of a duration curve."""
    probabilities: Floats = body * (1.0 - np.linspace(1.0, 0.0, count) ** NARROWING)
    return probabilities


class SizeClass(Tree):
    """GPU counts that share a distribution of durations."""

    gpus: tuple[float, ...] = Field(min_length=1)
    shares: tuple[float, ...]
    """Of the cluster's jobs, one for each of `gpus`."""
    seconds: tuple[float, ...] = Field(min_length=2)
    """Durations at probabilities from 0 to 1 - `tail`, at the steps that `knots` makes."""
    tail: float = Field(ge=0, lt=1)
    """Probability of a duration in the tail, between the last of `seconds` and `longest_s`."""
    tail_exponent: float = Field(ge=-EXPONENT_MAX, le=EXPONENT_MAX)
    longest_s: float
    day_variance: float = Field(default=0.0, ge=0)
    """Of the random factor, of mean 1, that a day's rate of such jobs is multiplied by."""
    hour_variance: float = Field(default=0.0, ge=0)
    """The same for each single hour."""
    batch_jobs: float = Field(default=1.0, ge=1)
    """Mean number of jobs of a batch: they come one after the other, and are of one size."""
    likeness: float = Field(default=0.0, ge=0, le=1)
    """Correlation of their durations, as normal scores."""
    burst_bias: float = Field(default=0.0, gt=-1, lt=1)
    """Correlation of durations with the rate at which such jobs come, as normal scores: below 0 bursts are short."""

    @model_validator(mode="after")
    def _is_a_distribution(self) -> SizeClass:
        if len(self.shares) != len(self.gpus):
            raise ValueError(f"there are {len(self.gpus)} gpus and {len(self.shares)} shares; one each was expected")
        if min(self.gpus) <= 0 or min(self.shares) <= 0:
            raise ValueError("gpus and shares must be above 0")
        if self.seconds[0] <= 0 or any(b < a for a, b in zip(self.seconds, self.seconds[1:], strict=False)):
            raise ValueError("seconds must be above 0 and never fall")
        if self.longest_s < self.seconds[-1]:
            raise ValueError(f"longest_s is {self.longest_s:g}; it cannot be below the last of seconds")
        return self

    def durations_s(self, chances: Floats) -> Floats:
        """The durations at these probabilities, in whole seconds from 1."""
        body = 1.0 - self.tail
        result = np.exp(np.interp(chances, knots(len(self.seconds), body), np.log(self.seconds)))
        in_tail = chances > body
        if in_tail.any():
            result[in_tail] = self._tail_s((chances[in_tail] - body) / self.tail)
        return np.maximum(np.rint(result), 1.0)

    def _tail_s(self, chances: Floats) -> Floats:
        spread, exponent = math.log(self.longest_s / self.seconds[-1]), self.tail_exponent
        if abs(exponent) < 1e-9:
            return self.seconds[-1] * np.exp(chances * spread)
        return self.seconds[-1] * np.power(1.0 + chances * math.expm1(-exponent * spread), -1.0 / exponent)


class ClusterFit(Tree):
    """The parameters of one cluster."""

    name: str = Field(min_length=1)
    jobs_per_day: float = Field(gt=0)
    by_hour: tuple[float, ...] = Field(min_length=HOURS, max_length=HOURS)
    """Rate in each hour of the day against the mean; the first begins with the trace's second 0."""
    by_day: tuple[float, ...] = Field(min_length=WEEKDAYS, max_length=WEEKDAYS)
    """Rate on each day of the week against the mean."""
    classes: tuple[SizeClass, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _are_shares(self) -> ClusterFit:
        if min(self.by_hour) < 0 or min(self.by_day) < 0 or not sum(self.by_hour) or not sum(self.by_day):
            raise ValueError("by_hour and by_day cannot be negative, nor all 0")
        total = sum(share for part in self.classes for share in part.shares)
        if abs(total - 1) > 0.01:
            raise ValueError(f"the shares of all classes add up to {total:g}; 1 was expected")
        return self


class TraceFit(Tree):
    """The parameters of a whole trace."""

    source: str
    """What it was fitted to."""
    days: float = Field(gt=0)
    """How long that was."""
    clusters: tuple[ClusterFit, ...] = Field(min_length=1)


def save(path: Path, parameters: TraceFit) -> None:
    """Write parameters as YAML.

    Raises:
        OSError: it could not be written.
    """
    plain = _lists(parameters.model_dump())
    write_whole(path, yaml.safe_dump(plain, sort_keys=False, default_flow_style=None, width=120).encode())


def _lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _lists(item) for key, item in value.items()}
    return [_lists(item) for item in value] if isinstance(value, tuple | list) else value


def shipped() -> list[str]:
    """Names of the parameters that come with the package."""
    return sorted(path.stem for path in SHIPPED.glob("*.yaml"))


def load_fit(name: str, base: Path = Path()) -> TraceFit:
    """Parameters that come with the package, by name, or those in a YAML file.

    Args:
        base: folder that a relative path starts from.

    Raises:
        NotFound: there are none of this name.
        InvalidConfiguration: the file has problems.
    """
    if name in shipped():
        return load(TraceFit, SHIPPED / f"{name}.yaml")
    path = base / Path(name).expanduser()
    if not path.is_file():
        raise NotFound(f"there is no fit {name}; the package has {', '.join(shipped())}", "name one, or a YAML file")
    return load(TraceFit, path)
