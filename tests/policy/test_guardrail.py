"""Bad answers never leave the policy's side."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from fedsched.core.commands import AskPolicy
from fedsched.core.decision import Budget, Decision, Observation, Policy, SpeedSample
from fedsched.core.ids import JobId, NodeName
from fedsched.core.job import Allocation, Role, TaskPlacement, task_name
from fedsched.core.placement import TentativePlacement
from fedsched.policy.dl2 import DL2, Dl2Shape
from fedsched.policy.guardrail import consult, decide, judge
from fedsched.policy.learnable import Array, Shape
from fedsched.policy.registry import HEURISTICS, heuristic
from fedsched.policy.set import Set, SetShape
from tests.policy.observations import job, node, observation, observations

RUNNING = (TaskPlacement(task_name(Role.PS, 0), NodeName("n")), TaskPlacement(task_name(Role.WORKER, 0), NodeName("n")))
SEEN = observation([node("n", 8)], [job("a"), job("b"), job("p", pinned=True, placement=RUNNING)])
QUESTION = AskPolicy(SEEN, True)


def answer(slot: int = 1, **allocations: tuple[int, int]) -> Decision:
    given = tuple((JobId(name), Allocation(*size)) for name, size in allocations.items())
    return Decision(slot, given, "test")


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (answer(slot=2, a=(1, 1)), "is for slot 2; asked was slot 1"),
        (answer(a=(1, 1), z=(1, 1)), "names job z"),
        (answer(a=(5, 1)), "gives job a 5w"),
        (answer(a=(0, 1)), "allowed are 1..4 workers"),
        (answer(a=(1, 3)), "allowed are 1..2 parameter servers"),
        (answer(p=(2, 1)), "pinned job p 2w"),
        (answer(a=(4, 2), b=(4, 2)), "the whole cluster has 8 cpu"),
        (answer(), "runs nothing, although the minimum of job a"),
        (Decision(1, ((JobId("a"), Allocation(1, 1)),) * 2, "test"), "twice"),
    ],
)
def test_an_unusable_answer_is_refused_with_its_reason(bad: Decision, why: str) -> None:
    """The reason is what an operator reads in `explain`; it must name the job and the number."""
    waiting = observation([node("n", 8)], [job("a"), job("b")]) if not bad.allocations else SEEN
    reason = judge(AskPolicy(waiting, True), bad)
    assert reason is not None
    assert why in reason


def test_a_usable_answer_passes() -> None:
    assert judge(QUESTION, answer(a=(2, 1), b=(1, 1), p=(1, 1))) is None


def test_what_a_pinned_job_holds_on_a_node_that_was_just_lost_is_not_held_against_an_answer() -> None:
    """It keeps it until its executor has noticed; the room for the others is what the remaining nodes have."""
    left = observation([node("other", 2)], [job("a"), job("p", pinned=True, placement=RUNNING)])
    assert judge(AskPolicy(left, True), answer(a=(1, 1), p=(1, 1))) is None
    assert "the whole cluster has 2 cpu" in str(judge(AskPolicy(left, True), answer(a=(2, 1), p=(1, 1))))


def test_stopping_the_only_job_that_fits_is_running_nothing() -> None:
    full = observation([node("n", 2)], [job("a", placement=RUNNING)])
    assert "runs nothing, although the minimum of job a" in str(judge(AskPolicy(full, True), answer()))


def test_answering_nothing_is_right_when_nothing_fits() -> None:
    """An overloaded cluster must not be called a collapsed policy."""
    full = observation([node("n", 1)], [job("a")])
    assert judge(AskPolicy(full, True), answer()) is None


class _Answering:
    """Says whatever it is told to: a policy can be anybody's code."""

    name = "answering"
    version = 4

    def __init__(self, says: Callable[[], Any]) -> None:
        self._says = says

    def decide(self, observation: Observation, budget: Budget) -> Any:
        heuristic("fifo").decide(observation, budget)  # spends everything first
        return self._says()


def _raising(error: BaseException) -> Callable[[], Any]:
    def says() -> Any:
        raise error

    return says


