"""Teaches an experiment's policies before they are judged, several times each, and tells how long they needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import exp, log
from typing import TYPE_CHECKING, Any, Literal

from fedsched.config import LearningConfig
from fedsched.core.ids import ClusterName
from fedsched.core.speeds import SpeedStatistics
from fedsched.errors import FedschedError
from fedsched.policy import registry
from fedsched.policy.checkpoint import Checkpoint
from fedsched.sim.comparing import Arm, Interval, interval
from fedsched.sim.experiment import ExperimentConfig
from fedsched.sim.running import Request, whole_jct_slots
from fedsched.sim.seeds import HELD_OUT_OFFSET, apart
from fedsched.sim.training_config import ALL, LOOK
from fedsched.sim.workers import INTERRUPTED, Share

if TYPE_CHECKING:
    from fedsched.sim.speed_training import Run
    from fedsched.sim.teaching import Recipe, TrainingState


@dataclass(frozen=True, slots=True)
class Lesson:
    """A policy to be taught once."""

    name: str
    """Of the experiment."""
    experiment: ExperimentConfig
    policy: str
    """Label of one of the policies that the experiment's section `training` names."""
    seed: int
    """Of the training, from 1: with 0 its jobs would be those that policies are judged on."""


@dataclass(frozen=True, slots=True)
class Look:
    """How good a policy was after so much learning, on held-out jobs."""

    runs: int
    """It had learnt from."""
    slots: float
    """That each cluster had decided meanwhile, on average."""
    jct_slots: float
    """Average completion time of all jobs."""
    by_cluster: tuple[tuple[str, float], ...]
    """The same by cluster, where there are several."""

    def plain(self) -> dict[str, Any]:
        """As data."""
        return {"runs": self.runs, "slots": self.slots, "jct_slots": self.jct_slots, "clusters": dict(self.by_cluster)}


@dataclass(frozen=True, slots=True, eq=False)
class Taught:
    """What came of a lesson."""

    arm: Arm
    seed: int
    looks: tuple[Look, ...]
    weights: Mapping[ClusterName, Checkpoint | SpeedStatistics] = field(default_factory=dict)
    """After the last run, whatever the looks say, by cluster; statistics where the policy goes by those."""
    problem: str = ""
    """Why it came to nothing; empty where it did not."""

    @property
    def lowest(self) -> Look:
        """The look at its best; among equal ones the first."""
        return min(self.looks, key=lambda look: look.jct_slots)

    def slots_to(self, jct_slots: float) -> float | None:
        """Slots of each cluster until the first look at which it was as good as that; None if it never was."""
        return next((look.slots for look in self.looks if look.jct_slots <= jct_slots), None)

    def slots_for_good(self, jct_slots: float) -> float | None:
        """Slots of each cluster until it was as good as that and no later look was worse; None if the last one is."""
        since: float | None = None
        for look in self.looks:
            since = None if look.jct_slots > jct_slots else look.slots if since is None else since
        return since

    def plain(self, quality_jct_slots: float | None) -> dict[str, Any]:
        """As data."""
        return {
            "experiment": self.arm.experiment,
            "policy": self.arm.policy,
            "training_seed": self.seed,
            "problem": self.problem or None,
            "quality_jct_slots": quality_jct_slots,
            "slots_to_quality": None if quality_jct_slots is None else self.slots_to(quality_jct_slots),
            "slots_for_good": None if quality_jct_slots is None else self.slots_for_good(quality_jct_slots),
            "looks": [look.plain() for look in self.looks],
        }


def lessons_of(name: str, experiment: ExperimentConfig, labels: Sequence[str]) -> list[Lesson]:
    """The lessons that have to be given before these policies run."""
    section = experiment.training
    if section is None:
        return []
    taught = [label for label in labels if label in section.policies]
    return [Lesson(name, experiment, label, seed) for label in taught for seed in range(1, section.seeds + 1)]


def recipe_of(lesson: Lesson) -> Recipe:
    """How the policy is taught: the lesson, and where that says nothing the experiment's federation."""
    from fedsched.sim.teaching import Recipe  # loads torch, which takes a second

    experiment, section = lesson.experiment, lesson.experiment.federation
    assert experiment.training is not None, "a lesson of an experiment that teaches nobody"
    config = experiment.training.policies[lesson.policy]
    # A training on line has the defaults of `fedsched train online`.
    usual = Recipe(lesson.name, experiment, lesson.policy, "online")
    return Recipe(
        name=lesson.name,
        experiment=experiment,
        label=lesson.policy,
        mode="online" if section is None else "federated",
        source=_start(lesson),
        window=config.window,
        seed=lesson.seed,
        validate_every=experiment.training.look_every,
        validation_seeds=experiment.training.look_seeds,
        look_slots=experiment.training.look_slots,
        learning=config.learning or (section.learning if section else LearningConfig()),
        learning_rate=config.learning_rate or (section.learning_rate if section else usual.learning_rate),
        half_after=config.half_after,
        batch_size=config.batch_size or (section.batch_size if section else usual.batch_size),
        samples_min=config.samples_min or (section.samples_min if section else usual.samples_min),
        together=config.together,
        promotion=config.promotion or (section.promotion if section else None),
    )


