"""A policy can be anybody's code: whatever it answers, raises or is, what is decided can be kept, sent and shown."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from fedsched.core.commands import AskPolicy
from fedsched.core.decision import Budget, Decision, Observation, Ranking
from fedsched.core.events import PolicyDecided
from fedsched.core.ids import JobId
from fedsched.core.job import Allocation
from fedsched.policy.guardrail import SAID_MAX, decide, identity
from fedsched.policy.registry import heuristic
from fedsched.runtime import codec
from tests.policy.observations import job, node, observation

QUESTION = AskPolicy(observation([node("n", 8)], [job("a"), job("b")]), True)
GOOD = Decision(1, ((JobId("a"), Allocation(1, 1)), (JobId("b"), Allocation(1, 1))), "hostile", 3)
LONG = "x" * 10_000_000


class Shy:
    """Nothing of it can be shown."""

    def __repr__(self) -> str:
        raise ValueError("no")


class Mute(Exception):
    """Even what it says fails."""

    def __str__(self) -> str:
        raise RuntimeError("no")


class Bare(BaseException):
    """No `Exception`, as asyncio's cancellation is none."""


ANYTHING: tuple[Any, ...] = (
    None, True, 1.0, math.nan, math.inf, -1, 2**70, "x", "", b"\xff", "\ud800", LONG, (), [], {}, set(), Shy(),
    object(), np.int64(1), np.float32(1), len, (1,), ((1, 2),), (("a", "b"),), (("a", b"x"),), (("a", LONG),),
    (("a", "\ud800"),), ((Shy(), Shy()),), (("a", Allocation(1, 1)),), [("a", Allocation(1, 1))],
    (("a", Allocation(True, 1)),), (("a", Allocation(2**70, 1)),), (("a", Allocation(0, 5)),),
    ((["a"], Allocation(1, 1)),), (("a", 1, 3),), ("ab",),
    Ranking(()), Ranking(((JobId("a"), ("x",)),)), iter(()), iter(int, 1),  # type: ignore[arg-type]
)  # fmt: skip
RAISED: tuple[BaseException, ...] = (
    ValueError("\ud800"), ValueError(LONG), ValueError("a\nb\0c"), Mute(), Bare("gone"), GeneratorExit(), SystemExit(3),
    MemoryError(), RecursionError(), StopIteration(), ExceptionGroup("several", [ValueError()]),
)  # fmt: skip


class Hostile:
    """Answers with what it is told to."""

    name = "hostile"
    version = 3

    def __init__(self, answer: Callable[[], Any]) -> None:
        self._answer = answer

    def decide(self, observation: Observation, budget: Budget) -> Any:
        return self._answer()


def _same(value: Any) -> Any:
    return value


def keeps(decision: Decision) -> None:
    """It passes through journal, store and messages unchanged, in a reasonable size."""
    event = PolicyDecided(1.0, decision)
    line = json.dumps(codec.dump_tagged(event))
    assert codec.load_tagged(json.loads(line)) == event
    assert len(line) < 10 * SAID_MAX
    decision.fallback.encode()
    assert decision.fallback.isprintable()
    assert 0 <= decision.version < 2**63


@pytest.mark.parametrize("field", Decision.__struct_fields__)
def test_whatever_stands_in_an_answer_what_is_decided_can_be_kept(field: str) -> None:
    """The journal and the agent's loop write it down; what cannot be written would end the agent, at each restart."""
    for value in ANYTHING:
        decision = decide(QUESTION, Hostile(partial(replace, GOOD, **{field: value})), heuristic("drf"))
        keeps(decision)
        if decision.fallback:
            assert decision.policy == "drf"
            assert decision.fallback.startswith("policy hostile (version 3): it")


def test_whatever_is_no_answer_at_all_is_told_as_such() -> None:
    for value in ANYTHING:
        decision = decide(QUESTION, Hostile(partial(_same, value)), heuristic("drf"))
        keeps(decision)
        assert "a Decision was expected" in decision.fallback


def test_lists_in_an_answer_are_as_good_as_tuples() -> None:
    listed: Any = replace(GOOD, allocations=[list(pair) for pair in GOOD.allocations])
    assert decide(QUESTION, Hostile(lambda: listed), heuristic("drf")) == GOOD


@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
def test_whatever_a_policy_raises_the_heuristic_decides(error: BaseException) -> None:
    """Also what is no `Exception`, as a cancelled coroutine: it would end the thread that decides."""

    def fail() -> None:
        raise error

    decision = decide(QUESTION, Hostile(fail), heuristic("drf"))
    keeps(decision)
    assert decision.policy == "drf"
    assert f"policy hostile (version 3): {type(error).__name__}: " in decision.fallback


def test_an_interruption_is_the_users_in_the_main_thread_and_the_policys_elsewhere() -> None:
    """Ctrl-C must end a simulation; no signal comes to the thread in which an agent's policy decides."""

    def fail() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        decide(QUESTION, Hostile(fail), heuristic("drf"))
    decided: list[Decision] = []
    thread = threading.Thread(target=lambda: decided.append(decide(QUESTION, Hostile(fail), heuristic("drf"))))
    thread.start()
    thread.join()
    assert "KeyboardInterrupt" in decided[0].fallback


@pytest.mark.parametrize("name", [None, 1, b"x", "\ud800", LONG, Shy(), property(lambda self: 1 / 0)])
@pytest.mark.parametrize("version", [None, 1.5, -1, 2**70, "x", property(lambda self: 1 / 0)])
def test_whatever_a_policy_calls_itself_it_can_be_spoken_of(name: Any, version: Any) -> None:
    """Both are in every record of the cluster."""
    kind = type("Odd", (Hostile,), {"name": name, "version": version})
    policy = kind(lambda: None)
    known = identity(policy)
    assert len(known[0]) <= SAID_MAX
    known[0].encode()
    assert known[1] >= 0
    keeps(decide(QUESTION, policy, heuristic("drf")))


def test_a_process_that_a_policy_forks_does_not_decide_too() -> None:
    """It holds the journal, the ports and the term of its parent."""
    program = """
import os
from tests.policy.test_hostile import GOOD, QUESTION, Hostile
from fedsched.policy.guardrail import decide
from fedsched.policy.registry import heuristic

def fork():
    child = os.fork()
    if child:
        os.waitpid(child, 0)
    return GOOD

print("decided by", decide(QUESTION, Hostile(fork), heuristic("drf")).policy, flush=True)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines() == ["decided by hostile"]
