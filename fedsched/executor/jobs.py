"""The executor: carries out the orders for a cluster's jobs, wherever their tasks run."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import assert_never

from fedsched.core.commands import AdoptJobs, ExecutorCommand, ScaleJob, StartJob, StopJob
from fedsched.core.events import JobExited
from fedsched.core.ids import JobId, NodeName
from fedsched.core.job import JobSpec, Reason
from fedsched.core.resources import Resources
from fedsched.errors import Conflict, FedschedError
from fedsched.executor import records
from fedsched.executor.attempt import AttemptDriver, Context, Deadlines, Discard
from fedsched.executor.backend import TaskBackend
from fedsched.executor.fence import Fence
from fedsched.executor.orders import Programs, Surroundings
from fedsched.executor.records import Attempt, AttemptRecord, Layout
from fedsched.runtime.ports import Post

CLOSE_S = 10.0
"""Longest wait for the threads when the executor is closed."""

_log = logging.getLogger(__name__)


class JobExecutor:
    """Runs a cluster's jobs as tasks that survive it: a later executor on the same `root` adopts them.

    Args:
        tasks: where the tasks run; closed with the executor.
        post: receives the events; called from several threads.
        clock: unix time in seconds, for the events.
        root: directory of this cluster alone; everything that is known of its tasks is kept there.
        trace_file: where tasks append their spans.
        trace_endpoint: where tasks send their spans instead.
        join_deadline_s: how long a job's first tasks may take to begin training.
        scale_deadline_s: how long a resize may take to be carried out before it is rolled back.
        settle_s: how long a job's tasks may take to end once its training has.
        programs: what runs besides the users' commands.
    """

    def __init__(
        self,
        *,
        post: Post,
        clock: Callable[[], float],
        root: Path,
        tasks: TaskBackend,
        trace_file: str = "",
        trace_endpoint: str = "",
        join_deadline_s: float = 60.0,
        scale_deadline_s: float = 30.0,
        settle_s: float = 30.0,
        programs: Programs | None = None,
    ) -> None:
        programs = programs or Programs()
        self._layout = Layout(root)
        self._layout.jobs.mkdir(parents=True, exist_ok=True)
        self._fence = Fence(self._layout)
        self._context = Context(
            post=post,
            clock=clock,
            tasks=tasks,
            surroundings=Surroundings(
                programs, trace_file, trace_endpoint, join_deadline_s, is_this_machine=tasks.is_this_machine
            ),
            deadlines=Deadlines(join_deadline_s, scale_deadline_s, settle_s),
        )
        self._drivers: dict[tuple[JobId, int], AttemptDriver] = {}
        self._inbox: queue.SimpleQueue[ExecutorCommand | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="executor", daemon=True)
        self._thread.start()

    def submit(self, command: ExecutorCommand) -> None:
        """Accept a command without waiting for its effect."""
        self._inbox.put(command)

    def close(self) -> None:
        """Let go of the jobs: they keep running."""
        self._inbox.put(None)
        self._thread.join(CLOSE_S)
        drivers = list(self._drivers.values())
        for driver in drivers:
            driver.let_go()
        self._context.tasks.close()
        until_s = time.monotonic() + CLOSE_S
        for driver in drivers:
            driver.join(max(0.0, until_s - time.monotonic()))

    def taken(self, spec: JobSpec) -> JobSpec:
        """The job with what it will really take of nodes here."""
        return self._context.tasks.taken(spec)

    @property
    def coordinator(self) -> Resources:
        """What a job's coordinator takes of a node here."""
        return self._context.tasks.coordinator

    def log_files(self, job_id: JobId) -> tuple[Path, ...]:
        """The log files of all attempts of a job, oldest attempt first, then by task."""
        attempts = self._layout.attempts(job_id)
        return tuple(path for attempt in attempts for path in sorted(attempt.logs.glob("*.log")))

    def closed(self, nodes: Sequence[NodeName]) -> Mapping[NodeName, str] | None:
        """Those of the nodes that take no tasks now, each with why; None where the cluster does not answer."""
        return self._context.tasks.closed(nodes)

    def _run(self) -> None:
        with suppress(FedschedError, OSError):  # reported again, to the job that needs it
            self._context.tasks.warm_up()
        while (command := self._inbox.get()) is not None:
            try:
                self._obey(command)
            except Exception:
                _log.exception("a fault of fedsched kept an order from being carried out: %s", command)
                self._answer_for(command, "a fault of fedsched kept the attempt from being started")

    def _obey(self, command: ExecutorCommand) -> None:
        try:
            if not self._fence.admit(command.term, command.seq):
                return
        except Conflict as problem:
            _log.warning("%s", problem)
            return
        except OSError as problem:
            # Without the note a later executor cannot refuse this order; ending jobs must work on a full disk.
            _log.warning("cannot take note of an order: %s", problem)
            if isinstance(command, StartJob):
                message = f"cannot write to {self._layout.root}: {problem.strerror}"
                self._post_exit(command.spec.job_id, command.attempt, Reason.NODE_LOST, message)
                return
        self._drivers = {key: driver for key, driver in self._drivers.items() if driver.is_alive()}
        match command:
            case StartJob():
                self._start(command)
            case ScaleJob() | StopJob():
                self._pass_on(command)
            case AdoptJobs():
                self._adopt(command)
            case _:
                assert_never(command)

    def _answer_for(self, command: ExecutorCommand, message: str) -> None:
        if isinstance(command, StartJob):
            self._post_exit(command.spec.job_id, command.attempt, Reason.START_FAILED, message)

    def _post_exit(self, job_id: JobId, attempt: int, reason: Reason, message: str) -> None:
        self._context.post(JobExited(self._context.clock(), job_id, attempt, reason, message))

    def _start(self, command: StartJob) -> None:
        job_id = command.spec.job_id
        try:
            files = self._layout.attempt(job_id, command.attempt)
        except FedschedError as problem:
            self._post_exit(job_id, command.attempt, Reason.START_FAILED, problem.message)
            return
        if files.order.exists():
            _log.warning("attempt %d of job %s was started before; it is not started twice", command.attempt, job_id)
            return
        before = [driver for (other, _), driver in sorted(self._drivers.items()) if other == job_id]
        after = before[-1] if before else None
        self._drive(AttemptDriver(self._context, command.spec, files, term=command.term, start=command, after=after))

    def _pass_on(self, command: ScaleJob | StopJob) -> None:
        driver = self._drivers.get((command.job_id, command.attempt))
        if driver is not None:
            driver.tell(command)
        elif isinstance(command, StopJob) and not self._layout.attempt(command.job_id, command.attempt).path.exists():
            self._post_exit(command.job_id, command.attempt, command.reason, "the attempt was never started")
        # Otherwise its JobExited was posted already, and is on its way to whoever gave the order.

    def _adopt(self, command: AdoptJobs) -> None:
        self._context.tasks.fence(command.term)
        wanted = sorted(command.jobs, key=lambda job: (job[0].job_id, job[1]))
        for spec, number in wanted:
            self._adopt_one(command, spec, number)
        named = {(spec.job_id, number) for spec, number in wanted}
        for job_id, files in self._layout.open_attempts():
            if (job_id, files.number) not in named:
                self._discard(command, job_id, files)

    def _adopt_one(self, command: AdoptJobs, spec: JobSpec, number: int) -> None:
        driver = self._drivers.get((spec.job_id, number))
        files = self._layout.attempt(spec.job_id, number)
        exited = records.read(JobExited, files.exited)
        if exited is not None:
            self._context.post(exited)
        elif driver is not None:
            driver.tell(command)
        elif not files.order.exists():
            self._post_exit(spec.job_id, number, Reason.LOST, "the attempt was never started")
        else:
            self._drive(AttemptDriver(self._context, spec, files, term=command.term, adopt=command))

    def _discard(self, command: AdoptJobs, job_id: JobId, files: Attempt) -> None:
        """End what runs of an attempt that is nobody's: its job may have been started anew, nothing runs twice."""
        driver = self._drivers.get((job_id, files.number))
        record = records.read(AttemptRecord, files.order)
        if driver is None and record is not None:
            driver = self._drive(AttemptDriver(self._context, record.spec, files, term=command.term))
        if driver is not None:
            driver.tell(Discard())

    def _drive(self, driver: AttemptDriver) -> AttemptDriver:
        self._drivers[driver.key] = driver
        driver.start()
        return driver
