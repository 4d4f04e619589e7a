"""Turns a process forked from the launcher into a task, indistinguishable from one that was started afresh."""

from __future__ import annotations

import importlib
import os
import random
import runpy
import signal
import sys
import time
from dataclasses import dataclass
from importlib.machinery import PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType, TracebackType
from typing import NoReturn

from fedsched.elastic import printing
from fedsched.executor.processes import adopt_orphans
from fedsched.executor.records import TaskOrder

NOT_STARTED = 127
"""Exit code of a task whose program could not be begun, as a shell would give it."""


@dataclass(frozen=True, slots=True)
class PythonProgram:
    """A script or module that the forked interpreter can run itself."""

    script: str
    """Empty for a module."""
    module: str
    args: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Fork:
    """The child's side of a start."""

    order: TaskOrder
    log: str
    go: int
    """Descriptor that delivers one byte once the start is on record; its end means that the launcher died first."""
    errors: int
    """Descriptor that takes the reason when the program cannot be begun."""


class _NotStarted(Exception):
    """The task's program cannot be begun."""


def python_program(argv: tuple[str, ...], interpreter: str) -> PythonProgram | None:
    """What to run when `argv` is this interpreter with a script or a module and no option of its own."""
    if not argv or argv[0] not in ("python", "python3", interpreter):
        return None
    rest = argv[1:]
    while rest[:1] == ("-u",):  # output is line by line anyway
        rest = rest[1:]
    if len(rest) > 1 and rest[0] == "-m":
        return PythonProgram("", rest[1], rest[2:])
    if rest and rest[0].endswith(".py") and not rest[0].startswith("-"):
        return PythonProgram(rest[0], "", rest[1:])
    return None


def become(fork: Fork) -> None:
    """Be the task. Returns when a Python program ran to its end; the interpreter then shuts down in the usual way."""
    try:
        os.setsid()
        adopt_orphans()  # they stay below the task while it runs, and fall to the launcher, which ends them, afterwards
        if not os.read(fork.go, 1):
            os._exit(NOT_STARTED)
        os.close(fork.go)
        _take_on_surroundings(fork)
        program = None if fork.order.fresh else python_program(fork.order.argv, sys.executable)
        if program is None:
            _execute(fork.order)
        _check(program)
    except (_NotStarted, OSError) as problem:
        _give_up(fork, str(problem))
    os.close(fork.errors)
    _renew_chance()
    _run(program)


def _take_on_surroundings(fork: Fork) -> None:
    for signum in (signal.SIGTERM, signal.SIGCHLD, signal.SIGHUP):
        signal.signal(signum, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    log = os.open(fork.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    try:
        os.chdir(fork.order.cwd)
    except OSError as problem:
        raise _NotStarted(f"cannot enter the working directory {fork.order.cwd}: {problem.strerror}") from None
    os.environ.clear()
    os.environ.update(fork.order.env)
    if fork.order.cores:
        os.sched_setaffinity(0, fork.order.cores)
    time.tzset()


def _execute(order: TaskOrder) -> NoReturn:
    argv = order.argv
    for signum in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them; other programs expect the default
        signal.signal(signum, signal.SIG_DFL)
    try:
        os.execvp(argv[0], argv)
    except FileNotFoundError:
        raise _NotStarted(f"command not found: {argv[0]}") from None
    except OSError as problem:
        raise _NotStarted(f"cannot execute {argv[0]}: {problem.strerror}") from None


def missing(program: PythonProgram, directory: Path) -> str:
    """What of a Python program does not exist; empty where all does.

    Args:
        directory: its working directory.
    """
    if program.script and not (directory / program.script).is_file():
        return f"script {program.script} does not exist in {directory}"
    importlib.invalidate_caches()
    package = program.module.partition(".")[0]
    if package and package not in sys.builtin_module_names:
        path = [str(directory), *sys.path]
        if PathFinder.find_spec(package, path) is None:
            return f"there is no module named {package}"
    return ""


def _check(program: PythonProgram) -> None:
    problem = missing(program, Path.cwd())
    if problem:
        raise _NotStarted(problem)
    sys.path.insert(0, str(Path(program.script).resolve().parent) if program.script else str(Path.cwd()))


def _give_up(fork: Fork, reason: str) -> NoReturn:
    os.write(fork.errors, reason.encode())
    os._exit(NOT_STARTED)


def _renew_chance() -> None:
    """All forks would draw the same numbers. torch begins every process with one fixed seed, so it stays as it is."""
    random.seed()
    if "numpy" in sys.modules:
        importlib.import_module("numpy").random.seed()
    if "torch" in sys.modules:
        importlib.import_module("torch").set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


def _run(program: PythonProgram) -> None:
    printing.lose_what_cannot_be_logged()
    sys.argv = [program.script or program.module, *program.args]
    try:
        if program.script:
            _run_script(str(Path(program.script).absolute()))
        else:
            sys.modules.pop(program.module, None)  # loaded in the launcher; a fresh interpreter would not have it yet
            runpy.run_module(program.module, run_name="__main__", alter_sys=True)
    except Exception as problem:
        # As the interpreter itself would: what runs at exit may ask for the exception that ended the program.
        problem.__traceback__ = _below_launcher(problem.__traceback__)
        sys.last_type, sys.last_value, sys.last_traceback = type(problem), problem, problem.__traceback__
        sys.excepthook(sys.last_type, problem, sys.last_traceback)
        sys.exit(1)


def _run_script(script: str) -> None:
    main = ModuleType("__main__")
    main.__file__ = script
    main.__loader__ = SourceFileLoader("__main__", script)
    main.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    exec(compile(Path(script).read_bytes(), script, "exec"), main.__dict__)


def _below_launcher(traceback: TracebackType | None) -> TracebackType | None:
    while traceback is not None and traceback.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
        traceback = traceback.tb_next
    return traceback
