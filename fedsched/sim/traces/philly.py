"""Imports Microsoft Philly traces (ATC'19), repository msr-fiddle/philly-traces.

Layouts read, told apart by their first character and columns:
- published cluster_job_log: a JSON list of jobs with submitted_time, vc, user and attempts, each with start_time,
  end_time and the GPUs of every server
- AdaptDL's flattening of it (OSDI'21): timestamp, duration, num_gpus, gpu_time, cluster (the virtual cluster); it has
  no ids, so a job's id is the number of its row, the first being 0
- normalised tables: job_id, submit_s, duration_s, num_gpu, vc

Submissions of the first two count from the earliest one in the file; times have no zone. A job of the log ran as long
as its attempts together, on as many GPUs as each of them held; one whose attempts are not all complete, or differ in
size, is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fedsched.core.job import LENGTH_MAX_S
from fedsched.errors import InvalidTrace
from fedsched.sim.traces import plain, reading
from fedsched.sim.traces.reading import Header
from fedsched.sim.traces.record import BadRow, Refusals, SkipReason, TraceJob
from fedsched.yamlfile import shown

NO_TIME = ("", "None")


def read(path: Path, refused: Refusals) -> Iterator[TraceJob]:
    """The jobs of a Philly trace, in its order.

    Raises:
        NotFound: there is no such file.
        InvalidTrace: it is of none of these layouts.
    """
    with reading.opened(path) as text:
        is_log = text.read(1) == "["
    if is_log:
        yield from _log(path, refused)
        return
    with reading.table(path) as (header, numbered):
        if header.has("timestamp"):
            yield from _flattened(path, header, numbered, refused)
            return
        build = plain.builder(
            header.column("job_id"),
            header.column("num_gpu"),
            header.column("submit_s"),
            header.column("duration_s"),
            plain.Extras(vc=header.optional("vc")),
        )
        yield from reading.jobs(path, numbered, build, refused)


def _flattened(
    path: Path, header: Header, numbered: Iterator[tuple[int, str]], refused: Refusals
) -> Iterator[TraceJob]:
    timestamp, duration = header.column("timestamp"), header.column("duration")
    num_gpus, vc = header.column("num_gpus"), header.column("cluster")
    with reading.table(path) as (_, once):
        begin_s = reading.earliest(once, timestamp)
        first_line = 2

    def build(line: int, text: str) -> TraceJob:
        row = reading.split(text)
        return TraceJob(
            str(line - first_line),
            timestamp.unix_s(row) - begin_s,
            duration.duration_s(row),
            num_gpus.gpus(row),
            vc=vc.text(row),
        )

    yield from reading.jobs(path, numbered, build, refused)


def _log(path: Path, refused: Refusals) -> Iterator[TraceJob]:
    with reading.opened(path) as text:
        try:
            entries = json.load(text)
        except (json.JSONDecodeError, RecursionError) as problem:
            raise InvalidTrace(f"{path} is not JSON: {problem}", "check that it was fetched whole") from problem
    begin_s = min((_submit_s(entry) for entry in entries if _has_submit(entry)), default=0.0)
    yield from reading.jobs(path, enumerate(entries, 1), lambda _, entry: _job(entry, begin_s), refused)


def _has_submit(entry: Any) -> bool:
    try:
        _submit_s(entry)
    except BadRow:
        return False
    return True


def _submit_s(entry: Any) -> float:
    return reading.unix_s(_text(entry, "submitted_time"), "submitted_time")


def _job(entry: Any, begin_s: float) -> TraceJob:
    job_id = _text(entry, "jobid")
    submit_s = _submit_s(entry) - begin_s
    attempts = entry.get("attempts")
    if not isinstance(attempts, list):
        raise BadRow(SkipReason.UNREADABLE, "attempts", f"is {shown(attempts)}; a list was expected")
    if not attempts:
        raise BadRow(SkipReason.NEVER_RAN, "attempts", "is empty; the job never ran")
    sizes = [_gpus(attempt) for attempt in attempts]
    if min(sizes) != max(sizes):
        raise BadRow(
            SkipReason.SIZE_CHANGED, "attempts", f"held {min(sizes)} to {max(sizes)} GPUs; one size was expected"
        )
    size = reading.gpus(reading.number(str(sizes[0]), "gpus", reading.GPUS_MAX), "gpus")
    length_s = sum(_length_s(attempt, last=attempt is attempts[-1]) for attempt in attempts)
    duration_s = reading.positive(reading.number(repr(length_s), "attempts", LENGTH_MAX_S), "attempts")
    return TraceJob(job_id, submit_s, duration_s, size, vc=_text(entry, "vc"), user=_text(entry, "user"))


def _gpus(attempt: Any) -> int:
    servers = attempt.get("detail") if isinstance(attempt, Mapping) else None
    if not isinstance(servers, list):
        raise BadRow(SkipReason.UNREADABLE, "detail", f"is {shown(servers)}; a list of servers was expected")
    held = 0
    for server in servers:
        gpus = server.get("gpus") if isinstance(server, Mapping) else None
        if not isinstance(gpus, list):
            raise BadRow(SkipReason.UNREADABLE, "gpus", f"is {shown(gpus)}; a list was expected")
        held += len(gpus)
    return held


def _length_s(attempt: Mapping[str, Any], *, last: bool) -> float:
    start, end = attempt.get("start_time"), attempt.get("end_time")
    if end is None or end in NO_TIME:
        if last:
            raise BadRow(SkipReason.STILL_RUNNING, "end_time", "is not there; the job still ran when the log was taken")
        raise BadRow(SkipReason.MISSING, "end_time", "of an attempt is not there")
    if start is None or start in NO_TIME:
        raise BadRow(SkipReason.MISSING, "start_time", "of an attempt is not there")
    length_s = reading.unix_s(str(end), "end_time") - reading.unix_s(str(start), "start_time")
    if length_s < 0:
        raise BadRow(SkipReason.END_BEFORE_START, "end_time", f"is {shown(end)}, before it started at {shown(start)}")
    return length_s


def _text(entry: Any, name: str) -> str:
    value = entry.get(name) if isinstance(entry, Mapping) else None
    if not isinstance(value, str) or not value:
        raise BadRow(SkipReason.MISSING, name, f"is {shown(value)}; a text was expected")
    if not value.isprintable():
        raise BadRow(SkipReason.NOT_TEXT, name, f"is {shown(value)}; it holds characters that cannot be shown")
    return value