def teach(lesson: Lesson, progress: Share = lambda _: None) -> Taught:
    """Give a lesson. The same one gives the same weights; what goes wrong with it is told, and takes nothing along."""
    experiment = lesson.experiment
    assert experiment.training is not None
    runs = experiment.training.policies[lesson.policy].runs
    by_statistics = experiment.policies[lesson.policy].name == registry.LEARNED_SPEED

    def tell(done: int) -> None:
        progress(done / runs if runs else 1.0)

    try:
        return _let_see(lesson, runs, tell) if by_statistics else _trained(lesson, runs, tell)
    except KeyboardInterrupt:
        return untaught(lesson, INTERRUPTED)
    except FedschedError as error:
        return untaught(lesson, error.message)


def untaught(lesson: Lesson, why: str) -> Taught:
    """A lesson that came to nothing."""
    return Taught(Arm(lesson.name, lesson.policy), lesson.seed, (), problem=why)


def _start(lesson: Lesson) -> str:
    """What it begins with: a word for it, or a path."""
    assert lesson.experiment.training is not None
    start = lesson.experiment.training.policies[lesson.policy].start
    if start in ("builtin", "scratch"):
        return start
    return lesson.experiment.beside(start.replace("{seed}", str(lesson.seed)))


def _trained(lesson: Lesson, runs: int, tell: Callable[[int], None]) -> Taught:
    """By gradients."""
    from fedsched.sim.teaching import Training  # loads torch, which takes a second

    def hear(row: dict[str, Any], state: TrainingState) -> None:
        tell(row["episode"])

    training = Training(recipe_of(lesson))
    training.run(runs, hear)
    looks = (_look(row, len(lesson.experiment.clusters)) for row in training.state.rows if f"{LOOK}{ALL}" in row)
    return Taught(Arm(lesson.name, lesson.policy), lesson.seed, tuple(looks), training.deciding())


def _let_see(lesson: Lesson, runs: int, tell: Callable[[int], None]) -> Taught:
    """By sums of the speeds that it saw, in the experiment's only cluster."""
    from fedsched.policy.learned_speed import LearnedSpeedOptions
    from fedsched.sim.speed_training import EXPLORES, train  # its solver takes seconds to load

    experiment = lesson.experiment
    section, config = experiment.training, experiment.policies[lesson.policy]
    assert section is not None
    looks: list[Look] = []

    def keep(known: SpeedStatistics, over: Sequence[Run]) -> None:
        if len(over) % section.look_every == 0 or len(over) == runs:
            looks.append(Look(len(over), sum(run.slots for run in over), _held_out_jct_slots(lesson, known), ()))
        tell(len(over))

    options = LearnedSpeedOptions.model_validate(config.options).model_copy(update={"explore": EXPLORES, "learn": True})
    first = registry.statistics(_start(lesson))
    keep(first, ())
    seed = apart(experiment.seed, lesson.seed)
    last, _ = train([experiment], options, seed=seed, runs=runs, known=first, keep=keep)
    return Taught(Arm(lesson.name, lesson.policy), lesson.seed, tuple(looks), _everywhere(lesson, last))


def _held_out_jct_slots(lesson: Lesson, known: SpeedStatistics) -> float:
    """Average completion time with these statistics on the jobs that looks are for."""
    experiment = lesson.experiment
    assert experiment.training is not None
    weights, seeds = _everywhere(lesson, known), range(experiment.training.look_seeds)
    jcts = [
        whole_jct_slots(
            Request(lesson.name, experiment, lesson.policy, experiment.seed + HELD_OUT_OFFSET + number, taught=weights)
        )
        for number in seeds
    ]
    return sum(jcts) / len(jcts)


def _everywhere(lesson: Lesson, known: SpeedStatistics) -> dict[ClusterName, SpeedStatistics]:
    return {ClusterName(cluster.name): known for cluster in lesson.experiment.clusters}


def _look(row: Mapping[str, Any], clusters: int) -> Look:
    figures = {name.removeprefix(LOOK): value for name, value in row.items() if name.startswith(LOOK)}
    jct_slots = figures.pop(ALL)
    return Look(row["episode"], row["slots"] / clusters, jct_slots, tuple(sorted(figures.items())))


