"""DL2 in detail: what it sees, what it may do, how it chooses."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from fedsched.core.decision import Decision, Observation
from fedsched.core.ids import JobId, NodeName, stream
from fedsched.core.job import Range, Role, TaskPlacement, task_name
from fedsched.core.placement import TentativePlacement
from fedsched.policy.dl2 import (
    BUNDLE,
    DL2,
    KINDS,
    PS,
    WORKER,
    DecisionSample,
    Dl2Shape,
    Window,
    draw,
    features,
    forward,
    initial,
    probabilities,
    type_number,
)
from fedsched.policy.heuristics import admit, by_arrival
from fedsched.policy.learnable import Arrays
from tests.policy.observations import job, node, observation

SHAPE = Dl2Shape(window=4, hidden=(16,))


def preferring(action: int, shape: Dl2Shape = SHAPE) -> dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
    """Weights that always like this action best, whatever they see."""
    arrays = {name: np.zeros_like(array) for name, array in initial(shape, 0).items()}
    arrays["policy.1.bias"][action] = 50.0
    return arrays


def test_the_state_is_the_papers_matrix_of_raw_numbers() -> None:
    """Whoever compares with the authors' code needs these very numbers."""
    jobs = [
        job("a", job_type="vgg", waited_slots=7, progress_epochs=2.5),
        job("b", job_type="mlp", waited_slots=3, progress_epochs=12.0),
    ]
    seen = observation([node("n", 10)], jobs)
    budget = TentativePlacement(seen)
    budget.grant(JobId("a"), 2, 1)
    state = Window(seen, budget, 4).state

    assert state[:, 0].tolist() == pytest.approx([5, 7, 0.75, 0.3, 2, 1])
    assert state[:, 1].tolist() == pytest.approx([2, 3, 0.0, 0.0, 0, 0])
    assert not state[:, 2:].any()


def test_full_jobs_leave_the_window_and_the_next_one_moves_up() -> None:
    """A column without anything to choose would cost another job its place."""
    seen = observation([node("n", 20)], [job("a", workers=(1, 2), ps=(1, 1)), job("b"), job("c")])
    budget = TentativePlacement(seen)
    for name in "abc":
        budget.grant(JobId(name), 1, 1)
    window = Window(seen, budget, 2)
    assert [view.job_id for view in window.jobs] == ["a", "b"]

    budget.grant(JobId("a"), 1)
    window.granted(JobId("a"))

    assert [view.job_id for view in window.jobs] == ["b", "c"]
    fresh = Window(seen, budget, 2)
    assert (window.state == fresh.state).all()
    assert (window.mask == fresh.mask).all()


@settings(max_examples=60)
@given(data=st.data())
def test_a_window_that_is_kept_up_to_date_is_the_one_that_a_fresh_look_gives(data: st.DataObject) -> None:
    """Only what a grant changes is written anew; a number that stayed behind would mislead every choice after it."""
    ranges = st.tuples(st.integers(1, 2), st.integers(2, 4))
    jobs = [
        job(
            name,
            workers=data.draw(ranges),
            ps=data.draw(st.sampled_from([(0, 0), (1, 1), (1, 3)])),
            job_type=data.draw(st.sampled_from(["vgg", "mlp", "own"])),
            waited_slots=data.draw(st.integers(0, 40)),
        )
        for name in "abcdefg"[: data.draw(st.integers(1, 7))]
    ]
    seen = observation([node(f"n{index}", 6) for index in range(3)], jobs)
    budget = TentativePlacement(seen)
    for view in seen.jobs:
        budget.grant(view.job_id, view.minimum.workers, view.minimum.ps)
    bias = np.linspace(-2, 2, 10, dtype=np.float32)
    window = Window(seen, budget, 3, bias)
    refused = set()
    for _ in range(data.draw(st.integers(0, 25))):
        if not window.legal_count:
            break
        view, kind = window.target(data.draw(st.sampled_from(np.flatnonzero(window.mask[:-1]).tolist())))
        column = window.column_of(view.job_id)
        assert column is not None
        if not budget.grant(view.job_id, KINDS[kind].workers, KINDS[kind].ps):
            window.refused(view.job_id, kind)
            refused.add((view.job_id, kind))
        elif data.draw(st.booleans()):
            window.granted(view.job_id)
        else:
            window.grew(column, KINDS[kind].workers, KINDS[kind].ps)
        fresh = Window(seen, budget, 3)
        for job_id, kind in sorted(refused):
            fresh.refused(job_id, kind)
        assert [view.job_id for view in window.jobs] == [view.job_id for view in fresh.jobs]
        assert (window.state == fresh.state).all()
        assert (window.mask == fresh.mask).all()
        assert window.held() == [budget.allocation(view.job_id) for view in window.jobs]
        assert window.legal_count == window.mask[:-1].sum()
        assert (window.inputs == features(window.state[None])).all()
        assert (window.added == np.where(window.mask, bias, -np.inf)).all()


