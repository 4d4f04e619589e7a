"""The commands that simulate: sim run, sim compare."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from fedsched.cli.simulated import Plan


class Form(StrEnum):
    """How results are shown. Times are virtual, so the conversions of the other commands' output do not apply."""

    TABLE = "table"
    JSON = "json"


class Where(StrEnum):
    """Where runs are made: over the cores of this machine, or on a Ray cluster."""

    LOCAL = "local"
    RAY = "ray"


Policies = Annotated[
    str,
    typer.Option(
        "--policies",
        "--policy",
        help="Only these, with commas between them: labels of the experiment's policies, or names of any.",
    ),
]
Seeds = Annotated[int | None, typer.Option(min=1, help="Runs of each policy, in place of the file's.")]
Seed = Annotated[int | None, typer.Option(min=0, help="Seed of the first run, in place of the file's.")]
Check = Annotated[
    bool, typer.Option("--check", help="Check the scheduler's invariants after every event, and let judges watch.")
]
PerJob = Annotated[Path | None, typer.Option(help="Write a CSV file with a line per job and run.")]
Parquet = Annotated[Path | None, typer.Option(help="Write the same as a Parquet file.")]
Html = Annotated[Path | None, typer.Option(help="Write a report with plots as one HTML file.")]
Engine = Annotated[Where, typer.Option("--engine", help="Where runs are made.")]
Workers = Annotated[
    int | None, typer.Option(min=1, help="Runs that go on at once on this machine; as many as it has cores by default.")
]
Output = Annotated[Form, typer.Option("-o", "--output", help="How to show the result.")]


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    group = typer.Typer(help="Compare policies in simulation.", no_args_is_help=True, rich_markup_mode=None)
    group.command()(run)
    group.command()(compare)
    app.add_typer(group, name="sim")


def run(
    file: Annotated[Path, typer.Argument(metavar="EXPERIMENT", help="The experiment's YAML file.")],
    policies: Policies = "",
    seeds: Seeds = None,
    seed: Seed = None,
    check: Check = False,
    per_job: PerJob = None,
    parquet: Parquet = None,
    html: Html = None,
    engine: Engine = Where.LOCAL,
    workers: Workers = None,
    output: Output = Form.TABLE,
) -> None:
    """Run an experiment's policies on the same jobs."""
    from fedsched.cli.simulated import Files, carry_out

    files = Files(per_job, parquet, html)
    plans = [_plan(file, policies, seeds, seed)]
    carry_out(plans, files, engine=engine.value, workers=workers, check=check, as_json=output is Form.JSON)


def compare(
    experiments: Annotated[
        list[Path], typer.Argument(metavar="EXPERIMENT...", help="YAML files of one or several experiments.")
    ],
    policies: Policies = "",
    seeds: Seeds = None,
    seed: Seed = None,
    check: Check = False,
    per_job: PerJob = None,
    parquet: Parquet = None,
    html: Html = None,
    engine: Engine = Where.LOCAL,
    workers: Workers = None,
    output: Output = Form.TABLE,
) -> None:
    """Compare policies and experiments, seed by seed.

    All are compared with the first policy of the first experiment.
    """
    from fedsched.cli.simulated import Files, carry_out

    files = Files(per_job, parquet, html)
    plans = [_plan(file, policies, seeds, seed) for file in experiments]
    carry_out(plans, files, engine=engine.value, workers=workers, check=check, as_json=output is Form.JSON, paired=True)


def _plan(file: Path, policies: str, seeds: int | None, seed: int | None) -> Plan:
    from fedsched.cli.simulated import Plan
    from fedsched.sim.experiment import load_experiment, with_policies

    experiment = load_experiment(file)
    changes = {name: value for name, value in (("seeds", seeds), ("seed", seed)) if value is not None}
    labels = [label.strip() for label in policies.split(",") if label.strip()]
    return Plan(file.stem, str(file), *with_policies(experiment.model_copy(update=changes), labels))