# --- All trainings of one policy -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times as long it took, with the 95 % interval of the trainings' ratios; of their logarithms, because
    half as long and twice as long are equally far from as long.
    """

    mean: float
    low: float | None
    """None where there is one training."""
    high: float | None
    bound: Literal["", "at most", "at least"] = ""
    """Where a training never became good enough, all its slots stand in, which are fewer than it would have needed."""

    def plain(self) -> dict[str, Any]:
        """As data."""
        return {"mean": self.mean, "ci95_low": self.low, "ci95_high": self.high, "bound": self.bound or None}


@dataclass(frozen=True, slots=True)
class Needed:
    """Slots of each cluster until a policy was good enough, by training."""

    slots: tuple[float | None, ...]
    """None: it never was."""
    learnt: tuple[float, ...]
    """All that it had."""

    @property
    def reached(self) -> int:
        """Trainings that became good enough."""
        return sum(slots is not None for slots in self.slots)

    @property
    def mean(self) -> Interval | None:
        """None where not all trainings became good enough: the mean of the others would flatter."""
        known = [slots for slots in self.slots if slots is not None]
        return interval(known) if known and len(known) == len(self.slots) else None

    def relative_to(self, other: Needed) -> Ratio | None:
        """How many times as long as the other; None where both failed in some training, which says nothing."""
        misses, others = None in self.slots, None in other.slots
        if misses and others:
            return None
        ours, theirs = (
            [whole if slots is None else slots for slots, whole in zip(one.slots, one.learnt, strict=True)]
            for one in (self, other)
        )
        if 0.0 in (*ours, *theirs):
            return None
        logs = interval([log(own / reference) for own, reference in zip(ours, theirs, strict=True)])
        low, high = (None if end is None else exp(end) for end in (logs.low, logs.high))
        return Ratio(exp(logs.mean), low, high, "at least" if misses else "at most" if others else "")


@dataclass(frozen=True, slots=True)
class TeachingProgress:
    """How a policy fared while it was taught, over all its trainings."""

    arm: Arm
    trainings: int
    slots: float
    """That each cluster decided in one training."""
    start: Interval
    """Average completion time in slots, before the first run."""
    lowest: Interval
    """At each training's best look, which no user could know before."""
    last: Interval
    to_quality: Needed | None = None
    """None where nothing was asked."""
    for_good: Needed | None = None
    """Until it was good enough and stayed so."""
    ratio: Ratio | None = None
    """Of the slots to quality and those of the experiment's first policy, training by training; None for itself."""
    ratio_for_good: Ratio | None = None

    def plain(self) -> dict[str, Any]:
        """As data."""
        return {
            "experiment": self.arm.experiment,
            "policy": self.arm.policy,
            "trainings": self.trainings,
            "slots": self.slots,
            **{
                f"jct_slots_{name}": {"mean": figure.mean, "ci95": figure.half}
                for name, figure in (("start", self.start), ("lowest", self.lowest), ("last", self.last))
            },
            "slots_to_quality": self.to_quality and list(self.to_quality.slots),
            "slots_to_quality_to_first": self.ratio and self.ratio.plain(),
            "slots_for_good": self.for_good and list(self.for_good.slots),
            "slots_for_good_to_first": self.ratio_for_good and self.ratio_for_good.plain(),
        }


def progress_of(
    taught: Sequence[Taught], quality_jct_slots: Mapping[str, float | None]
) -> tuple[TeachingProgress, ...]:
    """One for each policy whose lessons came to something.

    Args:
        quality_jct_slots: what is good enough, by experiment.
    """
    found: dict[Arm, list[Taught]] = {}
    for one in taught:
        if not one.problem:
            found.setdefault(one.arm, []).append(one)
    firsts: dict[str, TeachingProgress] = {}
    told: list[TeachingProgress] = []
    for arm, several in found.items():
        progress = _progress(arm, several, quality_jct_slots[arm.experiment])
        first = firsts.setdefault(arm.experiment, progress)
        told.append(progress if first is progress else _beside(progress, first))
    return tuple(told)


def _progress(arm: Arm, taught: Sequence[Taught], quality_jct_slots: float | None) -> TeachingProgress:
    learnt = tuple(one.looks[-1].slots for one in taught)
    to_quality = for_good = None
    if quality_jct_slots is not None:
        to_quality = Needed(tuple(one.slots_to(quality_jct_slots) for one in taught), learnt)
        for_good = Needed(tuple(one.slots_for_good(quality_jct_slots) for one in taught), learnt)
    return TeachingProgress(
        arm=arm,
        trainings=len(taught),
        slots=sum(learnt) / len(taught),
        start=interval([one.looks[0].jct_slots for one in taught]),
        lowest=interval([one.lowest.jct_slots for one in taught]),
        last=interval([one.looks[-1].jct_slots for one in taught]),
        to_quality=to_quality,
        for_good=for_good,
    )


def _beside(ours: TeachingProgress, first: TeachingProgress) -> TeachingProgress:
    """With how long it took in comparison, where both had as many trainings that came to something."""
    if ours.trainings != first.trainings:
        return ours
    return replace(
        ours,
        ratio=_between(ours.to_quality, first.to_quality),
        ratio_for_good=_between(ours.for_good, first.for_good),
    )


def _between(ours: Needed | None, first: Needed | None) -> Ratio | None:
    return ours.relative_to(first) if ours is not None and first is not None else None
