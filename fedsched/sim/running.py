"""Runs one policy of a declared simulation on the jobs of one seed, and keeps what came of it, whatever happens."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath

import numpy as np

from fedsched.config import PolicyConfig
from fedsched.core.commands import Command
from fedsched.core.decision import Policy
from fedsched.core.events import Event, JobExited, PolicyDecided, SlotStarted
from fedsched.core.job import Allocation, JobSpec
from fedsched.errors import FedschedError
from fedsched.policy.registry import heuristic, make
from fedsched.runtime.loop import Observer
from fedsched.sim.executor import VerbCosts
from fedsched.sim.experiment import ExperimentConfig
from fedsched.sim.judges import BrokenPromise, Judges
from fedsched.sim.results import Collector, RunResult
from fedsched.sim.speed import SPEEDS
from fedsched.sim.workload import Scenario, draw_jobs
from fedsched.sim.world import CLUSTER, World

TOLD_EVERY = 500
"""Ends of attempts between two calls of `Progress`."""

Progress = Callable[[float], None]
"""Hears now and then which share of a run's jobs has ended."""

INTERRUPTED = "interrupted before it ended"


@dataclass(frozen=True, slots=True)
class Request:
    """One run to be made."""

    name: str
    """Of the experiment."""
    experiment: ExperimentConfig
    policy: str
    """Label of one of the experiment's policies."""
    seed: int
    check: bool = False
    """Look at all of the scheduler's invariants after every event, and have the judges watch."""


def perform(request: Request, progress: Progress = lambda _: None) -> RunResult:
    """Make a run. Whatever ends it early, an interruption too, what had happened until then is kept: it is partial."""
    begun_s = time.process_time()
    try:
        scenario = draw(request.experiment, request.seed)
        watch = _Watch(request, len(scenario.jobs), progress)
        collector, judges = Collector(), Judges()
        observers = [watch.observe, collector.on(CLUSTER, scenario.nodes)]
        if request.check:
            observers.append(judges.on(CLUSTER, scenario.nodes))
        world = build(request, scenario, observers)
    except Exception as error:
        return lost(request, _told(error))
    digest, problem = "", ""
    try:
        digest = world.run().digest
    except KeyboardInterrupt:
        problem = INTERRUPTED
    except Exception as error:  # Whatever is wrong with this run, the others and what this one did are worth keeping.
        problem = _told(error)
    jobs = collector.jobs(watch.now_s)
    missing = len(scenario.jobs) - int(jobs.over.sum())
    if request.check and not problem:
        try:
            judges.close(jobs, watch.now_s, submitted=len(scenario.jobs), complete=not missing)
        except BrokenPromise as error:
            problem = _told(error)
    return replace(
        lost(request, problem or (f"{missing} jobs never ended" if missing else "")),
        slots=watch.slots,
        jobs=jobs,
        series=collector.series(watch.now_s),
        lanes=collector.lanes(watch.now_s),
        cpu_s=time.process_time() - begun_s,
        fallbacks=watch.fallbacks,
        digest=digest,
    )


def lost(request: Request, why: str) -> RunResult:
    """The result of a run that nothing is left of."""
    return RunResult(
        experiment=request.name,
        policy=request.policy,
        seed=request.seed,
        clock=request.experiment.clock,
        slot_length_s=request.experiment.slot_length_s,
        slots=0,
        jobs=Collector().jobs(0.0),
        series=(),
        lanes=(),
        cpu_s=0.0,
        fallbacks=0,
        digest="",
        partial=why,
    )


def build(request: Request, scenario: Scenario, observers: Sequence[Observer]) -> World:
    """The world of a run."""
    experiment = request.experiment
    config = experiment.policies[request.policy]
    return World(
        scenario,
        make_policy(config, request.seed),
        heuristic(config.fallback),
        costs=VerbCosts(experiment.costs.start_s, experiment.costs.scale_s, experiment.costs.stop_s),
        check=request.check,
        slots_max=experiment.slots_max,
        observers=observers,
    )


def make_policy(config: PolicyConfig, seed: int) -> Policy:
    """A fresh policy; one that samples draws differently in every run.

    Raises:
        CorruptCheckpoint: its weights cannot be used.
    """
    return make(config.model_copy(update={"seed": config.seed + seed}))


