"""Finds nodes for tasks: tentatively while a policy spends its budget, finally for what it decided.

Running tasks stay where they are; nodes for new ones are chosen by a rule of `core/choosing.py`, by default the least
loaded one (the rule of DL2's reference code, by dominant share instead of a sum of unlike units).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import lru_cache
from heapq import heappop, heappush
from operator import itemgetter
from random import Random

from fedsched.core.choosing import Rule, left_over
from fedsched.core.cluster import Node
from fedsched.core.decision import JobView, Observation
from fedsched.core.ids import JobId, NodeName, TaskName, stream
from fedsched.core.job import (
    COORDINATOR,
    TASKS_MAX,
    Allocation,
    Placement,
    Role,
    TaskPlacement,
    allocation_of,
    sized,
    task_name,
)
from fedsched.core.packing import pack, pack_and_one, times
from fedsched.core.resources import OVERDRAWN, Resources, amount_of, resources_of

_Kind = tuple[str, bool, Resources]
"""What of a node does not change within a slot: accelerator, whether it takes tasks, capacity."""
_Group = tuple[int, int, int]
"""Number of the kind, what is free, and what of that is firm."""
_job_id = itemgetter(0)
_Grade = tuple[bool, int, tuple[float, ...]]
"""Whether a running task would have to go, how little the accelerator is liked, and the rule's rank."""


