"""Chooses nodes for tasks by one of four rules, within what is free.

* `spread`: the node that would be least loaded (by dominant share) afterwards, so that jobs disturb each other least;
* `pack`: the fullest node that still has room, so that large holes stay (best fit);
* `consolidate`: a job on as few nodes as can be: on one, by best fit, or else on the emptiest ones;
* `random`: any node with room; what a rule is worth is seen against it.

Ties go to the lowest name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from random import Random
from typing import Literal

from fedsched.core.cluster import Node
from fedsched.core.ids import NodeName
from fedsched.core.job import COORDINATOR, Allocation, JobSpec, Placement, Role, TaskPlacement, task_name
from fedsched.core.packing import pack, pack_and_one
from fedsched.core.resources import OVERDRAWN, Resources, amount_of, resources_of, total

Rule = Literal["spread", "pack", "consolidate", "random"]

Tasks = tuple[tuple[Role, int], ...]
"""Each by its role and number."""
Footprint = tuple[tuple[NodeName, int], ...]
"""What tasks take of each node that has some of them, as amounts."""


class Gang:
    """What a job of fixed size needs. Jobs that need the same share one, and with it the answer whether they fit."""

    __slots__ = ("accelerators", "coordinator", "ps", "size", "spec", "tasks", "whole", "worker")

    def __init__(self, spec: JobSpec) -> None:
        self.spec = spec
        """Of the first of these jobs; the others have the same demands."""
        self.size = spec.maximum
        self.accelerators = spec.accelerators
        self.worker = amount_of(spec.worker_demand)
        """One worker's amount; those after it: one parameter server's, the coordinator's, and that of all tasks."""
        self.ps = amount_of(spec.ps_demand)
        self.coordinator = amount_of(spec.coordinator_demand)
        self.whole = self.worker * self.size.workers + self.ps * self.size.ps + self.coordinator
        self.tasks = _tasks(self.size, coordinator=self.coordinator > 0)

    def amount(self, role: Role) -> int:
        """Of one task."""
        if role is Role.WORKER:
            return self.worker
        return self.ps if role is Role.PS else self.coordinator


