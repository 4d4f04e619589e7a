"""Reads tables of text row by row: gzip or not, columns by any of their names, every number checked."""

from __future__ import annotations

import csv
import gzip
import io
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, TextIO, TypeVar, cast

from fedsched.core.job import LENGTH_MAX_S
from fedsched.errors import InvalidTrace, NotFound
from fedsched.sim.traces.record import BadRow, Refusal, Refusals, SkipReason, TraceJob
from fedsched.yamlfile import shown

SUBMIT_MAX_S = 1e11
"""Beyond any trace, also one that counts in unix time."""
GPUS_MAX = 100_000
LINE_MAX_CHARS = 64 * 1024
MILLI = 1000
T = TypeVar("T")


@contextmanager
def opened(path: Path) -> Iterator[TextIO]:
    """The text of a file, unpacked where its first bytes say gzip. Bytes that are no UTF-8 become lone surrogates.

    Raises:
        NotFound: there is no such file.
        InvalidTrace: the packed data is damaged; also while the text is read.
    """
    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            stream = cast(IO[bytes], gzip.GzipFile(fileobj=raw)) if packed else raw
            with io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape") as text:
                yield text
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as problem:
        raise NotFound(f"there is no file {path}", "check the path") from problem
    except (EOFError, gzip.BadGzipFile, zlib.error) as problem:
        raise InvalidTrace(f"{path} is damaged: {problem}", "fetch the file again") from problem


def lines(text: TextIO) -> Iterator[tuple[int, str]]:
    """Numbered lines without their ends; a longer one than any row comes cut, which its length tells."""
    number = 0
    while line := text.readline(LINE_MAX_CHARS + 1):
        number += 1
        if len(line) > LINE_MAX_CHARS:
            while (rest := text.readline(LINE_MAX_CHARS)) and not rest.endswith("\n"):
                pass
        else:
            line = line.removesuffix("\n")
        if line and not line.isspace():
            yield number, line


def split(line: str, separator: str = ",") -> list[str]:
    """The fields of one line.

    Raises:
        BadRow: the line is no text or longer than any row.
    """
    if not line.isascii():
        try:
            line.encode()
        except UnicodeEncodeError:
            raise BadRow(SkipReason.NOT_TEXT, "", "holds bytes that are not UTF-8") from None
    if len(line) > LINE_MAX_CHARS:
        raise BadRow(SkipReason.UNREADABLE, "", f"is longer than {LINE_MAX_CHARS} characters")
    if '"' not in line:
        return line.split(separator)
    try:
        return next(csv.reader([line], delimiter=separator, strict=True))
    except csv.Error as problem:
        raise BadRow(SkipReason.UNREADABLE, "", f"cannot be split into fields: {problem}") from problem


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table; reads and checks its field of a row."""

    name: str
    index: int
    per_unit: float = 1.0
    """How many of the field's numbers make one second, GPU or whatever its reader counts in."""

    def text(self, row: Sequence[str]) -> str:
        """The field without blanks around it; may be empty."""
        try:
            value = row[self.index].strip()
        except IndexError:
            raise BadRow(SkipReason.MISSING, self.name, f"is missing: the row has {len(row)} fields") from None
        if value and not value.isprintable():
            raise BadRow(SkipReason.NOT_TEXT, self.name, f"is {shown(value)}; it holds characters that cannot be shown")
        return value

    def name_of(self, row: Sequence[str]) -> str:
        """The field, which must hold something."""
        value = self.text(row)
        if not value:
            raise BadRow(SkipReason.MISSING, self.name, "is empty")
        return value

    def number(self, row: Sequence[str], maximum: float) -> float:
        """A number from 0 to `maximum`."""
        return number(self.name_of(row), self.name, maximum * self.per_unit) / self.per_unit

    def submit_s(self, row: Sequence[str]) -> float:
        """A moment of submission in seconds."""
        return self.number(row, SUBMIT_MAX_S)

    def duration_s(self, row: Sequence[str]) -> float:
        """A length of time in seconds, above 0."""
        return positive(self.number(row, LENGTH_MAX_S), self.name)

    def gpus(self, row: Sequence[str]) -> float:
        """A number of GPUs: whole, or a share below 1."""
        return gpus(self.number(row, GPUS_MAX), self.name)

    def unix_s(self, row: Sequence[str]) -> float:
        """A date and time, as seconds of unix time; without a zone it is taken as UTC."""
        return unix_s(self.name_of(row), self.name)


def number(text: str, name: str, maximum: float) -> float:
    """A number from 0 to `maximum`.

    Raises:
        BadRow: it is none.
    """
    try:
        # Python reads more as numbers than any trace means: 1_000, and digits of other scripts.
        if "_" in text or not text.isascii():
            raise ValueError
        value = float(text)
    except (ValueError, OverflowError):
        raise BadRow(SkipReason.NOT_A_NUMBER, name, f"is {shown(text)}; a number was expected") from None
    if 0 <= value <= maximum:
        return value
    if value < 0:
        raise BadRow(SkipReason.NEGATIVE, name, f"is {text}; it cannot be negative")
    if value > maximum:
        raise BadRow(SkipReason.TOO_LARGE, name, f"is {shown(text)}; at most {maximum:g} was expected")
    raise BadRow(SkipReason.NOT_A_NUMBER, name, f"is {shown(text)}; a number was expected")


