"""One cluster whose resources are counted but not placed: the slot rhythm of the world at a tenth of its price.

For training only. Policies see the same observations and spend a budget with the same rules; what is left out is nodes,
and with them fragments, faults and what scaling costs. On a cluster of one node the world tells the same story, job by
job and reward by reward (a test compares them); claims are made in the world.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache

from fedsched.core.cluster import Node
from fedsched.core.commands import RewardSlot
from fedsched.core.decision import Decision, JobView, Observation, Policy, SpeedSample
from fedsched.core.ids import JobId, NodeName
from fedsched.core.job import Allocation, Placement, Role, TaskPlacement, task_name
from fedsched.core.resources import Resources
from fedsched.errors import InvalidInput
from fedsched.sim.ports import Setting, SimulatedJob, TrueSpeeds

POOL = NodeName("pool")


class FluidBudget:
    """The `Budget` of a slot where only sums count."""

    def __init__(self, observation: Observation) -> None:
        self._views = {view.job_id: view for view in observation.jobs}
        self._left = observation.capacity
        self._granted: dict[JobId, Allocation] = {}

    def grant(self, job_id: JobId, workers: int = 0, ps: int = 0, accelerator: str = "") -> bool:
        """As in `Budget`."""
        view = self._views.get(job_id)
        if view is None or workers < 0 or ps < 0 or workers + ps == 0:
            return False
        have = self.allocation(job_id)
        after = Allocation(have.workers + workers, have.ps + ps)
        if not view.minimum.workers <= after.workers <= view.workers.maximum or after.ps not in view.ps:
            return False
        demand = view.worker_demand * workers + view.ps_demand * ps
        if not demand.fits_in(self._left):
            return False
        self._left = self._left - demand
        self._granted[job_id] = after
        return True

    def allocation(self, job_id: JobId) -> Allocation:
        """As in `Budget`."""
        return self._granted.get(job_id, Allocation())

    def allocations(self) -> tuple[tuple[JobId, Allocation], ...]:
        """As in `Budget`."""
        return tuple(sorted(self._granted.items()))


@lru_cache(maxsize=65536)
def _placement(allocation: Allocation) -> Placement:
    """Tasks of an allocation, all on the one node."""
    tasks = [task_name(Role.WORKER, index) for index in range(allocation.workers)]
    tasks += [task_name(Role.PS, index) for index in range(allocation.ps)]
    return tuple(TaskPlacement(task, POOL) for task in sorted(tasks))


def _refuse_too_large(job: SimulatedJob, capacity: Resources) -> None:
    spec = job.spec
    least = spec.demand_of(spec.minimum)
    if not least.fits_in(capacity):
        raise InvalidInput(
            f"job {spec.job_id} ({spec.job_type}) needs {least} at least; a cluster to train on has {capacity}",
            "train on larger clusters (--sizes), or on smaller jobs",
        )


class _Job:
    """A live job."""

    __slots__ = ("allocation", "arrived_slot", "attained_s", "done", "job", "shown", "since", "speeds")

    def __init__(self, job: SimulatedJob, slot: int, shown: str) -> None:
        self.job = job
        self.arrived_slot = slot
        self.shown = shown
        self.done = 0.0
        self.allocation = Allocation()
        self.since = -1
        """Slot in which it got its present allocation."""
        self.attained_s = 0.0
        self.speeds: dict[Allocation, SpeedSample] = {}

    def view(self, slot: int) -> JobView:
        spec = self.job.spec
        return JobView(
            spec.job_id,
            self.shown,
            spec.workers,
            spec.ps,
            spec.worker_demand,
            spec.ps_demand,
            spec.epochs,
            self.done,
            spec.submitted_s,
            slot - self.arrived_slot,
            spec.priority,
            _placement(self.allocation),
            attained_s=self.attained_s,
            attained_by=(("", self.attained_s),) if self.attained_s else (),
            expected_s=spec.expected_s,
            deadline_s=spec.deadline_s,
            speeds=tuple(self.speeds.values()),
        )


class Fluid:
    """A cluster from its first job to the end of its last.

    Args:
        capacity: of the whole cluster.
        jobs: in order of arrival.
        speeds: how fast they really train.
        slot_length_s: time between decisions.
        shown: the type that policies are told, by job; where it is not named, the true one.

    Raises:
        InvalidInput: a job would not fit were the cluster empty, so nobody would ever see the end of it.
    """

    def __init__(
        self,
        capacity: Resources,
        jobs: Iterable[SimulatedJob],
        speeds: TrueSpeeds,
        slot_length_s: float,
        *,
        shown: Mapping[JobId, str] | None = None,
    ) -> None:
        self._nodes = (Node(POOL, capacity),)
        self._coming = list(jobs)[::-1]
        for job in self._coming:
            _refuse_too_large(job, capacity)
        self._speeds = speeds
        self._length_s = slot_length_s
        self._shown = shown or {}
        self._live: dict[JobId, _Job] = {}
        self.slot = -1
        self.jct_s: dict[JobId, float] = {}
        """Of the jobs that are over."""

    @property
    def over(self) -> bool:
        """Whether every job has ended."""
        return not self._live and not self._coming

    def observe(self) -> Observation:
        """Begin the next slot in which there is a job, and look at it."""
        before = max(0, self.slot)  # Jobs come while the slot before still counts.
        self.slot += 1
        if not self._live:
            self.slot = max(self.slot, math.ceil(self._coming[-1].spec.submitted_s / self._length_s))
        now_s = self.slot * self._length_s
        while self._coming and self._coming[-1].spec.submitted_s <= now_s:
            job = self._coming.pop()
            job_id = job.spec.job_id
            self._live[job_id] = _Job(job, before, self._shown.get(job_id, job.spec.job_type))
        views = tuple(job.view(self.slot) for job in self._live.values())
        return Observation(self.slot, self._length_s, self._nodes, views, now_s)

    def live_through(self, decision: Decision) -> RewardSlot:
        """Give the jobs what was decided, and let the slot pass."""
        given = dict(decision.allocations)
        progress: list[tuple[JobId, float]] = []
        for job_id, job in list(self._live.items()):
            allocation = given.get(job_id, Allocation())
            if allocation != job.allocation:
                job.allocation, job.since = allocation, self.slot
            if allocation:
                progress.append((job_id, self._train(job_id, job) / job.job.spec.epochs))
        return RewardSlot(self.slot, tuple(sorted(progress)))

    def _train(self, job_id: JobId, job: _Job) -> float:
        """One slot of a job that runs; the epochs that it made."""
        possible = self._speeds.epochs(job.job, Setting(job.allocation), self._length_s)
        left = job.job.epochs - job.done
        if possible >= left:
            ended_s = (self.slot + left / possible) * self._length_s
            self.jct_s[job_id] = ended_s - job.job.spec.submitted_s
            del self._live[job_id]
            return left
        job.done += possible
        job.attained_s += (job.allocation.workers + job.allocation.ps) * self._length_s
        if job.since < self.slot and possible > 0:
            # As live: a speed counts when a job has trained a whole slot after the one in which it was resized.
            job.speeds.pop(job.allocation, None)
            rate = possible / self._length_s
            job.speeds[job.allocation] = SpeedSample(job.allocation.workers, job.allocation.ps, rate)
        return possible

    def run(self, policy: Policy, reward: Callable[[RewardSlot], None] = lambda _: None) -> float:
        """Let a policy decide until all is over; the average completion time in seconds."""
        while not self.over:
            observation = self.observe()
            reward(self.live_through(policy.decide(observation, FluidBudget(observation))))
        return sum(self.jct_s.values()) / len(self.jct_s)
