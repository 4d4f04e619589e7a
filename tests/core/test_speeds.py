"""Statistics of speeds: exact to add up, in whatever order they come."""

from __future__ import annotations

import random

import hypothesis.strategies as st
import pytest
from hypothesis import given

from fedsched.core.speeds import COUNT_MAX, LOG_MAX, SpeedCell, SpeedStatistics, SpeedSums, observed, problem_with

cells = st.builds(
    SpeedCell,
    job_type=st.sampled_from(["vgg", "mlp"]),
    accelerator=st.sampled_from(["", "A100"]),
    workers=st.integers(1, 3),
    ps=st.integers(0, 2),
    period=st.integers(0, 1),
)
sightings = st.lists(st.tuples(cells, st.floats(1e-9, 1e9)), max_size=30)


def summed(seen: list[tuple[SpeedCell, float]]) -> SpeedStatistics:
    statistics = SpeedStatistics()
    for cell, speed in seen:
        statistics.add(cell, observed(speed))
    return statistics


@given(seen=sightings, parts=st.integers(1, 6), order=st.randoms(use_true_random=False))
def test_any_split_and_any_order_of_merging_gives_the_same(
    seen: list[tuple[SpeedCell, float]], parts: int, order: random.Random
) -> None:
    """Clusters report in any order, and a policy that depended on it could never be told apart from a broken one."""
    whole = summed(seen)
    dealt: list[list[tuple[SpeedCell, float]]] = [[] for _ in range(parts)]
    for one in seen:
        order.choice(dealt).append(one)
    order.shuffle(dealt)
    first, *others = [summed(part) for part in dealt]

    pairwise = SpeedStatistics()
    for other in others:
        pairwise = other.merged([pairwise])

    assert first.merged(others) == whole == pairwise.merged([first])
    assert list(first.merged(others)) == list(whole)
    assert problem_with(whole) == ""


@given(seen=sightings)
def test_what_is_known_better_takes_the_place_of_what_was_counted(seen: list[tuple[SpeedCell, float]]) -> None:
    """A job counts once a cell, however often it is looked at."""
    statistics = summed(seen)
    for cell, speed in seen:
        statistics.replace(cell, observed(speed), observed(1.0))

    assert statistics == summed([(cell, 1.0) for cell, _ in seen])


CELL = SpeedCell("vgg", "", 2, 1, 0)


@pytest.mark.parametrize(
    ("cell", "sums", "complaint"),
    [
        (SpeedCell("vgg", "", 0, 1, 0), observed(1.0), "1 to 10000 workers"),
        (SpeedCell("vgg", "", 1, -1, 0), observed(1.0), "0 to 10000 parameter servers"),
        (SpeedCell("vgg", "", 1, 1, -1), observed(1.0), "period -1"),
        (CELL, SpeedSums(-1, 0, 0), "-1 observations"),
        (CELL, SpeedSums(COUNT_MAX + 1, 0, 0), "observations"),
        (CELL, SpeedSums(1, LOG_MAX + 1, (LOG_MAX + 1) ** 2), "mean logarithm"),
        (CELL, SpeedSums(2, 10, 1), "sum of squares"),
        (CELL, SpeedSums(1, 10, LOG_MAX**2 + 1), "sum of squares"),
    ],
)
def test_what_nobody_can_have_observed_is_told(cell: SpeedCell, sums: SpeedSums, complaint: str) -> None:
    """One cluster with a fault, or a liar, must not end up in everybody's beliefs."""
    assert complaint in problem_with(SpeedStatistics([(cell, sums)]))
