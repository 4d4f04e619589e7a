"""The yardsticks that know the true speeds: what they do with them, and that nobody can take them for real policies."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from fedsched.core.commands import AskPolicy
from fedsched.core.decision import JobView, Observation
from fedsched.core.ids import JobId
from fedsched.core.job import Allocation
from fedsched.core.placement import TentativePlacement
from fedsched.errors import InvalidInput
from fedsched.policy import guardrail
from fedsched.policy.oracle_greedy import LowerBound, OracleGreedy
from tests.policy.observations import job, node, observation, observations


def stalls(view: JobView, workers: int, ps: int, elapsed_s: float) -> float:
    """Two workers are no faster than one, and four are four times as fast: single steps never get there."""
    return elapsed_s * {1: 1.0, 2: 1.0, 3: 1.0, 4: 4.0}[workers]


def told(view: JobView, workers: int, ps: int, elapsed_s: float) -> float:
    return elapsed_s * workers / (1 + 0.1 * workers + 0.2 * abs(ps - workers))


def test_a_plateau_does_not_stop_it() -> None:
    """Optimus's single steps stall where the next task alone gains nothing."""
    policy = OracleGreedy()
    policy.consult(stalls)
    seen = observation([node("n", 8)], [job("a", workers=(1, 4), ps=(1, 1))])

    assert dict(policy.decide(seen, TentativePlacement(seen)).allocations) == {JobId("a"): Allocation(4, 1)}


def test_of_two_jobs_the_one_with_less_left_grows_first() -> None:
    """The mean falls most where a job is nearly done."""
    policy = OracleGreedy()
    policy.consult(stalls)
    jobs = [job("long", epochs=1e6, ps=(0, 0)), job("short", epochs=500.0, ps=(0, 0))]
    seen = observation([node("n", 5)], jobs)

    given_ = dict(policy.decide(seen, TentativePlacement(seen)).allocations)

    assert given_ == {JobId("long"): Allocation(1, 0), JobId("short"): Allocation(4, 0)}


@pytest.mark.parametrize("kind", [OracleGreedy, LowerBound])
@settings(max_examples=25)
@given(seen=observations(), keep_running=st.booleans())
def test_its_answers_fit_nodes_and_limits(
    kind: type[OracleGreedy] | type[LowerBound], seen: Observation, keep_running: bool
) -> None:
    """A yardstick that cheats on capacity would make every policy look bad."""
    policy = kind()
    policy.consult(told)

    decision = policy.decide(seen, TentativePlacement(seen, keep_running))

    if kind is OracleGreedy:
        assert guardrail.judge(AskPolicy(seen, keep_running), decision) is None


@pytest.mark.parametrize("kind", [OracleGreedy, LowerBound])
def test_without_true_speeds_it_says_that_it_is_for_simulations(kind: type[OracleGreedy] | type[LowerBound]) -> None:
    """Somebody will configure it on a real cluster."""
    seen = observation([node("n", 8)], [job("a")])

    with pytest.raises(InvalidInput, match="nobody has told it any"):
        kind().decide(seen, TentativePlacement(seen))
