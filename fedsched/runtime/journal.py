"""The ordered record of what a scheduler was told and what it ordered: one JSON line per event.

It is a record, not the truth: losing it loses no job. Read back, it drives a fresh scheduler to the same commands.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, cast

from fedsched.core.commands import Command
from fedsched.core.events import Event
from fedsched.runtime.codec import dump_tagged, load_tagged

_log = logging.getLogger(__name__)


class Journal:
    """Appends to a file; lines are flushed to the system one by one.

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
        self._file = self._open()

    def append(self, event: Event, commands: Sequence[Command]) -> None:
        """Record one step. A full disk costs the record, not the cluster: it is logged once."""
        line = {"event": dump_tagged(event), "commands": [dump_tagged(command) for command in commands]}
        try:
            self._file.write(json.dumps(line, sort_keys=True, separators=(",", ":")) + "\n")
            self._file.flush()
            if self._file.tell() > self._size_max_bytes:
                self._path.replace(self._path.with_name(self._path.name + ".old"))
                full, self._file = self._file, self._open()
                full.close()
        except OSError as problem:
            if not self._failed:
                _log.error("the journal %s cannot be written any more: %s", self._path, problem.strerror)
            self._failed = True

    def close(self) -> None:
        """Close the file."""
        with contextlib.suppress(OSError):
            self._file.close()

    def _open(self) -> IO[str]:
        return self._path.open("a", encoding="utf-8")


def read(path: Path) -> Iterator[tuple[Event, list[Command]]]:
    """The journal's steps in order; a torn last line (the process was killed) ends it.

    Raises:
        ValueError: a line before the last cannot be read.
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            plain = json.loads(line)
            event = cast(Event, load_tagged(plain["event"]))
            commands = [cast(Command, load_tagged(command)) for command in plain["commands"]]
        except (ValueError, KeyError) as problem:
            if number == len(lines):
                return
            raise ValueError(f"{path}:{number}: {problem}") from problem
        yield event, commands
