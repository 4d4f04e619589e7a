"""`fedsched train set`: weights for the policy that decides for all jobs at once."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedsched.cli.output import Format, Output, emit, table

if TYPE_CHECKING:
    from fedsched.sim.set_training import Ground, Mark, Teaching


def train_set(
    experiment: Annotated[
        Path, typer.Argument(metavar="EXPERIMENT", help="Whose jobs, speeds and first cluster.", show_default=False)
    ],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Checkpoint file to write.", show_default=False)],
    teacher: Annotated[
        str, typer.Option(help="Policy to imitate before improving on it; none: nobody.")
    ] = "learned_speed",
    teacher_checkpoint: Annotated[
        str, typer.Option(help="What the teacher knows: a file, builtin, or scratch: it learns the speeds here first.")
    ] = "scratch",
    seed: Annotated[int, typer.Option(min=0, help="Draws the clusters, the first weights and the batches.")] = 0,
    lessons: Annotated[int, typer.Option(min=0, help="Rounds of imitation, of 1024 slots each.")] = 7,
    improvements: Annotated[int, typer.Option(min=0, help="Rounds of improvement, of 1024 slots each.")] = 30,
    source: Annotated[
        Path | None,
        typer.Option("--from", help="Weights to begin with, instead of ones that know nothing.", show_default=False),
    ] = None,
    best: Annotated[
        Path | None, typer.Option(help="Also write the weights that were best on validation.", show_default=False)
    ] = None,
    curve: Annotated[
        Path | None, typer.Option(help="Also write the learning curve, as CSV.", show_default=False)
    ] = None,
    output: Output = Format.TABLE,
) -> None:
    """Train the policy `set`: imitate a teacher, then improve on what its own decisions bring.

    The same options give the same file. Improvement goes back where other clusters than those trained on say that it
    did harm, so the last weights are near the best ones.
    """
    from fedsched.files import refuse_clashes, write_all, write_whole
    from fedsched.policy import registry
    from fedsched.policy.checkpoint import refuse_bad_places
    from fedsched.policy.set import SetOptions
    from fedsched.sim.experiment import files_of, load_experiment
    from fedsched.sim.set_training import Ground, Plan, train

    read = [*files_of(experiment), *filter(None, [source])]
    if teacher_checkpoint not in ("scratch", "builtin"):
        read.append(Path(teacher_checkpoint))
    weights = [file, *filter(None, [best])]
    refuse_clashes([*read, *weights], filter(None, [curve]))
    refuse_bad_places(read, weights)

    def tell(line: str) -> None:
        typer.echo(line, err=True)

    ground = Ground.of(load_experiment(experiment))
    plan = Plan(seed=seed, lessons=0 if teacher == "none" else lessons, improvements=improvements)
    first = None if source is None else registry.weights("set", str(source))
    teaching = _teaching(ground, teacher, teacher_checkpoint, tell)
    command = (
        f"fedsched train set {experiment.name} FILE --teacher {teacher} --teacher-checkpoint {teacher_checkpoint} "
        f"--seed {seed} --lessons {lessons} --improvements {improvements}"
    )
    if source is not None:
        command += f" --from {source.name}"
    result = train(
        ground,
        plan,
        teacher=teaching,
        options=SetOptions(),
        command=command,
        first=None if first is None else first.arrays,
        tell=tell,
    )
    writes = [partial(result.last.save, file)]
    if best is not None:
        writes.append(partial(result.best.save, best))
    if curve is not None:
        writes.append(partial(write_whole, curve, _as_csv(result.curve)))
    write_all(*writes)
    values = {
        "file": str(file),
        "digest": result.last.digest,
        "best_digest": result.best.digest,
        "slots": result.curve[-1].slots,
        "cpu_s": round(result.curve[-1].cpu_s, 1),
        "first_jct_slots": [round(jct, 2) for jct in result.curve[0].jct_slots],
        "last_jct_slots": [round(jct, 2) for jct in result.curve[-1].jct_slots],
    }
    if not emit(values, output, [str(file)]):
        table(("SET AFTER TRAINING", ""), list(values.items()))


def _teaching(ground: Ground, teacher: str, checkpoint: str, tell: Callable[[str], None]) -> Teaching | None:
    """Makes the teachers; None: nobody teaches. A mistake is told before the work."""
    from fedsched.config import PolicyConfig, parse
    from fedsched.policy import registry
    from fedsched.sim.set_training import informed_teacher, speed_teacher

    if teacher == "none":
        return None
    if teacher == "oracle_greedy":
        return informed_teacher(ground)
    if (teacher, checkpoint) == ("learned_speed", "scratch"):
        return speed_teacher(ground, tell)
    chosen = {"name": teacher, "checkpoint": checkpoint.replace("scratch", "builtin"), "explore": False}
    config = parse(PolicyConfig, chosen, "the teacher")
    registry.make(config)
    return lambda jobs: registry.make(config)


def _as_csv(curve: tuple[Mark, ...]) -> bytes:
    from fedsched.sim.set_training import VALIDATION_SIZES

    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["stage", "slots", "cpu_s", *(f"jct_slots_at_{share:g}" for share in VALIDATION_SIZES)])
    for mark in curve:
        writer.writerow([mark.stage, mark.slots, round(mark.cpu_s, 1), *(round(jct, 4) for jct in mark.jct_slots)])
    return text.getvalue().encode()
