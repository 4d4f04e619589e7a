"""Imports Gavel traces (OSDI'20), repository stanford-futuredata/gavel, and those of Shockwave (NSDI'23).

Layouts read, told apart by their number of fields and columns:
- Gavel, fields between tabs, no header: job type, command, working directory, steps argument, needs data, total
  steps, scale factor, priority weight, SLO (-1 for none), arrival
- Shockwave: these with the batch size mode before the priority and the isolated duration before the arrival
- normalised tables: job_type, total_steps, arrival_s, scale_factor

Gavel gives steps, not seconds: a job lasts as many seconds as its steps take alone on one type of worker, by Gavel's
measured throughputs, either its own JSON (worker type -> "('job type', scale factor)" -> {"null": steps per second})
or a table with worker_type, job_type, scale_factor, steps_per_s. A job that was never measured on that type at that
size is refused. An SLO is a multiple of the duration. There are no ids: a job's id is the number of its row, the
first being 0.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedsched.core.job import LENGTH_MAX_S
from fedsched.errors import InvalidTrace
from fedsched.sim.traces import reading
from fedsched.sim.traces.names import TraceFormat
from fedsched.sim.traces.reading import Column
from fedsched.sim.traces.record import BadRow, Refusals, SkipReason, TraceJob
from fedsched.yamlfile import shown

WORKER_TYPE = "v100"
TABLES = ("isolated_throughputs.csv", "simulation_throughputs.json", "simulation_throughputs.json.gz")
"""Names under which throughputs are looked for in a trace's folder and the two above it."""
STEPS_MAX, WEIGHT_MAX, SLO_MAX, THROUGHPUT_MAX = 1e15, 1e9, 1e6, 1e9
Throughputs = Mapping[tuple[str, int], float]
"""Steps per second of (job type, scale factor)."""


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where a line's fields are; None for those that it does not have."""

    job_type: Column
    total_steps: Column
    scale_factor: Column
    arrival_s: Column
    weight: Column | None = None
    slo: Column | None = None
    duration_s: Column | None = None


_GAVEL_FIELDS, _SHOCKWAVE_FIELDS = 10, 12
_TRACE = {
    _GAVEL_FIELDS: _Layout(
        Column("job type", 0), Column("total steps", 5), Column("scale factor", 6), Column("arrival", 9),
        Column("priority weight", 7), Column("SLO", 8),
    ),
    _SHOCKWAVE_FIELDS: _Layout(
        Column("job type", 0), Column("total steps", 5), Column("scale factor", 6), Column("arrival", 11),
        Column("priority weight", 8), Column("SLO", 9), Column("duration", 10),
    ),
}  # fmt: skip


def problem_for(form: TraceFormat, throughputs: object, worker_type: str) -> str:
    """Why these options do not go with a trace of another format; empty where they do."""
    if form is TraceFormat.GAVEL or (not throughputs and worker_type == WORKER_TYPE):
        return ""
    return f"throughputs and a worker type are for traces of format gavel; this one is of format {form}"


def read(
    path: Path, refused: Refusals, *, throughputs: Path | None = None, worker_type: str = WORKER_TYPE
) -> Iterator[TraceJob]:
    """The jobs of a Gavel trace, in its order.

    Args:
        throughputs: the measured throughputs; None looks for them beside the trace. Shockwave's layout needs none.
        worker_type: whose throughputs count.

    Raises:
        NotFound: there is no such file.
        InvalidTrace: it is of none of these layouts, or there are no throughputs for it.
    """
    with reading.opened(path) as text:
        first = next((line for _, line in reading.lines(text)), "")
    if "\t" in first:
        yield from _tabbed(path, len(first.split("\t")), refused, throughputs, worker_type)
        return
    with reading.table(path) as (header, numbered):
        layout = _Layout(*(header.column(name) for name in ("job_type", "total_steps", "scale_factor", "arrival_s")))
        measured = _measured(path, throughputs, worker_type)
        build = _Builder(layout, measured, worker_type, ",", first_line=2)
        yield from reading.jobs(path, numbered, build, refused)


def _tabbed(
    path: Path, fields: int, refused: Refusals, throughputs: Path | None, worker_type: str
) -> Iterator[TraceJob]:
    layout = _TRACE.get(fields)
    if layout is None:
        raise InvalidTrace(
            f"{path}: the first line has {fields} fields; {_GAVEL_FIELDS} (Gavel) or "
            f"{_SHOCKWAVE_FIELDS} (Shockwave) were expected",
            "check that this is a trace",
        )
    measured = {} if layout.duration_s is not None else _measured(path, throughputs, worker_type)
    with reading.opened(path) as text:
        build = _Builder(layout, measured, worker_type, "\t", first_line=1)
        yield from reading.jobs(path, reading.lines(text), build, refused)


