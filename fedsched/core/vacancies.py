"""Knows what is free on each node while a slot's budget is spent, and which node is the best for the next task."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache
from heapq import heapify, heappop, heappush, heapreplace
from random import Random

from fedsched.core.choosing import Rule, left_over
from fedsched.core.cluster import Node, kept_with_nodes
from fedsched.core.ids import NodeName
from fedsched.core.job import TASKS_MAX, TaskPlacement
from fedsched.core.packing import times
from fedsched.core.resources import OVERDRAWN, Resources, amount_of, resources_of

_Rank = tuple[bool, int, tuple[float, ...]]
"""Whether a running task would have to go, how little the accelerator is liked, what the rule says; lowest is best."""
_Candidate = tuple[bool, int, tuple[float, ...], int, int, int, list[int]]
"""A node's rank for some task, its index, what was free and what was firm there when it was ranked; then, the next one
last, the indices of nodes behind it that were all the same then."""
_NOBODY: list[int] = []


class _Site:
    """What of a cluster's nodes stays the same from slot to slot."""

    def __init__(self, nodes: tuple[Node, ...]) -> None:
        self.nodes = {node.name: node for node in sorted(nodes, key=lambda node: node.name)}
        self.amounts = {name: amount_of(node.capacity) for name, node in self.nodes.items()}
        self.names = list(self.nodes)
        self.index = {name: index for index, name in enumerate(self.names)}
        kinds = [(node.accelerator, node.schedulable, node.capacity) for node in self.nodes.values()]
        self.every_kind = list(dict.fromkeys(kinds))
        """Accelerator, whether it takes tasks, capacity."""
        number = {kind: at for at, kind in enumerate(self.every_kind)}
        self.kinds = [number[kind] for kind in kinds]
        """Of each node by its index."""


_site = kept_with_nodes(_Site)


