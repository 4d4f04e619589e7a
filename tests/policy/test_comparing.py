"""Two answers to one slot are valued alike, whoever gave them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsched.core.commands import AskPolicy
from fedsched.core.decision import Budget, Decision, Observation, SpeedSample
from fedsched.core.ids import JobId
from fedsched.core.job import Allocation
from fedsched.policy.comparing import compare, model
from fedsched.policy.guardrail import consult
from fedsched.policy.learned_speed import LearnedSpeed
from fedsched.policy.registry import HEURISTICS, heuristic
from tests.policy.observations import job, node, observation, observations


class Saying:
    """Gives a fixed answer."""

    name = "saying"
    version = 1

    def __init__(self, **allocations: tuple[int, int]) -> None:
        self.answer = tuple((JobId(name), Allocation(*size)) for name, size in allocations.items())

    def decide(self, observation: Observation, budget: Budget) -> Decision:
        return Decision(observation.slot, self.answer, self.name, self.version)


def answered(question: AskPolicy, name: str) -> Decision:
    decision = consult(question, heuristic(name)).decision
    assert decision is not None
    return decision


@given(observations(), st.sampled_from(HEURISTICS), st.booleans())
def test_the_same_answer_is_worth_the_same_and_agrees(seen: Observation, name: str, keep_running: bool) -> None:
    """A candidate that copies the active policy must never be refused, nor be praised."""
    question = AskPolicy(seen, keep_running)
    case = compare(question, answered(question, name), 0.1, heuristic(name), lambda: 0.0, LearnedSpeed())
    assert case.active_worth == case.candidate_worth
    assert case.active_worth is not None
    assert case.active_worth >= 0
    assert (case.agreement, case.problem) == (1.0, "")


def test_who_trains_faster_by_what_jobs_have_shown_is_worth_more() -> None:
    """By observed speeds, not by how many tasks are handed out: here more workers make it slower."""
    speeds = (SpeedSample(1, 1, 1.0), SpeedSample(4, 1, 0.2))
    seen = AskPolicy(observation([node("n", 20)], [job(name, speeds=speeds) for name in "abc"]), True)
    active = Saying(a=(4, 1), b=(4, 1), c=(4, 1)).decide(seen.observation, None)  # type: ignore[arg-type]
    case = compare(seen, active, 0.0, Saying(a=(1, 1), b=(1, 1), c=(1, 1)), lambda: 0.0, model())
    assert case.active_worth is not None
    assert case.candidate_worth == pytest.approx(5 * case.active_worth, rel=0.01)
    assert case.agreement == 0.0


def test_a_short_job_counts_more_than_a_long_one() -> None:
    """The mean completion time gains most from whoever is nearly done."""
    speeds = (SpeedSample(1, 1, 0.1),)
    jobs = [job("a", speeds=speeds), job("b", epochs=1000.0, speeds=speeds)]
    seen = AskPolicy(observation([node("n", 2)], jobs), False)
    active = Saying(b=(1, 1)).decide(seen.observation, None)  # type: ignore[arg-type]
    case = compare(seen, active, 0.0, Saying(a=(1, 1)), lambda: 0.0, model())
    assert case.active_worth is not None
    assert case.candidate_worth is not None
    assert case.candidate_worth > 1.5 * case.active_worth


def test_an_answer_that_cannot_be_used_has_no_worth_and_one_that_was_replaced_has_none_either() -> None:
    seen = AskPolicy(observation([node("n", 8)], [job("a")]), True)
    fallen = Decision(1, ((JobId("a"), Allocation(1, 1)),), "drf", fallback="it was late")
    case = compare(seen, fallen, 0.0, Saying(a=(9, 9)), lambda: 0.0, model())
    assert (case.active_worth, case.candidate_worth) == (None, None)
    assert "allowed are 1..4 workers" in case.problem
