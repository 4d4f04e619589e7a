"""What every policy promises, whatever it is asked."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from fedsched.core.commands import AskPolicy
from fedsched.core.decision import Observation, Policy
from fedsched.core.job import Allocation, allocation_of
from fedsched.core.placement import TentativePlacement
from fedsched.core.resources import Resources
from fedsched.policy import checkpoint, guardrail, plugins
from fedsched.policy.dl2 import DL2, Dl2Shape, initial
from fedsched.policy.set import Set
from tests.policy.observations import observations

BUILTIN = checkpoint.load(checkpoint.BUILTIN)
SET = checkpoint.load(checkpoint.BUILTIN_SET)
SMALL = Dl2Shape(window=2, hidden=(8,))


def fresh(name: str) -> Policy:
    if name == "dl2":
        return DL2(BUILTIN.arrays, shape=BUILTIN.shape, seed=3)
    if name == "dl2-greedy":
        return DL2(BUILTIN.arrays, shape=BUILTIN.shape, explore=False)
    if name == "dl2-small-window":
        return DL2(initial(SMALL, 0), shape=SMALL)
    if name == "set":
        return Set(SET.arrays, shape=SET.shape, seed=3)
    if name == "set-greedy":
        return Set(SET.arrays, shape=SET.shape, explore=False)
    return plugins.make(name.partition("-")[0], OPTIONS.get(name, {}))


OPTIONS: dict[str, dict[str, object]] = {
    "constant-big": {"workers": 3, "ps": 16},
    "gavel_maxmin-alike": {"aware": False, "replan_slots": 1},
    "tetris-packing": {"weight": 0.0},
    "themis-unfair": {"fairness": 0.0},
}
# DL2's reference policies fill an empty cluster with a budget of its own: tests/policy/test_reference.py.
# Those that must be told true speeds: tests/policy/test_oracle_greedy.py.
TOLD = {"oracle_greedy", "lower_bound"}
USUAL = [name for name in plugins.available() if not name.startswith("dl2_") and name not in TOLD]
NAMES = sorted({*USUAL, *OPTIONS, "dl2-greedy", "dl2-small-window", "set-greedy"})
every_policy = pytest.mark.parametrize("name", NAMES)


def used_per_node(seen: Observation, budget: TentativePlacement) -> dict[str, Resources]:
    """Counted task by task from the places, not asked of the budget."""
    used = {node.name: Resources() for node in seen.nodes}
    for view in seen.jobs:
        for entry in budget.placement(view.job_id):
            used[entry.node] = used[entry.node] + (
                view.worker_demand if entry.role.value == "worker" else view.ps_demand
            )
    return {str(name): amount for name, amount in used.items()}


@every_policy
@settings(max_examples=25)
@given(seen=observations(), keep_running=st.booleans())
def test_an_answer_fits_nodes_and_limits_and_starts_whom_it_can(
    name: str, seen: Observation, keep_running: bool
) -> None:
    """A promise beyond a node's capacity, or a gang without its minimum, would start tasks that can never train; and a
    user whose job waits beside free nodes loses trust in everything else."""
    budget = TentativePlacement(seen, keep_running)
    decision = fresh(name).decide(seen, budget)

    assert guardrail.judge(AskPolicy(seen, keep_running), decision) is None
    used = used_per_node(seen, budget)
    assert all(used[node.name].fits_in(node.capacity) for node in seen.nodes)
    answered = dict(decision.allocations)
    for view in seen.jobs:
        got = answered.get(view.job_id, Allocation())
        if view.pinned:
            assert got == allocation_of(view.placement)
        elif got:
            assert view.minimum.workers <= got.workers <= max(view.workers.maximum, 1)
            assert got.ps in view.ps
        else:
            assert not budget.grant(view.job_id, view.minimum.workers, view.minimum.ps)


@every_policy
@settings(max_examples=15)
@given(seen=observations(), order=st.randoms(use_true_random=False))
def test_the_answer_depends_on_nothing_but_the_observation(name: str, seen: Observation, order: random.Random) -> None:
    """Replays and audits need the same answer again, also when records come back from the store in another order."""
    jobs, nodes = list(seen.jobs), list(seen.nodes)
    order.shuffle(jobs)
    order.shuffle(nodes)
    mixed = replace(seen, jobs=tuple(jobs), nodes=tuple(nodes))

    policy = fresh(name)
    first = policy.decide(seen, TentativePlacement(seen))
    again = policy.decide(seen, TentativePlacement(seen))
    other = fresh(name).decide(mixed, TentativePlacement(mixed))

    assert first == again == other
