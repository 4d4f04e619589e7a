"""The commands on traces: trace show (what happened to a job), trace import and trace fit (jobs that ran elsewhere)."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click
import typer

from fedsched.cli.connect import Server, connect
from fedsched.cli.finite import Finite
from fedsched.cli.output import Format, Output, console, emit, note, span, table
from fedsched.sim.traces.names import SPEEDS, TraceFormat

if TYPE_CHECKING:
    from fedsched.adapters.spans import SpanRecord
    from fedsched.sim.fit_goodness import Goodness
    from fedsched.sim.traces.record import Refusal, Refusals

NAMED_MAX = 20
"""So many refused rows are named on the screen."""


class ByName(StrEnum):
    """What `trace fit` takes as clusters."""

    CLUSTER = "cluster"
    VC = "vc"
    ALL = "all"


Throughputs = Annotated[
    Path | None,
    typer.Option(help="For gavel: the table of throughputs; otherwise it is looked for beside the trace."),
]
WorkerType = Annotated[str, typer.Option(help="For gavel: whose throughputs turn steps into seconds.")]


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    group = typer.Typer(
        help="Spans of what happened; traces of jobs.",
        no_args_is_help=True,
        rich_markup_mode=None,
    )
    group.command()(show)
    group.command(name="import")(import_)
    group.command()(fit)
    app.add_typer(group, name="trace")


def show(
    job_id: Annotated[str, typer.Argument(metavar="JOB", help="The job's id.")],
    file: Annotated[
        Path | None, typer.Option("--file", help="Look the job up in this trace file instead of asking a controller.")
    ] = None,
    server: Server = "",
    output: Output = Format.TABLE,
) -> None:
    """Print the spans of a job from submission to its end as a tree."""
    from fedsched.adapters import spans
    from fedsched.errors import NotFound

    source = file if file is not None else _file()
    if not source.is_file():
        raise NotFound(f"there is no trace file {source}", "name one with --file")
    records = spans.read(source)
    wanted = _asked(server, job_id) if file is None else _looked_up(records, job_id)
    found = spans.trace_of(records, wanted)
    if not found:
        raise NotFound(f"{source} holds no spans of job {job_id}", "was tracing on when it was submitted?")
    if not emit(found, output, [f"span/{record.span_id}" for record in found]):
        console().print(spans.tree(found))


def _file() -> Path:
    """Where the federation on this machine writes its spans."""
    from fedsched.errors import NotFound
    from fedsched.local import trace_target

    endpoint, name = trace_target()
    if not name:
        problem = f"spans go to {endpoint}" if endpoint else "no federation that runs here writes a trace file"
        raise NotFound(f"{problem}, so there is none to read", "name a trace file with --file")
    return Path(name)


def _asked(server: str, job_id: str) -> str:
    """The trace id that is kept in the job."""
    from fedsched.core.explain import trace_id
    from fedsched.core.ids import JobId

    with connect(server) as client:
        return trace_id(client.get(JobId(job_id)).spec.traceparent)


def _looked_up(records: list[SpanRecord], job_id: str) -> str:
    """The trace id of the newest submission of the job in the file."""
    ids = [record.trace_id for record in records if record.name == "submit" and record.attributes.get("job") == job_id]
    return ids[-1] if ids else ""


def import_(
    form: Annotated[
        str,
        typer.Argument(
            metavar="FORMAT",
            click_type=click.Choice([*(form.value for form in TraceFormat), SPEEDS]),
            help="csv, itp (ElasticFlow), philly, helios, alibaba, gavel, tiresias, or dl2 (speeds).",
        ),
    ],
    file: Annotated[Path, typer.Argument(metavar="IN", help="The publisher's file; gzip is read as it is.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Where the CSV goes; a name in .gz is packed.")],
    gpus: Annotated[
        float | None,
        typer.Option(click_type=Finite(min=0.001), help="Capacity of a cluster that the offered load is told for."),
    ] = None,
    refused: Annotated[Path | None, typer.Option(help="Where every refused row is named, as CSV.")] = None,
    throughputs: Throughputs = None,
    worker_type: WorkerType = "v100",
    output: Output = Format.TABLE,
) -> None:
    """Bring a public trace into the form that simulations read, and tell what was left out and why."""
    from fedsched.errors import InvalidTrace
    from fedsched.files import refuse_clashes
    from fedsched.sim.traces import dl2, formats, plain
    from fedsched.sim.traces.demand import Demand, counted
    from fedsched.sim.traces.record import Refusals

    refuse_clashes([file], [path for path in (out, refused) if path is not None])
    demand = Demand()
    left_out = Refusals()
    if form == SPEEDS:
        accepted = _telling(left_out, refused, lambda: dl2.import_table(file, out, left_out))
    else:
        jobs = formats.read(file, TraceFormat(form), left_out, throughputs=throughputs, worker_type=worker_type)
        accepted = _telling(left_out, refused, lambda: plain.write(out, counted(jobs, demand)))
    if not accepted:
        first = f"; the first row: {left_out.kept[0]}" if left_out.kept else ""
        raise InvalidTrace(f"{file} has no usable row, {left_out.total} refused{first}", "check the format's name")
    report: dict[str, Any] = {
        "file": str(out),
        "accepted": accepted,
        "refused": {reason.value: count for reason, count in sorted(left_out.counts.items())},
    }
    if demand.jobs:
        report |= {
            "span_s": demand.span_s,
            "gpus_max": demand.gpus_max,
            "gpu_hours": demand.gpu_hours,
            "gpus_wanted": demand.gpus,
            "load": None if gpus is None else demand.load(gpus),
        }
    _name(left_out, refused)
    if not emit(report, output, [str(out)]):
        table(("", "VALUE"), _lines(report))
        if form != SPEEDS:
            note(f"{out} holds the jobs; run them with `fedsched sim run --trace {out}`")


def _telling(left_out: Refusals, refused: Path | None, work: Callable[[], int]) -> int:
    """Do the work; every row that it leaves out goes to the file `refused` as well, if one is named."""
    import csv
    import io

    from fedsched.files import whole

    if refused is None:
        return work()
    with whole(refused) as raw, io.TextIOWrapper(raw, "utf-8", errors="backslashreplace", newline="") as text:
        rows = csv.writer(text, lineterminator="\n")
        rows.writerow(("file", "line", "field", "reason", "problem"))

        def write(refusal: Refusal) -> None:
            rows.writerow((refusal.file, refusal.line, refusal.field, refusal.reason.value, refusal.problem))

        left_out.told = write
        return work()


def _name(left_out: Refusals, refused: Path | None) -> None:
    """Tell the first refused rows one by one, for people."""
    for refusal in left_out.kept[:NAMED_MAX]:
        typer.echo(f"refused {refusal}", err=True)
    if left_out.total > NAMED_MAX:
        where = f"all are in {refused}" if refused is not None else "--refused FILE names every one"
        typer.echo(f"refused {left_out.total - NAMED_MAX} more rows; {where}", err=True)


def _lines(report: dict[str, Any]) -> list[tuple[str, str | None]]:
    """The report for people."""
    lines: list[tuple[str, str | None]] = [("accepted", str(report["accepted"]))]
    lines += [(f"refused: {reason}", str(count)) for reason, count in report["refused"].items()]
    if "span_s" in report:
        wanted, load = report["gpus_wanted"], report["load"]
        lines += [
            ("span", span(report["span_s"])),
            ("largest job", f"{report['gpus_max']:g} GPUs"),
            ("GPU-hours", f"{report['gpu_hours']:.1f}"),
            ("GPUs wanted on average", None if wanted is None else f"{wanted:.1f}"),
        ]
        lines += [] if load is None else [("offered load", f"{load:.3f}")]
    return lines


def fit(
    file: Annotated[Path, typer.Argument(metavar="TRACE", help="The trace, by default as `trace import` writes it.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The YAML file that the parameters go to.")],
    form: Annotated[
        TraceFormat, typer.Option("--format", help="Format of the trace, if it was not imported.")
    ] = TraceFormat.CSV,
    by: Annotated[
        ByName, typer.Option(help="Give each cluster or virtual cluster parameters of its own, or all one set.")
    ] = ByName.CLUSTER,
    name: Annotated[str, typer.Option(help="Name of the trace; by default the file's.")] = "",
    throughputs: Throughputs = None,
    worker_type: WorkerType = "v100",
    output: Output = Format.TABLE,
) -> None:
    """Fit a generator of jobs to a trace, and tell how alike the trace and drawn jobs are."""
    from fedsched.sim import fit_goodness, fitting, trace_fit
    from fedsched.sim.traces import formats
    from fedsched.sim.traces.record import Refusals

    refused = Refusals()
    jobs = list(formats.read(file, form, refused, throughputs=throughputs, worker_type=worker_type))
    _name(refused, None)
    groups = fitting.By(by.value)
    parameters = fitting.fit(jobs, name or file.name.removesuffix(".gz").removesuffix(".csv"), groups)
    trace_fit.save(out, parameters)
    found = fit_goodness.goodness(parameters, jobs, groups)
    if not emit(found, output, [item.cluster for item in found]):
        _show_goodness(found)
        note(f"{out} holds the parameters; a workload draws jobs from them: {{kind: fitted, fit: {out.absolute()}}}")


def _show_goodness(found: list[Goodness]) -> None:
    table(
        (
            "CLUSTER",
            "JOBS",
            "DURATIONS KS",
            "SIZES TV",
            "HOURS TV",
            "GPU-HOURS",
            "BURSTINESS/DRAWN",
            "SWING/DRAWN",
        ),
        [
            (
                item.cluster,
                item.jobs,
                f"{item.duration_ks:.3f}",
                f"{item.gpus_tv:.3f}",
                f"{item.hours_tv:.3f}",
                f"{item.gpu_hours_ratio:.1%}",
                f"{item.burstiness:.2f}/{item.drawn_burstiness:.2f}",
                f"{item.swing:.2f}/{item.drawn_swing:.2f}",
            )
            for item in found
        ],
    )
