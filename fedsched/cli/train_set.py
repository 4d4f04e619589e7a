"""`fedsched train set`: weights for the policy that decides for all jobs at once."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedsched.cli.output import Format, Output, emit, table
from fedsched.cli.teaching import (
    Place,
    Restart,
    Resume,
    View,
    at_work,
    experiments_and_file,
    goes_on,
    look_around,
    say,
    shown,
    write_log,
)

if TYPE_CHECKING:
    from fedsched.policy.learnable import Arrays
    from fedsched.sim.experiment import ExperimentConfig
    from fedsched.sim.set_training import Ground, Judge, Mark, Teaching, Trained
    from fedsched.sim.training_state import Kept

SHARE_MAX = 100
"""A cluster so many times as large as the declared one is certainly a mistake."""


def train_set(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="EXPERIMENT... FILE",
            help="Whose jobs, speeds and first clusters, in turn, and the checkpoint file to write; log and state lie "
            "beside it.",
        ),
    ],
    teacher: Annotated[
        str, typer.Option(help="Policy to imitate before improving on it; none: nobody.")
    ] = "learned_speed",
    teacher_checkpoint: Annotated[
        str, typer.Option(help="What the teacher knows: a file, builtin, or scratch: it learns the speeds here first.")
    ] = "scratch",
    sizes: Annotated[
        list[str] | None,
        typer.Option(
            help="Clusters to be judged on, as shares of the experiment's; training takes those between, too. "
            "Once for all experiments or once for each; 1,0.16,0.08 by default.",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Draws the clusters, the first weights and the batches.")] = 0,
    lessons: Annotated[int, typer.Option(min=0, help="Rounds of imitation, of 1024 slots each.")] = 16,
    improvements: Annotated[int, typer.Option(min=0, help="Rounds of improvement, of 1024 slots each.")] = 30,
    source: Annotated[
        Path | None,
        typer.Option("--from", help="Weights to begin with, instead of ones that know nothing.", show_default=False),
    ] = None,
    judge: Annotated[
        list[Path] | None,
        typer.Option(
            help="Experiment whose runs show at each look what the weights are worth; it has no say in what is kept. "
            "Its own policy set, the first, says how it decides.",
            show_default=False,
        ),
    ] = None,
    resume: Resume = False,
    restart: Restart = False,
    output: Output = Format.TABLE,
) -> None:
    """Train the policy `set`: imitate a teacher, then improve on what its own decisions bring.

    The same options give the same file, also when it was interrupted and resumed; imitation that was interrupted begins
    anew. Improvement goes back where other clusters than those trained on say that it
    did no good, so the last weights are the best ones.
    """
    from fedsched.sim.experiment import files_of, load_experiment

    experiments, file = experiments_and_file(files)
    given = _sizes(sizes or [], len(experiments))
    place = Place(file)
    goes_on(place, resume=resume, restart=restart)
    read = [path for experiment in experiments for path in files_of(experiment)]
    judges = judge or []
    read += [path for experiment in judges for path in files_of(experiment)]
    read += filter(None, [source])
    if teacher_checkpoint not in ("scratch", "builtin"):
        read.append(Path(teacher_checkpoint))
    look_around(place, read)
    trained_on, judged_on = ([load_experiment(one) for one in named] for named in (experiments, judges))
    # What follows loads torch: once all that is given makes sense.
    from fedsched.policy import registry
    from fedsched.policy.set import SetOptions
    from fedsched.sim import training_state
    from fedsched.sim.set_training import SIZES, Ground, Hyperparameters, train

    shares = given or [SIZES] * len(experiments)

    grounds = [
        Ground.of(name.stem, experiment, share)
        for name, experiment, share in zip(experiments, trained_on, shares, strict=True)
    ]
    for ground in grounds:
        ground.refuse_too_small()
    judging = _judge([(name.stem, experiment) for name, experiment in zip(judges, judged_on, strict=True)])
    plan = Hyperparameters(seed=seed, lessons=0 if teacher == "none" else lessons, improvements=improvements)
    first = None if source is None else registry.weights("set", str(source))
    command = (
        f"fedsched train set {' '.join(experiment.name for experiment in experiments)} FILE"
        f"{''.join(f' --sizes {text}' for text in sizes or [])} --teacher {teacher} "
        f"--teacher-checkpoint {teacher_checkpoint} --seed {seed} --lessons {lessons} --improvements {improvements}"
        f"{f' --from {source.name}' if source else ''}"
    )
    recipe = {
        **asdict(plan),
        "teacher": teacher,
        "what the teacher knows": _digest(teacher_checkpoint),
        "digest of the first weights": None if first is None else first.digest,
        "sizes": [list(part) for part in shares],
        **{
            f"experiment {number}": experiment.model_dump(mode="json")
            for number, experiment in enumerate([*trained_on, *judged_on])
        },
        "judged on": [one.name for one in judges],
    }
    cases = [case for ground in grounds for case in ground.cases]
    with at_work(place):
        on = goes_on(place, resume=resume, restart=restart)
        begun = training_state.load(place.state, recipe) if on else None
        teaching = _teaching(grounds, teacher, teacher_checkpoint, say) if begun is None else None
        looks = 2 + -(-improvements // plan.check_every) * 2  # at most: after a step back the old weights count again
        with training_state.taken_apart():
            looked = 0 if begun is None else len(begun.rest["curve"])
        with shown(_view(cases), looks, looked) as show:

            def keep(kept: Kept, curve: Sequence[Mark]) -> None:
                kept.save(place.state)
                rows = _rows(cases, [one.stem for one in judges], curve)
                write_log(place.log, rows)
                show(rows)

            result = train(
                grounds,
                plan,
                teacher=teaching,
                options=SetOptions(),
                command=command,
                first=None if first is None else first.arrays,
                recipe=recipe,
                begun=begun,
                judge=judging,
                keep=keep,
                tell=say,
            )
        # It may have been missed by a training that was killed after its last look.
        write_log(place.log, _rows(cases, [one.stem for one in judges], result.curve))
        result.checkpoint.save(file)
    _show(place, result, [one.stem for one in judges], output)


def _show(place: Place, result: Trained, judges: Sequence[str], output: Format) -> None:
    file = place.file
    values: dict[str, object] = {
        "file": str(file),
        "log": str(place.log),
        "digest": result.checkpoint.digest,
        "slots": max(mark.slots for mark in result.curve),
        "cpu_s": round(max(mark.cpu_s for mark in result.curve), 1),
        "judged_on": list(result.cases),
        "first_jct_slots": [round(jct, 2) for jct in result.curve[0].jct_slots],
        "last_jct_slots": [round(jct, 2) for jct in result.curve[-1].jct_slots],
    }
    for index, name in enumerate(judges):
        used = [mark.held_out_jct_slots[index] for mark in result.in_use]
        values[f"{name}_first_jct_slots"] = round(used[0], 3)
        values[f"{name}_lowest_jct_slots"] = round(min(used), 3)
        values[f"{name}_last_jct_slots"] = round(used[-1], 3)
    if not emit(values, output, [str(file)]):
        cells = {
            name: " / ".join(map(str, value)) if isinstance(value, list) else value for name, value in values.items()
        }
        table(("SET AFTER TRAINING", ""), list(cells.items()))


def _view(cases: Sequence[str]) -> View:
    jcts = {f"JCT {case}": f"jct_slots_{case.replace(' ', '_')}" for case in cases}
    return View(
        {"LOOK": "look", "STAGE": "stage", "SLOTS": "slots", "SCORE": "score", **jcts},
        curve="score",
        about="geometric mean of validation JCTs, in slots",
        done="look",
        spare=tuple(jcts)[::-1],
    )


def _digest(checkpoint: str) -> str:
    """What tells whether it is still the same."""
    if checkpoint in ("scratch", "builtin"):
        return checkpoint
    return hashlib.sha256(Path(checkpoint).read_bytes()).hexdigest()


def _sizes(texts: Sequence[str], experiments: int) -> list[tuple[float, ...]]:
    """Shares for each of the experiments; none where nothing is given.

    Raises:
        InvalidInput: a text is no list of shares, or there are neither one nor as many as experiments.
    """
    from fedsched.errors import InvalidInput

    given = []
    for text in texts:
        try:
            shares = tuple(float(part) for part in text.split(","))
        except ValueError:
            shares = ()
        if not shares or not all(0 < share <= SHARE_MAX for share in shares):
            raise InvalidInput(
                f"--sizes is {text!r}; numbers above 0 and up to {SHARE_MAX} with commas between them were expected",
                "--sizes 1,0.5 trains on half of the cluster, on the whole, and on what lies between",
            )
        given.append(shares)
    if len(given) not in (0, 1, experiments):
        raise InvalidInput(
            f"--sizes is given {len(given)} times for {experiments} experiments; once, or once for each, was expected",
            "name it as often as experiments, in their order",
        )
    return given * (experiments if len(given) == 1 else 1)


def _teaching(grounds: Sequence[Ground], teacher: str, checkpoint: str, tell: Callable[[str], None]) -> Teaching | None:
    """Makes the teachers; None: nobody teaches. A mistake is told before the work."""
    from fedsched.config import PolicyConfig, parse
    from fedsched.policy import registry
    from fedsched.sim.set_training import speed_teacher

    if teacher == "none":
        return None
    if (teacher, checkpoint) == ("learned_speed", "scratch"):
        return speed_teacher(grounds, tell)
    known = "builtin" if checkpoint == "scratch" else checkpoint
    chosen = {"name": teacher, "checkpoint": known, "explore": False}
    config = parse(PolicyConfig, chosen, "the teacher")
    registry.make(config)
    return lambda _: registry.make(config)


def _judge(experiments: Sequence[tuple[str, ExperimentConfig]]) -> Judge:
    """Runs the experiments' seeds with given weights.

    Raises:
        InvalidInput: one of them has no policy `set`.
    """
    from fedsched.core.ids import ClusterName
    from fedsched.errors import InvalidInput
    from fedsched.policy import registry
    from fedsched.sim.running import Request, whole_jct_slots

    labels = {}
    for name, experiment in experiments:
        found = [label for label, policy in experiment.policies.items() if policy.name == "set"]
        if not found:
            raise InvalidInput(f"{name} has no policy set to judge", f"it has {', '.join(experiment.policies)}")
        labels[name] = found[0]
    builtin = registry.weights("set", "builtin")

    def jct_slots(name: str, experiment: ExperimentConfig, arrays: Arrays, seed: int) -> float:
        taught = {ClusterName(cluster.name): builtin.replaced(arrays, {}) for cluster in experiment.clusters}
        return whole_jct_slots(Request(name, experiment, labels[name], seed, taught=taught))

    def judge(arrays: Arrays) -> tuple[float, ...]:
        return tuple(
            sum(jct_slots(name, one, arrays, one.seed + number) for number in range(one.seeds)) / one.seeds
            for name, one in experiments
        )

    return judge


def _rows(cases: Sequence[str], judges: Sequence[str], curve: Sequence[Mark]) -> list[dict[str, Any]]:
    """The log; it holds no time of the processor's, so it is the same each time."""
    return [
        {
            "look": number,
            "stage": mark.stage,
            "slots": mark.slots,
            "score": mark.score,
            **{
                f"jct_slots_{case.replace(' ', '_')}": round(jct, 4)
                for case, jct in zip(cases, mark.jct_slots, strict=True)
            },
            **{f"held_out_{name}": round(jct, 4) for name, jct in zip(judges, mark.held_out_jct_slots, strict=True)},
        }
        for number, mark in enumerate(curve, start=1)
    ]
