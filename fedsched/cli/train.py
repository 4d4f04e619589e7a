"""`fedsched train`: make weights for the learned policy."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Train policies in simulation.", no_args_is_help=True)


class Teacher(StrEnum):
    """Schedulers that can be learned from."""

    DRF = "drf"
    FIFO = "fifo"
    OPTIMUS = "optimus"
    SRTF = "srtf"


class Format(StrEnum):
    """How results are printed."""

    TABLE = "table"
    JSON = "json"


@app.callback()
def train() -> None:
    """Train policies in simulation."""


@app.command()
def supervised(
    output: Annotated[Path, typer.Option("--output", "-o", help="Checkpoint file to write.")],
    teacher: Annotated[Teacher, typer.Option(help="Scheduler whose decisions are learned.")] = Teacher.DRF,
    seed: Annotated[int, typer.Option(min=0, help="Draws the clusters, the first weights and the batches.")] = 0,
    steps: Annotated[int, typer.Option(min=1, help="Minibatches to train on.")] = 4000,
    scenarios: Annotated[int, typer.Option(min=1, help="Simulated clusters to watch the teacher on.")] = 80,
    held_out: Annotated[int, typer.Option(min=1, help="Other clusters to judge the result on.")] = 10,
    output_format: Annotated[Format, typer.Option("--format", help="How to print the result.")] = Format.TABLE,
) -> None:
    """Warm DL2 up on a heuristic's decisions; the same options give the same file.

    With all defaults this reproduces the weights that ship with the package.
    """
    from fedsched.errors import InvalidInput
    from fedsched.sim.training import warm_up

    if not output.parent.is_dir():
        raise InvalidInput(f"cannot write {output}: there is no directory {output.parent}", "create it first")
    command = (
        f"fedsched train supervised --teacher {teacher.value} --seed {seed} --steps {steps} "
        f"--scenarios {scenarios} --held-out {held_out} -o FILE"
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
    result.checkpoint.save(output)
    values = {
        "file": str(output),
        "digest": result.checkpoint.digest,
        "labels": result.labels,
        "first_loss": round(result.first_loss, 4),
        "last_loss": round(result.last_loss, 4),
        "agreement": round(result.agreement, 4),
        "teacher": teacher.value,
        "teacher_jct_s": round(result.teacher_jct_s, 2),
        "student_jct_s": round(result.student_jct_s, 2),
    }
    if output_format is Format.JSON:
        typer.echo(json.dumps(values))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("", "value", title="DL2 after supervised learning")
    for name, value in values.items():
        table.add_row(name, str(value))
    Console().print(table)