def decide_plainly(
    arrays: Arrays, shape: Dl2Shape, seen: Observation, seed: int
) -> tuple[list[DecisionSample], Decision]:
    """The policy as it is told in a paper: at every choice everything is computed anew."""
    budget = TentativePlacement(seen)
    admit([view for view in by_arrival(seen.jobs) if not view.pinned], budget)
    chance, samples, refused = stream(seed, f"dl2/act/{seen.slot}"), [], list[tuple[JobId, int]]()
    while True:
        window = Window(seen, budget, shape.window)
        for job_id, kind in refused:
            window.refused(job_id, kind)
        if not window.mask[:-1].any():
            break
        logits = forward(arrays, "policy", features(window.state[None]))[0]
        chances = probabilities(logits, window.mask)
        action = draw(chances, chance.random())
        sample = DecisionSample(seen.slot, 1, window.state, window.mask, action, float(chances[action]))
        if action == shape.void:
            samples.append(sample)
            break
        view, kind = window.target(action)
        if budget.grant(view.job_id, KINDS[kind].workers, KINDS[kind].ps):
            samples.append(sample)
        else:
            refused.append((view.job_id, kind))
    return samples, Decision(seen.slot, budget.allocations(), "dl2", 1)


@pytest.mark.parametrize("shape", [Dl2Shape(), Dl2Shape(5, (16,)), Dl2Shape(3, (9, 7, 5))])
def test_the_quick_path_takes_the_same_choices_as_the_plain_one(shape: Dl2Shape) -> None:
    """What agents decide with must be what learning assumes that they decided with; all numbers that it learns from
    are the same, but for the last bits of a probability."""
    arrays = initial(shape, 3)
    for name in [name for name in arrays if name.startswith("policy")]:
        arrays[name] = np.random.default_rng(len(name)).normal(0, 0.2, arrays[name].shape).astype(np.float32)
    arrays[f"policy.{len(shape.hidden)}.bias"][shape.void] = -4.0  # slots of many choices
    policy, taken = DL2(arrays, shape=shape, seed=8), 0
    for slot in range(10):
        jobs = [job(name, workers=(1, 1 + slot), ps=(1, 4), waited_slots=7 * slot) for name in "abcdefghi"]
        seen = observation([node(f"n{index}", 3 + 2 * slot) for index in range(4)], jobs, slot)
        decision = policy.decide(seen, TentativePlacement(seen))
        samples, plainly = decide_plainly(arrays, shape, seen, 8)
        assert decision == plainly
        assert [sample.action for sample in policy.last_trace()] == [sample.action for sample in samples]
        for ours, theirs in zip(policy.last_trace(), samples, strict=True):
            assert (ours.state == theirs.state).all()
            assert (ours.mask == theirs.mask).all()
            assert ours.probability == pytest.approx(theirs.probability, rel=1e-12)
        taken += len(samples)
    assert taken > 60


