"""Pauses grow up to a limit, and are not the same for all."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fedsched.runtime.backoff import Backoff


@given(
    first_s=st.floats(0.01, 1.0),
    factor=st.floats(1.0, 100.0),
    draws=st.lists(st.floats(0.0, 1.0), min_size=1, max_size=20),
)
def test_pauses_double_up_to_the_longest_and_are_at_least_half_of_what_they_may_be(
    first_s: float, factor: float, draws: list[float]
) -> None:
    """A pause of nothing hammers a server that is down; one without end leaves an agent alone for good."""
    longest_s = first_s * factor
    backoff = Backoff(first_s, longest_s, iter([*draws, 1.0]).__next__)
    may_be_s = first_s
    for _ in draws:
        assert may_be_s / 2 <= backoff.pause_s() <= may_be_s
        may_be_s = min(2 * may_be_s, longest_s)
    backoff.reset()
    assert backoff.pause_s() == first_s


def test_processes_that_lost_the_same_server_do_not_come_back_in_step() -> None:
    """A thousand agents in the same instant would take the server down again."""
    assert len({Backoff(1.0, 1.0).pause_s() for _ in range(100)}) > 90
