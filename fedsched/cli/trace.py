"""The command that shows a job's trace: trace show."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedsched.cli.connect import Server, connect
from fedsched.cli.output import Format, Output, console, emit


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    group = typer.Typer(help="Look at what happened, span by span.", no_args_is_help=True, rich_markup_mode=None)
    group.callback()(_group)
    group.command()(show)
    app.add_typer(group, name="trace")


def _group() -> None:
    """Keeps `show` a command of its own: a group of one would be merged into it."""


def show(
    job_id: Annotated[str, typer.Argument(metavar="JOB", help="The job's id.")],
    file: Annotated[
        Path | None, typer.Option("--file", help="Trace file; that of the federation on this machine if not given.")
    ] = None,
    server: Server = "",
    output: Output = Format.TABLE,
) -> None:
    """Print the spans of a job from submission to its end as a tree."""
    from fedsched.adapters import spans
    from fedsched.core.explain import trace_id
    from fedsched.core.ids import JobId
    from fedsched.errors import NotFound
    from fedsched.local import trace_target

    with connect(server) as client:
        job = client.get(JobId(job_id))
    source = file if file is not None else Path(trace_target()[1] or "")
    if not source.is_file():
        raise NotFound(
            f"there is no trace file {source}" if source.name else "this federation writes no trace file",
            "name one with --file, or look into the collector that tracing.endpoint names",
        )
    wanted = trace_id(job.spec.traceparent)
    found = spans.trace_of(spans.read(source), wanted)
    if not found:
        raise NotFound(
            f"{source} holds no spans of job {job_id} (trace {wanted or '-'})", "was tracing on when it ran?"
        )
    if not emit(found, output, [f"span/{record.span_id}" for record in found]):
        console().print(spans.tree(found))
