"""Commands for whoever runs a federation: up, down, federation status, federation rounds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedsched.cli.connect import Server, connect
from fedsched.cli.output import Format, Output, emit, note, span, table

if TYPE_CHECKING:
    from fedsched.core.rounds import RoundRecord

Limit = Annotated[int, typer.Option("--limit", min=0, help="Only the newest so many; 0 means all.")]
Name = Annotated[
    str, typer.Option("--name", help="Name of the federation on this machine; needed only when several run.")
]


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    app.command()(up)
    app.command()(down)
    group = typer.Typer(help="Look at the federation as a whole.", no_args_is_help=True, rich_markup_mode=None)
    group.command()(status)
    group.command()(rounds)
    app.add_typer(group, name="federation")


def up(
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="[FILE]", help="Federation file (YAML); without one, two small clusters.", show_default=False
        ),
    ] = None,
    output: Output = Format.TABLE,
) -> None:
    """Start a whole federation on this machine.

    That is etcd, a controller, an aggregator and one agent per cluster. It returns when all of them are ready.
    """
    from fedsched import local
    from fedsched.config import FederationConfig, load

    config = load(FederationConfig, file) if file is not None else local.small()
    try:
        found = local.up(config, local.home() / config.name, say=_say(output))
    except KeyboardInterrupt:
        note(f"federation {config.name} is not up: what was started for it is ended again")
        raise
    result = {
        "name": found.name,
        "controller": found.controller,
        "aggregator": found.aggregator,
        "etcd": found.etcd,
        "clusters": found.clusters,
        "trace_endpoint": found.trace_endpoint,
        "trace_file": found.trace_file,
        "processes": found.processes,
    }
    if not emit(result, output, [f"federation/{found.name}"]):
        print("submit a job with `fedsched submit FILE`; end everything with `fedsched down`")


def down(
    name: Name = "",
    purge: Annotated[bool, typer.Option("--purge", help="Also delete its data: jobs, policies, logs.")] = False,
    output: Output = Format.TABLE,
) -> None:
    """Stop what `up` started.

    Jobs that run go on from their checkpoints after the next `up`.
    """
    from fedsched import local

    state_dir = local.named(name)
    say = _say(output)
    stopped = local.down(state_dir, purge=purge, say=say)
    if not stopped:
        left = "" if purge else f"; `fedsched down --name {state_dir.name} --purge` deletes what it left"
        say(f"federation {state_dir.name} did not run{left}")
    result = {"name": state_dir.name, "stopped": [process.name for process in stopped], "purged": purge}
    emit(result, output, [f"federation/{state_dir.name}"])


def _say(output: Format) -> Callable[[str], None]:
    """Progress is for people: beside a result for programs it goes to stderr."""
    return print if output is Format.TABLE else lambda line: print(line, file=sys.stderr)


def status(server: Server = "", output: Output = Format.TABLE) -> None:
    """Show members, policies and the last round."""
    with connect(server) as client:
        clusters, policies, newest = client.clusters(), client.policies(), client.rounds(limit=1)
    last = newest[0] if newest else None
    active = [policy for policy in policies if policy.active]
    if emit(
        {"clusters": clusters, "active_policies": active, "last_round": last},
        output,
        [f"cluster/{view.name}" for view in clusters],
    ):
        return
    ready = sum(view.reachable for view in clusters)
    print(f"members   {ready} of {len(clusters)} connected")
    for policy in active:
        print(f"policy    {policy.name} v{policy.version} is active")
    if last is None:
        print("rounds    none yet")
    else:
        print(f"rounds    {last.number}; the last one {_outcome(last)}")
    print()
    contributed = {part.cluster: part for part in last.contributions} if last else {}
    absent = {part.cluster: part for part in last.absent} if last else {}
    table(
        ("CLUSTER", "STATE", "SEEN", "POLICY", "VERSION", "LAST ROUND"),
        [
            (
                view.name,
                "Ready" if view.reachable else "Lost",
                span(view.seen_age_s),
                view.record.policy if view.record else None,
                f"v{view.record.policy_version}" if view.record and view.record.policy_version else None,
                f"{contributed[view.name].samples} samples"
                if view.name in contributed
                else f"{absent[view.name].absence}: {absent[view.name].why}"
                if view.name in absent
                else None,
            )
            for view in clusters
        ],
    )


def rounds(limit: Limit = 20, server: Server = "", output: Output = Format.TABLE) -> None:
    """List federated rounds."""
    with connect(server) as client:
        found = client.rounds(limit)
    if not emit(found, output, [f"round/{record.number}" for record in found]):
        now_s = time.time()
        table(
            ("ROUND", "OUTCOME", "POLICY", "BASE", "VERSION", "GAVE", "ABSENT", "TOOK", "AGE", "WHY"),
            [
                (
                    record.number,
                    record.outcome,
                    record.policy,
                    f"v{record.base_version}",
                    f"v{record.version}",
                    ",".join(part.cluster for part in record.contributions),
                    ",".join(part.cluster for part in record.absent),
                    f"{record.finished_s - record.started_s:.2f}s",
                    span(now_s - record.finished_s),
                    _why(record),
                )
                for record in found
            ],
            spare=("TOOK", "ABSENT", "POLICY"),
        )
        if not found:
            note("no round yet; `fedsched federation status` shows the members")


def _why(record: RoundRecord) -> str:
    """What the aggregator says of the round, and what each cluster that gave nothing said."""
    absent = [f"{part.cluster} {part.absence}: {part.why}" for part in record.absent]
    return "; ".join([*([record.message] if record.message else []), *absent])


def _outcome(record: RoundRecord) -> str:
    gave = len(record.contributions)
    return f"{record.outcome} with {gave} of {len(record.asked)}, v{record.base_version} -> v{record.version}"
