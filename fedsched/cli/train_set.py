"""`fedsched train set`: weights for the policy that decides for all jobs at once."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedsched.cli.output import Format, Output, emit, table

if TYPE_CHECKING:
    from fedsched.sim.set_training import Ground, Teaching, Trained

SHARE_MAX = 100
"""A cluster so many times as large as the declared one is certainly a mistake."""


def train_set(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="EXPERIMENT... FILE",
            help="Whose jobs, speeds and first clusters, in turn, and the checkpoint file to write.",
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
    lessons: Annotated[int, typer.Option(min=0, help="Rounds of imitation, of 1024 slots each.")] = 14,
    improvements: Annotated[int, typer.Option(min=0, help="Rounds of improvement, of 1024 slots each.")] = 30,
    source: Annotated[
        Path | None,
        typer.Option("--from", help="Weights to begin with, instead of ones that know nothing.", show_default=False),
    ] = None,
    curve: Annotated[
        Path | None, typer.Option(help="Also write the learning curve, as CSV.", show_default=False)
    ] = None,
    output: Output = Format.TABLE,
) -> None:
    """Train the policy `set`: imitate a teacher, then improve on what its own decisions bring.

    The same options give the same file. Improvement goes back where other clusters than those trained on say that it
    did no good, so the last weights are the best ones.
    """
    from fedsched.errors import InvalidInput
    from fedsched.files import refuse_clashes, write_all, write_whole
    from fedsched.policy import registry
    from fedsched.policy.checkpoint import refuse_bad_places
    from fedsched.policy.set import SetOptions
    from fedsched.sim.experiment import files_of, load_experiment
    from fedsched.sim.set_training import Ground, Plan, train

    *experiments, file = files
    if not experiments:
        raise InvalidInput(
            "one path is given; an experiment, or several, and a file to write were expected",
            "name the file to write last",
        )
    shares = _sizes(sizes or [], len(experiments))
    read = [path for experiment in experiments for path in files_of(experiment)]
    read += filter(None, [source])
    if teacher_checkpoint not in ("scratch", "builtin"):
        read.append(Path(teacher_checkpoint))
    refuse_clashes([*read, file], filter(None, [curve]))
    refuse_bad_places(read, [file])

    def tell(line: str) -> None:
        typer.echo(line, err=True)

    grounds = [
        Ground.of(experiment.stem, load_experiment(experiment), share)
        for experiment, share in zip(experiments, shares, strict=True)
    ]
    plan = Plan(seed=seed, lessons=0 if teacher == "none" else lessons, improvements=improvements)
    first = None if source is None else registry.weights("set", str(source))
    teaching = _teaching(grounds, teacher, teacher_checkpoint, tell)
    command = (
        f"fedsched train set {' '.join(experiment.name for experiment in experiments)} FILE"
        f"{''.join(f' --sizes {text}' for text in sizes or [])} --teacher {teacher} "
        f"--teacher-checkpoint {teacher_checkpoint} --seed {seed} --lessons {lessons} --improvements {improvements}"
    )
    if source is not None:
        command += f" --from {source.name}"
    result = train(
        grounds,
        plan,
        teacher=teaching,
        options=SetOptions(),
        command=command,
        first=None if first is None else first.arrays,
        tell=tell,
    )
    writes = [partial(result.checkpoint.save, file)]
    if curve is not None:
        writes.append(partial(write_whole, curve, _as_csv(result)))
    write_all(*writes)
    values = {
        "file": str(file),
        "digest": result.checkpoint.digest,
        "slots": result.curve[-1].slots,
        "cpu_s": round(result.curve[-1].cpu_s, 1),
        "judged_on": list(result.cases),
        "first_jct_slots": [round(jct, 2) for jct in result.curve[0].jct_slots],
        "last_jct_slots": [round(jct, 2) for jct in result.curve[-1].jct_slots],
    }
    if not emit(values, output, [str(file)]):
        table(("SET AFTER TRAINING", ""), list(values.items()))


def _sizes(texts: Sequence[str], experiments: int) -> list[tuple[float, ...]]:
    """Shares for each of the experiments.

    Raises:
        InvalidInput: a text is no list of shares, or there are neither one nor as many as experiments.
    """
    from fedsched.errors import InvalidInput
    from fedsched.sim.set_training import SIZES

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
    return (given or [SIZES]) * (experiments if len(given) < 2 else 1)


def _teaching(grounds: Sequence[Ground], teacher: str, checkpoint: str, tell: Callable[[str], None]) -> Teaching | None:
    """Makes the teachers; None: nobody teaches. A mistake is told before the work."""
    from fedsched.config import PolicyConfig, parse
    from fedsched.policy import registry
    from fedsched.sim.set_training import speed_teacher

    if teacher == "none":
        return None
    if (teacher, checkpoint) == ("learned_speed", "scratch"):
        return speed_teacher(grounds, tell)
    chosen = {"name": teacher, "checkpoint": checkpoint.replace("scratch", "builtin"), "explore": False}
    config = parse(PolicyConfig, chosen, "the teacher")
    registry.make(config)
    return lambda _: registry.make(config)


def _as_csv(result: Trained) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["stage", "slots", "cpu_s", *(f"jct_slots_{case.replace(' ', '_')}" for case in result.cases)])
    for mark in result.curve:
        writer.writerow([mark.stage, mark.slots, round(mark.cpu_s, 1), *(round(jct, 4) for jct in mark.jct_slots)])
    return text.getvalue().encode()
