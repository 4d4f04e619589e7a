"""Teaches an experiment's policies before they are judged, several times each, and tells how long they needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

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

    def plain(self, quality_jct_slots: float | None) -> dict[str, Any]:
        """As data."""
        return {
            "experiment": self.arm.experiment,
            "policy": self.arm.policy,
            "training_seed": self.seed,
            "problem": self.problem or None,
            "quality_jct_slots": quality_jct_slots,
            "slots_to_quality": None if quality_jct_slots is None else self.slots_to(quality_jct_slots),
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
    promotion = config.promotion or (section.promotion if section else None)
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
        # What is kept of a run is the federation's versions; where clusters look at them first, not all of them decide.
        look_slots=experiment.training.look_slots if promotion is None or promotion.accept == "at_once" else (),
        learning=config.learning or (section.learning if section else LearningConfig()),
        learning_rate=config.learning_rate or (section.learning_rate if section else usual.learning_rate),
        batch_size=config.batch_size or (section.batch_size if section else usual.batch_size),
        samples_min=config.samples_min or (section.samples_min if section else usual.samples_min),
        together=config.together,
        promotion=promotion,
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
    to_quality: Interval | None
    """Slots of each cluster until it was good enough; None where not all trainings got there, or nothing was asked."""
    reached: int
    """Trainings that became good enough."""


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
    return tuple(_progress(arm, several, quality_jct_slots[arm.experiment]) for arm, several in found.items())


def _progress(arm: Arm, taught: Sequence[Taught], quality_jct_slots: float | None) -> TeachingProgress:
    needed = [] if quality_jct_slots is None else [one.slots_to(quality_jct_slots) for one in taught]
    reached = [slots for slots in needed if slots is not None]
    return TeachingProgress(
        arm=arm,
        trainings=len(taught),
        slots=sum(one.looks[-1].slots for one in taught) / len(taught),
        start=interval([one.looks[0].jct_slots for one in taught]),
        lowest=interval([one.lowest.jct_slots for one in taught]),
        last=interval([one.looks[-1].jct_slots for one in taught]),
        to_quality=interval(reached) if reached and len(reached) == len(taught) else None,
        reached=len(reached),
    )
