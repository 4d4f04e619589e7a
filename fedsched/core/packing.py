"""Exact packing of one job's tasks into rooms: whether they fit, and where. Workers have one size, servers another."""

from __future__ import annotations

from collections.abc import Sequence

from fedsched.core.job import Allocation
from fedsched.core.resources import Resources


def pack(
    rooms: Sequence[Resources], worker: Resources, ps: Resources, allocation: Allocation
) -> tuple[Allocation, ...] | None:
    """How many tasks of each role go into each room; None when there is no way.

    For each number of workers placed so far it keeps the most parameter servers that can stand beside them, so it
    finds a way whenever there is one. Cost: rooms times workers squared.
    """
    most_ps: list[int | None] = [0] + [None] * allocation.workers
    choices: list[list[int]] = []
    besides: list[list[int]] = []
    for room in rooms:
        beside = _ps_beside(room, worker, ps, allocation)
        most_ps, chosen = _add_room(most_ps, beside)
        besides.append(beside)
        choices.append(chosen)
        done = most_ps[allocation.workers]
        if done is not None and done >= allocation.ps:
            return _trace_back(allocation, choices, besides, len(rooms))
    return () if not allocation else None


def pack_and_one(
    rooms: Sequence[Resources], one: Resources, worker: Resources, ps: Resources, allocation: Allocation
) -> tuple[int, tuple[Allocation, ...]] | None:
    """The same beside one more task of a third size: the number of the room that it goes to, and the others' places.

    It is tried in one room of each size, so this costs as many packings as there are sizes, at worst.
    """
    tried = set()
    for at, room in enumerate(rooms):
        left = room - one
        if left.is_negative() or room in tried:
            continue
        tried.add(room)
        found = pack([*rooms[:at], left, *rooms[at + 1 :]], worker, ps, allocation)
        if found is not None:
            return at, found
    return None


def _add_room(most_ps: list[int | None], beside: list[int]) -> tuple[list[int | None], list[int]]:
    """The table after one more room, and for each number of workers how many of them stand in it."""
    after: list[int | None] = []
    chosen: list[int] = []
    for placed in range(len(most_ps)):
        best: int | None = None
        here_best = 0
        for here in range(min(placed, len(beside) - 1) + 1):
            base = most_ps[placed - here]
            if base is not None and (best is None or base + beside[here] > best):
                best, here_best = base + beside[here], here
        after.append(best)
        chosen.append(here_best)
    return after, chosen


def _trace_back(
    allocation: Allocation, choices: list[list[int]], besides: list[list[int]], rooms: int
) -> tuple[Allocation, ...]:
    workers, ps = allocation.workers, allocation.ps
    found: list[Allocation] = []
    for chosen, beside in zip(reversed(choices), reversed(besides), strict=True):
        here = chosen[workers]
        servers = min(beside[here], ps)
        found.append(Allocation(here, servers))
        workers, ps = workers - here, ps - servers
    return (*reversed(found), *[Allocation()] * (rooms - len(found)))


def _ps_beside(room: Resources, worker: Resources, ps: Resources, allocation: Allocation) -> list[int]:
    """At index w: how many parameter servers fit beside w workers; ends where the workers do not fit."""
    result: list[int] = []
    for workers in range(allocation.workers + 1):
        left = room - worker * workers
        if left.is_negative():
            # Not even an overcommitted room refuses to hold nothing.
            return result or [0]
        result.append(times(ps, left, allocation.ps))
    return result


def times(demand: Resources, room: Resources, limit: int) -> int:
    """How often `demand` fits into `room`, at most `limit` times."""
    pairs = (
        (demand.cpu_milli, room.cpu_milli),
        (demand.memory_mib, room.memory_mib),
        (demand.gpu_milli, room.gpu_milli),
    )
    return min([limit, *(there // wanted for wanted, there in pairs if wanted)])
