"""What a simulated run leaves: a row per job, how full each cluster was over time, and the figures made of them."""

from __future__ import annotations

import csv
import io
import json
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsched.core.cluster import Node
from fedsched.core.commands import Command, SaveJob, ScaleJob
from fedsched.core.events import Event, JobAdopted, JobAssigned, NodeChanged, NodeLost, TermTaken
from fedsched.core.ids import ClusterName, JobId, NodeName
from fedsched.core.job import ACTIVE, TERMINAL, Allocation, JobPhase, JobSpec, JobStatus, Transition, allocation_of
from fedsched.errors import InvalidInput
from fedsched.files import whole
from fedsched.runtime.loop import Observer
from fedsched.sim.federation_results import FederationResult

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]

PHASES = tuple(JobPhase)
_CODE = {phase: code for code, phase in enumerate(PHASES)}
_SUCCEEDED = _CODE[JobPhase.SUCCEEDED]

SPENT = ("queued_s", "starting_s", "running_s", "resizing_s", "stopping_s")
"""Where a job's time goes. Together they are its JCT; a job trains only while it is running."""
_QUEUED, _STARTING, _RUNNING, _RESIZING, _STOPPING = range(len(SPENT))
_SPENT_IN = {
    **dict.fromkeys(PHASES, _QUEUED),
    JobPhase.STARTING: _STARTING,
    JobPhase.RUNNING: _RUNNING,
    JobPhase.RESIZING: _RESIZING,
    JobPhase.COMPLETING: _STOPPING,
    JobPhase.PREEMPTING: _STOPPING,
}

LEVELS = ("queued", "active", "gpus_held", "cores_held", "gpus", "cores")
"""What is known of a cluster over time: jobs that wait, jobs that hold tasks, what tasks hold, what nodes offer."""
POINTS_MAX = 1024
"""A series has at most as many points, however long the run: its steps double in length when it is full."""
STEP_S = 1.0
"""Length of a series's first steps."""
LANES_MAX = 128
"""What a job holds over time is kept of at most so many jobs."""
LANE_STEPS_MAX = 400
"""And of at most so many changes of each."""


# --- What is kept ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Jobs:
    """A column per fact, a row per job in order of arrival; times in virtual seconds, NaN where it did not happen."""

    job_id: Sequence[str]
    cluster: Sequence[str]
    phase: NDArray[np.uint8]
    """Index into `PHASES`."""
    submit_s: Floats
    start_s: Floats
    """First start of tasks."""
    finish_s: Floats
    spent_s: Floats
    """Rows by the columns of `SPENT`; up to the end of the run for jobs that are not over."""
    gpu_s: Floats
    """GPU-seconds that its tasks held, starts, resizes and stops included."""
    core_s: Floats
    """The same of CPU cores."""
    resizes: Counts
    preemptions: Counts
    """Stops for the sake of other jobs or for lack of a node."""
    attempts: Counts

    def __len__(self) -> int:
        return len(self.job_id)

    @property
    def jct_s(self) -> Floats:
        """Finish minus submission, queueing included."""
        return self.finish_s - self.submit_s

    @property
    def over(self) -> NDArray[np.bool_]:
        """Rows of jobs that came to an end of any kind."""
        return np.logical_not(np.isnan(self.finish_s))

    @property
    def succeeded(self) -> NDArray[np.bool_]:
        """Rows of jobs whose training came to its end."""
        return np.equal(self.phase, _SUCCEEDED)


@dataclass(frozen=True, slots=True, eq=False)
class Series:
    """How one cluster was over time: means over steps of equal length."""

    cluster: str
    step_s: float
    levels: Floats
    """Rows by time, columns as in `LEVELS`."""

    @property
    def time_s(self) -> Floats:
        """The middle of each step."""
        return np.arange(0.5, len(self.levels)) * self.step_s

    def level(self, name: str) -> Floats:
        """One of `LEVELS`."""
        return self.levels[:, LEVELS.index(name)]

    @property
    def utilisation(self) -> Floats:
        """Share of the GPUs that tasks held; of the CPU cores in a cluster without GPUs."""
        kind = "gpus" if self.level("gpus").any() else "cores"
        offered = self.level(kind)
        held = self.level(f"{kind}_held")
        return np.divide(held, offered, out=np.zeros_like(held), where=offered > 0)

    def coarser(self, step_s: float) -> Series:
        """The same in longer steps; `step_s` is a power of two times this one's."""
        factor = round(step_s / self.step_s)
        rows = math.ceil(len(self.levels) / factor)
        padded = np.zeros((rows * factor, len(LEVELS)))
        padded[: len(self.levels)] = self.levels
        return Series(self.cluster, step_s, padded.reshape(rows, factor, len(LEVELS)).mean(axis=1))


