"""Runs one policy of a declared simulation on the jobs of one seed, and keeps what came of it, whatever happens."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Protocol

from msgspec import structs

from fedsched.config import PolicyConfig
from fedsched.core.cluster import Node
from fedsched.core.commands import Command
from fedsched.core.decision import Policy
from fedsched.core.events import Event, JobExited, PolicyDecided
from fedsched.core.ids import ClusterName, JobId
from fedsched.core.job import JobStatus
from fedsched.core.resources import total
from fedsched.core.speeds import SpeedStatistics
from fedsched.errors import Failed, FedschedError, InvalidInput
from fedsched.learn.learner import ClusterLearner
from fedsched.policy.checkpoint import Checkpoint
from fedsched.policy.reference import Informed
from fedsched.policy.registry import heuristic, make
from fedsched.runtime.loop import Observer
from fedsched.sim.cluster import Rules, Setup
from fedsched.sim.collecting import Collector
from fedsched.sim.deadline import Abandoned, StepDeadline
from fedsched.sim.experiment import ExperimentConfig
from fedsched.sim.federation_results import FederationResult
from fedsched.sim.judges import BrokenPromise, Judges
from fedsched.sim.ports import SimulatedJob
from fedsched.sim.results import Jobs, RunResult
from fedsched.sim.speeds.costs import Costs
from fedsched.sim.speeds.oracle import oracle
from fedsched.sim.workers import INTERRUPTED, Share
from fedsched.sim.world import World

POLICY_SEEDS_APART = 10_000
"""Between the seeds of one policy on different clusters."""
TOLD = 200
"""How often a run tells, at most, which share of its jobs has ended."""
UNBOUNDED = 1_000_000
"""So many times its cluster is there for a policy that only says what is possible."""


@dataclass(frozen=True, slots=True)
class Request:
    """One run to be made."""

    name: str
    """Of the experiment."""
    experiment: ExperimentConfig
    policy: str
    """Label of one of the experiment's policies."""
    seed: int
    jobs: int = 0
    """How many to expect, to tell the progress by; 0 where that is not known."""
    check: bool = False
    """Look at all of the scheduler's invariants after every event, and have the judges watch."""
    training_seed: int | None = None
    """Of the training that `taught` came out of."""
    taught: Mapping[ClusterName, Checkpoint | SpeedStatistics] | None = None
    """Weights that the policy was taught beforehand, or statistics; None where it was not."""


class Pupil(Protocol):
    """A cluster that learns: its policy, and who teaches it."""

    @property
    def policy(self) -> Policy:
        """Decides there."""

    @property
    def learner(self) -> ClusterLearner | None:
        """Hears what it chose, and what that brought."""

    def restarted(self) -> None:
        """The agent died and another one began."""


class Teachers(Protocol):
    """Who teaches which clusters of a run."""

    def pupil(self, name: ClusterName, label: str, seed: int) -> Pupil | None:
        """The cluster as a pupil; None where it does not learn.

        Args:
            label: of the policy that decides there.
            seed: of that policy.
        """

    def observers(self, name: ClusterName) -> tuple[Observer, ...]:
        """Who has to see what the cluster does."""

    def join(self, world: World) -> None:
        """Begin in the world, before it runs."""


