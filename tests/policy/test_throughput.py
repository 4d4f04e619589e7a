"""Speeds per accelerator type, from little."""

from __future__ import annotations

import pytest

from fedsched.core.decision import SpeedSample
from fedsched.core.ids import JobId
from fedsched.policy.throughput import complete, throughputs
from tests.policy.observations import job

A, B, C = JobId("a"), JobId("b"), JobId("c")


def test_a_jobs_own_newest_speed_with_this_very_allocation_counts_as_it_is() -> None:
    """No fit may blur what was measured."""
    seen = (SpeedSample(1, 1, 3.0, "v100"), SpeedSample(2, 1, 9.0, "v100"), SpeedSample(1, 1, 0.5, "k80"))
    found = throughputs([job("a", speeds=seen)], ["k80", "v100"])
    assert found == {(A, "k80"): 0.5, (A, "v100"): 3.0}


def test_what_was_seen_of_other_kinds_completes_the_table() -> None:
    """A newcomer must not have to run everywhere before anybody knows where it belongs."""
    both = job("a", job_type="cnn", speeds=(SpeedSample(1, 1, 8.0, "v100"), SpeedSample(1, 1, 2.0, "k80")))
    one = job("b", job_type="vgg", speeds=(SpeedSample(1, 1, 0.1, "k80"),))
    found = throughputs([both, one, job("c", job_type="new")], ["k80", "v100"])
    assert found[B, "v100"] == pytest.approx(0.4, rel=0.1)
    assert found[C, "v100"] == pytest.approx(4 * found[C, "k80"], rel=0.1)


def test_before_anything_was_seen_all_types_count_alike() -> None:
    found = throughputs([job("a")], ["k80", "v100"])
    assert found[A, "k80"] == found[A, "v100"] > 0


def test_types_that_a_job_does_not_take_are_left_out() -> None:
    assert set(throughputs([job("a", accelerators=("k80",))], ["k80", "v100"])) == {(A, "k80")}


def test_a_table_of_rank_one_is_completed_exactly() -> None:
    """Kinds 1, 2, 4 times as slow; types 1 and 3 times: the missing corner follows."""
    known = {("x", "k"): 1.0, ("y", "k"): 2.0, ("z", "k"): 4.0, ("x", "v"): 3.0, ("y", "v"): 6.0}
    assert complete(known, [("z", "v")])["z", "v"] == pytest.approx(12.0, rel=0.01)