def together(series: Sequence[Series], name: str = "all clusters") -> Series:
    """The sum of several clusters, in the longest of their steps."""
    step_s = max(one.step_s for one in series)
    parts = [one.coarser(step_s).levels for one in series]
    levels = np.zeros((max(len(part) for part in parts), len(LEVELS)))
    for part in parts:
        levels[: len(part)] += part
    return Series(name, step_s, levels)


@dataclass(frozen=True, slots=True)
class Lane:
    """What one job held over time, as a lane of a chart."""

    job_id: str
    submit_s: float
    steps: tuple[tuple[float, str, int], ...]
    """From when on, one of `SPENT`, and how many tasks; the last step ends the job, or the run."""


@dataclass(frozen=True, slots=True, eq=False)
class RunResult:
    """One policy on the jobs of one seed."""

    experiment: str
    policy: str
    """The policy's label."""
    seed: int
    clock: str
    """`exact`: decisions at events. `slots`: decisions at slot starts only."""
    slot_length_s: float
    slots: int
    jobs: Jobs
    series: tuple[Series, ...]
    """One per cluster."""
    lanes: tuple[Lane, ...]
    """Of some jobs, evenly spread over the arrivals."""
    cpu_s: float
    """Of the process, for this run."""
    fallbacks: int
    """Slots that the fallback decided because the policy's answer could not be used."""
    digest: str
    """Of the run's whole story: equal digests, equal runs."""
    partial: str = ""
    """Why the run did not come to its end; empty where it did. What had happened until then is kept."""
    federations: tuple[FederationResult, ...] = ()
    """Who learnt together while it ran."""
    training_seed: int | None = None
    """Of the training that the policy's weights came out of; None where none was made for this comparison."""

    @property
    def unfinished(self) -> int:
        """Jobs that did not come to an end of any kind."""
        return len(self.jobs) - int(self.jobs.over.sum())

    @property
    def failed(self) -> int:
        """Jobs that ended without success."""
        return int((self.jobs.over & ~self.jobs.succeeded).sum())

    @property
    def avg_jct_s(self) -> float | None:
        """Mean over the jobs that succeeded; None where none did."""
        return self._of_jcts(np.mean)

    @property
    def avg_jct_slots(self) -> float | None:
        """The mean in slots, fractions of them included."""
        mean_s = self.avg_jct_s
        return None if mean_s is None else mean_s / self.slot_length_s

    def jct_percentile_s(self, percent: float) -> float | None:
        """The JCT that so many per cent of the jobs that succeeded stay below."""
        return self._of_jcts(lambda times_s: np.percentile(times_s, percent))

    @property
    def makespan_s(self) -> float:
        """From the first arrival to the last end; 0 where nothing ended."""
        ends_s = self.jobs.finish_s[self.jobs.over]
        return float(ends_s.max() - self.jobs.submit_s.min()) if len(ends_s) else 0.0

    @property
    def utilisation(self) -> float:
        """Share of the GPUs (without any: of the CPU cores) that tasks held over the makespan."""
        span_s = self.makespan_s
        if not span_s or not self.series:
            return 0.0
        whole = together(self.series)
        kind, used_s = ("gpus", self.jobs.gpu_s) if whole.level("gpus").any() else ("cores", self.jobs.core_s)
        offered = whole.level(kind)
        mean = float(offered[offered > 0].mean()) if offered.any() else 0.0
        return float(used_s.sum()) / (mean * span_s) if mean else 0.0

    def avg_jct_of_s(self, cluster: str) -> float | None:
        """Mean over the jobs that succeeded in one cluster; None where none did."""
        there = np.array([name == cluster for name in self.jobs.cluster], dtype=np.bool_)
        times_s = self.jobs.jct_s[self.jobs.succeeded & there]
        return float(times_s.mean()) if len(times_s) else None

    def _of_jcts(self, figure: Any) -> float | None:
        times_s = self.jobs.jct_s[self.jobs.succeeded]
        return float(figure(times_s)) if len(times_s) else None

    def plain(self) -> dict[str, Any]:
        """The run's figures as data, without the jobs."""
        spent_s = self.jobs.spent_s.mean(axis=0) if len(self.jobs) else np.zeros(len(SPENT))
        return {
            "experiment": self.experiment,
            "policy": self.policy,
            "seed": self.seed,
            **({} if self.training_seed is None else {"training_seed": self.training_seed}),
            "clock": self.clock,
            "slot_length_s": self.slot_length_s,
            "jobs": len(self.jobs),
            "avg_jct_s": self.avg_jct_s,
            "avg_jct_slots": self.avg_jct_slots,
            "p50_jct_s": self.jct_percentile_s(50),
            "p90_jct_s": self.jct_percentile_s(90),
            "p99_jct_s": self.jct_percentile_s(99),
            "makespan_s": self.makespan_s,
            "utilisation": self.utilisation,
            **{f"avg_{name}": float(mean_s) for name, mean_s in zip(SPENT, spent_s, strict=True)},
            "resizes": int(self.jobs.resizes.sum()),
            "preemptions": int(self.jobs.preemptions.sum()),
            "slots": self.slots,
            "fallbacks": self.fallbacks,
            "unfinished": self.unfinished,
            "failed": self.failed,
            "digest": self.digest,
            "cpu_s": self.cpu_s,
            "partial": bool(self.partial),
            "problem": self.partial or None,
            **({"federations": [federation.plain() for federation in self.federations]} if self.federations else {}),
        }


