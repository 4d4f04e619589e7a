"""Reading a trace file and showing it."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from rich.console import Console

from fedsched.adapters import spans
from fedsched.adapters.spans import SpanRecord
from fedsched.errors import NotFound


def record(span_id: str, parent_id: str = "", start_s: float = 0.0, **more: object) -> SpanRecord:
    plain = {"trace_id": "t1", "span_id": span_id, "parent_id": parent_id, "name": span_id, "service": "agent"}
    return SpanRecord.model_validate({**plain, "start_s": start_s, "end_s": start_s + 0.5, **more})


def shown(records: list[SpanRecord], width: int = 200) -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(spans.tree(records))
    return capture.get()


def test_torn_lines_are_counted_and_the_rest_is_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """After a power cut the trace is what one looks at; its last line is broken just then."""
    caplog.set_level(logging.WARNING)
    file = tmp_path / "trace.jsonl"
    good = record("b", start_s=2.0).model_dump_json()
    early = json.dumps({**json.loads(record("a", start_s=1.0).model_dump_json()), "new_field": 1})
    file.write_bytes(
        f'{good}\n\n{{"trace_id": "t1", "sp\n[]\n'.encode() + b"\xff\xfe\n" + f"{early}\n{good[:20]}".encode()
    )

    found = spans.read(file)

    assert [span.span_id for span in found] == ["a", "b"]
    assert "4 of 7 lines" in caplog.text


def test_a_missing_file_is_one_clear_error(tmp_path: Path) -> None:
    """`trace show` before anything was traced."""
    with pytest.raises(NotFound, match="no trace file"):
        spans.read(tmp_path / "none")


def test_a_trace_is_found_by_its_id_and_by_a_traceparent() -> None:
    """A job's record holds its traceparent; a person copies an id."""
    records = [record("b", start_s=2.0), record("x", trace_id="t2"), record("a", start_s=1.0)]

    assert [span.span_id for span in spans.trace_of(records, "t1")] == ["a", "b"]
    assert [span.span_id for span in spans.trace_of(records, f"00-t1-{'b' * 16}-01")] == ["a", "b"]
    assert spans.trace_of(records, "none") == []


def test_the_tree_orders_by_start_and_puts_orphans_at_the_top() -> None:
    """The root of a running job is still open and not in the file; its parts must be seen all the same."""
    text = shown(
        [
            record("late", "root", start_s=3.0),
            record("orphan", "still-open", start_s=4.0),
            record("root", start_s=1.0),
            record("early", "root", start_s=2.0),
            record("inner", "early", start_s=2.1),
        ]
    )

    lines = [line for line in text.splitlines() if "agent" in line]
    names = [next(word for word in line.split() if word.isalpha()) for line in lines]
    assert names == ["root", "early", "inner", "late", "orphan"]
    depth = {name: line.index(name) for name, line in zip(names, lines, strict=True)}
    assert depth["root"] == depth["orphan"] < depth["early"] == depth["late"] < depth["inner"]


def test_the_tree_tells_duration_service_attributes_links_and_failure() -> None:
    """That is what one compares when a job was slow."""
    text = shown(
        [
            record("root", start_s=1.0, end_s=3.5, service="controller"),
            record(
                "resize",
                "root",
                start_s=2.0,
                status="error",
                attributes={"workers": 3, "loss": 0.123456789, "note": "[bold]", "otel.status_description": "no room"},
                links=[f"00-{'c' * 32}-{'d' * 16}-01"],
            ),
        ]
    )

    assert "root 2.50 s  controller  +0.000 s" in text
    assert "resize failed 500.0 ms  agent  +1.000 s  loss=0.123457 note=[bold] workers=3  no room" in text
    assert "follows cccccccc/dddddddd" in text


def test_a_file_with_a_loop_of_parents_still_shows() -> None:
    """A broken file must not hang the command."""
    text = shown([record("a", "b"), record("b", "a"), record("self", "self"), record("root")])

    assert "root" in text
    assert "self" in text


def test_a_very_deep_trace_still_shows() -> None:
    """Retries that each follow from the last make a long chain."""
    records = [record(f"s{n}", f"s{n - 1}" if n else "", start_s=float(n)) for n in range(300)]

    assert "s299" in shown(records, width=2000)