class _Rooms:
    """What is free on each node, and what of that is firm: free even if all running tasks were granted again.

    Nodes of one kind with as much free and as much firm are as good as each other but for their names, and in a large
    cluster there are few such groups; so a node is chosen among groups. Amounts are integers; see `amount_of`.
    """

    def __init__(self, nodes: Iterable[Node], rule: Rule, chance: Random) -> None:
        self._rule = rule
        self._chance = chance
        self.nodes = {node.name: node for node in sorted(nodes, key=lambda node: node.name)}
        self.free = {name: amount_of(node.capacity) for name, node in self.nodes.items()}
        self.firm = dict(self.free)
        self._names = list(self.nodes)
        self._index = {name: index for index, name in enumerate(self._names)}
        kinds = {name: (node.accelerator, node.schedulable, node.capacity) for name, node in self.nodes.items()}
        self._every_kind = list(dict.fromkeys(kinds.values()))
        number = {kind: at for at, kind in enumerate(self._every_kind)}
        self._kinds = {name: number[kind] for name, kind in kinds.items()}
        self._group_of: dict[NodeName, _Group] = {}
        self._sizes: dict[_Group, int] = {}
        """How many nodes are in each group; empty ones are left out."""
        self._members: dict[_Group, list[int]] = {}
        """Heaps of indices of nodes, some of which may have left."""
        self._graded: dict[tuple[int, tuple[str, ...]], dict[_Group, _Grade]] = {}
        """By demand and accelerators that will do: all groups with room, with their grades; the lowest is best."""
        self.moved = dict.fromkeys(self._names)
        """Nodes that are in another group than is noted. Noting it can wait until somebody looks for a node, which
        most grants do not: they confirm what runs."""

    def take(self, node: NodeName, demand: int) -> None:
        self.free[node] -= demand
        self.firm[node] -= demand
        self.moved[node] = None

    def give_back(self, node: NodeName, demand: int) -> None:
        self.take(node, -demand)

    def soften(self, node: NodeName, demand: int) -> None:
        """A running task holds this."""
        self.firm[node] -= demand
        self.moved[node] = None

    def confirm(self, node: NodeName, demand: int) -> None:
        """What a running task holds is granted."""
        self.free[node] -= demand
        self.moved[node] = None

    def release(self, node: NodeName, demand: int) -> None:
        """It is not granted any more."""
        self.confirm(node, -demand)

    def fits(self, node: NodeName, demand: int) -> bool:
        return not (self.free[node] - demand) & OVERDRAWN

    def could_hold(self, demand: int, count: int, accelerators: tuple[str, ...]) -> bool:
        """Whether so many tasks fit if there is nothing else to place; tells most that do not at little cost."""
        if self._rule == "random":
            return True  # what is drawn for tasks that do not fit is part of a run's story
        sizes = self._sizes
        for group in self._fitting(demand, accelerators):
            count -= sizes[group] * _times(group[1], demand)
            if count <= 0:
                return True
        return count <= 0

    def could_hold_both(self, one: int, other: int, accelerators: tuple[str, ...]) -> bool:
        """Whether a task of either demand fits, both at once: on one node, or on two."""
        ones, others = self._fitting(one, accelerators), self._fitting(other, accelerators)
        if not ones or not others:
            return False
        for _, free, _ in ones:
            if not (free - one - other) & OVERDRAWN:
                return True
        sizes = self._sizes
        return not (sum(sizes[group] for group in ones) == 1 and ones.keys() == others.keys() and len(others) == 1)

    def _note(self) -> None:
        moved = self.moved
        if not moved:
            return
        sizes, group_of, members = self._sizes, self._group_of, self._members
        kinds, free, firm, index = self._kinds, self.free, self.firm, self._index
        for name in moved:
            group = (kinds[name], free[name], firm[name])
            before = group_of.get(name)
            if group == before:
                continue
            if before is not None:
                sizes[before] -= 1
                if not sizes[before]:
                    self._retire(before)
            group_of[name] = group
            if group in sizes:
                sizes[group] += 1
                heappush(members[group], index[name])
            else:
                sizes[group], members[group] = 1, [index[name]]
                self._introduce(group)
        moved.clear()

    def _introduce(self, group: _Group) -> None:
        for (demand, accelerators), graded in self._graded.items():
            if self._would_take(group, demand, accelerators):
                graded[group] = self._grade(group, demand, accelerators)

    def _retire(self, group: _Group) -> None:
        del self._sizes[group], self._members[group]
        for graded in self._graded.values():
            graded.pop(group, None)

    def choose(self, demand: int, accelerators: tuple[str, ...], own: Collection[NodeName] = ()) -> NodeName | None:
        """A node with room by the rule, before any that would push a running task from its place.

        Args:
            own: nodes that the job is on already; `consolidate` prefers them.
        """
        if self._rule == "random":
            return self._choose_any(demand, accelerators)
        others = self._best_group(demand, accelerators)
        if not own:
            return self._names[others[1]] if others is not None else None
        mine = [
            (self._grade(group, demand, accelerators), self._index[name])
            for name, group in ((name, self._group_of[name]) for name in own if name in self._index)
            if self._would_take(group, demand, accelerators)
        ]
        if not mine:
            return self._names[others[1]] if others is not None else None
        best = min(mine)
        assert others is not None  # its own nodes are among them
        # Of equal grades but for the rank, a node that the job is on already comes first.
        return self._names[best[1] if best[0][:2] <= others[0][:2] else others[1]]

    def _fitting(self, demand: int, accelerators: tuple[str, ...]) -> dict[_Group, _Grade]:
        """All groups with room for the task, with their grades."""
        self._note()
        graded = self._graded.get((demand, accelerators))
        if graded is None:
            graded = self._graded[demand, accelerators] = {
                group: self._grade(group, demand, accelerators)
                for group in self._sizes
                if self._would_take(group, demand, accelerators)
            }
        return graded

    def _best_group(self, demand: int, accelerators: tuple[str, ...]) -> tuple[_Grade, int] | None:
        """The best grade, and the first node that has it."""
        graded = self._fitting(demand, accelerators)
        if not graded:
            return None
        best = min(graded.values())
        return best, min([self._first(group) for group, grade in graded.items() if grade == best])

    def _first(self, group: _Group) -> int:
        members, names, group_of = self._members[group], self._names, self._group_of
        while group_of[names[members[0]]] != group:
            heappop(members)
        return members[0]

    def _choose_any(self, demand: int, accelerators: tuple[str, ...]) -> NodeName | None:
        best: tuple[bool, int, float, NodeName] | None = None
        for name in self._names:
            group = (self._kinds[name], self.free[name], self.firm[name])
            if self._would_take(group, demand, accelerators):
                grade = (*self._grade(group, demand, accelerators)[:2], self._chance.random(), name)
                best = grade if best is None or grade < best else best
        return best[-1] if best is not None else None

    def _would_take(self, group: _Group, demand: int, accelerators: tuple[str, ...]) -> bool:
        return not (group[1] - demand) & OVERDRAWN and _takes(self._every_kind[group[0]], accelerators)

    def _grade(self, group: _Group, demand: int, accelerators: tuple[str, ...]) -> _Grade:
        kind, free, firm = group
        accelerator, _, capacity = self._every_kind[kind]
        if self._rule == "spread":
            rank: tuple[float, ...] = (_share_with(capacity, free, demand),)
        else:
            rank = left_over(resources_of(free))
        return bool((firm - demand) & OVERDRAWN), _preference(accelerator, accelerators), rank


def _takes(kind: _Kind, accelerators: tuple[str, ...]) -> bool:
    return kind[1] and (not accelerators or kind[0] in accelerators)


@lru_cache(maxsize=65_536)
def _times(free: int, demand: int) -> int:
    """How many tasks fit in what is free; any number of those that take nothing."""
    return max(0, times(resources_of(demand), resources_of(free), TASKS_MAX))


@lru_cache(maxsize=65_536)
def _share_with(capacity: Resources, free: int, demand: int) -> float:
    """The dominant share of a node that is taken once it holds this too."""
    return (capacity - resources_of(free - demand)).dominant_share(capacity)


