"""Ends a step of a run that never ends by itself, such as a policy's decision, so that what was done before is kept."""

from __future__ import annotations

import faulthandler
import signal
import threading
from pathlib import PurePath
from types import FrameType, TracebackType

from fedsched.policy.guardrail import Interruption

LOOKS = 20
"""How often in a deadline somebody looks, so that it is kept to so much."""
LOOK_S_MAX = 1.0
GRACE_S = 2.0
"""Between one means and the next, harsher one."""
GENTLE = 2
"""How often something is raised before the process is ended."""
DEAF_S = 20.0
"""How much longer a step may keep all threads of the process from running. Longer, as a busy machine does that too."""
SIGNAL = signal.SIGVTALRM
"""Nobody else uses it: a timer of the process's own CPU time."""
STDERR = 2


class TooLong(Exception):
    """A step has taken longer than it may."""


class Abandoned(Interruption):
    """The same, for code that holds on to life: it handled `TooLong` and went on."""


class StepDeadline:
    """While it is entered, each step may take so long in real time; its owner counts them in `steps`.

    A step that takes longer is ended where it is: by `TooLong`, after `GRACE_S` by `Abandoned`, and where it is so deep
    in foreign code that neither can be raised, by ending the process, with a stack on standard error. Whether a run
    passes in time depends on the machine; nothing else about it does, as no clock is read in the run itself.

    Only a process's main thread can be watched; elsewhere it does nothing.
    """

    __slots__ = ("_before", "_done", "_fires", "_limit_s", "_stuck_at", "_thread", "steps")

    def __init__(self, limit_s: float) -> None:
        self.steps = 0
        self._limit_s = limit_s
        self._done = threading.Event()
        self._stuck_at = -1
        self._fires = 0
        self._thread: threading.Thread | None = None
        self._before: object = None

    def __enter__(self) -> StepDeadline:
        main = threading.main_thread()
        if threading.current_thread() is main and main.ident is not None:
            self._before = signal.signal(SIGNAL, self._interrupt)
            self._thread = threading.Thread(target=self._watch, args=(main.ident,), name="deadline", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._thread is not None:
            self._done.set()
            self._thread.join()
            signal.signal(SIGNAL, self._before)  # type: ignore[arg-type]

    def _watch(self, watched: int) -> None:
        every_s = min(LOOK_S_MAX, self._limit_s / LOOKS)
        seen, since_s, self._fires = self.steps, 0.0, 0
        try:
            self._arm(self._limit_s + DEAF_S)
            # Looks are counted, not clocks: a machine that was asleep has not used up anybody's time.
            while not self._done.wait(every_s):
                if self.steps != seen:
                    seen, since_s, self._fires = self.steps, 0.0, 0
                if self._fires <= GENTLE:
                    # Begins anew at every look, so that it ends the process only where nobody can look any more.
                    self._arm(self._limit_s + DEAF_S)
                since_s += every_s
                if since_s >= self._limit_s + self._fires * GRACE_S:
                    self._fires += 1
                    self._stuck_at = seen
                    if self._fires <= GENTLE:
                        signal.pthread_kill(watched, SIGNAL)
                    elif self._fires == GENTLE + 1:
                        self._arm(GRACE_S)
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _arm(self, within_s: float) -> None:
        """Have the process ended unless this is called again in time."""
        faulthandler.dump_traceback_later(within_s, exit=True, file=STDERR)

    def _interrupt(self, signum: int, frame: FrameType | None) -> None:
        if self.steps != self._stuck_at:
            return
        where = f"; it was in {PurePath(frame.f_code.co_filename).name}, line {frame.f_lineno}" if frame else ""
        problem = f"no answer within {self._limit_s:g} s{where}"
        raise TooLong(problem) if self._fires < GENTLE else Abandoned(problem)
