"""The budget of DL2's reference simulator: every slot is placed anew on an empty cluster, least loaded node first.

Its rules, on which equality with that simulator rests:

* nothing stays where it was; only pinned jobs do;
* a request goes, whole, to the node with the least load, the lowest index among equals. Load is the sum of CPUs and
  GPUs in use, a GPU counting for as many CPUs as the cluster has for each of its GPUs;
* only that one node is tried. If it has no room the slot is over for everybody, even where other nodes have room.

An episode of the reference makes some 240,000 grants, so a grant must cost about a microsecond. Hence two encodings: a
node's load and index are one integer in a heap, and an amount of resources is one integer of three fields whose top
bits are never used: a subtraction that sets one of them has taken more than there was.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from heapq import heapify, heapreplace
from math import gcd

from fedsched.core.cluster import Node, kept_with_nodes
from fedsched.core.decision import JobView, Observation
from fedsched.core.ids import JobId, TaskName
from fedsched.core.job import Allocation, Placement, Role, TaskPlacement, allocation_of, task_name
from fedsched.core.resources import OVERDRAWN, Resources, amount_of, resources_of, total

INDEX_BITS = 24
"""Of a heap entry: the node's index; above them stands its load."""
INDEX_MASK = (1 << INDEX_BITS) - 1


class _Claim:
    """What one job may still get, has got, and takes per grant."""

    __slots__ = ("barred", "bundle", "bundle_load", "bundle_nodes", "bundles_left", "ps_nodes", "view", "worker_nodes")

    def __init__(self, view: JobView, bundle: int, bundle_load: int, barred: frozenset[int]) -> None:
        self.view = view
        self.bundle = bundle
        """Amount of one worker and one parameter server."""
        self.bundle_load = bundle_load
        self.barred = barred
        """Indices of nodes with the wrong accelerator."""
        self.bundle_nodes: list[int] = []
        """Where the bundles went; the two lists after it: where single tasks went."""
        self.worker_nodes: list[int] = []
        self.ps_nodes: list[int] = []
        self.bundles_left = self._bundles_left()

    def _bundles_left(self) -> int:
        return min(self.view.workers.maximum - self.workers, self.view.ps.maximum - self.ps)

    @property
    def workers(self) -> int:
        """Granted so far."""
        return len(self.bundle_nodes) + len(self.worker_nodes)

    @property
    def ps(self) -> int:
        """Granted so far."""
        return len(self.bundle_nodes) + len(self.ps_nodes)

    @property
    def is_enough(self) -> bool:
        """Whether the job can train with what it was granted."""
        workers, least = self.workers, self.view.workers.minimum
        return workers > 0 and workers >= least and self.ps >= self.view.ps.minimum

    def add(self, node: int, workers: int, ps: int) -> None:
        """Note a grant."""
        self.worker_nodes += [node] * workers
        self.ps_nodes += [node] * ps
        self.bundles_left = self._bundles_left()


