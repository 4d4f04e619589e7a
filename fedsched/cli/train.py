"""`fedsched train`: make weights for the learned policy."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from fedsched.cli.output import Format, Output, emit, table

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