def _preference(accelerator: str, accelerators: tuple[str, ...]) -> int:
    return accelerators.index(accelerator) if accelerator in accelerators else 0


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
        for entry in (*view.coordinator, *view.placement):
            self.part_of(entry).unconfirmed.append(entry)
        self._taken = {entry.task for entry in view.placement}
        """Names of tasks that run or are granted."""

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
            self._taken.discard(entry.task)
            part.unused = 0

    def unused_name(self, part: _Part) -> TaskName:
        """The lowest index that neither a granted nor a running task of the job carries."""
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
        self._rooms = _Rooms(observation.nodes, rule, stream(observation.slot, "placement"))
        self._gathers = rule == "consolidate"
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

    def _reserve(self, grant: _Grant) -> None:
        firm = self._rooms.firm
        for part in grant.parts:
            for entry in part.unconfirmed:
                if entry.node in firm:
                    self._rooms.soften(entry.node, part.amount)

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
        for entry in confirmed:
            if entry.node in self._rooms.free:
                self._rooms.confirm(entry.node, part.amount)
        grant.add_all(confirmed, part)

    def _place(self, grant: _Grant, workers: int, ps: int, allowed: tuple[str, ...]) -> bool:
        """Place all or nothing: spread by load and, where that runs into a corner, packed exactly.

        The coordinator needs no accelerator, so any node will do for it.
        """
        if not grant.places_coordinator:
            if workers + ps == 1:
                return self._place_single(grant, grant.worker if workers else grant.ps, allowed)
            if workers == ps == 1 and self._stay_both(grant, allowed):
                return True
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

    def _place_single(self, grant: _Grant, part: _Part, allowed: tuple[str, ...]) -> bool:
        """`_place` for one task, which is what policies that go step by step ask for most."""
        unconfirmed, rooms = part.unconfirmed, self._rooms
        if unconfirmed:
            node = unconfirmed[0].node
            left = rooms.free.get(node, -1) - part.amount
            if not left & OVERDRAWN and allowed == grant.view.accelerators:
                rooms.free[node], rooms.moved[node] = left, None
                grant.granted.append(unconfirmed.pop(0))
                part.count += 1
                return True
            if self._stay(grant, part, 1, allowed):
                return True
        return self._place_one(grant, part, allowed) is not None

    def _stay_both(self, grant: _Grant, allowed: tuple[str, ...]) -> bool:
        """Grant the next running task of each role its place again, if both can stay; else change nothing.

        Most bundles of most slots are of such tasks.
        """
        worker, ps = grant.worker, grant.ps
        if not worker.unconfirmed or not ps.unconfirmed or allowed != grant.view.accelerators:
            return False
        one, other, free, moved = worker.unconfirmed[0], ps.unconfirmed[0], self._rooms.free, self._rooms.moved
        node, beside = one.node, other.node
        left = free.get(node, -1) - worker.amount
        left_beside = (left if beside == node else free.get(beside, -1)) - ps.amount
        if (left | left_beside) & OVERDRAWN:
            return False
        free[node], moved[node] = left, None
        free[beside], moved[beside] = left_beside, None
        del worker.unconfirmed[0], ps.unconfirmed[0]
        grant.granted += (one, other)
        worker.count += 1
        ps.count += 1
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
        if workers == ps == 1 and not self._rooms.could_hold_both(grant.worker.amount, grant.ps.amount, allowed):
            return False
        amounts = {part.amount for part, count in ((grant.worker, workers), (grant.ps, ps)) if count}
        names = [
            name
            for name, node in self._rooms.nodes.items()
            if node.schedulable
            and (not allowed or node.accelerator in allowed)
            and any(self._rooms.fits(name, amount) for amount in amounts)
        ]
        spot, found = self._packing(grant, names, Allocation(workers, ps))
        if found is None:
            return False
        if spot is not None:
            self._rooms.take(spot, grant.coordinator.amount)
            grant.add(TaskPlacement(COORDINATOR, spot), grant.coordinator)
        for name, size in zip(names, found, strict=True):
            for part, count in ((grant.worker, size.workers), (grant.ps, size.ps)):
                for _ in range(count):
                    self._rooms.take(name, part.amount)
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
        """Grant up to so many running tasks their places again, where there is still room for them.

        Most tasks of most slots stay, thousands of them on a large cluster, so this is written for speed: as long as
        all can stay there is nothing to sort out.
        """
        unconfirmed, demand, rooms = part.unconfirmed, part.amount, self._rooms
        free, moved = rooms.free, rooms.moved
        # Else a running task may stay wherever it is.
        narrowed = bool(allowed) and allowed != grant.view.accelerators
        stayed = unconfirmed[:count]
        for entry in stayed:
            node = entry.node
            left = free.get(node, -1) - demand
            if left & OVERDRAWN or (narrowed and rooms.nodes[node].accelerator not in allowed):
                break
            free[node] = left
            moved[node] = None
        else:
            part.unconfirmed = unconfirmed[count:]
            grant.add_all(stayed, part)
            return stayed
        stayed, unconfirmed = stayed[: stayed.index(entry)], unconfirmed[stayed.index(entry) :]
        others: list[TaskPlacement] = []
        for position, entry in enumerate(unconfirmed):
            node = entry.node
            left = free.get(node, -1) - demand
            if left & OVERDRAWN or (narrowed and rooms.nodes[node].accelerator not in allowed):
                others.append(entry)
                continue
            free[node] = left
            moved[node] = None
            stayed.append(entry)
            if len(stayed) == count:
                others += unconfirmed[position + 1 :]
                break
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
