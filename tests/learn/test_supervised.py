"""Learning from a teacher: the right labels, and a student that follows them."""

from __future__ import annotations

from random import Random

import numpy as np

from fedsched.core.decision import Budget, Decision, Observation
from fedsched.core.ids import JobId, stream
from fedsched.core.placement import TentativePlacement
from fedsched.learn.supervised import Fit, Watched, agreement, reordered
from fedsched.policy.dl2 import BUNDLE, DL2, PS, WORKER, Dl2Shape, initial
from fedsched.policy.heuristics import admit, by_arrival
from fedsched.policy.registry import heuristic
from tests.policy.observations import job, node, observation

SHAPE = Dl2Shape(window=3, hidden=(32,))


def test_labels_are_the_teachers_grants_in_the_state_just_before_each() -> None:
    """A label beside the state after the grant teaches the student to repeat itself."""
    seen = observation([node("n", 9)], [job("a"), job("b", workers=(1, 2), ps=(1, 1))])
    watched = Watched(heuristic("fifo"), SHAPE)
    decision = watched.decide(seen, TentativePlacement(seen))

    assert {str(name): str(size) for name, size in decision.allocations} == {"a": "4w+2ps", "b": "2w+1ps"}
    assert [label.action for label in watched.labels] == [BUNDLE, WORKER, WORKER, WORKER]
    assert [label.state[4, :2].tolist() for label in watched.labels[:3]] == [[1, 1], [2, 1], [3, 1]]
    assert [label.state[4, :2].tolist() for label in watched.labels[3:]] == [[1, 0]]  # a is full and has left
    assert all(label.mask[label.action] for label in watched.labels)


class _Frugal:
    """Gives everybody the minimum and stops."""

    name = "frugal"
    version = 0

    def decide(self, observation: Observation, budget: Budget) -> Decision:
        admit(by_arrival(observation.jobs), budget)
        return Decision(observation.slot, budget.allocations(), self.name)


def test_void_is_the_label_where_the_teacher_left_room() -> None:
    """A student that never sees void can never leave room; one that sees it in a full cluster idles an empty one."""
    roomy, full = (observation([node("n", cpus)], [job("a")]) for cpus in (8, 2))
    watched = Watched(_Frugal(), SHAPE)
    decision = watched.decide(roomy, TentativePlacement(roomy))
    assert [label.action for label in watched.labels] == [SHAPE.void]
    assert [str(size) for _, size in decision.allocations] == ["1w+1ps"]

    watched.decide(full, TentativePlacement(full))
    assert len(watched.labels) == 1


def test_reordering_keeps_every_jobs_own_column_mask_and_action() -> None:
    seen = observation([node("n", 40)], [job("a", ps=(1, 1)), job("b", job_type="vgg")])
    watched = Watched(heuristic("drf"), SHAPE)
    watched.decide(seen, TentativePlacement(seen))
    label = watched.labels[0]
    assert label.action == WORKER
    swapped = next(other for seed in range(20) if (other := reordered(label, Random(seed))).state[0, 0] == 5)
    assert swapped.state[:, [1, 0, 2]].tolist() == label.state.tolist()
    assert swapped.action == 3 + WORKER
    assert swapped.mask[[3 + WORKER, 3 + PS, 3 + BUNDLE, WORKER]].tolist() == [True, False, False, True]


class _FavoursVgg:
    """All that is left goes to the job of one type, worker by worker: obvious to anybody who looks at the types."""

    name = "favours-vgg"
    version = 0

    def decide(self, observation: Observation, budget: Budget) -> Decision:
        for view in admit(by_arrival(observation.jobs), budget):
            if view.job_type == "vgg":
                while budget.grant(view.job_id, 1):
                    pass
        return Decision(observation.slot, budget.allocations(), self.name)


def toy(seed: int) -> Observation:
    draw = stream(seed, "toy").random
    types = ["vgg", "linear"] if draw() < 0.5 else ["linear", "vgg"]
    jobs = [job(name, job_type=kind, waited_slots=int(draw() * 9)) for name, kind in zip("ab", types, strict=True)]
    return observation([node("n", 5 + int(draw() * 3))], jobs, seed)


def test_an_obvious_preference_is_learnt_in_seconds_and_twice_the_same() -> None:
    """If this fails, no shipped policy can be trusted to be its teacher's pupil."""
    watched = Watched(_FavoursVgg(), SHAPE)
    for seed in range(60):
        watched.decide(toy(seed), TentativePlacement(toy(seed)))
    grants = [label for label in watched.labels if label.action != SHAPE.void]

    fits = [Fit(initial(SHAPE, 0), grants, steps=400, batch_size=32, seed=1) for _ in range(2)]
    for fit in fits:
        fit.run(400)
    first, again = (fit.fitted() for fit in fits)

    assert first.last_loss < 0.05 < first.first_loss
    assert agreement(first.arrays, grants) > 0.99
    assert all((first.arrays[name] == again.arrays[name]).all() for name in first.arrays)
    # Only rounded, never trained: the value network knows nothing of teachers.
    np.testing.assert_allclose(first.arrays["value.0.weight"], initial(SHAPE, 0)["value.0.weight"], rtol=1e-3)
    policy = DL2(first.arrays, shape=SHAPE, explore=False)
    unseen = toy(1000)
    favourite = next(view.job_id for view in unseen.jobs if view.job_type == "vgg")
    other = next(view.job_id for view in unseen.jobs if view.job_type != "vgg")
    given = dict(policy.decide(unseen, TentativePlacement(unseen)).allocations)
    assert given[favourite].workers > given[JobId(other)].workers == 1