def _weights_gone_wrong(shape: Shape) -> dict[str, Array]:
    """Finite, so no check of the weights refuses them, and so large that what the network makes of them is not."""
    return {name: np.full(size, 1e38, np.float32) for name, size in shape.layers().items()}


NAN: Any = math.nan
HALF: Any = 1.5
NONE: Any = None
SMALL_DL2, SMALL_SET = Dl2Shape(window=2, hidden=(4,)), SetShape(width=8, rows=4)
BAD: dict[str, tuple[Policy, str]] = {
    "throws": (_Answering(_raising(ValueError("no idea"))), "ValueError: no idea (test_guardrail.py, line "),
    "exits": (_Answering(_raising(SystemExit(3))), "SystemExit: 3 (test_guardrail.py, line "),
    "wants memory": (_Answering(_raising(MemoryError())), "MemoryError: "),
    "nothing at all": (_Answering(lambda: None), "it answered with NoneType; a Decision was expected"),
    "a number": (_Answering(lambda: NAN), "it answered with float; a Decision was expected"),
    "no allocation": (
        _Answering(lambda: Decision(1, ((JobId("a"), NONE),), "x")),
        "its answer is no decision that can be kept: Expected `object`, got `null`",
    ),
    "another slot": (_Answering(lambda: answer(slot=2, a=(1, 1))), "its answer is for slot 2; asked was slot 1"),
    "a job that is not there": (_Answering(lambda: answer(z=(1, 1))), "its answer names job z, which is not"),
    "a job twice": (
        _Answering(lambda: Decision(1, ((JobId("a"), Allocation(1, 1)),) * 2, "x")),
        "its answer names a job twice",
    ),
    "too many workers": (_Answering(lambda: answer(a=(5, 1))), "it gives job a 5w"),
    "fewer than none": (_Answering(lambda: answer(a=(-1, 1))), "ValueError: an allocation cannot be negative"),
    "too many ps": (_Answering(lambda: answer(a=(1, 3))), "it gives job a 1w"),
    "half a worker": (
        _Answering(lambda: answer(a=(HALF, 1))),
        "its answer is no decision that can be kept: Expected `int`, got `float`",
    ),
    "workers that are not finite": (
        _Answering(lambda: answer(a=(NAN, 1))),
        "its answer is no decision that can be kept: Expected `int`, got `float`",
    ),
    "ps that are not finite": (
        _Answering(lambda: answer(a=(1, NAN))),
        "its answer is no decision that can be kept: Expected `int`, got `float`",
    ),
    "a pinned job": (_Answering(lambda: answer(p=(2, 1))), "it gives pinned job p 2w"),
    "more than there is": (_Answering(lambda: answer(a=(4, 2), b=(4, 2))), "it promises 12 cpu"),
    "nobody may run": (_Answering(lambda: answer()), "it runs nothing, although the minimum of job a"),
    "outputs of dl2 that are not finite": (
        DL2(_weights_gone_wrong(SMALL_DL2), 4, shape=SMALL_DL2),
        "ArithmeticError: the policy network's outputs are not finite",
    ),
    "outputs of set that are not finite": (
        Set(_weights_gone_wrong(SMALL_SET), 4, shape=SMALL_SET),
        "ArithmeticError: the policy network's outputs are not finite",
    ),
}


@pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value encountered")
@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("fallback", HEURISTICS)
def test_whatever_is_wrong_with_an_answer_the_heuristic_decides_with_the_whole_budget_and_says_why(
    kind: str, fallback: str
) -> None:
    """Users must not notice more than a different order of service, and `explain` has the reason."""
    policy, why = BAD[kind]
    question = QUESTION if kind != "nobody may run" else AskPolicy(observation([node("n", 8)], [job("a")]), True)
    alone = heuristic(fallback).decide(question.observation, TentativePlacement(question.observation))
    decision = decide(question, policy, heuristic(fallback))
    assert alone.allocations
    assert replace(decision, fallback="") == alone
    assert decision.fallback.startswith(f"policy {policy.name} (version 4): {why}")