# --- How it is collected -----------------------------------------------------------------------------------------


class Collector:
    """Watches the loops of a world's clusters (`on` gives each its observer) and keeps what happened in columns.

    A million jobs take some 120 bytes each and their id. An event that moves no job costs next to nothing.
    """

    def __init__(self) -> None:
        self._rows = _Rows()
        self._live: dict[JobId, _Live] = {}
        self._clusters: list[_Cluster] = []
        self._lanes = _Lanes()

    def on(self, cluster: ClusterName, nodes: Sequence[Node]) -> Observer:
        """The observer of the loop of one cluster, which starts with these nodes."""
        watched = _Cluster(len(self._clusters), cluster, nodes)
        self._clusters.append(watched)

        def observe(event: Event, commands: Sequence[Command]) -> None:
            kind = type(event)
            if kind is JobAssigned:
                self._admit(watched, event.spec, event.status, event.time_s)  # type: ignore[union-attr]
            elif kind is TermTaken:
                self._take_up(watched, event)  # type: ignore[arg-type]
            elif kind is NodeChanged or kind is NodeLost:
                watched.change_nodes(event)  # type: ignore[arg-type]
            elif kind is JobAdopted and commands:
                self._find(watched, event)  # type: ignore[arg-type]
            saved: SaveJob | None = None
            for command in commands:
                if type(command) is SaveJob:
                    if command.transition is not None:
                        saved = command
                        self._move(watched, command.transition)
                elif type(command) is ScaleJob and saved is not None:
                    self._overlap(watched, command, saved.status)

        return observe

    def jobs(self, until_s: float) -> Jobs:
        """All rows; the time of jobs that are not over counts up to `until_s`."""
        for live in self._live.values():
            self._rows.spend(live, until_s)
        return self._rows.columns([watched.name for watched in self._clusters])

    def series(self, until_s: float) -> tuple[Series, ...]:
        """Each cluster over time, up to `until_s`."""
        return tuple(watched.levels.series(watched.name, until_s) for watched in self._clusters)

    def lanes(self, until_s: float) -> tuple[Lane, ...]:
        """What some of the jobs held, up to `until_s`."""
        return self._lanes.lanes(self._rows, until_s)

    def _take_up(self, watched: _Cluster, event: TermTaken) -> None:
        """An agent began anew with what the store holds; a step that was not stored has not happened."""
        known = {job_id: row for row, job_id in enumerate(self._rows.job_id)} if event.jobs else {}
        for spec, status in event.jobs:
            live = self._live.get(spec.job_id)
            if live is None and spec.job_id in known and status.phase not in TERMINAL:
                live = self._live[spec.job_id] = _Live(known[spec.job_id], spec)
                live.since_s = event.time_s
                self._rows.reopen(live.row)
                live.cluster = watched
                watched.change(event.time_s, live, queued=1, active=0, gpus=0.0, cores=0.0)
            if live is None or live.cluster is not watched:
                self._admit(watched, spec, status, event.time_s)
            elif live.spends != _SPENT_IN[status.phase]:
                held = live.holds(status.allocation) if status.phase in ACTIVE else (0.0, 0.0)
                self._put(watched, live, event.time_s, status.phase, held)

    def _admit(self, watched: _Cluster, spec: JobSpec, status: JobStatus, time_s: float) -> None:
        if status.phase in TERMINAL:
            return
        live = self._live.get(spec.job_id)
        if live is None:
            live = _Live(self._rows.add(spec, watched.index), spec)
            self._live[spec.job_id] = live
        elif live.cluster is watched:
            return
        elif live.cluster is not None:
            # The cluster before has been given up: what the job held there is gone with it.
            live.cluster.change(time_s, live, queued=-live.is_queued, active=-(not live.is_queued), gpus=0.0, cores=0.0)
            self._rows.spend(live, time_s)
            live.spends, live.gpus, live.cores = _QUEUED, 0.0, 0.0
        live.cluster = watched
        self._rows.cluster[live.row] = watched.index
        watched.change(time_s, live, queued=1, active=0, gpus=live.gpus, cores=live.cores)

    def _move(self, watched: _Cluster, transition: Transition) -> None:
        live = self._live.get(transition.job_id)
        if live is None:
            return
        target = transition.target
        if target not in ACTIVE:
            held = (0.0, 0.0)
        elif target is JobPhase.COMPLETING or target is JobPhase.PREEMPTING:
            held = (live.gpus, live.cores)  # tasks hold what they hold until they are gone
        else:
            held = live.holds(transition.allocation)
        self._put(watched, live, transition.time_s, target, held)
        self._rows.note(live.row, transition)
        if live.row % self._lanes.stride == 0:
            tasks = transition.allocation.workers + transition.allocation.ps if target in ACTIVE else 0
            self._lanes.step(live.row, transition.time_s, live.spends, tasks)
        if target in TERMINAL:
            del self._live[transition.job_id]

    def _put(self, watched: _Cluster, live: _Live, time_s: float, phase: JobPhase, held: tuple[float, float]) -> None:
        """Count the time up to now, and go on with the job in `phase`."""
        self._rows.spend(live, time_s)
        was_queued, active = live.is_queued, phase in ACTIVE
        live.spends = _SPENT_IN[phase]
        queued = not active and phase not in TERMINAL
        gpus, cores = held
        watched.change(
            time_s, live, queued=queued - was_queued, active=active - (not was_queued), gpus=gpus, cores=cores
        )

    def _find(self, watched: _Cluster, event: JobAdopted) -> None:
        """A new agent hears what a job really holds: a resize that was under way may be over, or never was."""
        live = self._live.get(event.job_id)
        if live is not None:
            self._rows.spend(live, event.time_s)
            gpus, cores = live.holds(allocation_of(event.placement))
            watched.change(event.time_s, live, queued=0, active=0, gpus=gpus, cores=cores)

    def _overlap(self, watched: _Cluster, order: ScaleJob, status: JobStatus) -> None:
        """While a job is resized it holds the tasks that leave and those that come."""
        live = self._live.get(order.job_id)
        if live is not None and order.job_id == status.job_id:
            gpus, cores = live.holds(allocation_of(tuple(sorted({*status.placement, *order.placement}))))
            watched.change(live.since_s, live, queued=0, active=0, gpus=gpus, cores=cores)


