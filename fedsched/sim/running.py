"""Runs one policy of a declared simulation on the jobs of one seed, and keeps what came of it, whatever happens."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath

import numpy as np

from fedsched.config import PolicyConfig
from fedsched.core.cluster import Node
from fedsched.core.commands import Command
from fedsched.core.decision import Policy
from fedsched.core.events import Event, JobExited, PolicyDecided, SlotStarted
from fedsched.core.ids import ClusterName
from fedsched.core.job import Allocation
from fedsched.core.resources import Resources
from fedsched.errors import FedschedError, InvalidInput
from fedsched.policy.registry import heuristic, make
from fedsched.runtime.loop import Observer
from fedsched.sim.executor import VerbCosts
from fedsched.sim.experiment import ExperimentConfig
from fedsched.sim.judges import BrokenPromise, Judges
from fedsched.sim.ports import Setting, SimulatedJob, SpeedModel
from fedsched.sim.results import Collector, Floats, RunResult
from fedsched.sim.workload import Scenario, WorkloadConfig
from fedsched.sim.world import CLUSTER, World

KINDS = ("GPU", "core", "GiB")
"""What a load can be scarce of."""
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
        drawn = draw(request.experiment, request.seed)
        watch = _Watch(request, len(drawn.jobs), progress)
        collector, judges = Collector(), Judges()
        world = build(request, drawn, [collector.on, *([judges.on] if request.check else [])], watch.observe)
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
    missing = len(drawn.jobs) - int(jobs.over.sum())
    if request.check and not problem:
        try:
            judges.close(jobs, watch.now_s, submitted=len(drawn.jobs), complete=not missing)
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


Hang = Callable[[ClusterName, Sequence[Node]], Observer]
"""Makes the observer of one cluster's loop."""


def build(request: Request, drawn: Drawn, watchers: Sequence[Hang], everywhere: Observer) -> World:
    """The world of a run: the one place that knows how worlds are made.

    Args:
        watchers: each gets an observer of its own on every cluster.
        everywhere: sees what all clusters do.
    """
    experiment = request.experiment
    config = experiment.policies[request.policy]
    costs = experiment.costs.costs().of("")
    if len(drawn.clusters) > 1 or not isinstance(experiment.workload, WorkloadConfig) or experiment.speeds is not None:
        raise InvalidInput("only drawn mixes on one cluster can be simulated yet", "use a workload without a kind")
    ((_, nodes),) = drawn.clusters
    scenario = Scenario(nodes, tuple(job.spec for job in drawn.jobs), experiment.slot_length_s)
    return World(
        scenario,
        make_policy(config, request.seed),
        heuristic(config.fallback),
        costs=VerbCosts(costs.start_s, costs.scale_s, costs.stop_s),
        store_s=experiment.store_s,
        check=request.check,
        slots_max=experiment.slots_max,
        observers=[everywhere, *(hang(CLUSTER, nodes) for hang in watchers)],
    )


def make_policy(config: PolicyConfig, seed: int) -> Policy:
    """A fresh policy; one that samples draws differently in every run.

    Raises:
        CorruptCheckpoint: its weights cannot be used.
    """
    return make(config.model_copy(update={"seed": config.seed + seed}))


@dataclass(frozen=True, slots=True)
class Drawn:
    """What one seed gives: clusters, jobs in order of arrival, and the truth about their speeds."""

    clusters: tuple[tuple[ClusterName, tuple[Node, ...]], ...]
    jobs: tuple[SimulatedJob, ...]
    speeds: SpeedModel


def draw(experiment: ExperimentConfig, seed: int) -> Drawn:
    """What the seed gives; the same for every policy.

    Raises:
        NotFound: a file that the workload or the speeds need is not there.
        InvalidInput: a file cannot be used.
    """
    clusters = tuple((ClusterName(cluster.name), cluster.all_nodes()) for cluster in experiment.clusters)
    return Drawn(clusters, tuple(experiment.jobs().draw(seed)), experiment.speed_model(seed))


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


def load_of(drawn: Drawn) -> Load:
    """The load of a run, by the resource of which it takes the largest share."""
    wanted = np.zeros(len(KINDS))
    for job in drawn.jobs:
        wanted += _amounts(job.spec.demand_of(job.spec.minimum)) * _alone_s(job, drawn.speeds)
    offered = np.zeros(len(KINDS))
    for _, nodes in drawn.clusters:
        for node in nodes:
            offered += _amounts(node.capacity)
    shares = np.divide(wanted, offered, out=np.zeros(len(KINDS)), where=offered > 0)
    most = int(shares.argmax())
    arrivals_s = [job.spec.submitted_s for job in drawn.jobs]
    return Load(
        jobs=len(drawn.jobs),
        arrivals_s=max(arrivals_s) - min(arrivals_s),
        resource=KINDS[most],
        wanted=float(wanted[most]) / 3600,
        offered=float(offered[most]),
    )


def _amounts(resources: Resources) -> Floats:
    """In the order of `KINDS`."""
    return np.array([resources.gpu_milli / 1000, resources.cpu_milli / 1000, resources.memory_mib / 1024])


def _alone_s(job: SimulatedJob, speeds: SpeedModel) -> float:
    """How long the job takes at its minimum; 0 where it cannot train with that."""
    least = job.spec.minimum
    # Without parameter servers most models know no speed; those that need none have none at most either.
    least = Allocation(least.workers, max(least.ps, min(1, job.spec.ps.maximum)))
    pace = speeds.epochs(job, Setting(least), 1.0)
    return job.epochs / pace if pace > 0 else 0.0


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
