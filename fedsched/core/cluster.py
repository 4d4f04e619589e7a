"""The nodes under one agent and what they can hold."""

from __future__ import annotations

from fedsched.core.ids import ClusterName, JobId, NodeName
from fedsched.core.record import Record
from fedsched.core.resources import Resources, total


class Node(Record, frozen=True):
    """A machine, or a named share of one."""

    name: NodeName
    capacity: Resources
    accelerator: str = ""
    """Type of its GPUs; empty where it has none."""
    schedulable: bool = True
    """False while cordoned: what runs goes on, nothing new comes."""


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
