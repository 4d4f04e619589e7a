"""A learner that takes its own steps."""

from __future__ import annotations

import numpy as np
import pytest

from fedsched.core.commands import RewardSlot
from fedsched.core.placement import TentativePlacement
from fedsched.federation.optimiser import ServerOptimiser
from fedsched.learn.actor_critic import Learner
from fedsched.learn.stepping import SteppingLearner
from fedsched.policy.dl2 import DL2, Dl2Shape, initial
from tests.policy.observations import job, node, observation

SHAPE = Dl2Shape(window=3, hidden=(8,))


def lengths(half_after: float | None, steps: int = 4) -> list[float]:
    """How far the weights go at each step, at most in any of them."""
    learner = SteppingLearner(
        Learner(SHAPE),
        initial(SHAPE, 0),
        1,
        ServerOptimiser(0.001),
        batch_size=8,
        samples_min=1,
        half_after=half_after,
        seed=0,
    )
    policy = DL2(learner.arrays, shape=SHAPE)
    learner.teach(policy)
    seen = observation([node("n", 12)], [job("a"), job("b")])
    went = []
    for slot in range(steps):
        before = learner.arrays
        policy.decide(seen, TentativePlacement(seen))
        learner.record(slot, policy.last_trace())
        learner.reward(RewardSlot(slot, ((seen.jobs[0].job_id, 1.0),)))
        went.append(max(float(np.abs(learner.arrays[name] - before[name]).max()) for name in before))
    return went


def test_steps_shrink_with_the_gradients_so_far_where_that_is_said() -> None:
    """What is at its best gets worse again under steps that never shrink; Adam's are about as long as its step size."""
    alike, shrinking = lengths(None), lengths(1)

    assert alike == pytest.approx([0.001] * 4, rel=0.1)
    assert shrinking == pytest.approx([0.001, 0.001 / 2, 0.001 / 3, 0.001 / 4], rel=0.1)
