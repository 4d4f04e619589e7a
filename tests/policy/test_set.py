"""The set policy: permutations, limits, capacity, ageing, and any number of jobs."""

from __future__ import annotations

import math
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from fedsched.core.decision import Observation, SpeedSample
from fedsched.core.ids import JobId
from fedsched.core.placement import TentativePlacement
from fedsched.core.resources import Resources
from fedsched.policy.heuristics import by_arrival
from fedsched.policy.learnable import Array, misfit
from fedsched.policy.set import (
    COUNTS,
    Choice,
    Set,
    SetInputs,
    SetOptions,
    SetShape,
    choose,
    encode,
    nearest,
    type_rows,
)
from tests.policy.deciding import decide
from tests.policy.observations import job, node, observation, observations

SMALL = SetShape(width=16, rows=32)


def drawn(seed: int) -> dict[str, Array]:
    """Weights that prefer something, unlike fresh ones."""
    random = np.random.RandomState(seed)
    return {name: random.normal(0, 0.3, size).astype(np.float32) for name, size in SMALL.layers().items()}


def a_set(seed: int = 0, **options: float) -> Set:
    return Set(drawn(seed), shape=SMALL, explore=False, options=SetOptions(**options))  # type: ignore[arg-type]


def permuted(seen: SetInputs, order: list[int]) -> SetInputs:
    return SetInputs(*(getattr(seen, name)[order] for name in SetInputs.__slots__))


@settings(max_examples=50)
@given(seen=observations().filter(lambda seen: len(seen.jobs) > 1), chance=st.randoms(use_true_random=False))
def test_permuting_the_jobs_permutes_the_answer(seen: Observation, chance: Random) -> None:
    """What a job gets must not hang on its place in a list."""
    views = list(seen.jobs)
    order = list(range(len(views)))
    chance.shuffle(order)
    jobs = encode(seen, views, SMALL)
    one = choose(drawn(1), jobs, 0.5, None)
    other = choose(drawn(1), permuted(jobs, order), 0.5, None)
    shuffled = encode(seen, [views[index] for index in order], SMALL)

    assert np.allclose(shuffled.features, jobs.features[order], atol=1e-5)
    assert (one.ps[order] == other.ps).all()
    assert (one.workers[order] == other.workers).all()
    assert np.allclose(one.urgency[order], other.urgency, atol=1e-4)


@settings(max_examples=50)
@given(seen=observations().filter(lambda seen: bool(seen.jobs)), seed=st.integers(0, 5))
def test_a_choice_is_within_the_jobs_limits_as_far_as_the_grid_has_a_size_there(seen: Observation, seed: int) -> None:
    """An illegal choice would teach the network something that never happens."""
    views = list(seen.jobs)
    jobs = encode(seen, views, SMALL)
    chosen = choose(drawn(seed), jobs, 0.0, np.random.RandomState(seed).rand(len(views), 4))
    for view, ps, workers in zip(views, COUNTS[chosen.ps], COUNTS[chosen.workers], strict=True):
        assert int(ps) in view.ps
        assert view.minimum.workers <= workers <= max(1, view.workers.maximum)


def test_drawn_choices_come_as_often_as_their_chance_says() -> None:
    """The learner weighs choices by these chances; were they wrong, it would learn from something else."""
    seen = observation([node("a", 8)], [job("j", workers=(1, 3), ps=(0, 1))])
    jobs = encode(seen, list(seen.jobs), SMALL)
    random, found = np.random.RandomState(0), []
    for _ in range(3000):
        found.append(choose(drawn(2), jobs, 0.0, random.rand(1, 4)))
    deviation = float(drawn(2)["policy.urgency.deviation"][0])
    mean = float(choose(drawn(2), jobs, 0.0, None).urgency[0])
    for ps in (0, 1):
        for workers in (1, 2, 3):
            same = [one for one in found if one.ps[0] == ps and one.workers[0] == workers]
            off = (same[0].urgency[0] - mean) / math.exp(deviation)
            chance = math.exp(float(same[0].chance[0]) + off**2 / 2 + deviation)
            assert len(same) / 3000 == pytest.approx(chance, abs=0.03)
    urgencies = np.array([one.urgency[0] for one in found])
    assert urgencies.mean() == pytest.approx(mean, abs=0.1)
    assert urgencies.std() == pytest.approx(math.exp(deviation), rel=0.05)


def test_it_serves_no_job_one_job_and_a_thousand() -> None:
    """There is no window beyond which jobs are forgotten."""
    assert decide(a_set(), [8], []) == {}
    assert len(decide(a_set(), [8], [job("a")])) == 1
    crowd = [job("a", job_id=JobId(f"job-{index:04d}"), arrived_s=float(index)) for index in range(1000)]
    answer = decide(a_set(), [64] * 32, crowd)
    assert len(answer) > 200
    seen = observation([node(f"n{index}", 64) for index in range(40)], crowd)
    budget = TentativePlacement(seen)
    a_set(4).decide(seen, budget)
    assert budget.free().cpu_milli < 2000 or len(budget.allocations()) == 1000


