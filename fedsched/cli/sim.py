"""The command that runs declared simulations: sim run."""

from __future__ import annotations

import json
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedsched.cli.output import table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fedsched.sim.experiment import Interval, Run, Summary


class Form(StrEnum):
    """How results are shown. Times are virtual, so the conversions of the other commands' output do not apply."""

    TABLE = "table"
    JSON = "json"


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    group = typer.Typer(help="Compare policies in simulation.", no_args_is_help=True, rich_markup_mode=None)
    group.callback()(_group)
    group.command()(run)
    app.add_typer(group, name="sim")


def _group() -> None:
    """Keeps `run` a command of its own: a group of one would be merged into it."""


def run(
    file: Annotated[Path, typer.Argument(metavar="EXPERIMENT", help="The experiment's YAML file.")],
    policy: Annotated[str, typer.Option(help="Only these of its policies, with commas between them.")] = "",
    seeds: Annotated[int | None, typer.Option(min=1, help="Runs of each policy, in place of the file's.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Check the scheduler's invariants after every event.")] = False,
    output: Annotated[Form, typer.Option("-o", "--output", help="How to show the result.")] = Form.TABLE,
) -> None:
    """Run an experiment's policies on the same drawn jobs and compare them."""
    from fedsched.errors import Failed
    from fedsched.sim.experiment import load_experiment, run_experiment, summarise

    runs = run_experiment(
        load_experiment(file),
        policies=[label.strip() for label in policy.split(",") if label.strip()],
        seeds=seeds,
        check=check,
        tell=lambda line: typer.echo(line, err=True),
    )
    summaries = summarise(runs)
    if output is Form.JSON:
        print(json.dumps(_plain(file.stem, summaries, runs), indent=2))
    else:
        _show(summaries)
    unfinished = ", ".join(f"{item.unfinished} under {item.policy}" for item in summaries if item.unfinished)
    if unfinished:
        raise Failed(f"jobs never ended: {unfinished}", "make the jobs shorter, fewer, or the cluster larger")


def _plain(name: str, summaries: Sequence[Summary], runs: Sequence[Run]) -> dict[str, Any]:
    """The comparison and every job of every run, as data."""
    return {
        "experiment": name,
        "policies": [
            {**asdict(summary), "runs": [_plain_run(run) for run in runs if run.policy == summary.policy]}
            for summary in summaries
        ],
    }


def _plain_run(run: Run) -> dict[str, Any]:
    result = run.result
    return {
        "seed": run.seed,
        "jct_s": result.average_jct_s if result.complete else None,
        "makespan_s": result.makespan_s if result.complete else None,
        "resizes": result.resizes,
        "cpu_utilisation": result.cpu_utilisation,
        "fallbacks": result.fallbacks,
        "slots": result.slots,
        "digest": result.digest,
        "jobs": [{**asdict(outcome), "jct_s": outcome.jct_s} for outcome in result.outcomes],
    }


def _show(summaries: Sequence[Summary]) -> None:
    table(
        ("POLICY", "SEEDS", "JCT", "95% INTERVAL", "MAKESPAN", "RESIZES", "CPUS HELD", "FALLBACKS", "UNFINISHED"),
        [
            (
                item.policy,
                item.seeds,
                item.jct_s and f"{item.jct_s.mean:.1f}s",
                item.jct_s and _bounds(item.jct_s),
                None if item.makespan_s is None else f"{item.makespan_s:.1f}s",
                f"{item.resizes:.1f}",
                f"{item.cpu_utilisation:.0%}",
                item.fallbacks,
                item.unfinished,
            )
            for item in summaries
        ],
    )


def _bounds(interval: Interval) -> str | None:
    """None where one seed says nothing of the spread."""
    return None if interval.low is None else f"{interval.low:.1f}s..{interval.high:.1f}s"
