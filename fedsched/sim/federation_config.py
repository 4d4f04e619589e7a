"""How the clusters of an experiment learn together, as it is declared: rounds, the link to them, and who misbehaves."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from fedsched.config import LearningConfig, Name, PromotionConfig, RoundConfig, Tree

Share = Annotated[float, Field(ge=0, le=1)]
BEATS = 10
"""Reports of an agent in one interval between rounds, where nothing is said."""


class LinkConfig(Tree):
    """How messages travel between agents and aggregator. Those of one cluster keep their order, as on one stream."""

    delay_s: float = Field(default=0.05, ge=0)
    jitter_s: float = Field(default=0.0, ge=0)
    """A message takes up to so much longer."""
    loss: Share = 0.0
    """Probability of a message to get lost."""
    twice: Share = 0.0
    """Probability of a message to come a second time."""


class AwayConfig(Tree):
    """A cluster that leaves and returns: its jobs run on, and nothing passes between it and the aggregator."""

    first_s: float = Field(default=0.0, ge=0)
    """When it leaves for the first time."""
    for_s: float = Field(gt=0)
    """For how long it is away each time."""
    every_s: float | None = Field(default=None, gt=0)
    """How long from one leave to the next; None: it leaves once."""

    @model_validator(mode="after")
    def _returns(self) -> AwayConfig:
        if self.every_s is not None and self.for_s >= self.every_s:
            raise ValueError(f"for_s is {self.for_s:g}; it must be below every_s ({self.every_s:g})")
        return self

    def covers(self, time_s: float) -> bool:
        """Whether the cluster is away at that time."""
        since_s = time_s - self.first_s
        if since_s < 0:
            return False
        return (since_s if self.every_s is None else since_s % self.every_s) < self.for_s


class SpoilConfig(Tree):
    """A cluster whose gradients are bad."""

    kind: Literal["nan", "huge", "dimensions", "stale", "noise", "reversed"]
    """Not finite, far too long, of other shapes, of an older version, drawn at random, or pointing the wrong way; no
    check finds the last two."""
    share: Share = 1.0
    """Of its updates."""


class MemberConfig(Tree):
    """What is unusual about one cluster."""

    compute_s: float = Field(default=0.0, ge=0)
    """How long its learner takes for a gradient; a straggler's longer than the rounds' deadline."""
    away: AwayConfig | None = None
    spoils: SpoilConfig | None = None


class FederationSectionConfig(RoundConfig):
    """An experiment's federation: the rounds of the live aggregator, and what surrounds them here."""

    report_s: float | None = Field(default=None, gt=0)
    """How often an agent tells its numbers; a tenth of the interval where nothing is said. Who is silent for three
    reports has left."""
    link: LinkConfig = LinkConfig()
    members: dict[Name, MemberConfig] = Field(default_factory=dict)
    """By cluster."""
    together: dict[str, int] = Field(default_factory=dict)
    """By policy label: how many clusters share one federation, in the file's order; 0: they do not learn. Labels that
    are not named, and can be taught, learn in one federation of all clusters."""
    learning: LearningConfig = LearningConfig()
    promotion: PromotionConfig = PromotionConfig(accept="at_once")
    """Here a round's version decides at once unless it is said otherwise: it is the rounds that are looked at."""
    seed: int = Field(default=0, ge=0)
    """Of batches, of the link and of what is spoilt; a run adds its own."""

    @property
    def beat_s(self) -> float:
        """How often an agent tells its numbers."""
        return self.report_s if self.report_s is not None else self.interval_s / BEATS

    @model_validator(mode="after")
    def _groups_are_possible(self) -> FederationSectionConfig:
        for label, size in self.together.items():
            if size < 0:
                raise ValueError(f"together.{label} is {size}; 0 or more clusters were expected")
        return self
