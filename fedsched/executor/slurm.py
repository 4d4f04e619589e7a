"""The back end `slurm`: each task is a batch job of its own, on the node that the scheduler chose for it.

Batch jobs survive the agent, can be added and removed one by one, and Slurm accounts for each. What Slurm says of them
is read from `squeue`, which needs no accounting database. Seen to work with Slurm 22.05.
"""

from __future__ import annotations

import logging
import math
import os
import queue
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedsched.core.ids import NodeName
from fedsched.core.job import Reason
from fedsched.core.resources import Resources
from fedsched.errors import StartFailed
from fedsched.executor.launching import MachineTrouble
from fedsched.executor.records import TaskOrder
from fedsched.executor.shepherded import COORDINATOR_NEEDS, Known, Shepherded, TaskCondition

POLL_S = 1.0
"""How often Slurm is asked while there are tasks."""
ASK_S = 20.0
"""Longest wait for an answer of a Slurm command."""
GONE_S = 10.0
"""A job that Slurm has not listed for so long is forgotten there."""
NOT_NOW = ("Unable to contact", "Socket timed out", "Connection refused", "Zero Bytes", "Resource temporarily")
"""What commands say when the controller does not answer: no fault of the job's."""
HELD_BACK = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT")
RUNNING = ("RUNNING", "COMPLETING", "SUSPENDED", "SIGNALING", "STAGE_OUT", "STOPPED", "RESIZING")
"""States of jobs that have a place; those before have none yet."""
OPEN = ("idle", "mixed", "allocated", "completing", "planned", "reserved")
"""States of nodes that take tasks, now or once others have ended; all else, drained and down say, does not."""
SILENT_MARKS = "~#+-"
"""Behind a state: saves power, powers up, has ended jobs, is planned for. A task may come all the same."""
NO_ANSWER = "*"
"""Behind a state: the node does not answer."""
CAUSES = {
    "NODE_FAIL": (Reason.NODE_LOST, "lost its node"),
    "BOOT_FAIL": (Reason.NODE_LOST, "lost its node"),
    "PREEMPTED": (Reason.PREEMPTED, "was preempted"),
    "OUT_OF_MEMORY": (Reason.OUT_OF_MEMORY, "used more memory than it was given"),
    "TIMEOUT": (Reason.PREEMPTED, "reached the time limit of its partition"),
    "DEADLINE": (Reason.PREEMPTED, "reached its deadline"),
    "CANCELLED": (Reason.PREEMPTED, "was cancelled by others"),
}
"""States of a job that ended for a cause that is not its own."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SlurmOptions:
    """How tasks are handed to Slurm."""

    partition: str = ""
    account: str = ""
    options: tuple[str, ...] = ()
    """Further options of `sbatch`, as they are."""
    python: str = sys.executable
    """The interpreter on the nodes; the same path everywhere."""
    coordinator: Resources = COORDINATOR_NEEDS
    """Slurm gives it a whole processor all the same."""


@dataclass(frozen=True, slots=True)
class _Listed:
    state: str
    reason: str
    node: str
    at_s: float
    """When it was listed last, on this process' clock."""


