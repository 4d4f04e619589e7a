"""Chooses the cluster of a job: filter, score, select. A dry run, the dispatch and `explain` ask the same function."""

from __future__ import annotations

from collections.abc import Iterable

from fedsched.core.cluster import ClusterRecord, Node
from fedsched.core.ids import ClusterName
from fedsched.core.job import Allocation, JobSpec, Reason
from fedsched.core.packing import pack, pack_and_one
from fedsched.core.record import Record
from fedsched.core.resources import Resources, total

_NOTHING = Resources()


class CandidateCluster(Record, frozen=True):
    """A cluster as the controller knows it at the moment of a choice."""

    name: ClusterName
    record: ClusterRecord | None
    """None: it has been there once, but nothing is known of it now."""
    reachable: bool = True
    """False: `record` is the last one known."""
    promised: Resources = Resources()
    """Minimum demand of the jobs that were dispatched there and hold nothing yet."""
    queued: int = 0
    """How many jobs those are."""


class Verdict(Record, frozen=True):
    """What one cluster is worth to one job. `reason` NONE: it will do, now or later."""

    cluster: ClusterName
    reason: Reason
    message: str
    fits_now: bool = False
    """The job's minimum is free there now."""
    share: float = 0.0
    """Dominant share of the cluster that is used or promised; above 1 where more jobs wait than fit."""
    queued: int = 0
    free: Resources = Resources()


class Routing(Record, frozen=True):
    """The choice, or the dominant reason against one. Verdicts: best first, then those that will not do, by name."""

    choice: ClusterName | None
    reason: Reason
    message: str
    verdicts: tuple[Verdict, ...]


IMPOSSIBLE = frozenset({Reason.NO_MATCHING_CLUSTER, Reason.NO_MATCHING_ACCELERATOR, Reason.EXCEEDS_LARGEST_CLUSTER})
"""Waiting does not help against these."""

_TIERS = (
    Reason.NO_MATCHING_CLUSTER,
    Reason.NO_MATCHING_ACCELERATOR,
    Reason.EXCEEDS_LARGEST_CLUSTER,
    Reason.CLUSTER_CORDONED,
    Reason.CLUSTER_UNREACHABLE,
)
"""From hopeless to nearly there: the job waits for the cluster that came furthest."""


def route(spec: JobSpec, clusters: Iterable[CandidateCluster]) -> Routing:
    """Choose a cluster for the job's minimum.

    A cluster that is full still does: its agent decides who gets what when, and needs to see the job for that. One
    with room for the minimum now is better, then the job's own preference, then the least used one; equal ones are
    taken by name.
    """
    verdicts = [_judge(spec, state) for state in sorted(clusters, key=lambda state: state.name)]
    able = sorted((v for v in verdicts if v.reason is Reason.NONE), key=lambda v: _rank(spec, v))
    unable = [v for v in verdicts if v.reason is not Reason.NONE]
    if able:
        return Routing(able[0].cluster, Reason.NONE, able[0].message, (*able, *unable))
    if not unable:
        return Routing(None, Reason.NO_MATCHING_CLUSTER, "no cluster has joined the federation yet", ())
    reason = max((v.reason for v in unable), key=_TIERS.index)
    return Routing(None, reason, _why_not(reason, spec, unable), tuple(unable))


def impossible(routing: Routing) -> bool:
    """Whether no cluster that is known could ever hold the job."""
    return bool(routing.verdicts) and all(verdict.reason in IMPOSSIBLE for verdict in routing.verdicts)


def largest(clusters: Iterable[CandidateCluster]) -> CandidateCluster:
    """The largest cluster whose nodes are known: by GPUs, then processors, then memory."""
    known = [(state.record, state) for state in clusters if state.record is not None]
    return max(known, key=lambda item: (*_size(item[0].capacity), item[0].name))[1]


