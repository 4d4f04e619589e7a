"""`fedsched train`: make weights for the learned policy."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedsched.cli.output import Format, Output, emit, table
from fedsched.cli.train_set import train_set

if TYPE_CHECKING:
    from fedsched.sim.teaching import Recipe

app = typer.Typer(help="Train policies in simulation.", no_args_is_help=True, rich_markup_mode=None)


class Teacher(StrEnum):
    """Schedulers that can be learned from."""

    DRF = "drf"
    FIFO = "fifo"
    OPTIMUS = "optimus"
    SRTF = "srtf"


@app.callback()
def train() -> None:
    """Train policies in simulation."""


@app.command()
def supervised(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Checkpoint file to write.", show_default=False)],
    teacher: Annotated[Teacher, typer.Option(help="Scheduler whose decisions are learned.")] = Teacher.DRF,
    seed: Annotated[int, typer.Option(min=0, help="Draws the clusters, the first weights and the batches.")] = 0,
    steps: Annotated[int, typer.Option(min=1, help="Minibatches to train on.")] = 4000,
    scenarios: Annotated[int, typer.Option(min=1, help="Simulated clusters to watch the teacher on.")] = 80,
    held_out: Annotated[int, typer.Option(min=1, help="Other clusters to judge the result on.")] = 10,
    output: Output = Format.TABLE,
) -> None:
    """Warm DL2 up on a heuristic's decisions.

    The same options give the same file; all defaults give the weights that ship with the package.
    """
    from fedsched.errors import InvalidInput
    from fedsched.sim.training import warm_up

    if not file.parent.is_dir():
        raise InvalidInput(f"cannot write {file}: there is no directory {file.parent}", "create it first")
    command = (
        f"fedsched train supervised --teacher {teacher.value} --seed {seed} --steps {steps} "
        f"--scenarios {scenarios} --held-out {held_out} FILE"
    )
    result = warm_up(
        teacher=teacher.value,
        seed=seed,
        steps=steps,
        scenarios=scenarios,
        held_out=held_out,
        command=command,
        tell=lambda line: typer.echo(line, err=True),
    )
    result.checkpoint.save(file)
    values = {
        "file": str(file),
        "digest": result.checkpoint.digest,
        "labels": result.labels,
        "first_loss": round(result.first_loss, 4),
        "last_loss": round(result.last_loss, 4),
        "agreement": round(result.agreement, 4),
        "teacher": teacher.value,
        "teacher_jct_s": round(result.teacher_jct_s, 2),
        "student_jct_s": round(result.student_jct_s, 2),
    }
    if not emit(values, output, [str(file)]):
        table(("DL2 AFTER SUPERVISED LEARNING", ""), list(values.items()))


class Replay(StrEnum):
    """How a gradient's decisions are drawn from what is remembered."""

    PRIORITISED = "prioritised"
    PLAIN = "plain"
    OFF = "off"


class Baseline(StrEnum):
    """What a reward is compared with."""

    VALUE = "value"
    MEAN = "mean"


Scenario = Annotated[Path, typer.Argument(metavar="SCENARIO", help="The experiment's YAML file.", show_default=False)]
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
Rate = Annotated[float, typer.Option(min=1e-9, help="Step size of Adam.")]
Batch = Annotated[int, typer.Option(min=1, help="Decisions of each gradient.")]
SamplesMin = Annotated[int, typer.Option(min=1, help="Decisions that a cluster must know the reward of to learn.")]
Memory = Annotated[int, typer.Option(min=1, max=1_000_000, help="Decisions that are remembered.")]
ReplayOption = Annotated[
    Replay, typer.Option(help="How the decisions of a gradient are drawn; off: only the newest are remembered.")
]
Exploration = Annotated[
    bool, typer.Option("--exploration/--no-exploration", help="Let job-aware rules choose now and then.")
]
BaselineOption = Annotated[
    Baseline, typer.Option(help="What rewards are compared with: the value network's guess, or their mean.")
]
Entropy = Annotated[float, typer.Option(min=0, help="Weight of the bonus for staying undecided.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with a training that was interrupted.")]
Restart = Annotated[bool, typer.Option("--restart", help="Begin anew over an older training's files.")]


