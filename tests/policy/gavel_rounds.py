"""The clock of Gavel's public simulator, for comparisons: its trace, its speeds and its rounds, but not its decisions.

Rounds end when the last job of the round has done as many whole steps as fit in 360 s. Jobs that arrive are shown to
the policy when it plans anew: Gavel's simulator lets them wait until then. Its clock takes a plan of time zero for
none, so the first change is planned for at once; a fresh policy does that here.
"""

from __future__ import annotations

import ast
import csv
import gzip
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from fedsched.core.cluster import Node
from fedsched.core.decision import JobView, Observation, SpeedSample
from fedsched.core.ids import JobId, NodeName
from fedsched.core.job import Range
from fedsched.core.placement import TentativePlacement
from fedsched.core.resources import Resources
from fedsched.policy.gavel import Gavel

ROUND_S = 360.0
REPLAN_ROUNDS = 6
"""Gavel computes shares 1920 s after the last time at the soonest: with the sixth round."""
SERVERS = {"v100": 2, "p100": 4, "k80": 6}
GPUS_PER_SERVER = 4

Speeds = dict[tuple[str, str, int], float]
"""Steps per second by accelerator type, job type and size of the gang."""


@dataclass(slots=True)
class TraceJob:
    """One line of the trace and what became of it."""

    number: int
    job_type: str
    steps: int
    gpus: int
    arrived_s: float
    done: int = 0
    attained_s: dict[str, float] = field(default_factory=dict)

    def view(self, speeds: Speeds, now_s: float) -> JobView:
        return JobView(
            job_id=JobId(f"{self.number:04}"),
            job_type=self.job_type,
            workers=Range(self.gpus, self.gpus),
            ps=Range(0, 0),
            worker_demand=Resources(gpu_milli=1000),
            ps_demand=Resources(),
            epochs=float(self.steps),
            progress_epochs=float(self.done),
            arrived_s=self.arrived_s,
            waited_slots=int((now_s - self.arrived_s) // ROUND_S),
            accelerators=tuple(kind for kind in SERVERS if speeds[kind, self.job_type, self.gpus] > 0),
            attained_by=tuple(sorted((kind, self.gpus * taken_s) for kind, taken_s in self.attained_s.items())),
            speeds=tuple(
                SpeedSample(self.gpus, 0, speeds[kind, self.job_type, self.gpus], kind)
                for kind in SERVERS
                if speeds[kind, self.job_type, self.gpus] > 0
            ),
        )


def read_speeds(path: Path) -> Speeds:
    """Gavel's table of measured speeds of jobs that run alone."""
    with gzip.open(path, "rt") as file:
        table = json.load(file)
    return {
        (kind, *ast.literal_eval(key)): float(row["null"]) for kind, rows in table.items() for key, row in rows.items()
    }


def read_trace(path: Path) -> list[TraceJob]:
    """Job type, steps, gang and arrival of each line."""
    with path.open() as file:
        rows = list(csv.reader(file, delimiter="\t"))
    return [TraceJob(n, row[0], int(row[5]), int(row[6]), float(row[9])) for n, row in enumerate(rows)]


def run(make: Callable[[], Gavel], jobs: list[TraceJob], speeds: Speeds) -> dict[int, float]:
    """Completion time in seconds of each job by its number."""
    nodes = tuple(
        Node(NodeName(f"{kind}-{index}"), Resources(gpu_milli=1000 * GPUS_PER_SERVER), kind)
        for kind, servers in SERVERS.items()
        for index in range(servers)
    )
    live = {JobId(f"{job.number:04}"): job for job in jobs}
    shown: list[JobId] = []
    jct_s: dict[int, float] = {}
    now_s, slot, planned = 0.0, 0, 0
    policy = make()
    while live:
        known = [job_id for job_id, job in live.items() if job.arrived_s <= now_s]
        if known != shown and (planned == 0 or slot >= planned + REPLAN_ROUNDS):
            policy = make() if planned == 0 else policy
            shown, planned = known, slot
        views = tuple(live[job_id].view(speeds, now_s) for job_id in shown if job_id in live)
        observation = Observation(slot, ROUND_S, nodes, views)
        decision = policy.decide(observation, TentativePlacement(observation, keep_running=False))
        slot += 1
        end_s = now_s if decision.accelerators else now_s + ROUND_S
        for job_id, kind in decision.accelerators:
            job = live[job_id]
            speed = speeds[kind, job.job_type, job.gpus]
            steps = min(int(speed * ROUND_S), job.steps - job.done)
            job.done += steps
            job.attained_s[kind] = job.attained_s.get(kind, 0.0) + steps / speed
            end_s = max(end_s, now_s + steps / speed)
            if job.done >= job.steps:
                jct_s[job.number] = now_s + steps / speed - job.arrived_s
                del live[job_id]
        now_s = end_s
    return jct_s
