"""Learning from rewards: gradients that can be checked by hand, and an obvious choice that is found."""

from __future__ import annotations

import dataclasses
import math
import threading
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from fedsched.core.commands import RewardSlot
from fedsched.core.ids import JobId
from fedsched.core.placement import TentativePlacement
from fedsched.learn.actor_critic import ENTROPY_WEIGHT, Learner, gradient_on
from fedsched.learn.replay import Replay
from fedsched.policy.dl2 import (
    BUNDLE,
    DL2,
    ROWS,
    DecisionSample,
    Dl2Shape,
    features,
    forward,
    initial,
    probabilities,
)
from fedsched.policy.learnable import Array
from tests.policy.observations import job, node, observation

SHAPE = Dl2Shape(window=2, hidden=(8,))


def sample(arrays: dict[str, Array], chance: np.random.Generator, slot: int = 1) -> DecisionSample:
    """A random state and a legal action, with the probability that these weights give it."""
    state = chance.uniform(0, 4, (ROWS, SHAPE.window)).astype(np.float32)
    mask = np.array([True, False, True, True, False, False, True])
    chances = probabilities(forward(arrays, "policy", features(state[None]))[0], mask)
    action = int(chance.choice(np.flatnonzero(mask)))
    return DecisionSample(slot, 1, state, mask, action, float(chances[action]))


def loss_by_hand(arrays: dict[str, NDArray[np.float64]], samples: list[DecisionSample], rewards: list[float]) -> float:
    """REINFORCE with baseline and entropy bonus, plus the value loss, in plain numpy at the samples' own policy."""
    total = 0.0
    for entry, reward in zip(samples, rewards, strict=True):
        inputs = features(entry.state[None])
        chances = probabilities(forward(arrays, "policy", inputs)[0], entry.mask)
        legal = chances[entry.mask]
        value = float(forward(arrays, "value", inputs)[0, 0])
        advantage = reward - entry_value(entry)
        entropy = float(-(legal * np.log(legal)).sum())
        total += -advantage * float(np.log(chances[entry.action])) + (value - reward) ** 2
        total -= ENTROPY_WEIGHT * entropy / SHAPE.actions
    return total / len(samples)


BASE = {name: array.astype(np.float64) for name, array in initial(SHAPE, 3).items()}


def entry_value(entry: DecisionSample) -> float:
    """The baseline is a constant: it must not pull on the value network through the policy's loss."""
    return float(forward(BASE, "value", features(entry.state[None]))[0, 0])


def test_the_gradient_is_that_of_the_formula() -> None:
    """Numerical differences of an independent implementation; a wrong sign here learns to be bad."""
    chance = np.random.default_rng(4)
    arrays = initial(SHAPE, 3)
    samples = [sample(arrays, chance) for _ in range(5)]
    rewards = [0.3, -0.2, 1.0, 0.0, 0.7]
    replay = Replay(SHAPE, 8, prioritised=False)
    for entry, reward in zip(samples, rewards, strict=True):
        replay.add([entry], [reward])

    update, advantages = gradient_on(arrays, replay.draw(5, Random(0)))

    assert update.samples == 5
    assert update.mean_reward == pytest.approx(0.36)
    expected = sorted(reward - entry_value(entry) for entry, reward in zip(samples, rewards, strict=True))
    assert sorted(advantages.tolist()) == pytest.approx(expected, abs=1e-6)
    for name, position in [("policy.0.weight", (2, 3)), ("policy.1.bias", (2,)), ("value.0.weight", (1, 7))]:
        step = 1e-5
        sides = []
        for sign in (1, -1):
            moved = {key: array.copy() for key, array in BASE.items()}
            moved[name][position] += sign * step
            sides.append(loss_by_hand(moved, samples, rewards))
        numerical = (sides[0] - sides[1]) / (2 * step)
        assert update.gradients[name][position] == pytest.approx(numerical, rel=2e-3, abs=1e-6)


def flat(reward: float, *, baseline: float | None = None, chance: float = 1 / 3) -> tuple[dict[str, Array], Array]:
    """The gradient of one choice, the third of three legal ones, by weights that are all zero: uniform, and V = 0."""
    arrays = {name: np.zeros(size, np.float32) for name, size in SHAPE.layers().items()}
    mask = np.array([True, False, True, False, False, False, True])
    replay = Replay(SHAPE, 4, prioritised=False)
    state = np.ones((ROWS, SHAPE.window), np.float32)
    replay.add([DecisionSample(1, 1, state, mask, 6, chance)], [reward])
    update, advantages = gradient_on(arrays, replay.draw(1, Random(0)), baseline=baseline)
    return update.gradients, advantages


