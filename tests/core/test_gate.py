"""A new version gets in where it does no harm, and nowhere else."""

from __future__ import annotations

from math import inf, nan, sqrt
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsched.core.gate import GateOutcome, GateRule, accepts, due
from fedsched.core.ids import stream

VALUES = st.floats(-1e6, 1e6, allow_nan=False).map(lambda value: round(value, 3))


def drawn(chance: Random, cases: int, better: float, persistence: float = 0.0) -> tuple[list[float], list[float]]:
    """Values of an old policy, and of one that is worth `better` times as much; neighbours resemble each other."""
    old, new, drift = [], [], 0.0
    for _ in range(cases):
        drift = persistence * drift + (1 - persistence**2) ** 0.5 * sum(chance.random() - 0.5 for _ in range(12))
        value = 5 + chance.random()
        old.append(value)
        new.append(value * better + 0.5 * drift)
    return old, new


def test_the_same_answers_are_accepted_at_once() -> None:
    """Most federated versions answer almost all slots as the one before; they must not wait for weeks."""
    verdict = accepts([1.0, 2.0] * 10, [1.0, 2.0] * 10)
    assert (verdict.outcome, verdict.change, verdict.error) == (GateOutcome.ACCEPTED, 0.0, 0.0)


def test_what_is_clearly_worse_is_refused_and_the_numbers_say_by_how_much() -> None:
    old = [1.0 + index % 3 for index in range(20)]
    verdict = accepts(old, [0.8 * value for value in old])
    assert verdict.outcome is GateOutcome.REFUSED
    assert verdict.change == pytest.approx(-0.2)
    assert "does harm: -20.0% ± " in verdict.why
    assert "over 20 cases" in verdict.why


def test_the_interval_is_students_over_batches_of_neighbours() -> None:
    """By hand: ten batches of two, five of which gain nothing and five 0.2; their variance is 10 x 0.1^2 / 9.

    1.833 is Student's t for nine degrees of freedom, 95 % one-sided: only harm is asked about.
    """
    verdict = accepts([1.0] * 20, [1.0, 1.0, 1.2, 1.2] * 5)
    assert verdict.change == pytest.approx(0.1)
    assert verdict.error == pytest.approx(1.833 * sqrt(0.1 / 9 / 10))


def test_durations_are_compared_with_a_minus_sign() -> None:
    """Rounds may value versions by completion times: shorter is better."""
    assert accepts([-100.0] * 20, [-90.0] * 20).change == pytest.approx(0.1)
    assert accepts([-100.0] * 20, [-110.0] * 20).outcome is GateOutcome.REFUSED


def test_a_loss_within_the_margin_is_no_harm() -> None:
    old = [float(1 + index % 5) for index in range(40)]
    assert accepts(old, [0.99 * value for value in old]).accepted
    assert not accepts(old, [0.99 * value for value in old], GateRule(margin=0.0)).accepted


@pytest.mark.parametrize("cases", [0, 1, 19])
def test_too_few_cases_decide_nothing(cases: int) -> None:
    """A version must not be thrown out, or let in, for a single slot."""
    for better in (0.1, 1.0, 10.0):
        verdict = accepts([1.0] * cases, [better] * cases)
        assert verdict.outcome is GateOutcome.UNDECIDED
        assert f"{cases} cases so far; 20 at least" in verdict.why


@pytest.mark.parametrize("bad", [nan, inf, -inf])
def test_who_fails_where_the_old_one_did_not_is_refused_however_good_the_rest(bad: float) -> None:
    verdict = accepts([1.0] * 20, [5.0] * 18 + [bad] * 2)
    assert (verdict.outcome, verdict.failures, verdict.cases) == (GateOutcome.REFUSED, 2, 18)
    assert "failed in 2 of 20 cases" in verdict.why
    assert accepts([1.0] * 20, [5.0] * 19 + [bad]).accepted  # one in twenty may fail
    assert accepts([1.0] * 19 + [nan], [5.0] * 19 + [bad]).accepted  # nobody could answer that one
    assert accepts([1.0] * 20, [bad] * 20).outcome is GateOutcome.REFUSED
    assert accepts([nan] * 20, [bad] * 20).outcome is GateOutcome.UNDECIDED


