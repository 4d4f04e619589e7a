"""Declared simulations: a cluster, a workload and an experiment file become runs, and the runs a comparison."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, model_validator
from scipy import stats

from fedsched.config import Name, NodeConfig, PolicyConfig, Tree, load, read
from fedsched.core.decision import Policy
from fedsched.core.job import Allocation, JobPhase
from fedsched.core.packing import pack
from fedsched.errors import InvalidConfiguration, InvalidInput
from fedsched.policy.registry import heuristic, make
from fedsched.sim.executor import VerbCosts
from fedsched.sim.workload import Scenario, WorkloadConfig, draw_jobs
from fedsched.sim.world import Result, World

CONFIDENCE = 0.95
FOLDER = "folder"
"""Where validators find the experiment file's folder, from which paths in it count."""

Tell = Callable[[str], None]
"""Hears what happens, for people who wait."""


# --- What is declared --------------------------------------------------------------------------------------------


def _contents(value: Any, info: ValidationInfo) -> Any:
    """What the named file holds; a part that is written out in place stands for itself."""
    if not isinstance(value, str):
        return value
    try:
        return read(_folder(info) / value)
    except InvalidConfiguration as problem:
        raise ValueError(problem.message) from problem


def _beside(policies: dict[str, PolicyConfig], info: ValidationInfo) -> dict[str, PolicyConfig]:
    """The same policies with the paths of their checkpoints taken from the experiment's folder."""
    return {
        label: policy
        if policy.checkpoint == "builtin"
        else policy.model_copy(update={"checkpoint": str(_folder(info) / policy.checkpoint)})
        for label, policy in policies.items()
    }


def _folder(info: ValidationInfo) -> Path:
    return Path(info.context[FOLDER]) if info.context else Path()


class SimulatedClusterConfig(Tree):
    """A cluster file."""

    nodes: tuple[NodeConfig, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _names_are_unique(self) -> SimulatedClusterConfig:
        names = [node.name for node in self.nodes]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"node names must be unique; used more than once: {', '.join(twice)}")
        return self


class CostsConfig(Tree):
    """How long the scaling verbs take; a job makes no progress meanwhile."""

    start_s: float = Field(default=1.0, ge=0)
    scale_s: float = Field(default=0.2, ge=0)
    stop_s: float = Field(default=0.5, ge=0)


class ExperimentConfig(Tree):
    """An experiment file: which policies run which workload on which cluster."""

    cluster: Annotated[SimulatedClusterConfig, BeforeValidator(_contents)]
    """Path of a cluster file, relative to this one."""
    workload: Annotated[WorkloadConfig, BeforeValidator(_contents)]
    """Path of a workload file, relative to this one."""
    policies: Annotated[dict[Name, PolicyConfig], Field(min_length=1), AfterValidator(_beside)]
    """By the label that the results carry; paths of checkpoints are relative to this file."""
    seeds: int = Field(default=5, ge=1)
    """How many runs; each draws its jobs from a seed of its own, the same for every policy."""
    slot_length_s: float = Field(default=10.0, gt=0)
    slots_max: int = Field(default=5_000, ge=1)
    """After as many slots nothing new starts, and jobs that wait never end."""
    costs: CostsConfig = CostsConfig()

    @model_validator(mode="after")
    def _every_job_can_run(self) -> ExperimentConfig:
        worker, ps = self.workload.largest_tasks
        if (
            pack(
                [node.capacity for node in tuple(node.node() for node in self.cluster.nodes)],
                worker,
                ps,
                Allocation(1, 1),
            )
            is None
        ):
            raise ValueError(f"the cluster cannot hold the workload's largest worker ({worker}) and server ({ps})")
        return self


def load_experiment(path: Path) -> ExperimentConfig:
    """Read an experiment and the files that it names.

    Raises:
        InvalidConfiguration: there are problems in any of them; all are listed.
    """
    return load(ExperimentConfig, path, {FOLDER: path.parent})


# --- What is run -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Run:
    """One policy on the jobs of one seed."""

    policy: str
    """The policy's label."""
    seed: int
    result: Result


