"""The nodes under one agent and what they can hold."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import TypeVar

from fedsched.core.ids import ClusterName, JobId, NodeName
from fedsched.core.record import Record
from fedsched.core.resources import Resources, total

T = TypeVar("T")


class Node(Record, frozen=True):
    """A machine, or a named share of one."""

    name: NodeName
    capacity: Resources
    accelerator: str = ""
    """Type of its GPUs; empty where it has none."""
    schedulable: bool = True
    """False while cordoned: what runs goes on, nothing new comes."""


class _Same:
    """A tuple of nodes as a key that is found by identity: to compare hundreds of nodes costs more than to add them."""

    __slots__ = ("nodes",)

    def __init__(self, nodes: tuple[Node, ...]) -> None:
        self.nodes = nodes

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.nodes is other.nodes

    def __hash__(self) -> int:
        return id(self.nodes)


def kept_with_nodes(made_of: Callable[[tuple[Node, ...]], T]) -> Callable[[tuple[Node, ...]], T]:
    """Keep what is made of some nodes for as long as the very same tuple of them is asked about."""

    @lru_cache(maxsize=128)
    def kept(same: _Same) -> T:
        return made_of(same.nodes)

    @wraps(made_of)
    def found(nodes: tuple[Node, ...]) -> T:
        return kept(_Same(nodes))

    return found


@kept_with_nodes
def capacity_of(nodes: tuple[Node, ...]) -> Resources:
    """What all these nodes hold together."""
    return total([node.capacity for node in nodes])


class ClusterRecord(Record, frozen=True):
    """What an agent says of its cluster under its lease; gone when the lease is gone."""

    name: ClusterName
    term: int
    agent_id: str
    """`host/pid/start time` of the agent's process: tells a restarted agent from its living twin."""
    agent_version: str
    host: str
    pid: int
    nodes: tuple[Node, ...]
    usage: Resources
    """What tasks hold now, stopping ones included."""
    queued: int
    running: int
    policy: str
    policy_version: int
    """Version of the learned policy that decides now; 0 for a heuristic."""
    slot: int
    started_s: float
    labels: tuple[tuple[str, str], ...] = ()
    decisions: int = 0
    """Slots decided since this agent began."""
    fallbacks: int = 0
    """Those of them that the heuristic decided because the policy's answer could not be used."""
    fallback: str = ""
    """Why the heuristic decided the newest slot; empty where the policy did."""
    coordinator: Resources = Resources()
    """What the coordinator of each job takes of a node there, beside the job's tasks."""

    @property
    def capacity(self) -> Resources:
        """What all nodes hold together."""
        return total([node.capacity for node in self.nodes])


class Assignment(Record, frozen=True):
    """A job that the controller gave to a cluster; the agent removes it with the job's terminal status."""

    job_id: JobId
    cancel: bool = False
    """The user asked for the job's end."""


class ControllerRecord(Record, frozen=True):
    """What a controller says of itself under its lease."""

    controller_id: str
    address: str
    """host:port of its gRPC server."""
    version: str
    started_s: float