def test_what_stays_doubtful_is_refused_in_the_end() -> None:
    """Undecided for ever would keep a candidate in shadow for ever."""
    rule = GateRule(cases_min=20, cases_max=40)
    values = [10.0 if index // 4 % 2 else -10.0 for index in range(40)]
    old = [10.0] * 40
    noisy = [10.0 + value for value in values]
    assert accepts(old[:20], noisy[:20], rule).outcome is GateOutcome.UNDECIDED
    verdict = accepts(old, noisy, rule)
    assert verdict.outcome is GateOutcome.REFUSED
    assert "did not show" in verdict.why


@pytest.mark.parametrize(("better", "accepted"), [(1.03, True), (0.97, False)])
def test_what_stays_doubtful_goes_by_the_estimate_where_neither_has_a_better_right(
    better: float, accepted: bool
) -> None:
    rule = GateRule(cases_min=10, cases_max=40, margin=0.0, by_estimate=True)
    old = [1.0 + index % 7 for index in range(40)]
    new = [better * value + (2.0 if index // 4 % 2 else -2.0) for index, value in enumerate(old)]
    verdict = accepts(old, new, rule)
    assert verdict.error is not None
    assert abs(verdict.change) < verdict.error, "the cases leave it open"
    assert verdict.accepted is accepted
    assert accepts(old[:39], new[:39], rule).outcome is GateOutcome.UNDECIDED
    assert not accepts(old, new, GateRule(cases_min=10, cases_max=40, margin=0.0)).accepted


def test_a_handful_of_runs_can_be_compared_where_the_rule_says_so() -> None:
    """Rounds compare whole simulated runs, of which there are only a few; five that agree are proof, two are not."""
    rule = GateRule(cases_min=2)
    assert accepts([100.0] * 5, [110.0, 111.0, 109.0, 110.0, 112.0], rule).accepted
    assert accepts([100.0] * 2, [100.0, 104.0], rule).outcome is GateOutcome.UNDECIDED


def test_lists_of_different_length_are_a_fault_of_the_caller() -> None:
    with pytest.raises(ValueError, match="zip"):
        accepts([1.0], [])


@pytest.mark.parametrize(("persistence", "share"), [(0.0, 0.07), (0.8, 0.13)])
def test_harm_beyond_the_margin_is_let_in_seldom_although_neighbours_resemble_each_other(
    persistence: float, share: float
) -> None:
    """Slots that follow each other hold nearly the same jobs; counted as independent, luck would look like proof.

    Expected of one look: 5 %; with a correlation of 0.8 between neighbours batches of 16 still share a little.
    """
    chance = stream(1, "gate")
    worse = sum(
        accepts(*drawn(chance, 160, better=1 - 0.02, persistence=persistence)).outcome is GateOutcome.ACCEPTED
        for _ in range(600)
    )
    assert worse / 600 <= share
    better = sum(accepts(*drawn(chance, 160, better=1.1, persistence=persistence)).accepted for _ in range(100))
    assert better >= 60


def test_it_is_asked_at_doublings_only() -> None:
    """Asked after each case, a bad version would get in on its first lucky streak."""
    rule = GateRule(cases_min=20, cases_max=200)
    assert [cases for cases in range(201) if due(cases, rule)] == [20, 40, 80, 160, 200]


@given(st.lists(st.tuples(VALUES, VALUES), min_size=1, max_size=60), st.floats(0.01, 1000))
def test_units_do_not_matter(pairs: list[tuple[float, float]], factor: float) -> None:
    old, new = [before for before, _ in pairs], [after for _, after in pairs]
    one, other = accepts(old, new), accepts([factor * value for value in old], [factor * value for value in new])
    assert one.change == pytest.approx(other.change, rel=1e-6, abs=1e-9)
    assert (one.error is None) == (other.error is None)
    if one.error is not None:
        assert one.error == pytest.approx(other.error, rel=1e-6, abs=1e-9)


@given(st.lists(st.tuples(VALUES, VALUES), min_size=20, max_size=60))
def test_to_be_better_never_hurts(pairs: list[tuple[float, float]]) -> None:
    """Whoever is at least as good in every single case gets in, or is still looked at; never refused as harm."""
    old = [min(pair) for pair in pairs]
    new = [max(pair) for pair in pairs]
    assert accepts(old, new).outcome is not GateOutcome.REFUSED
