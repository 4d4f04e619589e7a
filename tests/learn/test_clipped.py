"""Learning the set policy: rewards, advantages and gradients by hand, a plain task, and the same bytes again."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
import torch

from fedsched.config import LearningConfig, PolicyConfig
from fedsched.core.commands import RewardSlot
from fedsched.core.decision import Observation
from fedsched.core.ids import ClusterName, JobId, NodeName
from fedsched.core.job import Role, TaskPlacement, task_name
from fedsched.core.resources import Resources
from fedsched.federation.averaging import Update, inspect, weighted_mean
from fedsched.federation.optimiser import ServerOptimiser
from fedsched.learn.clipped import (
    ENTROPY_WEIGHT,
    Improver,
    Lived,
    Paces,
    SetLearner,
    advantages,
    batch_of,
    expected,
    gradient_on,
    loss_on,
)
from fedsched.learn.kinds import kind_of
from fedsched.learn.tensors import parameters
from fedsched.policy.checkpoint import digest, from_bytes
from fedsched.policy.learnable import Array
from fedsched.policy.set import Set, SetShape, SlotSample, choose, initial
from fedsched.sim.fluid import FluidBudget
from tests.policy.observations import job, node, observation

SMALL = SetShape(width=16, rows=32)


RUNNING = tuple(
    TaskPlacement(task_name(role, index), NodeName("n"))
    for role, count in ((Role.PS, 2), (Role.WORKER, 3))
    for index in range(count)
)


def sample_of(seen: Observation, arrays: dict[str, Array], seed: int = 0) -> SlotSample:
    policy = Set(arrays, shape=SMALL, seed=seed)
    policy.decide(seen, FluidBudget(seen))
    (sample,) = policy.last_trace()
    return sample


def two_jobs(slot: int = 1) -> Observation:
    """One short and one long job of one type; one PS or two, one worker."""
    short = job("a", workers=(1, 1), ps=(1, 2), epochs=10.0, progress_epochs=8.0)
    long = job("b", workers=(1, 1), ps=(1, 2), epochs=160.0)
    return observation([node("n", 4)], [short, long], slot=slot)


def test_a_reward_is_progress_at_the_best_pace_ever_seen_tilted_to_short_jobs() -> None:
    """By hand: 4 epochs a slot are the type's best; 2 of 10 epochs remain of one job, 160 of the other."""
    paces = Paces()
    sample = sample_of(two_jobs(), initial(SMALL, 0))
    first = paces.rewards(sample, {"a": 0.1, "b": 0.025})  # 1 and 4 epochs
    assert first == pytest.approx([0.25 * 0.5**-0.3, 1.0 * 40**-0.3])
    later = paces.rewards(sample, {"b": 1 / 160})  # the best pace is remembered; a made no progress
    assert later == pytest.approx([0.0, 0.25 * 40**-0.3])


def test_a_job_that_is_all_but_done_is_not_worth_without_end() -> None:
    """Half a slot at its best pace is the least that counts as remaining; here an eighth is left."""
    sample = sample_of(two_jobs(), initial(SMALL, 0))  # a has 2 epochs left
    paces = Paces()
    paces.rewards(sample, {"a": 1.6})  # 16 epochs in a slot, eight times as many as are left
    assert paces.rewards(sample, {"a": 0.2, "b": 0.0})[0] == pytest.approx(2 / 16 * 0.5**-0.3)


def test_a_type_that_was_never_seen_to_train_earns_nothing() -> None:
    """There is no pace to measure it by, and no division by zero."""
    assert Paces().rewards(sample_of(two_jobs(), initial(SMALL, 0)), {}).tolist() == [0.0, 0.0]


def lived(arrays: dict[str, Array], rewards: list[list[float]]) -> list[Lived]:
    return [
        Lived(sample_of(two_jobs(slot), arrays, seed=slot), np.array(one, np.float32))
        for slot, one in enumerate(rewards)
    ]


