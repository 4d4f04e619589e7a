"""`fedsched train online` and `federated`: a policy learns from what its own decisions bring."""

from __future__ import annotations

import time
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedsched.cli.finite import Finite
from fedsched.cli.output import Format, Output, emit, table
from fedsched.cli.teaching import Place, Restart, Resume, View, at_work, goes_on, look_around, shown, write_log
from fedsched.errors import InvalidInput

if TYPE_CHECKING:
    from fedsched.config import LearningConfig
    from fedsched.sim.federation_config import FederationSectionConfig
    from fedsched.sim.teaching import Mode, Recipe, Training, TrainingState

VIEW = View(
    {
        "RUN": "episode",
        "SLOTS": "slots",
        "CHOICES": "decisions",
        "VERSION": "version",
        "LOSS": "loss",
        "ENTROPY": "entropy",
        "REWARD": "mean_reward",
        "JCT": "train_jct_slots",
        "HELD-OUT": "jct_slots.all",
    },
    curve="jct_slots.all",
    about="held-out JCT",
    done="episode",
    spare=("LOSS", "CHOICES", "VERSION"),
)
"""Both JCTs are averages in slots."""


class Drawing(StrEnum):
    """How a gradient's decisions are drawn from what is remembered."""

    PRIORITISED = "prioritised"
    PLAIN = "plain"
    OFF = "off"


class Reward(StrEnum):
    """What a choice earns."""

    SLOT = "slot"
    JOB = "job"


class Baseline(StrEnum):
    """What a reward is compared with."""

    VALUE = "value"
    MEAN = "mean"


Scenario = Annotated[Path, typer.Argument(metavar="EXPERIMENT", help="Its YAML file.", show_default=False)]
File = Annotated[
    Path,
    typer.Argument(
        metavar="FILE",
        help="Checkpoint file to write; the best one, the log and the state lie beside it.",
        show_default=False,
    ),
]
Label = Annotated[str, typer.Option("--policy", help="Label of the experiment's policy to teach.")]
Source = Annotated[
    str, typer.Option("--from", help="First weights: a checkpoint file, `builtin`, or `scratch` for fresh ones.")
]
Window = Annotated[int | None, typer.Option(min=1, max=1000, help="Jobs that fresh weights see at once.")]
Seed = Annotated[int, typer.Option(min=0, help="Draws the jobs, fresh weights, choices and batches.")]
Episodes = Annotated[int, typer.Option(min=1, help="Runs of the experiment to learn from.")]
ValidateEvery = Annotated[int, typer.Option(min=1, help="Runs between two looks at held-out seeds.")]
ValidationSeeds = Annotated[int, typer.Option(min=1, help="Held-out seeds of each look.")]
Rate = Annotated[float, typer.Option(click_type=Finite(min=1e-9), help="Step size of Adam.")]
Batch = Annotated[int, typer.Option(min=1, help="Decisions of each gradient.")]
SamplesMin = Annotated[int, typer.Option(min=1, help="Decisions that a cluster must know the reward of to learn.")]
HalfAfter = Annotated[
    float | None,
    typer.Option(
        click_type=Finite(min=1e-9),
        help="Steps shrink: half as long after so many, a third after twice as many, and so on.",
    ),
]
Memory = Annotated[int | None, typer.Option(min=1, max=1_000_000, help="Decisions that are remembered.")]
ReplayOption = Annotated[
    Drawing | None, typer.Option(help="How the decisions of a gradient are drawn; off: only the newest are remembered.")
]
Exploration = Annotated[
    bool | None, typer.Option("--exploration/--no-exploration", help="Let job-aware rules choose now and then.")
]
BaselineOption = Annotated[
    Baseline | None, typer.Option(help="What rewards are compared with: the value network's guess, or their mean.")
]
Entropy = Annotated[
    float | None, typer.Option(click_type=Finite(min=0), help="Weight of the bonus for staying undecided.")
]
RewardOption = Annotated[
    Reward | None,
    typer.Option(help="What a choice earns: all jobs' progress in its slot, or that of the job it is about."),
]
Discount = Annotated[
    float | None,
    typer.Option(click_type=Finite(min=0, max=0.999), help="What a later slot's reward counts, per slot; 0: nothing."),
]


