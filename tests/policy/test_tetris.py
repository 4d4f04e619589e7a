"""Tetris's rule on cases small enough to work out by hand."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fedsched.core.resources import Resources
from fedsched.policy.tetris import Tetris, TetrisOptions, scores
from tests.policy.deciding import decide
from tests.policy.observations import job

positive = st.floats(1e-3, 1e3)


@given(work=st.lists(positive, min_size=2, max_size=6), alignment=positive, weight=st.floats(1e-3, 10.0))
def test_of_equally_aligned_jobs_the_one_with_least_remaining_work_is_best(
    work: list[float], alignment: float, weight: float
) -> None:
    """The sign is the trap: with the other one, which a public copy has, long jobs starve the short ones."""
    found = scores(np.full(len(work), alignment), np.array(work), np.ones(len(work), dtype=np.bool_), weight)
    # Works that differ by a rounding error of the score are the same to it.
    assert work[int(np.argmax(found))] <= min(work) + 1e-14 * max(work) / weight


def test_it_starts_the_job_with_less_left_where_only_one_fits() -> None:
    """The same through the whole policy, from what is observed."""
    jobs = [job("a", epochs=90.0), job("b", epochs=10.0), job("c", epochs=50.0)]
    assert decide(Tetris(), [2], jobs) == {"b": "1w+1ps"}


def test_it_prefers_what_fits_the_free_resources_when_nothing_is_shorter() -> None:
    """On a cluster short of memory the job that needs cores packs better; else both resources end up half used."""
    cores = job("a", ps=(0, 0), workers=(1, 1), worker_demand=Resources(4000, 1_000))
    memory = job("b", ps=(0, 0), workers=(1, 1), worker_demand=Resources(1000, 40_000))
    hungry = job("c", ps=(0, 0), workers=(1, 1), worker_demand=Resources(1000, 30_000), priority=90)
    given = decide(Tetris(TetrisOptions(weight=0.0)), [5], [cores, memory, hungry])
    assert set(given) == {"a", "c"}


def test_weight_decides_between_packing_and_short_jobs() -> None:
    """An operator who raises it must see short jobs first, and who sets it to zero must not."""
    big = job("a", ps=(0, 0), workers=(2, 2), epochs=100.0)
    small = job("b", ps=(0, 0), workers=(1, 1), epochs=1.0)
    assert decide(Tetris(TetrisOptions(weight=0.0)), [2], [big, small]) == {"a": "2w+0ps"}
    assert decide(Tetris(TetrisOptions(weight=5.0)), [2], [big, small]) == {"b": "1w+0ps"}


def test_everybody_has_a_minimum_before_anybody_grows() -> None:
    """A long job that never starts, because a short one might use more, would be stuck for good."""
    assert decide(Tetris(), [6], [job("a"), job("b", epochs=99.0)]) == {"a": "2w+2ps", "b": "1w+1ps"}
