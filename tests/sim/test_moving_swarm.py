"""Rigid jobs on two accelerator types while everything goes wrong: swaps, ranks and preemption under all judges."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import pytest

from fedsched.core.cluster import Node
from fedsched.core.commands import Command, StopJob
from fedsched.core.events import Event
from fedsched.core.ids import ClusterName, JobId, NodeName, stream
from fedsched.core.job import JobSpec, Range
from fedsched.core.resources import Resources
from fedsched.policy.plugins import make
from fedsched.sim import world
from fedsched.sim.cluster import Rules, Setup
from fedsched.sim.collecting import Collector
from fedsched.sim.faults import Faults, draw_plan
from fedsched.sim.judges import Judges
from fedsched.sim.ports import Setting, SimulatedJob

CLUSTER = ClusterName("typed")
NODES = tuple(
    Node(NodeName(f"{kind}-{index}"), Resources(4000, 4096, 2000), kind) for kind in ("k80", "v100") for index in (0, 1)
)
POLICIES: dict[str, dict[str, object]] = {
    "gavel_maxmin": {"aware": False},
    "las2d": {"limits": [20.0, 60.0]},
    "gittins": {"limits": [20.0, 60.0]},
    "srtf": {},
}
PLANNED_S = 200.0
SEEDS = 6


class Typed:
    """A v100 is twice as fast as a k80."""

    def epochs(self, job: SimulatedJob, setting: Setting, elapsed_s: float) -> float:
        return elapsed_s * setting.allocation.workers * (2.0 if setting.accelerator == "v100" else 1.0)


def drawn_jobs(seed: int) -> list[SimulatedJob]:
    draw = stream(seed, "typed jobs").random
    jobs, now_s = [], 0.0
    for number in range(10):
        now_s += 20.0 * draw()
        gang, seconds = 1 + int(3 * draw()), 10.0 + 60.0 * draw()
        spec = JobSpec(
            job_id=JobId(f"{number:02d}"),
            name=str(number),
            run="",
            workers=Range(gang, gang),
            ps=Range(0, 0),
            worker_demand=Resources(1000, 100, 1000),
            ps_demand=Resources(),
            epochs=seconds * gang,
            expected_s=seconds,
            resize_cooldown_s=15.0 if draw() < 0.2 else 0.0,
            priority=50 if draw() < 0.8 else 90,
            submitted_s=now_s,
        )
        jobs.append(SimulatedJob(spec, spec.epochs))
    return jobs


def stops_of(policy: str, clock: Literal["slots", "exact"], seed: int) -> int:
    """Run a world under all judges; how often a job was stopped."""
    jobs = drawn_jobs(seed)
    plan = draw_plan(seed, NODES, tuple(job.spec for job in jobs), PLANNED_S)
    judges, collector = Judges(), Collector()
    times_s: list[float] = []
    stops: list[Command] = []

    def see(event: Event, commands: Sequence[Command]) -> None:
        times_s.append(event.time_s)
        stops.extend(command for command in commands if isinstance(command, StopJob))

    setup = Setup(
        CLUSTER,
        NODES,
        make(policy, POLICIES[policy]),
        make("drf", {}),
        faults=Faults(plan),
        observers=(see, judges.on(CLUSTER, NODES), collector.on(CLUSTER, NODES)),
    )
    rules = Rules(10.0, clock=clock, slots_max=400, costs=world.USUAL_COSTS, keep_running=False, explain=True)
    world.run([setup], jobs, Typed(), rules, check=True)
    judges.close(collector.jobs(times_s[-1]), times_s[-1], submitted=len(jobs))
    return len(stops)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("clock", ["slots", "exact"])
def test_no_promise_is_broken_when_jobs_move_while_agents_and_nodes_come_and_go(
    policy: str, clock: Literal["slots", "exact"]
) -> None:
    """A job that is stopped to change its place is between two agents, two nodes and two answers at once."""
    assert sum(stops_of(policy, clock, seed) for seed in range(SEEDS)) > SEEDS


@pytest.mark.parametrize(("clock", "seed"), [("exact", 137), ("slots", 159)])
def test_a_new_agent_that_stops_a_job_counts_what_it_found_of_it(clock: Literal["slots", "exact"], seed: int) -> None:
    """The store knew of a resize, and the job had come out of it with fewer tasks before it was to stop."""
    assert stops_of("gavel_maxmin", clock, seed)
