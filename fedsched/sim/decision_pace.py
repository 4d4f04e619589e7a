"""Measures how long policies take to decide a slot of a cluster that stays as full as it is."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import quantiles

from fedsched.config import PolicyConfig, parse
from fedsched.core.cluster import Node
from fedsched.core.decision import JobView, Observation, Policy, SpeedSample
from fedsched.core.ids import NodeName
from fedsched.core.job import Allocation, JobSpec, Placement, allocation_of
from fedsched.core.placement import TentativePlacement
from fedsched.policy.registry import make
from fedsched.sim.dl2_workload import NODE, Dl2Workload, Dl2WorkloadConfig
from fedsched.sim.ports import Setting, SimulatedJob, TrueSpeeds
from fedsched.sim.speeds.config import AnalyticConfig

SLOT_S = 1200.0
SIZES = ((40, 80), (200, 500))
"""Jobs that are there in every slot, and servers."""
POLICIES = ("learned_speed", "set", "dl2", "drf")
WARM_UP_SLOTS = 20
"""Not counted: all jobs have just come then, and policies with a memory fill it."""


@dataclass(frozen=True, slots=True)
class DecisionPace:
    """How long one policy took for a slot of one size, in CPU time of one core."""

    jobs: int
    servers: int
    policy: str
    p50_ms: float
    p99_ms: float


@dataclass(slots=True)
class _Live:
    """A job of the cluster."""

    job: SimulatedJob
    arrived_slot: int
    done: float = 0.0
    attained_s: float = 0.0
    placement: Placement = ()
    speeds: dict[Allocation, SpeedSample] = field(default_factory=dict)

    def view(self, slot: int) -> JobView:
        spec: JobSpec = self.job.spec
        return JobView(
            job_id=spec.job_id,
            job_type=spec.job_type,
            workers=spec.workers,
            ps=spec.ps,
            worker_demand=spec.worker_demand,
            ps_demand=spec.ps_demand,
            epochs=spec.epochs,
            progress_epochs=self.done,
            arrived_s=self.arrived_slot * SLOT_S,
            waited_slots=slot - self.arrived_slot,
            placement=self.placement,
            attained_s=self.attained_s,
            speeds=tuple(self.speeds.values()),
        )

    def train(self, speeds: TrueSpeeds) -> None:
        held = allocation_of(self.placement)
        if held:
            done = speeds.epochs(self.job, Setting(held), SLOT_S)
            self.done += done
            self.attained_s += SLOT_S * (held.workers + held.ps)
            self.speeds.pop(held, None)
            self.speeds[held] = SpeedSample(held.workers, held.ps, done / SLOT_S)


def measure(policies: Sequence[str] = POLICIES, *, slots: int) -> tuple[DecisionPace, ...]:
    """Every policy on clusters of all sizes."""
    return tuple(_measure(name, jobs, servers, slots) for jobs, servers in SIZES for name in policies)


def _measure(name: str, jobs: int, servers: int, slots: int) -> DecisionPace:
    policy: Policy = make(parse(PolicyConfig, {"name": name}, "--policies"))
    took_ms = _decide(policy, jobs, servers, slots + WARM_UP_SLOTS)[WARM_UP_SLOTS:]
    cuts = quantiles(took_ms, n=100)
    return DecisionPace(jobs, servers, name, round(cuts[49], 3), round(cuts[98], 3))


def _decide(policy: Policy, jobs: int, servers: int, slots: int) -> list[float]:
    """Milliseconds of CPU time that each slot's decision took. A job that has ended makes room for the next one."""
    nodes = tuple(Node(NodeName(f"node-{index:04d}"), NODE) for index in range(servers))
    speeds = AnalyticConfig(form="analytic", coefficients="dl2_fitted").model(0)
    coming = _jobs()
    live: list[_Live] = []
    took_ms = []
    for slot in range(slots):
        live = [one for one in live if one.done < one.job.epochs]
        live += [_Live(next(coming), slot) for _ in range(jobs - len(live))]
        observation = Observation(slot, SLOT_S, nodes, tuple(one.view(slot) for one in live), slot * SLOT_S)
        budget = TentativePlacement(observation, keep_running=False)
        begun = time.process_time()
        policy.decide(observation, budget)
        took_ms.append((time.process_time() - begun) * 1e3)
        for one in live:
            one.placement = budget.placement(one.job.spec.job_id)
            one.train(speeds)
    return took_ms


def _jobs() -> Iterator[SimulatedJob]:
    """DL2's, without end."""
    return Dl2Workload(Dl2WorkloadConfig(jobs=1_000_000, lengths_vary=True)).draw(1)
