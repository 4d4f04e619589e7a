"""The rules that push a learning policy out of corners."""

from __future__ import annotations

from random import Random

import pytest

from fedsched.core.ids import JobId
from fedsched.core.placement import TentativePlacement
from fedsched.learn.exploration import JobAware
from fedsched.policy.dl2 import BUNDLE, DL2, PS, WORKER, Dl2Shape, Window, features, forward, initial, probabilities
from tests.policy.observations import job, node, observation

SHAPE = Dl2Shape(window=3, hidden=(8,))


def window_of(*sizes: tuple[int, int], ps_max: int = 20) -> Window:
    jobs = [job(name, workers=(1, 20), ps=(0, ps_max)) for name, _ in zip("abc", sizes, strict=False)]
    seen = observation([node("n", 100)], jobs)
    budget = TentativePlacement(seen)
    for view, (workers, ps) in zip(seen.jobs, sizes, strict=True):
        assert budget.grant(view.job_id, workers, ps)
    return Window(seen, budget, SHAPE.window)


def choices(window: Window, action: int, times: int = 200) -> set[int]:
    """What comes out of many draws; the rules start anew each time."""
    chances = window.mask / window.mask.sum()
    return {JobAware().choose(window, chances, action, Random(seed)) for seed in range(times)}


def test_a_job_far_smaller_than_the_rest_grows() -> None:
    window = window_of((1, 2), (9, 19))
    assert choices(window, action=3 + WORKER) <= {WORKER, BUNDLE, PS}


def test_a_job_with_workers_but_no_servers_gets_one() -> None:
    assert choices(window_of((2, 0), (2, 2)), action=3 + BUNDLE) == {PS}


def test_a_job_that_can_have_no_servers_is_left_alone() -> None:
    """All-reduce jobs are not lopsided."""
    assert choices(window_of((2, 0), ps_max=0), action=WORKER) == {WORKER}


def test_what_is_illegal_is_never_chosen() -> None:
    window = window_of((2, 0), (2, 2))
    window.refused(JobId("a"), PS)
    assert all(window.mask[action] for action in choices(window, action=3 + WORKER))


def test_a_kind_that_died_out_comes_back() -> None:
    """Policies collapse on one kind of action; the others must stay in the data."""
    rules = JobAware()
    plain = window_of((1, 3))  # neither far too many servers nor too few: no other rule applies
    chances = plain.mask / plain.mask.sum()
    taken = [rules.choose(plain, chances, BUNDLE, Random(0))]
    taken += [rules.choose(plain, chances, WORKER, Random(seed)) for seed in range(1200)]
    assert taken[0] == BUNDLE
    assert set(taken[1:1000]) == {WORKER}
    assert BUNDLE in taken[1000:]


def test_how_much_is_lopsided_is_drawn_once_a_slot() -> None:
    """Drawn at each look, the lowest of many draws would decide, and no slot leave a job five servers for a worker."""
    lonely = window_of((1, 5))
    chances = lonely.mask / lonely.mask.sum()
    rules = JobAware()
    slots = [{rules.choose(lonely, chances, PS, slot) for _ in range(60)} for slot in map(Random, range(20))]
    assert {taken == {PS} for taken in slots} == {True, False}


def test_exploring_decisions_are_recorded_with_the_networks_probability() -> None:
    """The learner must know how likely the network itself found what exploration chose."""
    seen = observation([node("n", 12)], [job("a"), job("b")])
    weights = initial(SHAPE, 0)
    policy = DL2(weights, shape=SHAPE, explorer=JobAware())
    policy.decide(seen, TentativePlacement(seen))
    assert policy.last_trace()
    for entry in policy.last_trace():
        assert entry.mask[entry.action]
        plainly = probabilities(forward(weights, "policy", features(entry.state[None]))[0], entry.mask)
        assert entry.probability == pytest.approx(plainly[entry.action], rel=1e-9)