class _Live:
    """A job that is not over: its row, where its time goes and what it holds since when."""

    __slots__ = ("cluster", "cores", "gpus", "ps", "row", "since_s", "spends", "worker")

    def __init__(self, row: int, spec: JobSpec) -> None:
        self.row = row
        self.since_s = spec.submitted_s
        self.spends = _QUEUED
        self.gpus = self.cores = 0.0
        self.worker = (spec.worker_demand.gpu_milli / 1000, spec.worker_demand.cpu_milli / 1000)
        self.ps = (spec.ps_demand.gpu_milli / 1000, spec.ps_demand.cpu_milli / 1000)
        self.cluster: _Cluster | None = None

    @property
    def is_queued(self) -> bool:
        return self.spends == _QUEUED

    def holds(self, size: Allocation) -> tuple[float, float]:
        """GPUs and cores of so many tasks."""
        return (
            self.worker[0] * size.workers + self.ps[0] * size.ps,
            self.worker[1] * size.workers + self.ps[1] * size.ps,
        )


class _Lanes:
    """Steps of every `stride`-th job; when there are too many, every second lane is dropped."""

    def __init__(self) -> None:
        self.stride = 1
        self._steps: dict[int, list[tuple[float, int, int]]] = {}

    def step(self, row: int, time_s: float, spends: int, tasks: int) -> None:
        """From `time_s` on the job holds so many tasks."""
        steps = self._steps.get(row)
        if steps is None:
            steps = self._steps[row] = []
            if len(self._steps) > LANES_MAX:
                self.stride *= 2
                self._steps = {kept: self._steps[kept] for kept in self._steps if kept % self.stride == 0}
        if len(steps) < LANE_STEPS_MAX:
            steps.append((time_s, spends, tasks))

    def lanes(self, rows: _Rows, until_s: float) -> tuple[Lane, ...]:
        """Those kept, in order of arrival."""
        return tuple(
            Lane(
                rows.job_id[row],
                rows.submit_s[row],
                tuple((time_s, SPENT[spends], tasks) for time_s, spends, tasks in steps)
                + (() if rows.finish_s[row] == steps[-1][0] else ((until_s, SPENT[_QUEUED], 0),)),
            )
            for row, steps in sorted(self._steps.items())
        )


