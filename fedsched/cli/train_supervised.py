"""`fedsched train supervised`: DL2 learns to decide as a heuristic does."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedsched.cli.output import Format, Output, emit, table
from fedsched.cli.teaching import (
    File,
    Place,
    Restart,
    Resume,
    View,
    at_work,
    goes_on,
    look_around,
    say,
    shown,
    write_log,
)

if TYPE_CHECKING:
    from fedsched.sim.training import Row
    from fedsched.sim.training_state import Kept

CLUSTERS = 80
"""That the teacher is watched on, where they are drawn."""
RUNS = 20
"""And of an experiment."""

VIEW = View({"STEP": "step", "LOSS": "loss"}, curve="loss", about="loss", done="step")


class Teacher(StrEnum):
    """Schedulers that can be learned from."""

    DRF = "drf"
    FIFO = "fifo"
    OPTIMUS = "optimus"
    SRTF = "srtf"


def supervised(
    file: File,
    teacher: Annotated[Teacher, typer.Option(help="Scheduler whose decisions are learned.")] = Teacher.DRF,
    seed: Annotated[int, typer.Option(min=0, help="Draws the clusters, the first weights and the batches.")] = 0,
    steps: Annotated[int, typer.Option(min=1, help="Minibatches to train on.")] = 4000,
    on: Annotated[
        Path | None,
        typer.Option(help="Experiment whose clusters and workload the teacher is watched on, not small drawn ones."),
    ] = None,
    scenarios: Annotated[
        int | None, typer.Option(min=1, help="Clusters to watch the teacher on, 80; with --on, runs, 20.")
    ] = None,
    held_out: Annotated[int, typer.Option(min=1, help="Other clusters, or runs, to judge the result on.")] = 10,
    resume: Resume = False,
    restart: Restart = False,
    output: Output = Format.TABLE,
) -> None:
    """Warm DL2 up on a heuristic's decisions, so that it begins as good as that.

    The same options give the same file, also when it was interrupted and resumed; all defaults are how the weights
    that ship were made.
    """
    from fedsched.sim import training_state
    from fedsched.sim.experiment import files_of, load_experiment

    place = Place(file)
    goes_on(place, resume=resume, restart=restart)
    look_around(place, files_of(on) if on else [])
    experiment = load_experiment(on) if on else None
    from fedsched.sim.training import WarmUpPlan, warm_up  # loads torch, once all that is given makes sense

    runs = scenarios or (RUNS if on else CLUSTERS)
    plan = WarmUpPlan(teacher.value, seed, steps, runs, held_out, on.name if on else "", experiment)
    command = (
        f"fedsched train supervised {f'--on {on} ' if on else ''}--teacher {teacher.value} --seed {seed} "
        f"--steps {steps} --scenarios {runs} --held-out {held_out} FILE"
    )
    with at_work(place):
        again = goes_on(place, resume=resume, restart=restart)
        begun = training_state.load(place.state, plan.plain()) if again else None
        with shown(VIEW, steps, plan.step_of(begun)) as show:

            def keep(kept: Kept, rows: Sequence[Row]) -> None:
                kept.save(place.state)
                write_log(place.log, rows)
                show(rows)

            result = warm_up(plan, command, begun=begun, keep=keep, tell=say)
        write_log(place.log, result.rows)  # it may have been missed by a training that was killed after its last step
        result.checkpoint.save(file)
    values = {
        "file": str(file),
        "log": str(place.log),
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
