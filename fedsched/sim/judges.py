"""Judges of a whole simulated run: they see only what clusters were told and ordered, and believe nobody's counting."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from fedsched.core.cluster import Node
from fedsched.core.commands import AdoptJobs, AskPolicy, Command, SaveJob, ScaleJob, StartJob, StopJob
from fedsched.core.events import (
    Event,
    JobAdopted,
    JobAssigned,
    JobExited,
    JobScaled,
    NodeChanged,
    NodeLost,
    ScaleFailed,
    SlotStarted,
    TermTaken,
)
from fedsched.core.ids import ClusterName, JobId, NodeName
from fedsched.core.job import (
    ACTIVE,
    LIFECYCLE,
    TERMINAL,
    JobPhase,
    JobSpec,
    JobStatus,
    Placement,
    TaskPlacement,
    Transition,
)
from fedsched.runtime.loop import Observer
from fedsched.sim.results import Jobs

LEGAL = frozenset((source, target) for (source, _), target in LIFECYCLE.items())
"""Moves that some trigger makes."""
TOLERANCE = 1e-6
"""Relative; sums of the same times in different orders differ in their last bits."""

_KINDS = ("cpu_milli", "memory_mib", "gpu_milli")


class BrokenPromise(AssertionError):
    """A run did what no run may do: a fault of ours, with the cluster, the job or node and the time."""


class Judges:
    """Watch all clusters of a world (`on` gives each its observer); `close` judges the run as a whole.

    Promised are: no node holds more than it has; GPU-seconds on nodes are those of the jobs; no job is lost, or ends
    twice, or moves as the table of its life does not allow; time, attempts, terms, orders and slots only grow.

    Args:
        rebuilt: every slot is placed anew; tasks change places in one instant, and nodes are judged when it is over.
    """

    def __init__(self, *, rebuilt: bool = False) -> None:
        self._rebuilt = rebuilt
        self._jobs: dict[JobId, _Judged] = {}
        self._clusters: list[_Watched] = []

    def on(self, cluster: ClusterName, nodes: Sequence[Node]) -> Observer:
        """The observer of the loop of one cluster, which starts with these nodes."""
        watched = _Watched(cluster, nodes, self._jobs, self._rebuilt)
        self._clusters.append(watched)
        return watched.observe

    def close(self, jobs: Jobs, until_s: float, *, submitted: int | None = None, complete: bool = True) -> None:
        """Judge the run as a whole.

        Args:
            jobs: what was kept of the run.
            until_s: when it ended.
            submitted: how many jobs came; None where that is not known.
            complete: whether the run went on until every job was over.

        Raises:
            BrokenPromise: names what does not hold.
        """
        if submitted is not None and complete and len(self._jobs) != submitted:
            raise BrokenPromise(f"{submitted} jobs were submitted and {len(self._jobs)} came to a cluster")
        if len(jobs) != len(self._jobs):
            raise BrokenPromise(f"{len(self._jobs)} jobs came and {len(jobs)} are in the results")
        lost = sorted(job_id for job_id, job in self._jobs.items() if job.phase not in TERMINAL)
        if complete and lost:
            phase = self._jobs[lost[0]].phase.value
            raise BrokenPromise(f"{len(lost)} jobs are lost, the first is job {lost[0]}, still {phase} at {until_s} s")
        wrong = [
            job_id
            for job_id, code in zip(jobs.job_id, jobs.over.tolist(), strict=True)
            if code != (self._jobs[JobId(job_id)].phase in TERMINAL)
        ]
        if wrong:
            raise BrokenPromise(f"job {wrong[0]} is over in the results and not in truth, or the other way")
        self._conserved(jobs, until_s)

    def _conserved(self, jobs: Jobs, until_s: float) -> None:
        """What nodes gave must be what jobs got; the two are counted from different parts of the story."""
        for kind, got in (("GPU", float(jobs.gpu_s.sum())), ("core", float(jobs.core_s.sum()))):
            given = sum(watched.given(until_s, gpus=kind == "GPU") for watched in self._clusters)
            if not math.isclose(given, got, rel_tol=TOLERANCE, abs_tol=TOLERANCE):
                raise BrokenPromise(f"nodes gave {given:.6f} {kind}-seconds and jobs got {got:.6f}")


class _Judged:
    """What is known of one job."""

    __slots__ = ("attempt", "expected", "held", "phase", "resize", "seq", "sought", "spec")

    def __init__(self, spec: JobSpec, status: JobStatus) -> None:
        self.spec = spec
        self.phase = status.phase
        self.seq = status.seq
        self.attempt = status.attempt
        self.held: Placement = ()
        """Tasks that may exist: those that run and those that an order adds."""
        self.sought = False
        """The agent has changed, and the new one has not been told yet what it holds."""
        self.resize = (0, 0)
        """Term and number of the newest resize: other answers are to older orders."""
        self.expected: dict[type, set[TaskPlacement]] = {}
        """What it leaves when it succeeds and when it fails."""


class _Watched:
    """One cluster's judge."""

    def __init__(self, cluster: ClusterName, nodes: Sequence[Node], jobs: dict[JobId, _Judged], rebuilt: bool) -> None:
        self._cluster = cluster
        self._rebuilt = rebuilt
        self._fuller: dict[NodeName, JobId] = {}
        """Nodes that got tasks in this instant, with who came last; judged when it is over where slots are rebuilt."""
        self._jobs = jobs
        self._nodes = {node.name: node for node in nodes}
        self._used: dict[NodeName, list[int]] = {}
        """Amounts of `_KINDS` that tasks hold of each node."""
        self._held = [0, 0, 0]
        """The same of all nodes, lost ones included."""
        self._given = [0.0, 0.0, 0.0]
        """Amounts times seconds up to `_now_s`."""
        self._now_s = -math.inf
        self._term = 0
        self._order = (0, 0)
        self._slot = -1

    def observe(self, event: Event, commands: Sequence[Command]) -> None:
        """Judge one step.

        Raises:
            BrokenPromise: names what does not hold.
        """
        time_s = event.time_s
        if time_s != self._now_s:
            self._pass(time_s)
        hear = _HEARD.get(type(event))
        if hear is not None:
            hear(self, event)
        for command in commands:
            weigh = _WEIGHED.get(type(command))
            if weigh is not None:
                weigh(self, command)

    def given(self, until_s: float, *, gpus: bool) -> float:
        """GPU- or core-seconds that nodes gave to tasks."""
        index = 2 if gpus else 0
        rest_s = max(0.0, until_s - self._now_s) if math.isfinite(self._now_s) else 0.0
        return (self._given[index] + self._held[index] * rest_s) / 1000

    # --- what a cluster hears

    def _pass(self, time_s: float) -> None:
        if time_s < self._now_s:
            self._break(f"an event of {time_s} s came after one of {self._now_s} s")
        for name, job_id in self._fuller.items():
            self._has_room(job_id, name)
        self._fuller.clear()
        if any(self._held):
            elapsed_s = time_s - self._now_s
            for index, amount in enumerate(self._held):
                self._given[index] += amount * elapsed_s
        self._now_s = time_s

    def _assigned(self, event: JobAssigned) -> None:
        judged = self._jobs.get(event.spec.job_id)
        if judged is None:
            self._jobs[event.spec.job_id] = _Judged(event.spec, event.status)
        elif judged.phase in TERMINAL and event.status.phase not in TERMINAL:
            self._break(f"job {event.spec.job_id} was assigned again after it was {judged.phase.value}")

    def _new_term(self, event: TermTaken) -> None:
        if event.term <= self._term:
            self._break(f"term {event.term} was taken after term {self._term}")
        self._term, self._order = event.term, (event.term, 0)
        for spec, status in event.jobs:
            judged = self._jobs.get(spec.job_id)
            if judged is None:
                judged = self._jobs[spec.job_id] = _Judged(spec, status)
            elif status.seq > judged.seq or status.attempt > judged.attempt:
                self._break(f"the store is ahead of job {spec.job_id}: seq {status.seq} of {judged.seq}")
            judged.expected, judged.sought = {}, status.phase in ACTIVE
            # Steps that were not stored have not happened, and their orders never went out. What was ordered with the
            # stored step may still be under way.
            if status.seq != judged.seq:
                judged.phase, judged.seq, judged.attempt = status.phase, status.seq, status.attempt
                self._hold(judged, status.placement if status.phase in ACTIVE else (), checked=False)

    def _slot_started(self, event: SlotStarted) -> None:
        if event.slot <= self._slot:
            self._break(f"slot {event.slot} started after slot {self._slot}")
        self._slot = event.slot

    def _settled(self, event: JobScaled | ScaleFailed | JobAdopted) -> None:
        judged = self._jobs.get(event.job_id)
        if judged is None or judged.attempt != event.attempt or judged.phase not in ACTIVE:
            return
        if isinstance(event, JobAdopted):
            settles = judged.sought
        else:
            newest = (event.term, event.seq) == judged.resize
            settles = newest and set(event.placement) == judged.expected.get(type(event))
        if settles:
            judged.expected, judged.sought = {}, False
            self._hold(judged, event.placement, checked=False)

    def _exited(self, event: JobExited) -> None:
        judged = self._jobs.get(event.job_id)
        if judged is not None and judged.attempt == event.attempt:
            self._hold(judged, (), checked=False)

    def _node_changed(self, event: NodeChanged) -> None:
        self._nodes[event.node.name] = event.node

    def _node_lost(self, event: NodeLost) -> None:
        self._nodes.pop(event.name, None)

    # --- what it orders

    def _saved(self, command: SaveJob) -> None:
        if command.transition is not None:
            self._moved(command.transition)

    def _moved(self, step: Transition) -> None:
        judged = self._jobs.get(step.job_id)
        if judged is None:
            self._break(f"job {step.job_id} became {step.target.value} and never came here")
            return
        if judged.phase in TERMINAL:
            self._break(f"job {step.job_id} became {step.target.value} after it was {judged.phase.value}")
        if step.source is not judged.phase or (step.source, step.target) not in LEGAL:
            source = step.source.value if step.source else "nothing"
            self._break(f"job {step.job_id} went from {source} to {step.target.value}; it was {judged.phase.value}")
        attempt = judged.attempt + (step.target is JobPhase.STARTING)
        if step.attempt != attempt:
            self._break(f"job {step.job_id} is in attempt {step.attempt}; {attempt} was expected")
        if step.seq != judged.seq + 1 or step.term != self._term:
            self._break(
                f"step {step.seq} of term {step.term} of job {step.job_id} came after step {judged.seq}, "
                f"in term {self._term}"
            )
        if step.time_s != self._now_s:
            self._break(f"a step of job {step.job_id} is dated {step.time_s} s")
        if step.target in TERMINAL and judged.held:
            self._break(f"job {step.job_id} is {step.target.value} and holds {len(judged.held)} tasks")
        judged.phase, judged.seq, judged.attempt = step.target, step.seq, step.attempt

    def _ordered(self, command: StartJob | ScaleJob | StopJob | AdoptJobs) -> None:
        order = (command.term, command.seq)
        if order <= self._order or command.term != self._term:
            self._break(f"order {order} was given after order {self._order}")
        self._order = order

    def _start(self, command: StartJob) -> None:
        self._ordered(command)
        self._add(command.spec.job_id, command.attempt, command.placement)

    def _scale(self, command: ScaleJob) -> None:
        self._ordered(command)
        judged = self._jobs.get(command.job_id)
        if judged is not None:
            judged.resize = (command.term, command.seq)
            judged.expected = {JobScaled: set(command.placement), ScaleFailed: set(judged.held)}
        self._add(command.job_id, command.attempt, command.placement)

    def _stop(self, command: StopJob) -> None:
        self._ordered(command)
        judged = self._jobs.get(command.job_id)
        if judged is not None:
            judged.expected = {}  # what it holds counts until the exit, whatever a resize still says

    def _add(self, job_id: JobId, attempt: int, placement: Placement) -> None:
        judged = self._jobs.get(job_id)
        if judged is None or judged.attempt != attempt or judged.phase not in ACTIVE:
            self._break(f"attempt {attempt} of job {job_id} got tasks and is none that runs")
            return
        if len({entry.task for entry in placement}) < len(placement):
            self._break(f"job {job_id} got a task twice")
        held = set(judged.held)
        self._hold(judged, (*judged.held, *(entry for entry in placement if entry not in held)))

    def _asked(self, command: AskPolicy) -> None:
        for view in command.observation.jobs:
            judged = self._jobs.get(view.job_id)
            if judged is None or judged.phase in TERMINAL:
                self._break(f"the policy was asked about job {view.job_id}, which is over or never came")

    # --- what tasks hold

    def _hold(self, judged: _Judged, placement: Placement, *, checked: bool = True) -> None:
        """The job's tasks are these from now on; nodes must have room for those that are new."""
        before, judged.held = judged.held, placement
        if not before and not placement:
            return
        for entry in before:
            self._book(judged.spec, entry, -1)
        for entry in placement:
            self._book(judged.spec, entry, 1)
        if checked:
            for entry in placement if not before else set(placement).difference(before):
                if self._rebuilt:
                    self._fuller[entry.node] = judged.spec.job_id
                else:
                    self._has_room(judged.spec.job_id, entry.node)

    def _book(self, spec: JobSpec, entry: TaskPlacement, sign: int) -> None:
        demand = spec.demand(entry.role)
        used = self._used.get(entry.node)
        if used is None:
            used = self._used[entry.node] = [0, 0, 0]
        for amounts in (used, self._held):
            amounts[0] += sign * demand.cpu_milli
            amounts[1] += sign * demand.memory_mib
            amounts[2] += sign * demand.gpu_milli

    def _has_room(self, job_id: JobId, name: NodeName) -> None:
        node = self._nodes.get(name)
        if node is None:
            self._break(f"job {job_id} got a task on node {name}, which is not there")
            return
        used, capacity = self._used[name], node.capacity
        for kind, amount, offered in zip(
            _KINDS, used, (capacity.cpu_milli, capacity.memory_mib, capacity.gpu_milli), strict=True
        ):
            if amount > offered:
                self._break(f"node {name} holds {amount} {kind} and has {offered}; the last to come was job {job_id}")

    def _break(self, message: str) -> None:
        raise BrokenPromise(f"cluster {self._cluster} at {self._now_s} s: {message}")


_HEARD: dict[type, Callable[[_Watched, Any], None]] = {
    JobAssigned: _Watched._assigned,
    TermTaken: _Watched._new_term,
    SlotStarted: _Watched._slot_started,
    JobScaled: _Watched._settled,
    ScaleFailed: _Watched._settled,
    JobAdopted: _Watched._settled,
    JobExited: _Watched._exited,
    NodeChanged: _Watched._node_changed,
    NodeLost: _Watched._node_lost,
}
_WEIGHED: dict[type, Callable[[_Watched, Any], None]] = {
    SaveJob: _Watched._saved,
    StartJob: _Watched._start,
    ScaleJob: _Watched._scale,
    StopJob: _Watched._stop,
    AdoptJobs: _Watched._ordered,
    AskPolicy: _Watched._asked,
}
