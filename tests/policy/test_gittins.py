"""The Gittins index by its definition."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsched.policy.gittins import Gittins, index


def test_the_index_of_a_small_sample_worked_out_by_hand() -> None:
    """Of demands 2, 4 and 10 two outlast 2; one of those ends within 3 more units, after 2 of them."""
    sample = [10.0, 2.0, 4.0]
    assert index(sample, attained=2.0, delta=3.0) == pytest.approx((1 / 2) / ((2 + 3) / 2))
    assert index(sample, attained=0.0, delta=1.0) == 0.0, "none ends within one unit"
    assert index(sample, attained=0.0, delta=100.0) == pytest.approx(1 / np.mean(sample))
    assert index(sample, attained=10.0, delta=3.0) == 0.0, "nobody ever needed more"
    assert index([], attained=0.0, delta=3.0) == 0.0


@given(
    sample=st.lists(st.integers(0, 50), max_size=30),
    attained=st.lists(st.integers(0, 60), min_size=1, max_size=8),
    delta=st.integers(1, 40),
)
def test_it_equals_the_definition_written_out(sample: list[int], attained: list[int], delta: int) -> None:
    """Prefix sums and searches are easily off by one; a job would wait behind the wrong ones for good."""
    found = Gittins(sample, delta)(attained)
    for got, received in zip(found, attained, strict=True):
        left = [need - received for need in sample if need > received]
        ending = sum(1 for need in left if need <= delta)
        cost = sum(min(need, delta) for need in left)
        assert got == pytest.approx(ending / cost if ending else 0.0)


def test_jobs_of_constant_length_become_more_urgent_and_those_of_two_lengths_less_once_the_short_are_over() -> None:
    """That is what tells Gittins from least attained service, which always prefers the newcomer."""
    same = Gittins([100.0] * 5, 10.0)([0.0, 50.0, 95.0])
    assert list(same) == sorted(same)
    mixed = Gittins([10.0] * 9 + [1000.0], 10.0)([0.0, 20.0])
    assert mixed[0] > mixed[1]


def test_a_quantum_that_is_not_positive_is_refused() -> None:
    with pytest.raises(ValueError, match="quantum is 0"):
        Gittins([1.0], 0)
