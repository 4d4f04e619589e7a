"""Puts a file in place in one step: a reader sees the old one or the new one, never a part.

A link is followed. What is no regular file, a device or a pipe, is written to as it is and never replaced.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import re
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from fedsched.errors import Conflict, Failed, InvalidInput, of_the_world

_numbers = itertools.count()


def read_whole(path: Path, bytes_max: int) -> bytes:
    """All of a regular file that is no larger than this. A device has no end, and a pipe may never begin.

    Raises:
        OSError: it cannot be read, is no regular file, or too large.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(handle, "rb") as file:
        found = os.fstat(handle)
        if stat.S_ISDIR(found.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        if found.st_size > bytes_max:
            raise OSError(errno.EFBIG, f"it has {found.st_size:,} bytes; at most {bytes_max:,} are read", str(path))
        return file.read(bytes_max)


def size_bytes(path: Path) -> int:
    """Of a file; 0 where there is none, or none any more."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


@contextmanager
def whole(path: Path) -> Iterator[BinaryIO]:
    """A file to write piece by piece; it takes the place of `path` when all went well, and else leaves nothing.

    Raises:
        OSError: it could not be written; what was there before is still there.
    """
    place = path.resolve()
    if place.exists() and not place.is_file():
        with _named(path), path.open("wb") as file:
            yield file
        return
    beside = _beside(place)
    try:
        with _named(path), beside.open("wb") as file:
            yield file
        with _named(path):
            beside.replace(place)
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
    with whole(path) as file:
        file.write(data)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    if durable:
        sync_folder(path.parent)


def write_all(*writes: Callable[[], object]) -> None:
    """Write several files; one that cannot be written keeps no other from being there.

    Raises:
        Failed: names all that could not.
    """
    problems = []
    for write in writes:
        try:
            write()
        except OSError as problem:
            problems.append(of_the_world(problem))
    if problems:
        raise Failed("\n".join(problem.message for problem in problems), problems[0].hint)


def refuse_clashes(read: Iterable[Path], written: Iterable[Path]) -> None:
    """Before anything is written: whether every file to write can be, and is none of the others.

    Raises:
        InvalidInput: a folder is missing or stands in a file's place, or two of the files are one.
    """
    taken = {path.resolve(): path for path in read if not _is_loop(path)}
    for path in written:
        if _is_loop(path):
            raise InvalidInput(f"{path} is a link that leads back to itself", "remove it, or name another file")
        if not path.parent.is_dir():
            raise InvalidInput(f"there is no folder {path.parent} to write {path.name} to", "make it, or name another")
        if path.is_dir():
            raise InvalidInput(f"{path} is a folder; a file to write was expected", "name a file in it")
        if not os.access(path if _is_special(path) else path.resolve().parent, os.W_OK):
            raise InvalidInput(f"{path} cannot be written: there is no right to", "name a file in another folder")
        if path.resolve() in taken and not _is_special(path):
            raise InvalidInput(f"{path} would be written over {taken[path.resolve()]}", "name another file")
        taken[path.resolve()] = path


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """While it lasts nobody else is alone with `path`, a file to write again and again.

    Raises:
        Conflict: somebody is. Who was killed is not.
    """
    lock = path.with_name(f".{path.name}.lock")
    while True:
        file = lock.open("wb")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise Conflict(
                f"another process is writing {path} and what lies beside it", "wait for it, or name another file"
            ) from None
        if lock.exists() and os.path.samestat(lock.stat(), os.fstat(file.fileno())):
            break
        file.close()  # whoever had it before removed it in this moment
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)
        file.close()


def sweep(path: Path) -> None:
    """Remove what writers of `path` left who were killed while they wrote. Nobody else may write it meanwhile."""
    place = path.resolve()
    left = re.compile(rf"\.{re.escape(place.name)}(\.\d+){{3}}")
    for beside in place.parent.iterdir():
        if left.fullmatch(beside.name):
            beside.unlink(missing_ok=True)


def sync_folder(path: Path) -> None:
    """Make renames and new files in a folder survive a crash of the machine."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _is_special(path: Path) -> bool:
    return path.exists() and not path.is_file()


def _is_loop(path: Path) -> bool:
    try:
        path.stat()
    except OSError as problem:
        return problem.errno == errno.ELOOP
    return False


def _beside(path: Path) -> Path:
    """Where a file is written before it is put in place: in the same folder, under a name of its own."""
    if not path.name:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    return path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.{next(_numbers)}")


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Errors name the file that was asked for, not the one beside it; a full disk names none by itself."""
    try:
        yield
    except OSError as problem:
        if problem.errno is None:
            raise
        raise type(problem)(problem.errno, problem.strerror, str(path)) from problem
