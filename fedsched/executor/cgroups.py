"""Keeps the tasks of this machine to the memory and processor time that they were given, where cgroups v2 allow it.

Linux lets a process do so below a cgroup that it may write to and in which no process lies itself: the root one, one
that a container has to itself, or that of a systemd unit with `Delegate=yes` and `DelegateSubgroup=agent`. Each task
gets a cgroup of its own there, which is gone with it.
"""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from fedsched.core.resources import Resources

MIB = 1 << 20
PERIOD_US = 100_000
"""Processor time is given out in shares of this, the kernel's own default."""
CONTROLLERS = frozenset({"cpu", "memory"})
"""What tasks are kept to."""
END_S = 2.0
"""How long a cgroup may take to lose its processes once they were killed."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TaskGroup:
    """The cgroup of one task."""

    path: Path

    def add(self, pid: int) -> None:
        """Put a process there; those that it starts follow."""
        (self.path / "cgroup.procs").write_text(str(pid))

    def oom_kills(self) -> int:
        """How many of its processes the kernel has killed because the task used more memory than it was given."""
        return oom_kills(self.path / "memory.events")

    def end(self) -> None:
        """Kill what is left there, and give it back."""
        with suppress(OSError):
            (self.path / "cgroup.kill").write_text("1")  # since Linux 5.14; the launcher kills what it adopts, too
        until_s = time.monotonic() + END_S
        while self.path.exists() and time.monotonic() < until_s:
            with suppress(OSError):
                self.path.rmdir()
                return
            time.sleep(0.01)


class Cgroups:
    """Below `path` each task has a cgroup."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def open(self, name: str, demand: Resources) -> TaskGroup | None:
        """A cgroup for a task with these limits; None where it cannot be made, which must not keep a job from running.

        Args:
            name: of the task; no two that run have the same.
        """
        group = TaskGroup(self.path / name)
        try:
            group.path.mkdir()
            if demand.memory_mib:
                (group.path / "memory.max").write_text(str(demand.memory_mib * MIB))
                # Half a task is of no use to anybody.
                (group.path / "memory.oom.group").write_text("1")
                with suppress(OSError):  # where there is no swap there is no such file
                    (group.path / "memory.swap.max").write_text("0")
            if demand.cpu_milli:
                (group.path / "cpu.max").write_text(f"{demand.cpu_milli * PERIOD_US // 1000} {PERIOD_US}")
        except OSError as problem:
            _log.warning("%s is not kept to what it was given: %s", name, problem)
            group.end()
            return None
        return group

    def tidy(self) -> None:
        """Give back what tasks have left whose launcher did not live to do it; where one still runs its own stays."""
        for path in self.path.iterdir():
            if path.is_dir():
                with suppress(OSError):
                    path.rmdir()

    def close(self) -> None:
        """Give everything back that is empty."""
        with suppress(OSError):
            self.tidy()
            self.path.rmdir()


def below(parents: list[Path], root: Path) -> Cgroups | None:
    """A place for the tasks of the cluster whose directory is `root`, in the first of these cgroups that allows it."""
    reasons = []
    for parent in parents:
        place = parent / f"fedsched-{sha256(str(root).encode()).hexdigest()[:12]}"
        try:
            _allow(parent)
            place.mkdir(exist_ok=True)
            _allow(place)
        except OSError as problem:
            reasons.append(f"{parent}: {problem.strerror or problem}")
            with suppress(OSError):
                place.rmdir()
            continue
        _log.info("tasks are kept to their memory and processor time by cgroups below %s", place)
        found = Cgroups(place)
        found.tidy()
        return found
    _log.warning(
        "tasks are not kept to the memory and processor time that they were given: %s",
        "; ".join(reasons) or "no cgroup v2 is mounted",
    )
    return None


def candidates(own: str = "/proc/self/cgroup", mounts: str = "/proc/self/mounts") -> list[Path]:
    """This process' own cgroup and the one around it, both of version 2; none where there are none."""
    try:
        lines = [line.split() for line in Path(mounts).read_text().splitlines()]
        mounted = [Path(fields[1]) for fields in lines if fields[2] == "cgroup2"]
        inside = [line.removeprefix("0::") for line in Path(own).read_text().splitlines() if line.startswith("0::")]
    except OSError:
        return []
    if not mounted or not inside:
        return []
    here = mounted[0] / inside[0].strip("/")
    return [here] if here == mounted[0] else [here, here.parent]


def oom_kills(*counters: Path) -> int:
    """How often the kernel has killed a process for want of memory; 0 where it does not say.

    Args:
        counters: files of the kernel's that may count it, the first one that is there; since boot by default.
    """
    for path in counters or (Path("/proc/vmstat"),):
        with suppress(OSError):
            return sum(int(line.split()[1]) for line in path.read_text().splitlines() if line.startswith("oom_kill "))
    return 0


def _allow(path: Path) -> None:
    """Have cgroups below this one bear limits.

    Raises:
        OSError: it does not have what is needed to pass on, may not be written to, or has processes itself.
    """
    there = set((path / "cgroup.controllers").read_text().split())
    if not there >= CONTROLLERS:
        raise OSError(f"it has no control of {', '.join(sorted(CONTROLLERS - there))}")
    control = path / "cgroup.subtree_control"
    if not set(control.read_text().split()) >= CONTROLLERS:
        control.write_text(" ".join(f"+{name}" for name in sorted(CONTROLLERS)))