def test_the_mask_knows_caps_pins_waiting_jobs_and_empty_columns() -> None:
    """An illegal action that is drawn is a decision lost."""
    pinned = job("b", pinned=True, placement=(TaskPlacement(task_name(Role.PS, 0), NodeName("n")),))
    seen = observation([node("n", 20)], [job("a", ps=(1, 1)), pinned, job("c")])
    budget = TentativePlacement(seen)
    budget.grant(JobId("a"), 1, 1)
    mask = Window(seen, budget, 4).mask

    legal = [int(action) for action in np.flatnonzero(mask)]
    assert legal == [WORKER, 12]  # one more worker for a, or void: its only server is there, c holds no minimum yet


def test_what_was_refused_stays_refused_for_the_slot() -> None:
    """Without this the slot would end, or try the same for ever."""
    seen = observation([node("n", 20)], [job("a")])
    budget = TentativePlacement(seen)
    budget.grant(JobId("a"), 1, 1)
    window = Window(seen, budget, 4)
    window.refused(JobId("a"), BUNDLE)
    assert window.mask[[WORKER, PS, BUNDLE]].tolist() == [True, True, False]
    window.refused(JobId("a"), WORKER)
    window.granted(JobId("a"))
    assert window.mask[[WORKER, PS, BUNDLE]].tolist() == [False, True, False]


def test_an_action_that_does_not_fit_makes_room_for_the_next_best() -> None:
    """The network cannot see free capacity; a wrong guess must not idle the rest of the cluster."""
    big = job("a", ps=(1, 1), worker_demand=job("x").worker_demand * 3)
    seen = observation([node("n", 7)], [big, job("b")])
    decision = (policy := DL2(preferring(WORKER), shape=SHAPE, explore=False)).decide(seen, TentativePlacement(seen))

    assert dict(decision.allocations)[JobId("a")].workers == 1
    assert dict(decision.allocations)[JobId("b")].workers > 1
    assert WORKER not in [sample.action for sample in policy.last_trace()]


def test_jobs_beyond_the_window_still_get_their_minimum() -> None:
    """The window is a limit of the network, not of what a cluster may run."""
    shape = Dl2Shape(window=2, hidden=(4,))
    seen = observation([node("n", 40)], [job(name) for name in "abcdef"])
    decision = DL2(initial(shape, 0), shape=shape).decide(seen, TentativePlacement(seen))
    assert len(decision.allocations) == 6


def test_void_ends_the_slot_and_is_a_choice_to_learn_from() -> None:
    """Leaving room for jobs to come can be right; the learner must be able to find that out."""
    seen = observation([node("n", 40)], [job("a")])
    policy = DL2(preferring(SHAPE.void), 7, shape=SHAPE)
    decision = policy.decide(seen, TentativePlacement(seen))

    assert [str(allocation) for _, allocation in decision.allocations] == ["1w+1ps"]
    (sample,) = policy.last_trace()
    assert (sample.slot, sample.version, sample.action) == (1, 7, SHAPE.void)
    assert sample.probability == pytest.approx(1.0)


def test_nothing_to_choose_leaves_no_trace_of_the_slot_before() -> None:
    """Else the learner would credit old choices with a new reward."""
    policy = DL2(initial(SHAPE, 0), shape=SHAPE)
    busy = observation([node("n", 40)], [job("a")])
    policy.decide(busy, TentativePlacement(busy))
    assert policy.last_trace()
    idle = observation([node("n", 40)], [], slot=2)
    policy.decide(idle, TentativePlacement(idle))
    assert policy.last_trace() == ()


