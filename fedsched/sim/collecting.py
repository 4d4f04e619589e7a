"""Watches the loops of simulated clusters and keeps what happens, in columns: the jobs, levels over time, lanes."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

import numpy as np

from fedsched.core.cluster import Node
from fedsched.core.commands import Command, SaveJob, ScaleJob
from fedsched.core.events import Event, JobAdopted, JobAssigned, NodeChanged, NodeLost, TermTaken
from fedsched.core.ids import ClusterName, JobId, NodeName
from fedsched.core.job import ACTIVE, TERMINAL, Allocation, JobPhase, JobSpec, JobStatus, Transition, allocation_of
from fedsched.runtime.loop import Observer
from fedsched.sim.results import LEVELS, PHASES, SPENT, Jobs, Lane, Series

_CODE = {phase: code for code, phase in enumerate(PHASES)}
_QUEUED, _STARTING, _RUNNING, _RESIZING, _STOPPING = range(len(SPENT))
_SPENT_IN = {
    **dict.fromkeys(PHASES, _QUEUED),
    JobPhase.STARTING: _STARTING,
    JobPhase.RUNNING: _RUNNING,
    JobPhase.RESIZING: _RESIZING,
    JobPhase.COMPLETING: _STOPPING,
    JobPhase.PREEMPTING: _STOPPING,
}

POINTS_MAX = 1024
"""A series has at most as many points, however long the run: its steps double in length when it is full."""
STEP_S = 1.0
"""Length of a series's first steps."""
LANES_MAX = 128
"""What a job holds over time is kept of at most so many jobs."""
LANE_STEPS_MAX = 400
"""And of at most so many changes of each."""


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
