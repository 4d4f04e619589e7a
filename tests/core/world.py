"""A tiny world around one scheduler: carries orders out when told to, well or badly, and judges from outside."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fedsched.core.cluster import Node
from fedsched.core.commands import (
    AdoptJobs,
    AskPolicy,
    Command,
    ExecutorCommand,
    RewardSlot,
    SaveJob,
    ScaleJob,
    StartJob,
    StopJob,
)
from fedsched.core.decision import Decision
from fedsched.core.events import (
    Event,
    JobAdopted,
    JobExited,
    JobScaled,
    JobStarted,
    NodeChanged,
    NodeLost,
    PolicyDecided,
    ScaleFailed,
    TermTaken,
)
from fedsched.core.ids import ClusterName, JobId, NodeName
from fedsched.core.job import (
    TERMINAL,
    Allocation,
    JobPhase,
    JobSpec,
    JobStatus,
    Placement,
    Progress,
    Range,
    Reason,
    TaskPlacement,
    Transition,
)
from fedsched.core.placement import TentativePlacement
from fedsched.core.resources import Resources
from fedsched.core.scheduler import Scheduler
from fedsched.core.state import SchedulerConfig

CPU = Resources(cpu_milli=1000)


def node(name: str, cpus: int, *, schedulable: bool = True) -> Node:
    return Node(NodeName(name), Resources(cpu_milli=cpus * 1000), schedulable=schedulable)


def spec(name: str, *, workers: tuple[int, int] = (1, 4), ps: tuple[int, int] = (1, 2), **changes: Any) -> JobSpec:
    fields: dict[str, Any] = {
        "job_id": JobId(name),
        "name": name,
        "run": "python train.py",
        "workers": Range(*workers),
        "ps": Range(*ps),
        "worker_demand": CPU,
        "ps_demand": CPU,
        "epochs": 10.0,
        "resize_cooldown_s": 0.0,
        **changes,
    }
    return JobSpec(**fields)


def dispatched(job: JobSpec) -> JobStatus:
    return JobStatus(job.job_id, phase=JobPhase.DISPATCHED, cluster=ClusterName("east"), seq=2)


@dataclass
class Attempt:
    """What really runs of one attempt."""

    spec: JobSpec
    number: int
    tasks: set[TaskPlacement]


@dataclass
class World:
    """Everything outside the scheduler. Orders wait in `inbox` until the test carries one out."""

    nodes: tuple[Node, ...]
    keep_running: bool = True
    now_s: float = 1000.0
    running: dict[JobId, Attempt] = field(default_factory=dict)
    inbox: list[ExecutorCommand] = field(default_factory=list)
    questions: list[AskPolicy] = field(default_factory=list)
    rewards: list[RewardSlot] = field(default_factory=list)
    statuses: dict[JobId, JobStatus] = field(default_factory=dict)
    specs: dict[JobId, JobSpec] = field(default_factory=dict)
    transitions: list[Transition] = field(default_factory=list)
    term: int = 0
    shrunk: set[NodeName] = field(default_factory=set)
    """Nodes that offer less than they did while orders given before are still on their way."""

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """The agent dies and another takes over with what the store has; the tasks do not notice."""
        config = SchedulerConfig(ClusterName("east"), slot_length_s=10.0, keep_running=self.keep_running)
        self.scheduler = Scheduler(config, self.nodes, check=True)
        self.inbox.clear()
        self.questions.clear()
        self.term += 1
        live = tuple(
            (self.specs[job_id], status)
            for job_id, status in sorted(self.statuses.items())
            if status.phase not in TERMINAL
        )
        self.tell(TermTaken(self.now_s, self.term, live))

    def tell(self, event: Event) -> list[Command]:
        self._note_shrinking(event)
        commands = self.scheduler.handle(event)
        for command in commands:
            match command:
                case SaveJob(status, transition):
                    self._persist(status, transition)
                case AskPolicy():
                    self.questions = [command]
                case RewardSlot():
                    self.rewards.append(command)
                case _:
                    self.inbox.append(command)
        return commands

    def _note_shrinking(self, event: Event) -> None:
        match event:
            case NodeLost(_, name):
                self.shrunk.add(name)
            case NodeChanged(_, changed):
                known = self.scheduler.state.nodes.get(changed.name)
                if known is not None and not known.capacity.fits_in(changed.capacity):
                    self.shrunk.add(changed.name)

    def _persist(self, status: JobStatus, transition: Transition | None) -> None:
        before = self.statuses.get(status.job_id)
        assert before is None or before.phase not in TERMINAL, f"{status.job_id} changed after its end"
        if before is not None:
            assert status.seq == before.seq + (transition is not None)
        self.statuses[status.job_id] = status
        if transition is not None:
            self.transitions.append(transition)

    def decide(self, allocations: dict[str, tuple[int, int]] | None = None) -> None:
        """Answer the open question: these (workers, ps), or for None as much for everybody as fits."""
        question = self.questions.pop()
        if allocations is None:
            budget = TentativePlacement(question.observation, question.keep_running)
            for view in question.observation.jobs:
                now, least = budget.allocation(view.job_id), view.minimum
                budget.grant(view.job_id, max(0, least.workers - now.workers), max(0, least.ps - now.ps))
                while budget.grant(view.job_id, workers=1):
                    pass
            answer = budget.allocations()
        else:
            answer = tuple((JobId(name), Allocation(*size)) for name, size in sorted(allocations.items()))
        self.tell(PolicyDecided(self.now_s, Decision(question.observation.slot, answer, "test")))

    def carry_out(self, index: int = 0, *, well: bool = True) -> None:
        """The executor finishes one of the waiting orders."""
        order = self.inbox.pop(index)
        match order:
            case StartJob():
                self._start(order, well)
            case ScaleJob():
                self._scale(order, well)
            case StopJob():
                self._stop(order)
            case AdoptJobs():
                self._adopt(order)

    def settle(self) -> None:
        """All orders are carried out well, those that follow too."""
        while self.inbox:
            self.carry_out()
        self.shrunk.clear()

    def finish(self, job_id: JobId, reason: Reason = Reason.FINISHED, progress: Progress | None = None) -> None:
        """All tasks of the job end by themselves."""
        attempt = self.running.pop(job_id)
        self.tell(JobExited(self.now_s, job_id, attempt.number, reason, "", progress))

    def _start(self, order: StartJob, well: bool) -> None:
        assert order.spec.job_id not in self.running, f"{order.spec.job_id} runs twice"
        self.running[order.spec.job_id] = Attempt(order.spec, order.attempt, set(order.placement))
        self.judge({entry.node for entry in order.placement})
        if well:
            self.tell(JobStarted(self.now_s, order.spec.job_id, order.attempt))
        else:
            self.finish(order.spec.job_id, Reason.TASK_KILLED)

    def _scale(self, order: ScaleJob, well: bool) -> None:
        attempt = self.running.get(order.job_id)
        if attempt is None or attempt.number != order.attempt:
            return
        before: Placement = tuple(sorted(attempt.tasks))
        added = set(order.placement) - attempt.tasks
        attempt.tasks |= added
        self.judge({entry.node for entry in added})
        if well:
            attempt.tasks = set(order.placement)
            self.tell(JobScaled(self.now_s, order.job_id, order.attempt, order.placement, 0.01, order.term, order.seq))
        else:
            attempt.tasks = set(before)
            self.tell(
                ScaleFailed(
                    self.now_s, order.job_id, order.attempt, before, "new tasks did not join", order.term, order.seq
                )
            )

    def _stop(self, order: StopJob) -> None:
        attempt = self.running.get(order.job_id)
        if attempt is not None and attempt.number == order.attempt:
            self.finish(order.job_id, order.reason)

    def _adopt(self, order: AdoptJobs) -> None:
        named = {(job.job_id, number): job for job, number in order.jobs}
        for job_id in sorted(self.running):
            if (job_id, self.running[job_id].number) not in named:
                del self.running[job_id]
        for job_id, number in sorted(named):
            attempt = self.running.get(job_id)
            if attempt is not None and attempt.number == number:
                self.tell(JobAdopted(self.now_s, job_id, number, tuple(sorted(attempt.tasks))))
            else:
                self.tell(JobExited(self.now_s, job_id, number, Reason.LOST, "nothing found"))

    def judge(self, grown: set[NodeName] | None = None) -> None:
        """From outside: no node (of those where tasks were added) runs more than it can hold."""
        for name, known in self.scheduler.state.nodes.items():
            if (grown is not None and name not in grown) or name in self.shrunk:
                continue
            used = Resources()
            for attempt in self.running.values():
                for entry in attempt.tasks:
                    if entry.node == name:
                        used = used + attempt.spec.demand(entry.role)
            assert used.fits_in(known.capacity), f"{name} has {known.capacity} and runs {used}"
        self.scheduler.verify()