class EmptyCluster:
    """What of a slot depends on the nodes alone."""

    def __init__(self, nodes: tuple[Node, ...]) -> None:
        self.nodes = tuple(node for node in nodes if node.schedulable)
        """Those that are filled, in the order of their indices."""
        self.capacity = total([node.capacity for node in self.nodes])
        cpu, gpu = self.capacity.cpu_milli, self.capacity.gpu_milli
        common = gcd(cpu, gpu) or 1
        self._cpu_weight, self._gpu_weight = (gpu // common, cpu // common) if gpu else (1, 0)
        self.free = [amount_of(node.capacity) for node in self.nodes]
        self.names = [node.name for node in self.nodes]
        self.loads = list(range(len(self.nodes)))
        """A heap: nobody has any load, so the indices are in order."""

    def load(self, demand: Resources) -> int:
        """What the demand adds to a heap entry."""
        return (demand.cpu_milli * self._cpu_weight + demand.gpu_milli * self._gpu_weight) << INDEX_BITS


_empty_cluster = kept_with_nodes(EmptyCluster)


class Rebuilding:
    """The `Budget` of a slot under the reference's rules; see the module.

    It departs from `Budget` in one point: a job's first grant need not reach its minimum, because the reference's
    Optimus hands out single tasks. Jobs that end below it hold what they were granted, but are in no allocation.

    Args:
        observation: nodes and jobs as they are.
    """

    def __init__(self, observation: Observation) -> None:
        self._empty = _empty_cluster(observation.nodes)
        self._free = self._empty.free.copy()
        self._loads = self._empty.loads.copy()
        self._closed = not self.nodes
        self._pinned = {view.job_id: view for view in observation.jobs if view.pinned}
        for view in self._pinned.values():
            self._hold(view)
        if self._pinned:
            heapify(self._loads)
        self._claims = self._claims_of(observation)

    @property
    def nodes(self) -> tuple[Node, ...]:
        """Those that are filled, in the order of their indices."""
        return self._empty.nodes

    @property
    def capacity(self) -> Resources:
        """What these nodes hold together."""
        return self._empty.capacity

    def _hold(self, view: JobView) -> None:
        """Count a pinned job's tasks where they run."""
        index_of = {node.name: index for index, node in enumerate(self.nodes)}
        for entry in view.placement:
            index = index_of.get(entry.node)
            if index is not None:
                demand = view.worker_demand if entry.role is Role.WORKER else view.ps_demand
                self._free[index] -= amount_of(demand)
                self._loads[index] += self._empty.load(demand)

    def _claims_of(self, observation: Observation) -> dict[JobId, _Claim]:
        """An empty claim per job. Most jobs are alike, so what depends on their demands is computed once for each."""
        sizes: dict[tuple[Resources, Resources], tuple[int, int]] = {}
        barred: dict[tuple[str, ...], frozenset[int]] = {(): frozenset()}
        claims = {}
        for view in observation.jobs:
            if view.pinned:
                continue
            demands = (view.worker_demand, view.ps_demand)
            if demands not in sizes:
                bundle = view.worker_demand + view.ps_demand
                sizes[demands] = (amount_of(bundle), self._empty.load(bundle))
            if view.accelerators not in barred:
                barred[view.accelerators] = frozenset(
                    index for index, node in enumerate(self.nodes) if node.accelerator not in view.accelerators
                )
            claims[view.job_id] = _Claim(view, *sizes[demands], barred[view.accelerators])
        return claims

    def fill(self, order: Iterable[JobId]) -> None:
        """Grant one bundle (a worker and a parameter server) to each of these jobs in turn, until one has no room.

        A job may come again and again; where it is at its maximum it is passed over. The order may be lazy: nothing is
        taken from it after the slot is over. The same as calling `grant` with 1 and 1, at a third of its price.

        Raises:
            KeyError: a job is pinned or none of the observation's.
        """
        free, loads = self._free, self._loads
        if self._closed:
            return
        for claim in map(self._claims.__getitem__, order):
            if claim.bundles_left <= 0:
                continue
            entry = loads[0]
            node = entry & INDEX_MASK
            left = free[node] - claim.bundle
            if left & OVERDRAWN or node in claim.barred:
                self._closed = True
                return
            free[node] = left
            heapreplace(loads, entry + claim.bundle_load)
            claim.bundles_left -= 1
            claim.bundle_nodes.append(node)

    def grant(self, job_id: JobId, workers: int = 0, ps: int = 0, accelerator: str = "") -> bool:
        """Give the job this many more tasks, all on the least loaded node.

        False changes nothing, but if the reason is that this node has no room, or another accelerator, then every
        later grant of the slot is refused too.
        """
        claim = self._allowed(job_id, workers, ps)
        if claim is None or self._closed:
            return False
        entry = self._loads[0]
        index = entry & INDEX_MASK
        demand = claim.view.worker_demand * workers + claim.view.ps_demand * ps
        named = not accelerator or self.nodes[index].accelerator == accelerator
        if not named or not self._take(claim, index, amount_of(demand)):
            self._closed = True
            return False
        heapreplace(self._loads, entry + self._empty.load(demand))
        claim.add(index, workers, ps)
        return True

    def grant_bundle_on(self, index: int, job_id: JobId) -> bool:
        """Give the job one worker and one parameter server on this node of `nodes`; False changes nothing.

        Loads are not kept up: a policy either chooses nodes itself or leaves them to `grant` and `fill`.
        """
        claim = self._allowed(job_id, 1, 1)
        if claim is None or not self._take(claim, index, claim.bundle):
            return False
        claim.bundles_left -= 1
        claim.bundle_nodes.append(index)
        return True

    def _allowed(self, job_id: JobId, workers: int, ps: int) -> _Claim | None:
        """The job's claim if it may have so many more tasks."""
        claim = self._claims.get(job_id)
        if claim is None or workers < 0 or ps < 0 or workers + ps == 0:
            return None
        view = claim.view
        if claim.workers + workers > view.workers.maximum or claim.ps + ps > view.ps.maximum:
            return None
        return claim

    def _take(self, claim: _Claim, index: int, amount: int) -> bool:
        left = self._free[index] - amount
        if left & OVERDRAWN or index in claim.barred:
            return False
        self._free[index] = left
        return True

    def room_key(self, index: int) -> int:
        """A number that is the same for nodes of equal room."""
        return self._free[index]

    def room(self, index: int) -> Resources:
        """What is free on this node of `nodes`; nothing negative where pinned tasks hold more than there is."""
        left = self._free[index]
        return Resources() if left & OVERDRAWN else resources_of(left)

    def free(self) -> Resources:
        """What is not granted, over all nodes, whether or not the slot is over."""
        return total([self.room(index) for index in range(len(self.nodes))])

    def would_fit(self, job_id: JobId) -> bool:
        """Whether the job's minimum could still be granted; grants nothing."""
        claim = self._claims.get(job_id)
        if claim is None or self._closed or claim.workers or claim.ps:
            return False
        index = self._loads[0] & INDEX_MASK
        least = claim.view.minimum
        demand = claim.view.worker_demand * least.workers + claim.view.ps_demand * least.ps
        return not (self._free[index] - amount_of(demand)) & OVERDRAWN and index not in claim.barred

    def allocation(self, job_id: JobId) -> Allocation:
        """What the job has been granted so far; nothing for an unknown job."""
        claim = self._claims.get(job_id)
        if claim is not None:
            return Allocation(claim.workers, claim.ps)
        pinned = self._pinned.get(job_id)
        return allocation_of(pinned.placement) if pinned is not None else Allocation()

    def allocations(self) -> tuple[tuple[JobId, Allocation], ...]:
        """All grants that reach the job's minimum, sorted by job id."""
        held = [(job_id, allocation_of(view.placement)) for job_id, view in self._pinned.items() if view.placement]
        held += [
            (job_id, Allocation(claim.workers, claim.ps)) for job_id, claim in self._claims.items() if claim.is_enough
        ]
        return tuple(sorted(held, key=lambda entry: entry[0]))

    def placements(self) -> tuple[tuple[JobId, Placement], ...]:
        """Of all jobs that hold their minimum, sorted by job id."""
        enough = [job_id for job_id, claim in self._claims.items() if claim.is_enough]
        return tuple((job_id, self.placement(job_id)) for job_id in sorted([*self._pinned, *enough]))

    def placement(self, job_id: JobId) -> Placement:
        """Where the granted tasks go, sorted by task name; a pinned job's stay where they are.

        Nothing for a job that was granted less than its minimum.
        """
        pinned = self._pinned.get(job_id)
        if pinned is not None:
            return pinned.placement
        claim = self._claims[job_id]
        if not claim.is_enough:
            return ()
        names = self._empty.names
        where = claim.bundle_nodes + claim.worker_nodes + claim.bundle_nodes + claim.ps_nodes
        return tuple([TaskPlacement(task, names[where[at]]) for task, at in _tasks(claim.workers, claim.ps)])


@lru_cache(maxsize=4096)
def _tasks(workers: int, ps: int) -> tuple[tuple[TaskName, int], ...]:
    """All tasks of an allocation, sorted by name, each with its number in the order workers first, then servers."""
    names = [task_name(Role.WORKER, index) for index in range(workers)]
    names += [task_name(Role.PS, index) for index in range(ps)]
    return tuple(sorted((name, number) for number, name in enumerate(names)))
