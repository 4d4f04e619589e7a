"""Measures how fast worlds run: jobs and events per second of CPU, and memory, for workloads of known size."""

from __future__ import annotations

import multiprocessing
import resource
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from fedsched.core.cluster import Node
from fedsched.core.events import Event
from fedsched.core.ids import ClusterName, JobId, NodeName
from fedsched.core.job import JobSpec, Range
from fedsched.core.resources import Resources
from fedsched.policy import plugins
from fedsched.sim.cluster import Rules, Setup
from fedsched.sim.counting import Steps
from fedsched.sim.dl2_workload import NODE, Dl2Workload, Dl2WorkloadConfig
from fedsched.sim.ports import SimulatedJob, TrueSpeeds
from fedsched.sim.speeds.config import AnalyticConfig
from fedsched.sim.traces.config import FittedWorkloadConfig, ShapeConfig
from fedsched.sim.traces.shaping import RigidSpeed
from fedsched.sim.world import World

ITP_JOBS = 15_800
ITP_GPUS = 640
"""Microsoft's cluster 04: its jobs in two months, and the GPUs that the ElasticFlow paper gave it."""
MILLION = 1_000_000
COPIES = 10
"""Of the ten fitted clusters."""
LARGE_GPUS = 5_000
QUEUES = (1_000, 10_000, 100_000)
"""Jobs that wait at once: what an event costs must hardly grow with them."""
SLOT_S = 1200.0


@dataclass(frozen=True, slots=True)
class Pace:
    """What one case took."""

    name: str
    jobs: int
    policy: str
    cpu_s: float
    """Of the run: drawing jobs, scheduler, loop, executor and policy."""
    jobs_per_cpu_s: float
    events_per_cpu_s: float
    peak_mib: float
    """Of the whole process, interpreter and libraries included."""


@dataclass(frozen=True, slots=True)
class _Case:
    policy: str
    world: Callable[[str, Callable[[Event, object], None]], World]


def _pool(gpus: int) -> tuple[Node, ...]:
    return (Node(NodeName("pool"), Resources(gpu_milli=1000 * gpus)),)


def _rigid(
    clusters: Iterable[tuple[str, int]],
    jobs: Iterable[SimulatedJob],
    policy: str,
    observe: Callable[[Event, object], None],
) -> World:
    setups = [
        Setup(ClusterName(name), _pool(gpus), plugins.make(policy, {}), plugins.make("fifo", {}), observers=(observe,))
        for name, gpus in clusters
    ]
    rules = Rules(clock="exact", store_s=0.0, keep_running=False)
    return World(setups, jobs, RigidSpeed(), rules, routing="origin")


def _itp(policy: str, observe: Callable[[Event, object], None]) -> World:
    shape = ShapeConfig(gpus_per_node=None)
    config = FittedWorkloadConfig(fit="itp", clusters=("cluster04",), jobs=ITP_JOBS, pooled=True, shape=shape)
    return _rigid([("cluster04", ITP_GPUS)], config.workload().draw(0), policy, observe)


def _million(policy: str, observe: Callable[[Event, object], None]) -> World:
    shape = ShapeConfig(gpus_per_node=None)
    config = FittedWorkloadConfig(fit="itp", jobs=MILLION, copies=COPIES, shape=shape)
    names = [f"cluster{number:02d}-{copy}" for number in range(1, 11) for copy in range(1, COPIES + 1)]
    return _rigid([(name, LARGE_GPUS) for name in names], config.workload().draw(0), policy, observe)


def _crowd(waiting: int) -> Iterator[SimulatedJob]:
    """One job that holds the cluster until all others are there, then these, of equal size."""
    for number in range(waiting + 1):
        gpus, length_s = (ITP_GPUS, float(waiting)) if not number else (ITP_GPUS // 8, 100.0)
        name = f"job-{number:07d}"
        demand, nothing = Resources(gpu_milli=1000 * gpus), Resources()
        one, none = Range(1, 1), Range(0, 0)
        spec = JobSpec(
            JobId(name),
            name,
            "simulated",
            one,
            none,
            demand,
            nothing,
            length_s,
            submitted_s=float(number),
            expected_s=length_s,
        )
        yield SimulatedJob(spec, length_s)


def _dl2(policy: str, observe: Callable[[Event, object], None]) -> World:
    config = Dl2WorkloadConfig(slot_length_s=SLOT_S)
    nodes = tuple(Node(NodeName(f"node-{index:04d}"), NODE) for index in range(500))
    speeds: TrueSpeeds = AnalyticConfig(form="analytic", coefficients="dl2_fitted").model(0)
    setup = Setup(ClusterName("dl2"), nodes, plugins.make(policy, {}), plugins.make("drf", {}), observers=(observe,))
    rules = Rules(SLOT_S, store_s=0.0, keep_running=False, rebuild=True)
    return World([setup], Dl2Workload(config).draw(1), speeds, rules)


CASES: dict[str, _Case] = {
    "itp04-fifo": _Case("fifo", _itp),
    "itp04-srtf": _Case("srtf", _itp),
    "dl2-drf": _Case("dl2_drf", _dl2),
    **{
        f"queue-{waiting}": _Case(
            "srtf",
            lambda policy, observe, waiting=waiting: _rigid(  # type: ignore[misc]
                [("crowded", ITP_GPUS)], _crowd(waiting), policy, observe
            ),
        )
        for waiting in QUEUES
    },
    "million": _Case("fifo", _million),
}
DEFAULT = tuple(name for name in CASES if name != "million")


def measure(names: Iterable[str] = DEFAULT, tell: Callable[[str], None] = lambda _: None) -> tuple[Pace, ...]:
    """Run the cases, each in a process of its own so that none inherits another's memory."""
    found = []
    for name in names:
        tell(name)
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            found.append(pool.submit(run, name).result())
    return tuple(found)


def run(name: str) -> Pace:
    """Run one case in this process."""
    case, steps = CASES[name], Steps()
    begun_s = time.process_time()
    world = case.world(case.policy, steps.observe)
    world.run()
    cpu_s = time.process_time() - begun_s
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return Pace(name, world.ended, case.policy, cpu_s, world.ended / cpu_s, steps.count / cpu_s, peak_mib)
