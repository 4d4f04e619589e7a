"""Trains a policy over many simulated runs, on line in one cluster or federated over several, resumable at every run.

A run (an episode) draws the experiment's jobs from the next seed, and is simulated to its end while the policy learns.
Between runs everything that the next one depends on lies in a `TrainingState`, which is a file: weights, the
optimiser's moments, what each cluster remembers, the numbers of versions and rounds, and the log. Chance is drawn from
streams that are named by seeds and numbers, so a training that was killed and resumed makes the same bytes as one
that was not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from msgspec import structs

from fedsched.config import LearningConfig, PolicyConfig, PromotionConfig
from fedsched.core.decision import Policy
from fedsched.core.ids import ClusterName
from fedsched.core.rounds import RoundOutcome
from fedsched.core.speeds import SpeedStatistics
from fedsched.errors import Failed, InvalidInput
from fedsched.federation.loop import Standing
from fedsched.federation.optimiser import ServerOptimiser
from fedsched.federation.source import Arrays
from fedsched.learn.kinds import AT_ONCE, first_weights, kind_of
from fedsched.learn.learner import ClusterLearner
from fedsched.learn.stepping import SteppingLearner
from fedsched.policy import registry
from fedsched.policy.checkpoint import Checkpoint
from fedsched.runtime.loop import Observer
from fedsched.sim.experiment import ExperimentConfig
from fedsched.sim.federating import Forming, School
from fedsched.sim.federation import first_standing
from fedsched.sim.federation_config import FederationSectionConfig
from fedsched.sim.results import RunResult
from fedsched.sim.running import Pupil, Request, Teachers, perform
from fedsched.sim.seeds import HELD_OUT_OFFSET, apart
from fedsched.sim.training_config import ALL, LOOK
from fedsched.sim.workers import INTERRUPTED
from fedsched.sim.world import World

Mode = Literal["online", "federated"]


@dataclass(frozen=True, slots=True)
class Recipe:
    """What is trained how. The same recipe makes the same bytes."""

    name: str
    """Of the experiment."""
    experiment: ExperimentConfig
    label: str
    """Of the experiment's policy that is taught."""
    mode: Mode
    source: str = "builtin"
    """First weights: see `first_weights`."""
    window: int | None = None
    """Jobs that fresh weights see at once."""
    seed: int = 0
    validate_every: int = 5
    """Runs between two looks at how good it is."""
    validation_seeds: int = 2
    """Held-out runs of each look; 0: nobody looks."""
    look_slots: tuple[int, ...] = ()
    """Also looked at is what was learnt after so many slots of each cluster, within runs; federated trainings only."""
    learning: LearningConfig = field(default_factory=LearningConfig)
    learning_rate: float = 1e-4
    half_after: float | None = None
    """Steps shrink, see `RoundConfig`; None: as the experiment's federation says, and on line they do not."""
    batch_size: int = 256
    samples_min: int = 256
    together: int | None = None
    """Clusters that share one federation; None: as the experiment says."""
    promotion: PromotionConfig | None = None
    """What clusters do with the federation's versions; None: as the experiment says."""

    @property
    def groups(self) -> int:
        """Federations, each with weights of its own."""
        clusters = len(self.experiment.clusters)
        return 1 if self.mode == "online" else -(-clusters // (self.together or clusters))

    def plain(self) -> dict[str, Any]:
        """All that decides what is made but for the first weights, as plain data."""
        learning = self.learning.model_dump(mode="json")
        return {
            "mode": self.mode,
            "policy": self.label,
            "window": self.window,
            "seed": self.seed,
            "validate_every": self.validate_every,
            "validation_seeds": self.validation_seeds,
            **({"look_slots": list(self.look_slots)} if self.look_slots else {}),
            "learning_rate": self.learning_rate,
            "batch_size": self.batch_size,
            "samples_min": self.samples_min,
            "together": self.together,
            **({"half_after": self.half_after} if self.half_after is not None else {}),
            **({"promotion": self.promotion.model_dump(mode="json")} if self.promotion is not None else {}),
            **{f"learning.{name}": value for name, value in learning.items()},
            "experiment": self.experiment.model_dump(mode="json"),
        }

    def section(self) -> FederationSectionConfig:
        """The federation's rounds with what the recipe says of learning.

        Raises:
            InvalidInput: the experiment has none.
        """
        section = self.experiment.federation
        if section is None:
            raise InvalidInput(
                f"{self.name} has no federation; a section `federation` in the experiment was expected",
                "add one, see simulations/experiments/federation.yaml, or use `fedsched train online`",
            )
        return section.model_copy(
            update={
                "learning": self.learning,
                "learning_rate": self.learning_rate,
                "half_after": self.half_after or section.half_after,
                "batch_size": self.batch_size,
                "samples_min": self.samples_min,
                "promotion": self.promotion or section.promotion,
                "together": {self.label: self.together or len(self.experiment.clusters)},
            }
        )


@dataclass(slots=True)
class TrainingState:
    """All that the next run depends on, and the log of those before."""

    standings: list[Standing]
    """By federation; on line the only one holds weights, moments and the version."""
    learners: dict[ClusterName, ClusterLearner]
    deciding: dict[ClusterName, Checkpoint] = field(default_factory=dict)
    """What each cluster decides with, where clusters look at versions before they let them decide."""
    episodes: int = 0
    """Runs that are over."""
    slots: dict[str, int] = field(default_factory=dict)
    """Slots that were decided, by cluster."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    """The log: a row per run."""
    best: dict[str, Any] = field(default_factory=dict)
    """Row of the look with the lowest JCT, by name."""
    best_arrays: list[Arrays] = field(default_factory=list)
    """Its weights, by federation."""


Tell = Callable[[dict[str, Any], TrainingState], None]
"""Hears of each row of the log, and sees the state that it belongs to."""


class Training:
    """Carries a recipe out.

    Args:
        state: where to go on from; None: from the beginning.

    Raises:
        InvalidInput: the policy cannot be taught, or the experiment does not fit the mode.
        CorruptCheckpoint: the first weights cannot be used.
    """

    def __init__(self, recipe: Recipe, state: TrainingState | None = None) -> None:
        config = recipe.experiment.policies[recipe.label]
        self.kind = kind_of(config.name)
        self.policy_name = config.name
        self.recipe = recipe
        self.first = first_weights(config.name, recipe.source, recipe.seed, recipe.window)
        clusters = recipe.experiment.clusters
        if recipe.mode == "online" and len(clusters) != 1:
            raise InvalidInput(
                f"{recipe.name} has {len(clusters)} clusters; training on line is about one",
                "use `fedsched train federated`, or an experiment with one cluster",
            )
        self._experiment = recipe.experiment.model_copy(
            update={"federation": recipe.section() if recipe.mode == "federated" else None}
        )
        self.state = state if state is not None else self.beginning()

    def beginning(self) -> TrainingState:
        """Before the first run."""
        recipe = self.recipe
        clusters = [ClusterName(cluster.name) for cluster in recipe.experiment.clusters]
        standing = first_standing(self.policy_name, self.first, recipe.learning_rate)
        section = self._experiment.federation
        promotion = section.promotion if section is not None else AT_ONCE
        learners = {
            name: self.kind.pupil(self.first, recipe.learning, recipe.batch_size, promotion) for name in clusters
        }
        return TrainingState([standing] * recipe.groups, learners)

    def run(self, episodes: int, tell: Tell) -> None:
        """Go on until so many runs are over, with a look at the quality before the first and after the last.

        Raises:
            Failed: a run ended early; the state is as it was before it.
            KeyboardInterrupt: the same.
        """
        state = self.state
        if not state.rows:
            self._log({}, tell, episodes)
        while state.episodes < episodes:
            teachers = self._teachers()
            seed = apart(self.recipe.experiment.seed + state.episodes, self.recipe.seed)
            result = self._perform(seed, teachers)
            learnt = teachers.keep()
            state.rows += [self._early(slots, arrays, teachers.slots) for slots, arrays in teachers.kept]
            state.episodes += 1
            for name, slots in teachers.slots.items():
                state.slots[name] = state.slots.get(name, 0) + slots
            self._log({"train_jct_slots": result.avg_jct_slots, **learnt}, tell, episodes)

    def _perform(self, seed: int, teachers: Teachers | None) -> RunResult:
        result = perform(Request(self.recipe.name, self._experiment, self.recipe.label, seed), teachers=teachers)
        if result.partial == INTERRUPTED:
            raise KeyboardInterrupt
        if result.partial:
            raise Failed(
                f"run {self.state.episodes + 1}, of seed {seed}, ended early: {result.partial}",
                "correct the experiment; what was learnt before this run is kept, --resume goes on from there",
            )
        return result

    def _teachers(self) -> _Online | _Federated:
        return _Online(self) if self.recipe.mode == "online" else _Federated(self, self._experiment)

    def _log(self, learnt: Mapping[str, Any], tell: Tell, episodes: int) -> None:
        state, recipe = self.state, self.recipe
        row: dict[str, Any] = {
            "episode": state.episodes,
            "slots": sum(state.slots.values()),
            "decisions": sum(learner.recorded for learner in state.learners.values()),
            "version": max(standing.active.record.version for standing in state.standings),
            **learnt,
        }
        due = state.episodes % recipe.validate_every == 0 or state.episodes == episodes
        if due and recipe.validation_seeds:
            row.update(self.look(self.deciding()))
            jct = row[f"{LOOK}{ALL}"]
            if not state.best or jct < state.best[f"{LOOK}{ALL}"]:
                state.best = dict(row)
                state.best_arrays = [standing.active.checkpoint.arrays for standing in state.standings]
        state.rows.append(row)
        tell(row, state)

    def _early(self, slots: int, arrays: Mapping[ClusterName, Arrays], decided: Mapping[str, int]) -> dict[str, Any]:
        """The log's row of a look at what was learnt after so many slots of the run that has just ended."""
        weights = {name: self.first.replaced(one, {}) for name, one in arrays.items()}
        return {
            "episode": self.state.episodes,
            "slots": sum(self.state.slots.values()) + sum(min(slots, own) for own in decided.values()),
            **self.look(weights),
        }

    def look(self, weights: Mapping[ClusterName, Checkpoint]) -> dict[str, float]:
        """Average JCT in slots on held-out runs without any learning: of all jobs, and by cluster."""
        recipe = self.recipe
        names = [cluster.name for cluster in recipe.experiment.clusters]
        still = Still(recipe.label, recipe.experiment.policies[recipe.label], weights)
        sums: dict[str, list[float]] = {}
        for number in range(recipe.validation_seeds):
            seed = recipe.experiment.seed + HELD_OUT_OFFSET + number
            result = self._perform(seed, still)
            jct = result.jobs.jct_s / result.slot_length_s
            of = np.array(result.jobs.cluster)
            sums.setdefault(ALL, []).append(float(jct[result.jobs.succeeded].mean()))
            for name in names if len(names) > 1 else []:
                rows = result.jobs.succeeded & (of == name)
                if rows.any():
                    sums.setdefault(name, []).append(float(jct[rows].mean()))
        return {f"{LOOK}{name}": sum(values) / len(values) for name, values in sums.items()}

    def deciding(self) -> dict[ClusterName, Checkpoint]:
        """What each cluster decides with now."""
        by_federation = self.by_cluster([standing.active.checkpoint.arrays for standing in self.state.standings])
        return {**by_federation, **self.state.deciding}

    def by_cluster(self, arrays: Sequence[Arrays]) -> dict[ClusterName, Checkpoint]:
        """What its federation has for each cluster.

        Args:
            arrays: weights by federation.
        """
        clusters = self.recipe.experiment.clusters
        size = self.recipe.together or len(clusters)
        return {
            ClusterName(cluster.name): self.first.replaced(arrays[index // size], {})
            for index, cluster in enumerate(clusters)
        }

    def checkpoint(self, arrays: Arrays, made: Mapping[str, str | int | float]) -> Checkpoint:
        """Weights as a file, with how they came to be."""
        return self.first.replaced(arrays, dict(made))


# --- Who teaches a run -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Pupil:
    policy: Policy
    learner: ClusterLearner | None

    def restarted(self) -> None:
        """Agents do not die in training."""


class Still:
    """Nobody: the clusters decide with these weights, or statistics.

    Args:
        label: of the policy that the weights are for.
    """

    def __init__(
        self, label: str, config: PolicyConfig, weights: Mapping[ClusterName, Checkpoint | SpeedStatistics]
    ) -> None:
        self._label = label
        self._config = config
        self._weights = weights

    def pupil(self, name: ClusterName, label: str, seed: int) -> _Pupil | None:
        """The policy without a learner."""
        if label != self._label:
            return None
        config = self._config.model_copy(update={"seed": self._config.seed + seed})
        taught = self._weights[name]
        if isinstance(taught, SpeedStatistics):
            return _Pupil(registry.with_statistics(config, taught), None)
        return _Pupil(registry.with_weights(config, taught), None)

    def observers(self, name: ClusterName) -> tuple[Observer, ...]:
        """None."""
        return ()

    def join(self, world: World) -> None:
        """Nothing happens beside the scheduling."""


class _Online:
    """One cluster that steps by itself after every slot."""

    def __init__(self, training: Training) -> None:
        recipe, (standing,) = training.recipe, training.state.standings
        self._training = training
        ((self._name, learner),) = training.state.learners.items()
        active = standing.active
        self._learner = SteppingLearner(
            learner,
            active.checkpoint.arrays,
            active.record.version,
            active.optimiser,
            batch_size=recipe.batch_size,
            samples_min=recipe.samples_min,
            half_after=recipe.half_after,
            seed=recipe.seed,
        )
        self._world: World | None = None

    @property
    def slots(self) -> dict[str, int]:
        """Decided in this run, by cluster."""
        return _slots(self._world)

    def pupil(self, name: ClusterName, label: str, seed: int) -> _Pupil | None:
        """The cluster's policy with its learner."""
        training, recipe = self._training, self._training.recipe
        if label != recipe.label:
            return None
        learner = self._learner
        weights = training.first.replaced(learner.arrays, {})
        config = recipe.experiment.policies[label].model_copy(update={"seed": seed, "explore": True})
        policy = training.kind.policy(config, weights, learner.version, recipe.learning)
        learner.teach(policy)
        return _Pupil(policy, learner)

    def observers(self, name: ClusterName) -> tuple[Observer, ...]:
        """None."""
        return ()

    def join(self, world: World) -> None:
        """Nothing but to count its slots."""
        self._world = world

    @property
    def kept(self) -> tuple[tuple[int, dict[ClusterName, Arrays]], ...]:
        """Nothing but what it ended with."""
        return ()

    def keep(self) -> dict[str, float]:
        """Put what was learnt into the training's state; what is told of it."""
        learner, state = self._learner, self._training.state
        learner.abandon()
        before = state.standings[0]
        state.standings[0] = standing_of(self._training, learner.arrays, learner.version, learner.optimiser)
        steps = learner.version - before.active.record.version
        return {"updates": steps, **_means(learner.take_notes())}


class _Federated:
    """Clusters whose updates go through the federation's rounds."""

    def __init__(self, training: Training, experiment: ExperimentConfig) -> None:
        self._training = training
        state = training.state
        self._school = School(dict(state.learners), list(state.standings), dict(state.deciding))
        seed = apart(state.episodes, training.recipe.seed)
        before = round(sum(state.slots.values()) / len(experiment.clusters))
        self._look_slots = [slots - before for slots in training.recipe.look_slots if slots > before]
        moments_s = [slots * experiment.slot_length_s for slots in self._look_slots]
        self._forming = Forming(
            experiment, seed, judged=False, moments_s=moments_s, school=self._school, first=training.first
        )
        self._world: World | None = None

    @property
    def slots(self) -> dict[str, int]:
        """Decided in this run, by cluster."""
        return _slots(self._world)

    def pupil(self, name: ClusterName, label: str, seed: int) -> Pupil | None:
        """The cluster as a member of its federation."""
        return self._forming.pupil(name, label, seed)

    def observers(self, name: ClusterName) -> tuple[Observer, ...]:
        """None but judges, which training has not."""
        return self._forming.observers(name)

    def join(self, world: World) -> None:
        """Let the rounds begin."""
        self._world = world
        self._forming.join(world)

    @property
    def kept(self) -> tuple[tuple[int, dict[ClusterName, Arrays]], ...]:
        """By slots of this run, the weights that each cluster had then; nothing of slots that it did not have."""
        length = max(self.slots.values())
        times = zip(self._look_slots, self._school.album, strict=True)
        return tuple((slots, arrays) for slots, arrays in times if slots < length)

    def keep(self) -> dict[str, float]:
        """Put what was learnt into the training's state; what is told of it."""
        assert self._world is not None
        self._forming.keep(self._world)
        self._training.state.standings = list(self._school.standings)
        self._training.state.deciding = dict(self._school.deciding)
        records = [record for federation in self._world.federations for record in federation.records]
        absent = [gone.absence.value for record in records for gone in record.absent]
        counted = [part.metrics for record in records for part in record.contributions]
        return {
            "updates": sum(record.outcome is RoundOutcome.COMBINED for record in records),
            "rounds": len(records),
            "counted": len(counted),
            "rejected": absent.count("rejected"),
            "declined": absent.count("declined"),
            "missing": absent.count("missing"),
            **_means(counted),
        }


def _slots(world: World | None) -> dict[str, int]:
    return {} if world is None else {name: cluster.slots for name, cluster in world.clusters.items()}


def _means(notes: Sequence[tuple[tuple[str, float], ...]]) -> dict[str, float]:
    sums: dict[str, list[float]] = {}
    for note in notes:
        for name, value in note:
            sums.setdefault(name, []).append(value)
    return {name: sum(values) / len(values) for name, values in sorted(sums.items())}


def standing_of(training: Training, arrays: Arrays, version: int, optimiser: ServerOptimiser) -> Standing:
    """Weights that were stepped to without a round, as rounds keep theirs."""
    weights = training.first.replaced(arrays, {})
    standing = first_standing(training.policy_name, weights, training.recipe.learning_rate)
    record = structs.replace(standing.active.record, version=version)
    return Standing(replace(standing.active, record=record, optimiser=optimiser), version, 0)
