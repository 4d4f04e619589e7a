"""Bad answers never leave the policy's side."""

from __future__ import annotations

import pytest

from fedsched.core.commands import AskPolicy
from fedsched.core.decision import Budget, Decision, Observation
from fedsched.core.ids import JobId, NodeName
from fedsched.core.job import Allocation, Role, TaskPlacement, task_name
from fedsched.core.placement import TentativePlacement
from fedsched.policy.guardrail import decide, judge
from fedsched.policy.registry import heuristic
from tests.policy.observations import job, node, observation

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


def test_answering_nothing_is_right_when_nothing_fits() -> None:
    """An overloaded cluster must not be called a collapsed policy."""
    full = observation([node("n", 1)], [job("a")])
    assert judge(AskPolicy(full, True), answer()) is None


class _Failing:
    """Spends everything, then fails: the worst a policy can do to its successor."""

    name = "failing"
    version = 4

    def decide(self, observation: Observation, budget: Budget) -> Decision:
        heuristic("fifo").decide(observation, budget)
        raise ZeroDivisionError("rate of an empty slot")


def test_when_the_policy_fails_the_heuristic_decides_with_the_whole_budget() -> None:
    """Users must not notice more than a different order of service, and be told why."""
    decision = decide(QUESTION, _Failing(), heuristic("drf"))
    alone = heuristic("drf").decide(SEEN, TentativePlacement(SEEN))
    assert decision.allocations == alone.allocations
    assert decision.policy == "drf"
    assert decision.fallback.startswith("policy failing (version 4): ZeroDivisionError: rate of an empty slot")


def test_a_good_answer_is_passed_on_unmarked() -> None:
    decision = decide(QUESTION, heuristic("fifo"), heuristic("drf"))
    assert (decision.policy, decision.fallback) == ("fifo", "")
