"""The commands that simulate: sim run, sim compare, sim swarm; sim replay is in `cli/replay.py`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedsched.cli.finite import Finite
from fedsched.sim.traces.names import TraceFormat

if TYPE_CHECKING:
    from fedsched.sim.experiment import ExperimentConfig


class Form(StrEnum):
    """How results are shown. Times are virtual, so the conversions of the other commands' output do not apply."""

    TABLE = "table"
    JSON = "json"


class Where(StrEnum):
    """Where runs are made: over the cores of this machine, or on a Ray cluster."""

    LOCAL = "local"
    RAY = "ray"


class Clock(StrEnum):
    """When decisions are made."""

    EXACT = "exact"
    SLOTS = "slots"


class Placement(StrEnum):
    """What a job of a trace needs."""

    POOLED = "pooled"
    NODES = "nodes"


Policies = Annotated[
    str,
    typer.Option(
        "--policies",
        "--policy",
        help="Only these, with commas between them: labels of the experiment's policies, or names of any.",
    ),
]
Seeds = Annotated[int | None, typer.Option(min=1, max=100_000, help="Runs of each policy, in place of the file's.")]
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
DecisionMax = Annotated[
    float | None,
    typer.Option(
        "--decision-s-max",
        click_type=Finite(min=0.01),
        help="Real seconds that a policy may take for one answer, in place of the file's; 120 by default.",
    ),
]
Output = Annotated[Form, typer.Option("-o", "--output", help="How to show the result.")]

OF_TRACES = ("form", "nodes", "gpus_per_node", "clock", "slot_length", "placement")
"""Parameters of `fedsched sim run` that say what a trace's file does not."""


@dataclass(frozen=True, slots=True)
class Selection:
    """An experiment and what is to be run of it."""

    name: str
    arguments: str
    """What a user types after `fedsched sim run` for it."""
    experiment: ExperimentConfig
    policies: tuple[str, ...]
    """Labels, in the order in which results are shown."""
    sources: tuple[Path, ...]
    """The files that it was read from."""

    @property
    def seeds(self) -> range:
        """Seeds of its runs."""
        return range(self.experiment.seed, self.experiment.seed + self.experiment.seeds)


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    from fedsched.cli import replay

    group = typer.Typer(help="Compare policies in simulation.", no_args_is_help=True, rich_markup_mode=None)
    group.command()(run)
    group.command()(compare)
    group.command()(swarm)
    group.command()(replay.replay)
    app.add_typer(group, name="sim")


def run(
    ctx: typer.Context,
    file: Annotated[Path | None, typer.Argument(metavar="[EXPERIMENT]", help="The experiment's YAML file.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Run this trace instead of an experiment.")] = None,
    form: Annotated[TraceFormat, typer.Option("--format", help="The trace's format.")] = TraceFormat.CSV,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes to run the trace on.")] = 16,
    gpus_per_node: Annotated[int, typer.Option(min=1, help="GPUs of each.")] = 8,
    clock: Annotated[Clock, typer.Option(help="For a trace: decide at every event, or at slot starts.")] = Clock.EXACT,
    slot_length: Annotated[
        float, typer.Option(click_type=Finite(min=0.001), help="For a trace: seconds of a slot.")
    ] = 360.0,
    placement: Annotated[
        Placement | None,
        typer.Option(
            help="For a trace: whether GPUs count wherever they are, or jobs need room on nodes. "
            "By default as is usual with the format."
        ),
    ] = None,
    policies: Policies = "",
    seeds: Seeds = None,
    seed: Seed = None,
    check: Check = False,
    per_job: PerJob = None,
    parquet: Parquet = None,
    html: Html = None,
    engine: Engine = Where.LOCAL,
    workers: Workers = None,
    decision_s_max: DecisionMax = None,
    output: Output = Form.TABLE,
) -> None:
    """Run an experiment's policies on the same jobs, or a trace without any experiment's file."""
    from fedsched.errors import InvalidInput

    if (file is None) == (trace is None):
        given = "neither" if file is None else "both"
        raise InvalidInput(
            f"an experiment's file or --trace was expected, one of them; {given} is given", "fedsched sim run --help"
        )
    if file is not None:
        _refuse_options_of_traces(ctx)
        plan = _adjusted(_plan(file), policies, seeds, seed, decision_s_max)
    else:
        assert trace is not None
        plan = _trace_plan(trace, form, nodes, gpus_per_node, clock, slot_length, placement)
        plan = _adjusted(plan, policies or "fifo", seeds, seed, decision_s_max)
    from fedsched.cli.simulated import Files, carry_out  # loads what simulates, once all that is given makes sense

    files = Files(per_job, parquet, html)
    carry_out([plan], files, engine=engine.value, workers=workers, check=check, as_json=output is Form.JSON)