class _Rows:
    """The columns while they grow."""

    def __init__(self) -> None:
        self.job_id: list[str] = []
        self.cluster = array("H")
        self.phase = array("B")
        self.submit_s, self.start_s, self.finish_s = array("d"), array("d"), array("d")
        self.spent_s = [array("d") for _ in SPENT]
        self.gpu_s, self.core_s = array("d"), array("d")
        self.resizes, self.preemptions, self.attempts = array("q"), array("q"), array("q")

    def add(self, spec: JobSpec, cluster: int) -> int:
        """A row for a job that has just come."""
        self.job_id.append(spec.job_id)
        self.cluster.append(cluster)
        self.phase.append(_CODE[JobPhase.DISPATCHED])
        self.submit_s.append(spec.submitted_s)
        for times_s in (self.start_s, self.finish_s):
            times_s.append(math.nan)
        for amounts in (*self.spent_s, self.gpu_s, self.core_s):
            amounts.append(0.0)
        for counts in (self.resizes, self.preemptions, self.attempts):
            counts.append(0)
        return len(self.job_id) - 1

    def reopen(self, row: int) -> None:
        """The job's end was not stored, so it is not over."""
        self.finish_s[row] = math.nan
        self.phase[row] = _CODE[JobPhase.DISPATCHED]

    def spend(self, live: _Live, time_s: float) -> None:
        """Count the time since the job's last change where it belongs."""
        elapsed_s = time_s - live.since_s
        live.since_s = time_s
        self.spent_s[live.spends][live.row] += elapsed_s
        if live.gpus:
            self.gpu_s[live.row] += live.gpus * elapsed_s
        if live.cores:
            self.core_s[live.row] += live.cores * elapsed_s

    def note(self, row: int, transition: Transition) -> None:
        """Take over what a transition says of the job."""
        target = transition.target
        self.phase[row] = _CODE[target]
        self.attempts[row] = transition.attempt
        if target is JobPhase.STARTING:
            if transition.attempt == 1:
                self.start_s[row] = transition.time_s
        elif target is JobPhase.RESIZING:
            self.resizes[row] += 1
        elif target is JobPhase.PREEMPTING:
            self.preemptions[row] += 1
        elif target in TERMINAL:
            self.finish_s[row] = transition.time_s

    def columns(self, clusters: Sequence[ClusterName]) -> Jobs:
        """Everything so far."""
        return Jobs(
            job_id=tuple(self.job_id),
            cluster=tuple(clusters[index] for index in self.cluster),
            phase=np.array(self.phase, dtype=np.uint8),
            submit_s=np.array(self.submit_s),
            start_s=np.array(self.start_s),
            finish_s=np.array(self.finish_s),
            spent_s=np.array(self.spent_s).T,
            gpu_s=np.array(self.gpu_s),
            core_s=np.array(self.core_s),
            resizes=np.array(self.resizes, dtype=np.int64),
            preemptions=np.array(self.preemptions, dtype=np.int64),
            attempts=np.array(self.attempts, dtype=np.int64),
        )