def perform(request: Request, progress: Share = lambda _: None, *, teachers: Teachers | None = None) -> RunResult:
    """Make a run. Whatever ends it early, an interruption too, what had happened until then is kept: it is partial.

    Args:
        progress: hears now and then which share of the run's jobs has ended, where the request says how many come.
        teachers: who teaches; where nobody is named, the experiment's federation does, if it has one.
    """
    begun_s = time.process_time()
    watch = _Watch(request, progress)
    collector, judges = Collector(), Judges(rebuilt=request.experiment.rebuild)
    digest, problem = "", ""
    try:
        world = build(
            request, [collector.on, *([judges.on] if request.check else [])], watch.observe, teachers=teachers
        )
    except Exception as error:
        return lost(request, _told(error))
    try:
        with watch.deadline:
            world.run()
        digest = world.digest
    except KeyboardInterrupt:
        problem = INTERRUPTED
    except Exception as error:  # Whatever is wrong with this run, the others and what this one did are worth keeping.
        problem = _told(error)
    except Abandoned as error:
        problem = str(error)
    jobs, now_s = collector.jobs(world.clock.now_s), world.clock.now_s
    missing = world.arrived - int(jobs.over.sum())
    if request.check and not problem:
        try:
            judges.close(jobs, now_s, submitted=world.arrived, complete=not missing)
            for federation in world.federations:
                federation.close()
        except BrokenPromise as error:
            problem = _told(error)
    return replace(
        lost(request, problem or (_unfinished(jobs, missing) if missing else "")),
        slots=world.slots,
        jobs=jobs,
        series=collector.series(now_s),
        lanes=collector.lanes(now_s),
        cpu_s=time.process_time() - begun_s,
        fallbacks=watch.fallbacks,
        digest=digest,
        federations=_federations(world),
    )


def whole_jct_slots(request: Request) -> float:
    """Average completion time in slots, of a run that must come to its end.

    Raises:
        Failed: it did not.
        KeyboardInterrupt: the user interrupted it.
    """
    run = perform(request)
    if run.partial == INTERRUPTED:
        raise KeyboardInterrupt
    if run.partial or run.avg_jct_slots is None:
        which = f"{request.name}, policy {request.policy}, seed {request.seed}"
        raise Failed(f"{which} ended early: {run.partial or 'no job ended'}", "correct the experiment")
    return run.avg_jct_slots


def _unfinished(jobs: Jobs, missing: int) -> str:
    waiting = [job_id for job_id, over in zip(jobs.job_id, jobs.over.tolist(), strict=True) if not over]
    return f"{missing} jobs never ended" + (f", the first of them job {waiting[0]}" if waiting else "")


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
        training_seed=request.training_seed,
    )


NO_POLICIES: Mapping[ClusterName, Policy] = {}
Hang = Callable[[ClusterName, Sequence[Node]], Observer]
"""Makes the observer of one cluster's loop."""


def build(
    request: Request,
    watchers: Sequence[Hang],
    everywhere: Observer,
    ready: Mapping[ClusterName, Policy] = NO_POLICIES,
    *,
    teachers: Teachers | None = None,
) -> World:
    """The world of a run: the one place that knows how worlds are made.

    Args:
        watchers: each gets an observer of its own on every cluster.
        everywhere: sees what all clusters do.
        ready: policies that exist already, in place of those that the experiment names.
        teachers: who teaches; see `perform`.

    Raises:
        FedschedError: a file that it needs is not there or cannot be used.
    """
    experiment, seed = request.experiment, request.seed
    speeds, truth, rules = experiment.speed_model(seed), _Truth(), experiment.rules()
    teachers = teachers or _teachers_of(request)
    setups = []
    for index, cluster in enumerate(experiment.clusters):
        config = experiment.policies[cluster.policy or request.policy]
        name, nodes = ClusterName(cluster.name), cluster.all_nodes()
        label, own_seed = cluster.policy or request.policy, seed + index * POLICY_SEEDS_APART
        pupil = teachers.pupil(name, label, own_seed) if teachers is not None else None
        policy: Policy = pupil.policy if pupil is not None else ready.get(name) or make_policy(config, own_seed)
        if isinstance(policy, Informed):
            truth.wanted = True
            known = speeds if policy.knows_jobs else experiment.typical_speeds(seed)
            policy.consult(oracle(experiment.estimates.told(known, seed), truth.known))
            if policy.unbounded:
                nodes, rules = _without_bounds(nodes), _without_costs(rules)
        observers = (everywhere, *(hang(name, nodes) for hang in watchers))
        if teachers is not None:
            observers += teachers.observers(name)
        setup = Setup(name, nodes, policy, heuristic(config.fallback), observers=observers)
        setups.append(setup if pupil is None else replace(setup, learner=pupil.learner, restarted=pupil.restarted))
    world = World(
        setups,
        truth.remembering(experiment.jobs().draw(seed)),
        speeds,
        rules,
        routing=experiment.routing,
        transfer_gib_per_s=experiment.transfer_gib_per_s,
        seed=seed,
        check=request.check,
        transcribe=request.check,
        over=truth.forget,
    )
    if teachers is not None:
        teachers.join(world)
    return world