@dataclass(frozen=True, slots=True)
class _Builder:
    """Makes a job of a line."""

    layout: _Layout
    throughputs: Throughputs
    worker_type: str
    separator: str
    first_line: int

    def __call__(self, line: int, text: str) -> TraceJob:
        row, at = reading.split(text, self.separator), self.layout
        submit_s = at.arrival_s.submit_s(row)
        num_gpu = at.scale_factor.gpus(row)
        job_type = at.job_type.name_of(row)
        duration_s = self._duration_s(row, job_type, num_gpu)
        slo = at.slo.text(row) if at.slo is not None else ""
        return TraceJob(
            str(line - self.first_line),
            submit_s,
            duration_s,
            num_gpu,
            model=job_type,
            batch_size=_batch_size(job_type),
            deadline_s=submit_s + reading.number(slo, "SLO", SLO_MAX) * duration_s if slo and slo[0] != "-" else None,
            weight=1.0 if at.weight is None else at.weight.number(row, WEIGHT_MAX),
        )

    def _duration_s(self, row: Sequence[str], job_type: str, num_gpu: float) -> float:
        if self.layout.duration_s is not None:
            return self.layout.duration_s.duration_s(row)
        steps = reading.positive(self.layout.total_steps.number(row, STEPS_MAX), self.layout.total_steps.name)
        rate = self.throughputs.get((job_type, int(num_gpu)), 0.0)
        if rate <= 0:
            problem = f"is {shown(job_type)}; it was never measured on {num_gpu:g} x {self.worker_type}"
            raise BadRow(SkipReason.NO_THROUGHPUT, self.layout.job_type.name, problem)
        if steps / rate > LENGTH_MAX_S:
            problem = f"is {steps:g}, which takes {steps / rate:g} s; at most {LENGTH_MAX_S:g} s was expected"
            raise BadRow(SkipReason.TOO_LARGE, self.layout.total_steps.name, problem)
        return steps / rate


def _batch_size(job_type: str) -> int | None:
    found = re.search(r"\(batch size (\d{1,12})\)", job_type)
    return int(found[1]) if found else None


def _measured(path: Path, named: Path | None, worker_type: str) -> Throughputs:
    folders = (path.parent, path.parent.parent, path.parent.parent.parent)
    beside = (folder / name for folder in folders for name in TABLES)
    source = named if named is not None else next((file for file in beside if file.is_file()), None)
    if source is None:
        raise InvalidTrace(
            f"{path} gives steps, and there is no table of throughputs beside it ({', '.join(TABLES)})",
            "name one with --throughputs; Gavel keeps its own as scheduler/simulation_throughputs.json",
        )
    with reading.opened(source) as text:
        is_json = text.read(1) == "{"
    tables = _from_json(source) if is_json else _from_table(source)
    if worker_type not in tables:
        raise InvalidTrace(f"{source} has no worker type {shown(worker_type)}; it has {', '.join(sorted(tables))}")
    return tables[worker_type]


def _from_table(path: Path) -> dict[str, dict[tuple[str, int], float]]:
    tables: dict[str, dict[tuple[str, int], float]] = {}
    with reading.table(path) as (header, numbered):
        worker, job_type, factor = (header.column(name) for name in ("worker_type", "job_type", "scale_factor"))
        rate = header.column("steps_per_s")
        for line, text in numbered:
            try:
                row = reading.split(text)
                key = (job_type.name_of(row), int(factor.gpus(row)))
                tables.setdefault(worker.name_of(row), {})[key] = rate.number(row, THROUGHPUT_MAX)
            except BadRow as bad:
                raise InvalidTrace(f"{path}:{line}: {bad.field} {bad.problem}") from bad
    return tables


def _from_json(path: Path) -> dict[str, dict[tuple[str, int], float]]:
    tables: dict[str, dict[tuple[str, int], float]] = {}
    with reading.opened(path) as text:
        try:
            for worker, rows in json.load(text).items():
                table = tables.setdefault(str(worker), {})
                for key, alone in rows.items():
                    job_type, factor = ast.literal_eval(key)
                    table[str(job_type), int(factor)] = float(alone["null"])
        except (ValueError, SyntaxError, KeyError, TypeError, AttributeError, RecursionError, MemoryError) as problem:
            raise InvalidTrace(f"{path} is no table of Gavel's throughputs: {problem}") from problem
    return tables
