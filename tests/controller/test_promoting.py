"""What an operator orders and can never be carried out is refused at once, with what would do instead."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from fedsched.adapters.memory import MemoryStore
from fedsched.adapters.rpc import JobsClient
from fedsched.config import SIMULATED
from fedsched.core.ids import ClusterName
from fedsched.core.versions import VersionName
from fedsched.errors import InvalidInput
from fedsched.runtime import codec, keys
from fedsched.runtime.ports import Put
from tests.controller.stand_in import StandInAgent
from tests.waiting import eventually

EAST = ClusterName("east")


@pytest.mark.parametrize(
    "weights",
    [VersionName(checkpoint="builtin"), VersionName(checkpoint="/w"), VersionName(version=1), VersionName(newest=True)],
    ids=["shipped", "file", "version", "newest"],
)
def test_a_policy_without_weights_cannot_be_given_any(
    store: MemoryStore, client: JobsClient, weights: VersionName
) -> None:
    """Who upgrades from a heuristic tries this first; an order that waits for ever tells them nothing."""
    agent = StandInAgent(store, "east")
    store.commit((), (Put(keys.cluster(EAST), codec.dumps(replace(agent.record, policy="drf")), agent.lease),))
    eventually(lambda: client.clusters() and client.clusters()[0].record, "the cluster is known")
    with pytest.raises(InvalidInput, match="runs policy drf, which has no weights to promote") as refused:
        client.promote("east", weights, "ana")
    assert "policy.name" in refused.value.hint
    assert client.promotions("east") == ()


@pytest.mark.parametrize("policy", SIMULATED)
def test_a_policy_that_only_simulations_can_ask_does_not_run_in_the_shadow(
    store: MemoryStore, client: JobsClient, policy: str
) -> None:
    """It would fail in every slot, and the verdict would read as if it had been worse."""
    StandInAgent(store, "east")
    eventually(lambda: client.clusters() and client.clusters()[0].record, "the cluster is known")
    with pytest.raises(InvalidInput, match=f"policy {policy} is for simulations only"):
        client.shadow("east", VersionName(policy), "ana")
    assert store.get(keys.candidate(EAST)) is None
