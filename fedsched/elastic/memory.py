"""Memory that the processes of one machine share, and where in it each block lies. Needs no torch.

A segment has no name in any file system: who wants to share it opens the descriptor of a process that has it. The
kernel frees it with the last process that maps it, so nothing is left behind however these end, SIGKILL included.
"""

from __future__ import annotations

import mmap
import os
import weakref
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fedsched.elastic.model import ModelSpec

ALIGNMENT = 64
"""Of a tensor's first byte: a cache line, and enough for every vector instruction."""


@cache
def machine() -> str:
    """Names the machine, and the part of it, whose processes can share memory with this one.

    FEDSCHED_MACHINE overrides it: a name that nobody else has makes everything go over the network.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return os.environ.get("FEDSCHED_MACHINE") or f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}/{os.getuid()}"
    except OSError:
        return f"only/{os.getpid()}"  # A system without /proc shares nothing.


class Segment:
    """A piece of memory, this process' own or another one's."""

    def __init__(self, descriptor: int, size_bytes: int) -> None:
        self._descriptor = descriptor
        # Whoever forgets a segment lets go of it: an open descriptor would keep its memory for the life of the process.
        self._release = weakref.finalize(self, os.close, descriptor)
        self.size_bytes = size_bytes
        # Pages are put in place now, not one by one while a step waits for them.
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        self.map = mmap.mmap(descriptor, size_bytes, flags=flags)

    @staticmethod
    def create(name: str, size_bytes: int) -> Segment:
        """A new one, full of zeros; `name` is for people who look into /proc.

        Raises:
            OSError: there is no memory for it.
        """
        descriptor = os.memfd_create(f"fedsched-{name}", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, max(1, size_bytes))
        return Segment(descriptor, max(1, size_bytes))

    @property
    def handle(self) -> str:
        """What another process of the machine needs to attach."""
        return f"{os.getpid()}:{self._descriptor}:{os.fstat(self._descriptor).st_ino}:{self.size_bytes}"

    @staticmethod
    def attach(handle: str) -> Segment:
        """The segment of another process.

        Raises:
            OSError: that process is gone, or this one may not look into it.
        """
        pid, number, inode, size_bytes = (int(part) for part in handle.split(":"))
        descriptor = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
        found = os.fstat(descriptor)
        if found.st_ino != inode or found.st_size != size_bytes:
            os.close(descriptor)
            raise FileNotFoundError(f"process {pid} is not the one that made the segment")
        return Segment(descriptor, size_bytes)

    def close(self) -> None:
        """Let go of the descriptor. The memory stays as long as a tensor in it does."""
        self._release()


@dataclass(frozen=True, slots=True)
class Layout:
    """Where each block lies: a region with all values, then one of the same form for each key of optimiser state."""

    offsets: tuple[int, ...]
    """Of each block's first byte within a region. Blocks of one tensor follow each other without a gap."""
    sizes: tuple[int, ...]
    region_bytes: int
    keys: tuple[str, ...]

    @staticmethod
    def of(model: ModelSpec) -> Layout:
        """The one that every process works out for itself."""
        offsets, end = [], 0
        for block in model.blocks:
            if block.start == 0:
                end = -(-end // ALIGNMENT) * ALIGNMENT
            offsets.append(end)
            end += block.size_bytes
        region = -(-end // mmap.PAGESIZE) * mmap.PAGESIZE
        return Layout(tuple(offsets), tuple(block.size_bytes for block in model.blocks), region, model.state_keys)

    @property
    def total_bytes(self) -> int:
        """Of values and optimiser state together."""
        return self.region_bytes * (1 + len(self.keys))

    def span(self, block: int, region: int = 0) -> tuple[int, int]:
        """First byte of a block in a region, and the one behind its last."""
        first = self.region_bytes * region + self.offsets[block]
        return first, first + self.sizes[block]
