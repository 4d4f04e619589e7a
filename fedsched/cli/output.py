"""How results are shown: a table for people, or JSON, YAML and names for programs."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text


class Format(StrEnum):
    """What `-o` takes."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"
    NAME = "name"


Output = Annotated[Format, typer.Option("-o", "--output", help="How to show the result.")]

MOMENTS = frozenset(
    {
        "submitted_s",
        "dispatched_s",
        "started_s",
        "changed_s",
        "finished_s",
        "time_s",
        "created_s",
        "start_s",
        "end_s",
        "newest_s",
    }
)
"""Fields that hold unix times, not durations. JSON shows them as RFC 3339 under a name that ends in `_at`."""
WIDE = 400
GAP = 2
CUT_MIN = 16
"""A last column is cut to no less than this; the start of a reason or a message has to be readable."""


def plain(value: object) -> Any:
    """A record as data for JSON and YAML."""
    from dataclasses import is_dataclass

    import msgspec
    from pydantic import BaseModel

    from fedsched.runtime import codec

    if isinstance(value, msgspec.Struct) or (is_dataclass(value) and not isinstance(value, type)):
        import json

        return _with_times(json.loads(codec.dumps(value)))
    if isinstance(value, BaseModel):
        return _with_times(value.model_dump(mode="json"))
    if isinstance(value, Mapping):
        return _with_times({str(key): plain(item) for key, item in value.items()})
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def _with_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            (f"{key[:-2]}_at" if key in MOMENTS else key): moment(item) if key in MOMENTS else _with_times(item)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [_with_times(item) for item in value]
    return value


def moment(time_s: float | None) -> str | None:
    """RFC 3339 in UTC, to the millisecond."""
    from datetime import UTC, datetime

    if not isinstance(time_s, int | float):
        return time_s
    return datetime.fromtimestamp(time_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def emit(value: object, form: Format, names: Iterable[str] = ()) -> bool:
    """Print `value` for a program; False when a table is wanted instead."""
    if form is Format.JSON:
        import json

        print(json.dumps(plain(value), indent=2))
    elif form is Format.YAML:
        import yaml

        print(yaml.safe_dump(plain(value), sort_keys=False), end="")
    elif form is Format.NAME:
        for name in names:
            print(name)
    return form is not Format.TABLE


def emit_line(value: object, form: Format) -> None:
    """Print one of a stream of values: a line of JSON, or a YAML document."""
    if form is Format.YAML:
        import yaml

        print("---\n" + yaml.safe_dump(plain(value), sort_keys=False), end="", flush=True)
    else:
        import json

        print(json.dumps(plain(value)), flush=True)


def console() -> Console:
    """A console that colours only at a terminal and never breaks lines anywhere else."""
    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else WIDE)


def aligned(
    columns: Sequence[str], rows: Iterable[Sequence[object]], spare: Sequence[str] = (), width: int | None = None
) -> list[str]:
    """Aligned columns without lines around them, the header first.

    Args:
        spare: columns but the last that may be left out, the first one first, where `width` is too small.
        width: of the terminal, in characters. The last column is cut to it, if that leaves enough to read.
    """
    lines = [columns, *([_cell(cell) for cell in row] for row in rows)]
    widths = {name: max(_length(line[place]) for line in lines) for place, name in enumerate(columns)}
    kept = list(columns)
    excess = 0 if width is None else sum(widths.values()) + GAP * (len(kept) - 1) - width
    last = widths[columns[-1]]
    for name in spare:
        if last - excess < min(last, CUT_MIN):
            kept.remove(name)
            excess -= widths[name] + GAP
    room = last - max(0, excess)
    if room >= CUT_MIN:
        widths[columns[-1]] = room
    places = [(columns.index(name), widths[name]) for name in kept]
    return [(" " * GAP).join(_fitted(line[place], size) for place, size in places).rstrip() for line in lines]


def _cell(value: object) -> str:
    return "-" if value is None or value == "" else " ".join(str(value).splitlines())


def _length(text: str) -> int:
    """How many characters of a terminal the text takes."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def _fitted(text: str, size: int) -> str:
    excess = _length(text) - size
    if excess <= 0:
        return text + " " * -excess
    from rich.cells import set_cell_size

    return f"{set_cell_size(text, size - 1)}…"


def grid(
    columns: Sequence[str], rows: Iterable[Sequence[object]], spare: Sequence[str] = (), width: int | None = None
) -> Text:
    """The same, for what is shown again and again in one place."""
    from rich.text import Text

    header, *lines = aligned(columns, rows, spare, width)
    return Text("\n", no_wrap=True, overflow="ignore").join([Text(header, style="bold"), *map(Text, lines)])


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], spare: Sequence[str] = ()) -> None:
    """Print aligned columns; fitted to the width of a terminal (see `aligned`), and complete anywhere else.

    What cannot be fitted is broken by the terminal itself.
    """
    terminal = console()
    if not terminal.is_terminal:
        print("\n".join(aligned(columns, rows)))
        return
    header, *lines = aligned(columns, rows, spare, terminal.width)
    terminal.print(header, style="bold", markup=False, soft_wrap=True)
    # Past Rich, which would measure every cell of hundreds of lines.
    terminal.file.write("".join(f"{line}\n" for line in lines))


def note(line: str) -> None:
    """Tell people what is no part of a result: on stderr, so that what reads the result does not meet it."""
    sys.stderr.write(f"{line}\n")


def clock(length_s: float) -> str:
    """A running time as HH:MM:SS."""
    whole = max(0, int(length_s))
    return f"{whole // 3600:02d}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def span(length_s: float) -> str:
    """A length of time in its largest unit or two: 5s, 3m20s, 2h5m, 4d3h."""
    whole = max(0, int(length_s))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole // 60 % 60}m"
    return f"{whole // 86400}d{whole // 3600 % 24}h"
