"""Nodes that the cluster itself closes: every executor sees which, and what would wait for one goes elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fedsched.core.cluster import ClusterRecord
from fedsched.core.events import JobExited, JobStarted
from fedsched.core.ids import ClusterName, JobId, NodeName
from fedsched.core.job import JobPhase, Reason
from fedsched.executor.records import Layout
from fedsched.runtime import codec, keys
from tests.agent.live_agent import LiveAgent, live_agent
from tests.contracts.test_executor import PLACES, on
from tests.executor.cluster import Cluster, Place, placement
from tests.executor.on_ray import OnRay
from tests.live.serving import Tasks
from tests.live.test_platforms import agent_on
from tests.waiting import eventually

pytestmark = [pytest.mark.live, pytest.mark.timeout(400)]

N1, N2, UNKNOWN = NodeName("n1"), NodeName("n2"), NodeName("n9")


@pytest.fixture(params=PLACES[1:])
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster]:
    """One whose tasks another system places."""
    yield from on(request, tmp_path)


@pytest.fixture(params=PLACES[1:])
def place(request: pytest.FixtureRequest) -> Place:
    found: Place = request.getfixturevalue(request.param)
    return found


def test_a_node_that_is_down_or_that_nobody_knows_is_closed_and_nothing_waits_for_it(cluster: Cluster) -> None:
    """Jobs that wait for a dead machine look as if they were about to begin, for as long as a start may take."""

    def closed() -> dict[NodeName, str]:
        return dict(cluster.executor.closed([N1, N2, UNKNOWN]) or {})

    eventually(lambda: set(closed()) == {UNKNOWN}, "only the node that is none is closed", 40.0)
    cluster.start(cluster.spec(), placement(1, 1, "n2"))
    cluster.wait_for(JobStarted)

    cluster.place.lose(cluster, "worker-0")
    assert cluster.wait_for(JobExited, deadline_s=90.0).reason is Reason.NODE_LOST
    eventually(lambda: set(closed()) == {N2, UNKNOWN} and all(closed().values()), "it is closed, and why", 40.0)
    cluster.join_deadline_s = 300.0
    mark = cluster.mark()
    cluster.open()
    cluster.start(cluster.spec(), placement(1, 1, "n2"), attempt=2)
    eventually(lambda: N2 in closed(), "the new executor knows it, too", 40.0)
    refused = cluster.wait_for(JobExited, after=mark, deadline_s=60.0)
    assert refused.reason is Reason.NODE_LOST, refused
    assert "n2" in refused.message

    cluster.place.end(cluster.root)
    eventually(lambda: set(closed()) == {UNKNOWN}, "it is open again", 60.0)


@pytest.fixture
def agent(place: Place, etcd_address: str, tmp_path: Path) -> Iterator[LiveAgent]:
    """Its cluster has two nodes with room for one task and its coordinator each."""
    config = agent_on(place, tmp_path)
    config["nodes"] = [{"name": name, "cpus": 2, "memory_gb": 4} for name in (N1, N2)]
    if isinstance(place, OnRay):
        place.namespace = f"fedsched-{config['cluster']}"
    kept = {key: value for key, value in config.items() if key not in ("cluster", "etcd", "state_dir")}
    try:
        with live_agent(etcd_address, tmp_path / "agent", config["cluster"], **kept) as agent:
            yield agent
    finally:
        place.end(tmp_path / "shared" / config["cluster"])


def test_a_job_whose_node_dies_goes_on_where_there_is_room_and_comes_back_when_the_node_does(
    agent: LiveAgent, place: Place, tmp_path: Path
) -> None:
    """A machine that dies at night costs its jobs a restart: not their attempts, and not a wait for the morning."""
    cluster = Layout(tmp_path / "shared" / agent.cluster)

    def open_nodes() -> set[str]:
        entry = agent.store.get(keys.cluster(ClusterName(agent.cluster)))
        return (
            {node.name for node in codec.loads(ClusterRecord, entry.value).nodes if node.schedulable}
            if entry
            else set()
        )

    def node_of(name: str) -> str:
        return agent.status(name).placement[0].node

    for name in ("a", "b"):
        agent.assign(name)
        agent.wait(name, JobPhase.RUNNING)
    there, here = ("a", "b") if node_of("a") == N2 else ("b", "a")

    place.lose(Tasks(cluster.attempt(JobId(f"{agent.cluster}-{there}"), 1)), "worker-0")
    eventually(lambda: open_nodes() == {N1}, "the federation knows that the node is closed", 60.0)
    eventually(lambda: agent.status(there).phase is JobPhase.DISPATCHED, "its job waits", 60.0)
    agent.cancel(here)
    eventually(lambda: agent.status(there).phase is JobPhase.RUNNING, "it runs on the other node", 90.0)
    moved = agent.status(there)
    assert (moved.placement[0].node, moved.failures) == (N1, 0)

    agent.cancel(there)
    agent.wait(there, JobPhase.CANCELLED)
    place.end(cluster.root)
    eventually(lambda: open_nodes() == {N1, N2}, "the node is open again", 60.0)
