"""The command that shows a job's trace: trace show."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedsched.cli.connect import Server, connect
from fedsched.cli.output import Format, Output, console, emit

if TYPE_CHECKING:
    from fedsched.adapters.spans import SpanRecord


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
