"""Finds nodes for tasks: tentatively while a policy spends its budget, finally for what it decided.

Running tasks stay where they are; nodes for new ones are chosen by a rule of `core/choosing.py`, by default the least
loaded one (the rule of DL2's reference code, by dominant share instead of a sum of unlike units).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from random import Random

from fedsched.core.choosing import Rule, left_over
from fedsched.core.cluster import Node
from fedsched.core.decision import JobView, Observation
from fedsched.core.ids import JobId, NodeName, TaskName, stream
from fedsched.core.job import Allocation, Placement, Role, TaskPlacement, allocation_of, task_name
from fedsched.core.packing import pack
from fedsched.core.resources import Resources


class _Rooms:
    """What is free on each node. `soft` is what running tasks hold that nobody has granted again yet."""

    def __init__(self, nodes: Iterable[Node], rule: Rule, chance: Random) -> None:
        self._rule = rule
        self._chance = chance
        self.nodes = {node.name: node for node in sorted(nodes, key=lambda node: node.name)}
        self.free = {name: node.capacity for name, node in self.nodes.items()}
        self.soft = {name: Resources() for name in self.nodes}

    def take(self, node: NodeName, demand: Resources) -> None:
        self.free[node] = self.free[node] - demand

    def give_back(self, node: NodeName, demand: Resources) -> None:
        self.free[node] = self.free[node] + demand

    def choose(
        self, demand: Resources, accelerators: tuple[str, ...], own: Collection[NodeName] = ()
    ) -> NodeName | None:
        """A node with room by the rule, before any that would push a running task from its place.

        Args:
            own: nodes that the job is on already; `consolidate` prefers them.
        """
        candidates = [
            name
            for name, node in self.nodes.items()
            if node.schedulable
            and demand.fits_in(self.free[name])
            and (not accelerators or node.accelerator in accelerators)
        ]
        if not candidates:
            return None
        return min(
            candidates,
            key=lambda name: (
                not demand.fits_in(self.free[name] - self.soft[name]),
                _preference(self.nodes[name].accelerator, accelerators),
                self._rank(name, demand, own),
                name,
            ),
        )

    def _rank(self, name: NodeName, demand: Resources, own: Collection[NodeName]) -> tuple[float, ...]:
        if self._rule == "spread":
            capacity = self.nodes[name].capacity
            return ((capacity - self.free[name] + demand).dominant_share(capacity),)
        if self._rule == "random":
            return (self._chance.random(),)
        fullest = left_over(self.free[name])
        return fullest if self._rule == "pack" else (name not in own, *fullest)


def _preference(accelerator: str, accelerators: tuple[str, ...]) -> int:
    return accelerators.index(accelerator) if accelerator in accelerators else 0


class _Grant:
    """What one job has been granted so far and which of its running tasks are still to be confirmed."""

    def __init__(self, view: JobView) -> None:
        self.view = view
        self.granted: list[TaskPlacement] = []
        self.unconfirmed = {role: [entry for entry in view.placement if entry.role is role] for role in Role}

    def demand(self, role: Role) -> Resources:
        return self.view.worker_demand if role is Role.WORKER else self.view.ps_demand

    @property
    def allocation(self) -> Allocation:
        workers = sum(1 for entry in self.granted if entry.role is Role.WORKER)
        return Allocation(workers, len(self.granted) - workers)


class TentativePlacement:
    """The `Budget` of a slot: every grant is placed at once, so what was granted fits on real nodes.

    Args:
        observation: nodes and jobs as they are.
        keep_running: hold the minimum of every running job before anything is spent.
        rule: how nodes are chosen for new tasks.
    """

    def __init__(self, observation: Observation, keep_running: bool = True, rule: Rule = "spread") -> None:
        self._rooms = _Rooms(observation.nodes, rule, stream(observation.slot, "placement"))
        self._grants = {view.job_id: _Grant(view) for view in observation.jobs}
        for grant in self._grants.values():
            self._reserve(grant)
        for grant in self._grants.values():
            if grant.view.pinned:
                self._confirm_all(grant)
        if keep_running:
            for grant in self._grants.values():
                self._confirm_minimum(grant)

    def grant(self, job_id: JobId, workers: int = 0, ps: int = 0, accelerator: str = "") -> bool:
        """Give the job this many more tasks, all or nothing; see `Budget.grant`."""
        grant = self._grants.get(job_id)
        if grant is None or grant.view.pinned or workers < 0 or ps < 0 or workers + ps == 0:
            return False
        after = grant.allocation + Allocation(workers, ps)
        view = grant.view
        if after.workers > view.workers.maximum or after.ps > view.ps.maximum:
            return False
        if after.workers < view.minimum.workers or after.ps < view.minimum.ps:
            return False
        allowed = view.accelerators
        if accelerator:
            if allowed and accelerator not in allowed:
                return False
            allowed = (accelerator,)
        return self._place(grant, [Role.WORKER] * workers + [Role.PS] * ps, allowed)

    def allocation(self, job_id: JobId) -> Allocation:
        """What the job has been granted so far; nothing for an unknown job."""
        grant = self._grants.get(job_id)
        return grant.allocation if grant else Allocation()

    def allocations(self) -> tuple[tuple[JobId, Allocation], ...]:
        """All grants, sorted by job id; jobs with nothing are left out."""
        return tuple(
            (job_id, self._grants[job_id].allocation) for job_id in sorted(self._grants) if self._grants[job_id].granted
        )

    def placement(self, job_id: JobId) -> Placement:
        """Where the granted tasks go, sorted by task name."""
        return tuple(sorted(self._grants[job_id].granted))

    def free(self) -> Resources:
        """What is not granted, over all schedulable nodes."""
        result = Resources()
        for name, node in self._rooms.nodes.items():
            if node.schedulable:
                result = result + self._rooms.free[name]
        return result

    def would_fit(self, job_id: JobId) -> bool:
        """Whether the job's minimum could still be granted; grants nothing."""
        grant = self._grants[job_id]
        view = grant.view
        if view.pinned or grant.granted:
            return False
        roles = [Role.WORKER] * view.minimum.workers + [Role.PS] * view.minimum.ps
        fits = self._place(grant, roles, view.accelerators)
        if fits:
            for entry in list(grant.granted):
                self._undo(grant, entry, entry in view.placement)
        return fits

    def _reserve(self, grant: _Grant) -> None:
        for entry in grant.view.placement:
            if entry.node in self._rooms.soft:
                self._rooms.soft[entry.node] = self._rooms.soft[entry.node] + grant.demand(entry.role)

    def _confirm_all(self, grant: _Grant) -> None:
        for role in Role:
            while grant.unconfirmed[role]:
                self._confirm(grant, role)

    def _confirm_minimum(self, grant: _Grant) -> None:
        view = grant.view
        if view.pinned or not view.placement:
            return
        for role, count in ((Role.WORKER, view.minimum.workers), (Role.PS, view.minimum.ps)):
            for _ in range(min(count, len(grant.unconfirmed[role]))):
                self._confirm(grant, role)

    def _confirm(self, grant: _Grant, role: Role) -> None:
        """Grant a running task its own place again, lowest index first."""
        entry = grant.unconfirmed[role].pop(0)
        if entry.node in self._rooms.free:
            demand = grant.demand(role)
            self._rooms.take(entry.node, demand)
            self._rooms.soft[entry.node] = self._rooms.soft[entry.node] - demand
        grant.granted.append(entry)

    def _place(self, grant: _Grant, roles: list[Role], allowed: tuple[str, ...]) -> bool:
        """Place all or nothing: spread by load and, where that runs into a corner, packed exactly."""
        placed: list[tuple[TaskPlacement, bool]] = []
        for role in roles:
            entry, stayed = self._place_one(grant, role, allowed)
            if entry is None:
                for undone, had_stayed in reversed(placed):
                    self._undo(grant, undone, had_stayed)
                return len(roles) > 1 and self._pack(grant, roles, allowed)
            placed.append((entry, stayed))
        return True

    def _pack(self, grant: _Grant, roles: list[Role], allowed: tuple[str, ...]) -> bool:
        """Place new tasks where an exact packing finds room; least loaded first may leave holes that fit nobody."""
        names = [
            name
            for name, node in self._rooms.nodes.items()
            if node.schedulable and (not allowed or node.accelerator in allowed)
        ]
        wanted = Allocation(roles.count(Role.WORKER), roles.count(Role.PS))
        rooms = [self._rooms.free[name] for name in names]
        found = pack(rooms, grant.demand(Role.WORKER), grant.demand(Role.PS), wanted)
        if found is None:
            return False
        for name, size in zip(names, found, strict=True):
            for role, count in ((Role.WORKER, size.workers), (Role.PS, size.ps)):
                for _ in range(count):
                    self._rooms.take(name, grant.demand(role))
                    grant.granted.append(TaskPlacement(_unused_name(grant, role), name))
        return True

    def _place_one(self, grant: _Grant, role: Role, allowed: tuple[str, ...]) -> tuple[TaskPlacement | None, bool]:
        demand = grant.demand(role)
        narrowed = allowed != grant.view.accelerators  # else a running task may stay wherever it is
        for entry in grant.unconfirmed[role]:
            if (
                narrowed
                and entry.node in self._rooms.nodes
                and self._rooms.nodes[entry.node].accelerator not in allowed
            ):
                continue
            if entry.node in self._rooms.free and demand.fits_in(self._rooms.free[entry.node]):
                grant.unconfirmed[role].remove(entry)
                self._rooms.take(entry.node, demand)
                self._rooms.soft[entry.node] = self._rooms.soft[entry.node] - demand
                grant.granted.append(entry)
                return entry, True
        node = self._rooms.choose(demand, allowed, {entry.node for entry in grant.granted})
        if node is None:
            return None, False
        self._rooms.take(node, demand)
        entry = TaskPlacement(_unused_name(grant, role), node)
        grant.granted.append(entry)
        return entry, False

    def _undo(self, grant: _Grant, entry: TaskPlacement, stayed: bool) -> None:
        demand = grant.demand(entry.role)
        grant.granted.remove(entry)
        self._rooms.give_back(entry.node, demand)
        if stayed:
            self._rooms.soft[entry.node] = self._rooms.soft[entry.node] + demand
            grant.unconfirmed[entry.role] = sorted([*grant.unconfirmed[entry.role], entry])


