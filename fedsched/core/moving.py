"""Finds running jobs that stand in each other's way: none can move until another one has left.

Targets of one decision fit together, but two jobs that swap places on a full cluster never find room for the new tasks
beside the old ones. Those that shrink first let others in; a job that cannot shrink has to stop and start again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedsched.core.ids import NodeName
from fedsched.core.job import JobSpec, Placement, Role, TaskPlacement, task_name
from fedsched.core.resources import Resources
from fedsched.core.state import LiveJob

Free = dict[NodeName, Resources]


def stuck(jobs: Sequence[LiveJob], free: Mapping[NodeName, Resources]) -> list[LiveJob]:
    """Those of `jobs` that wait for each other and not for anybody who is on the way already.

    Args:
        jobs: running ones that want other places and have found no room beside their own.
        free: of each node that takes tasks, what is free once all orders in flight are done.

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
        _give(room, _leaving(job), job.spec)
    return waiting if all(_take(room, _added(job), job.spec) for job in waiting) else []


def renumbered(placement: Placement) -> Placement:
    """The same places with tasks counted from zero, as for a job of which nothing runs."""
    result = []
    for role in Role:
        nodes = [entry.node for entry in placement if entry.role is role]
        result += [TaskPlacement(task_name(role, index), node) for index, node in enumerate(nodes)]
    return tuple(sorted(result))


def _moves(job: LiveJob, room: Free) -> bool:
    """Whether the job finds room beside its own; then it has left its old places, too."""
    if not _take(room, _added(job), job.spec):
        return False
    _give(room, _leaving(job), job.spec)
    return True


def _added(job: LiveJob) -> Placement:
    return tuple(entry for entry in job.target if entry not in job.status.placement)


def _leaving(job: LiveJob) -> Placement:
    return tuple(entry for entry in job.status.placement if entry not in job.target)


def _take(room: Free, tasks: Placement, spec: JobSpec) -> bool:
    """All or nothing."""
    after: Free = {}
    for entry in tasks:
        free = after.get(entry.node, room.get(entry.node))
        demand = spec.demand(entry.role)
        if free is None or not demand.fits_in(free):
            return False
        after[entry.node] = free - demand
    room.update(after)
    return True


def _give(room: Free, tasks: Placement, spec: JobSpec) -> None:
    for entry in tasks:
        if entry.node in room:
            room[entry.node] = room[entry.node] + spec.demand(entry.role)