def test_everybodys_advantage_is_the_whole_slots_gain_over_what_was_expected() -> None:
    """By hand: with an expectation of 0.5 a job, the slots gain 2, -1 and 0.5; their deviation is over all jobs."""
    arrays = initial(SMALL, 0)
    arrays["value.out.weight"][:] = 0.0
    arrays["value.out.bias"][:] = 0.5
    batch = batch_of(lived(arrays, [[1.0, 2.0], [0.0, 0.0], [0.5, 1.0]]))
    assert expected(parameters(arrays), batch).tolist() == pytest.approx([0.5] * 6)
    gains = np.array([2.0, 2.0, -1.0, -1.0, 0.5, 0.5])
    whitened = (gains - gains.mean()) / gains.std(ddof=1)
    assert advantages(parameters(arrays), batch).tolist() == pytest.approx(whitened.tolist(), abs=1e-5)


def test_the_gradient_is_the_one_worked_out_by_hand() -> None:
    """Fresh weights are indifferent between the two legal numbers of servers, so the surrogate's gradient with respect
    to a choice's bias is -(mean over jobs of advantage x (chosen - 1/2)), and entropy has none there."""
    arrays = initial(SMALL, 0)
    for name in arrays:
        if name.startswith(("policy.ps", "policy.urgency", "value.out")):
            arrays[name][:] = 0.0
    one = lived(arrays, [[1.0, 1.0], [0.0, 0.0], [0.2, 0.4], [0.9, 0.0]])
    for entry in one:  # no urgency to learn from
        entry.sample.choice.urgency[:] = 0.0
        entry.sample.choice.chance[:] = math.log(0.5)
    totals = np.repeat([2.0, 0.0, 0.6, 0.9], 2)
    whitened = (totals - totals.mean()) / totals.std(ddof=1)
    chose_two = np.concatenate([entry.sample.choice.ps == 2 for entry in one])
    assert 0 < chose_two.sum() < 8
    by_hand = -float((whitened * (chose_two - 0.5)).mean())

    update = gradient_on(arrays, one)
    assert update.gradients["policy.ps.bias"][2] == pytest.approx(by_hand, abs=1e-5)
    assert update.gradients["policy.ps.bias"][1] == pytest.approx(-by_hand, abs=1e-5)
    assert np.count_nonzero(update.gradients["policy.ps.bias"]) == 2
    # Half the weight of the mean squared error, whose derivative is -2 x (reward - 0).
    rewards = np.concatenate([entry.rewards for entry in one])
    assert update.gradients["value.out.bias"][0] == pytest.approx(-float(rewards.mean()), abs=1e-5)
    assert update.samples == 8
    assert update.entropy == pytest.approx(math.log(2), abs=1e-5)
    assert update.mean_reward == pytest.approx(float(rewards.mean()))
    # Urgencies are all at their mean: the surrogate's derivative by their deviation is the mean advantage, 0.
    assert update.gradients["policy.urgency.deviation"][0] == pytest.approx(-ENTROPY_WEIGHT, abs=1e-5)


@pytest.mark.parametrize(
    ("shift", "gain", "expected_loss", "pulls"),
    [
        (-1.0, 1.0, -1.2, False),  # e times as likely now as it was then, and good: enough has been made of it
        (1.0, -1.0, 0.8, False),  # e times less likely, and bad: likewise
        (-1.0, -1.0, math.e, True),  # what has moved the wrong way is pulled back from however far
        (1.0, 1.0, -1 / math.e, True),
    ],
)
def test_a_ratio_beyond_the_clip_has_no_gradient_unless_it_moved_the_wrong_way(
    shift: float, gain: float, expected_loss: float, pulls: bool
) -> None:
    """What a batch says is believed only near the policy that made it (Schulman et al., equation 7)."""
    arrays = initial(SMALL, 0)
    batch = batch_of(lived(arrays, [[1.0, 1.0], [0.0, 0.0]]))
    weights = parameters(arrays)
    batch.chance[:] += shift
    loss = loss_on(weights, batch, torch.full((4,), gain))
    assert float(loss.policy.detach()) == pytest.approx(expected_loss)
    loss.policy.backward()  # type: ignore[no-untyped-call]
    grad = weights["policy.ps.bias"].grad
    assert grad is not None
    assert bool(grad.any()) is pulls


