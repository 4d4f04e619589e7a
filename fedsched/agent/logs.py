"""Reads what a job's tasks printed, line by line with the task's name in front, and follows it while the job lives."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from fedsched.files import size_bytes
from fedsched.runtime.ports import LogPiece

LOOK_EVERY_S = 0.2
"""How often the files are looked at for more."""
IDLE_S_MAX = 0.8
"""With nothing new, an empty chunk is yielded this often, so that a reader who has gone is noticed."""
READ_BYTES_MAX = 256 * 1024
"""Of one piece; a line that is longer comes in several."""


def read_logs(
    files: Callable[[], Sequence[Path]], is_live: Callable[[], bool], follow: bool, read: Mapping[str, int]
) -> Iterator[LogPiece]:
    """Pieces of whole lines; without `follow` until the files' present ends, else until the job is over.

    Args:
        read: how much of each file is left out, because its reader has it.
    """
    offsets = dict(read)
    while True:
        live = follow and is_live()
        said_s = time.monotonic()
        for path in files():
            while chunk := _next_lines(path, offsets, to_the_end=not live):
                yield LogPiece(_labelled(path, chunk), _name(path), offsets[_name(path)])
        if not live:
            return
        while time.monotonic() - said_s < IDLE_S_MAX and not _has_news(files(), offsets):
            time.sleep(LOOK_EVERY_S)
        yield LogPiece()


def _name(path: Path) -> str:
    """Of a log file of the job: its attempt and its task."""
    return f"{path.parent.parent.name}/{path.stem}"


def _has_news(files: Sequence[Path], offsets: dict[str, int]) -> bool:
    return any(size_bytes(path) > offsets.get(_name(path), 0) for path in files)


def _next_lines(path: Path, offsets: dict[str, int], *, to_the_end: bool) -> bytes:
    name = _name(path)
    try:
        with path.open("rb") as file:
            file.seek(offsets.get(name, 0))
            data = file.read(READ_BYTES_MAX)
    except FileNotFoundError:
        return b""
    end, is_all = data.rfind(b"\n") + 1, len(data) < READ_BYTES_MAX
    if (is_all and to_the_end) or (not is_all and not end):  # the last line, or one that is longer than can be read
        end = len(data)
    offsets[name] = offsets.get(name, 0) + end
    return data[:end]


def _labelled(path: Path, chunk: bytes) -> bytes:
    label = path.stem.encode()
    return b"".join(b"%s | %s\n" % (label, line) for line in chunk.splitlines())
