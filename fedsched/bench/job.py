"""A real job for benchmarks: the local executor's processes, ordered about and timed from outside."""

from __future__ import annotations

import queue
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from fedsched.core.commands import ScaleJob, StartJob, StopJob
from fedsched.core.events import Event, JobExited, JobScaled, JobStarted, ScaleFailed
from fedsched.core.ids import JobId, NodeName
from fedsched.core.job import JobSpec, Placement, Range, Reason, Role, TaskPlacement, task_name
from fedsched.core.resources import Resources
from fedsched.errors import Failed
from fedsched.executor.jobs import JobExecutor
from fedsched.executor.local import LocalTasks, shut_down
from fedsched.executor.orders import Programs

DEADLINE_S = 120.0
"""Longest wait for something to happen."""
PATIENCE_STEPS = 50
"""While steps end a wait goes on, for so many: on a busy machine all takes longer, as they do."""
ELSEWHERE = "elsewhere"
"""The machine of tasks that shall believe that they share no memory with their job's coordinator."""
E = TypeVar("E", bound=Event)


@dataclass(frozen=True, slots=True)
class Load:
    """How much one step computes."""

    edge: int = 32
    """Of an image, in pixels."""
    batch: int = 4
    """Images of one step, over all workers. Batch normalisation needs two for each."""


def placement(workers: int, ps: int) -> Placement:
    """So many tasks on the one node that there is."""
    tasks = [task_name(Role.WORKER, index) for index in range(workers)] + [task_name(Role.PS, n) for n in range(ps)]
    return tuple(sorted(TaskPlacement(task, NodeName("here")) for task in tasks))


class BenchJob:
    """One job over its attempts, on an executor of its own."""

    def __init__(self, root: Path, load: Load, steps: int, *, streamed: bool = False) -> None:
        self._root = root
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        programs = Programs(launcher_idle_s=60.0)
        env: tuple[tuple[str, str], ...] = ()
        if streamed:
            # A Python program that the launcher can fork, as it does elsewhere: a newcomer that imports torch would
            # take seconds from the workers' cores, which on a machine of its own it has no part in.
            env = (("FEDSCHED_MACHINE", ELSEWHERE),)
            programs = replace(programs, server=f"python -m fedsched.bench.elsewhere {ELSEWHERE}")
        self._executor = JobExecutor(
            post=self._events.put,
            clock=time.time,
            root=root / "cluster",
            tasks=LocalTasks(root / "cluster", programs),
            programs=programs,
            join_deadline_s=DEADLINE_S,
            scale_deadline_s=DEADLINE_S / 2,
            settle_s=DEADLINE_S,
        )
        self._seq = 0
        self.attempt = 0
        self.steps_dir = root / "steps"
        self.steps_dir.mkdir()
        own = {"EDGE": load.edge, "BATCH": load.batch, "STEPS": steps, "STEPS_DIR": self.steps_dir}
        self._spec = JobSpec(
            job_id=JobId("bench"),
            name="bench",
            run="python -m fedsched.bench.worker",
            workers=Range(1, 8),
            ps=Range(0, 8),
            worker_demand=Resources(1000, 2048),
            ps_demand=Resources(1000, 2048),
            epochs=1.0,
            env=(*((name, str(value)) for name, value in own.items()), *env),
            checkpoint_every_s=3600.0,
            grace_s=30.0,
        )

    def start(self, workers: int, ps: int) -> None:
        """Start an attempt and wait until it trains."""
        self.attempt += 1
        self._executor.submit(StartJob(1, self._next(), self._spec, self.attempt, placement(workers, ps)))
        self._wait_for(JobStarted)

    def scale(self, workers: int, ps: int) -> JobScaled:
        """Resize and wait until that is complete, processes that leave included."""
        self._executor.submit(ScaleJob(1, self._next(), self._spec.job_id, self.attempt, placement(workers, ps)))
        return self._wait_for(JobScaled)

    def stop(self) -> JobExited:
        """Stop with a checkpoint and wait until nothing runs."""
        order = StopJob(1, self._next(), self._spec.job_id, self.attempt, Reason.PREEMPTED, True, self._spec.grace_s)
        self._executor.submit(order)
        return self._wait_for(JobExited)

    def wait_for_end(self) -> JobExited:
        """Until it has taken all of its steps."""
        return self._wait_for(JobExited)

    def ends_of_steps(self, attempt: int) -> dict[str, list[tuple[int, float]]]:
        """Of each worker: its steps, and when each had ended, in seconds on the machine's monotonic clock."""
        result = {}
        for path in sorted(self.steps_dir.glob(f"*.{attempt}.txt")):
            lines = [line.split() for line in path.read_text().splitlines() if line.count(".") == 1]
            result[path.name.split(".")[0]] = [(int(step), float(time_s)) for step, time_s in lines]
        return result

    def steps_done(self) -> int:
        """The newest step that has ended."""
        ends = self.ends_of_steps(self.attempt).values()
        return max((steps[-1][0] for steps in ends if steps), default=0)

    def wait_for_steps(self, count: int) -> None:
        """Until so many more steps have ended."""
        wanted, until_s = self.steps_done() + count, time.monotonic() + DEADLINE_S
        while self.steps_done() < wanted:
            if time.monotonic() > until_s:
                raise Failed(f"no {count} steps within {DEADLINE_S:g} s", self._where())
            time.sleep(0.05)

    def close(self) -> None:
        """Leave no process behind."""
        self._executor.close()
        shut_down(self._root / "cluster", grace_s=1.0)

    def _wait_for(self, kind: type[E]) -> E:
        first = last = self.steps_done()
        until_s = time.monotonic() + DEADLINE_S
        while True:
            try:
                event = self._events.get(timeout=1.0)
            except queue.Empty:
                done = self.steps_done()
                if last < done < first + PATIENCE_STEPS:
                    last, until_s = done, time.monotonic() + DEADLINE_S
                if time.monotonic() < until_s:
                    continue
                waited = (
                    f"after {DEADLINE_S:g} s without another step, or {PATIENCE_STEPS} steps; {done - first} have ended"
                )
                raise Failed(f"no {kind.__name__} {waited}\n{self._told()}", self._where()) from None
            if isinstance(event, kind):
                return event
            if isinstance(event, ScaleFailed):
                raise Failed(f"a resize was rolled back: {event.message}", self._where())
            if isinstance(event, JobExited):
                message = f"the benchmark's job ended: {event.reason} {event.message}\n{self._told()}"
                raise Failed(message, self._where())

    def _told(self) -> str:
        """The ends of the tasks' logs."""
        logs = self._executor.log_files(self._spec.job_id)
        return "\n".join(f"{path.name}: {path.read_text()[-500:]}" for path in logs)

    def _where(self) -> str:
        return "run it on a machine with less load, or file the message above as a fault"

    def _next(self) -> int:
        self._seq += 1
        return self._seq


@contextmanager
def bench_job(load: Load, steps: int, *, streamed: bool = False) -> Iterator[BenchJob]:
    """A job in a folder of its own that goes with it.

    Args:
        streamed: as if every task were on a machine of its own: tensors go through gRPC.
    """
    with tempfile.TemporaryDirectory(prefix="fedsched-bench-") as folder, _minded(Path(folder)):
        job = BenchJob(Path(folder), load, steps, streamed=streamed)
        try:
            yield job
        finally:
            job.close()


@contextmanager
def _minded(folder: Path) -> Iterator[None]:
    """See that nothing runs on when this process is killed: its launcher would outlive it, as it outlives agents."""
    command = [sys.executable, "-m", "fedsched.bench.minder", str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True):
        yield
