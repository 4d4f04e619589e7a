"""Finds running jobs that stand in each other's way: none can move until another one has left.

Targets of one decision fit together, but two jobs that swap places on a full cluster never find room for the new tasks
beside the old ones. Those that shrink first let others in; a job that cannot shrink has to stop and start again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedsched.core.choosing import Footprint
from fedsched.core.ids import NodeName
from fedsched.core.job import Placement, Role, TaskPlacement, coordinator_of, task_name
from fedsched.core.resources import OVERDRAWN
from fedsched.core.state import LiveJob

Free = dict[NodeName, int]
"""Amount by node."""


def stuck(jobs: Sequence[LiveJob], free: Mapping[NodeName, int]) -> list[LiveJob]:
    """Those of `jobs` that wait for each other and not for anybody who is on the way already.

    Args:
        jobs: running ones that want other places and have found no room beside their own.
        free: of each node that takes tasks, the amount that is free once all orders in flight are done.

    Returns:
        Nobody where stopping them would not help: what they want is more than there is.
    """
    room = dict(free)
    waiting = list(jobs)
    left = len(waiting) + 1
    while len(waiting) < left:
        left = len(waiting)
        waiting = [job for job in waiting if not _moves(job, room)]
    for job in waiting:
        _give(room, _leaving(job))
    return waiting if all(_take(room, _added(job)) for job in waiting) else []


def renumbered(placement: Placement) -> Placement:
    """The same places with tasks counted from zero, as for a job of which nothing runs."""
    result = list(coordinator_of(placement))
    for role in (Role.WORKER, Role.PS):
        nodes = [entry.node for entry in placement if entry.role is role]
        result += [TaskPlacement(task_name(role, index), node) for index, node in enumerate(nodes)]
    return tuple(sorted(result))


def _moves(job: LiveJob, room: Free) -> bool:
    """Whether the job finds room beside its own; then it has left its old places, too."""
    if not _take(room, _added(job)):
        return False
    _give(room, _leaving(job))
    return True


def _added(job: LiveJob) -> Footprint:
    return job.footprint_of(tuple(entry for entry in job.target if entry not in job.status.placement))


def _leaving(job: LiveJob) -> Footprint:
    return job.footprint_of(tuple(entry for entry in job.status.placement if entry not in job.target))


def _take(room: Free, footprint: Footprint) -> bool:
    """All or nothing."""
    after = {name: room.get(name, -1) - amount for name, amount in footprint}
    if any(left & OVERDRAWN for left in after.values()):
        return False
    room.update(after)
    return True


def _give(room: Free, footprint: Footprint) -> None:
    for name, amount in footprint:
        if name in room:
            room[name] += amount
