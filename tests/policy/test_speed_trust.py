"""Whose statistics a cluster uses: those of classes that are the same as its own, and no more than they are worth."""

from __future__ import annotations

import random

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from fedsched.core.speeds import UNIT, SpeedCell, SpeedStatistics, SpeedSums, observed, problem_with
from fedsched.policy.speed_trust import trusted

NOBODY = SpeedStatistics()
WORKERS = (1, 2, 4, 8)


def cluster(
    power: float,
    *,
    level: float = 0.01,
    jobs: int = 5,
    workers: tuple[int, ...] = WORKERS,
    name: str = "resnet",
    noise: float = 0.03,
    seed: int = 1,
    period: int = 0,
) -> SpeedStatistics:
    """What a cluster has seen of a class that scales like this."""
    chance, statistics = random.Random(seed), SpeedStatistics()
    for count in workers:
        for _ in range(jobs):
            speed = level * count**power * (1 + noise * (2 * chance.random() - 1))
            statistics.add(SpeedCell(name, "", count, 0, period), observed(speed))
    return statistics


def classes(statistics: SpeedStatistics) -> set[str]:
    return {cell.job_type for cell, _ in statistics}


def slope(statistics: SpeedStatistics) -> float:
    """By how much the logarithm of the speed grows from one worker to eight."""
    mean = {cell.workers: sums.total / sums.count / UNIT for cell, sums in statistics}
    return mean[8] - mean[1]


def test_what_others_say_of_a_class_that_is_new_here_is_used() -> None:
    """A new cluster must not learn again what seven others know."""
    found = trusted(NOBODY, [cluster(0.9, seed=seed) for seed in range(7)], 1)
    assert slope(found) == pytest.approx(0.9 * 3 * 0.693, abs=0.1)


def test_a_class_of_the_same_name_and_another_model_is_left_out() -> None:
    """Users name classes: two teams' `resnet` need not be one, and the sum of both would mislead both."""
    own, same, other = cluster(0.9), cluster(0.9, seed=2), cluster(-0.3, seed=3)
    assert trusted(own, [other], 1) == NOBODY
    assert trusted(own, [same, other], 1) == trusted(own, [same], 1)
    assert trusted(cluster(-0.3), [same, other], 1) == trusted(cluster(-0.3), [other], 1)


def test_one_class_is_judged_by_itself() -> None:
    """A cluster whose `resnet` is another may still be right about everything else."""
    other = cluster(-0.3).merged([cluster(0.5, name="bert")])
    own = cluster(0.9).merged([cluster(0.5, name="bert", seed=9)])
    assert classes(trusted(own, [other], 1)) == {"bert"}


@pytest.mark.parametrize("liars", [1, 2, 3])
def test_few_that_lie_do_not_reach_who_has_seen_nothing(liars: int) -> None:
    honest = [cluster(0.9, seed=seed) for seed in range(liars + 1)]
    lies = [cluster(-0.9 - at, jobs=100, seed=at) for at in range(liars)]
    assert trusted(NOBODY, [*lies, *honest], 1) == trusted(NOBODY, honest, 1)


def test_of_two_that_contradict_each_other_neither_is_used() -> None:
    """Who cannot tell whom to believe decides as if alone, and soon has seen enough himself."""
    assert trusted(NOBODY, [cluster(0.9), cluster(-0.9)], 1) == NOBODY


def test_what_was_seen_elsewhere_is_checked_by_those_that_agree_with_us() -> None:
    own = cluster(0.9, workers=(1, 2))
    friend, stranger = cluster(0.9, workers=(1, 2, 4, 8), seed=2), cluster(-0.5, workers=(4, 8), level=0.1, seed=3)
    assert trusted(own, [friend, stranger], 1) == trusted(own, [friend], 1)


def test_who_is_wrong_about_what_we_know_is_not_believed_about_the_rest() -> None:
    """A liar's classes that nobody else has would teach what classes look like."""
    own = cluster(0.9).merged([cluster(0.5, name="bert")])
    secret = cluster(-0.9, name="secret")
    liar = cluster(-0.9).merged([cluster(-0.5, name="bert"), secret])
    assert trusted(own, [liar], 1) == NOBODY
    honest = cluster(0.9, seed=5).merged([cluster(0.5, name="bert", seed=6), secret])
    assert classes(trusted(own, [honest], 1)) == {"resnet", "bert", "secret"}


def honest_about(names: str, seed: int, workers: tuple[int, ...] = WORKERS) -> SpeedStatistics:
    """Of one class per letter, each with a scaling and a level of its own."""
    return SpeedStatistics().merged(
        cluster(POWERS[name], level=LEVELS[name], name=name, seed=seed, workers=workers) for name in names
    )


