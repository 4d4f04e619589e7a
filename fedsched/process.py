"""What all server processes have in common: a configuration file, a log, traces, signals, and an honest exit code."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn, TypeVar

from fedsched import tracing
from fedsched.config import AgentConfig, AggregatorConfig, ControllerConfig, load
from fedsched.errors import FedschedError, StartFailed

_BLOCK_LEFT = b"\0"
"""Written to the signals' pipe at the end; no signal has this number."""

_log = logging.getLogger(__name__)

C = TypeVar("C", AgentConfig, ControllerConfig, AggregatorConfig)


def run(name: str, kind: type[C], main: Callable[[C], int]) -> int:
    """The body of `python -m fedsched.<name> --config FILE`; returns the exit code."""
    parser = argparse.ArgumentParser(prog=f"python -m fedsched.{name}")
    parser.add_argument("--config", type=Path, required=True, help=f"YAML file with a {kind.__name__}")
    return run_from(parser.parse_args().config, name, kind, main)


def run_from(path: Path, name: str, kind: type[C], main: Callable[[C], int]) -> int:
    """Read the file and run `main`; an error of the world is one message and its exit code, never a stack."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    broken: list[BaseException] = []
    threading.excepthook = lambda fault: _end_at_fault(fault, broken)
    try:
        config = load(kind, path)
        tracing.setup(name, endpoint=config.tracing.endpoint, file=config.tracing.file)
        code = main(config)
        return 1 if broken else code
    except FedschedError as problem:
        sys.stderr.write(f"{problem}\n")
        return problem.exit_code
    except OSError as problem:
        where = problem.filename or "the operating system"
        error = StartFailed(f"{where}: {problem.strerror}", "check state_dir in the configuration and its permissions")
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    finally:
        tracing.shutdown()


def keep_to_one_core() -> None:
    """Have numpy, scipy and torch compute on one thread, as far as they are loaded: the other cores are the jobs'.

    It is not said by variables of the environment, because jobs would inherit those.
    """
    from threadpoolctl import threadpool_limits

    threadpool_limits(1)
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


def leave(code: int) -> NoReturn:
    """End a process that has closed everything, at once: taking apart an interpreter that has torch loaded costs
    seconds of processor time, and whoever stops a federation waits for them."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _end_at_fault(fault: threading.ExceptHookArgs, broken: list[BaseException]) -> None:
    """An exception that leaves a thread is a fault of ours: a process that went on without the thread would hang."""
    if fault.exc_value is None:
        return
    name = fault.thread.name if fault.thread else "unknown"
    _log.critical("thread %s failed", name, exc_info=fault.exc_value)
    if _is_ours(fault.exc_value):
        broken.append(fault.exc_value)
        os.kill(os.getpid(), signal.SIGTERM)


def _is_ours(fault: BaseException) -> bool:
    """Whether the thread began in this product's code: others, a library's or a policy's, may fail and be replaced,
    also where they call ours."""
    modules = (str(frame.f_globals.get("__name__", "")) for frame, _ in traceback.walk_tb(fault.__traceback__))
    return next((name for name in modules if name != "threading"), "").startswith("fedsched.")


@contextlib.contextmanager
def on_signal(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` on SIGTERM and SIGINT within the block, from a thread: a handler itself may not take locks."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer)
    handlers = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGINT)}

    def wait() -> None:
        while (told := os.read(reader, 1)) != _BLOCK_LEFT:
            if told[0] in handlers:
                stop()

    thread = threading.Thread(target=wait, name="signals", daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        os.write(writer, _BLOCK_LEFT)
        thread.join()
        os.close(reader)
        os.close(writer)
