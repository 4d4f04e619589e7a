"""Runs one task where the cluster put it, and writes down how it ended: `python -m fedsched.executor.shepherd`.

Slurm, Kubernetes and Ray each start this program in the place that they gave the task. It is small, so that what it
promises holds wherever it runs: a task begins only once it is on record and only if nobody newer commands the cluster;
nothing that it started outlives it; its end is on record in the words of the machine that saw it.
"""

from __future__ import annotations

import argparse
import functools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from types import FrameType
from typing import IO

import psutil

from fedsched.core.ids import TaskName
from fedsched.core.job import Reason
from fedsched.executor import records
from fedsched.executor.cgroups import oom_kills
from fedsched.executor.orders import INTERPRETER, with_interpreter_first
from fedsched.executor.processes import adopt_orphans, end_children, start_tied
from fedsched.executor.records import Attempt, ExitRecord, FenceRecord, Layout, TaskOrder, TaskRecord
from fedsched.executor.task import NOT_STARTED, missing, python_program

RECORD_S = 30.0
"""How long a started task may not be on record: that is written at once, but a shared file system may be slow."""
LOOK_S = 1.0
"""How often it is looked whether the attempt still wants the task."""
END_S = 0.05
"""How often it is looked whether the task has ended."""
FENCE_S = 5.0
"""How long a new agent may take to say that it has adopted an order of the one before."""
OOM_COUNTERS = (Path("/sys/fs/cgroup/memory.events"), Path("/proc/vmstat"))
"""Of this container where it says so, else of the machine."""
LAST_WORDS_S = 5.0
"""Longest wait until what the task printed last is in its log, once nothing can print there any more."""
NOT_WANTED = 125
"""Exit code of a task that was not to run any more."""


class Shepherd:
    """One task, from its record to its end.

    Args:
        order: what to run.
        echo: repeat what the task prints, for clusters that keep logs of their own.
        limit_memory: end the task when it uses more memory than it was given, where the cluster does not.
    """

    def __init__(self, order: TaskOrder, *, echo: bool = False, limit_memory: bool = False) -> None:
        self._order = order
        self._echo = echo
        self._limit_mib = order.demand.memory_mib if limit_memory else 0
        self._used_mib = 0
        self._attempt = order.attempt
        self._layout = Layout(self._attempt.job_dir.parent.parent)
        self._child: subprocess.Popen[bytes] | None = None
        self._told: set[int] = set()
        self._repeating: threading.Thread | None = None

    def run(self) -> int:
        """Run the task to its end; its exit code, or 128 and its signal as a shell would give them."""
        signal.signal(signal.SIGTERM, self._pass_on)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        adopt_orphans()
        refusal = self._refusal()
        if refusal:
            return self._not_started(refusal)
        if not self._is_on_record():
            return NOT_WANTED
        kills = oom_kills(*OOM_COUNTERS)
        try:
            child = self._start()
        except OSError as problem:
            return self._not_started(self._why_not(problem))
        code = self._watch(child)
        self._record(
            ExitRecord.of_process(
                child.pid,
                self._order.request,
                code,
                oom_killed=code == -signal.SIGKILL and oom_kills(*OOM_COUNTERS) > kills,
                reason=Reason.OUT_OF_MEMORY if self._used_mib else Reason.NONE,
                message=f"used {self._used_mib} MiB of memory; it was given {self._limit_mib}"
                if self._used_mib
                else "",
            )
        )
        return code if code >= 0 else 128 - code

    def _not_started(self, why: str) -> int:
        self._record(ExitRecord.of_process(os.getpid(), self._order.request, NOT_STARTED, start_error=why))
        return NOT_STARTED

    def _refusal(self) -> str:
        """Why the order is not one to obey, or not any more."""
        until_s = time.monotonic() + FENCE_S
        while (newest := self._newest_term()) > (given := self._given_term()):
            if time.monotonic() > until_s:
                return f"the order is of term {given}; this cluster already obeys term {newest}"
            time.sleep(0.1)
        program = python_program(self._argv(), sys.executable)
        return missing(program, Path(self._order.cwd)) if program is not None and Path(self._order.cwd).is_dir() else ""

    def _newest_term(self) -> int:
        return (records.read(FenceRecord, self._layout.fence) or FenceRecord()).term

    def _given_term(self) -> int:
        order = records.read(TaskOrder, self._attempt.ordered(self._order.task))
        return order.term if order is not None and order.request == self._order.request else self._order.term

    def _argv(self) -> tuple[str, ...]:
        first, *rest = self._order.argv
        return (sys.executable if first == INTERPRETER else first, *rest)

    def _is_on_record(self) -> bool:
        """Wait for the record of the start: no task ever runs that nobody knows of."""
        until_s = time.monotonic() + RECORD_S
        while time.monotonic() < until_s and signal.SIGTERM not in self._told and not self._attempt.exited.exists():
            found = records.read(TaskRecord, self._attempt.task(self._order.task))
            if found is not None and found.request == self._order.request:
                return True
            time.sleep(0.05)
        return False

    def _is_wanted(self) -> bool:
        """Whether the attempt still counts on the task. A machine that was cut off and counted as lost must notice."""
        if self._attempt.exited.exists() or not self._attempt.path.exists():
            return False
        found = records.read(TaskRecord, self._attempt.task(self._order.task))
        return found is None or found.request == self._order.request

    def _start(self) -> subprocess.Popen[bytes]:
        order = self._order
        log = self._attempt.log(order.task).open("ab", buffering=0)
        env = with_interpreter_first(os.environ) | {"FEDSCHED_HOST": own_address()} | dict(order.env)
        with ExitStack() as opened:
            opened.enter_context(log)
            child = start_tied(
                self._argv(),
                cwd=order.cwd,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if self._echo else log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            if child.stdout is not None:
                opened.pop_all()  # the thread closes it
                self._repeating = threading.Thread(target=self._repeat, args=(child.stdout, log), daemon=True)
                self._repeating.start()
        self._child = child
        if signal.SIGTERM in self._told:
            self._pass_on(signal.SIGTERM, None)
        return child

    def _repeat(self, output: IO[bytes], log: IO[bytes]) -> None:
        """To the task's log and to the cluster's own. Read to the end, whatever cannot be written: a task whose words
        nobody takes stands still."""
        with output, log:
            while data := os.read(output.fileno(), 65536):
                for write in (log.write, functools.partial(os.write, 1)):
                    with suppress(OSError):
                        write(data)

    def _why_not(self, problem: OSError) -> str:
        if problem.filename == self._order.cwd:
            return f"cannot enter the working directory {self._order.cwd}: {problem.strerror}"
        if isinstance(problem, FileNotFoundError):
            return f"command not found: {self._order.argv[0]}"
        return f"cannot execute {self._order.argv[0]}: {problem.strerror}"

    def _watch(self, child: subprocess.Popen[bytes]) -> int:
        looked_at_s = time.monotonic()
        while os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            time.sleep(END_S)
            if time.monotonic() - looked_at_s < LOOK_S:
                continue
            looked_at_s = time.monotonic()
            if not self._is_wanted() or self._uses_too_much(child.pid):
                self._signal(signal.SIGKILL)
            _reap_orphans(child.pid)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)  # before the number is free again and may be another's
        code = child.wait()
        self._end_the_rest()
        if self._repeating is not None:
            self._repeating.join(LAST_WORDS_S)  # before the end is on record: then its log is read for the cause
        return code

    def _uses_too_much(self, pid: int) -> bool:
        if not self._limit_mib:
            return False
        used_mib = _resident_mib(pid)
        if used_mib > self._limit_mib:
            self._used_mib = used_mib
        return self._used_mib > 0

    def _end_the_rest(self) -> None:
        """Nothing that the task started outlives it, whatever sessions it made for itself."""
        while psutil.Process().children():
            end_children(())
            with suppress(ChildProcessError):
                os.waitpid(-1, 0)

    def _pass_on(self, number: int, _: FrameType | None) -> None:
        self._told.add(number)
        self._signal(signal.Signals(number))

    def _signal(self, signum: signal.Signals) -> None:
        if self._child is not None and self._child.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._child.pid, signum)

    def _record(self, record: ExitRecord) -> None:
        until_s = time.monotonic() + RECORD_S
        while True:
            try:
                records.write(self._attempt.exit(self._order.task), record)
                return
            except FileNotFoundError:
                return  # the attempt's directory is gone: nobody asks
            except OSError as problem:
                sys.stderr.write(f"cannot record the exit of {self._order.task}: {problem}\n")
                if time.monotonic() > until_s:
                    return
                time.sleep(LOOK_S)


