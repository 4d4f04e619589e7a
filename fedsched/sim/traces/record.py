"""One job of a trace, as every importer yields it, and the rows that importers refuse."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import msgspec

KEPT_MAX = 1000
"""So many refused rows are remembered one by one; all are counted."""


class TraceJob(msgspec.Struct, frozen=True):
    """A job as it ran once, somewhere: how many GPUs it held for how long."""

    job_id: str
    submit_s: float
    """Seconds from the trace's beginning."""
    duration_s: float
    """How long it ran on its GPUs, waiting not included."""
    num_gpu: float
    """GPUs of all its tasks together: a whole number, or a share below 1 of one GPU."""
    cluster: str = ""
    vc: str = ""
    """The virtual cluster, tenant or queue that it was charged to."""
    user: str = ""
    model: str = ""
    batch_size: int | None = None
    deadline_s: float | None = None
    """When it was to be done, in seconds from the trace's beginning."""
    weight: float = 1.0
    """Its share against other jobs where a policy knows weights."""
    cpus: float = 0.0
    """Cores that it asked for; 0 where the trace says nothing."""
    memory_gib: float = 0.0
    """Memory that it asked for; 0 where the trace says nothing."""
    accelerators: tuple[str, ...] = ()
    """Types of GPU that it can run on; empty means any."""


class SkipReason(StrEnum):
    """Why a row is no job. Stable names; counts are kept by them."""

    NO_GPUS = "NoGpus"
    NEVER_RAN = "NeverRan"
    STILL_RUNNING = "StillRunning"
    ENDED_AT_ONCE = "EndedAtOnce"
    MISSING = "Missing"
    NOT_A_NUMBER = "NotANumber"
    NOT_A_TIME = "NotATime"
    NEGATIVE = "Negative"
    TOO_LARGE = "TooLarge"
    PART_OF_A_GPU = "PartOfAGpu"
    END_BEFORE_START = "EndBeforeStart"
    REPEATED_ID = "RepeatedId"
    SIZE_CHANGED = "SizeChanged"
    NO_THROUGHPUT = "NoThroughput"
    NOT_TEXT = "NotText"
    UNREADABLE = "Unreadable"


NO_FAULT = frozenset(
    {
        SkipReason.NO_GPUS,
        SkipReason.NEVER_RAN,
        SkipReason.STILL_RUNNING,
        SkipReason.ENDED_AT_ONCE,
        SkipReason.NO_THROUGHPUT,
    }
)
"""What well-kept traces hold too: rows that are as they should be and yet make no GPU job of known length."""


class BadRow(Exception):
    """A row cannot be used; only importers raise and see it."""

    def __init__(self, reason: SkipReason, field: str, problem: str) -> None:
        super().__init__(problem)
        self.reason = reason
        self.field = field
        self.problem = problem


@dataclass(frozen=True, slots=True)
class Refusal:
    """A row that an importer left out."""

    file: Path
    line: int
    """Line in the file, or the entry's number in a JSON list; both from 1."""
    field: str
    """Column at fault; empty where the whole row is."""
    reason: SkipReason
    problem: str
    """What the field holds and what was expected."""

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}"
        return f"{where}: {self.field} {self.problem}" if self.field else f"{where}: {self.problem}"


@dataclass(slots=True)
class Refusals:
    """What one import left out: all of it counted, the first so many rows kept."""

    told: Callable[[Refusal], None] | None = None
    """Hears of every row as it is refused."""
    counts: Counter[SkipReason] = field(default_factory=Counter)
    kept: list[Refusal] = field(default_factory=list)
    first_malformed: Refusal | None = None
    """The first row that is not as it should be, in contrast to one that merely describes no GPU job."""

    def add(self, refusal: Refusal) -> None:
        """Note a row."""
        self.counts[refusal.reason] += 1
        if len(self.kept) < KEPT_MAX:
            self.kept.append(refusal)
        if self.first_malformed is None and refusal.reason not in NO_FAULT:
            self.first_malformed = refusal
        if self.told is not None:
            self.told(refusal)

    @property
    def total(self) -> int:
        """All rows left out."""
        return sum(self.counts.values())

    @property
    def malformed(self) -> int:
        """Rows left out that are not as they should be."""
        return sum(count for reason, count in self.counts.items() if reason not in NO_FAULT)
