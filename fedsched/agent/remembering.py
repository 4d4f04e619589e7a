"""Keeps what the policy remembers in a file, so that the agent's next process goes on where a killed one ended."""

from __future__ import annotations

import contextlib
import hashlib
import logging
from pathlib import Path

from fedsched.core.decision import Policy
from fedsched.files import write_whole
from fedsched.policy.guardrail import is_interruption, told
from fedsched.policy.remembering import Remembering

_log = logging.getLogger(__name__)

FORMAT = 1
"""Grows when what policies remember is written otherwise; a file of another format is not used."""
SIZE_MAX_BYTES = 64 * 1024 * 1024
"""What is larger than this is not kept."""


class PolicyMemory:
    """One policy's file: a line that says what follows, and its state.

    It is written after each decision and before the answer is given, so what is acted on is remembered, and what a kill
    takes away is at most the question that was being answered. A reader sees the old file or the new one.

    Args:
        policy: restored at once where the file fits it; one that remembers nothing needs no file and gets none.
    """

    def __init__(self, path: Path, policy: Policy) -> None:
        self._path = path
        self._policy = policy if isinstance(policy, Remembering) else None
        self._told = ""
        if self._policy is not None:
            self._restore(self._policy)

    def keep(self) -> None:
        """Write down what the policy remembers now. A full disk costs the memory, not the cluster: it is logged once.

        Called by the thread that the policy decides in.
        """
        if self._policy is None:
            return
        try:
            state = self._policy.state()
            if len(state) > SIZE_MAX_BYTES:
                raise ValueError(f"it remembers {len(state):,} bytes; {SIZE_MAX_BYTES:,} at most are kept")
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._path, _header(self._policy.name, state) + state, durable=True)
        except OSError as problem:
            self._tell(f"{self._path} cannot be written: {problem.strerror}")
        except BaseException as problem:  # A policy can be anybody's code; nothing it raises may stop the cluster.
            if is_interruption(problem):
                raise
            self._tell(told(problem))
        else:
            self._told = ""

    def _restore(self, policy: Remembering) -> None:
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return
        except OSError as problem:
            _log.error("policy %s begins anew: %s cannot be read: %s", policy.name, self._path, problem.strerror)
            return
        header, _, state = data.partition(b"\n")
        try:
            if header + b"\n" != _header(policy.name, state):
                raise ValueError(f"it begins with {header[:120]!r}; {_header(policy.name, state)!r} was expected")
            policy.restore(state)
        except BaseException as problem:  # as in `keep`
            if is_interruption(problem):
                raise
            why = problem if isinstance(problem, ValueError) else told(problem)
            _log.error("policy %s begins anew, what it remembered is not used: %s", policy.name, why)
            with contextlib.suppress(OSError):
                self._path.replace(self._path.with_name(self._path.name + ".refused"))
        else:
            _log.info("policy %s goes on with what it remembers, %d bytes", policy.name, len(state))

    def _tell(self, why: str) -> None:
        if why != self._told:
            _log.error("what the policy remembers is not kept for the agent's next process: %s", why)
        self._told = why


def _header(policy: str, state: bytes) -> bytes:
    return f"fedsched policy-state {FORMAT} {policy} sha256:{hashlib.sha256(state).hexdigest()}\n".encode()