def online(
    scenario: Scenario,
    file: File,
    policy: Label = "dl2",
    source: Source = "builtin",
    window: Window = None,
    seed: Seed = 0,
    episodes: Episodes = 20,
    validate_every: ValidateEvery = 5,
    validation_seeds: ValidationSeeds = 2,
    learning_rate: Rate = 1e-4,
    batch_size: Batch = 256,
    samples_min: SamplesMin = 256,
    half_after: HalfAfter = None,
    memory: Memory = 8192,
    replay: ReplayOption = Drawing.PRIORITISED,
    exploration: Exploration = True,
    baseline: BaselineOption = Baseline.VALUE,
    entropy_weight: Entropy = 0.1,
    reward: RewardOption = Reward.SLOT,
    discount: Discount = 0.0,
    resume: Resume = False,
    restart: Restart = False,
    output: Output = Format.TABLE,
) -> None:
    """Teach a policy by what its own decisions bring: actor-critic with replay, a step after every slot.

    The same options give the same files, also when it was interrupted and resumed.
    """
    from fedsched.config import LearningConfig

    goes_on(Place(file), resume=resume, restart=restart)
    recipe = replace(
        _recipe("online", scenario, policy, source, window, seed, validate_every, validation_seeds),
        learning=_learning(LearningConfig(), exploration, replay, memory, baseline, entropy_weight, reward, discount),
        learning_rate=learning_rate,
        batch_size=batch_size,
        samples_min=samples_min,
        half_after=half_after,
    )
    _teach(recipe, scenario, file, episodes, resume=resume, restart=restart, output=output)


