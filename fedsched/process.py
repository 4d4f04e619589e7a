"""What all server processes have in common: a configuration file, a log, traces, signals, and an honest exit code."""

from __future__ import annotations

import argparse
import contextlib
import logging
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from fedsched import tracing
from fedsched.config import AgentConfig, AggregatorConfig, ControllerConfig, load
from fedsched.errors import FedschedError

C = TypeVar("C", AgentConfig, ControllerConfig, AggregatorConfig)


def run(name: str, kind: type[C], main: Callable[[C], int]) -> int:
    """The body of `python -m fedsched.<name> --config FILE`; returns the exit code."""
    parser = argparse.ArgumentParser(prog=f"python -m fedsched.{name}")
    parser.add_argument("--config", type=Path, required=True, help=f"YAML file with a {kind.__name__}")
    return run_from(parser.parse_args().config, name, kind, main)


def run_from(path: Path, name: str, kind: type[C], main: Callable[[C], int]) -> int:
    """Read the file and run `main`; an error of the world is one message and its exit code, never a stack."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    try:
        config = load(kind, path)
        tracing.setup(name, endpoint=config.tracing.endpoint, file=config.tracing.file)
        return main(config)
    except FedschedError as problem:
        sys.stderr.write(f"{problem}\n")
        return problem.exit_code
    finally:
        tracing.shutdown()


@contextlib.contextmanager
def told_to_end(on_end: Callable[[], None] | None = None) -> Iterator[threading.Event]:
    """An event that SIGTERM and SIGINT set within the block; `on_end` is called then, too."""
    ended = threading.Event()

    def end(*_: object) -> None:
        ended.set()
        if on_end is not None:
            on_end()

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield ended
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
