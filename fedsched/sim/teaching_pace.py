"""Measures how fast policies are trained: environment steps, slots and updates per second of CPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from fedsched.config import parse
from fedsched.sim.experiment import ExperimentConfig
from fedsched.sim.teaching import Mode, Recipe, Training

MACHINES = {"cpus": 8, "memory_gb": 16}
LEARNER = {"dl2": {"name": "dl2"}}
BATCH = 256


@dataclass(frozen=True, slots=True)
class TrainingPace:
    """What one case took."""

    name: str
    policy: str
    mode: str
    clusters: int
    slots: int
    steps: int
    """Environment steps: choices of the network, each of which is remembered."""
    updates: int
    """Steps of the optimiser, or rounds that made a version."""
    cpu_s: float
    """Of the runs: simulation, decisions, gradients and optimiser; libraries are loaded before."""
    steps_per_cpu_s: float
    slots_per_cpu_s: float
    updates_per_cpu_s: float


@dataclass(frozen=True, slots=True)
class _Case:
    mode: Mode
    episodes: int
    plain: dict[str, Any]


def _clusters(*counts: int) -> list[dict[str, Any]]:
    return [
        {"name": f"c{index}", "nodes": [{"name": "node", **MACHINES, "count": count}]}
        for index, count in enumerate(counts)
    ]


CASES: dict[str, _Case] = {
    "mix-online": _Case("online", 6, {"clusters": _clusters(4), "workload": {"jobs": 16, "gap_s": 5}}),
    "dl2-online": _Case(
        "online",
        1,
        {
            "clusters": [{"name": "dl2", "nodes": [{"name": "node", "cpus": 8, "gpus": 2, "count": 48}]}],
            "workload": {"kind": "dl2", "pattern": "uneven", "jobs": 60, "arrivals_max": 3, "epochs_max": 3000},
            "slot_length_s": 1200,
            "costs": {"preset": "free"},
            "store_s": 0,
            "rebuild": True,
            "keep_running": False,
        },
    ),
    "mix-federated": _Case(
        "federated",
        2,
        {
            "clusters": _clusters(4, 2, 3),
            "workload": {"jobs": 60, "gap_s": 3},
            "federation": {"interval_s": 20, "deadline_s": 10},
        },
    ),
}
"""The learner of DL2's small setting (48 servers, 60 jobs) runs there on the fitted coefficients."""


def measure(
    names: Iterable[str] = tuple(CASES), tell: Callable[[str], None] = lambda _: None
) -> tuple[TrainingPace, ...]:
    """Run the cases, one after the other in this process."""
    found = []
    for name in names:
        tell(name)
        found.append(run(name))
    return tuple(found)


def run(name: str) -> TrainingPace:
    """Run one case."""
    case = CASES[name]
    experiment = parse(ExperimentConfig, {**case.plain, "policies": LEARNER}, name)
    recipe = Recipe(name, experiment, "dl2", case.mode, validation_seeds=0, batch_size=BATCH, samples_min=BATCH)
    training = Training(recipe)
    begun_s = time.process_time()
    training.run(case.episodes, lambda row, state: None)
    cpu_s = time.process_time() - begun_s
    state = training.state
    slots = sum(state.slots.values())
    steps = sum(learner.recorded for learner in state.learners.values())
    updates = sum(row.get("updates", 0) for row in state.rows)
    return TrainingPace(
        name,
        "dl2",
        case.mode,
        len(experiment.clusters),
        slots,
        steps,
        updates,
        cpu_s,
        steps / cpu_s,
        slots / cpu_s,
        updates / cpu_s,
    )
