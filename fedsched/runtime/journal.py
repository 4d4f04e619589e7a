"""The ordered record of what a scheduler was told and what it ordered: one JSON line per event.

It is a record, not the truth: losing it loses no job. Read back, it drives a fresh scheduler to the same commands.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, cast

from fedsched.core.commands import Command
from fedsched.core.events import Event
from fedsched.runtime.codec import dump_tagged, load_tagged


class Journal:
    """Appends to a file; lines are flushed to the system one by one.

    Args:
        path: the file; a longer one than `size_max_bytes` is moved to `<name>.old` when the journal is opened.
        size_max_bytes: how large the file of earlier processes may be.
    """

    def __init__(self, path: Path, size_max_bytes: int = 64 * 1024 * 1024) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.stat().st_size > size_max_bytes:
            path.replace(path.with_suffix(path.suffix + ".old"))
        self._file: IO[str] = path.open("a", encoding="utf-8")

    def append(self, event: Event, commands: Sequence[Command]) -> None:
        """Record one step."""
        line = {"event": dump_tagged(event), "commands": [dump_tagged(command) for command in commands]}
        self._file.write(json.dumps(line, sort_keys=True, separators=(",", ":")) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


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
