"""Finds nodes for tasks: tentatively while a policy spends its budget, finally for what it decided.

Running tasks stay where they are; nodes for new ones are chosen by a rule of `core/choosing.py`, by default the least
loaded one (the rule of DL2's reference code, by dominant share instead of a sum of unlike units).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from operator import itemgetter

from fedsched.core.choosing import Rule
from fedsched.core.decision import JobView, Observation
from fedsched.core.ids import JobId, NodeName, TaskName, stream
from fedsched.core.job import (
    COORDINATOR,
    Allocation,
    Placement,
    Role,
    TaskPlacement,
    allocation_of,
    sized,
    task_name,
)
from fedsched.core.packing import pack, pack_and_one
from fedsched.core.resources import Resources, amount_of, resources_of
from fedsched.core.vacancies import Vacancies

_job_id = itemgetter(0)


class _Part:
    """What one job has been granted of one role, and which of its running tasks are still to be confirmed."""

    __slots__ = ("amount", "count", "demand", "role", "unconfirmed", "unused")

    def __init__(self, role: Role, demand: Resources) -> None:
        self.role = role
        self.demand = demand
        """Of one task."""
        self.amount = amount_of(demand)
        self.count = 0
        self.unconfirmed: list[TaskPlacement] = []
        self.unused = 0
        """No lower index than this is unused."""


class _Grant:
    """What one job has been granted so far."""

    __slots__ = ("_taken", "coordinator", "granted", "places_coordinator", "ps", "view", "worker")

    def __init__(self, view: JobView) -> None:
        self.view = view
        self.granted: list[TaskPlacement] = []
        self.worker = _Part(Role.WORKER, view.worker_demand)
        self.ps = _Part(Role.PS, view.ps_demand)
        self.coordinator = _Part(Role.COORDINATOR, view.coordinator_demand)
        self.places_coordinator = bool(view.coordinator) if view.placement else self.coordinator.amount > 0
        """Whether the next grant has to find it a place, too: the first one of the slot. A job that was started without
        one goes on without."""
        servers = allocation_of(view.placement).ps
        self.worker.unconfirmed = list(view.placement[servers:])
        self.ps.unconfirmed = list(view.placement[:servers])
        self.coordinator.unconfirmed = list(view.coordinator)
        self._taken: set[TaskName] | None = None
        """Names of tasks that run or are granted; None until a new one is wanted."""

    def part_of(self, entry: TaskPlacement) -> _Part:
        if entry.task.startswith(_WORKERS):
            return self.worker
        return self.coordinator if entry.task == COORDINATOR else self.ps

    @property
    def parts(self) -> tuple[_Part, ...]:
        return self.worker, self.ps, self.coordinator

    @property
    def allocation(self) -> Allocation:
        return sized(self.worker.count, self.ps.count)

    def add(self, entry: TaskPlacement, part: _Part) -> None:
        self.granted.append(entry)
        part.count += 1
        if self._taken is not None:
            self._taken.add(entry.task)
        if part is self.coordinator:
            self.places_coordinator = False

    def add_all(self, ran: list[TaskPlacement], part: _Part) -> None:
        """The same for tasks that run, whose names are taken anyway."""
        self.granted += ran
        part.count += len(ran)
        if ran and part is self.coordinator:
            self.places_coordinator = False

    def drop(self, entry: TaskPlacement, part: _Part, *, ran: bool) -> None:
        self.granted.remove(entry)
        part.count -= 1
        if part is self.coordinator:
            self.places_coordinator = True
        if not ran:
            if self._taken is not None:
                self._taken.discard(entry.task)
            part.unused = 0

    def unused_name(self, part: _Part) -> TaskName:
        """The lowest index that neither a granted nor a running task of the job carries."""
        if self._taken is None:
            self._taken = {entry.task for entry in (*self.view.placement, *self.granted)}
        while (name := _name(part.role, part.unused)) in self._taken:
            part.unused += 1
        return name


_name = lru_cache(maxsize=4096)(task_name)
_WORKERS = f"{Role.WORKER.value}-"


class TentativePlacement:
    """The `Budget` of a slot: every grant is placed at once, so what was granted fits on real nodes.

    Args:
        observation: nodes and jobs as they are.
        keep_running: hold the minimum of every running job before anything is spent.
        rule: how nodes are chosen for new tasks.
    """

    def __init__(self, observation: Observation, keep_running: bool = True, rule: Rule = "spread") -> None:
        self._grants = {view.job_id: _Grant(view) for view in observation.jobs}
        running = [(part.unconfirmed, part.amount) for grant in self._grants.values() for part in grant.parts]
        self._rooms = Vacancies(observation.nodes, running, rule, stream(observation.slot, "placement"))
        self._gathers = rule == "consolidate"
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
        view, after_workers, after_ps = grant.view, grant.worker.count + workers, grant.ps.count + ps
        if after_workers > view.workers.maximum or after_ps > view.ps.maximum:
            return False
        if after_workers < max(1, view.workers.minimum) or after_ps < view.ps.minimum:
            return False
        allowed = view.accelerators
        if accelerator:
            if allowed and accelerator not in allowed:
                return False
            allowed = (accelerator,)
        if not grant.places_coordinator and allowed == view.accelerators and self._keep(grant, workers, ps):
            return True
        return self._place(grant, workers, ps, allowed)

    def allocation(self, job_id: JobId) -> Allocation:
        """What the job has been granted so far; nothing for an unknown job."""
        grant = self._grants.get(job_id)
        return grant.allocation if grant else Allocation()

    def allocations(self) -> tuple[tuple[JobId, Allocation], ...]:
        """All grants, sorted by job id; jobs with nothing are left out."""
        found = [(job_id, grant.allocation) for job_id, grant in self._grants.items() if grant.granted]
        found.sort(key=_job_id)
        return tuple(found)

    def placement(self, job_id: JobId) -> Placement:
        """Where the granted tasks go, sorted by task name."""
        return tuple(sorted(self._grants[job_id].granted))

    def free(self) -> Resources:
        """What is not granted, over all schedulable nodes."""
        result = Resources()
        for name, node in self._rooms.nodes.items():
            if node.schedulable:
                result = result + resources_of(self._rooms.free[name])
        return result

    def would_fit(self, job_id: JobId) -> bool:
        """Whether the job's minimum could still be granted; grants nothing."""
        grant = self._grants[job_id]
        view = grant.view
        if view.pinned or grant.granted:
            return False
        fits = self._place(grant, view.minimum.workers, view.minimum.ps, view.accelerators)
        if fits:
            for entry in list(grant.granted):
                ran = entry in view.placement or entry in view.coordinator
                self._undo(grant, entry, grant.part_of(entry), ran)
        return fits

    def _confirm_all(self, grant: _Grant) -> None:
        for part in grant.parts:
            self._confirm(grant, part, len(part.unconfirmed))

    def _confirm_minimum(self, grant: _Grant) -> None:
        view = grant.view
        if view.pinned or not view.placement:
            return
        self._confirm(grant, grant.worker, view.minimum.workers)
        self._confirm(grant, grant.ps, view.minimum.ps)
        self._confirm(grant, grant.coordinator, 1)

    def _confirm(self, grant: _Grant, part: _Part, count: int) -> None:
        """Grant so many running tasks, if there are as many, their own places again, lowest index first."""
        confirmed, part.unconfirmed = part.unconfirmed[:count], part.unconfirmed[count:]
        self._rooms.confirm([entry for entry in confirmed if entry.node in self._rooms.nodes], part.amount)
        grant.add_all(confirmed, part)

    def _keep(self, grant: _Grant, workers: int, ps: int) -> bool:
        """Grant so many running tasks their places again, if nothing can be in their way; else change nothing.

        Most tasks of most slots stay, thousands of them on a large cluster, so this is written for speed.
        """
        rooms, worker, server = self._rooms, grant.worker, grant.ps
        if len(worker.unconfirmed) < workers or len(server.unconfirmed) < ps:
            return False
        staying, beside = worker.unconfirmed[:workers], server.unconfirmed[:ps]
        if not rooms.all_can_stay(staying + beside):
            return False
        if staying:
            rooms.confirm(staying, worker.amount)
            del worker.unconfirmed[:workers]
            worker.count += workers
            grant.granted += staying
        if beside:
            rooms.confirm(beside, server.amount)
            del server.unconfirmed[:ps]
            server.count += ps
            grant.granted += beside
        return True

    def _place(self, grant: _Grant, workers: int, ps: int, allowed: tuple[str, ...]) -> bool:
        """Place all or nothing: spread by load and, where that runs into a corner, packed exactly.

        The coordinator needs no accelerator, so any node will do for it.
        """
        if workers + ps == 1 and not grant.places_coordinator:
            part = grant.worker if workers else grant.ps
            stays = part.unconfirmed and self._stay(grant, part, 1, allowed)
            return bool(stays or self._place_one(grant, part, allowed))
        wanted: tuple[tuple[_Part, int, tuple[str, ...]], ...]
        wanted = ((grant.worker, workers, allowed), (grant.ps, ps, allowed))
        if grant.places_coordinator:
            wanted = (*wanted, (grant.coordinator, 1, ()))
        for part, count, where in wanted:
            new = count - len(part.unconfirmed)
            if new > 0 and not self._rooms.could_hold(part.amount, new, where):
                return False
        kept: list[tuple[_Part, list[TaskPlacement]]] = []
        added: list[tuple[_Part, TaskPlacement]] = []
        for part, count, where in wanted:
            if count and part.unconfirmed:
                stayed = self._stay(grant, part, count, where)
                count -= len(stayed)
                kept.append((part, stayed))
            for _ in range(count):
                entry = self._place_one(grant, part, where)
                if entry is None:
                    self._take_back(grant, kept, added)
                    return self._pack(grant, workers, ps, allowed)
                added.append((part, entry))
        return True

    def _take_back(
        self, grant: _Grant, kept: list[tuple[_Part, list[TaskPlacement]]], added: list[tuple[_Part, TaskPlacement]]
    ) -> None:
        for part, entry in added:
            self._undo(grant, entry, part, stayed=False)
        for part, stayed in kept:
            for entry in stayed:
                self._undo(grant, entry, part, stayed=True)

    def _pack(self, grant: _Grant, workers: int, ps: int, allowed: tuple[str, ...]) -> bool:
        """Place new tasks where an exact packing finds room; least loaded first may leave holes that fit nobody."""
        rooms, wanted = self._rooms, ((grant.worker, workers), (grant.ps, ps))
        if any(count and not rooms.could_hold(part.amount, count, allowed) for part, count in wanted):
            return False
        amounts = {part.amount for part, count in wanted if count}
        names = [
            name
            for name, node in rooms.nodes.items()
            if node.schedulable
            and (not allowed or node.accelerator in allowed)
            and any(rooms.fits(name, amount) for amount in amounts)
        ]
        spot, found = self._packing(grant, names, Allocation(workers, ps))
        if found is None:
            return False
        if spot is not None:
            rooms.take(spot, grant.coordinator.amount)
            grant.add(TaskPlacement(COORDINATOR, spot), grant.coordinator)
        for name, size in zip(names, found, strict=True):
            for part, count in ((grant.worker, size.workers), (grant.ps, size.ps)):
                for _ in range(count):
                    rooms.take(name, part.amount)
                    grant.add(TaskPlacement(grant.unused_name(part), name), part)
        return True

    def _packing(
        self, grant: _Grant, names: list[NodeName], size: Allocation
    ) -> tuple[NodeName | None, tuple[Allocation, ...] | None]:
        """The node of the coordinator, if it needs one, and how many tasks go on each of these nodes, if they fit."""
        rooms = [resources_of(self._rooms.free[name]) for name in names]
        worker, ps, coordinator = grant.worker.demand, grant.ps.demand, grant.coordinator
        if not grant.places_coordinator:
            return None, pack(rooms, worker, ps, size)
        among = set(names)
        for name, node in self._rooms.nodes.items():
            if name not in among and node.schedulable and self._rooms.fits(name, coordinator.amount):
                return name, pack(rooms, worker, ps, size)
        found = pack_and_one(rooms, coordinator.demand, worker, ps, size)
        return (names[found[0]], found[1]) if found is not None else (None, None)

    def _stay(self, grant: _Grant, part: _Part, count: int, allowed: tuple[str, ...]) -> list[TaskPlacement]:
        """Grant up to so many running tasks their places again, where there is still room for them."""
        rooms, demand = self._rooms, part.amount
        # Else a running task may stay wherever it is.
        narrowed = bool(allowed) and allowed != grant.view.accelerators
        stayed, others = part.unconfirmed[:count], part.unconfirmed[count:]
        if not narrowed and rooms.all_can_stay(stayed):
            rooms.confirm(stayed, demand)
        else:
            stayed, others = [], []
            for entry in part.unconfirmed:
                fits = len(stayed) < count and rooms.fits(entry.node, demand)
                if fits and not (narrowed and rooms.nodes[entry.node].accelerator not in allowed):
                    rooms.confirm((entry,), demand)
                    stayed.append(entry)
                else:
                    others.append(entry)
        part.unconfirmed = others
        grant.add_all(stayed, part)
        return stayed

    def _place_one(self, grant: _Grant, part: _Part, allowed: tuple[str, ...]) -> TaskPlacement | None:
        """A new task, on a node that the rule chooses; a coordinator on one that its job is on already, if it can be:
        the fewer nodes a job depends on, the more seldom it is lost with one."""
        rooms, demand = self._rooms, part.amount
        gathers = self._gathers or part is grant.coordinator
        node = rooms.choose(demand, allowed, {entry.node for entry in grant.granted} if gathers else ())
        if node is None:
            return None
        rooms.take(node, demand)
        entry = TaskPlacement(grant.unused_name(part), node)
        grant.add(entry, part)
        return entry

    def _undo(self, grant: _Grant, entry: TaskPlacement, part: _Part, stayed: bool) -> None:
        grant.drop(entry, part, ran=stayed)
        if stayed:
            self._rooms.release(entry.node, part.amount)
            part.unconfirmed = sorted([*part.unconfirmed, entry])
        else:
            self._rooms.give_back(entry.node, part.amount)


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

    Args:
        allocations: what was decided; jobs that are not named get nothing.
        keep_running: whether running tasks stay where they are.
        accelerators: the type that a job's tasks are to run on; any where none is named.
        rule: how nodes are chosen.
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
