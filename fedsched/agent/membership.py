"""How an agent becomes the one that serves its cluster: it waits for a living twin, then takes the next term."""

from __future__ import annotations

import logging
import os
import socket
import threading

from fedsched.core.cluster import ClusterRecord
from fedsched.core.ids import ClusterName
from fedsched.errors import Conflict, CorruptRecord, FedschedError
from fedsched.executor.processes import Identity, identify, is_alive
from fedsched.runtime import keys, stored
from fedsched.runtime.ports import Put, RevisionIs, Store

_log = logging.getLogger(__name__)


def agent_id() -> str:
    """`host/pid/start` of this process: unlike a pid alone, never used twice."""
    own = identify(os.getpid())
    assert own is not None, "this process is alive"
    return f"{socket.gethostname()}/{own.pid}/{own.started}"


def take_term(store: Store, cluster: ClusterName, *, lease_ttl_s: int) -> int:
    """Become the cluster's agent: the returned fencing number is higher than that of every agent before.

    Raises:
        Conflict: another living agent serves the cluster.
        CorruptRecord: the cluster's term is no number, or who is registered cannot be read and stays.
        StoreUnavailable: the store did not answer.
    """
    _wait_for_twin(store, cluster, lease_ttl_s)
    key = keys.term(cluster)
    while True:
        entry = store.get(key)
        term = (stored.number(entry) if entry else 0) + 1
        guard = RevisionIs(key, entry.mod_revision if entry else 0)
        if store.commit((guard,), (Put(key, str(term).encode()),)).ok:
            return term


def _wait_for_twin(store: Store, cluster: ClusterName, lease_ttl_s: int) -> None:
    """Return when no agent serves the cluster: none is registered, or the registered one's process is gone."""
    entry = store.get(keys.cluster(cluster))
    if entry is None:
        return
    problem: FedschedError
    try:
        holder = stored.record(ClusterRecord, entry).agent_id
        if _is_gone(holder):
            return
        problem = Conflict(
            f"cluster {cluster} is already served by the living agent {holder}",
            "stop that agent first, or give this one another cluster name",
        )
    except CorruptRecord as unreadable:
        problem = unreadable  # an agent of another release may have written it: it counts as alive
    _log.warning("%s; waiting for its lease to end", problem.message)
    key, gone = keys.cluster(cluster), threading.Event()
    watch = store.watch(  # the prefix may match other clusters too
        key,
        lambda snapshot: None if any(entry.key == key for entry in snapshot.entries) else gone.set(),
        lambda change: gone.set() if change.key == key and change.entry is None else None,
    )
    try:
        # A dead agent's lease ends within its own time to live; twice ours is generous where both are alike.
        if not gone.wait(2 * lease_ttl_s + 1):
            raise problem
    finally:
        watch.close()


def _is_gone(agent: str) -> bool:
    """Whether the agent of this id ran on this machine and its process has ended; unknown counts as alive."""
    host, _, process = agent.partition("/")
    pid, _, started = process.partition("/")
    return host == socket.gethostname() and pid.isdigit() and not is_alive(Identity(int(pid), started))
