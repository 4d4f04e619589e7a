"""Decides which server holds which of a job's parameters: bytes balanced, and few of them moved."""

from __future__ import annotations

from bisect import bisect, insort
from collections.abc import Collection, Sequence

from fedsched.core.ids import TaskName
from fedsched.core.record import Record


class Block(Record, frozen=True):
    """A piece of the model that lives on one server as a whole."""

    name: str
    size_bytes: int


def index_of(task: TaskName) -> tuple[str, int]:
    """Sorts tasks as people count: worker-2 before worker-10."""
    role, _, index = task.rpartition("-")
    return role, int(index)


def assign(
    blocks: Sequence[Block], servers: Sequence[TaskName], before: Sequence[TaskName] = (), *, slack: float = 0.05
) -> tuple[TaskName, ...]:
    """Best-fit: give every block a server so that bytes are balanced and few blocks move.

    Blocks stay where they are unless their server leaves. What has no server goes, largest first, to the emptiest.
    Then the fullest server passes blocks on to the emptiest one, each time the one that best fills half the gap between
    the two, until the gap is below `slack` of a fair share. A block that would more than fill it moves only where the
    gap shrinks by more than that: a smaller gain is not worth so many bytes.
    """
    if not servers:
        raise ValueError("blocks need at least one server")
    owners: dict[int, TaskName] = {index: owner for index, owner in enumerate(before) if owner in servers}
    held: dict[TaskName, list[tuple[int, int]]] = {server: [] for server in servers}
    """Size and index of each server's blocks, in order."""
    load = dict.fromkeys(servers, 0)

    def give(index: int, owner: TaskName) -> None:
        owners[index] = owner
        insort(held[owner], (blocks[index].size_bytes, index))
        load[owner] += blocks[index].size_bytes

    for index, owner in list(owners.items()):
        give(index, owner)
    homeless = sorted((i for i in range(len(blocks)) if i not in owners), key=lambda i: (-blocks[i].size_bytes, i))
    for index in homeless:
        give(index, min(servers, key=lambda server: (load[server], index_of(server))))
    worth = slack * sum(load.values()) / len(servers)
    for _ in range(len(blocks)):
        fullest = max(servers, key=lambda server: (load[server], index_of(server)))
        emptiest = min(servers, key=lambda server: (load[server], index_of(server)))
        gap = load[fullest] - load[emptiest]
        place = bisect(held[fullest], (gap // 2, len(blocks)))
        fits = held[fullest][max(0, place - 1) : place]  # The largest that does not more than fill it.
        fits += [block for block in held[fullest][place : place + 1] if 2 * (gap - block[0]) > worth]
        if gap <= worth or not fits or fits[0][0] == 0:
            break
        size, index = min(fits, key=lambda block: (abs(gap - 2 * block[0]), block[1]))
        held[fullest].remove((size, index))
        load[fullest] -= size
        give(index, emptiest)
    return tuple(owners[index] for index in range(len(blocks)))


def travelling(before: Sequence[TaskName], after: Sequence[TaskName], together: Collection[TaskName]) -> list[int]:
    """Blocks whose bytes must go from one server to another: not those that both see in one memory.

    Args:
        together: servers that keep their blocks in the same memory.
    """
    owners = enumerate(zip(before, after, strict=True))
    return [index for index, (old, new) in owners if old != new and not (old in together and new in together)]


def stage(
    blocks: Sequence[Block],
    before: Sequence[TaskName],
    after: Sequence[TaskName],
    together: Collection[TaskName],
    size_bytes: float,
) -> tuple[TaskName, ...]:
    """Do as many of the moves between two assignments as travel in so many bytes, at least one, and all that need not.

    Stages that follow each other come to `after`. Moving state in small parts while work goes on, each with a short
    switch of its own, is what Megaphone (Hoffmann et al., VLDB 2019) does for streams of data.
    """
    owners, sent_bytes = list(after), 0
    for index in travelling(before, after, together):
        if sent_bytes and sent_bytes + blocks[index].size_bytes > size_bytes:
            owners[index] = before[index]
        else:
            sent_bytes += blocks[index].size_bytes
    return tuple(owners)