class Vacancies:
    """What is free on each node, and what of that is firm: free even if all running tasks were granted again.

    For every demand that a node was looked for there is a heap of nodes by how good they are for it. A node may be
    worse by now than its place in a heap says, never better, so only the top has to be looked at again. By the rule
    `spread` a node only becomes worse as it fills; so the thousands of grants that confirm what runs cost the heaps
    nothing. Amounts are integers; see `amount_of`.

    Args:
        nodes: of the cluster.
        running: tasks that nobody has been granted yet, with the amount of each of them.
        rule: how nodes are chosen.
        chance: for the rule `random`.
    """

    def __init__(
        self,
        nodes: tuple[Node, ...],
        running: Iterable[tuple[Sequence[TaskPlacement], int]],
        rule: Rule,
        chance: Random,
    ) -> None:
        site = _site(nodes)
        self._rule = rule
        self._prefers_full = rule in ("pack", "consolidate")
        self._chance = chance
        self.nodes, self._names, self._index = site.nodes, site.names, site.index
        self._every_kind, self._kinds = site.every_kind, site.kinds
        self.free = site.amounts.copy()
        self._firm = site.amounts.copy()
        self._crowded: set[NodeName] = set()
        """Nodes without room for all that runs there, because of new tasks or because they have shrunk or are gone."""
        self._soften(running)
        self._heaps: dict[tuple[int, tuple[str, ...]], list[_Candidate]] = {}
        """By demand and accelerators that will do: nodes with room for it."""
        self._better: dict[NodeName, None] = {}
        """Nodes that may be better than the heaps say."""
        self._alike: dict[tuple[int, int, int], list[int]] = {}
        """Nodes by the number of their kind, what is free and what is firm, none of them better by now."""

    def _soften(self, running: Iterable[tuple[Sequence[TaskPlacement], int]]) -> None:
        firm, crowded = self._firm, self._crowded
        for entries, demand in running:
            for entry in entries:
                if entry.node in firm:
                    firm[entry.node] -= demand
                else:
                    crowded.add(entry.node)
        crowded.update([name for name, left in firm.items() if left & OVERDRAWN])

    def all_can_stay(self, entries: Iterable[TaskPlacement]) -> bool:
        """Whether these running tasks fit where they are for certain: on no node is anything in anybody's way."""
        crowded = self._crowded
        if crowded:
            for entry in entries:
                if entry.node in crowded:
                    return False
        return True

    def fits(self, node: NodeName, demand: int) -> bool:
        """Whether the node is there and has room for this."""
        return not (self.free.get(node, -1) - demand) & OVERDRAWN

    def confirm(self, entries: Sequence[TaskPlacement], demand: int) -> None:
        """What running tasks hold, this each, is granted. Their nodes are there."""
        free = self.free
        for entry in entries:
            free[entry.node] -= demand
        if self._prefers_full:
            for entry in entries:
                self._better[entry.node] = None

    def release(self, node: NodeName, demand: int) -> None:
        """What a running task holds is not granted any more."""
        self.free[node] += demand
        self._note_better(node)

    def take(self, node: NodeName, demand: int) -> None:
        """A new task takes this."""
        self.free[node] -= demand
        firm = self._firm[node] = self._firm[node] - demand
        if firm & OVERDRAWN:
            self._crowded.add(node)
        if self._prefers_full:
            self._better[node] = None

    def give_back(self, node: NodeName, demand: int) -> None:
        """A new task gives this back."""
        self.free[node] += demand
        firm = self._firm[node] = self._firm[node] + demand
        if not firm & OVERDRAWN:
            self._crowded.discard(node)
        self._note_better(node)

    def _note_better(self, node: NodeName) -> None:
        self._better[node] = None
        self._alike.clear()

    def could_hold(self, demand: int, count: int, accelerators: tuple[str, ...]) -> bool:
        """Whether so many tasks fit if there is nothing else to place; tells most that do not at little cost."""
        if self._rule == "random":
            return True  # what is drawn for tasks that do not fit is part of a run's story
        for _, _, _, _, free, _, others in self._heap(demand, accelerators):
            count -= (1 + len(others)) * _times(free, demand)
            if count <= 0:
                return True
        return count <= 0

    def choose(self, demand: int, accelerators: tuple[str, ...], own: Collection[NodeName] = ()) -> NodeName | None:
        """A node with room by the rule, before any that would push a running task from its place.

        Args:
            own: nodes that the job is on already; they come before others that are equal but for the rule's rank.
        """
        if self._rule == "random":
            return self._choose_any(demand, accelerators)
        heap = self._heap(demand, accelerators)
        if not heap:
            return None
        best = heap[0][:4]
        if own:
            ranked = [self._candidate(self._index[name], demand, accelerators) for name in own if name in self._index]
            mine = [one[:4] for one in ranked if one is not None and one[:2] <= best[:2]]
            best = min(mine, default=best)
        return self._names[best[3]]

    def _choose_any(self, demand: int, accelerators: tuple[str, ...]) -> NodeName | None:
        ranked = [self._candidate(index, demand, accelerators) for index in range(len(self._names))]
        drawn = [(*one[:2], self._chance.random(), one[3]) for one in ranked if one is not None]
        return self._names[min(drawn)[3]] if drawn else None

    def _heap(self, demand: int, accelerators: tuple[str, ...]) -> list[_Candidate]:
        """Nodes with room for the task, the best of all first; of the others some may have become worse."""
        if self._better:
            self._move_up()
        heap = self._heaps.get((demand, accelerators))
        if heap is None:
            heap = self._heaps[demand, accelerators] = self._new_heap(demand, accelerators)
        names, free, firm = self._names, self.free, self._firm
        while heap:
            evicts, liking, rank, index, was_free, was_firm, others = heap[0]
            name = names[index]
            if free[name] == was_free and firm[name] == was_firm:
                break
            if others:
                heapreplace(heap, (evicts, liking, rank, others.pop(), was_free, was_firm, others))
            else:
                heappop(heap)
            now = self._candidate(index, demand, accelerators)
            if now is not None:
                heappush(heap, now)
        return heap

    def _new_heap(self, demand: int, accelerators: tuple[str, ...]) -> list[_Candidate]:
        if self._prefers_full or not self._alike:
            self._alike = {}
            for index, name in enumerate(self._names):
                alike = (self._kinds[index], self.free[name], self._firm[name])
                self._alike.setdefault(alike, []).append(index)
        heap = list[_Candidate]()
        for (kind, free, firm), indices in self._alike.items():
            rank = self._rank(kind, free, firm, demand, accelerators)
            if rank is not None:
                heap.append((*rank, indices[0], free, firm, indices[:0:-1]))
        heapify(heap)
        return heap

    def _move_up(self) -> None:
        """Put nodes that may have become better where they belong; where they were they are found to be worse."""
        for key, heap in self._heaps.items():
            for name in self._better:
                now = self._candidate(self._index[name], *key)
                if now is not None:
                    heappush(heap, now)
        self._better.clear()

    def _candidate(self, index: int, demand: int, accelerators: tuple[str, ...]) -> _Candidate | None:
        """The node as it is now; None if it will not do."""
        name = self._names[index]
        free, firm = self.free[name], self._firm[name]
        rank = self._rank(self._kinds[index], free, firm, demand, accelerators)
        return (*rank, index, free, firm, _NOBODY) if rank is not None else None

    def _rank(self, kind: int, free: int, firm: int, demand: int, accelerators: tuple[str, ...]) -> _Rank | None:
        """Of such a node; None if it has no room or does not take such tasks."""
        accelerator, schedulable, capacity = self._every_kind[kind]
        if (free - demand) & OVERDRAWN or not schedulable or (accelerators and accelerator not in accelerators):
            return None
        liking = accelerators.index(accelerator) if accelerators else 0
        if self._prefers_full:
            return bool((firm - demand) & OVERDRAWN), liking, left_over(resources_of(free))
        return bool((firm - demand) & OVERDRAWN), liking, (_share_with(capacity, free, demand),)


@lru_cache(maxsize=65_536)
def _times(free: int, demand: int) -> int:
    """How many tasks fit in what is free; any number of those that take nothing."""
    return max(0, times(resources_of(demand), resources_of(free), TASKS_MAX))


@lru_cache(maxsize=65_536)
def _share_with(capacity: Resources, free: int, demand: int) -> float:
    """The dominant share of a node that is taken once it holds this too."""
    return (capacity - resources_of(free - demand)).dominant_share(capacity)