def test_jobs_that_had_no_choice_teach_what_to_expect_and_nothing_else() -> None:
    """Pinned jobs earn as others do; the policy has no part in it."""
    arrays = initial(SMALL, 0)
    batch = batch_of(lived(arrays, [[1.0, 0.5], [0.0, 2.0]]))
    weights = parameters(arrays)
    whole = loss_on(weights, batch, torch.tensor([1.0, 5.0, 2.0, 3.0]))
    batch.free[1] = False
    batch.chance[1] -= 1.0
    loss = loss_on(weights, batch, torch.tensor([1.0, 5.0, 2.0, 3.0]))
    assert float(whole.policy.detach()) == pytest.approx(-11 / 4)
    assert float(loss.policy.detach()) == pytest.approx(-6 / 3)
    assert float(loss.moved) == pytest.approx(0.0, abs=1e-6)
    assert float(loss.entropy.detach()) == pytest.approx(float(whole.entropy.detach()))
    assert torch.equal(loss.value, whole.value)


def test_where_all_rewards_are_the_same_nothing_is_explained() -> None:
    """An overloaded cluster in which nobody trains; a share of no variance would be no number in the log."""
    arrays = initial(SMALL, 0)
    assert Improver(arrays).improve(lived(arrays, [[0.0, 0.0], [0.0, 0.0]])).explained == 0.0
    assert Improver(arrays).improve(lived(arrays, [[0.0, 1.0], [0.0, 1.0]])).explained != 0.0


def test_an_improvement_takes_no_step_from_a_policy_that_moved_by_what_is_no_number() -> None:
    """Weights that overflow are noticed by whoever looks at them; a step would only spread that."""
    arrays = initial(SMALL, 0)
    slots = lived(arrays, [[0.0, 1.0], [0.0, 1.0]])
    assert Improver(arrays).improve(slots).steps > 0
    assert Improver({name: np.full_like(array, np.inf) for name, array in arrays.items()}).improve(slots).steps == 0


def test_chances_in_training_are_those_of_the_acting_policy() -> None:
    """Two implementations of one distribution; were they apart, every ratio would be wrong from the start."""
    random = np.random.RandomState(1)
    arrays = {name: random.normal(0, 0.3, size).astype(np.float32) for name, size in SMALL.layers().items()}
    arrays["policy.urgency.deviation"][:] = 0.4
    views = [job(name, workers=(1, 9), ps=(0, 5), epochs=float(10 + index)) for index, name in enumerate("abcdefg")]
    views += [job(name, workers=(1, 9), ps=(0, 5), placement=RUNNING) for name in "xyz"]
    seen = observation([node("n", 30)], views)
    samples = [sample_of(seen, arrays, seed) for seed in range(5)]
    assert {float(sample.stay) for sample in samples} == {0.5}, "whose present sizes are preferred"
    batch = batch_of([Lived(sample, np.zeros(10, np.float32)) for sample in samples])
    stayed = (batch.ps == batch.ps_now).sum(), ((batch.ps_now >= 0) & (batch.ps != batch.ps_now)).sum()
    assert all(stayed), "some that run keep their servers and some do not"
    assert float(loss_on(parameters(arrays), batch, torch.ones(50)).moved) == pytest.approx(0.0, abs=1e-5)


def test_a_part_of_a_batch_is_computed_as_it_would_be_alone() -> None:
    """Minibatches must not leak one slot's jobs into another's mean."""
    arrays = initial(SMALL, 4)
    whole = lived(arrays, [[1.0, 0.5], [0.1, 0.2], [0.7, 0.3]])
    part, rows = batch_of(whole).part(torch.tensor([0, 2]))
    alone = batch_of([whole[0], whole[2]])
    assert rows.tolist() == [0, 1, 4, 5]
    weights = parameters(arrays)
    assert torch.equal(expected(weights, part), expected(weights, alone))
    gains = torch.tensor([1.0, 1.0, -1.0, -1.0])
    assert torch.equal(loss_on(weights, part, gains).total, loss_on(weights, alone, gains).total)


# --- A task whose answer is plain ----------------------------------------------------------------------------------


def a_slot(policy: Set, paces: Paces, slot: int) -> Lived:
    """Type a trains only with one server and four workers, type b only with four servers and one worker; both fit."""
    jobs = [
        job("a", job_type="workers-matter", workers=(1, 4), ps=(1, 4), epochs=100.0),
        job("b", job_type="servers-matter", workers=(1, 4), ps=(1, 4), epochs=100.0),
    ]
    seen = observation([node("n", 10)], jobs, slot=slot)
    given = dict(policy.decide(seen, FluidBudget(seen)).allocations)
    (sample,) = policy.last_trace()
    a, b = given.get(JobId("a")), given.get(JobId("b"))
    progress = {
        "a": 0.01 * (a.workers - 0.5 * a.ps) if a else 0.0,
        "b": 0.01 * (b.ps - 0.5 * b.workers) if b else 0.0,
    }
    return Lived(sample, paces.rewards(sample, {job_id: max(0.0, done) for job_id, done in progress.items()}))