def draw(experiment: ExperimentConfig, seed: int) -> Scenario:
    """The clusters and the jobs of one seed."""
    nodes = experiment.clusters[0].all_nodes()
    return Scenario(nodes, draw_jobs(experiment.workload, seed), experiment.slot_length_s)


# --- What is offered ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Load:
    """How much work comes, if every job ran at its minimum without ever waiting."""

    jobs: int
    arrivals_s: float
    """From the first arrival to the last."""
    resource: str
    """The scarcest: `GPU`, `core` or `GiB`."""
    wanted: float
    """Amount of it times hours."""
    offered: float
    """Amount of it on all nodes."""

    @property
    def ratio(self) -> float | None:
        """Work that comes while jobs arrive, relative to what the nodes could do; None where all come at once."""
        return self.wanted / (self.offered * self.arrivals_s / 3600) if self.arrivals_s and self.offered else None

    def __str__(self) -> str:
        what = f"{self.jobs:,} jobs want {self.wanted:,.3g} {self.resource}-hours; there are {self.offered:,g}"
        if self.ratio is None:
            return f"{what}; all come at once"
        return f"offered load {self.ratio:.2f}: {what}, and jobs come during {self.arrivals_s / 3600:,.3g} h"


def load_of(scenario: Scenario) -> Load:
    """The load of a run, by the resource of which it takes the largest share."""
    wanted = np.zeros(3)
    for spec in scenario.jobs:
        wanted += _amounts(spec) * _alone_s(spec)
    offered = np.array(
        [
            sum(node.capacity.gpu_milli for node in scenario.nodes) / 1000,
            sum(node.capacity.cpu_milli for node in scenario.nodes) / 1000,
            sum(node.capacity.memory_mib for node in scenario.nodes) / 1024,
        ]
    )
    shares = np.divide(wanted, offered, out=np.zeros(3), where=offered > 0)
    most = int(shares.argmax())
    arrivals_s = [spec.submitted_s for spec in scenario.jobs]
    return Load(
        jobs=len(scenario.jobs),
        arrivals_s=max(arrivals_s) - min(arrivals_s),
        resource=("GPU", "core", "GiB")[most],
        wanted=float(wanted[most]) / 3600,
        offered=float(offered[most]),
    )


def _amounts(spec: JobSpec) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    least = spec.demand_of(spec.minimum)
    return np.array([least.gpu_milli / 1000, least.cpu_milli / 1000, least.memory_mib / 1024])


def _alone_s(spec: JobSpec) -> float:
    return spec.epochs / SPEEDS[spec.job_type](Allocation(spec.minimum.workers, max(1, spec.minimum.ps)))


# --- What goes wrong ---------------------------------------------------------------------------------------------


class _BadAnswer(Exception):
    """The policy threw, or its answer cannot be used."""


class _Watch:
    """Counts what the results tell of a run, and ends it at a policy's bad answer where that is wished."""

    def __init__(self, request: Request, jobs: int, progress: Progress) -> None:
        self._stops = request.experiment.on_bad_answer == "stop"
        self._jobs = jobs
        self._progress = progress
        self._ended = 0
        self.now_s = 0.0
        self.slots = 0
        self.fallbacks = 0

    def observe(self, event: Event, commands: Sequence[Command]) -> None:
        """Take note of one step."""
        self.now_s = event.time_s
        kind = type(event)
        if kind is JobExited:
            self._ended += 1
            if self._ended % TOLD_EVERY == 0:
                self._progress(min(1.0, self._ended / self._jobs))
        elif kind is SlotStarted:
            self.slots += 1
        elif kind is PolicyDecided and event.decision.fallback:  # type: ignore[union-attr]
            self.fallbacks += 1
            if self._stops:
                decision = event.decision  # type: ignore[union-attr]
                raise _BadAnswer(f"in slot {decision.slot}, at {event.time_s:g} s: {decision.fallback}")


def _told(error: Exception) -> str:
    """What went wrong; where the fault is ours or unexpected, with the line that found it."""
    if isinstance(error, _BadAnswer):
        return str(error)
    if isinstance(error, FedschedError):
        return error.message
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({PurePath(frame.filename).name}, line {frame.lineno})"
