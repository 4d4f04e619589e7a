"""What each task of a job is started with: its program, its working directory, its environment."""

from __future__ import annotations

import os
import shlex
import sys
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fedsched.core.ids import TaskName
from fedsched.core.job import COORDINATOR, JobSpec, Role, TaskPlacement, role_of
from fedsched.errors import StartFailed
from fedsched.executor.records import Attempt, TaskOrder

READ_AT_START = ("PYTHON", "LD_", "OMP_", "OPENBLAS_", "MKL_", "KMP_", "GRPC_", "TORCH_", "PATH", "VIRTUAL_ENV")
"""Beginnings of variables that an interpreter or its libraries read only once, or that choose another interpreter.
A job that sets one gets fresh processes: always right, only slower."""
OF_THE_WHOLE_JOB = ("FEDSCHED_STALL_S",)
"""Variables of a job that its coordinator and servers must know, too."""
INTERPRETER = "{python}"
"""Stands for the interpreter of the machine that will run the task."""


@dataclass(frozen=True, slots=True)
class Programs:
    """What the executor runs besides the users' commands."""

    coordinator: str = "python -m fedsched.elastic.coordinator"
    server: str = "python -m fedsched.elastic.server"
    preload: tuple[str, ...] = (
        "fedsched.elastic.preload",
        "torch._dynamo",  # the first optimizer loads it, and that takes as long as torch itself
        "opentelemetry.sdk.trace.export",
        "sklearn.datasets",  # for the examples
    )
    """Modules that the launcher loads once; those that are not installed are left out."""
    launcher_idle_s: float = 10.0
    """How long a launcher stays when nobody needs it."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What all tasks of a cluster share."""

    programs: Programs = field(default_factory=Programs)
    trace_file: str = ""
    trace_endpoint: str = ""
    join_s: float = 60.0
    is_this_machine: bool = True
    """Tasks are processes beside this one: they inherit its environment and its interpreter."""


def order(
    surroundings: Surroundings,
    spec: JobSpec,
    attempt: Attempt,
    entry: TaskPlacement,
    *,
    seq: int,
    address: str = "",
    members: tuple[TaskName, ...] = (),
) -> TaskOrder:
    """How to start a task.

    Args:
        entry: which one, and where; without a node it may run anywhere.
        address: the coordinator's, for a member.
        members: the attempt's first members, for the coordinator.

    Raises:
        StartFailed: the job's command is no command.
    """
    task, is_worker = entry.task, entry.role is Role.WORKER
    argv = _argv(surroundings.programs, spec, task)
    env = _inherited() if surroundings.is_this_machine else {}
    env |= _contract(surroundings, spec, attempt, task, address, members)
    own = dict(spec.env) if is_worker else {name: value for name, value in spec.env if name in OF_THE_WHOLE_JOB}
    bare_python = argv[0] in ("python", "python3") and not own.keys() & {"PATH", "VIRTUAL_ENV"}
    return TaskOrder(
        request=uuid.uuid4().hex,
        task=task,
        node=entry.node,
        seq=seq,
        argv=(sys.executable if surroundings.is_this_machine else INTERPRETER, *argv[1:]) if bare_python else argv,
        # The product's own programs stay out of the user's directory: a file there could stand in for a module.
        cwd=spec.workdir if is_worker and spec.workdir else str(attempt.job_dir),
        env=tuple(sorted((env | own).items())),
        fresh=any(name.startswith(READ_AT_START) for name in own),
        attempt_dir=str(attempt.path),
        demand=spec.demand(entry.role),
        grace_s=spec.grace_s,
    )


def _argv(programs: Programs, spec: JobSpec, task: TaskName) -> tuple[str, ...]:
    if task == COORDINATOR:
        command = programs.coordinator
    else:
        command = spec.run if role_of(task) is Role.WORKER else programs.server
    try:
        argv = tuple(shlex.split(command))
    except ValueError as problem:
        raise StartFailed(
            f"{task}: the command {command!r} cannot be split into words: {problem}",
            "quote it as a shell would want it",
        ) from problem
    if not argv:
        raise StartFailed(f"{task}: the command is empty", "set `run` to the command of one worker")
    return argv


def _inherited() -> dict[str, str]:
    """The agent's environment, without what is only its own."""
    env = with_interpreter_first(os.environ)
    for name in ("FEDSCHED_COORDINATOR", "FEDSCHED_TASKS", "FEDSCHED_HOST", "TRACESTATE"):  # it may run inside a task
        env.pop(name, None)
    return env


def with_interpreter_first(environ: Mapping[str, str]) -> dict[str, str]:
    """An environment in which this process' interpreter comes first on the PATH."""
    directory, path = str(Path(sys.executable).parent), environ.get("PATH")
    return {**environ, "PATH": f"{directory}{os.pathsep}{path}" if path else directory}


def _contract(
    surroundings: Surroundings,
    spec: JobSpec,
    attempt: Attempt,
    task: TaskName,
    address: str,
    members: tuple[TaskName, ...],
) -> Mapping[str, str]:
    """The variables that tasks of the product may rely on."""
    role = role_of(task)
    env = {
        "FEDSCHED_JOB_ID": spec.job_id,
        "FEDSCHED_ATTEMPT": str(attempt.number),
        "FEDSCHED_ROLE": role.value,
        "FEDSCHED_TASK": task,
        "FEDSCHED_JOB_DIR": str(attempt.job_dir),
        "FEDSCHED_ATTEMPT_DIR": str(attempt.path),
        "FEDSCHED_CHECKPOINT_EVERY_S": str(spec.checkpoint_every_s),
        "FEDSCHED_JOIN_S": str(surroundings.join_s),
        "FEDSCHED_TRACE_FILE": surroundings.trace_file,
        "FEDSCHED_TRACE_ENDPOINT": surroundings.trace_endpoint,
        "TRACEPARENT": spec.traceparent,
        "OMP_NUM_THREADS": str(max(1, spec.demand(role).cpu_milli // 1000)),
        "PYTHONUNBUFFERED": "1",  # lines reach the log when they are printed, also in a fresh interpreter
    }
    if role is Role.COORDINATOR:
        env["FEDSCHED_TASKS"] = ",".join(members)
    else:
        env["FEDSCHED_COORDINATOR"] = address
    return env
