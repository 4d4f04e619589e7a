"""Commands that show which policies there are: policy list, policy show."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from fedsched.cli.connect import Server, connect
from fedsched.cli.output import Format, Output, emit, moment, span, table


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    group = typer.Typer(help="Look at the learned policies.", no_args_is_help=True, rich_markup_mode=None)
    group.command("list")(list_versions)
    group.command()(show)
    app.add_typer(group, name="policy")


def list_versions(server: Server = "", output: Output = Format.TABLE) -> None:
    """List stored policy versions."""
    with connect(server) as client:
        found = client.policies()
    if not emit(found, output, [f"policy/{item.name}/{item.version}" for item in found]):
        now_s = time.time()
        table(
            ("NAME", "VERSION", "ACTIVE", "PARENT", "ROUND", "CONTRIBUTORS", "SAMPLES", "DIGEST", "AGE"),
            [
                (
                    item.name,
                    f"v{item.version}",
                    "yes" if item.active else None,
                    f"v{item.record.get('parent_version', 0)}" if item.record.get("parent_version") else None,
                    item.record.get("round_number") or None,
                    ",".join(item.record.get("contributors", [])),
                    item.record.get("samples"),
                    str(item.record.get("digest", ""))[:12],
                    span(now_s - item.record["created_s"]) if "created_s" in item.record else None,
                )
                for item in found
            ],
            spare=("DIGEST", "PARENT"),
        )


def show(
    name: Annotated[str, typer.Argument(help="Name of the policy.")] = "dl2",
    version: Annotated[int | None, typer.Option("--version", min=1, help="The active one if not given.")] = None,
    server: Server = "",
    output: Output = Format.TABLE,
) -> None:
    """Show one policy version: where it came from and who took part."""
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
        for key, value in sorted(item.record.items()):
            if key in ("name", "version") or value in ("", []):
                continue
            shown = ", ".join(map(str, value)) if isinstance(value, list) else value
            if key.endswith("_s"):
                key, shown = f"{key[:-2]}_at", moment(value)
            print(f"  {key:<20} {shown}")
