"""What a cluster's scheduler remembers: its nodes and the jobs that are not over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from operator import attrgetter

from fedsched.core.choosing import Footprint, Rule, footprint_of
from fedsched.core.cluster import Node
from fedsched.core.decision import SpeedSample
from fedsched.core.ids import ClusterName, JobId, NodeName
from fedsched.core.job import Allocation, JobPhase, JobSpec, JobStatus, Placement, Trigger, members_of
from fedsched.core.record import Record
from fedsched.core.resources import NOTHING, OVERDRAWN, Resources, amount_of

STORY_MAX = 20
"""So many transitions of a job are told again when something goes wrong with it."""
IN_MOTION = frozenset({JobPhase.RESIZING, JobPhase.COMPLETING, JobPhase.PREEMPTING})
"""Phases in which a job may hold other tasks than its status says."""
_RUNNING = JobPhase.RUNNING
_order = attrgetter("order_key")


class SchedulerConfig(Record, frozen=True):
    """How a cluster's scheduler behaves."""

    cluster: ClusterName
    slot_length_s: float
    """Length of a slot, told to policies; the slots themselves come as events."""
    keep_running: bool = True
    """A running job keeps at least its minimum; False lets the policy stop it."""
    ranked: bool = False
    """The policy is a discipline: while all jobs are of fixed size it is asked for ranks, not for allocations."""
    placement: Rule = "spread"
    """How nodes are chosen for new tasks."""
    rebuild: bool = False
    """Every slot is placed anew on an empty cluster, as DL2's reference does; nothing stays where it was."""
    explain: bool = True
    """Note with every job that waits why it does; a simulation that nobody asks does without."""
    seed: int = 0
    """Of the rule `random`, and of how long retries are held back."""
    retry_first_s: float = 2.0
    """The attempt that follows a failed one begins at least half, and at most all, of this later..."""
    retry_max_s: float = 300.0
    """...doubled with each failure in a row, up to this."""


@dataclass(slots=True)
class LiveJob:
    """A job of this cluster that is not over."""

    spec: JobSpec
    status: JobStatus
    arrived_slot: int
    number: int = 0
    """Counts arrivals at this scheduler."""
    order_key: tuple[float, JobId] = field(init=False)
    """Jobs are always taken in this order."""
    target: Placement = ()
    """What the last decision wants; equals `status.placement` once carried out."""
    in_flight: Placement | None = None
    """What the order that the executor works on will leave: empty for a stop. None when nothing is in flight."""
    resize_order: tuple[int, int] = (0, 0)
    """Term and number of the newest resize that was ordered."""
    leaving: Placement = ()
    """While a stop is in flight: all that it ends, the tasks that an unfinished resize was adding among them."""
    adopting: bool = False
    """The executor is looking for the tasks of an agent before this one."""
    cancelled: bool = False
    stopping_for: JobPhase | None = None
    """Terminal phase that the ordered end leads to; None while no end is ordered."""
    speeds: dict[tuple[Allocation, str], SpeedSample] = field(default_factory=dict)
    """Newest observed speed per allocation and accelerator type, oldest first."""
    attempt_epochs: float = 0.0
    """Progress when the attempt was started."""
    slot_epochs: float = 0.0
    """Progress at the start of the slot."""
    reported_s: float = 0.0
    """When its progress was last heard of."""
    steady_since_s: float | None = None
    """Since when it runs with what it holds; None while anything about that is in flight."""
    steady_slot: int = 0
    """The slot in which that began."""
    story: list[tuple[float, int, Trigger, JobPhase, str]] = field(default_factory=list)
    """The last transitions (time, slot, trigger, phase, message), for the message of an illegal one."""
    attained: dict[str, float] = field(default_factory=dict)
    """Task-seconds received by accelerator type of the node, up to `served_since_s`."""
    served: Placement = ()
    """What `attained` counts since `served_since_s`."""
    served_since_s: float = 0.0
    served_by: dict[str, int] = field(default_factory=dict)
    """How many of its tasks are on nodes of each accelerator type."""
    booked: Placement = ()
    """What the state's books hold for it."""
    footprint: Footprint = ()
    """The same as amounts by node."""
    elastic: bool = field(init=False)
    """Whether it can run with more than one allocation."""
    worker_amount: int = field(init=False)
    """What one worker needs."""
    ps_amount: int = field(init=False)
    """What one parameter server needs."""
    coordinator_amount: int = field(init=False)

    @property
    def held(self) -> Placement:
        """Tasks that may exist on nodes now: those that run, and those that an order in flight is starting."""
        if not self.in_flight:
            return self.leaving if self.in_flight is not None else self.status.placement
        if self.in_flight is self.status.placement or self.in_flight == self.status.placement:
            return self.status.placement
        return tuple(sorted({*self.status.placement, *self.in_flight}))

    @property
    def settled(self) -> Placement:
        """Tasks that will exist once the order in flight is done."""
        return self.status.placement if self.in_flight is None else self.in_flight

    def cools_down(self, time_s: float) -> bool:
        """Whether its last change is so recent that it must stay as it is."""
        changed_s = self.status.changed_s
        return (
            self.status.phase is JobPhase.RUNNING
            and changed_s is not None
            and time_s < changed_s + self.spec.resize_cooldown_s
        )

    def __post_init__(self) -> None:
        spec = self.spec
        self.order_key = (spec.submitted_s, spec.job_id)
        self.elastic = not spec.rigid
        self.worker_amount, self.ps_amount = amount_of(spec.worker_demand), amount_of(spec.ps_demand)
        self.coordinator_amount = amount_of(spec.coordinator_demand)

    def footprint_of(self, placement: Placement) -> Footprint:
        """What these tasks take of each node that has some."""
        return footprint_of(placement, self.worker_amount, self.ps_amount, self.coordinator_amount)


