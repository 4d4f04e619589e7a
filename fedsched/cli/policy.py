"""Commands about the policies that there are: policy list, show, merge; others of the group have files of their own."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedsched.cli import promoting
from fedsched.cli.card import card
from fedsched.cli.connect import Server, connect
from fedsched.cli.output import Format, Output, emit, moment, span, table

if TYPE_CHECKING:
    from fedsched.core.views import PolicyVersion


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    group = typer.Typer(
        help="Look at policies, and choose which version decides where.", no_args_is_help=True, rich_markup_mode=None
    )
    group.command("list")(list_policies)
    group.command()(show)
    group.command()(card)
    group.command()(merge)
    promoting.register(group)
    app.add_typer(group, name="policy")


def list_policies(server: Server = "", output: Output = Format.TABLE) -> None:
    """List the policies that can be configured, and the stored versions of learned ones."""
    from fedsched.config import COMBINED, SIMULATED
    from fedsched.policy import plugins

    uses = dict.fromkeys(COMBINED, "learns") | dict.fromkeys(SIMULATED, "simulations only")

    offered = plugins.available()
    versions = _stored(server)
    found: list[tuple[str, PolicyVersion | None]] = [(item.name, item) for item in versions]
    stored = {item.name for item in versions}
    found += [(name, None) for name in offered if name not in stored]
    found.sort(key=lambda one: (one[0], one[1].version if one[1] else 0))
    rows = [
        {"name": name, "package": offered.get(name), "learns": name in COMBINED, "simulated_only": name in SIMULATED}
        | ({"version": item.version, "active": item.active, "record": item.record} if item else {})
        for name, item in found
    ]
    names = [f"policy/{name}" + (f"/{item.version}" if item else "") for name, item in found]
    if not emit(rows, output, names):
        columns = ("NAME", "PACKAGE", "USE")
        of_versions = ("VERSION", "ACTIVE", "PARENT", "ROUND", "CONTRIBUTORS", "SAMPLES", "DIGEST", "AGE")
        table(
            columns + (of_versions if versions else ()),
            [(name, offered.get(name), uses.get(name), *(_cells(item) if versions else ())) for name, item in found],
            spare=("DIGEST", "PARENT"),
        )


def _stored(server: str) -> tuple[PolicyVersion, ...]:
    """Versions that the federation keeps; none where no federation runs here and none is named."""
    from fedsched.errors import Unreachable

    try:
        client = connect(server)
    except Unreachable:
        return ()
    with client:
        return client.policies()


def _cells(item: PolicyVersion | None) -> tuple[object, ...]:
    """Of a version, from VERSION to AGE; empty for a policy that is stored in none."""
    if item is None:
        return (None,) * 6 + ("", None)
    record = item.record
    return (
        f"v{item.version}",
        "yes" if item.active else None,
        f"v{record.parent_version}" if record.parent_version else None,
        record.round_number or None,
        ",".join(record.contributors),
        record.samples,
        record.digest[:12],
        span(time.time() - record.created_s),
    )


def show(
    name: Annotated[str, typer.Argument(help="Name of the policy.")] = "dl2",
    version: Annotated[int | None, typer.Option("--version", min=1, help="The active one if not given.")] = None,
    server: Server = "",
    output: Output = Format.TABLE,
) -> None:
    """Show one policy version: where it came from and who took part."""
    from msgspec import structs

    from fedsched.errors import NotFound

    with connect(server) as client:
        found = client.policies(name)
    wanted = [item for item in found if (item.active if version is None else item.version == version)]
    if not wanted:
        which = "active version" if version is None else f"version {version}"
        raise NotFound(f"policy {name} has no {which}", "list them with `fedsched policy list`")
    item = wanted[0]
    if not emit(item, output, [f"policy/{item.name}/{item.version}"]):
        print(f"{item.name} v{item.version}{' (active)' if item.active else ''}")
        for key, value in sorted(structs.asdict(item.record).items()):
            if key in ("name", "version") or value in ("", ()):
                continue
            shown = ", ".join(map(str, value)) if isinstance(value, tuple) else value
            if key.endswith("_s"):
                key, shown = f"{key[:-2]}_at", moment(value)
            print(f"  {key:<20} {shown}")


def merge(
    files: Annotated[
        list[Path], typer.Argument(metavar="STATISTICS... FILE", help="What clusters learned, and the file to write.")
    ],
    output: Output = Format.TABLE,
) -> None:
    """Add up what learned_speed learned on several clusters: exactly, and the same in any order."""
    from fedsched.core.ids import ClusterName
    from fedsched.errors import InvalidInput
    from fedsched.federation import speeds
    from fedsched.policy import speed_checkpoint
    from fedsched.policy.checkpoint import refuse_bad_places

    *sources, file = files
    if len(sources) < 2 or len(set(sources)) < len(sources):
        raise InvalidInput(
            f"{len(set(sources))} different files of statistics given; two at least, and one to write, were expected",
            "name the file to write last",
        )
    refuse_bad_places(sources, [file])
    if file.is_file():
        raise InvalidInput(
            f"{file} exists already; the last of the files is written, and a new one was expected",
            "name a file that is not there yet; was it to be merged with the others?",
        )
    read = {ClusterName(str(source)): speed_checkpoint.load(source) for source in sources}
    total = speeds.merge({name: checkpoint.statistics for name, checkpoint in read.items()})
    digests = ", ".join(sorted(checkpoint.digest[:12] for checkpoint in read.values()))
    merged = speed_checkpoint.SpeedCheckpoint(total, {"command": "fedsched policy merge", "merged": digests})
    merged.save(file)
    told = {
        "file": str(file),
        "digest": merged.digest,
        "files": len(sources),
        "cells": len(total),
        "observations": total.observations,
    }
    if not emit(told, output, [str(file)]):
        table(("SPEEDS MERGED", ""), list(told.items()))
