"""The commands that teach policies: train supervised, online, federated, speeds; train set is in `cli/train_set.py`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedsched.cli.output import Format, Output, emit, table
from fedsched.cli.train_set import train_set

if TYPE_CHECKING:
    from fedsched.sim.experiment import ExperimentConfig
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
    from fedsched.policy.checkpoint import refuse_bad_places
    from fedsched.sim.training import warm_up

    refuse_bad_places([], [file])
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
    from fedsched.config import LearningConfig
    from fedsched.sim.teaching import Recipe

    learning = LearningConfig(
        exploration=exploration,
        replay=replay.value,
        memory=memory,
        baseline=baseline.value,
        entropy_weight=entropy_weight,
    )
    recipe = Recipe(
        name=scenario.stem,
        experiment=_experiment(scenario, policy),
        label=policy,
        mode="online",
        source=source,
        window=window,
        seed=seed,
        validate_every=validate_every,
        validation_seeds=validation_seeds,
        learning=learning,
        learning_rate=learning_rate,
        batch_size=batch_size,
        samples_min=samples_min,
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
    memory: Annotated[int | None, typer.Option(min=1, max=1_000_000, help="As the scenario says by default.")] = None,
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
    from fedsched.sim.teaching import Recipe

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
    recipe = Recipe(
        name=scenario.stem,
        experiment=_experiment(scenario, policy),
        label=policy,
        mode="federated",
        source=source,
        window=window,
        seed=seed,
        validate_every=validate_every,
        validation_seeds=validation_seeds,
        learning=section.learning.model_copy(update=changed),
        learning_rate=learning_rate or section.learning_rate,
        batch_size=batch_size or section.batch_size,
        samples_min=samples_min or section.samples_min,
        together=together,
    )
    _teach(recipe, scenario, file, episodes, resume=resume, restart=restart, output=output)


def _experiment(scenario: Path, label: str) -> ExperimentConfig:
    """The experiment with the policy of this label among its own."""
    from fedsched.sim.experiment import load_experiment, with_policies

    return with_policies(load_experiment(scenario), [label])[0]


def _teach(
    recipe: Recipe, scenario: Path, file: Path, episodes: int, *, resume: bool, restart: bool, output: Format
) -> None:
    from fedsched.cli.teaching import Place, begin, carry_out, look_around
    from fedsched.files import alone

    place = Place(file)
    look_around(place, recipe, scenario)
    with alone(place.state):
        training = begin(place, recipe, resume=resume, restart=restart)
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


@app.command()
def speeds(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="EXPERIMENT... FILE", help="Experiments to learn from in turn, and the file to write."),
    ],
    seed: Annotated[int, typer.Option(min=0, help="Of the first run; the next one draws from the next.")] = 100,
    runs: Annotated[int, typer.Option(min=1, help="Simulated runs to learn from.")] = 3,
    explore: Annotated[
        float, typer.Option(min=0, help="Standard deviations by which doubtful allocations count as faster.")
    ] = 1.0,
    start: Annotated[Path | None, typer.Option("--from", help="Statistics to start from; none by default.")] = None,
    held_out: Annotated[int, typer.Option(min=0, help="Other runs of the first experiment to judge it on.")] = 0,
    output: Output = Format.TABLE,
) -> None:
    """Let learned_speed learn how fast jobs train, and keep what it learned.

    The same options give the same file. How it decides is taken from the experiment's own learned_speed, if it has one.
    """
    from fedsched.errors import InvalidInput
    from fedsched.policy import speed_checkpoint
    from fedsched.policy.checkpoint import refuse_bad_places
    from fedsched.policy.learned_speed import LearnedSpeedOptions
    from fedsched.sim.experiment import files_of, load_experiment
    from fedsched.sim.speed_training import judge, train

    *sources, file = files
    if not sources:
        raise InvalidInput(
            "one path is given; an experiment, or several, and a file to write were expected",
            "name the file to write last",
        )
    read = [path for source in sources for path in files_of(source)]
    refuse_bad_places([*read, *filter(None, [start])], [file])
    experiments = [load_experiment(source) for source in sources]
    configured = [policy for policy in experiments[0].policies.values() if policy.name == "learned_speed"]
    options = LearnedSpeedOptions.model_validate(configured[0].options if configured else {})
    known = speed_checkpoint.load(start).statistics if start is not None else None

    def tell(line: str) -> None:
        typer.echo(line, err=True)

    exploring = options.model_copy(update={"explore": explore})
    learned, done = train(experiments, exploring, seed=seed, runs=runs, known=known, tell=tell)
    seeds = range(experiments[0].seed, experiments[0].seed + held_out)
    judged = judge(experiments[0], learned, options, seeds, tell) if held_out else ()
    checkpoint = speed_checkpoint.SpeedCheckpoint(
        learned,
        {
            "command": f"fedsched train speeds {' '.join(source.name for source in sources)} FILE --seed {seed} "
            f"--runs {runs} --explore {explore:g}{f' --from {start.name}' if start is not None else ''}"
            f"{f' --held-out {held_out}' if held_out else ''}",
            "experiments": ", ".join(source.stem for source in sources),
            "seeds": f"{seed} to {seed + runs - 1}",
            "slots": sum(run.slots for run in done),
            "observations": learned.observations,
            "last_jct_s": round(done[-1].jct_s, 1),
            **{f"held_out_jct_s_{one.policy}": round(one.jct_s.mean, 1) for one in judged},
        },
    )
    checkpoint.save(file)
    values: dict[str, object] = {
        "file": str(file),
        "digest": checkpoint.digest,
        "runs": [run.jct_s for run in done],
        "slots": sum(run.slots for run in done),
        "cells": len(learned),
        "observations": learned.observations,
        "cpu_s": round(sum(run.cpu_s for run in done), 2),
        "held_out": {one.policy: {"avg_jct_s": one.jct_s.mean, "ci95_s": one.jct_s.half} for one in judged},
    }
    if not emit(values, output, [str(file)]):
        shown = {**values, "runs": ", ".join(f"{run.jct_s:,.0f} s" for run in done)}
        del shown["held_out"]
        for one in judged:
            half = f" +- {one.jct_s.half:,.0f}" if one.jct_s.half is not None else ""
            shown[one.policy] = f"{one.jct_s.mean:,.0f}{half} s"
        table(("SPEEDS LEARNED", ""), list(shown.items()))
