"""Draws clusters and jobs from a seed, from the size of the demo to a few dozen nodes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from fedsched.core.cluster import Node
from fedsched.core.ids import JobId, NodeName, stream
from fedsched.core.job import Allocation, JobSpec, Range
from fedsched.core.resources import Resources
from fedsched.sim.speed import SPEEDS

T = TypeVar("T")

MEMORY_MIB = 512
"""What every simulated task takes; CPUs are what is scarce here."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """A cluster and the jobs that come to it; `submitted_s` of each is its arrival in virtual seconds."""

    nodes: tuple[Node, ...]
    jobs: tuple[JobSpec, ...]
    slot_length_s: float


def draw_scenario(seed: int, *, jobs: int = 16) -> Scenario:
    """A cluster of 2 to 12 nodes under a load from light to twice what it can serve, all drawn from the seed."""
    cluster = stream(seed, "scenario/cluster").random
    node_count = int(2 * 6 ** cluster())  # log-uniform: small clusters as often as large ones
    cpus = _pick((4, 4, 8, 16), cluster)
    nodes = tuple(_node(index, cpus) for index in range(node_count))
    load = 0.4 + 1.6 * cluster()
    draw = stream(seed, "scenario/jobs").random
    slot_length_s = 10.0
    arrived_s, specs = 0.0, []
    for index in range(jobs):
        spec, cpu_seconds = _job(index, arrived_s, slot_length_s, draw)
        specs.append(spec)
        arrived_s += -math.log(1 - draw()) * cpu_seconds / (node_count * cpus * load)
    return Scenario(nodes, tuple(specs), slot_length_s)


def _node(index: int, cpus: int) -> Node:
    return Node(NodeName(f"node-{index:03d}"), Resources(cpus * 1000, cpus * 2 * MEMORY_MIB))


def _job(index: int, arrived_s: float, slot_length_s: float, draw: Callable[[], float]) -> tuple[JobSpec, float]:
    """One job and the CPU seconds that it takes at one worker and one parameter server."""
    job_type = _pick(sorted(SPEEDS), draw)
    worker_cpu, ps_cpu = _pick((500, 1000, 1000, 2000), draw), _pick((500, 1000), draw)
    ps_max = _pick((1, 2, 2, 4), draw)
    workers = Range(1, 1 + int(draw() * 8))
    slots_alone = 2 * 20 ** draw()
    spec = JobSpec(
        job_id=JobId(f"job-{index:04d}"),
        name=f"{job_type}-{index}",
        run="simulated",
        workers=workers,
        ps=Range(1, ps_max),
        worker_demand=Resources(worker_cpu, MEMORY_MIB),
        ps_demand=Resources(ps_cpu, MEMORY_MIB),
        epochs=max(1.0, round(slots_alone * slot_length_s * SPEEDS[job_type](Allocation(1, 1)))),
        job_type=job_type,
        submitted_s=arrived_s,
    )
    return spec, slots_alone * slot_length_s * (worker_cpu + ps_cpu) / 1000


def _pick(options: Sequence[T], draw: Callable[[], float]) -> T:
    return options[int(draw() * len(options))]
