"""Who pulls against the rest is left out, who merely pulls elsewhere is not, and it follows from the updates alone."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from fedsched.core.ids import ClusterName
from fedsched.core.rounds import NewWeights, PolicyRecord
from fedsched.federation.averaging import Update, weighted_mean
from fedsched.federation.loop import BaseVersion, Gradients, Unusable
from fedsched.federation.optimiser import ServerOptimiser, digest_of
from fedsched.federation.repute import Repute, Reputes, left_out, noted
from fedsched.federation.source import Arrays

SIZE = 200
LIAR = ClusterName("liar")


def direction(seed: str) -> np.ndarray:
    drawn = np.random.default_rng(list(seed.encode())).normal(size=SIZE)
    return drawn / np.linalg.norm(drawn)


@dataclass(frozen=True)
class Crowd:
    """Clusters whose gradients are a common direction, one of their own, and noise."""

    shares: Mapping[str, float]
    """Of the common direction, by cluster; below zero: against it."""
    noise: float = 0.5

    def updates(self, number: int) -> list[Update]:
        found = []
        for name, share in self.shares.items():
            own = (1 - abs(share)) * direction(f"own/{name}")
            noise = self.noise * direction(f"noise/{name}/{number}")
            found.append(
                Update(ClusterName(name), 10, {"w": (share * direction("all") + own + noise).astype(np.float32)})
            )
        return found

    def after(self, rounds: int) -> dict[ClusterName, Repute]:
        reputes: dict[ClusterName, Repute] = {}
        for number in range(rounds):
            reputes = noted(reputes, self.updates(number), left_out(reputes).keys())
        return reputes


HONEST = {f"c{number}": 0.8 for number in range(7)}


@pytest.mark.parametrize("honest", [2, 7])
def test_whose_gradients_point_backwards_is_left_out_and_told_why(honest: int) -> None:
    """It undoes what the others learn, and each of its gradients by itself looks like anybody's."""
    crowd = Crowd({**{f"c{number}": 0.8 for number in range(honest)}, LIAR: -0.8})
    if honest == 2:
        assert LIAR in left_out(crowd.after(20))
        return
    assert not left_out(crowd.after(4)), "a few rounds are chance"
    out = left_out(crowd.after(10))
    assert set(out) == {LIAR}
    assert "point against the others' (cosine -0." in out[LIAR]


@settings(max_examples=30)
@given(st.floats(0.2, 1.0), st.floats(0.0, 1.5), st.integers(2, 7))
def test_an_odd_honest_cluster_is_not_left_out(share: float, noise: float, others: int) -> None:
    """Other jobs teach other things: that is what clusters learn together for."""
    crowd = Crowd({**{f"c{number}": 0.8 for number in range(others)}, "odd": share}, noise)
    assert not left_out(crowd.after(30))


def test_who_agrees_again_comes_back() -> None:
    """A cluster whose clock or reward was wrong is mended some day."""
    reputes: Reputes = Crowd({**HONEST, LIAR: -0.8}).after(10)
    mended = Crowd({**HONEST, LIAR: 0.8})
    for number in range(10, 40):
        reputes = noted(reputes, mended.updates(number), left_out(reputes).keys())
    assert not left_out(reputes)


def test_of_two_nobody_can_say_who_is_wrong() -> None:
    assert not Crowd({"c1": 0.8, LIAR: -0.8}).after(30)


def test_a_gradient_of_zeros_says_nothing() -> None:
    crowd = Crowd(HONEST)
    updates = [*crowd.updates(0), Update(ClusterName("idle"), 1, {"w": np.zeros(SIZE, np.float32)})]
    assert ClusterName("idle") not in noted({}, updates, set())


@settings(max_examples=30)
@given(st.randoms(use_true_random=False))
def test_reputes_are_the_same_in_whatever_order_updates_came(chance: random.Random) -> None:
    """A round that is replayed must leave out the same clusters."""
    updates = Crowd({**HONEST, LIAR: -0.8}).updates(3)
    expected = noted({}, updates, {LIAR})
    chance.shuffle(updates)
    assert noted({}, updates, {LIAR}) == expected


# --- in the strategy


@dataclass(frozen=True)
class Plain:
    """Weights without a policy."""

    arrays: Arrays
    made: Mapping[str, str | int | float] = field(default_factory=dict)
    digest: str = ""

    def to_bytes(self) -> bytes:
        return b""

    def replaced(self, arrays: Arrays, made: Mapping[str, str | int | float]) -> Plain:
        return Plain(arrays, made)


def version(optimiser: ServerOptimiser) -> BaseVersion:
    made = NewWeights("", "", 0, "", "")
    record = PolicyRecord("dl2", 1, made.digest, made.location, made.size_bytes, 0.0)
    return BaseVersion(record, Plain({"w": np.zeros(SIZE, np.float32)}), b"", optimiser)


def stepped(strategy: Gradients, before: BaseVersion, updates: Sequence[Update]) -> tuple[np.ndarray, ServerOptimiser]:
    weights, optimiser = strategy.step(before, updates, {})
    return weights.arrays["w"], optimiser


def test_the_weights_are_those_of_a_round_without_whoever_is_left_out() -> None:
    crowd = Crowd({**HONEST, LIAR: -0.8})
    before = version(ServerOptimiser(0.01, reputes=crowd.after(10)))
    strategy, updates = Gradients(weighted_mean), crowd.updates(10)
    honest = [update for update in updates if update.cluster != LIAR]

    assert set(strategy.left_out(before)) == {LIAR}
    np.testing.assert_array_equal(stepped(strategy, before, updates)[0], stepped(strategy, before, honest)[0])
    with pytest.raises(Unusable, match="left out"):
        strategy.step(before, [update for update in updates if update.cluster == LIAR], {})


def test_who_is_left_out_survives_a_restart_bit_by_bit() -> None:
    """Or a liar would be believed for some rounds after each."""
    crowd = Crowd({**HONEST, LIAR: -0.8})
    strategy = Gradients(weighted_mean)
    _, optimiser = stepped(strategy, version(ServerOptimiser(0.01, reputes=crowd.after(10))), crowd.updates(10))
    data = optimiser.to_bytes()
    restored = ServerOptimiser.from_bytes(0.01, data, digest_of(data))

    assert restored.reputes == optimiser.reputes
    assert set(strategy.left_out(version(restored))) == {LIAR}
    assert restored.to_bytes() == data


def test_a_round_of_four_steps_as_far_as_four_rounds_of_one_and_later_ones_less_far() -> None:
    """Adam's first step is as long as its learning rate in every coordinate, whatever the gradient."""
    updates = Crowd({f"c{number}": 0.8 for number in range(4)}).updates(0)
    plain, _ = stepped(Gradients(weighted_mean), version(ServerOptimiser(0.01)), updates)
    counting = Gradients(weighted_mean, half_after=1)
    longer, once = stepped(counting, version(ServerOptimiser(0.01)), updates)
    np.testing.assert_allclose(longer, plain * (1 + 1 / 2 + 1 / 3 + 1 / 4), rtol=1e-5)

    assert once.given == 4
    restored = version(ServerOptimiser.from_bytes(0.01, once.to_bytes(), digest_of(once.to_bytes())))
    fifth = updates[:1]
    np.testing.assert_allclose(
        stepped(counting, restored, fifth)[0], stepped(Gradients(weighted_mean), version(once), fifth)[0] / 5, rtol=1e-5
    )
