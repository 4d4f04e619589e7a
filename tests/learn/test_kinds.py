"""What can be taught, in the simulator and in a live agent alike."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedsched.config import AgentConfig, LearningConfig, PolicyConfig
from fedsched.core.commands import RewardSlot
from fedsched.core.decision import Observation
from fedsched.core.placement import TentativePlacement
from fedsched.errors import CorruptCheckpoint, InvalidConfiguration
from fedsched.learn import kinds
from fedsched.policy import checkpoint, registry
from fedsched.policy.dl2 import DL2
from fedsched.policy.learnable import Learnable
from tests.policy.observations import job, node, observation


def crowd(slot: int = 1) -> Observation:
    jobs = [job(name, workers=(1, 8), ps=(1, 8)) for name in "abcdef"]
    return observation([node(f"n{index}", 16) for index in range(4)], jobs, slot=slot)


def choices(policy: DL2, slots: int = 12) -> list[list[int]]:
    """The actions of some slots."""
    taken = []
    for slot in range(slots):
        seen = crowd(slot)
        policy.decide(seen, TentativePlacement(seen))
        taken.append([sample.action for sample in policy.last_trace()])
    return taken


def test_whatever_has_weights_can_be_taught() -> None:
    """A policy that ships weights and is missing here would run in agents and silently never learn."""
    assert set(kinds.TEACHABLE) == set(registry.BUILTINS)
    for name in kinds.TEACHABLE:
        policy = kinds.make(PolicyConfig(name=name), LearningConfig())
        assert isinstance(policy, Learnable)
        learner = kinds.learner_for(policy, LearningConfig(memory=50), 8)
        assert learner is not None
        seen = crowd()
        policy.decide(seen, TentativePlacement(seen))
        learner.record(1, policy.last_trace())


def test_heuristics_have_nothing_to_teach() -> None:
    assert kinds.learner_for(registry.heuristic("drf"), LearningConfig(), 8) is None
    assert kinds.make(PolicyConfig(name="drf"), LearningConfig()).name == "drf"
    with pytest.raises(InvalidConfiguration, match=r"policy drf has no weights; dl2 or set was expected"):
        registry.weights("drf", "builtin")


@pytest.mark.parametrize(("name", "others"), [("dl2", checkpoint.BUILTIN_SET), ("set", checkpoint.BUILTIN)])
def test_teaching_does_not_start_from_another_policys_weights(name: str, others: Path) -> None:
    with pytest.raises(CorruptCheckpoint, match=f"policy {name} expected"):
        kinds.first_weights(name, str(others), 0)


def test_job_aware_rules_choose_where_a_policy_learns_and_nowhere_else(tmp_path: Path) -> None:
    """The paper explores while it learns on line; who does not learn would only decide worse."""
    config = AgentConfig.model_validate(
        {"cluster": "east", "state_dir": tmp_path, "etcd": "h:1", "nodes": [{"name": "n", "cpus": 1}]}
    )
    assert config.learning.exploration, "the paper's default"
    plain = registry.make(config.policy)
    learning = kinds.make(config.policy, config.learning)
    without = kinds.make(config.policy, LearningConfig(exploration=False))
    still = kinds.make(PolicyConfig(explore=False), config.learning)
    assert isinstance(plain, DL2)
    assert isinstance(learning, DL2)
    assert isinstance(without, DL2)
    assert isinstance(still, DL2)
    assert choices(learning) != choices(plain) == choices(without)
    assert choices(still) == choices(DL2(plain._weights[1], shape=plain.shape, explore=False))


def test_replay_can_be_turned_off() -> None:
    """Only as many decisions are remembered as a gradient is computed from."""
    for memory, expected in ((8192, 8), (5, 5)):
        learner = kinds.learner_for(
            registry.make(PolicyConfig()), LearningConfig(replay="off", memory=memory), batch_size=8
        )
        assert learner is not None
        policy = registry.make(PolicyConfig())
        assert isinstance(policy, DL2)
        for slot in range(4):
            seen = crowd(slot)
            policy.decide(seen, TentativePlacement(seen))
            learner.record(slot, policy.last_trace())
            learner.reward(RewardSlot(slot, ()))
        assert len(learner) == expected
