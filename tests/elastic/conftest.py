"""Runs real jobs, one process per task, as an executor would."""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
import torch

from fedsched.elastic import coordinator, ending, server
from fedsched.pb import training_pb2 as pb
from fedsched.pb.training_pb2_grpc import JobControlStub
from tests.waiting import eventually

# The models are tiny: several threads would only wait for each other, for minutes where other tests hold the cores.
torch.set_num_threads(1)

SCRIPT = Path(__file__).parent / "tiny.py"
DEADLINE_S = 60.0
SURROUNDINGS = dict(os.environ)
"""As they are before any test sets something for the reference that it computes in this process."""


def _task(environ: dict[str, str], log: str) -> None:
    """A task's process from start to end."""
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    # The fork server was started in the midst of some test, and would pass on what that one had set.
    os.environ.clear()
    os.environ.update(environ)
    try:
        _run(environ["FEDSCHED_ROLE"])
    except Exception as problem:
        # As an interpreter does: what runs at exit may ask for the exception that ended the program.
        sys.last_value = problem
        traceback.print_exc()
        sys.exit(1)
    finally:
        # An interpreter runs these; a process of multiprocessing does not, and would leave its job without a word.
        atexit._run_exitfuncs()


def _run(role: str) -> None:
    if role == "worker":
        runpy.run_path(os.environ.get("SCRIPT", str(SCRIPT)), run_name="__main__")
        return
    if role == "ps":
        ending.run(server.main)
    ending.run(coordinator.main)


# Forked from a process that has imported torch once: a task starts in a tenth of a second instead of several.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["fedsched.elastic.preload", "tests.elastic.conftest"])


class Job:
    """One job over its attempts."""

    def __init__(self, root: Path, **env: str) -> None:
        self.root = root
        self.env = env
        self.attempt = 0
        self.machines: dict[str, str] = {}
        """Tasks that shall believe to be elsewhere: they share no memory with those of other machines."""
        self.tasks: list[str] = []
        self.processes: dict[str, BaseProcess] = {}
        self._seq = 0
        self._pool = ThreadPoolExecutor(4)
        self._channel: grpc.Channel | None = None

    @property
    def attempt_dir(self) -> Path:
        return self.root / f"attempt-{self.attempt}"

    @property
    def out(self) -> Path:
        return self.attempt_dir / "out"

    def start(self, *tasks: str) -> Job:
        """Start an attempt with these first members."""
        self.attempt += 1
        self.out.mkdir(parents=True)
        self.tasks = sorted(tasks)
        self.launch("coordinator", FEDSCHED_TASKS=",".join(self.tasks))
        ready = self.attempt_dir / "coordinator.json"
        eventually(
            lambda: ready.exists() or not self.processes["coordinator"].is_alive(), "the coordinator starts", DEADLINE_S
        )
        if ready.exists():
            self.address = json.loads(ready.read_text())["address"]
            self._channel = grpc.insecure_channel(self.address)
            self.control = JobControlStub(self._channel)
            for task in self.tasks:
                self.launch(task)
        return self

    def launch(self, task: str, **env: str) -> None:
        """Start one task's process."""
        role = task.rsplit("-", 1)[0]
        environ = {
            **SURROUNDINGS,
            "FEDSCHED_JOB_ID": "tiny",
            "FEDSCHED_ATTEMPT": str(self.attempt),
            "FEDSCHED_ROLE": role,
            "FEDSCHED_TASK": task,
            "FEDSCHED_JOB_DIR": str(self.root),
            "FEDSCHED_ATTEMPT_DIR": str(self.attempt_dir),
            "FEDSCHED_CHECKPOINT_EVERY_S": "0.5",
            "OUT": str(self.out),
            **self.env,
            **env,
        }
        if task in self.machines:
            environ["FEDSCHED_MACHINE"] = self.machines[task]
        if role != "coordinator":
            environ["FEDSCHED_COORDINATOR"] = self.address
        process = _CONTEXT.Process(target=_task, args=(environ, str(self.attempt_dir / f"{task}.log")), name=task)
        process.start()
        self.processes[task] = process

    def scale(self, *tasks: str, deadline_s: float = 30.0, start: bool = True) -> pb.ScaleReply:
        """Make these the members; wait for the leavers' processes to end."""
        return self.scale_soon(*tasks, deadline_s=deadline_s, start=start).result()

    def scale_soon(self, *tasks: str, deadline_s: float = 30.0, start: bool = True) -> Future[pb.ScaleReply]:
        """The same, without waiting."""
        self._seq += 1
        request = pb.ScaleRequest(seq=self._seq, tasks=tasks, deadline_s=deadline_s)
        for task in sorted(set(tasks) - set(self.tasks)) if start else []:
            self.launch(task)
        leaving = sorted(set(self.tasks) - set(tasks))

        def call() -> pb.ScaleReply:
            reply = self.control.Scale(request, timeout=DEADLINE_S)
            self.tasks = list(reply.tasks)
            if reply.ok:
                for task in leaving:
                    self.processes[task].join(DEADLINE_S)
                    assert self.processes[task].exitcode == 0, self.log(task)
            return reply

        return self._pool.submit(call)

    def report(self) -> pb.JobReport:
        """How the job stands now."""
        return next(iter(self.control.Follow(pb.FollowRequest(), timeout=DEADLINE_S)))

    def until_step(self, step: int) -> None:
        """Wait until so many steps are done."""
        eventually(lambda: self.report().steps >= step, f"step {step}", DEADLINE_S)

    def result(self) -> dict[str, Any]:
        """The attempt's result once its coordinator has ended."""
        self.processes["coordinator"].join(DEADLINE_S)
        path = self.attempt_dir / "result.json"
        assert path.exists(), self.log("coordinator")
        return cast(dict[str, Any], json.loads(path.read_text()))

    def ended(self) -> dict[str, int | None]:
        """Exit codes once every task has ended by itself."""
        for process in self.processes.values():
            process.join(DEADLINE_S)
        return {task: process.exitcode for task, process in self.processes.items()}

    def log(self, task: str) -> str:
        """What the task printed."""
        path = self.attempt_dir / f"{task}.log"
        return path.read_text() if path.exists() else ""

    def logs(self) -> str:
        """How everybody ended and what everybody printed, and the result; for a failing test."""
        told = [f"{task} ended with {p.exitcode}: {self.log(task)}" for task, p in sorted(self.processes.items())]
        result = self.attempt_dir / "result.json"
        return "\n".join([*told, result.read_text() if result.exists() else "no result"])

    def close(self) -> None:
        """Leave no process behind."""
        for process in self.processes.values():
            if process.is_alive():
                process.kill()
            process.join(DEADLINE_S)
        self._pool.shutdown(wait=True, cancel_futures=True)
        if self._channel:
            self._channel.close()


@pytest.fixture
def job_of(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Makes jobs and ends them with the test."""
    jobs: list[Job] = []

    def make(name: str = "job", **env: str) -> Job:
        jobs.append(Job(tmp_path / name, **env))
        return jobs[-1]

    yield make
    for job in jobs:
        job.close()
