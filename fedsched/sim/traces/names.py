"""Names of the trace formats, apart from what reads them so that the commands' help needs no simulator."""

from __future__ import annotations

from enum import StrEnum


class TraceFormat(StrEnum):
    """Formats that hold jobs; each module of the same name says which layouts it reads (csv: `plain`)."""

    CSV = "csv"
    ITP = "itp"
    PHILLY = "philly"
    HELIOS = "helios"
    ALIBABA = "alibaba"
    GAVEL = "gavel"
    TIRESIAS = "tiresias"


SPEEDS = "dl2"
"""A format that holds speeds; it is imported too."""