def test_a_good_answer_is_passed_on_unmarked() -> None:
    decision = decide(QUESTION, heuristic("fifo"), heuristic("drf"))
    assert (decision.policy, decision.fallback) == ("fifo", "")


class _Saying:
    """Gives a fixed answer, as a policy does whose weights have gone wrong."""

    name = "saying"

    def __init__(self, version: int, **allocations: tuple[int, int]) -> None:
        self.version = version
        self._allocations = allocations

    def decide(self, observation: Observation, budget: Budget) -> Decision:
        given = tuple((JobId(name), Allocation(*size)) for name, size in self._allocations.items())
        return Decision(observation.slot, given, self.name, self.version)


CROWD = AskPolicy(observation([node("n", 40)], [job(name) for name in "abcdefgh"]), True)


def test_a_learned_policy_that_has_collapsed_is_replaced_and_both_estimates_are_told() -> None:
    """Training can end in an answer of perfect form that leaves seven of eight jobs waiting in an idle cluster."""
    decision = decide(CROWD, _Saying(3, a=(1, 1)), heuristic("drf"))
    assert decision.policy == "drf"
    assert dict(decision.allocations)[JobId("h")].workers >= 1
    assert "policy saying (version 3): its answer has collapsed" in decision.fallback
    assert "with that of drf" in decision.fallback


def test_what_counts_as_collapse_is_less_than_a_quarter_of_what_the_heuristic_would_bring() -> None:
    """A policy that is only worse than the heuristic is the gate's to judge, over many slots, not the guardrail's.

    By hand: at 1/8 epoch per second each job trains 1/4 of its 8 epochs in the slot of 2 s, a share of 1/32. There is
    room for the minima of all sixteen, so the heuristic brings 16/32, and a quarter of that are four jobs.
    """
    names = "abcdefghijklmnop"
    jobs = [job(name, epochs=8.0, speeds=(SpeedSample(1, 1, 0.125),)) for name in names]
    crowd = AskPolicy(observation([node("n", 32)], jobs), True)
    four, three = (dict.fromkeys(names[:count], (1, 1)) for count in (4, 3))
    assert decide(crowd, _Saying(3, **four), heuristic("drf")).fallback == ""
    assert decide(crowd, _Saying(3, **three), heuristic("drf")).fallback == (
        "policy saying (version 3): its answer has collapsed: in this slot jobs would train 0.0938 of their epochs in "
        "all, with that of drf 0.5"
    )


def test_a_heuristic_may_leave_the_cluster_idle() -> None:
    """Head of line, deadlines and constants do so on purpose; whoever configured them wants that."""
    assert decide(CROWD, _Saying(0, a=(1, 1)), heuristic("drf")).fallback == ""


def test_observed_speeds_decide_what_an_answer_is_worth() -> None:
    """One job that trains a hundred times as fast as the others is no collapse."""
    fast = SpeedSample(1, 1, 4.0)
    slow = SpeedSample(1, 1, 0.004)
    jobs = [job("a", job_type="fast", speeds=(fast,))]
    jobs += [job(name, job_type="slow", speeds=(slow,)) for name in "bcdefgh"]
    seen = AskPolicy(observation([node("n", 16)], jobs), True)
    assert decide(seen, _Saying(3, a=(1, 1)), heuristic("drf")).fallback == ""
    assert "collapsed" in decide(seen, _Saying(3, b=(1, 1)), heuristic("drf")).fallback


@given(observations(), st.sampled_from(HEURISTICS), st.booleans())
def test_an_answer_that_the_heuristic_would_give_itself_is_never_refused(
    seen: Observation, name: str, keep_running: bool
) -> None:
    """Whatever jobs show, the estimate must not turn against a policy that does just what the fallback would do."""
    question = AskPolicy(seen, keep_running)
    own = consult(question, heuristic(name)).decision
    assert own is not None
    taught = _Saying(7)
    taught._allocations = {str(job_id): (size.workers, size.ps) for job_id, size in own.allocations}
    assert decide(question, taught, heuristic(name)).fallback == ""
