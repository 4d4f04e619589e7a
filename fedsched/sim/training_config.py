"""What an experiment's policies learn before they are judged, as it is declared: each may be taught in its own way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, StringConstraints, model_validator

from fedsched.config import LearningConfig, PromotionConfig, Tree

LOOK = "jct_slots."
"""What the names of a look's figures begin with, in a training's log."""
ALL = "all"
"""What they end with for all clusters together."""

Start = Annotated[str, StringConstraints(pattern=r"^(builtin|scratch|.+\.safetensors)$")]


class LessonConfig(Tree):
    """How one policy is taught: on line in an experiment's only cluster, or through the rounds of its federation.

    `learned_speed`, which has no weights, learns as in `fedsched train speeds`, by `start` and `runs` alone.
    """

    start: Start = "builtin"
    """First weights: those that ship with the package, fresh ones, or those of a `.safetensors` file, relative to the
    experiment's; `{seed}` in its name stands for the number of the training, from 1, where each has a file."""
    window: int | None = Field(default=None, ge=1, le=1000)
    """Jobs that fresh weights see at once; None: as many as those that ship."""
    runs: int = Field(default=12, ge=0, le=100_000)
    """Simulated runs to learn from; 0: it is judged as it starts."""
    learning: LearningConfig | None = None
    """DL2's recipe with what is turned off; None: as the section `federation` says, or all of it on line."""
    learning_rate: float | None = Field(default=None, gt=0)
    """Step size of Adam; None: as the section `federation` says, or 1e-4 on line."""
    half_after: float | None = Field(default=None, gt=0)
    """How steps shrink, see `RoundConfig`; None: as the section `federation` says, or they do not on line."""
    batch_size: int | None = Field(default=None, ge=1)
    """Decisions of each gradient; None: as the section `federation` says, or 256 on line."""
    samples_min: int | None = Field(default=None, ge=1)
    """Decisions that a cluster must know the reward of before it gives a gradient; None: likewise."""
    together: int | None = Field(default=None, ge=1)
    """Clusters that share one federation, in the file's order; None: all of them."""
    promotion: PromotionConfig | None = None
    """What each cluster does with the federation's versions; None: as the section `federation` says."""

    @model_validator(mode="after")
    def _only_fresh_weights_have_a_choice(self) -> LessonConfig:
        if self.window is not None and self.start != "scratch":
            raise ValueError(
                f"window is {self.window} and start is {self.start}; `start: scratch` was expected with it"
            )
        return self


class TrainingConfig(LessonConfig):
    """Which policies are taught before they run, and how often; what stands beside `policies` holds for all of them."""

    seeds: int = Field(default=3, ge=1, le=1000)
    """Trainings of each policy; each draws its jobs, fresh weights, choices and batches from a seed of its own, and
    none of those jobs is one that policies are judged on. Every one of them then runs on the jobs of every seed."""
    look_every: int = Field(default=1, ge=1)
    """Runs between two looks at what has been learnt."""
    look_slots: tuple[int, ...] = ()
    """Further looks after so many slots of each cluster, for federations: much is learnt within a run at first."""
    look_seeds: int = Field(default=1, ge=1)
    """Further held-out runs for each look. They only show the way; what is judged is what the last run left."""
    quality_jct_slots: float | None = Field(default=None, gt=0)
    """Average completion time, in slots, whose first look is told: how long it took to become that good."""
    policies: dict[str, LessonConfig] = Field(min_length=1)
    """By label; each says where it differs."""

    @model_validator(mode="after")
    def _looks_follow_each_other(self) -> TrainingConfig:
        if list(self.look_slots) != sorted({slots for slots in self.look_slots if slots > 0}):
            told = ", ".join(map(str, self.look_slots))
            raise ValueError(f"look_slots are {told}; growing numbers above 0 were expected")
        return self

    @model_validator(mode="before")
    @classmethod
    def _what_all_have_in_common(cls, value: Any) -> Any:
        """The lessons with what was said for all of them."""
        if not isinstance(value, Mapping) or not isinstance(value.get("policies"), Mapping):
            return value
        common = {name: value[name] for name in LessonConfig.model_fields if name in value}
        lessons = {label: _over(common, own) for label, own in value["policies"].items()}
        return {**value, "policies": lessons}


def _over(common: Mapping[str, Any], own: Any) -> Any:
    """What is said for one, over what is said for all; inside `learning` alike."""
    if not isinstance(own, Mapping):
        return own
    both = {**common, **own}
    parts = common.get("learning"), own.get("learning")
    if all(isinstance(part, Mapping) for part in parts):
        both["learning"] = {**parts[0], **parts[1]}  # type: ignore[dict-item]
    return both