def federated(
    scenario: Scenario,
    file: File,
    policy: Label = "dl2",
    source: Source = "builtin",
    window: Window = None,
    seed: Seed = 0,
    episodes: Episodes = 20,
    together: Annotated[
        int | None, typer.Option(min=1, help="Clusters that share a federation; all of them by default.")
    ] = None,
    validate_every: ValidateEvery = 5,
    validation_seeds: ValidationSeeds = 2,
    learning_rate: Annotated[float | None, typer.Option(click_type=Finite(min=1e-9), help="Step size of Adam.")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Decisions of each gradient.")] = None,
    samples_min: Annotated[int | None, typer.Option(min=1, help="Decisions known before the first round.")] = None,
    half_after: HalfAfter = None,
    memory: Memory = None,
    replay: ReplayOption = None,
    exploration: Exploration = None,
    baseline: BaselineOption = None,
    entropy_weight: Entropy = None,
    reward: RewardOption = None,
    discount: Discount = None,
    resume: Resume = False,
    restart: Restart = False,
    output: Output = Format.TABLE,
) -> None:
    """Teach a policy in all clusters of the experiment through the rounds of its section `federation`.

    What no option says of learning, from the step size on, is as that section says. The same options give the same
    files, also when it was interrupted and resumed.
    """
    goes_on(Place(file), resume=resume, restart=restart)
    section = _section(scenario)
    recipe = replace(
        _recipe("federated", scenario, policy, source, window, seed, validate_every, validation_seeds),
        learning=_learning(section.learning, exploration, replay, memory, baseline, entropy_weight, reward, discount),
        learning_rate=learning_rate or section.learning_rate,
        batch_size=batch_size or section.batch_size,
        samples_min=samples_min or section.samples_min,
        half_after=half_after,
        together=together,
    )
    _teach(recipe, scenario, file, episodes, resume=resume, restart=restart, output=output)


def _section(scenario: Path) -> FederationSectionConfig:
    from fedsched.sim.experiment import load_experiment

    section = load_experiment(scenario).federation
    if section is None:
        raise InvalidInput(
            f"{scenario} has no section `federation`, which says when rounds are held",
            "add one, see simulations/experiments/federation.yaml, or use `fedsched train online`",
        )
    return section


def _learning(
    usual: LearningConfig,
    exploration: bool | None,
    replay: Drawing | None,
    memory: int | None,
    baseline: Baseline | None,
    entropy_weight: float | None,
    reward: Reward | None,
    discount: float | None,
) -> LearningConfig:
    """The usual way but for what was said."""
    told = {
        "exploration": exploration,
        "replay": replay and replay.value,
        "memory": memory,
        "baseline": baseline and baseline.value,
        "entropy_weight": entropy_weight,
        "reward": reward and reward.value,
        "discount": discount,
    }
    return usual.model_copy(update={name: value for name, value in told.items() if value is not None})


def _recipe(
    mode: Mode,
    scenario: Path,
    label: str,
    source: str,
    window: int | None,
    seed: int,
    validate_every: int,
    validation_seeds: int,
) -> Recipe:
    """What both commands are told in the same words."""
    from fedsched.sim.experiment import load_experiment, with_policies

    if window is not None and source != "scratch":
        raise InvalidInput(
            f"--window says how many jobs fresh weights see; those of {source} see as many as they were made for",
            "add --from scratch, or leave --window out",
        )
    experiment = with_policies(load_experiment(scenario), [label])[0]
    from fedsched.sim.teaching import Recipe  # loads torch, once all that is given makes sense

    return Recipe(scenario.stem, experiment, label, mode, source, window, seed, validate_every, validation_seeds)


def _teach(
    recipe: Recipe, scenario: Path, file: Path, episodes: int, *, resume: bool, restart: bool, output: Format
) -> None:
    from fedsched.sim import teaching_state
    from fedsched.sim.experiment import files_of
    from fedsched.sim.teaching import Training

    place, groups = Place(file), range(recipe.groups)
    read = [*files_of(scenario), *([] if recipe.source in ("builtin", "scratch") else [Path(recipe.source)])]
    weights = [name(index, len(groups)) for index in groups for name in (place.of, place.best_of)]
    look_around(place, read, weights)
    with at_work(place, weights):
        on = goes_on(place, resume=resume, restart=restart)
        training = teaching_state.load(place.state, recipe) if on else Training(recipe)
        command = f"fedsched train {recipe.mode} {scenario.name} FILE {_options(recipe, episodes)}"
        values = _carry_out(training, episodes, place, command)
    if not emit(values, output, [str(file)]):
        table((f"{recipe.label.upper()} AFTER LEARNING", ""), list(values.items()))


def _options(recipe: Recipe, episodes: int) -> str:
    """What a user types for the recipe, all defaults written out."""
    learning = recipe.learning
    options: dict[str, object] = {
        "--policy": recipe.label,
        "--from": recipe.source,
        "--window": recipe.window,
        "--seed": recipe.seed,
        "--episodes": episodes,
        "--together": recipe.together,
        "--validate-every": recipe.validate_every,
        "--validation-seeds": recipe.validation_seeds,
        "--learning-rate": recipe.learning_rate,
        "--batch-size": recipe.batch_size,
        "--samples-min": recipe.samples_min,
        "--half-after": recipe.half_after,
        "--memory": learning.memory,
        "--replay": learning.replay,
        "--baseline": learning.baseline,
        "--entropy-weight": learning.entropy_weight,
        "--reward": learning.reward,
        "--discount": learning.discount,
    }
    told = " ".join(f"{name} {value}" for name, value in options.items() if value is not None)
    return f"{told} {'--exploration' if learning.exploration else '--no-exploration'}"


def _carry_out(training: Training, episodes: int, place: Place, command: str) -> dict[str, Any]:
    """Train, keep the state after every run, write weights and log; returns what came of it.

    Raises:
        Failed: a run ended early; what was learnt before is kept.
        KeyboardInterrupt: the same.
    """
    from fedsched.sim import teaching_state

    begun_s, decided = time.process_time(), _decisions(training.state)
    slots = sum(training.state.slots.values())
    with shown(VIEW, episodes, training.state.episodes) as show:

        def tell(row: dict[str, Any], state: TrainingState) -> None:
            # The state first: what the log tells must never be ahead of what can be gone on from.
            teaching_state.kept(training).save(place.state)
            write_log(place.log, state.rows)
            show(state.rows)

        training.run(episodes, tell)
    cpu_s = time.process_time() - begun_s
    state = training.state
    write_log(place.log, state.rows)  # it may have been missed by a training that was killed after its last run
    _write_weights(training, place, command)
    looks = [row for row in state.rows if "jct_slots.all" in row]
    return {
        "file": str(place.file),
        "best_file": str(place.best),
        "log": str(place.log),
        "episodes": state.episodes,
        "slots": sum(state.slots.values()),
        "decisions": _decisions(state),
        "version": max(standing.active.record.version for standing in state.standings),
        "first_jct_slots": round(looks[0]["jct_slots.all"], 3),
        "best_jct_slots": round(state.best["jct_slots.all"], 3),
        "best_episode": state.best["episode"],
        "last_jct_slots": round(looks[-1]["jct_slots.all"], 3),
        "cpu_s": round(cpu_s, 2),
        "slots_per_cpu_s": round((sum(state.slots.values()) - slots) / cpu_s, 1),
        "decisions_per_cpu_s": round((_decisions(state) - decided) / cpu_s, 1),
    }


def _decisions(state: TrainingState) -> int:
    return sum(learner.recorded for learner in state.learners.values())


def _write_weights(training: Training, place: Place, command: str) -> None:
    state, recipe = training.state, training.recipe
    groups = len(state.standings)
    story: dict[str, str | int | float] = {
        "command": command,
        "experiment": recipe.name,
        "seed": recipe.seed,
        "episodes": state.episodes,
        "slots": sum(state.slots.values()),
        "decisions": _decisions(state),
        "best_episode": state.best["episode"],
        "best_jct_slots": round(state.best["jct_slots.all"], 3),
    }
    for index, standing in enumerate(state.standings):
        active = standing.active
        made = {**story, "version": active.record.version}
        training.checkpoint(active.checkpoint.arrays, made).save(place.of(index, groups))
        training.checkpoint(state.best_arrays[index], story).save(place.best_of(index, groups))