def test_sampling_depends_on_seed_and_slot_alone() -> None:
    """A decision must be explainable later: same seed, same slot, same draw."""
    policies = [DL2(initial(SHAPE, 0), shape=SHAPE, seed=seed) for seed in (1, 1, 2)]
    runs = []
    for policy in policies:
        actions = []
        for slot in range(8):
            seen = observation([node("n", 30)], [job(name) for name in "abc"], slot)
            policy.decide(seen, TentativePlacement(seen))
            actions.append([sample.action for sample in policy.last_trace()])
        runs.append(actions)
    assert runs[0] == runs[1] != runs[2]
    assert len({tuple(actions) for actions in runs[0]}) > 1


def test_drawing_inverts_the_cumulative_distribution() -> None:
    """Off by one here and the mask is worth nothing."""
    chances = np.array([0.0, 0.25, 0.0, 0.75, 0.0])
    assert [draw(chances, at) for at in (0.0, 0.2499, 0.25, 0.9999999)] == [1, 1, 3, 3]


def test_probabilities_are_the_softmax_over_what_is_legal() -> None:
    chances = probabilities(np.array([1.0, 99.0, 0.0]), np.array([True, False, True]))
    assert chances.tolist() == pytest.approx([np.e / (1 + np.e), 0.0, 1 / (1 + np.e)])


def test_numpy_and_torch_compute_the_same_network() -> None:
    """The agent acts with one and learns with the other."""
    arrays = initial(Dl2Shape(), 5)
    states = np.random.default_rng(0).uniform(0, 8, (7, 6, 20)).astype(np.float32)
    inputs = features(states)
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    for network, outputs in (("policy", 61), ("value", 1)):
        ours = forward(arrays, network, inputs)
        theirs = forward(tensors, network, torch.from_numpy(inputs)).numpy()
        assert ours.shape == (7, outputs)
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)


def test_unusable_weights_are_refused_and_the_old_ones_stay() -> None:
    """A bad round of aggregation must not stop a cluster from deciding."""
    policy = DL2(initial(SHAPE, 0), 3, shape=SHAPE)
    poisoned = initial(SHAPE, 1)
    poisoned["policy.0.bias"][2] = np.nan
    with pytest.raises(ValueError, match=r"policy\.0\.bias holds values that are not finite"):
        policy.load(4, poisoned)
    with pytest.raises(ValueError, match=r"has shape \(80, 120\); expected \(16, 24\)"):
        policy.load(4, {**initial(SHAPE, 1), "policy.0.weight": initial(Dl2Shape(), 1)["policy.0.weight"]})
    with pytest.raises(ValueError, match="missing value"):
        policy.load(4, {name: array for name, array in initial(SHAPE, 1).items() if name.startswith("policy")})
    assert policy.version == 3
    policy.load(4, initial(SHAPE, 1))
    assert policy.version == 4


def test_a_network_that_overflows_says_so_instead_of_choosing() -> None:
    """The guardrail turns this into the heuristic's answer."""
    arrays = initial(SHAPE, 0)
    arrays["policy.1.weight"][:] = 3e38
    arrays["policy.0.bias"][:] = 3e38
    seen = observation([node("n", 40)], [job("a")])
    with np.errstate(over="ignore", invalid="ignore"), pytest.raises(ArithmeticError, match="not finite"):
        DL2(arrays, shape=SHAPE).decide(seen, TentativePlacement(seen))


def test_types_have_numbers_that_no_process_disagrees_about() -> None:
    """Clusters learn together: a type must mean the same everywhere."""
    assert type_number("vgg") == 5
    assert type_number("somebody's own model") == type_number("somebody's own model")
    assert {type_number(f"type-{index}") for index in range(200)} == set(range(1, 9))


def test_a_job_with_a_minimum_above_one_is_never_half_started() -> None:
    """Its tasks would wait for each other and hold the capacity."""
    gang = replace(job("a"), workers=Range(3, 4), ps=Range(2, 2))
    seen = observation([node("n", 4)], [gang])
    decision = DL2(initial(SHAPE, 0), shape=SHAPE).decide(seen, TentativePlacement(seen))
    assert decision.allocations == ()
