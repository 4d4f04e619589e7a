"""`fedsched train speeds`: learned_speed learns how fast jobs train."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedsched.cli.finite import Finite
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
    from fedsched.core.speeds import SpeedStatistics
    from fedsched.policy.speed_checkpoint import SpeedCheckpoint
    from fedsched.sim.speed_training import Judged, Run
    from fedsched.sim.training_state import Kept

VIEW = View(
    {"RUN": "run", "SEED": "seed", "SLOTS": "slots", "SEEN": "observations", "JCT": "jct_s"},
    curve="jct_s",
    about="JCT in seconds",
    done="run",
)


def speeds(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="EXPERIMENT... FILE",
            help="Experiments to learn from in turn, and the file to write; the log and the state lie beside it.",
        ),
    ],
    seed: Annotated[int, typer.Option(min=0, help="Of the first run; the next one draws from the next.")] = 100,
    runs: Annotated[int, typer.Option(min=1, help="Simulated runs to learn from.")] = 3,
    explore: Annotated[
        float,
        typer.Option(
            click_type=Finite(min=0), help="Standard deviations by which doubtful allocations count as faster."
        ),
    ] = 1.0,
    start: Annotated[Path | None, typer.Option("--from", help="Statistics to start from; none by default.")] = None,
    held_out: Annotated[int, typer.Option(min=0, help="Other runs of the first experiment to judge it on.")] = 0,
    resume: Resume = False,
    restart: Restart = False,
    output: Output = Format.TABLE,
) -> None:
    """Let learned_speed learn how fast jobs train, and keep what it learned.

    The same options give the same file, also when it was interrupted and resumed. How it decides is taken from the
    experiment's own learned_speed, if it has one.
    """
    from fedsched.policy import speed_checkpoint
    from fedsched.policy.learned_speed import LearnedSpeedOptions
    from fedsched.sim.experiment import files_of, load_experiment
    from fedsched.sim.speed_training import judge, train

    sources, file = experiments_and_file(files)
    place = Place(file)
    goes_on(place, resume=resume, restart=restart)
    look_around(place, [*(path for source in sources for path in files_of(source)), *filter(None, [start])])
    experiments = [load_experiment(source) for source in sources]
    configured = [policy for policy in experiments[0].policies.values() if policy.name == "learned_speed"]
    options = LearnedSpeedOptions.model_validate(configured[0].options if configured else {})
    exploring = options.model_copy(update={"explore": explore})
    first = speed_checkpoint.load(start) if start is not None else None
    recipe = {
        "seed": seed,
        **{f"option {name}": value for name, value in exploring.model_dump(mode="json").items()},
        "digest of the first statistics": first.digest if first is not None else None,
        **{f"experiment {number}": one.model_dump(mode="json") for number, one in enumerate(experiments)},
    }
    with at_work(place):
        on = goes_on(place, resume=resume, restart=restart)
        known, done = _begun(place, recipe) if on else (first.statistics if first is not None else None, [])
        with shown(VIEW, runs, len(done)) as show:

            def keep(statistics: SpeedStatistics, over: Sequence[Run]) -> None:
                _kept(recipe, statistics, over).save(place.state)
                rows = _rows(over)
                write_log(place.log, rows)
                show(rows)

            learned, over = train(experiments, exploring, seed=seed, runs=runs, known=known, done=done, keep=keep)
        write_log(place.log, _rows(over))  # it may have been missed by a training that was killed after its last run
        seeds = range(experiments[0].seed, experiments[0].seed + held_out)
        judged = judge(experiments[0], learned, options, seeds, say) if held_out else ()
        command = (
            f"fedsched train speeds {' '.join(source.name for source in sources)} FILE --seed {seed} --runs {runs} "
            f"--explore {explore:g}{f' --from {start.name}' if start else ''}"
            f"{f' --held-out {held_out}' if held_out else ''}"
        )
        story = _story(sources, seed, learned, over, judged)
        checkpoint = speed_checkpoint.SpeedCheckpoint(learned, {"command": command, **story})
        checkpoint.save(file)
    _show(place, checkpoint, over, judged, output)


def _story(
    sources: Sequence[Path], seed: int, learned: SpeedStatistics, over: Sequence[Run], judged: Sequence[Judged]
) -> dict[str, str | int | float]:
    """What the card says of how the statistics came to be."""
    return {
        "experiments": ", ".join(source.stem for source in sources),
        "seeds": f"{seed} to {seed + len(over) - 1}",
        "slots": sum(run.slots for run in over),
        "observations": learned.observations,
        "last_jct_s": round(over[-1].jct_s, 1),
        **{f"held_out_jct_s_{one.policy}": round(one.jct_s.mean, 1) for one in judged},
    }


def _show(
    place: Place, checkpoint: SpeedCheckpoint, over: Sequence[Run], judged: Sequence[Judged], output: Format
) -> None:
    values: dict[str, object] = {
        "file": str(place.file),
        "log": str(place.log),
        "digest": checkpoint.digest,
        "runs_jct_s": [run.jct_s for run in over],
        "slots": sum(run.slots for run in over),
        "cells": len(checkpoint.statistics),
        "observations": checkpoint.statistics.observations,
        "cpu_s": round(sum(run.cpu_s for run in over), 2),
        "held_out": {one.policy: {"avg_jct_s": one.jct_s.mean, "ci95_s": one.jct_s.half} for one in judged},
    }
    if emit(values, output, [str(place.file)]):
        return
    cells = {name: value for name, value in values.items() if name not in ("runs_jct_s", "held_out")}
    cells["JCT of the runs"] = ", ".join(f"{run.jct_s:,.0f} s" for run in over)
    for one in judged:
        half = f" +- {one.jct_s.half:,.0f}" if one.jct_s.half is not None else ""
        cells[f"held-out JCT of {one.policy}"] = f"{one.jct_s.mean:,.0f}{half} s"
    table(("SPEEDS LEARNED", ""), list(cells.items()))


def _rows(over: Sequence[Run]) -> list[dict[str, Any]]:
    """The log; it holds no time of the processor's, so it is the same each time."""
    return [
        {"run": number, **{name: value for name, value in asdict(run).items() if name != "cpu_s"}}
        for number, run in enumerate(over, start=1)
    ]


def _kept(recipe: Mapping[str, Any], statistics: SpeedStatistics, over: Sequence[Run]) -> Kept:
    import numpy as np

    from fedsched.policy.speed_checkpoint import SpeedCheckpoint
    from fedsched.sim.training_state import Kept

    data = np.frombuffer(SpeedCheckpoint(statistics, {}).to_bytes(), np.uint8)
    return Kept(recipe, {"statistics": data}, {"runs": [asdict(run) for run in over]})


def _begun(place: Place, recipe: Mapping[str, Any]) -> tuple[SpeedStatistics, list[Run]]:
    from fedsched.policy import speed_checkpoint
    from fedsched.sim import training_state
    from fedsched.sim.speed_training import Run

    kept = training_state.load(place.state, recipe)
    with training_state.taken_apart():
        found = speed_checkpoint.from_bytes(kept.arrays["statistics"].tobytes(), str(place.state))
        return found.statistics, [Run(**run) for run in kept.rest["runs"]]