class _Cluster:
    """One cluster while it is watched."""

    def __init__(self, index: int, name: ClusterName, nodes: Sequence[Node]) -> None:
        self.index = index
        self.name = name
        self._nodes: dict[NodeName, Node] = {node.name: node for node in nodes}
        self.levels = _Levels()
        self._offer()

    def change(self, time_s: float, live: _Live, *, queued: int, active: int, gpus: float, cores: float) -> None:
        """From `time_s` on the job holds this much, and so many more jobs wait and are active."""
        levels = self.levels
        levels.advance(time_s)
        levels.queued += queued
        levels.active += active
        levels.gpus_held += gpus - live.gpus
        levels.cores_held += cores - live.cores
        live.gpus, live.cores = gpus, cores

    def change_nodes(self, event: NodeChanged | NodeLost) -> None:
        """A node came, changed or went."""
        self.levels.advance(event.time_s)
        if isinstance(event, NodeChanged):
            self._nodes[event.node.name] = event.node
        else:
            self._nodes.pop(event.name, None)
        self._offer()

    def _offer(self) -> None:
        self.levels.gpus = sum(node.capacity.gpu_milli for node in self._nodes.values()) / 1000
        self.levels.cores = sum(node.capacity.cpu_milli for node in self._nodes.values()) / 1000


class _Levels:
    """Integrals of a cluster's levels over equal steps of time, in bounded space."""

    __slots__ = ("_areas", "_end_s", "_full", "_now_s", "_step_s", *LEVELS)

    def __init__(self) -> None:
        self.queued = self.active = 0
        self.gpus_held = self.cores_held = self.gpus = self.cores = 0.0
        self._now_s = 0.0
        self._step_s = STEP_S
        self._end_s = STEP_S
        """Of the step that fills now."""
        self._areas = [0.0] * len(LEVELS)
        """Of the step that fills now."""
        self._full: list[tuple[float, ...]] = []

    def advance(self, time_s: float) -> None:
        """Hold all levels as they are up to `time_s`."""
        while time_s >= self._end_s:
            self._hold(self._end_s)
            self._full.append(tuple(self._areas))
            self._areas = [0.0] * len(LEVELS)
            if len(self._full) == POINTS_MAX:
                self._full = [
                    tuple(a + b for a, b in zip(first, second, strict=True))
                    for first, second in zip(self._full[::2], self._full[1::2], strict=True)
                ]
                self._step_s *= 2
            self._end_s = (len(self._full) + 1) * self._step_s
        if time_s > self._now_s:
            self._hold(time_s)

    def _hold(self, time_s: float) -> None:
        elapsed_s = time_s - self._now_s
        self._now_s = time_s
        areas = self._areas
        areas[0] += self.queued * elapsed_s
        areas[1] += self.active * elapsed_s
        areas[2] += self.gpus_held * elapsed_s
        areas[3] += self.cores_held * elapsed_s
        areas[4] += self.gpus * elapsed_s
        areas[5] += self.cores * elapsed_s

    def series(self, cluster: str, until_s: float) -> Series:
        """Means over the steps; the last one may be short."""
        self.advance(until_s)
        rows, lengths_s = list(self._full), [self._step_s] * len(self._full)
        begun_s = self._now_s - len(self._full) * self._step_s
        if begun_s > 0:
            rows.append(tuple(self._areas))
            lengths_s.append(begun_s)
        levels = np.array(rows).reshape(len(rows), len(LEVELS)) / np.array(lengths_s).reshape(-1, 1)
        return Series(cluster, self._step_s, levels)