def learn(seed: int, rounds: int) -> dict[str, Array]:
    improver, paces = Improver(initial(SMALL, seed), learning_rate=5e-3, seed=seed), Paces()
    for number in range(rounds):
        policy = Set(improver.arrays(), shape=SMALL, seed=seed)
        improver.improve([a_slot(policy, paces, 100 * number + index) for index in range(100)])
    return improver.arrays()


def test_a_task_with_a_plain_answer_is_learnt_in_seconds() -> None:
    """If it cannot learn this, nothing it says of larger tasks is worth anything."""
    begun_s = time.process_time()
    policy = Set(learn(1, 40), shape=SMALL, explore=False)
    assert time.process_time() - begun_s < 30
    sample = a_slot(policy, Paces(), 1).sample
    assert sample.choice.workers.tolist() == [4, 1]
    assert sample.choice.ps.tolist() == [1, 4]


def test_training_twice_gives_the_same_bytes() -> None:
    """A result that cannot be had again cannot be checked."""
    assert digest(learn(2, 3)) == digest(learn(2, 3))
    assert digest(learn(2, 3)) != digest(learn(3, 3))


# --- The learner of a cluster ---------------------------------------------------------------------------------------


def filled(slots: int, capacity: int = 8192) -> SetLearner:
    learner, policy = SetLearner(capacity), Set(initial(SMALL, 0), shape=SMALL)
    for slot in range(slots):
        seen = two_jobs(slot)
        policy.decide(seen, FluidBudget(seen))
        learner.record(slot, policy.last_trace())
        learner.reward(RewardSlot(slot, ((JobId("a"), 0.1), (JobId("b"), 0.01 * slot))))
    return learner


def test_the_same_memory_weights_and_seed_give_the_same_gradient() -> None:
    """Rounds are repeated after a restart."""
    arrays = initial(SMALL, 0)
    one, other = filled(20).gradient(arrays, 16, 1), filled(20).gradient(arrays, 16, 1)
    assert digest(one.gradients) == digest(other.gradients)
    assert one.samples == 16
    assert set(one.gradients) == set(arrays)
    assert digest(filled(20).gradient(arrays, 16, 2).gradients) != digest(one.gradients)


def test_a_learner_that_goes_on_from_its_state_gives_the_same_gradients() -> None:
    """Training that was interrupted must end where it would have ended."""
    arrays, one = initial(SMALL, 0), filled(20)
    other = SetLearner()
    other.restore(one.state())
    assert (len(other), other.recorded) == (40, 40)
    assert digest(other.gradient(arrays, 16, 1).gradients) == digest(one.gradient(arrays, 16, 1).gradients)
    for learner in (one, other):
        policy = Set(arrays, shape=SMALL)
        policy.decide(two_jobs(50), FluidBudget(two_jobs(50)))
        learner.record(50, policy.last_trace())
        learner.reward(RewardSlot(50, ((JobId("a"), 0.05),)))
    assert digest(other.gradient(arrays, 99, 1).gradients) == digest(one.gradient(arrays, 99, 1).gradients)
    one.forget()
    empty = SetLearner()
    empty.restore(one.state())
    assert (len(empty), empty.recorded) == (0, 42)


def test_choices_of_a_run_that_is_over_get_no_reward_of_the_next() -> None:
    """Slots of two runs have the same numbers."""
    learner, policy = SetLearner(), Set(initial(SMALL, 0), shape=SMALL)
    policy.decide(two_jobs(3), FluidBudget(two_jobs(3)))
    learner.record(3, policy.last_trace())
    learner.abandon()
    learner.reward(RewardSlot(3, ((JobId("a"), 0.05),)))
    assert len(learner) == 0


