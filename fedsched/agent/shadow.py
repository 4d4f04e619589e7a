"""Runs a candidate beside the policy that decides, in a process and with a deadline of its own: nobody waits for it.

What is asked of the policy is passed on after it was answered. A candidate that is still busy with one slot is not
asked about the next; one that is late is killed; one that crashed is started again for the slot after.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import queue
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

from msgspec.structs import replace

from fedsched.config import PolicyConfig
from fedsched.core.commands import AskPolicy
from fedsched.core.decision import Decision, Policy
from fedsched.core.versions import Case

_log = logging.getLogger(__name__)

NICENESS = 10
"""So much less of a core the candidate gets than the agent when there is not enough."""
START_S_MAX = 120.0
"""A candidate that is not there by then does not come."""
VALUING_S_MAX = 5.0
"""How long the estimate of both answers may take on top of the candidate's own time."""
PARENT_CHECK_S = 1.0
"""How often a candidate looks whether its agent still lives."""


@dataclass(frozen=True, slots=True)
class ShadowSpec:
    """How a candidate is made; goes to its process."""

    config: PolicyConfig
    """With the file of its weights as the checkpoint."""
    version: int
    explores: bool
    """Whether it explores as a policy does that learns, as the one does that decides."""


@dataclass(frozen=True, slots=True)
class _Question:
    question: AskPolicy
    active: Decision
    active_s: float


class ShadowRunner:
    """One candidate's process and the thread that minds it.

    Args:
        recipe: what to run.
        decision_s_max: how long it may take for an answer, as the policy that decides.
        told: hears of each slot that both have decided; called from the thread.
        failed: hears that the candidate cannot run at all, once and last; called from the thread.
    """

    def __init__(
        self,
        recipe: ShadowSpec,
        decision_s_max: float,
        told: Callable[[Case], None],
        failed: Callable[[str], None],
    ) -> None:
        self._recipe = recipe
        self._decision_s_max = decision_s_max
        self._told = told
        self._failed = failed
        self._box: queue.Queue[_Question | None] = queue.Queue(maxsize=1)
        self._closing = threading.Event()
        self._process: SpawnProcess | None = None
        self._connection: Connection[Any, Any] | None = None
        self._thread = threading.Thread(target=self._run, name="shadow", daemon=True)
        self._thread.start()

    def look(self, question: AskPolicy, active: Decision, active_s: float) -> None:
        """Have the candidate decide a slot that is decided; at once, and not at all where it is busy."""
        with contextlib.suppress(queue.Full):
            self._box.put_nowait(_Question(question, active, active_s))

    def close(self) -> None:
        """Leave nothing of it."""
        self._closing.set()
        with contextlib.suppress(queue.Full):
            self._box.put_nowait(None)
        # Killed from here: the thread may be waiting for an answer.
        process = self._process
        if process is not None:
            process.kill()
        self._thread.join()

    def _run(self) -> None:
        try:
            if self._started():
                while not self._closing.is_set():
                    asked = self._box.get()
                    if asked is None or self._closing.is_set():
                        return
                    self._ask(asked)
        finally:
            self._end()

    def _ask(self, asked: _Question) -> None:
        began_s = time.monotonic()
        case = self._answer(asked)
        if self._closing.is_set():
            return
        if isinstance(case, str):
            from fedsched.policy.comparing import unanswered

            case = unanswered(asked.question, asked.active_s, time.monotonic() - began_s, case)
        self._told(case)
        if self._connection is None and not self._started():
            self._closing.set()

    def _answer(self, asked: _Question) -> Case | str:
        """The candidate's answer, or why there is none; then its process is gone."""
        connection = self._connection
        assert connection is not None
        problem = f"it did not answer within {self._decision_s_max:g} s"
        try:
            connection.send(asked)
            if connection.poll(self._decision_s_max + VALUING_S_MAX):
                case = connection.recv()
                assert isinstance(case, Case)
                in_time = case.candidate_s <= self._decision_s_max
                return case if in_time else replace(case, candidate_worth=None, agreement=0.0, problem=problem)
        except (EOFError, OSError):
            problem = self._death()
        self._end()
        return problem

    def _started(self) -> bool:
        """Start a process; False, and told, where the candidate cannot be made."""
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, self._recipe, os.getpid()), daemon=True)
        try:
            process.start()
        except OSError as error:
            return self._give_up(f"no process could be started: {error}")
        finally:
            theirs.close()
        self._process = process
        if self._closing.is_set():
            return False
        problem = f"it was not there within {START_S_MAX:g} s"
        try:
            if self._connection.poll(START_S_MAX):
                problem = str(self._connection.recv())
        except (EOFError, OSError):
            problem = self._death()
        return not problem or self._give_up(problem)

    def _give_up(self, why: str) -> bool:
        self._end()
        if not self._closing.is_set():
            self._failed(why)
        return False

    def _death(self) -> str:
        process = self._process
        assert process is not None
        process.join(PARENT_CHECK_S)
        code = process.exitcode
        if code is not None and code < 0:
            return f"its process was killed by {signal.Signals(-code).name}"
        return f"its process ended with exit code {code}"

    def _end(self) -> None:
        process, self._process = self._process, None
        connection, self._connection = self._connection, None
        if process is not None:
            process.kill()
            process.join()
        if connection is not None:
            connection.close()


# --- In the candidate's process ----------------------------------------------------------------------------------


def _serve(connection: Connection[Any, Any], recipe: ShadowSpec, agent: int) -> None:
    """Make the candidate, say what is wrong with it, then decide until nobody asks any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_watch_agent, args=(agent,), name="agent watch", daemon=True).start()
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    try:
        policy, problem = _make(recipe), ""
    except (Exception, SystemExit) as error:  # it can be anybody's code
        policy, problem = None, str(getattr(error, "message", "")) or f"{type(error).__name__}: {error}"
    from fedsched.policy.comparing import compare, model

    valued = model()
    connection.send(problem)
    if policy is None:
        return
    while True:
        try:
            asked = connection.recv()
        except (EOFError, OSError):
            return
        case = compare(asked.question, asked.active, asked.active_s, policy, time.perf_counter, valued)
        try:
            connection.send(case)
        except OSError:
            return


def _watch_agent(agent: int) -> None:
    """An agent that is killed takes its candidate along, even one that hangs."""
    while os.getppid() == agent:
        time.sleep(PARENT_CHECK_S)
    os._exit(1)


def _make(recipe: ShadowSpec) -> Policy:
    from fedsched.policy import registry

    config = recipe.config
    if config.name not in registry.BUILTINS:
        return registry.make(config)
    explorer = None
    if recipe.explores and config.explore:
        from fedsched.learn.exploration import JobAware

        explorer = JobAware()
    return registry.with_weights(config, registry.weights(config.name, config.checkpoint), recipe.version, explorer)