def positive(duration_s: float, name: str) -> float:
    """A length of time above 0.

    Raises:
        BadRow: it is 0.
    """
    if duration_s <= 0:
        raise BadRow(SkipReason.ENDED_AT_ONCE, name, "is 0; it ended as it started")
    return duration_s


def gpus(count: float, name: str) -> float:
    """A number of GPUs that a job can hold.

    Raises:
        BadRow: it is 0, or it is neither whole nor a share of one GPU in thousandths.
    """
    if count == 0:
        raise BadRow(SkipReason.NO_GPUS, name, "is 0; it asks for no GPU")
    whole = (
        count.is_integer() if count >= 1 else (count * MILLI >= 1 and abs(count * MILLI - round(count * MILLI)) < 1e-6)
    )
    if not whole:
        raise BadRow(SkipReason.PART_OF_A_GPU, name, f"is {count:g}; whole GPUs or thousandths of one were expected")
    return count


def unix_s(text: str, name: str) -> float:
    """Seconds of unix time at a date and time such as 2017-10-09 07:01:55; without a zone it is taken as UTC.

    Raises:
        BadRow: it is none.
    """
    try:
        moment = datetime.fromisoformat(text)
        value = (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        raise BadRow(SkipReason.NOT_A_TIME, name, f"is {shown(text)}; YYYY-MM-DD HH:MM:SS was expected") from None
    if value < 0:
        raise BadRow(SkipReason.NOT_A_TIME, name, f"is {shown(text)}; a time after 1970 was expected")
    return value


class Header:
    """The columns of a table by their names."""

    def __init__(self, path: Path, names: Sequence[str]) -> None:
        self._path = path
        self._names = [name.strip() for name in names]
        for name in sorted(set(self._names)):
            if self._names.count(name) > 1:
                raise InvalidTrace(f"{path}: the header has the column {shown(name)} {self._names.count(name)} times")

    def has(self, name: str) -> bool:
        """Whether there is a column of this name."""
        return name in self._names

    def column(self, *names: str, per_unit: float = 1.0) -> Column:
        """The column with the first of `names` that there is, counting in parts of a unit.

        Raises:
            InvalidTrace: there is none.
        """
        found = self.optional(*names, per_unit=per_unit)
        if found is None:
            raise InvalidTrace(
                f"{self._path}: the header has no column {' or '.join(names)}; it has {shown(','.join(self._names))}",
                "check the format's name; `fedsched trace import --help` lists the formats",
            )
        return found

    def optional(self, *names: str, per_unit: float = 1.0) -> Column | None:
        """The column with the first of `names` that there is, else None."""
        for name in names:
            if name in self._names:
                return Column(name, self._names.index(name), per_unit)
        return None


@contextmanager
def table(path: Path) -> Iterator[tuple[Header, Iterator[tuple[int, str]]]]:
    """A file with a line of column names, perhaps after some that begin with #: its header, and the lines after it.

    Raises:
        InvalidTrace: there is no header.
    """
    with opened(path) as text:
        numbered = lines(text)
        for _, line in numbered:
            if not line.startswith("#"):
                try:
                    header = Header(path, split(line))
                except BadRow as problem:
                    raise InvalidTrace(f"{path}: the header {problem}", "check that this is a trace") from problem
                yield header, numbered
                return
        raise InvalidTrace(f"{path} is empty; a line of column names was expected", "check that this is a trace")


def jobs(
    path: Path,
    numbered: Iterator[tuple[int, T]],
    build: Callable[[int, T], TraceJob],
    refused: Refusals,
) -> Iterator[TraceJob]:
    """What `build` makes of each numbered row; rows that it refuses, and repeated ids, go to `refused`."""
    seen: set[str] = set()
    for line, row in numbered:
        try:
            job = build(line, row)
            if job.job_id in seen:
                raise BadRow(SkipReason.REPEATED_ID, "", f"job {shown(job.job_id)} was there before")
        except BadRow as bad:
            refused.add(Refusal(path, line, bad.field, bad.reason, bad.problem))
            continue
        seen.add(job.job_id)
        yield job


def earliest(numbered: Iterator[tuple[int, str]], column: Column) -> float:
    """The first moment in a column of dates, so that a second pass can count from it; 0 where there is none."""
    first: str | None = None
    for _, line in numbered:
        try:
            value = column.text(split(line))
            # Dates of one form sort as text; parsing only candidates keeps the pass cheap.
            if value and (first is None or value < first):
                unix_s(value, column.name)
                first = value
        except BadRow:
            continue
    return 0.0 if first is None else unix_s(first, column.name)
