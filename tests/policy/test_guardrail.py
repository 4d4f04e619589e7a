"""Bad answers never leave the policy's side."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsched.core.commands import AskPolicy
from fedsched.core.decision import Budget, Decision, Observation, SpeedSample
from fedsched.core.ids import JobId, NodeName
from fedsched.core.job import Allocation, Role, TaskPlacement, task_name
from fedsched.core.placement import TentativePlacement
from fedsched.policy.guardrail import consult, decide, judge
from fedsched.policy.registry import HEURISTICS, heuristic
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


def test_what_counts_as_collapse_is_a_quarter_of_what_the_heuristic_would_bring() -> None:
    """A policy that is only worse than the heuristic is the gate's to judge, over many slots, not the guardrail's."""
    some = decide(CROWD, _Saying(3, a=(4, 2), b=(4, 2), c=(4, 2)), heuristic("drf"))
    assert (some.policy, some.fallback) == ("saying", "")


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
