"""Chooses nodes for tasks by one of four rules, within what is free.

* `spread`: the node that would be least loaded (by dominant share) afterwards, so that jobs disturb each other least;
* `pack`: the fullest node that still has room, so that large holes stay (best fit);
* `consolidate`: a job on as few nodes as can be: on one, by best fit, or else on the emptiest ones;
* `random`: any node with room; what a rule is worth is seen against it.

Ties go to the lowest name.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from random import Random
from typing import Literal

from fedsched.core.cluster import Node
from fedsched.core.ids import NodeName
from fedsched.core.job import Allocation, JobSpec, Placement, Role, TaskPlacement, task_name
from fedsched.core.packing import pack, times
from fedsched.core.resources import Resources, total

Rule = Literal["spread", "pack", "consolidate", "random"]


def left_over(free: Resources) -> tuple[int, int, int]:
    """How much is free, the scarcest kind first: sorts nodes from full to empty."""
    return (free.gpu_milli, free.cpu_milli, free.memory_mib)


class Rooms:
    """What is free on every node while one decision is carried out.

    Args:
        nodes: by name.
        free: of each of them; it is not changed.
        rule: how nodes are chosen.
        chance: for the rule `random`.
    """

    def __init__(
        self, nodes: Mapping[NodeName, Node], free: Mapping[NodeName, Resources], rule: Rule, chance: Random
    ) -> None:
        self._nodes = nodes
        self._free = dict(free)
        self._rule = rule
        self._chance = chance

    def give(self, placement: Placement, spec: JobSpec) -> None:
        """These tasks of the job are leaving, or may have to."""
        for entry in placement:
            if entry.node in self._free:
                self._free[entry.node] = self._free[entry.node] + spec.demand(entry.role)

    def take(self, placement: Placement, spec: JobSpec) -> bool:
        """Hold exactly these places; all or nothing."""
        before: dict[NodeName, Resources] = {}
        for entry in placement:
            demand = spec.demand(entry.role)
            free = self._free.get(entry.node)
            if free is None or not demand.fits_in(free):
                self._free.update(before)
                return False
            before.setdefault(entry.node, free)
            self._free[entry.node] = free - demand
        return True

    def gang(self, spec: JobSpec) -> Placement | None:
        """Hold places for all tasks that a job of fixed size needs, sorted by task; None if they do not fit."""
        if len(self._nodes) == 1:
            return self._on_the_only_node(spec)
        candidates = [
            name
            for name, node in self._nodes.items()
            if node.schedulable and (not spec.accelerators or node.accelerator in spec.accelerators)
        ]
        size = spec.maximum
        if not self._could_hold(candidates, spec.worker_demand, size.workers):
            return None
        if self._rule == "consolidate":
            found = self._together(candidates, spec, size)
        else:
            found = self._one_by_one(candidates, spec, size)
        if found is None and size.ps:
            found = self._exactly(candidates, spec, size)
        return tuple(sorted(found)) if found is not None else None

    def would_hold(self, spec: JobSpec) -> bool:
        """Whether a job of fixed size would fit; holds nothing."""
        places = self.gang(spec)
        if places is not None:
            self.give(places, spec)
        return places is not None

    def left(self) -> Resources:
        """What is free on all nodes that take tasks."""
        return total([self._free[name] for name, node in self._nodes.items() if node.schedulable])

    def _could_hold(self, candidates: list[NodeName], demand: Resources, count: int) -> bool:
        """Whether as many tasks of one demand fit; tells most gangs that wait apart at little cost."""
        for name in candidates:
            count -= times(demand, self._free[name], count)
            if count <= 0:
                return True
        return False

    def _on_the_only_node(self, spec: JobSpec) -> Placement | None:
        ((name, node),) = self._nodes.items()
        if not node.schedulable or (spec.accelerators and node.accelerator not in spec.accelerators):
            return None
        size = spec.maximum
        demand = spec.worker_demand if size == ONE_WORKER else spec.demand_of(size)
        free = self._free[name]
        if not demand.fits_in(free):
            return None
        self._free[name] = free - demand
        return all_on(name, size)

    def _one_by_one(self, candidates: list[NodeName], spec: JobSpec, size: Allocation) -> list[TaskPlacement] | None:
        before = dict(self._free)
        found = []
        for role, count in ((Role.WORKER, size.workers), (Role.PS, size.ps)):
            demand = spec.demand(role)
            for index in range(count):
                name = self._choose(candidates, demand, spec.accelerators)
                if name is None:
                    self._free = before
                    return None
                self._free[name] = self._free[name] - demand
                found.append(TaskPlacement(task_name(role, index), name))
        return found

    def _choose(self, candidates: list[NodeName], demand: Resources, accelerators: tuple[str, ...]) -> NodeName | None:
        fitting = [name for name in candidates if demand.fits_in(self._free[name])]
        if not fitting:
            return None
        if len(accelerators) > 1:
            fitting = self._preferred(fitting, accelerators)
        if self._rule == "random":
            return self._chance.choice(fitting)
        if self._rule == "pack":
            return min(fitting, key=lambda name: (left_over(self._free[name]), name))
        return min(fitting, key=lambda name: (self._share_with(demand, name), name))

    def _preferred(self, names: list[NodeName], accelerators: tuple[str, ...]) -> list[NodeName]:
        """Those of the accelerator type that the job names first."""
        best = min(accelerators.index(self._nodes[name].accelerator) for name in names)
        return [name for name in names if self._nodes[name].accelerator == accelerators[best]]

    def _share_with(self, demand: Resources, name: NodeName) -> float:
        capacity = self._nodes[name].capacity
        return (capacity - self._free[name] + demand).dominant_share(capacity)

    def _together(self, candidates: list[NodeName], spec: JobSpec, size: Allocation) -> list[TaskPlacement] | None:
        whole = spec.demand_of(size)
        holding_all = [name for name in candidates if whole.fits_in(self._free[name])]
        if holding_all:
            if len(spec.accelerators) > 1:
                holding_all = self._preferred(holding_all, spec.accelerators)
            best = min(holding_all, key=lambda name: (left_over(self._free[name]), name))
            self._free[best] = self._free[best] - whole
            return list(all_on(best, size))
        return self._fill_up(sorted(candidates, key=self._emptiness), spec, size)

    def _emptiness(self, name: NodeName) -> tuple[int, int, int, NodeName]:
        gpu, cpu, memory = left_over(self._free[name])
        return (-gpu, -cpu, -memory, name)

    def _fill_up(self, order: list[NodeName], spec: JobSpec, size: Allocation) -> list[TaskPlacement] | None:
        wanted = _tasks(size)
        before = dict(self._free)
        found = []
        for name in order:
            while wanted and spec.demand(wanted[0][0]).fits_in(self._free[name]):
                role, index = wanted.pop(0)
                self._free[name] = self._free[name] - spec.demand(role)
                found.append(TaskPlacement(task_name(role, index), name))
            if not wanted:
                return found
        self._free = before
        return None

    def _exactly(self, candidates: list[NodeName], spec: JobSpec, size: Allocation) -> list[TaskPlacement] | None:
        """By exact packing: choosing one node after the other may leave holes that fit nobody."""
        sizes = pack([self._free[name] for name in candidates], spec.worker_demand, spec.ps_demand, size)
        if sizes is None:
            return None
        found, next_index = [], {Role.WORKER: 0, Role.PS: 0}
        for name, part in zip(candidates, sizes, strict=True):
            self._free[name] = self._free[name] - spec.demand_of(part)
            for role, count in ((Role.WORKER, part.workers), (Role.PS, part.ps)):
                for _ in range(count):
                    found.append(TaskPlacement(task_name(role, next_index[role]), name))
                    next_index[role] += 1
        return found


ONE_WORKER = Allocation(1, 0)


@lru_cache(maxsize=4096)
def all_on(name: NodeName, size: Allocation) -> Placement:
    """All tasks of an allocation on one node."""
    return tuple(sorted(TaskPlacement(task_name(role, index), name) for role, index in _tasks(size)))


def _tasks(size: Allocation) -> list[tuple[Role, int]]:
    return [(Role.WORKER, index) for index in range(size.workers)] + [(Role.PS, index) for index in range(size.ps)]
