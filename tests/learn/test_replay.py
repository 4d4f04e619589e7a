"""The replay memory forgets the oldest and draws as DL2 does."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from fedsched.learn.replay import Replay
from fedsched.policy.dl2 import ROWS, DecisionSample, Dl2Shape

SHAPE = Dl2Shape(window=2, hidden=(4,))


def sample(mark: int, probability: float = 0.5) -> DecisionSample:
    """Recognisable by its first number."""
    state = np.full((ROWS, SHAPE.window), mark, dtype=np.float32)
    return DecisionSample(1, 1, state, np.ones(SHAPE.actions, dtype=np.bool_), mark % SHAPE.actions, probability)


def test_the_oldest_make_room() -> None:
    """Old behaviour must fade, and memory must not grow for as long as the agent lives."""
    replay = Replay(SHAPE, 3, prioritised=False)
    for mark in range(5):
        replay.add([sample(mark)], rewards=[float(mark)])
    batch = replay.draw(10, Random(0))
    assert sorted(batch.rewards.tolist()) == [2.0, 3.0, 4.0]
    assert sorted(batch.states[:, 0, 0].tolist()) == [2.0, 3.0, 4.0]
    assert batch.weights.tolist() == [1.0, 1.0, 1.0]


def test_a_batch_keeps_what_belongs_together() -> None:
    """A state beside another state's action teaches nonsense, and nothing would look wrong."""
    replay = Replay(SHAPE, 8, prioritised=False)
    for mark in range(6):
        replay.add([sample(mark, probability=mark / 10)], rewards=[mark * 2.0])
    batch = replay.draw(4, Random(1))
    marks = batch.states[:, 0, 0]
    assert len(set(marks.tolist())) == 4
    assert batch.rewards.tolist() == (marks * 2).tolist()
    assert batch.behaviour.tolist() == pytest.approx((marks / 10).tolist())
    assert batch.actions.tolist() == [int(mark) % SHAPE.actions for mark in marks]


def test_surprising_transitions_come_more_often_and_count_less() -> None:
    """Prioritised drawing is only right together with its weights."""
    replay = Replay(SHAPE, 4)
    replay.add([sample(mark) for mark in range(4)], rewards=[0.0] * 4)
    batch = replay.draw(4, Random(0))
    assert sorted(batch.indices.tolist()) == [0, 1, 2, 3]  # equal priorities: one from each segment

    advantages = np.where(batch.indices == 2, 10.0, 0.0).astype(np.float32)
    replay.used(batch, advantages)

    again = replay.draw(100, Random(0))
    many = [replay.draw(4, Random(seed)) for seed in range(50)]
    counts = np.bincount(np.concatenate([entry.indices for entry in many]), minlength=4)
    assert len(again.indices) == 4
    # Priorities 4^0.9 = 3.482 against 0.01^0.9 = 0.0158 each: 98.7 % of all draws.
    assert counts[2] > 190
    seldom, often = 1.0, (4**0.9 / 0.01**0.9) ** -0.1
    weights = again.weights[again.indices == 2]
    assert weights.tolist() == pytest.approx([often] * len(weights), rel=0.01)
    assert often < seldom


def test_a_new_transition_with_an_unusual_reward_comes_first() -> None:
    """max(1, reward - mean): what turned out well is looked at soon."""
    replay = Replay(SHAPE, 200)
    replay.add([sample(mark) for mark in range(100)], rewards=[0.0] * 100)
    replay.add([sample(7)], rewards=[50.0])
    drawn = np.concatenate([replay.draw(3, Random(seed)).rewards for seed in range(50)])
    assert (drawn == 50.0).mean() == pytest.approx(1 / 3, abs=0.05)


def test_priorities_and_their_weights_are_those_of_a_sum_on_paper() -> None:
    """Rewards 4, 8 and 1 come when the means are 0, 4 and 6: priorities 4, 4 and, at least, 1.

    Of the sum 9 each draw has a third: the first falls on the first transition, the last on the second or the third.
    The least likely one counts whole, the others 4^-beta, and beta grows by 0.0001 a batch until it is 1.
    """
    replay = Replay(SHAPE, 4)
    for mark, reward in enumerate([4.0, 8.0, 1.0]):
        replay.add([sample(mark)], [reward])
    beta, drawn = 0.1, set()
    for seed in range(50):
        batch = replay.draw(3, Random(seed))
        expected = np.where(batch.indices == 2, 1.0, 4**-beta)
        assert batch.weights == pytest.approx(expected, rel=1e-6)
        assert batch.indices[0] == 0
        drawn.update(batch.indices[2:].tolist())
        beta += 1e-4
    assert drawn == {1, 2}
    for seed in range(9000):
        replay.draw(1, Random(seed))
    assert {round(float(weight), 6) for weight in replay.draw(3, Random(1)).weights} <= {0.25, 1.0}
