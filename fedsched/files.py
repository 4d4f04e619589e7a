"""Puts a file in place in one step: a reader sees the old one or the new one, never a part."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def whole(path: Path) -> Iterator[BinaryIO]:
    """A file to write piece by piece; it takes the place of `path` when all went well, and else leaves nothing.

    Raises:
        OSError: it could not be written; what was there before is still there.
    """
    beside = _beside(path)
    try:
        with beside.open("wb") as file:
            yield file
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def write_whole(path: Path, data: bytes, *, durable: bool = False) -> None:
    """Write `data` to `path`, whose folder exists; several processes and threads may do so at once.

    Args:
        durable: be whole or absent also after a power cut; costs two waits for the disk.

    Raises:
        OSError: it could not be written; what was there before is still there.
    """
    beside = _beside(path)
    try:
        with beside.open("wb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        beside.replace(path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise
    if durable:
        sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make renames and new files in a folder survive a crash of the machine."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _beside(path: Path) -> Path:
    """Where a file is written before it is put in place: in the same folder, under a name of this thread's own."""
    return path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