@app.command()
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
    memory: Memory = 8192,
    replay: ReplayOption = Replay.PRIORITISED,
    exploration: Exploration = True,
    baseline: BaselineOption = Baseline.VALUE,
    entropy_weight: Entropy = 0.1,
    resume: Resume = False,
    restart: Restart = False,
    output: Output = Format.TABLE,
) -> None:
    """Teach a policy by what its own decisions bring: actor-critic with replay, a step after every slot.

    The same options give the same files, also when it was interrupted and resumed.
    """
    from fedsched.learn.config import LearningConfig

    learning = LearningConfig(
        exploration=exploration,
        replay=replay.value,
        memory=memory,
        baseline=baseline.value,
        entropy_weight=entropy_weight,
    )
    recipe = _recipe(
        scenario,
        policy,
        {
            "mode": "online",
            "source": source,
            "window": window,
            "seed": seed,
            "validate_every": validate_every,
            "validation_seeds": validation_seeds,
            "learning": learning,
            "learning_rate": learning_rate,
            "batch_size": batch_size,
            "samples_min": samples_min,
        },
    )
    _teach(recipe, scenario, file, episodes, resume=resume, restart=restart, output=output)


@app.command()
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
    learning_rate: Annotated[float | None, typer.Option(min=1e-9, help="As the scenario says by default.")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="As the scenario says by default.")] = None,
    samples_min: Annotated[int | None, typer.Option(min=1, help="As the scenario says by default.")] = None,
    memory: Annotated[int | None, typer.Option(min=1, help="As the scenario says by default.")] = None,
    replay: Annotated[Replay | None, typer.Option(help="As the scenario says by default.")] = None,
    exploration: Annotated[
        bool | None, typer.Option("--exploration/--no-exploration", help="As the scenario says by default.")
    ] = None,
    baseline: Annotated[Baseline | None, typer.Option(help="As the scenario says by default.")] = None,
    entropy_weight: Annotated[float | None, typer.Option(min=0, help="As the scenario says by default.")] = None,
    resume: Resume = False,
    restart: Restart = False,
    output: Output = Format.TABLE,
) -> None:
    """Teach a policy in all clusters of the scenario through the rounds of its section `federation`.

    The same options give the same files, also when it was interrupted and resumed.
    """
    from fedsched.errors import InvalidInput
    from fedsched.sim.experiment import load_experiment

    section = load_experiment(scenario).federation
    if section is None:
        raise InvalidInput(
            f"{scenario} has no section `federation`, which says when rounds are held",
            "add one, see simulations/experiments/federation.yaml, or use `fedsched train online`",
        )
    told = {
        "exploration": exploration,
        "replay": replay and replay.value,
        "memory": memory,
        "baseline": baseline and baseline.value,
        "entropy_weight": entropy_weight,
    }
    changed = {name: value for name, value in told.items() if value is not None}
    recipe = _recipe(
        scenario,
        policy,
        {
            "mode": "federated",
            "source": source,
            "window": window,
            "seed": seed,
            "validate_every": validate_every,
            "validation_seeds": validation_seeds,
            "learning": section.learning.model_copy(update=changed),
            "learning_rate": learning_rate or section.learning_rate,
            "batch_size": batch_size or section.batch_size,
            "samples_min": samples_min or section.samples_min,
            "together": together,
        },
    )
    _teach(recipe, scenario, file, episodes, resume=resume, restart=restart, output=output)


def _recipe(scenario: Path, label: str, options: dict[str, object]) -> Recipe:
    from fedsched.sim.experiment import load_experiment, with_policies
    from fedsched.sim.teaching import Recipe

    experiment, _ = with_policies(load_experiment(scenario), [label])
    return Recipe(name=scenario.stem, experiment=experiment, label=label, **options)  # type: ignore[arg-type]


def _teach(
    recipe: Recipe, scenario: Path, file: Path, episodes: int, *, resume: bool, restart: bool, output: Format
) -> None:
    from fedsched.cli.teaching import Place, begin, carry_out

    place = Place(file)
    training = begin(place, recipe, scenario, resume=resume, restart=restart)
    command = f"fedsched train {recipe.mode} {scenario.name} FILE {_options(recipe, episodes)}"
    values = carry_out(training, episodes, place, command)
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
        "--memory": learning.memory,
        "--replay": learning.replay,
        "--baseline": learning.baseline,
        "--entropy-weight": learning.entropy_weight,
    }
    told = " ".join(f"{name} {value}" for name, value in options.items() if value is not None)
    return f"{told} {'--exploration' if learning.exploration else '--no-exploration'}"


app.command("set")(train_set)