# --- Files -------------------------------------------------------------------------------------------------------

COLUMNS = (
    "job_id",
    "policy",
    "seed",
    "training_seed",
    "cluster",
    "phase",
    "submit_s",
    "start_s",
    "finish_s",
    "jct_s",
    *SPENT,
    "gpu_s",
    "core_s",
    "resizes",
    "preemptions",
    "attempts",
)


def _columns(run: RunResult) -> dict[str, Sequence[Any]]:
    """A run's rows by the names in `COLUMNS`."""
    jobs, count = run.jobs, len(run.jobs)
    times_s = {
        name: [None if math.isnan(value) else value for value in values.tolist()]
        for name, values in (("start_s", jobs.start_s), ("finish_s", jobs.finish_s), ("jct_s", jobs.jct_s))
    }
    return {
        "job_id": jobs.job_id,
        "policy": [run.policy] * count,
        "seed": [run.seed] * count,
        "training_seed": [run.training_seed] * count,
        "cluster": jobs.cluster,
        "phase": [PHASES[code].value for code in jobs.phase.tolist()],
        "submit_s": jobs.submit_s.tolist(),
        **times_s,
        **{name: jobs.spent_s[:, index].tolist() for index, name in enumerate(SPENT)},
        "gpu_s": jobs.gpu_s.tolist(),
        "core_s": jobs.core_s.tolist(),
        "resizes": jobs.resizes.tolist(),
        "preemptions": jobs.preemptions.tolist(),
        "attempts": jobs.attempts.tolist(),
    }


def write_csv(path: Path, runs: Sequence[RunResult]) -> None:
    """A line per job of every run; empty where something did not happen. Numbers are exact.

    Raises:
        OSError: it could not be written.
    """
    with whole(path) as raw, io.TextIOWrapper(raw, "utf-8", newline="") as text:
        lines = csv.writer(text, lineterminator="\n")
        lines.writerow(COLUMNS)
        for run in runs:
            columns = _columns(run)
            lines.writerows(zip(*(columns[name] for name in COLUMNS), strict=True))


def write_parquet(path: Path, runs: Sequence[RunResult]) -> None:
    """The same as a Parquet table; the figures of each run are JSON in the file's metadata, under `fedsched.runs`.

    Left out is the CPU time that a run took, so that the same runs are the same bytes.

    Raises:
        InvalidInput: pyarrow is not installed.
        OSError: it could not be written.
    """
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError as problem:
        missing = "Parquet files need pyarrow, which is not installed"
        raise InvalidInput(missing, "pip install 'fedsched[sim]'") from problem
    kinds = {
        **dict.fromkeys(COLUMNS, pa.float64()),
        **dict.fromkeys(("seed", "training_seed", "resizes", "preemptions", "attempts"), pa.int64()),
        **dict.fromkeys(("job_id", "policy", "cluster", "phase"), pa.string()),
    }
    figures = [{name: value for name, value in run.plain().items() if name != "cpu_s"} for run in runs]
    told = json.dumps(figures).encode()
    schema = pa.schema([(name, kinds[name]) for name in COLUMNS], metadata={"fedsched.runs": told})
    tables = (pa.table(_columns(run), schema=schema) for run in runs)
    with whole(path) as raw, parquet.ParquetWriter(raw, schema) as writer:
        for table in tables:
            writer.write_table(table)
