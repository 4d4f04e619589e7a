"""Reads what DL2's own code computed, and says how its jobs look here."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedsched.core.cluster import Node
from fedsched.core.ids import JobId, NodeName
from fedsched.sim.dl2_workload import CLASSES, NODE, job_of
from fedsched.sim.ports import SimulatedJob

WORKLOADS = (
    "default500Poisson_seed1",
    "default500Uniform_seed1",
    "default500_seed1",
    "default500_seed2",
    "default500e3k_seed1",
    "small48e3k_seed1",
    "small48e3k_seed2",
    "small48e3k_seed3",
    "small48e3k_seed4",
    "small48e3k_seed5",
    "template48_seed1",
    "testbed6_seed1",
    "testbed6_seed2",
    "testbed6_seed3",
)
"""Every file of the reference's results."""


@dataclass(frozen=True)
class Golden:
    """One workload and what each of the reference's schedulers made of it."""

    seed: int
    params: dict[str, Any]
    jobs: tuple[SimulatedJob, ...]
    nodes: tuple[Node, ...]
    results: dict[str, Any]

    @property
    def slot_length_s(self) -> float:
        return float(self.params["TS_DURATION"])


def load(path: Path) -> Golden:
    content = json.loads(path.read_text())
    params = content["params"]
    nodes = tuple(Node(NodeName(f"node-{index:04d}"), NODE) for index in range(params["CLUSTER_NUM_NODES"]))
    return Golden(content["seed"], params, golden_jobs(path), nodes, content["results"])


def golden_jobs(path: Path) -> tuple[SimulatedJob, ...]:
    """The jobs of a golden file, which name type (1..8), arrival slot, declared and true epochs."""
    content = json.loads(path.read_text())
    params = content["params"]
    return tuple(
        job_of(
            number,
            CLASSES[kind - 1],
            slot * params["TS_DURATION"],
            declared,
            float(true),
            params["MAX_NUM_WORKERS"],
        )
        for number, kind, slot, declared, true in content["jobs"]
    )


def number_of(job: JobId) -> int:
    """The reference's number of a job."""
    return int(job.rpartition("-")[2])


def speed_grid(golden_dir: Path) -> dict[tuple[str, int, int], float]:
    """Samples per second by model, parameter servers and workers, as the reference's port interpolated them."""
    with (golden_dir / "dl2" / "speed_grid.csv").open() as file:
        return {
            (row["model"], int(row["ps"]), int(row["worker"])): float(row["samples_per_sec"])
            for row in csv.DictReader(file)
        }