def fits(nodes: Iterable[Node], spec: JobSpec, allocation: Allocation, coordinator: Resources = _NOTHING) -> bool:
    """Whether all tasks of `allocation`, and a coordinator, find a place on these nodes when they are empty."""
    usable: list[Resources] = []
    others: list[Resources] = []
    for node in nodes:
        would_do = not spec.accelerators or node.accelerator in spec.accelerators
        (usable if would_do else others).append(node.capacity)
    if coordinator == _NOTHING or any(coordinator.fits_in(room) for room in others):
        return pack(usable, spec.worker_demand, spec.ps_demand, allocation) is not None
    return pack_and_one(usable, coordinator, spec.worker_demand, spec.ps_demand, allocation) is not None


def least_of(spec: JobSpec, record: ClusterRecord | None) -> Resources:
    """What the job takes of this cluster at the least, its coordinator included."""
    least = spec.demand_of(spec.minimum)
    return least if record is None else least + record.coordinator


def _judge(spec: JobSpec, state: CandidateCluster) -> Verdict:
    def no(reason: Reason, message: str) -> Verdict:
        return Verdict(state.name, reason, message, queued=state.queued)

    if spec.clusters and state.name not in spec.clusters:
        return no(Reason.NO_MATCHING_CLUSTER, f"the job asks for {', '.join(spec.clusters)}")
    record = state.record
    if record is None:
        return no(Reason.CLUSTER_UNREACHABLE, "its agent is not connected")
    if spec.accelerators and not any(node.accelerator in spec.accelerators for node in record.nodes):
        return no(Reason.NO_MATCHING_ACCELERATOR, f"has no {' or '.join(spec.accelerators)}")
    if not fits(record.nodes, spec, spec.minimum, record.coordinator):
        return no(Reason.EXCEEDS_LARGEST_CLUSTER, _shortfall(record, spec))
    if not state.reachable:
        return no(Reason.CLUSTER_UNREACHABLE, "its agent is not connected")
    open_nodes = [node for node in record.nodes if node.schedulable]
    if not fits(open_nodes, spec, spec.minimum, record.coordinator):
        closed = len(record.nodes) - len(open_nodes)
        return no(Reason.CLUSTER_CORDONED, f"{closed} of {len(record.nodes)} nodes are cordoned")
    taken = record.usage + state.promised
    capacity = total([node.capacity for node in open_nodes])
    fits_now = least_of(spec, record).fits_in(capacity - taken)
    free = _at_least_nothing(capacity - taken)
    message = "has room for the minimum now" if fits_now else f"must wait for capacity: {free} free"
    return Verdict(state.name, Reason.NONE, message, fits_now, taken.dominant_share(capacity), state.queued, free)


def _rank(spec: JobSpec, verdict: Verdict) -> tuple[bool, int, float, int, str]:
    preference = spec.clusters.index(verdict.cluster) if spec.clusters and spec.clusters_ranked else 0
    return (not verdict.fits_now, preference, verdict.share, verdict.queued, verdict.cluster)


def _shortfall(record: ClusterRecord, spec: JobSpec) -> str:
    nodes = [node for node in record.nodes if not spec.accelerators or node.accelerator in spec.accelerators]
    held = total([node.capacity for node in nodes])
    wanted = least_of(spec, record)
    if wanted.fits_in(held):
        largest = max((node.capacity for node in nodes), key=_size)
        return f"{spec.minimum} of the job do not fit on its nodes; the largest has {largest}"
    missing = _at_least_nothing(wanted - held)
    return f"holds {held} when empty; the job's minimum needs {missing} more"


def _at_least_nothing(amount: Resources) -> Resources:
    return Resources(max(0, amount.cpu_milli), max(0, amount.memory_mib), max(0, amount.gpu_milli))


def _size(amount: Resources) -> tuple[int, int, int]:
    return (amount.gpu_milli, amount.cpu_milli, amount.memory_mib)


def _why_not(reason: Reason, spec: JobSpec, verdicts: list[Verdict]) -> str:
    dominant = [verdict for verdict in verdicts if verdict.reason is reason]
    if reason is Reason.NO_MATCHING_CLUSTER:
        known = ", ".join(verdict.cluster for verdict in verdicts)
        return f"the job asks for cluster {' or '.join(spec.clusters)}; known are {known}"
    return "; ".join(f"{verdict.cluster} {verdict.message}" for verdict in dominant)