def test_a_job_that_can_only_have_one_size_gets_it_or_nothing() -> None:
    """Rigid jobs and jobs without parameter servers live beside elastic ones."""
    rigid = job("a", workers=(20, 20), ps=(0, 0))
    odd = job("b", workers=(23, 23), ps=(0, 0))  # not on the grid
    huge = job("c", workers=(700, 700), ps=(0, 0))  # beyond the grid
    assert decide(a_set(), [64] * 12, [rigid, odd, huge]) == {"a": "20w+0ps", "b": "23w+0ps", "c": "700w+0ps"}
    assert decide(a_set(), [19], [rigid]) == {}


def flat(bias: dict[str, tuple[int, float]], urgencies: float = 0.0) -> dict[str, Array]:
    """Weights that want the same of every job, whatever it is: bias by output layer, at one of its units."""
    arrays = {name: np.zeros(size, np.float32) for name, size in SMALL.layers().items()}
    for name, (unit, value) in bias.items():
        arrays[f"policy.{name}.bias"][unit] = value
    arrays["policy.urgency.bias"][0] = urgencies
    return arrays


def test_what_does_not_fit_any_more_is_cut_down_to_what_does() -> None:
    """Room that nobody uses helps nobody."""
    greedy = Set(flat({"ps": (8, 9.0), "workers": (8, 9.0)}), shape=SMALL, explore=False)
    jobs = [job("a", workers=(1, 8), ps=(1, 8)), job("b", workers=(1, 8), ps=(1, 8))]
    assert decide(greedy, [26], jobs) == {"a": "8w+8ps", "b": "2w+8ps"}
    assert decide(greedy, [21], jobs) == {"a": "8w+8ps", "b": "1w+4ps"}
    assert decide(greedy, [17], jobs) == {"a": "8w+8ps"}


def test_staying_is_worth_something_so_small_preferences_move_nobody() -> None:
    """Every resize pauses a job; a policy that wavers would cost more than it brings."""
    weights = flat({"ps": (2, 0.3), "workers": (4, 0.3)})
    waiting = job("a", workers=(1, 8), ps=(1, 8))
    seen = observation([node("n", 32)], [waiting])
    budget = TentativePlacement(seen)
    assert budget.grant(waiting.job_id, 3, 1)
    running = replace(waiting, placement=budget.placement(waiting.job_id))

    def with_stay(stay: float) -> dict[str, str]:
        policy = Set(weights, shape=SMALL, explore=False, options=SetOptions(stay=stay))
        return decide(policy, [32], [running])

    assert with_stay(0.0) == {"a": "4w+2ps"}
    assert with_stay(0.5) == {"a": "3w+1ps"}
    assert decide(Set(weights, shape=SMALL, explore=False), [32], [waiting]) == {"a": "4w+2ps"}


def test_a_starving_job_comes_first_however_little_the_network_thinks_of_it() -> None:
    """A job that waits for ever is the one failure that no average shows."""
    greedy = Set(flat({"ps": (4, 9.0), "workers": (4, 9.0)}), shape=SMALL, explore=False)
    first = job("a", workers=(1, 4), ps=(1, 4), waited_slots=100, attained_s=10_000.0)
    # Slots last 2 s: its minimum of two tasks would have had 400 task-seconds in 100 slots.
    starving = job("b", workers=(1, 4), ps=(1, 4), waited_slots=100, attained_s=19.0)
    fed = replace(starving, attained_s=21.0)
    new = replace(starving, waited_slots=9, attained_s=0.0)
    assert decide(greedy, [8], [first, starving], keep_running=False) == {"a": "2w+4ps", "b": "1w+1ps"}
    assert decide(greedy, [8], [first, fed]) == {"a": "4w+4ps"}
    assert decide(greedy, [8], [first, new]) == {"a": "4w+4ps"}
    careless = Set(
        flat({"ps": (4, 9.0), "workers": (4, 9.0)}),
        shape=SMALL,
        explore=False,
        options=SetOptions(starving_share=0.0),
    )
    assert decide(careless, [8], [first, starving]) == {"a": "4w+4ps"}


def test_users_priorities_come_before_the_networks() -> None:
    """As with every other policy."""
    greedy = Set(flat({"ps": (4, 9.0), "workers": (4, 9.0)}), shape=SMALL, explore=False)
    jobs = [job("a", ps=(1, 4)), job("b", ps=(1, 4), priority=60)]
    assert decide(greedy, [8], jobs) == {"b": "4w+4ps"}