POWERS = {"a": 0.9, "b": 0.5, "c": 0.2, "d": -0.2}
LEVELS = {"a": 0.01, "b": 0.1, "c": 0.001, "d": 0.03}


def lie_about(names: str, seed: int) -> SpeedStatistics:
    """The same classes, scaling the other way round."""
    return SpeedStatistics().merged(
        cluster(-POWERS[name] - 0.8, level=LEVELS[name], name=name, seed=seed, jobs=100) for name in names
    )


def test_a_liar_cannot_silence_the_only_honest_cluster_that_has_seen_a_class() -> None:
    """At first few have seen each class; whoever contradicted the only witness would keep it from everybody."""
    honest = [honest_about("ab", 1), honest_about("bc", 2), honest_about("ca", 3), honest_about("d", 4)]
    parts = [*honest, lie_about("abcd", 5)]
    for own in (NOBODY, honest_about("b", 6)):
        assert trusted(own, parts, 1) == trusted(own, honest, 1)
        assert classes(trusted(own, parts, 1)) == {"a", "b", "c", "d"}


def test_an_odd_honest_cluster_is_still_heard_about_what_it_shares_with_others() -> None:
    """Its `d` is another model than everybody's. That is no reason not to believe it about `a` and `b`."""
    rest = [honest_about("abd", seed) for seed in (1, 2, 3)]
    odd = honest_about("ab", 4).merged([cluster(-1.5, level=0.3, name="d", seed=4)])
    found = trusted(NOBODY, [*rest, odd], 1)
    assert found == trusted(NOBODY, [*rest, honest_about("ab", 4)], 1)


@settings(max_examples=30)
@given(
    st.lists(
        st.tuples(st.sets(st.sampled_from("abcd"), min_size=2), st.integers(0, 99)), min_size=3, max_size=7
    ).filter(lambda drawn: all(sum(letter in names for names, _ in drawn) >= 2 for letter in "abcd")),
    st.sets(st.sampled_from("abcd"), min_size=3),
    st.sampled_from([(1, 2), (2, 4, 8), WORKERS]),
)
def test_whatever_honest_clusters_have_seen_one_liar_takes_nothing_away(
    drawn: list[tuple[set[str], int]], told: set[str], workers: tuple[int, ...]
) -> None:
    honest = [honest_about("".join(sorted(names)), seed, workers) for names, seed in drawn]
    liar = lie_about("".join(sorted(told)), 100)
    assert trusted(NOBODY, [*honest, liar], 1) == trusted(NOBODY, honest, 1)


def test_a_somewhat_slower_machine_is_no_other_class() -> None:
    own, slower = cluster(0.9), cluster(0.9, level=0.0085, seed=2)
    assert len(trusted(own, [slower], 1)) == len(WORKERS)


def test_however_many_jobs_a_cluster_claims_it_outweighs_nobody() -> None:
    """What was seen here decides in the end."""
    one = cluster(0.9, jobs=1, seed=4)
    many = SpeedStatistics(
        (cell, SpeedSums(5000 * sums.count, 5000 * sums.total, 5000 * sums.squares)) for cell, sums in one
    )
    found = trusted(cluster(0.9), [many], 1)
    assert all(sums.count <= 2 for _, sums in found)
    noisy = [cluster(0.9, jobs=40, noise=0.5, seed=seed) for seed in range(2)]
    assert max(sums.count for _, sums in trusted(noisy[0], noisy[1:], 1)) > 10, "of noisy classes more jobs say more"


def test_a_calendar_that_is_ahead_does_not_make_everybody_forget() -> None:
    future = cluster(0.9, period=10**9)
    assert trusted(NOBODY, [future], 5) == NOBODY
    assert trusted(NOBODY, [future, cluster(0.9)], 5) == trusted(NOBODY, [cluster(0.9)], 5)


@given(
    st.lists(st.tuples(st.floats(-1, 1), st.integers(1, 30), st.floats(0, 0.5), st.integers(0, 99)), max_size=6),
    st.randoms(use_true_random=False),
)
def test_it_follows_from_the_statistics_in_whatever_order_and_can_be_believed(
    drawn: list[tuple[float, int, float, int]], chance: object
) -> None:
    parts = [cluster(power, jobs=jobs, noise=noise, seed=seed) for power, jobs, noise, seed in drawn]
    own = cluster(0.3, jobs=2)
    found = trusted(own, parts, 1)
    chance.shuffle(parts)  # type: ignore[attr-defined]
    assert trusted(own, parts, 1) == found
    assert not problem_with(found)