@dataclass(slots=True)
class ClusterState:
    """Everything that the next decision depends on.

    Sums over jobs and lists of those that need something are kept up to date by `account`, so that an event costs what
    it changes and not what there is.
    """

    config: SchedulerConfig
    nodes: dict[NodeName, Node]
    jobs: dict[JobId, LiveJob] = field(default_factory=dict)
    """Live jobs only: a job leaves with the transaction that makes it terminal."""
    term: int = 0
    """0 until the first term is taken; nothing is done before."""
    seq: int = 0
    """Grows with each order to the executor."""
    leased: bool = False
    """Whether the cluster's lease is ours; without it nothing new is placed."""
    slot: int = -1
    slot_started_s: float = 0.0
    asked_slot: int | None = None
    """The slot that the policy is deciding; None when no question is open."""
    asked_ranks: bool = False
    """Whether the open question is about ranks only."""
    ended: list[tuple[JobId, float]] = field(default_factory=list)
    """Jobs that ended in this slot, with what they did in it as a fraction of their declared epochs."""
    finished: list[tuple[JobId, float]] = field(default_factory=list)
    """Jobs that have succeeded since the policy was last asked, with the task-seconds that each took in all."""
    arrivals: int = 0
    elastic: int = 0
    """Live jobs that can run with more than one allocation."""
    progressed: set[JobId] = field(default_factory=set)
    """Live jobs whose progress has changed since the slot began."""
    limited: set[JobId] = field(default_factory=set)
    """Live jobs with a time limit."""
    held_back: set[JobId] = field(default_factory=set)
    """Live jobs whose next attempt has to wait for its time: no policy sees them before."""
    unsettled: set[JobId] = field(default_factory=set)
    """Live jobs whose target is not what they hold."""
    in_motion: set[JobId] = field(default_factory=set)
    """Live jobs that hold something else than they will once their order in flight is done."""
    unsure: set[JobId] = field(default_factory=set)
    """Live jobs that were being resized or stopped when the agent before this one died: until they are adopted nobody
    knows what they hold, so nothing new is placed."""
    kinds: set[str] = field(default_factory=set)
    """Accelerator types of the nodes."""
    gone: set[NodeName] = field(default_factory=set)
    """Nodes that are not there, though jobs were or are on the books with them."""
    short: set[NodeName] = field(default_factory=set)
    """Nodes that offer less than tasks may take of them now."""
    free: dict[NodeName, int] = field(default_factory=dict)
    """Amount of each node's capacity less what tasks may take of it now."""
    machines: tuple[Node, ...] = ()
    """The nodes by name; the same object while they stay the same, so that what is made of it can be kept."""

    def __post_init__(self) -> None:
        self.free = {name: amount_of(node.capacity) for name, node in self.nodes.items()}
        self._know_nodes()

    def _know_nodes(self) -> None:
        self.kinds = {node.accelerator for node in self.nodes.values()}
        self.machines = tuple(self.nodes[name] for name in sorted(self.nodes))

    def ordered(self) -> list[LiveJob]:
        """Live jobs by `(submitted_s, job_id)`."""
        return sorted(self.jobs.values(), key=_order)

    def waiting(self) -> list[LiveJob]:
        """Live jobs that wait for a place, by `(submitted_s, job_id)`."""
        waiting = [job for job in self.ordered() if job.status.phase is JobPhase.DISPATCHED]
        return [job for job in waiting if job.status.retry_s is None] if self.held_back else waiting

    def next_retry_s(self) -> float | None:
        """When the first of those that are held back may begin; None if there is none."""
        if not self.held_back:
            return None
        times = [self.jobs[job_id].status.retry_s for job_id in self.held_back]
        return min((retry_s for retry_s in times if retry_s is not None), default=None)

    def pick(self, job_ids: Collection[JobId]) -> list[LiveJob]:
        """These of the live jobs, each named once, by `(submitted_s, job_id)`."""
        jobs = self.jobs
        picked = [jobs[job_id] for job_id in job_ids]
        if len(picked) > 1:
            picked.sort(key=_order)
        return picked

    def account(self, job: LiveJob, time_s: float) -> None:
        """Bring all sums and lists in line with what the job holds, wants and waits for now."""
        status, in_flight, target = job.status, job.in_flight, job.target
        placement = status.placement
        if placement is not job.served:
            self._accrue(job, time_s)
        if not self.config.rebuild:
            held = placement if in_flight is None else job.held
            if held is not job.booked:
                self._book(job, held)
            if in_flight is not None and in_flight is not held and in_flight != held:
                self.in_motion.add(status.job_id)
            elif self.in_motion:
                self.in_motion.discard(status.job_id)
        if target is not placement and target != placement:
            self.unsettled.add(status.job_id)
        elif self.unsettled:
            self.unsettled.discard(status.job_id)
        if job.adopting and status.phase in IN_MOTION:
            self.unsure.add(status.job_id)
        elif self.unsure:
            self.unsure.discard(status.job_id)
        if status.phase is not _RUNNING or in_flight is not None or job.adopting:
            job.steady_since_s = None
        elif job.steady_since_s is None:
            job.steady_since_s, job.steady_slot = time_s, self.slot

    def dismiss(self, job: LiveJob, time_s: float) -> None:
        """The job is over: nothing of it counts any more."""
        if job.booked:
            self._book(job, ())
        job_id = job.spec.job_id
        del self.jobs[job_id]
        self.elastic -= job.elastic
        for some in (self.progressed, self.limited, self.held_back, self.unsettled, self.in_motion, self.unsure):
            if some:
                some.discard(job_id)

    def attained(self, job: LiveJob, time_s: float) -> dict[str, float]:
        """Task-seconds that the job has received by accelerator type of the node."""
        if not job.served:
            return job.attained
        result = dict(job.attained)
        for kind, tasks in job.served_by.items():
            result[kind] = result.get(kind, 0.0) + tasks * (time_s - job.served_since_s)
        return result

    def free_once_settled(self) -> dict[NodeName, int]:
        """Amounts of capacity less what tasks will take once all orders in flight are done."""
        result = dict(self.free)
        for job in self.pick(self.in_motion) if self.in_motion else ():
            staying = set(job.settled)
            for name, amount in job.footprint_of(tuple(entry for entry in job.held if entry not in staying)):
                if name in result:
                    result[name] += amount
        return result

    def change_node(self, node: Node) -> None:
        """A node joined, or offers something else than it did."""
        before = self.nodes.get(node.name)
        self.nodes[node.name] = node
        self.gone.discard(node.name)
        self._know_nodes()
        capacity = amount_of(node.capacity)
        if before is None:
            booked = self.count(lambda job: job.booked).get(node.name, NOTHING)
            self._set_free(node.name, capacity - amount_of(booked))
        else:
            self._set_free(node.name, self.free[node.name] + capacity - amount_of(before.capacity))

    def lose_node(self, name: NodeName, time_s: float) -> None:
        """A node is gone; jobs are still on the books with what they held there."""
        if self.nodes.pop(name, None) is None:
            return
        del self.free[name]
        self.short.discard(name)
        self.gone.add(name)
        self._know_nodes()
        for job in self.jobs.values():
            if any(entry.node == name for entry in job.served):
                self._accrue(job, time_s)

    def count(self, tasks: Callable[[LiveJob], Placement]) -> dict[NodeName, Resources]:
        """What these tasks of all jobs take of each node that has some, counted anew."""
        result: dict[NodeName, Resources] = {}
        for job in self.jobs.values():
            for entry in tasks(job):
                result[entry.node] = result.get(entry.node, NOTHING) + job.spec.demand(entry.role)
        return result

    def settled_on(self, node: NodeName) -> Resources:
        """What tasks will take of a node once all orders in flight are done."""
        return self.count(lambda job: job.settled).get(node, NOTHING)

    def usage(self) -> Resources:
        """What tasks may take of the whole cluster now."""
        result = NOTHING
        for job in self.jobs.values():
            for entry in job.held:
                result = result + job.spec.demand(entry.role)
        return result

    def _accrue(self, job: LiveJob, time_s: float) -> None:
        if job.served:
            job.attained = self.attained(job, time_s)
        served = job.served = job.status.placement
        job.served_since_s = time_s
        members = members_of(served)
        if len(self.kinds) == 1 and not self.gone:
            job.served_by = dict.fromkeys(self.kinds, len(members))
        else:
            here = [self.nodes[entry.node].accelerator for entry in members if entry.node in self.nodes]
            job.served_by = dict(Counter(here))

    def _book(self, job: LiveJob, held: Placement) -> None:
        free = self.free
        for name, amount in job.footprint:
            if name in free:
                self._set_free(name, free[name] + amount)
        job.booked, job.footprint = held, job.footprint_of(held) if held else ()
        for name, amount in job.footprint:
            if name in free:
                self._set_free(name, free[name] - amount)
            else:
                self.gone.add(name)  # it was lost before this agent came

    def _set_free(self, name: NodeName, amount: int) -> None:
        self.free[name] = amount
        if amount & OVERDRAWN:
            self.short.add(name)
        elif self.short:
            self.short.discard(name)