def test_fairness_lifts_jobs_that_got_little() -> None:
    """An operator may want equal service more than a short average."""
    arrays = flat({"ps": (4, 9.0), "workers": (4, 9.0)})
    rich = job("a", ps=(1, 4), waited_slots=10, attained_s=40.0)
    poor = job("b", ps=(1, 4), waited_slots=10, attained_s=10.0)
    plain = Set(arrays, shape=SMALL, explore=False)
    fair = Set(arrays, shape=SMALL, explore=False, options=SetOptions(fairness=1.0))
    assert decide(plain, [8], [rich, poor]) == {"a": "4w+4ps"}
    assert decide(fair, [8], [rich, poor]) == {"b": "4w+4ps"}


def test_speeds_of_a_type_are_shared_and_those_of_untyped_jobs_are_not() -> None:
    """Jobs without a type need not be alike; what one shows says nothing of another."""
    sample = SpeedSample(2, 2, 0.5)
    known = [job("a", speeds=(sample,)), job("b")]
    unknown = [replace(view, job_type="unknown") for view in known]
    seen = observation([node("n", 8)], known)
    assert encode(seen, known, SMALL).features[:, 4].tolist() == [1.0, 1.0]
    assert encode(seen, unknown, SMALL).features[:, 4].tolist() == [1.0, 0.0]
    assert encode(seen, unknown, SMALL).typed[:, 0].tolist() == [0.0, 0.0]


def test_twice_the_cluster_with_twice_the_jobs_looks_the_same_to_each_job() -> None:
    """What was learned on a small cluster must hold on a large one."""
    small = observation([node("n", 8)], [job("a"), job("b")])
    large = observation([node("n", 8), node("m", 8)], [job("a"), job("b"), job("c"), job("d")])
    one = encode(small, list(small.jobs), SMALL).features
    other = encode(large, list(large.jobs), SMALL).features
    assert np.allclose(one[0], other[0])


def test_the_nearest_size_is_the_smaller_of_two() -> None:
    """Ties are decided, not left to chance."""
    assert COUNTS[nearest(np.array([0, 7, 18, 22, 23, 10_000]))].tolist() == [0, 7, 16, 20, 24, 512]


def test_a_type_has_the_same_place_everywhere() -> None:
    """Clusters share gradients of the table; they must mean the same rows."""
    assert type_rows("resnet-50", 256) == (205, 117)
    assert type_rows("mlp", 256) == (182, 66)


def test_weights_that_do_not_fit_or_are_not_finite_are_refused_and_the_old_ones_stay() -> None:
    """A damaged update from outside must not reach a decision."""
    policy = a_set()
    bad = drawn(0)
    bad["policy.ps.bias"] = np.full_like(bad["policy.ps.bias"], np.nan)
    with pytest.raises(ValueError, match=r"array policy\.ps\.bias holds values that are not finite"):
        policy.load(2, bad)
    with pytest.raises(ValueError, match=r"missing policy\.0\.bias"):
        policy.load(2, {name: array for name, array in drawn(0).items() if name != "policy.0.bias"})
    wide = {**drawn(0), "policy.0.bias": np.zeros(3, np.float32)}
    assert misfit(wide, SMALL.layers()) == "array policy.0.bias has shape (3,); expected (16,)"
    assert policy.version == 1


def test_a_network_that_overflows_says_so_instead_of_answering() -> None:
    """The guardrail can only catch what it is told."""
    arrays = {name: np.full_like(array, 1e38) for name, array in drawn(0).items()}
    seen = observation([node("n", 8)], [job("a")])
    with np.errstate(all="ignore"), pytest.raises(ArithmeticError, match="not finite"):
        choose(arrays, encode(seen, list(seen.jobs), SMALL), 0.0, None)


def test_the_trace_says_what_was_chosen_for_whom() -> None:
    """The learner must know which jobs had a choice."""
    policy = Set(drawn(3), shape=SMALL, seed=5)
    waiting = job("a")
    seen = observation([node("n", 8)], [waiting, job("b")])
    budget = TentativePlacement(seen)
    assert budget.grant(waiting.job_id, 1, 1)
    pinned = replace(waiting, placement=budget.placement(waiting.job_id), pinned=True)
    seen = observation([node("n", 8)], [pinned, job("b")], slot=7)
    policy.decide(seen, TentativePlacement(seen))
    (sample,) = policy.last_trace()
    assert sample.slot == 7
    assert sample.jobs == ("a", "b")
    assert sample.free.tolist() == [False, True]
    assert isinstance(sample.choice, Choice)
    assert sample.jobs == tuple(view.job_id for view in by_arrival(seen.jobs))
    policy.decide(observation([node("n", 8)], [pinned]), TentativePlacement(seen))
    assert policy.last_trace() == ()


def test_the_cluster_without_gpus_is_no_place_for_a_job_that_needs_one() -> None:
    """Such a job has an infinite share; it must not spoil the other jobs' numbers."""
    gpu = job("a", worker_demand=Resources(1000, 100, 1000), workers=(1, 4))
    assert set(decide(a_set(), [8], [gpu, job("b")])) == {"b"}
