"""What `up` makes of a federation file, before anything is started."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from fedsched import config, local
from fedsched.aggregator.combined import combined
from fedsched.config import COMBINED, AgentConfig, AggregatorConfig, FederationConfig, PolicyConfig, TracingConfig
from fedsched.errors import InvalidConfiguration, Unreachable
from fedsched.learn.kinds import TEACHABLE
from fedsched.policy.registry import LEARNED_SPEED


def federation(*policies: str) -> FederationConfig:
    clusters = [
        {"name": name, "nodes": [{"name": "n", "cpus": 2}], "policy": {"name": policy}}
        for name, policy in zip(("east", "west", "north"), policies, strict=False)
    ]
    return config.parse(FederationConfig, {"clusters": clusters}, "federation.yaml")


def started(*policies: str) -> tuple[AggregatorConfig, dict[str, AgentConfig]]:
    """The aggregator, and the clusters' agents."""
    bodies = [body for _, _, body in local.servers(federation(*policies), Path("/nowhere"), "e:1", TracingConfig())]
    (aggregator,) = [body for body in bodies if isinstance(body, AggregatorConfig)]
    return aggregator, {body.cluster: body for body in bodies if isinstance(body, AgentConfig)}


@pytest.mark.parametrize("name", COMBINED)
def test_whatever_clusters_can_learn_together_the_aggregator_begins_with(name: str) -> None:
    """A name that is accepted here and not there would end the aggregator at its start."""
    aggregator, agents = started(name, name)
    assert aggregator.policy.name == name
    what = combined(aggregator)
    assert what.read(what.first).digest
    assert {agent.aggregator for agent in agents.values()} == {aggregator.listen}
    assert local.said_of_apart(federation(name, name)) == ""


def test_whatever_can_be_taught_can_be_learned_together() -> None:
    """A policy whose learner gives gradients that nobody may combine would learn in no agent."""
    assert set(COMBINED) == {*TEACHABLE, LEARNED_SPEED}


@pytest.mark.parametrize(
    ("policies", "together", "apart"),
    [
        (("dl2", "set"), "dl2", {"west": "set"}),
        (("set", "dl2", "learned_speed"), "set", {"west": "dl2", "north": "learned_speed"}),
        (("drf", "set", "dl2"), "set", {"north": "dl2"}),
        (("drf", "set"), "set", {}),
        (("drf", "fifo"), "dl2", {}),
    ],
)
def test_of_several_policies_one_is_combined_and_the_others_clusters_are_named(
    policies: tuple[str, ...], together: str, apart: dict[str, str]
) -> None:
    """An agent that were refused again and again, and explored for lessons nobody draws, would only do harm."""
    aggregator, agents = started(*policies)
    assert aggregator.policy.name == together
    assert {name for name, agent in agents.items() if agent.aggregator is None} == set(apart)
    said = local.said_of_apart(federation(*policies))
    assert bool(said) == bool(apart)
    if apart:
        assert f"the aggregator combines {together}, the policy of " in said
    for name, policy in apart.items():
        assert f"{name} ({policy})" in said


@pytest.mark.parametrize(
    ("policies", "needs"),
    [
        (("drf", "set"), "set runs in west only"),
        (("learned_speed", "set", "dl2"), "learned_speed runs in east only"),
        (("dl2", "drf", "dl2"), ""),
        (("set", "set"), ""),
        (("drf", "fifo"), ""),
    ],
)
def test_who_changes_one_cluster_first_is_told_that_rounds_need_more(policies: tuple[str, ...], needs: str) -> None:
    """They would look for rounds that are never held."""
    said = local.said_of_quorum(federation(*policies))
    assert bool(said) == bool(needs)
    assert needs in said


def test_who_finds_no_federation_is_told_which_are_stopped_and_how_they_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a reboot `fedsched up` alone starts another one, beside the one that was meant."""
    monkeypatch.setenv("FEDSCHED_HOME", str(tmp_path))
    with pytest.raises(Unreachable) as nothing:
        local.current()
    assert "stopped" not in str(nothing.value)
    (tmp_path / "ops").mkdir()
    stopped = local.LocalFederation("ops", "127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3", ("east",), "", "", "", ())
    (tmp_path / "ops" / local.STATE_FILE).write_bytes(msgspec.json.encode(stopped))
    with pytest.raises(Unreachable, match="stopped are ops") as refused:
        local.current()
    assert "`fedsched up FILE`" in refused.value.hint


def test_what_has_nothing_to_combine_is_refused_with_what_has() -> None:
    config = AggregatorConfig(listen="a:1", etcd="e:1", state_dir=Path("/nowhere"), policy=PolicyConfig(name="drf"))
    with pytest.raises(InvalidConfiguration, match="dl2, learned_speed or set was expected"):
        combined(config)