class Rooms:
    """What is free on every node while one decision is carried out.

    Args:
        nodes: by name.
        free: amount of each of them; it is used up.
        rule: how nodes are chosen.
        chance: for the rule `random`.
    """

    def __init__(self, nodes: Mapping[NodeName, Node], free: dict[NodeName, int], rule: Rule, chance: Random) -> None:
        self._nodes = nodes
        self._free = free
        self._rule = rule
        self._chance = chance
        self._only = next(iter(nodes.values())) if len(nodes) == 1 else None

    def give(self, footprints: Iterable[Footprint]) -> None:
        """Tasks that take this are leaving, or may have to."""
        for name, amount in _together(footprints):
            if name in self._free:
                self._free[name] += amount

    def take(self, footprints: Sequence[Footprint]) -> bool:
        """Hold exactly these places; all or nothing."""
        free = self._free
        taken = _together(footprints)
        for done, (name, amount) in enumerate(taken):
            left = free.get(name, -1) - amount
            if left & OVERDRAWN:
                self.give([taken[:done]])
                return False
            free[name] = left
        return True

    def gang(self, gang: Gang) -> Placement | None:
        """Hold places for all tasks that a job of fixed size needs, sorted by task; None if they do not fit."""
        only = self._only
        if only is not None:
            left = self._free[only.name] - gang.whole
            if left & OVERDRAWN or not _would_do(only, gang):
                return None
            self._free[only.name] = left
            return all_on(only.name, gang.tasks)
        candidates = [name for name, node in self._nodes.items() if _would_do(node, gang)]
        if not self._could_hold(candidates, gang.worker, gang.size.workers):
            return None
        found = self._on_few(candidates, gang) if self._rule == "consolidate" else self._one_by_one(candidates, gang)
        if found is None and len(gang.tasks) > gang.size.workers:
            found = self._exactly(candidates, gang)
        return tuple(sorted(found)) if found is not None else None

    def would_hold(self, gang: Gang) -> bool:
        """Whether a job of fixed size would fit; holds nothing."""
        places = self.gang(gang)
        if places is not None:
            self.give([footprint_of(places, gang.worker, gang.ps, gang.coordinator)])
        return places is not None

    def left(self) -> Resources:
        """What is free on all nodes that take tasks."""
        return total([resources_of(self._free[name]) for name, node in self._nodes.items() if node.schedulable])

    def _could_hold(self, candidates: list[NodeName], amount: int, count: int) -> bool:
        """Whether as many tasks of one demand fit; tells most gangs that wait apart at little cost."""
        for name in candidates:
            left = self._free[name] - amount
            while not left & OVERDRAWN:
                count -= 1
                if count <= 0:
                    return True
                left -= amount
        return count <= 0

    def _one_by_one(self, candidates: list[NodeName], gang: Gang) -> list[TaskPlacement] | None:
        before = dict(self._free)
        found: list[TaskPlacement] = []
        for role, index in gang.tasks:
            amount = gang.amount(role)
            if role is Role.COORDINATOR:
                name = self._choose_beside(found, amount)
            else:
                name = self._choose(candidates, amount, gang.accelerators)
            if name is None:
                self._free = before
                return None
            self._free[name] -= amount
            found.append(TaskPlacement(task_name(role, index), name))
        return found

    def _choose(self, candidates: list[NodeName], amount: int, accelerators: tuple[str, ...]) -> NodeName | None:
        free = self._free
        fitting = [name for name in candidates if not (free[name] - amount) & OVERDRAWN]
        if not fitting:
            return None
        if len(accelerators) > 1:
            fitting = self._preferred(fitting, accelerators)
        if self._rule == "random":
            return self._chance.choice(fitting)
        if self._rule == "pack":
            return min(fitting, key=lambda name: (free[name], name))
        return min(fitting, key=lambda name: (self._share_with(amount, name), name))

    def _choose_beside(self, tasks: list[TaskPlacement], amount: int) -> NodeName | None:
        """A node for the coordinator: one that these tasks of its job are on, so that it does not depend on more nodes,
        or else any, for it needs no accelerator."""
        own = self._choose(sorted({entry.node for entry in tasks}), amount, ())
        return own or self._choose([name for name, node in self._nodes.items() if node.schedulable], amount, ())

    def _preferred(self, names: list[NodeName], accelerators: tuple[str, ...]) -> list[NodeName]:
        """Those of the accelerator type that the job names first."""
        best = min(accelerators.index(self._nodes[name].accelerator) for name in names)
        return [name for name in names if self._nodes[name].accelerator == accelerators[best]]

    def _share_with(self, amount: int, name: NodeName) -> float:
        capacity = self._nodes[name].capacity
        return (capacity - resources_of(self._free[name] - amount)).dominant_share(capacity)

    def _on_few(self, candidates: list[NodeName], gang: Gang) -> list[TaskPlacement] | None:
        free, whole = self._free, gang.whole
        holding_all = [name for name in candidates if not (free[name] - whole) & OVERDRAWN]
        if holding_all:
            if len(gang.accelerators) > 1:
                holding_all = self._preferred(holding_all, gang.accelerators)
            best = min(holding_all, key=lambda name: (free[name], name))
            free[best] -= whole
            return list(all_on(best, gang.tasks))
        return self._fill_up(sorted(candidates, key=lambda name: (-free[name], name)), gang)

    def _fill_up(self, order: list[NodeName], gang: Gang) -> list[TaskPlacement] | None:
        wanted = list(gang.tasks)
        before = dict(self._free)
        found = []
        for name in order:
            while wanted:
                role, index = wanted[0]
                left = self._free[name] - gang.amount(role)
                if left & OVERDRAWN:
                    break
                del wanted[0]
                self._free[name] = left
                found.append(TaskPlacement(task_name(role, index), name))
            if not wanted:
                return found
        self._free = before
        return None

    def _exactly(self, candidates: list[NodeName], gang: Gang) -> list[TaskPlacement] | None:
        """By exact packing: choosing one node after the other may leave holes that fit nobody."""
        found = []
        rooms = [resources_of(self._free[name]) for name in candidates]
        worker, ps = gang.spec.worker_demand, gang.spec.ps_demand
        spot = self._beside(candidates, gang.coordinator) if gang.coordinator else None
        if gang.coordinator and spot is None:
            both = pack_and_one(rooms, gang.spec.coordinator_demand, worker, ps, gang.size)
            spot, sizes = (candidates[both[0]], both[1]) if both is not None else (None, None)
        else:
            sizes = pack(rooms, worker, ps, gang.size)
        if sizes is None:
            return None
        if spot is not None:
            self._free[spot] -= gang.coordinator
            found.append(TaskPlacement(COORDINATOR, spot))
        next_index = {Role.WORKER: 0, Role.PS: 0}
        for name, part in zip(candidates, sizes, strict=True):
            self._free[name] -= gang.worker * part.workers + gang.ps * part.ps
            for role, count in ((Role.WORKER, part.workers), (Role.PS, part.ps)):
                for _ in range(count):
                    found.append(TaskPlacement(task_name(role, next_index[role]), name))
                    next_index[role] += 1
        return found

    def _beside(self, candidates: list[NodeName], amount: int) -> NodeName | None:
        """A node with room for this that is none of the candidates."""
        others = self._nodes.keys() - set(candidates)
        fitting = [
            name for name in others if self._nodes[name].schedulable and not (self._free[name] - amount) & OVERDRAWN
        ]
        return min(fitting, default=None)


def footprint_of(placement: Placement, worker: int, ps: int, coordinator: int = 0) -> Footprint:
    """What these tasks take of each node that has some.

    Args:
        worker: amount of one worker.
        ps: amount of one parameter server.
        coordinator: amount of the coordinator.
    """
    if len(placement) == 1 and placement[0].task.startswith("worker-"):
        return ((placement[0].node, worker),)
    amounts = {Role.WORKER: worker, Role.PS: ps, Role.COORDINATOR: coordinator}
    taken: dict[NodeName, int] = {}
    for entry in placement:
        taken[entry.node] = taken.get(entry.node, 0) + amounts[entry.role]
    return tuple(taken.items())


def _together(footprints: Iterable[Footprint]) -> Footprint:
    """The sum by node."""
    total: dict[NodeName, int] = {}
    for footprint in footprints:
        for name, amount in footprint:
            total[name] = total.get(name, 0) + amount
    return tuple(total.items())


def _would_do(node: Node, gang: Gang) -> bool:
    return node.schedulable and (not gang.accelerators or node.accelerator in gang.accelerators)


@lru_cache(maxsize=4096)
def all_on(name: NodeName, tasks: Tasks) -> Placement:
    """All these tasks on one node."""
    return tuple(sorted(TaskPlacement(task_name(role, index), name) for role, index in tasks))


@lru_cache(maxsize=4096)
def _tasks(size: Allocation, *, coordinator: bool) -> Tasks:
    workers = [(Role.WORKER, index) for index in range(size.workers)]
    servers = [(Role.PS, index) for index in range(size.ps)]
    return (*workers, *servers, *([(Role.COORDINATOR, 0)] if coordinator else ()))
