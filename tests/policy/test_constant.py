"""The same for everybody, within reason."""

from __future__ import annotations

from fedsched.policy.constant import Constant, ConstantOptions
from tests.policy.deciding import decide
from tests.policy.observations import job

POLICY = Constant(ConstantOptions(workers=3, ps=2))


def test_every_job_gets_the_constant_whatever_it_is() -> None:
    """Whoever compares with this baseline counts on its being blind."""
    jobs = [job("a", epochs=1.0), job("b", epochs=900.0, job_type="vgg"), job("c", progress_epochs=9.9)]
    assert decide(POLICY, [20], jobs) == dict.fromkeys("abc", "3w+2ps")


def test_a_jobs_own_limits_bound_the_constant() -> None:
    """A job that cannot use three workers must not be refused for it, nor an all-reduce job get servers."""
    jobs = [job("a", workers=(1, 2)), job("b", workers=(4, 4), ps=(0, 0)), job("c", ps=(0, 1))]
    assert decide(POLICY, [20], jobs) == {"a": "2w+2ps", "b": "4w+0ps", "c": "3w+1ps"}


def test_first_come_first_served_and_the_rest_gets_what_is_left_of_it() -> None:
    """Idle room beside a waiting job would make the baseline look worse than it is."""
    assert decide(POLICY, [8], [job("a"), job("b")]) == {"a": "3w+2ps", "b": "2w+1ps"}
    assert decide(POLICY, [8], [job("a"), job("b", priority=90)]) == {"a": "2w+1ps", "b": "3w+2ps"}


def test_in_turn_nobody_waits_for_the_size_of_who_came_before() -> None:
    """Where not all fits this is the constant that is hard to beat; to compare with the other alone would flatter."""
    in_turn = Constant(ConstantOptions(workers=3, ps=2, in_turn=True))
    assert decide(in_turn, [8], [job("a"), job("b")]) == {"a": "2w+2ps", "b": "2w+2ps"}
    assert decide(in_turn, [20], [job("a"), job("b")]) == {"a": "3w+2ps", "b": "3w+2ps"}
    assert decide(in_turn, [4], [job("a"), job("b"), job("c")]) == {"a": "1w+1ps", "b": "1w+1ps"}
