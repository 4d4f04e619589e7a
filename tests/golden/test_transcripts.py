"""A scenario's transcript is a file that people read; a change of behaviour is a diff that somebody has to explain.

`FEDSCHED_REWRITE=1` writes the files anew.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fedsched.core.commands import AskPolicy, Command, RewardSlot, SaveJob, ScaleJob, StartJob, StopJob
from fedsched.core.decision import Policy
from fedsched.core.events import (
    CancelRequested,
    Event,
    JobAssigned,
    NodeChanged,
    PolicyDecided,
    ProgressReported,
    SlotStarted,
)
from fedsched.core.ids import JobId
from fedsched.core.job import Placement, Progress, allocation_of
from fedsched.core.placement import TentativePlacement
from fedsched.policy.registry import heuristic
from tests.core.world import World, dispatched, node, spec

HERE = Path(__file__).parent


class Recorded(World):
    """A world that writes down every step."""

    def __post_init__(self) -> None:
        self.lines: list[str] = []
        super().__post_init__()

    def tell(self, event: Event) -> list[Command]:
        commands = super().tell(event)
        self.lines.append(f"{self.now_s:7.1f} {_say(event)}")
        self.lines += [f"          {line}" for command in commands if (line := _order(command))]
        return commands


def _say(event: Event) -> str:
    match event:
        case SlotStarted(_, slot):
            return f"slot {slot} started"
        case PolicyDecided(_, decision):
            sizes = ", ".join(f"{job} {size}" for job, size in decision.allocations)
            return f"{decision.policy} decided: {sizes or 'nothing'}"
        case JobAssigned(_, job, _):
            return f"{job.job_id} assigned ({job.workers} workers, {job.ps} ps)"
        case ProgressReported(_, job_id, _, progress):
            return f"{job_id} reports {progress.epochs:g} epochs"
        case NodeChanged(_, changed):
            return f"{changed.name} offers {changed.capacity}"
        case _:
            about = (getattr(event, name, "") for name in ("job_id", "reason"))
            return " ".join(str(part) for part in (type(event).__name__, *about) if part)


def _order(command: Command) -> str:
    match command:
        case SaveJob(_, None) | AskPolicy():
            return ""
        case SaveJob(_, step) if step is not None:
            why = f" ({step.reason.value})" if step.reason.value else ""
            return f"{step.job_id}: {step.source} -> {step.target}{why}"
        case StartJob(_, _, job, attempt, placement):
            return f"start {job.job_id} attempt {attempt}: {_where(placement)}"
        case ScaleJob(_, _, job_id, _, placement):
            return f"scale {job_id} to {allocation_of(placement)}: {_where(placement)}"
        case StopJob(_, _, job_id, _, reason, _):
            return f"stop {job_id} ({reason.value})"
        case RewardSlot(slot, progress):
            return f"reward of slot {slot}: {sum(share for _, share in progress):.3f}"
        case _:
            return type(command).__name__


def _where(placement: Placement) -> str:
    return " ".join(f"{entry.task}@{entry.node}" for entry in placement)


def _slot(world: Recorded, number: int, policy: Policy) -> None:
    world.now_s += 10.0
    for job_id, attempt in sorted(world.running.items()):
        done = world.statuses[job_id].progress.epochs + 0.5 * len(attempt.tasks)
        if done >= attempt.spec.epochs:
            world.finish(job_id, progress=Progress(epochs=attempt.spec.epochs))
        else:
            world.tell(ProgressReported(world.now_s, job_id, attempt.number, Progress(epochs=done)))
    world.tell(SlotStarted(world.now_s, number))
    if world.questions:
        question = world.questions.pop()
        budget = TentativePlacement(question.observation, question.keep_running)
        world.tell(PolicyDecided(world.now_s, policy.decide(question.observation, budget)))
    world.settle()


def contended_cluster(policy: str) -> list[str]:
    """Three jobs want two small nodes; one is cancelled, one node shrinks, the agent restarts."""
    world = Recorded((node("n1", 4), node("n2", 4)))
    chosen = heuristic(policy)
    for number, (name, epochs) in enumerate((("long", 12.0), ("short", 4.0), ("third", 6.0))):
        job = spec(name, epochs=epochs, submitted_s=float(number), resize_cooldown_s=15.0)
        world.specs[job.job_id] = job
        world.statuses[job.job_id] = dispatched(job)
        world.tell(JobAssigned(world.now_s, job, world.statuses[job.job_id]))
        _slot(world, number + 1, chosen)
    world.tell(CancelRequested(world.now_s, JobId("third")))
    world.settle()
    _slot(world, 4, chosen)
    world.tell(NodeChanged(world.now_s, node("n1", 2)))
    world.settle()
    world.restart()
    world.settle()
    for number in range(5, 13):
        _slot(world, number, chosen)
    return world.lines


@pytest.mark.parametrize("policy", ["drf", "fifo", "srtf", "optimus"])
def test_the_contended_cluster_goes_as_it_is_written(policy: str) -> None:
    """Whoever changes what the scheduler does sees here what it does to people's jobs."""
    lines = "\n".join(contended_cluster(policy)) + "\n"
    path = HERE / f"contended_cluster.{policy}.txt"
    if os.environ.get("FEDSCHED_REWRITE"):
        path.write_text(lines)
    assert lines == path.read_text()


def test_the_transcript_is_the_same_in_fresh_interpreters_under_any_hash_seed() -> None:
    """Within one process an unordered set looks ordered; only fresh interpreters show it."""
    program = (
        "import hashlib; from tests.golden.test_transcripts import contended_cluster;"
        "print(hashlib.sha256('\\n'.join(contended_cluster('drf')).encode()).hexdigest())"
    )
    expected = hashlib.sha256("\n".join(contended_cluster("drf")).encode()).hexdigest()
    for seed in ("0", "1", "12345"):
        done = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        )
        assert done.stdout.strip() == expected
