"""Reads the spans that `tracing` wrote to a file, and shows a trace as a tree."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from rich.markup import escape
from rich.tree import Tree

from fedsched.errors import NotFound

_log = logging.getLogger(__name__)


class _Line(BaseModel):
    """Part of one line; fields that a later version adds are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class SpanEvent(_Line):
    """Something that happened during a span."""

    name: str
    at_s: float
    attributes: dict[str, Any] = Field(default_factory=dict)


class SpanRecord(_Line):
    """One span. Times are seconds since 1970; `links` are traceparents; `parent_id` is empty for a root."""

    trace_id: str = Field(min_length=1)
    span_id: str = Field(min_length=1)
    parent_id: str = ""
    name: str
    service: str = ""
    start_s: float
    end_s: float
    status: str = "unset"
    attributes: dict[str, Any] = Field(default_factory=dict)
    links: tuple[str, ...] = ()
    events: tuple[SpanEvent, ...] = ()


def read(file: str | Path) -> list[SpanRecord]:
    """All spans of the file, by start. Lines that are torn (a process died while writing) are counted and left out.

    Raises:
        NotFound: the file cannot be read.
    """
    try:
        lines = Path(file).read_bytes().splitlines()
    except OSError as problem:
        raise NotFound(f"no trace file {file}: {problem.strerror}", "is tracing.file set to it?") from problem
    records, unreadable = [], 0
    for line in lines:
        if not line.strip():
            continue
        try:
            records.append(SpanRecord.model_validate_json(line))
        except ValidationError:
            unreadable += 1
    if unreadable:
        _log.warning("%d of %d lines of %s are not spans and were left out", unreadable, len(lines), file)
    return sorted(records, key=_order)


def trace_of(records: Sequence[SpanRecord], trace_id: str) -> list[SpanRecord]:
    """The spans of one trace, by start; `trace_id` may also be a traceparent."""
    wanted = trace_id.split("-")[1] if trace_id.count("-") == 3 else trace_id
    return sorted((record for record in records if record.trace_id == wanted), key=_order)


def tree(records: Sequence[SpanRecord], title: str = "trace") -> Tree:
    """The spans as a tree by start: offset from the first, duration, service, attributes, links.

    A span whose parent is not among them (it is still open, or its process died) stands at the top.
    """
    ordered = sorted(records, key=_order)
    ids = {record.span_id for record in ordered}
    children: dict[str, list[SpanRecord]] = {}
    for record in ordered:
        parent = record.parent_id if record.parent_id in ids and record.parent_id != record.span_id else ""
        children.setdefault(parent, []).append(record)
    origin_s = ordered[0].start_s if ordered else 0.0
    root = Tree(escape(title))
    # Without recursion: a trace may be deeper than Python's stack. Those that a loop of parents keeps from the
    # root (only a broken file has it) are left out.
    waiting = [(root, "")]
    while waiting:
        branch, span_id = waiting.pop()
        for record in children.get(span_id, ()):
            waiting.append((branch.add(_label(record, origin_s)), record.span_id))
    return root


def _order(record: SpanRecord) -> tuple[float, float, str]:
    return record.start_s, -record.end_s, record.span_id


def _label(record: SpanRecord, origin_s: float) -> str:
    failed = record.status == "error"
    name = f"[red]{escape(record.name)} failed[/red]" if failed else f"[bold]{escape(record.name)}[/bold]"
    parts = [
        f"{name} {_duration(record.end_s - record.start_s)}",
        f"[cyan]{escape(record.service)}[/cyan]",
        f"[dim]+{record.start_s - origin_s:.3f} s[/dim]",
    ]
    shown = {key: value for key, value in sorted(record.attributes.items()) if not key.startswith("otel.")}
    if shown:
        parts.append(escape(" ".join(f"{key}={_short(value)}" for key, value in shown.items())))
    if failed and "otel.status_description" in record.attributes:
        parts.append(f"[red]{escape(_short(record.attributes['otel.status_description'], 120))}[/red]")
    parts += [f"[dim]follows {escape(_link(link))}[/dim]" for link in record.links]
    return "  ".join(parts)


def _duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def _short(value: object, length_max: int = 60) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= length_max else text[: length_max - 1] + "…"


def _link(traceparent: str) -> str:
    parts = traceparent.split("-")
    return f"{parts[1][:8]}/{parts[2][:8]}" if len(parts) == 4 else traceparent