def test_the_gradient_is_that_of_a_sum_on_paper() -> None:
    """-A (1 - p) for the choice, A p for the other legal ones, nothing for the rest; -2 (r - V) for the value's bias.

    With all weights zero p is 1/3, V is 0, the advantage is the reward, and the entropy, at its maximum, pulls nowhere.
    """
    gradients, advantages = flat(0.6)

    assert advantages.tolist() == pytest.approx([0.6])
    assert gradients["policy.1.bias"].tolist() == pytest.approx([0.2, 0, 0.2, 0, 0, 0, -0.4])
    assert gradients["value.1.bias"].tolist() == pytest.approx([-1.2])


def test_the_bonus_for_staying_undecided_pulls_the_likeliest_action_down_on_paper() -> None:
    """With nothing to gain only the bonus is left: w/7 of the entropy, whose slope along a logit is -p (ln p + H).

    Of the legal actions the first has probability 1/2 and the other two 1/4, so H is 3/2 ln 2, and the loss climbs by
    1/4, -1/8 and -1/8 ln 2, times w/7: the mean is over all seven actions, as in DL2's code.
    """
    arrays = {name: np.zeros(size, np.float32) for name, size in SHAPE.layers().items()}
    arrays["policy.1.bias"][0] = math.log(2)
    mask = np.array([True, False, True, False, False, False, True])
    replay = Replay(SHAPE, 4, prioritised=False)
    replay.add([DecisionSample(1, 1, np.ones((ROWS, SHAPE.window), np.float32), mask, 6, 0.25)], [0.0])

    update, _ = gradient_on(arrays, replay.draw(1, Random(0)), entropy_weight=0.7)

    slopes = np.array([1 / 4, 0, -1 / 8, 0, 0, 0, -1 / 8]) * math.log(2) * 0.7 / 7
    assert update.gradients["policy.1.bias"] == pytest.approx(slopes, abs=1e-7)
    assert update.entropy == pytest.approx(1.5 * math.log(2))


def test_a_transition_that_is_drawn_too_often_counts_less_on_paper() -> None:
    """With importance 1/4 a quarter of both gradients of the sum above remains, and all of the advantage."""
    arrays = {name: np.zeros(size, np.float32) for name, size in SHAPE.layers().items()}
    mask = np.array([True, False, True, False, False, False, True])
    replay = Replay(SHAPE, 4, prioritised=False)
    replay.add([DecisionSample(1, 1, np.ones((ROWS, SHAPE.window), np.float32), mask, 6, 1 / 3)], [0.6])
    batch = dataclasses.replace(replay.draw(1, Random(0)), weights=np.array([0.25], np.float32))

    update, advantages = gradient_on(arrays, batch)

    assert update.gradients["policy.1.bias"].tolist() == pytest.approx([0.05, 0, 0.05, 0, 0, 0, -0.1])
    assert update.gradients["value.1.bias"].tolist() == pytest.approx([-0.3])
    assert advantages.tolist() == pytest.approx([0.6])


def test_with_the_mean_as_baseline_the_value_network_learns_nothing() -> None:
    gradients, advantages = flat(0.6, baseline=0.9)

    assert advantages.tolist() == pytest.approx([-0.3])
    assert gradients["policy.1.bias"].tolist() == pytest.approx([-0.1, 0, -0.1, 0, 0, 0, 0.2])
    assert all((gradients[name] == 0).all() for name in gradients if name.startswith("value."))
    assert sorted(gradients) == sorted(SHAPE.layers()), "a round expects an array for every weight"


def test_a_choice_of_older_weights_counts_by_its_ratio_on_paper() -> None:
    """It was taken with probability 1/2 and would be with 1/3 now: two thirds of its gradient remain."""
    gradients, _ = flat(0.6, chance=0.5)

    assert gradients["policy.1.bias"].tolist() == pytest.approx([2 / 15, 0, 2 / 15, 0, 0, 0, -4 / 15])


def test_what_was_drawn_is_drawn_again_by_how_much_it_surprised() -> None:
    """By weights that are all zero nothing is expected, so the surprise is the reward; its priority is 0.61^0.9."""
    arrays = {name: np.zeros(size, np.float32) for name, size in SHAPE.layers().items()}
    learner = Learner(SHAPE, 8)
    learner.record(1, [sample(arrays, np.random.default_rng(0))])
    learner.reward(RewardSlot(1, ((JobId("a"), 0.6),)))
    assert learner.state()["priorities"].tolist() == [1.0]
    learner.gradient(arrays, 1, seed=0)
    assert learner.state()["priorities"] == pytest.approx([0.61**0.9])


