"""The set policy learns sizes and who waits from another policy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fedsched.core.decision import Observation
from fedsched.core.ids import JobId
from fedsched.core.job import Allocation
from fedsched.learn.clipped import Improver, batch_of
from fedsched.learn.imitation import Demonstration, demonstration, imitate, imitation_loss
from fedsched.learn.tensors import parameters
from fedsched.policy.set import Set, SetOptions, SetShape, initial
from fedsched.sim.fluid import FluidBudget
from tests.policy.observations import job, node, observation

SMALL = SetShape(width=16, rows=32)


def crowd(slot: int) -> Observation:
    """Eight jobs of two types where four fit."""
    random = np.random.RandomState(slot)
    jobs = [
        job(
            name,
            job_type=str(random.choice(["wide", "tall"])),
            workers=(1, 4),
            ps=(1, 4),
            epochs=float(random.choice([10, 1000])),
        )
        for name in "abcdefgh"
    ]
    return observation([node("n", 20)], jobs, slot=slot)


def teach(seen: Observation) -> dict[JobId, Allocation]:
    """Short jobs first; `wide` ones get four workers and one server, `tall` ones one worker and four servers."""
    left, given = 20, dict[JobId, Allocation]()
    for view in sorted(seen.jobs, key=lambda view: (view.epochs, view.job_id)):
        if left >= 5:
            given[view.job_id] = Allocation(4, 1) if view.job_type == "wide" else Allocation(1, 4)
            left -= 5
    return given


def lessons(count: int) -> list[Demonstration]:
    student, result = Set(initial(SMALL, 0), shape=SMALL, explore=False), []
    for slot in range(count):
        seen = crowd(slot)
        student.decide(seen, FluidBudget(seen))
        (sample,) = student.last_trace()
        result.append(demonstration(sample, teach(seen)))
    return result


def test_a_student_sizes_and_ranks_jobs_as_its_teacher_did() -> None:
    """On slots that it never saw."""
    improver = Improver(initial(SMALL, 1), learning_rate=5e-3, seed=1)
    imitate(improver, lessons(150), passes=20, parts_slots=10)
    student = Set(improver.arrays(), shape=SMALL, explore=False, options=SetOptions(stay=0.0))
    same = total = 0
    for slot in range(1000, 1030):
        seen = crowd(slot)
        taught = teach(seen)
        decided = dict(student.decide(seen, FluidBudget(seen)).allocations)
        # Among equally short jobs anybody may be served.
        short = {view.job_id for view in seen.jobs if view.epochs == 10.0}
        same += sum(decided.get(job_id) == taught.get(job_id) for job_id in short if len(short) <= 4)
        total += len(short) if len(short) <= 4 else 0
    assert total > 30
    assert same / total > 0.9


def test_a_student_that_settles_hardly_moves_at_the_end_and_goes_on_at_the_old_rate() -> None:
    """Its very last step is a part in a hundred of the first; the next lessons find the learning rate as it was."""
    taught = lessons(10)
    improver = Improver(initial(SMALL, 1), learning_rate=5e-3, seed=1)
    moves, step = list[float](), improver.step

    def watched(loss: torch.Tensor) -> None:
        before = improver.arrays()
        step(loss)
        after = improver.arrays()
        moves.append(max(float(np.abs(after[name] - before[name]).max()) for name in before))

    improver.step = watched  # type: ignore[method-assign]
    imitate(improver, taught, passes=10, parts_slots=1, settle=True)
    assert moves[0] > 4e-3
    assert moves[-1] < 2e-4
    assert improver.learning_rate == 5e-3


def test_the_loss_is_the_one_worked_out_by_hand() -> None:
    """Fresh weights: four sizes of either kind are equally likely, and so is to be served or not."""
    arrays = initial(SMALL, 0)
    for name in arrays:
        if name.startswith(("policy.ps", "policy.workers", "policy.urgency")):
            arrays[name][:] = 0.0
    (one,) = lessons(1)
    batch = batch_of([one.lived])
    loss = imitation_loss(parameters(arrays), batch, torch.from_numpy(one.served))
    assert float(loss.detach()) == pytest.approx(math.log(4) + math.log(4) + math.log(2), abs=1e-5)


def test_jobs_that_the_teacher_leaves_waiting_teach_no_size() -> None:
    """Nobody knows what they would have got."""
    (one,) = lessons(1)
    weights = parameters(initial(SMALL, 3))
    batch = batch_of([one.lived])
    imitation_loss(weights, batch, torch.zeros(8)).backward()  # type: ignore[no-untyped-call]
    grad = weights["policy.ps.bias"].grad
    assert grad is not None
    assert not grad.any()
    urgency = weights["policy.urgency.bias"].grad
    assert urgency is not None
    assert float(urgency) > 0