def _unused_name(grant: _Grant, role: Role) -> TaskName:
    """The lowest index that neither a granted nor a running task of the job carries."""
    taken = {entry.task for entry in (*grant.granted, *grant.view.placement)}
    index = 0
    while task_name(role, index) in taken:
        index += 1
    return task_name(role, index)


def place(
    observation: Observation,
    allocations: Iterable[tuple[JobId, Allocation]],
    keep_running: bool,
    accelerators: Iterable[tuple[JobId, str]] = (),
    rule: Rule = "spread",
) -> TentativePlacement:
    """Places for decided allocations: running tasks stay first, then minima, then the rest, each job in turn.

    The world may have changed since the policy decided, and staying put may leave other holes than the policy's own
    order of grants; what does not fit any more is left out, never a part of a job's minimum.
    """
    budget = TentativePlacement(observation, keep_running, rule)
    wanted = dict(allocations)
    types = dict(accelerators)
    order = [view for view in observation.jobs if view.job_id in wanted and not view.pinned]
    for view in order:
        _raise_to(budget, view, _at_most(allocation_of(view.placement), wanted[view.job_id]), types)
    for view in order:
        _raise_to(budget, view, _at_most(view.minimum, wanted[view.job_id]), types)
    growing = order
    while growing:
        growing = [view for view in growing if _grow_by_one(budget, view, wanted[view.job_id], types)]
    return budget


def _at_most(one: Allocation, other: Allocation) -> Allocation:
    return Allocation(min(one.workers, other.workers), min(one.ps, other.ps))


def _raise_to(budget: TentativePlacement, view: JobView, goal: Allocation, types: dict[JobId, str]) -> None:
    now = budget.allocation(view.job_id)
    workers, ps = max(0, goal.workers - now.workers), max(0, goal.ps - now.ps)
    budget.grant(view.job_id, workers, ps, types.get(view.job_id, ""))


def _grow_by_one(budget: TentativePlacement, view: JobView, goal: Allocation, types: dict[JobId, str]) -> bool:
    now = budget.allocation(view.job_id)
    if not now:
        return False
    accelerator = types.get(view.job_id, "")
    more_ps = now.ps < goal.ps and budget.grant(view.job_id, ps=1, accelerator=accelerator)
    more_workers = now.workers < goal.workers and budget.grant(view.job_id, workers=1, accelerator=accelerator)
    return more_ps or more_workers
