"""Reads what a job's tasks printed, line by line with the task's name in front, and follows it while the job lives."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

LOOK_EVERY_S = 0.2
IDLE_S_MAX = 0.8
"""With nothing new, an empty chunk is yielded this often, so that a reader who has gone is noticed."""
READ_BYTES_MAX = 256 * 1024


def read_logs(files: Callable[[], Sequence[Path]], is_live: Callable[[], bool], follow: bool) -> Iterator[bytes]:
    """Chunks of whole lines; without `follow` until the files' present ends, else until the job is over."""
    offsets: dict[Path, int] = {}
    while True:
        live = follow and is_live()
        said_s = time.monotonic()
        for path in files():
            while chunk := _next_lines(path, offsets, to_the_end=not live):
                yield _labelled(path, chunk)
        if not live:
            return
        while time.monotonic() - said_s < IDLE_S_MAX and not _has_news(files(), offsets):
            time.sleep(LOOK_EVERY_S)
        yield b""


def _has_news(files: Sequence[Path], offsets: dict[Path, int]) -> bool:
    return any(path.stat().st_size > offsets.get(path, 0) for path in files if path.exists())


def _next_lines(path: Path, offsets: dict[Path, int], *, to_the_end: bool) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(offsets.get(path, 0))
            data = file.read(READ_BYTES_MAX)
    except FileNotFoundError:
        return b""
    end = len(data) if to_the_end or len(data) == READ_BYTES_MAX else data.rfind(b"\n") + 1
    offsets[path] = offsets.get(path, 0) + end
    return data[:end]


def _labelled(path: Path, chunk: bytes) -> bytes:
    label = path.stem.encode()
    return b"".join(b"%s | %s\n" % (label, line) for line in chunk.splitlines())
