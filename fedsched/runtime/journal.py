"""The ordered record of what a scheduler was told and what it ordered: one JSON line per event.

It is a record, not the truth: losing it loses no job. Read back, it drives a fresh scheduler to the same commands
(`fedsched sim replay`); a line in front of each agent's first says what that scheduler is made of.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, cast

from fedsched.core.cluster import Node
from fedsched.core.commands import Command
from fedsched.core.events import Event
from fedsched.core.state import SchedulerConfig
from fedsched.runtime.codec import dump_tagged, from_plain, load_tagged, to_plain

BLOCK_BYTES = 1 << 16

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Begun:
    """An agent begins: what its scheduler is made of."""

    where: str
    """File and line."""
    config: SchedulerConfig
    nodes: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """What the scheduler was told, and what it ordered."""

    where: str
    event: Event
    commands: list[Command]


class Journal:
    """Appends to a file; each line is handed to the system as it comes. What a killed process left of its last line is
    taken off: the next line would be lost with it.

    Args:
        path: the file. When it grows beyond `size_max_bytes` it is moved to `<name>.old`, in the place of an older one,
            so an agent that runs for months keeps the last days.
        size_max_bytes: how large one file may become.
    """

    def __init__(self, path: Path, size_max_bytes: int = 64 * 1024 * 1024) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._size_max_bytes = size_max_bytes
        self._failed = False
        _take_off_torn_line(path)
        self._file = self._open()

    def begin(self, config: SchedulerConfig, nodes: Sequence[Node]) -> None:
        """Record that a new scheduler is in charge, made of these."""
        self._write({"config": to_plain(config), "nodes": [to_plain(node) for node in nodes]})

    def append(self, event: Event, commands: Sequence[Command]) -> None:
        """Record one step. A full disk costs the record, not the cluster: it is logged, and the record ends before the
        line that did not fit. What came after a gap could not be repeated; the next agent begins anew."""
        self._write({"event": dump_tagged(event), "commands": [dump_tagged(command) for command in commands]})

    def _write(self, line: dict[str, Any]) -> None:
        if self._failed:
            return
        left = memoryview((json.dumps(line, sort_keys=True, separators=(",", ":")) + "\n").encode())
        try:
            while left:
                left = left[self._file.write(left) :]
            if self._file.tell() > self._size_max_bytes:
                self._path.replace(self._path.with_name(self._path.name + ".old"))
                full, self._file = self._file, self._open()
                full.close()
        except OSError as problem:
            _log.error("the journal %s cannot be written any more: %s", self._path, problem.strerror)
            self._failed = True
            with contextlib.suppress(OSError):
                _take_off_torn_line(self._path)

    def close(self) -> None:
        """Close the file."""
        with contextlib.suppress(OSError):
            self._file.close()

    def _open(self) -> FileIO:
        return FileIO(self._path, "a")


def _take_off_torn_line(path: Path) -> None:
    """Lines end where they end; what stands behind the last end was never whole."""
    if not path.is_file():
        return
    with path.open("r+b") as file:
        size = end = file.seek(0, os.SEEK_END)
        while end:
            begin = max(0, end - BLOCK_BYTES)
            file.seek(begin)
            found = file.read(end - begin).rfind(b"\n")
            if found >= 0:
                end = begin + found + 1
                break
            end = begin
        if end < size:
            file.truncate(end)


def read(path: Path) -> Iterator[Begun | Step]:
    """The journal's lines in order; a torn last line (the process was killed) ends it.

    Raises:
        ValueError: a line before the last cannot be read.
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            found = _line(f"{path}:{number}", json.loads(line))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as problem:
            if number == len(lines):
                return
            raise ValueError(f"{path}:{number}: {_told(problem)}") from problem
        yield found


def steps(path: Path) -> list[Step]:
    """The journal without the lines that tell what its schedulers are made of.

    Raises:
        ValueError: a line before the last cannot be read.
    """
    return [found for found in read(path) if isinstance(found, Step)]


def _line(where: str, plain: dict[str, Any]) -> Begun | Step:
    if "config" in plain:
        nodes = tuple(from_plain(Node, node) for node in plain["nodes"])
        return Begun(where, from_plain(SchedulerConfig, plain["config"]), nodes)
    commands = [cast(Command, load_tagged(command)) for command in plain["commands"]]
    return Step(where, cast(Event, load_tagged(plain["event"])), commands)


def _told(problem: Exception) -> str:
    return f"{problem.args[0]} is missing" if isinstance(problem, KeyError) else str(problem)
