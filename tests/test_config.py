"""Configuration: what operators write, and what they are told before any process is started."""

from __future__ import annotations

from typing import Any

import pytest

from fedsched import config
from fedsched.config import AgentConfig, FederationConfig
from fedsched.errors import InvalidConfiguration
from fedsched.policy import plugins

CLUSTER = {"name": "east", "nodes": [{"name": "east-1", "cpus": 2}]}


def federation(**fields: Any) -> FederationConfig:
    return config.parse(FederationConfig, {"clusters": [CLUSTER], **fields}, "federation.yaml")


def test_the_smallest_file_has_one_cluster() -> None:
    """All else has a default."""
    assert federation().clusters[0].nodes[0].memory_gb > 0


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"controller": "127.0.0.1:99999"}, "port 99999 does not exist"),
        ({"controller": "127.0.0.1:0"}, "names no port"),
        ({"controller": "127.0.0.1:7481"}, "127.0.0.1:7481 is given 2 times"),
        ({"etcd": {"address": "127.0.0.1:7481"}}, "127.0.0.1:7481 is given 2 times"),
        ({"tracing": {"endpoint": "collector"}}, "tracing.endpoint"),
        ({"lease_ttl_s": 10**12}, "less than or equal to 3600"),
        ({"slot": {"length_s": float("inf")}}, "finite"),
        ({"slot": {"length_s": float("nan")}}, "slot.length_s is nan"),
        ({"clusters": [{"name": "east", "nodes": [{"name": "a", "cpus": float("inf")}]}]}, "finite"),
        ({"clusters": [{"name": "east", "nodes": [{"name": "a", "cpus": 1e300}]}]}, "less than or equal to"),
        ({"clusters": [{"name": "east", "nodes": [{"name": "a", "cpus": 1}] * 2}]}, "node a is defined 2 times"),
        ({"clusters": [CLUSTER, CLUSTER]}, "cluster east is defined 2 times"),
        ({"clusters": []}, "clusters is \\[\\]; at least 1 item was expected"),
        ({"cluster": [CLUSTER]}, "did you mean clusters"),
    ],
)
def test_what_no_federation_can_run_with_is_told_at_once(fields: dict[str, Any], told: str) -> None:
    """Found later, it is a stack trace in the log of one of five processes."""
    with pytest.raises(InvalidConfiguration, match=told) as refused:
        federation(**fields)
    assert refused.value.exit_code == 2


@pytest.mark.parametrize("name", sorted(plugins.available()))
def test_a_checkpoint_for_a_policy_that_starts_from_none_is_refused(name: str) -> None:
    """Ignored, its owner would take what a heuristic did for what the weights had learnt."""
    policy = {"name": name, "checkpoint": "mine.safetensors"}
    if name in config.COMBINED:
        assert config.parse(config.PolicyConfig, policy, "the policy").checkpoint == "mine.safetensors"
    else:
        with pytest.raises(InvalidConfiguration, match=f"policy {name} starts from no checkpoint; dl2, learned_speed"):
            config.parse(config.PolicyConfig, policy, "the policy")


def test_policies_for_simulations_only_are_all_named() -> None:
    """One that is forgotten would be accepted live."""
    own = [name for name, package in plugins.available().items() if package == "fedsched"]
    kinds = {name: plugins.load(name) for name in own}
    needs = {name for name, kind in kinds.items() if hasattr(kind, "consult") or getattr(kind, "rebuilds", False)}
    assert set(config.SIMULATED) == needs


@pytest.mark.parametrize("name", sorted(plugins.available()))
def test_an_agent_is_given_no_policy_that_only_simulations_can_ask(name: str) -> None:
    """It answered in no slot: the fallback decided, and whoever had asked for the other was not told at the start."""
    plain = {"cluster": "c", "state_dir": "s", "etcd": "h:1", "nodes": CLUSTER["nodes"], "policy": {"name": name}}
    cluster = {**CLUSTER, "policy": {"name": name}}
    if name not in config.SIMULATED:
        assert config.parse(AgentConfig, plain, "agent.yaml").policy.name == name
        assert federation(clusters=[cluster]).clusters[0].policy.name == name
        return
    with pytest.raises(InvalidConfiguration, match=f"policy {name} is for simulations only"):
        config.parse(AgentConfig, plain, "agent.yaml")
    with pytest.raises(InvalidConfiguration, match=f"policy {name} is for simulations only"):
        federation(clusters=[cluster])


@pytest.mark.parametrize("kind", ["local", "slurm", "kubernetes", "ray"])
def test_an_agents_cluster_says_how_long_its_tasks_may_take_to_begin(kind: str) -> None:
    """Nobody knows better than its operator how long a queue is, or an image takes to be pulled."""
    executor: dict[str, Any] = {"kind": kind}
    if kind != "local":
        executor |= {"directory": "/shared/fedsched"}
    if kind == "kubernetes":
        executor |= {"image": "i", "mount": "/shared"}

    def made(**waits: float) -> AgentConfig:
        plain = {"cluster": "c", "state_dir": "s", "etcd": "h:1", "nodes": CLUSTER["nodes"]}
        return config.parse(AgentConfig, plain | {"executor": executor | waits}, "agent.yaml")

    usual = made().executor
    assert usual.start_s_max > usual.resize_s_max >= 60
    given = made(start_s_max=7200, resize_s_max=5).executor
    assert (given.start_s_max, given.resize_s_max) == (7200, 5)
    with pytest.raises(InvalidConfiguration, match=r"executor\.start_s_max is 0"):
        made(start_s_max=0)