def run_experiment(
    experiment: ExperimentConfig,
    *,
    policies: Sequence[str] = (),
    seeds: int | None = None,
    check: bool = False,
    tell: Tell = lambda _: None,
) -> tuple[Run, ...]:
    """Run every policy on every seed; the same arguments give the same runs.

    Args:
        policies: labels of those to run, in this order; all of them if empty.
        seeds: in place of the experiment's.
        check: look at all of the scheduler's invariants after every event.

    Raises:
        InvalidInput: a label is none of the experiment's.
        CorruptCheckpoint: a policy's weights cannot be used.
    """
    labels = tuple(dict.fromkeys(policies)) or tuple(experiment.policies)
    _refuse_unknown(labels, experiment)
    first = experiment.workload.seed
    drawn = range(first, first + (seeds or experiment.seeds))
    # All policies are made before the first one runs: a checkpoint that is missing is noticed at once.
    made = [(label, seed, _make(experiment.policies[label], seed)) for label in labels for seed in drawn]
    nodes = tuple(node.node() for node in experiment.cluster.nodes)
    costs = VerbCosts(experiment.costs.start_s, experiment.costs.scale_s, experiment.costs.stop_s)
    runs = []
    for label, seed, policy in made:
        tell(f"{label}: seed {seed}")
        scenario = Scenario(nodes, draw_jobs(experiment.workload, seed), experiment.slot_length_s)
        fallback = heuristic(experiment.policies[label].fallback)
        world = World(scenario, policy, fallback, costs=costs, check=check, slots_max=experiment.slots_max)
        runs.append(Run(label, seed, world.run()))
    return tuple(runs)


def _make(config: PolicyConfig, seed: int) -> Policy:
    """A fresh policy; one that samples draws differently in every run."""
    return make(config.model_copy(update={"seed": config.seed + seed}))


def _refuse_unknown(labels: Iterable[str], experiment: ExperimentConfig) -> None:
    unknown = [label for label in labels if label not in experiment.policies]
    if unknown:
        near = [name for label in unknown for name in difflib.get_close_matches(label, experiment.policies, n=1)]
        known = ", ".join(experiment.policies)
        raise InvalidInput(
            f"the experiment has no policy {', '.join(unknown)}; it has {known}",
            f"did you mean {', '.join(near)}?" if near else "name some of these, or add it to the experiment's file",
        )


# --- What came out -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over seeds and the 95 % confidence interval of Student's t; without bounds where there is one seed."""

    mean: float
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class Summary:
    """One policy over all seeds."""

    policy: str
    seeds: int
    jct_s: Interval | None
    """Of the runs' mean job completion times; None if any job did not end: a mean over the others would flatter."""
    makespan_s: float | None
    """Mean over the runs, None likewise."""
    resizes: float
    """Per run."""
    cpu_utilisation: float
    """Mean over the runs of the share of CPUs held."""
    fallbacks: int
    """Slots, of all runs, that the policy's fallback decided; where it is not 0 the row is not the policy's alone."""
    unfinished: int
    """Jobs, of all runs, that did not come to their end."""


def summarise(runs: Sequence[Run]) -> tuple[Summary, ...]:
    """One summary per policy, in the order in which they ran."""
    labels = tuple(dict.fromkeys(run.policy for run in runs))
    return tuple(_summary(label, [run.result for run in runs if run.policy == label]) for label in labels)


def _summary(label: str, results: Sequence[Result]) -> Summary:
    unfinished = sum(outcome.phase is not JobPhase.SUCCEEDED for result in results for outcome in result.outcomes)
    return Summary(
        policy=label,
        seeds=len(results),
        jct_s=None if unfinished else interval([result.average_jct_s for result in results]),
        makespan_s=None if unfinished else _mean([result.makespan_s for result in results]),
        resizes=_mean([result.resizes for result in results]),
        cpu_utilisation=_mean([result.cpu_utilisation for result in results]),
        fallbacks=sum(result.fallbacks for result in results),
        unfinished=unfinished,
    )


def interval(values: Sequence[float]) -> Interval:
    """The mean of a few independent values and where the true mean lies with 95 % confidence."""
    mean = _mean(values)
    if len(values) < 2:
        return Interval(mean, None, None)
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    half = float(stats.t.interval(CONFIDENCE, len(values) - 1)[1]) * math.sqrt(variance / len(values))
    return Interval(mean, mean - half, mean + half)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