def run_whole(world: World, collector: Collector, seed: int) -> Jobs:
    """Run a world that its collector watches until all its jobs have ended.

    Raises:
        InvalidInput: some never did.
    """
    world.run()
    if world.ended < world.arrived:
        raise InvalidInput(
            f"{world.arrived - world.ended} jobs of the run with seed {seed} never ended",
            "raise slots_max, or take nodes that can hold them",
        )
    return collector.jobs(world.clock.now_s)


def _teachers_of(request: Request) -> Teachers | None:
    """Who learns together in this run, if anybody does; what has been taught before learns no more."""
    if request.taught is not None:
        from fedsched.sim.teaching import Still  # loads torch, which takes a second

        return Still(request.policy, request.experiment.policies[request.policy], request.taught)
    if request.experiment.federation is None:
        return None
    from fedsched.sim.federating import Forming  # loads torch, which takes a second

    return Forming(request.experiment, request.seed, judged=request.check)


def _federations(world: World) -> tuple[FederationResult, ...]:
    if not world.federations:
        return ()
    from fedsched.sim.federation import result_of

    return tuple(result_of(federation) for federation in world.federations)


def _without_bounds(nodes: Sequence[Node]) -> tuple[Node, ...]:
    """For every accelerator type a node with room for whatever may come."""
    first = {node.accelerator: node for node in reversed(nodes)}
    whole = total([node.capacity for node in nodes])
    return tuple(structs.replace(first[kind], capacity=whole * UNBOUNDED) for kind in sorted(first))


def _without_costs(rules: Rules) -> Rules:
    return replace(rules, store_s=0.0, costs=Costs("free"), crowded=False)


class _Truth:
    """The jobs that are there, for policies that are told true speeds."""

    def __init__(self) -> None:
        self.wanted = False
        """Whether anybody asks; else nothing is remembered."""
        self.known: dict[JobId, SimulatedJob] = {}

    def remembering(self, jobs: Iterable[SimulatedJob]) -> Iterator[SimulatedJob]:
        """The same jobs."""
        for job in jobs:
            if self.wanted:
                self.known[job.spec.job_id] = job
            yield job

    def forget(self, job: SimulatedJob, status: JobStatus) -> None:
        """The job is over."""
        self.known.pop(job.spec.job_id, None)


def make_policy(config: PolicyConfig, seed: int) -> Policy:
    """A fresh policy; one that samples draws differently in every run.

    Raises:
        CorruptCheckpoint: its weights cannot be used.
    """
    return make(config.model_copy(update={"seed": config.seed + seed}))


class _BadAnswer(Exception):
    """The policy threw, or its answer cannot be used."""


class _Watch:
    """Counts what the results tell of a run, and ends it at a policy's bad answer where that is wished."""

    def __init__(self, request: Request, progress: Share) -> None:
        self._stops = request.experiment.on_bad_answer == "stop"
        self._jobs = request.jobs
        self._tell_every = max(1, request.jobs // TOLD)
        self._progress = progress
        self._ended = 0
        self.deadline = StepDeadline(request.experiment.decision_s_max)
        self.fallbacks = 0

    def observe(self, event: Event, commands: Sequence[Command]) -> None:
        """Take note of one step."""
        self.deadline.steps += 1
        kind = type(event)
        if kind is JobExited:
            self._ended += 1
            if self._jobs and self._ended % self._tell_every == 0:
                self._progress(min(1.0, self._ended / self._jobs))
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