def test_a_learner_goes_on_from_its_state_as_if_nothing_had_happened() -> None:
    """What is lost of a memory over a restart shows only much later, as a training that cannot be repeated."""
    arrays, chance = initial(SHAPE, 0), np.random.default_rng(0)
    learner, again = Learner(SHAPE, 16), Learner(SHAPE, 16)
    for slot in range(9):  # more than fit, so that the ring has gone round
        learner.record(slot, [sample(arrays, chance, slot) for _ in range(3)])
        learner.reward(RewardSlot(slot, ((JobId("a"), slot / 9),)))
    learner.gradient(arrays, 8, 1)
    again.restore(learner.state())

    assert (len(again), again.recorded) == (len(learner), learner.recorded) == (16, 27)
    for seed in range(3):
        one, other = learner.gradient(arrays, 8, seed), again.gradient(arrays, 8, seed)
        assert all((one.gradients[name] == other.gradients[name]).all() for name in one.gradients)
    with pytest.raises(ValueError, match="at most"):
        Learner(SHAPE, 8).restore(learner.state())
    again.forget()
    assert (len(again), again.recorded) == (0, 27)


def test_illegal_actions_get_no_gradient_and_no_nan() -> None:
    """0 times minus infinity is how masked policies die."""
    arrays = initial(SHAPE, 3)
    replay = Replay(SHAPE, 8, prioritised=False)
    replay.add([sample(arrays, np.random.default_rng(1)) for _ in range(4)], [1.0] * 4)
    update, _ = gradient_on(arrays, replay.draw(4, Random(0)))
    assert sorted(update.gradients) == sorted(arrays)
    assert all(np.isfinite(gradient).all() for gradient in update.gradients.values())
    assert update.gradients["policy.1.bias"][[1, 4, 5]].tolist() == [0.0, 0.0, 0.0]


def test_a_choice_that_the_policy_has_come_to_like_counts_at_most_double() -> None:
    """Unbounded importance ratios let one old decision overturn a policy."""
    arrays = initial(SHAPE, 3)
    fresh = sample(arrays, np.random.default_rng(1))
    rare = DecisionSample(1, 1, fresh.state, fresh.mask, fresh.action, fresh.probability * 1e-3)
    norms = []
    for entry in (fresh, rare):
        replay = Replay(SHAPE, 8, prioritised=False)
        replay.add([entry], [100.0])
        update, _ = gradient_on(arrays, replay.draw(1, Random(0)))
        norms.append(float(np.linalg.norm(update.gradients["policy.1.bias"])))
    assert norms[1] / norms[0] == pytest.approx(2.0, rel=1e-3)


def test_a_slots_choices_wait_for_that_slots_reward() -> None:
    """The reward of a slot comes a slot later, and slots that a heuristic decided have no choices."""
    learner = Learner(SHAPE)
    arrays = initial(SHAPE, 0)
    chance = np.random.default_rng(0)
    learner.record(4, [sample(arrays, chance), sample(arrays, chance)])
    learner.reward(RewardSlot(3, ((JobId("a"), 9.0),)))
    assert len(learner) == 0
    with pytest.raises(ValueError, match="no transition"):
        learner.gradient(arrays, 8, seed=0)
    learner.reward(RewardSlot(4, ((JobId("b"), 0.25), (JobId("a"), 0.5))))
    assert len(learner) == 2
    assert learner.gradient(arrays, 8, seed=0).mean_reward == 0.75


def three_slots(**options: Any) -> list[float]:
    """What is remembered of three slots with three choices each: about job a, about job b, and void."""
    learner = Learner(SHAPE, 64, prioritised=False, **options)
    chance, arrays = np.random.default_rng(0), initial(SHAPE, 0)
    for slot, (of_a, of_b) in enumerate([(0.1, 0.3), (0.2, 0.0), (0.4, 0.6)]):
        made = sample(arrays, chance, slot)
        whom = (JobId("a"), JobId("b"), None)
        learner.record(slot, [dataclasses.replace(made, job_id=job_id) for job_id in whom])
        learner.reward(RewardSlot(slot, ((JobId("a"), of_a), (JobId("b"), of_b))))
    learner.abandon()
    assert learner.recorded == 9
    return [round(float(reward), 4) for reward in learner.state()["rewards"]]


def test_what_a_choice_earns_can_be_chosen_on_paper() -> None:
    """The slot's progress, its job's own, and either with what later slots bring, half as much per slot."""
    assert three_slots() == [0.4] * 3 + [0.2] * 3 + [1.0] * 3
    assert three_slots(per_job=True) == [0.1, 0.3, 0.2, 0.2, 0.0, 0.1, 0.4, 0.6, 0.5]
    # 0.4 + 0.2 / 2 + 1.0 / 4, then 0.2 + 1.0 / 2, then 1.0
    assert three_slots(discount=0.5) == [0.75] * 3 + [0.7] * 3 + [1.0] * 3
    # a: 0.1 + 0.2 / 2 + 0.4 / 4; b: 0.3 + 0 + 0.6 / 4; void: 0.2 + 0.1 / 2 + 0.5 / 4
    assert three_slots(per_job=True, discount=0.5)[:3] == [0.3, 0.45, 0.375]