def own_address() -> str:
    """Where other machines of the cluster reach this one: by its name if that leads here, else by its address."""
    name = socket.gethostname()
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(name, None, socket.AF_INET)}
    except OSError:
        found = set()
    own = {entry.address for entries in psutil.net_if_addrs().values() for entry in entries}
    useful = sorted(address for address in found & own if not address.startswith("127."))
    if useful:
        return useful[0]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect(("192.0.2.1", 9))  # sends nothing; the system only chooses the way out
        return str(probe.getsockname()[0])
    return "127.0.0.1"


def _resident_mib(pid: int) -> int:
    """What a process and all that it started hold in memory; what they share is counted for each."""
    total = 0
    with suppress(psutil.Error):
        leader = psutil.Process(pid)
        for process in (leader, *leader.children(recursive=True)):
            with suppress(psutil.Error):
                total += process.memory_info().rss
    return total >> 20


def _reap_orphans(kept: int) -> None:
    """Collect what daemons of the task left when they ended."""
    for child in psutil.Process().children():
        if child.pid != kept:
            with suppress(ChildProcessError):
                os.waitpid(child.pid, os.WNOHANG)


def main(arguments: list[str]) -> int:
    """Run the task whose order is in a file."""
    parser = argparse.ArgumentParser(prog="python -m fedsched.executor.shepherd")
    parser.add_argument("--attempt", type=Path, required=True)
    parser.add_argument("--task", required=True)
    parser.add_argument("--request", required=True)
    parser.add_argument("--echo", action="store_true")
    parser.add_argument("--limit-memory", action="store_true")
    options = parser.parse_args(arguments)
    order = records.read(TaskOrder, Attempt.at(options.attempt).ordered(TaskName(options.task)))
    if order is None or order.request != options.request:
        return NOT_WANTED
    return Shepherd(order, echo=options.echo, limit_memory=options.limit_memory).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
