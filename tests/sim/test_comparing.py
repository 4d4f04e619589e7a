"""What runs over several seeds say, against numbers worked by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from fedsched.core.job import JobPhase
from fedsched.sim.comparing import Arm, Difference, crossed, differences, interval, summarise
from fedsched.sim.results import PHASES, SPENT, Jobs, RunResult


def run(policy: str, seed: int, *jcts_s: float, training: int | None = None, partial: str = "") -> RunResult:
    """A run whose jobs all came at once and took so long."""
    count, zeros = len(jcts_s), np.zeros(len(jcts_s))
    none = np.zeros(count, np.int64)
    jobs = Jobs(
        job_id=[str(number) for number in range(count)],
        cluster=["one"] * count,
        phase=np.full(count, PHASES.index(JobPhase.SUCCEEDED), np.uint8),
        submit_s=zeros,
        start_s=zeros,
        finish_s=np.array(jcts_s),
        spent_s=np.zeros((count, len(SPENT))),
        gpu_s=zeros,
        core_s=zeros,
        resizes=none,
        preemptions=none,
        attempts=none,
    )
    return RunResult("e", policy, seed, "slots", 10.0, 1, jobs, (), (), 0.0, 0, "", partial, (), training)


def difference(*runs: RunResult) -> Difference:
    (found,) = differences(runs)
    return found


def half(deviation: float, count: int) -> float:
    """Of the 95 % interval of a mean of `count` values with this standard deviation."""
    return float(stats.t.ppf(0.975, count - 1)) * deviation / math.sqrt(count)


def test_the_interval_is_students_with_one_degree_less_than_there_are_values() -> None:
    """2, 4 and 9 have the mean 5, and deviate by 3, 1 and 4: a variance of 26/2; Student's t for 2 is 4.303."""
    found = interval([2.0, 4.0, 9.0])
    assert found.mean == 5.0
    assert found.half == pytest.approx(4.3027 * (13 / 3) ** 0.5, rel=1e-4)
    assert (found.low, found.high) == pytest.approx((5.0 - 8.957, 5.0 + 8.957), abs=1e-3)
    assert interval([2.0]).half is None


def test_policies_are_compared_seed_by_seed_whatever_the_order_of_the_runs() -> None:
    """Seeds differ by a factor of ten here and the policies by 1, 2 and 3 s; two intervals would show nothing."""
    found = difference(
        run("drf", 1, 10.0), run("drf", 2, 50.0), run("drf", 3, 100.0),
        run("mine", 3, 97.0), run("mine", 1, 9.0), run("mine", 2, 48.0),
    )  # fmt: skip
    assert (found.arm.policy, found.baseline.policy, found.seeds) == ("mine", "drf", 3)
    assert found.jct_s.mean == pytest.approx(-2.0)
    assert found.jct_s.half == pytest.approx(half(1.0, 3))
    assert found.ratio == pytest.approx((9 + 48 + 97) / (10 + 50 + 100))
    assert not found.certain, "-2 ± 2.48"
    assert difference(run("drf", 1, 2.0), run("drf", 2, 9.0), run("mine", 1, 1.0), run("mine", 2, 8.0)).certain


def test_seeds_that_only_one_policy_has_completed_are_left_out() -> None:
    """A policy that gave up on the hardest jobs would win for it."""
    found = difference(
        run("drf", 1, 10.0), run("drf", 2, 500.0), run("drf", 3, 30.0),
        run("mine", 1, 12.0), run("mine", 2, 1.0, partial="gave up"), run("mine", 3, 30.0), run("mine", 4, 1.0),
    )  # fmt: skip
    assert (found.seeds, found.jct_s.mean, found.ratio) == (2, 1.0, 42 / 40)
    assert differences([run("drf", 1, 1.0), run("mine", 2, 1.0)]) == ()


def test_what_was_taught_is_compared_training_by_training_and_with_the_untaught_by_workload() -> None:
    """Training 0 is one like any other."""
    taught = [run("taught", seed, 8.0 + seed + training, training=training) for training in (0, 1) for seed in (1, 2)]
    against = difference(run("drf", 1, 10.0), run("drf", 2, 20.0), *taught)
    assert against.seeds == 2
    gaps: dict[tuple[int | None, int], float] = {(0, 1): -1.0, (0, 2): -10.0, (1, 1): 0.0, (1, 2): -9.0}
    assert against.jct_s == crossed(gaps)
    other = [run("other", seed, 7.0 + seed, training=training) for training in (0, 1) for seed in (1, 2)]
    both = difference(*taught, *other)
    assert both.jct_s == crossed({(0, 1): -1.0, (0, 2): -1.0, (1, 1): -2.0, (1, 2): -2.0})


def test_a_mean_of_a_run_is_over_its_jobs_and_that_of_an_arm_over_its_runs() -> None:
    """Else a seed with more jobs would count for more."""
    (summary,) = summarise([run("drf", 1, 1.0, 2.0, 6.0), run("drf", 2, 5.0)])
    assert summary.jct_s == interval([3.0, 5.0])
    assert (summary.arm, summary.seeds, summary.trainings, summary.jct_slots) == (Arm("e", "drf"), 2, 0, 0.4)


def test_of_an_arm_with_a_run_that_did_not_end_no_mean_is_told() -> None:
    (summary,) = summarise([run("drf", 1, 1.0), run("drf", 2, 1.0, partial="gave up")])
    assert (summary.jct_s, summary.jct_slots, summary.makespan_s, summary.partial) == (None, None, None, 1)