def test_a_choice_is_remembered_once_later_rewards_hardly_count() -> None:
    """Else an agent that runs for ever would never learn."""
    learner = Learner(SHAPE, 64, discount=0.5)
    made = sample(initial(SHAPE, 0), np.random.default_rng(0))
    for slot in range(20):
        learner.record(slot, [made])
        learner.reward(RewardSlot(slot, ((JobId("a"), 1.0),)))
        assert learner.recorded == max(0, slot + 1 - 6)  # 0.5 ** 6 counts, 0.5 ** 7 is below a hundredth


def test_an_agent_cut_off_for_long_does_not_hoard_choices() -> None:
    learner = Learner(SHAPE)
    entry = sample(initial(SHAPE, 0), np.random.default_rng(0))
    for slot in range(1000):
        learner.record(slot, [entry])
    for slot in range(1000):
        learner.reward(RewardSlot(slot, ()))
    assert len(learner) == 64


def test_the_same_memory_weights_and_seed_give_the_same_gradient() -> None:
    """An aggregator that recomputes or compares updates relies on it; float sums are easily not repeatable."""
    updates = []
    for _ in range(2):
        learner = Learner(SHAPE)
        arrays = initial(SHAPE, 0)
        chance = np.random.default_rng(0)
        for slot in range(40):
            learner.record(slot, [sample(arrays, chance, slot) for _ in range(5)])
            learner.reward(RewardSlot(slot, ((JobId("a"), slot / 40),)))
        updates.append([learner.gradient(arrays, 64, seed) for seed in range(3)])
    for one, other in zip(*updates, strict=True):
        assert all((one.gradients[name] == other.gradients[name]).all() for name in one.gradients)
    assert (updates[0][0].gradients["policy.1.bias"] != updates[0][1].gradients["policy.1.bias"]).any()


def test_threads_may_record_while_a_round_asks_for_a_gradient() -> None:
    """The agent decides on one thread and answers the aggregator on another."""
    learner = Learner(SHAPE)
    arrays = initial(SHAPE, 0)
    entry = sample(arrays, np.random.default_rng(0))
    learner.record(0, [entry])
    learner.reward(RewardSlot(0, ()))

    def decide() -> None:
        for slot in range(1, 400):
            learner.record(slot, [entry] * 3)
            learner.reward(RewardSlot(slot, ((JobId("a"), 0.1),)))

    deciding = threading.Thread(target=decide)
    deciding.start()
    counts = [learner.gradient(arrays, 32, seed).samples for seed in range(20)]
    deciding.join()
    assert all(1 <= count <= 32 for count in counts)
    assert len(learner) == 1 + 399 * 3


def learn_the_obvious(seed: int) -> tuple[dict[str, Array], list[float]]:
    """Two jobs, one slot after the other; each bundle for the first job earns 1, anything else nothing."""
    arrays = initial(SHAPE, seed)
    policy = DL2(arrays, shape=SHAPE, seed=seed)
    learner = Learner(SHAPE, capacity=512)
    weights = {name: torch.from_numpy(array) for name, array in arrays.items()}
    optimiser = torch.optim.Adam(list(weights.values()), lr=0.02)
    earned = []
    for slot in range(80):
        seen = observation([node("n", 8)], [job("a", ps=(1, 4)), job("b", ps=(1, 4))], slot)
        policy.decide(seen, TentativePlacement(seen))
        reward = float(sum(entry.action == BUNDLE for entry in policy.last_trace()))
        learner.record(slot, policy.last_trace())
        learner.reward(RewardSlot(slot, ((JobId("a"), reward),)))
        if len(learner):
            update = learner.gradient(arrays, 64, seed=slot)
            for name, tensor in weights.items():
                tensor.grad = torch.from_numpy(update.gradients[name])
            optimiser.step()
            policy.load(slot + 2, arrays)
        earned.append(reward)
    return arrays, earned


def test_an_obvious_choice_is_found_in_seconds_and_twice_the_same() -> None:
    """Two bundles fit after the minima; a learner that cannot find that will find nothing."""
    arrays, earned = learn_the_obvious(0)
    again, _ = learn_the_obvious(0)

    assert sum(earned[:20]) / 20 < 1.5
    assert sum(earned[-20:]) / 20 > 1.9
    assert all((arrays[name] == again[name]).all() for name in arrays)
