"""Reads a trace by the name of its format."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import assert_never

from fedsched.errors import InvalidInput
from fedsched.sim.traces import alibaba, gavel, helios, itp, philly, plain, tiresias
from fedsched.sim.traces.names import TraceFormat
from fedsched.sim.traces.record import Refusals, TraceJob


def read(
    path: Path,
    form: TraceFormat,
    refused: Refusals,
    *,
    throughputs: Path | None = None,
    worker_type: str = gavel.WORKER_TYPE,
) -> Iterator[TraceJob]:
    """The jobs of a trace, one by one in the file's order; what is left out goes to `refused`.

    Args:
        throughputs: for Gavel's format: its measured throughputs, else looked for beside the trace.
        worker_type: for Gavel's format: whose throughputs turn steps into seconds.

    Raises:
        NotFound: there is no such file.
        InvalidTrace: it is not of this format at all, or damaged.
        InvalidInput: throughputs or a worker type are given, and it is not of Gavel's format.
    """
    wrong = gavel.problem_for(form, throughputs, worker_type)
    if wrong:
        raise InvalidInput(wrong, "leave them out, or name the format gavel")
    match form:
        case TraceFormat.CSV:
            return plain.read(path, refused)
        case TraceFormat.ITP:
            return itp.read(path, refused)
        case TraceFormat.PHILLY:
            return philly.read(path, refused)
        case TraceFormat.HELIOS:
            return helios.read(path, refused)
        case TraceFormat.ALIBABA:
            return alibaba.read(path, refused)
        case TraceFormat.GAVEL:
            return gavel.read(path, refused, throughputs=throughputs, worker_type=worker_type)
        case TraceFormat.TIRESIAS:
            return tiresias.read(path, refused)
        case _:
            assert_never(form)