def _refuse_options_of_traces(ctx: typer.Context) -> None:
    """An experiment's file says itself what these would say; ignored, they would be taken for what was simulated."""
    from click.core import ParameterSource

    from fedsched.errors import InvalidInput

    for param in ctx.command.params:
        name = str(param.name)
        if name in OF_TRACES and ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise InvalidInput(
                f"{param.opts[0]} is for a run of a --trace; an experiment's file is given",
                "leave it out, or say so in the experiment",
            )


def _trace_plan(
    trace: Path,
    form: TraceFormat,
    nodes: int,
    gpus_per_node: int,
    clock: Clock,
    slot_length_s: float,
    placement: Placement | None,
) -> Selection:
    from fedsched.sim.experiment import trace_experiment

    experiment = trace_experiment(
        trace,
        form,
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        clock="exact" if clock is Clock.EXACT else "slots",
        slot_length_s=slot_length_s,
        pooled=None if placement is None else placement is Placement.POOLED,
    )
    again = f"--trace {trace} --format {form.value} --nodes {nodes} --gpus-per-node {gpus_per_node}"
    again += f" --clock {clock.value} --slot-length {slot_length_s:g}"
    again += f" --placement {placement.value}" if placement is not None else ""
    return Selection(trace.name.split(".")[0], again, experiment, tuple(experiment.policies), (trace,))


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
    decision_s_max: DecisionMax = None,
    output: Output = Form.TABLE,
) -> None:
    """Compare policies and experiments, seed by seed.

    All are compared with the first policy of the first experiment.
    """
    plans = [_adjusted(_plan(file), policies, seeds, seed, decision_s_max) for file in experiments]
    from fedsched.cli.simulated import Files, carry_out  # loads what simulates, once all that is given makes sense

    files = Files(per_job, parquet, html)
    carry_out(plans, files, engine=engine.value, workers=workers, check=check, as_json=output is Form.JSON, paired=True)


def swarm(
    seeds: Annotated[int, typer.Option(min=1, help="How many small worlds.")] = 100,
    first: Annotated[int, typer.Option(min=0, help="Seed of the first one.")] = 0,
    workers: Workers = None,
) -> None:
    """Run small worlds in which everything goes wrong, and judge them.

    Agents die and return, nodes are lost, answers come late or twice, the store is slow, users cancel and policies
    misbehave, all drawn from seeds.
    """
    from fedsched.cli.simulated import swarm_out

    swarm_out(range(first, first + seeds), workers=workers)


def _plan(file: Path) -> Selection:
    from fedsched.sim.experiment import files_of, load_experiment

    experiment = load_experiment(file)
    return Selection(file.stem, str(file), experiment, tuple(experiment.policies), files_of(file))


def _adjusted(
    plan: Selection, policies: str, seeds: int | None, seed: int | None, decision_s_max: float | None
) -> Selection:
    from fedsched.sim.experiment import with_policies

    given = {"seeds": seeds, "seed": seed, "decision_s_max": decision_s_max}
    changes = {name: value for name, value in given.items() if value is not None}
    labels = [label.strip() for label in policies.split(",") if label.strip()]
    experiment, chosen = with_policies(plan.experiment.model_copy(update=changes), labels)
    return replace(plan, experiment=experiment, policies=chosen)
