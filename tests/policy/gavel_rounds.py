"""The clock of Gavel's public simulator, for comparisons: its trace, its speeds and its rounds, but not its decisions.

Rounds end when the last job of the round has done as many whole steps as fit in 360 s. A plan of time zero counts as
none there, so the first change is planned for at once.
"""

from __future__ import annotations

import ast
import csv
import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

import numpy as np

from fedsched.core.cluster import Node
from fedsched.core.decision import JobView, Observation, SpeedSample
from fedsched.core.ids import JobId, NodeName
from fedsched.core.job import Range
from fedsched.core.placement import TentativePlacement
from fedsched.core.resources import Resources
from fedsched.policy.gavel import Array, Gavel, GavelMaxmin, GavelOptions, _Plan, _Types

ROUND_S = 360.0
REPLAN_ROUNDS = 6
"""Gavel computes shares 1920 s after the last time at the soonest: with the sixth round."""
SERVERS = {"v100": 2, "p100": 4, "k80": 6}
GPUS_PER_SERVER = 4

KINDS = ("k80", "p100", "v100")
SHUFFLE_SEED = 5
"""Of the order of types in Gavel's simulator, where they count alike."""

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

    def kinds(self, speeds: Speeds) -> tuple[str, ...]:
        """Types that it runs on."""
        return tuple(kind for kind in SERVERS if speeds[kind, self.job_type, self.gpus] > 0)

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
            accelerators=self.kinds(speeds),
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


class AsThere(GavelMaxmin):
    """Gavel's policy as its simulator has it: speeds are known from its table, and whoever comes waits for a plan.

    Args:
        speeds: Gavel's table.
        aware: whether a type counts by the job's speed on it.
    """

    def __init__(self, speeds: Speeds, *, aware: bool) -> None:
        super().__init__(GavelOptions(aware=aware, wait_for_plan=True, replan_slots=REPLAN_ROUNDS))
        self._table = speeds
        self._shuffle = Random(SHUFFLE_SEED)

    def _speeds(self, views: Sequence[JobView], types: _Types) -> Array:
        rows = [[self._table[kind, view.job_type, view.minimum.workers] for kind in types.names] for view in views]
        speeds = np.array(rows, dtype=np.float64).reshape(len(views), len(types.names))
        return speeds if self._options.aware else (speeds > 0).astype(np.float64)

    def _type_order(self, slot: int, speeds: Array) -> list[int]:
        order = ["v100", "p100", "k80"]
        if not self._options.aware:
            self._shuffle.shuffle(order)
        return [KINDS.index(kind) for kind in order]

    def _planned(self, observation: Observation, views: Sequence[JobView], types: _Types, speeds: Array) -> _Plan:
        if self._plan is not None and self._plan.time_s == 0:
            # A quirk of the simulator and no rule of Gavel: it takes a plan of time zero for none.
            self._plan = replace(self._plan, slot=-REPLAN_ROUNDS)
        return super()._planned(observation, views, types, speeds)


@dataclass(frozen=True, slots=True)
class Difference:
    """Of completion times to those of Gavel's simulator, relative."""

    average: float
    """Of the average; negative where jobs end earlier here."""
    median: float
    """Of the absolute differences of single jobs."""
    equal: int
    """Jobs that differ by less than a millionth."""
    correlation: float


def compare(jct_s: dict[int, float], golden_dir: Path, aware: bool) -> Difference:
    """Against the golden results."""
    case = "mmf_max_min_fairness_perf" if aware else "mmf_max_min_fairness"
    with (golden_dir / "gavel" / f"{case}.csv").open() as file:
        golden = {int(row["job_id"]): float(row["jct_s"]) for row in csv.DictReader(file)}
    assert jct_s.keys() == golden.keys()
    ours = np.array([jct_s[number] for number in sorted(golden)])
    theirs = np.array([golden[number] for number in sorted(golden)])
    each = np.abs(ours / theirs - 1)
    return Difference(
        float(ours.mean() / theirs.mean() - 1),
        float(np.median(each)),
        int((each < 1e-6).sum()),
        float(np.corrcoef(ours, theirs)[0, 1]),
    )


def nodes() -> tuple[Node, ...]:
    """Servers of four GPUs of one type each."""
    return tuple(
        Node(NodeName(f"{kind}-{index}"), Resources(gpu_milli=1000 * GPUS_PER_SERVER), kind)
        for kind, servers in SERVERS.items()
        for index in range(servers)
    )


def run(policy: Gavel, jobs: list[TraceJob], speeds: Speeds) -> dict[int, float]:
    """Completion time in seconds of each job by its number."""
    live = {JobId(f"{job.number:04}"): job for job in jobs}
    jct_s: dict[int, float] = {}
    now_s, slot = 0.0, 0
    while live:
        views = tuple(job.view(speeds, now_s) for job in live.values() if job.arrived_s <= now_s)
        observation = Observation(slot, ROUND_S, nodes(), views, now_s)
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
