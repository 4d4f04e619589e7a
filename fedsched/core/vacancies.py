"""Knows what is free on each node while a slot's budget is spent, and which node is the best for the next task."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache
from heapq import heappop, heappush
from random import Random

from fedsched.core.choosing import Rule
from fedsched.core.cluster import Node, kept_with_nodes
from fedsched.core.ids import NodeName
from fedsched.core.job import TASKS_MAX, TaskPlacement
from fedsched.core.packing import times
from fedsched.core.resources import OVERDRAWN, Resources, amount_of, resources_of

_State = tuple[int, int, int]
"""The number of a node's kind, what is free there, and what of that is firm: nodes of one state are equally good."""
_Rank = tuple[int, float]
"""How little the accelerator is liked, all that push no running task away before all that do; and what the rule says.
The lowest is the best."""


class _Heap:
    """Nodes with room for one kind of task, by how good they are for it."""

    __slots__ = ("accelerators", "demand", "nodes", "order", "ranks")

    def __init__(self, demand: int, accelerators: tuple[str, ...]) -> None:
        self.demand = demand
        self.accelerators = accelerators
        """That will do, best first; empty: all."""
        self.ranks: dict[_State, _Rank | None] = {}
        """By the states that were met so far; None: such a node will not do."""
        self.nodes: dict[_Rank, list[int]] = {}
        """Indices of nodes by the rank that they had when it was looked at, a heap for each."""
        self.order: list[_Rank] = []
        """Those ranks, as a heap."""

    def add(self, index: int, rank: _Rank) -> None:
        """A node is of this rank now."""
        nodes = self.nodes.get(rank)
        if nodes is None:
            self.nodes[rank] = [index]
            heappush(self.order, rank)
        else:
            heappush(nodes, index)


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

    For every demand that a node was looked for, nodes are kept by how good they are for it. One may be worse by now
    than is noted, never better, so only the best have to be looked at again. By the rule `spread` a node only becomes
    worse as it fills; so the thousands of grants that confirm what runs cost nothing here. Amounts are integers; see
    `amount_of`.

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
        self._heaps: dict[tuple[int, tuple[str, ...]], _Heap] = {}
        """By demand and accelerators."""
        self._better: dict[NodeName, None] = {}
        """Nodes that may be better than is noted."""
        self._alike: dict[_State, list[int]] = {}
        """Nodes by their state when a heap was made; none of them is better by now, or it is empty."""

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
        heap = self._heap(demand, accelerators)
        if count == 1:
            return bool(heap.order)
        names, free, all_nodes = self._names, self.free, heap.nodes.values()
        for nodes in all_nodes:
            for index in nodes:
                count -= _times(free[names[index]], demand)
                if count <= 0:
                    return True
        for nodes in all_nodes:  # the next look need not meet again those that are full
            nodes[:] = sorted([index for index in nodes if self.fits(names[index], demand)])
        return count <= 0

    def choose(self, demand: int, accelerators: tuple[str, ...], own: Collection[NodeName] = ()) -> NodeName | None:
        """A node with room by the rule, before any that would push a running task from its place.

        Args:
            own: nodes that the job is on already; they come before others that are equal but for the rule's rank.
        """
        if self._rule == "random":
            return self._choose_any(demand, accelerators)
        heap = self._heap(demand, accelerators)
        if not heap.order:
            return None
        best = (*heap.order[0], heap.nodes[heap.order[0]][0])
        if own:
            ranked = [(self._rank_now(heap, name), self._index[name]) for name in own if name in self._index]
            mine = [(*rank, index) for rank, index in ranked if rank is not None and rank[0] <= best[0]]
            best = min(mine, default=best)
        return self._names[best[2]]

    def _choose_any(self, demand: int, accelerators: tuple[str, ...]) -> NodeName | None:
        heap = _Heap(demand, accelerators)
        ranked = [(self._rank_now(heap, name), name) for name in self._names]
        drawn = [(rank[0], self._chance.random(), name) for rank, name in ranked if rank is not None]
        return min(drawn)[2] if drawn else None

    def _heap(self, demand: int, accelerators: tuple[str, ...]) -> _Heap:
        """Nodes with room for the task, the best of all first; of the others some may have become worse."""
        if self._better:
            self._move_up()
        heap = self._heaps.get((demand, accelerators))
        if heap is None:
            heap = self._heaps[demand, accelerators] = self._new_heap(demand, accelerators)
        ranks, order, names = heap.ranks, heap.order, self._names
        kinds, free, firm = self._kinds, self.free, self._firm
        while order:
            best = order[0]
            nodes = heap.nodes[best]
            while nodes:  # those that have become worse move on, until one is still what it was
                index = nodes[0]
                name = names[index]
                state = (kinds[index], free[name], firm[name])
                rank = ranks[state] if state in ranks else self._rank(heap, state)
                if rank == best:
                    return heap
                heappop(nodes)
                if rank is not None:
                    heap.add(index, rank)
            del heap.nodes[heappop(order)]
        return heap

    def _new_heap(self, demand: int, accelerators: tuple[str, ...]) -> _Heap:
        heap = _Heap(demand, accelerators)
        if self._prefers_full or not self._alike:
            self._alike = {}
            for index, name in enumerate(self._names):
                state = (self._kinds[index], self.free[name], self._firm[name])
                self._alike.setdefault(state, []).append(index)
        for state, indices in self._alike.items():
            rank = self._rank(heap, state)
            if rank is not None:
                heap.nodes[rank] = sorted([*heap.nodes.get(rank, ()), *indices])
        heap.order = sorted(heap.nodes)
        return heap

    def _move_up(self) -> None:
        """Put nodes that may have become better where they belong; where they were they are found to be worse."""
        for heap in self._heaps.values():
            for name in self._better:
                rank = self._rank_now(heap, name)
                if rank is not None:
                    heap.add(self._index[name], rank)
        self._better.clear()

    def _rank_now(self, heap: _Heap, name: NodeName) -> _Rank | None:
        return self._rank(heap, (self._kinds[self._index[name]], self.free[name], self._firm[name]))

    def _rank(self, heap: _Heap, state: _State) -> _Rank | None:
        """Of nodes in a state; None if they have no room or do not take such tasks."""
        ranks = heap.ranks
        if state in ranks:
            return ranks[state]
        rank = ranks[state] = self._ranked(heap.demand, heap.accelerators, *state)
        return rank

    def _ranked(self, demand: int, accelerators: tuple[str, ...], kind: int, free: int, firm: int) -> _Rank | None:
        accelerator, schedulable, capacity = self._every_kind[kind]
        if (free - demand) & OVERDRAWN or not schedulable or (accelerators and accelerator not in accelerators):
            return None
        liking = accelerators.index(accelerator) if accelerators else 0
        if (firm - demand) & OVERDRAWN:
            liking += len(accelerators) + 1
        if self._prefers_full:
            return liking, free  # the less of it the scarcer first; see `amount_of`
        return liking, _share_with(capacity, free, demand)


@lru_cache(maxsize=65_536)
def _share_with(capacity: Resources, free: int, demand: int) -> float:
    """The dominant share of a node that is taken once it holds this too."""
    return (capacity - resources_of(free - demand)).dominant_share(capacity)


@lru_cache(maxsize=65_536)
def _times(free: int, demand: int) -> int:
    """How many tasks fit in what is free; any number of those that take nothing."""
    return max(0, times(resources_of(demand), resources_of(free), TASKS_MAX))