def test_a_step_down_the_gradient_lowers_the_loss() -> None:
    """The server takes plain steps down these gradients; they must lead somewhere."""
    arrays, paces = initial(SMALL, 5), Paces()
    start = Set(arrays, shape=SMALL, seed=1)
    slots = [a_slot(start, paces, index) for index in range(50)]
    gradients = gradient_on(arrays, slots).gradients
    stepped = {name: (arrays[name] - 0.05 * gradients[name]).astype(np.float32) for name in arrays}
    batch = batch_of(slots)
    gains = advantages(parameters(arrays), batch)
    before, after = (float(loss_on(parameters(weights), batch, gains).total.detach()) for weights in (arrays, stepped))
    assert after < before


def test_the_server_combines_its_gradients_with_the_code_that_it_has() -> None:
    """Weights and gradients are named arrays like any other policy's."""
    kind = kind_of("set")
    weights = kind.fresh(3, None)
    policy = kind.policy(PolicyConfig(name="set"), weights, 1, LearningConfig())
    updates = []
    for cluster in ("east", "west"):
        learner = kind.learner(weights.shape, LearningConfig(), 64)
        for slot in range(30):
            seen = two_jobs(slot)
            policy.decide(seen, FluidBudget(seen))
            learner.record(slot, policy.last_trace())
            learner.reward(RewardSlot(slot, ((JobId("a"), 0.1), (JobId("b"), 0.001 * (slot % 7)))))
        gradient = learner.gradient(weights.arrays, 64, 0)
        inspected = inspect(weights.arrays, gradient.gradients)
        assert (inspected.misfit, inspected.finite) == ("", True)
        updates.append(Update(ClusterName(cluster), gradient.samples, gradient.gradients))
    stepped, _ = ServerOptimiser(1e-3).step(weights.arrays, weighted_mean(updates))
    policy.load(2, stepped)
    assert policy.version == 2
    assert from_bytes(weights.replaced(stepped, {"round": 1}).to_bytes()).digest == digest(stepped)


def test_old_slots_make_room_and_unrewarded_ones_are_forgotten() -> None:
    """An agent runs for months."""
    learner = filled(30, capacity=20)
    assert len(learner) == 20
    assert learner.recorded == 60
    for slot in range(1000, 1200):
        learner.record(slot, ())
    with pytest.raises(ValueError, match="no slot to learn from"):
        SetLearner().gradient(initial(SMALL, 0), 8, 0)


def test_a_slot_that_a_fallback_decided_teaches_nothing() -> None:
    """Its choices were not the policy's."""
    learner = filled(1)
    learner.reward(RewardSlot(99, ((JobId("a"), 0.5),)))
    assert len(learner) == 2


def test_pinned_jobs_are_looked_at_but_earn_no_blame() -> None:
    """Their size was nobody's choice in this slot."""
    arrays = initial(SMALL, 0)
    one = lived(arrays, [[1.0, 0.0], [0.0, 0.5]])
    for entry in one:
        entry.sample.free[:] = [False, True]
    gains = torch.tensor([5.0, 1.0, 7.0, -1.0])
    batch = batch_of(one)
    with_pinned = loss_on(parameters(arrays), batch, gains)
    others = loss_on(parameters(arrays), batch, torch.tensor([0.0, 1.0, 0.0, -1.0]))
    assert float(with_pinned.policy.detach()) == pytest.approx(float(others.policy.detach()))


def test_sizes_that_did_not_run_out_are_drawn_from_all_that_is_legal() -> None:
    """`choose` on fresh weights is uniform over the legal sizes, so exploration reaches all of them."""
    seen = two_jobs()
    policy = Set(initial(SMALL, 0), shape=SMALL)
    policy.decide(seen, FluidBudget(seen))
    (sample,) = policy.last_trace()
    random = np.random.RandomState(0)
    drawn = np.concatenate([choose(initial(SMALL, 0), sample.seen, 0.0, random.rand(2, 4)).ps for _ in range(300)])
    assert set(drawn.tolist()) == {1, 2}
    assert 0.4 < (drawn == 1).mean() < 0.6


def test_demands_of_gpus_count_in_the_pool_too() -> None:
    """The light budget must refuse what the real one refuses."""
    gpu = job("a", worker_demand=Resources(1000, 100, 1000))
    seen = observation([node("n", 8)], [gpu])
    assert not FluidBudget(seen).grant(gpu.job_id, 1, 1)
    assert FluidBudget(two_jobs()).grant(JobId("a"), 1, 1)
