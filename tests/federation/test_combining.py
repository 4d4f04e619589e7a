"""Averaging and the server's optimiser: exact numbers, the same bits in any order and after a restart."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from fedsched.core.ids import ClusterName
from fedsched.errors import CorruptCheckpoint
from fedsched.federation.averaging import Update, inspect, norm, trimmed_mean, weighted_mean
from fedsched.federation.optimiser import ServerOptimiser, digest_of
from fedsched.federation.source import Arrays


def gradients(seed: int) -> dict[str, np.ndarray]:
    chance = np.random.default_rng(seed)
    return {
        "policy.0.weight": chance.normal(size=(4, 3)).astype(np.float32),
        "policy.0.bias": chance.normal(size=4).astype(np.float32),
    }


def same_bits(one: Arrays, other: Arrays) -> bool:
    return one.keys() == other.keys() and all(one[name].tobytes() == other[name].tobytes() for name in one)


def test_the_mean_weighs_each_cluster_by_its_samples() -> None:
    """A cluster with ten times the jobs has seen ten times as much."""
    updates = [Update(ClusterName("a"), 10, {"w": np.array([1.0], np.float32)})]
    updates.append(Update(ClusterName("b"), 30, {"w": np.array([5.0], np.float32)}))

    assert weighted_mean(updates)["w"] == np.array([4.0], np.float32)


def test_the_same_updates_in_any_order_give_the_same_bits() -> None:
    """A round that was replayed from its record must give the same weights; sums in arrival order would not."""
    updates = [Update(ClusterName(f"c{index}"), 1 + index * 7, gradients(index)) for index in range(9)]
    mean, trimmed = weighted_mean(updates), trimmed_mean(updates, 0.2)

    for seed in range(20):
        shuffled = random.Random(seed).sample(updates, len(updates))
        assert same_bits(weighted_mean(shuffled), mean)
        assert same_bits(trimmed_mean(shuffled, 0.2), trimmed)


def test_the_trimmed_mean_is_not_moved_by_a_liar() -> None:
    """One cluster that sends huge gradients must not steer the policy of five."""
    honest = [Update(ClusterName(f"c{index}"), 10, {"w": np.array([1.0 + index], np.float32)}) for index in range(4)]
    liar = Update(ClusterName("liar"), 10**9, {"w": np.array([-1e9], np.float32)})

    assert trimmed_mean([*honest, liar], 0.2)["w"] == np.array([2.0], np.float32)


def test_an_inspection_names_the_first_misfit() -> None:
    """The operator of the agent must learn which array is wrong, not that something is."""
    arrays, given = gradients(0), gradients(1)

    assert inspect(arrays, given).misfit == ""
    assert inspect(arrays, {"policy.0.bias": given["policy.0.bias"]}).misfit.startswith("array policy.0.weight is miss")
    assert "extra is not one" in inspect(arrays, {**given, "extra": given["policy.0.bias"]}).misfit
    wrong_shape = {**given, "policy.0.bias": np.zeros(5, np.float32)}
    assert "has shape [5]; the policy's has [4]" in inspect(arrays, wrong_shape).misfit
    wrong_type = {**given, "policy.0.bias": np.zeros(4, np.float64)}
    assert "float64" in inspect(arrays, wrong_type).misfit


def test_an_inspection_sees_every_number() -> None:
    """A single NaN spreads to all weights in one step."""
    broken = gradients(1)
    broken["policy.0.weight"][3, 2] = np.nan

    assert not inspect(gradients(0), broken).finite
    assert inspect(gradients(0), gradients(1)).finite


def test_the_norm_does_not_overflow_in_single_precision() -> None:
    """1e30 squared is infinite as a float32; the norm must still be a number to compare with the limit."""
    assert norm({"w": np.full(4, 1e30, np.float32)}) == pytest.approx(2e30)


def test_the_server_step_is_torchs_adam() -> None:
    """Anybody can check a version against the textbook's optimiser."""
    arrays, optimiser = gradients(0), ServerOptimiser(0.01)
    reference = [torch.nn.Parameter(torch.from_numpy(arrays[name].copy())) for name in sorted(arrays)]
    adam = torch.optim.Adam(reference, lr=0.01)

    stepped: Arrays = arrays
    for seed in (1, 2, 3):
        stepped, optimiser = optimiser.step(stepped, gradients(seed))
        for name, parameter in zip(sorted(arrays), reference, strict=True):
            parameter.grad = torch.from_numpy(gradients(seed)[name])
        adam.step()

    for name, parameter in zip(sorted(arrays), reference, strict=True):
        np.testing.assert_allclose(stepped[name], parameter.detach().numpy(), rtol=1e-6)


def test_a_step_leaves_the_old_weights_and_the_old_optimiser_as_they_were() -> None:
    """If the new version cannot be saved the round is void, and the next one starts from the same place."""
    arrays = gradients(0)
    _, optimiser = ServerOptimiser(0.01).step(arrays, gradients(1))
    before, weights = optimiser.to_bytes(), {name: array.copy() for name, array in arrays.items()}

    once, _ = optimiser.step(arrays, gradients(2))
    again, _ = optimiser.step(arrays, gradients(2))

    assert same_bits(once, again)
    assert same_bits(arrays, weights)
    assert optimiser.to_bytes() == before


def test_an_optimiser_that_was_written_and_read_goes_on_with_the_same_bits() -> None:
    """A restart of the aggregator must not change what is learnt."""
    arrays, optimiser = ServerOptimiser(0.01).step(gradients(0), gradients(1))
    data = optimiser.to_bytes()

    restored = ServerOptimiser.from_bytes(0.01, data, digest_of(data))

    straight, restarted = optimiser.step(arrays, gradients(2)), restored.step(arrays, gradients(2))
    assert same_bits(straight[0], restarted[0])
    assert straight[1].to_bytes() == restarted[1].to_bytes()


def test_a_damaged_optimiser_state_is_noticed() -> None:
    """Silently wrong moments would bend every later version."""
    _, optimiser = ServerOptimiser(0.01).step(gradients(0), gradients(1))
    data = optimiser.to_bytes()

    with pytest.raises(CorruptCheckpoint, match="digest"):
        ServerOptimiser.from_bytes(0.01, data[:-1] + b"\x01", digest_of(data))
    with pytest.raises(CorruptCheckpoint, match="cannot be read"):
        ServerOptimiser.from_bytes(0.01, b"nonsense", digest_of(b"nonsense"))