class SlurmTasks(Shepherded):
    """Tasks as batch jobs of the user that the agent runs as.

    The cluster's directory, the users' directories and the interpreter lie on file systems that all nodes share.
    """

    def __init__(self, options: SlurmOptions) -> None:
        super().__init__(options.coordinator)
        self._options = options
        self._jobs: dict[str, _Listed] = {}
        self._orders: queue.SimpleQueue[tuple[list[str], signal.Signals] | None] = queue.SimpleQueue()
        self._listed_at_s = float("-inf")
        self._thread = threading.Thread(target=self._run, name="slurm", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Let go: Slurm keeps the jobs."""
        self._orders.put(None)
        self._thread.join(ASK_S)

    def _submit(self, order: TaskOrder, program: tuple[str, ...]) -> str:
        script = f"#!/bin/sh\nexec {shlex.join([self._options.python, *program])}\n"
        try:
            answer = _ask(self._sbatch(order), script)
        except subprocess.TimeoutExpired as problem:
            raise MachineTrouble(
                f"{order.task} could not be started: Slurm did not answer in {ASK_S:g} s", "see whether `sinfo` answers"
            ) from problem
        if answer.returncode != 0:
            words = " ".join(answer.stderr.split()).removeprefix("sbatch: error: ")
            kind = MachineTrouble if any(sign in words for sign in NOT_NOW) else StartFailed
            raise kind(f"{order.task} could not be started: Slurm refused it: {words}", "see the agent's log")
        return answer.stdout.strip().partition(";")[0]

    def _counted(self, demand: Resources) -> Resources:
        """Whole processors, and at least one: no two jobs share any. No memory would mean all there is."""
        cpus, gpus = math.ceil(demand.cpu_milli / 1000), math.ceil(demand.gpu_milli / 1000)
        return Resources(max(1, cpus) * 1000, max(1, demand.memory_mib), gpus * 1000)

    def _sbatch(self, order: TaskOrder) -> list[str]:
        attempt, counted = order.attempt, self._counted(order.demand)
        command = ["sbatch", "--parsable", "--no-requeue", "--nodes=1", "--ntasks=1", "--open-mode=append"]
        command += [f"--job-name=fedsched:{attempt.job_dir.name}/{attempt.number}/{order.task}"]
        command += [f"--comment={order.request}", f"--output={attempt.log(order.task)}", f"--chdir={attempt.job_dir}"]
        command += [f"--cpus-per-task={counted.cpu_milli // 1000}", f"--mem={counted.memory_mib}M"]
        if counted.gpu_milli:
            command += [f"--gres=gpu:{counted.gpu_milli // 1000}"]
        if order.node:
            command += [f"--nodelist={order.node}"]
        if self._options.partition:
            command += [f"--partition={self._options.partition}"]
        if self._options.account:
            command += [f"--account={self._options.account}"]
        return [*command, *self._options.options]

    def _says(self, handle: str, known: Known) -> TaskCondition:
        found, listed_at_s = self._jobs.get(handle), self._listed_at_s
        if found is None:
            # Forgotten by Slurm, some minutes after it ended; but only a list that came since can tell.
            since_s = known.since_s
            return TaskCondition(ended=time.monotonic() - since_s > GONE_S and listed_at_s > since_s + GONE_S / 2)
        if found.state in (*HELD_BACK, *RUNNING) and listed_at_s - found.at_s > GONE_S:
            return TaskCondition(ended=True)  # it ended, and was forgotten, while Slurm did not answer
        if found.state in HELD_BACK:
            return TaskCondition(waiting=f"Slurm says {found.reason or found.state}")
        if found.state in RUNNING:
            return TaskCondition()
        reason, words = CAUSES.get(found.state, (Reason.NONE, ""))
        if found.state == "CANCELLED" and known.ended_by_us:
            reason = Reason.NONE
        node = f" {found.node}" if found.node and reason is Reason.NODE_LOST else ""
        return TaskCondition(ended=True, reason=reason, message=f"{words}{node} (Slurm job {handle}: {found.state})")

    def _drop(self, handle: str) -> None:
        self._jobs.pop(handle, None)

    def _tell(self, handles: list[str], signum: signal.Signals) -> None:
        self._orders.put((handles, signum))

    def _closed_of(self, nodes: Sequence[NodeName]) -> Mapping[NodeName, str] | None:
        command = ["sinfo", "--noheader", "--Node", "--format=%N|%T|%E"]
        command += [f"--partition={self._options.partition}"] if self._options.partition else []
        try:
            answer = _ask(command)
        except (subprocess.SubprocessError, OSError) as problem:
            _log.warning("Slurm does not say how its nodes are: %s", problem)
            return None
        if answer.returncode != 0:
            _log.warning("Slurm does not say how its nodes are: %s", answer.stderr.strip())
            return None
        said = {name: words for name, *words in (line.split("|", 2) for line in answer.stdout.splitlines())}
        where = f"partition {self._options.partition}" if self._options.partition else "Slurm"
        closed = {node: f"{where} has no such node" for node in nodes if node not in said}
        for node in nodes:
            state, reason = said.get(node, ("idle", ""))
            if state.rstrip(SILENT_MARKS) not in OPEN or NO_ANSWER in state:
                closed[node] = f"Slurm says {state}" + (f", {reason}" if reason not in ("", "none") else "")
        return closed

    def _run(self) -> None:
        """List the jobs and carry out signals; commands of Slurm may take long and nobody else waits for them."""
        while True:
            try:
                order = self._orders.get(timeout=POLL_S)
                if order is None:
                    return
                self._carry_out(*order)
            except queue.Empty:
                pass
            except (subprocess.SubprocessError, OSError) as problem:
                _log.warning("a command of Slurm failed, and is tried again: %s", problem)
            self._list()

    def _carry_out(self, handles: list[str], signum: signal.Signals) -> None:
        # The shepherd is the batch script; it passes a SIGTERM on. What still waits for its place has none.
        if signum is signal.SIGTERM:
            _ask(["scancel", "--quiet", "--batch", "--signal=TERM", *handles])
            _ask(["scancel", "--quiet", "--state=PENDING", *handles])
        else:
            # A plain scancel gives a job some time after SIGTERM, which it has had.
            _ask(["scancel", "--quiet", "--full", "--signal=KILL", *handles])
            _ask(["scancel", "--quiet", *handles])

    def _list(self) -> None:
        with self._lock:
            if not self._known:
                return
        now_s = time.monotonic()
        command = ["squeue", "--noheader", "--states=all", f"--user={os.getuid()}", "--format=%A|%T|%r|%N"]
        try:
            answer = _ask(command)
        except (subprocess.SubprocessError, OSError) as problem:
            _log.warning("Slurm does not answer: %s", problem)
            return
        if answer.returncode != 0:
            _log.warning("Slurm does not answer: %s", answer.stderr.strip())
            return
        lines = [line.split("|") for line in answer.stdout.splitlines() if line.count("|") >= 3]
        with self._lock:
            self._listed_at_s = now_s
            for job, state, reason, node in (line[:4] for line in lines):
                if job in self._known:  # the user may have others
                    self._jobs[job] = _Listed(state, "" if reason == "None" else reason, node, now_s)


def _ask(command: list[str], text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=ASK_S, check=False)
