"""Gives each task of this machine cores and GPUs of its own: those that the fewest other tasks have, then the first."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from fedsched.executor.records import TaskOrder, TaskRecord


@dataclass(frozen=True, slots=True)
class Devices:
    """What of this machine a cluster may give to tasks; nothing of a kind: tasks are not kept to any of it."""

    cores: tuple[int, ...] = ()
    gpus: tuple[int, ...] = ()


def of_this_machine(*, pin_cores: bool, gpus: tuple[int, ...] | None) -> Devices:
    """The cores that this process may use, if tasks are to be pinned, and the given GPUs or else all."""
    cores = tuple(sorted(os.sched_getaffinity(0))) if pin_cores and hasattr(os, "sched_getaffinity") else ()
    found = (re.fullmatch(r"nvidia(\d+)", path.name) for path in Path("/dev").glob("nvidia*"))
    present = tuple(sorted(int(match[1]) for match in found if match))
    return Devices(cores, present if gpus is None else gpus)


def pinned(order: TaskOrder, devices: Devices, running: Iterable[TaskRecord]) -> TaskOrder:
    """The order with its cores and GPUs; a task that asks for no GPU sees none.

    Args:
        running: all tasks of the cluster that may hold some.
    """
    others = list(running)
    cores = _least_used(
        devices.cores, _whole(order.demand.cpu_milli), Counter(c for each in others for c in each.cores)
    )
    gpus = _least_used(devices.gpus, _whole(order.demand.gpu_milli), Counter(g for each in others for g in each.gpus))
    env = dict(order.env)
    if devices.gpus and "CUDA_VISIBLE_DEVICES" not in env:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
    return replace(order, cores=cores, gpus=gpus, env=tuple(sorted(env.items())))


def _least_used(all_of_them: tuple[int, ...], count: int, used: Counter[int]) -> tuple[int, ...]:
    return tuple(sorted(sorted(all_of_them, key=lambda each: (used[each], each))[:count]))


def _whole(milli: int) -> int:
    return math.ceil(milli / 1000)
