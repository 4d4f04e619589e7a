"""One agent serves a cluster at a time, and each has a higher term than all before."""

from __future__ import annotations

import os
import socket
import threading

import pytest

from fedsched.adapters.memory import MemoryStore
from fedsched.agent.membership import agent_id, take_term
from fedsched.core.cluster import ClusterRecord
from fedsched.core.ids import ClusterName
from fedsched.core.resources import Resources
from fedsched.errors import Conflict, CorruptRecord
from fedsched.executor.processes import Identity, is_alive
from fedsched.runtime import codec, keys
from fedsched.runtime.ports import Delete, Put

EAST = ClusterName("east")


def registered(store: MemoryStore, holder: str) -> None:
    host, pid, _ = holder.split("/", 2)
    record = ClusterRecord(EAST, 1, holder, "0", host, int(pid), (), Resources(), 0, 0, "drf", 0, 0, 0.0)
    store.commit((), (Put(keys.cluster(EAST), codec.dumps(record)),))


def test_each_agent_takes_a_higher_term() -> None:
    store = MemoryStore()
    assert [take_term(store, EAST, lease_ttl_s=2) for _ in range(3)] == [1, 2, 3]
    store.close()


def test_agents_that_race_for_a_term_never_get_the_same() -> None:
    """Equal terms would let both write."""
    store = MemoryStore()
    terms: list[int] = []
    threads = [threading.Thread(target=lambda: terms.append(take_term(store, EAST, lease_ttl_s=2))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(terms) == list(range(1, 9))
    store.close()


def test_an_agent_whose_process_is_gone_is_followed_at_once() -> None:
    """After kill -9 the jobs wait for nobody's lease."""
    store = MemoryStore()
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    registered(store, f"{socket.gethostname()}/{child}/1.00")
    assert take_term(store, EAST, lease_ttl_s=3600) == 1
    store.close()


def test_a_living_twin_on_another_machine_is_not_overthrown() -> None:
    """Two agents with one name would take the term from each other for ever."""
    store = MemoryStore()
    registered(store, "elsewhere/1/1.00")
    with pytest.raises(Conflict, match="already served by the living agent elsewhere"):
        take_term(store, EAST, lease_ttl_s=0)
    assert store.get(keys.term(EAST)) is None
    store.close()


@pytest.mark.parametrize("garbage", [b"", b"not a record", b"{}", b"\xff"])
def test_an_agent_meets_unreadable_records_with_one_clear_error(garbage: bytes) -> None:
    """It ended with a traceback; and to pass over a twin's record of another release would have two of them serve."""
    store = MemoryStore()
    store.commit((), (Put(keys.cluster(EAST), garbage),))
    with pytest.raises(CorruptRecord, match=f"the record {keys.cluster(EAST)} in etcd cannot be read"):
        take_term(store, EAST, lease_ttl_s=0)
    assert store.get(keys.term(EAST)) is None

    store.commit((), (Delete(keys.cluster(EAST)), Put(keys.term(EAST), garbage)))
    with pytest.raises(CorruptRecord, match=f"the record {keys.term(EAST)} in etcd cannot be read"):
        take_term(store, EAST, lease_ttl_s=0)
    store.close()


def test_the_new_agent_waits_until_the_old_ones_lease_ends() -> None:
    store = MemoryStore()
    registered(store, "elsewhere/1/1.00")
    terms: list[int] = []
    waiting = threading.Thread(target=lambda: terms.append(take_term(store, EAST, lease_ttl_s=60)))
    waiting.start()
    store.commit((), (Put(keys.cluster(ClusterName("east-2")), b"{}"),))
    assert not terms
    store.commit((), (Delete(keys.cluster(EAST)),))
    waiting.join(10)
    assert terms == [1]
    store.close()


def test_an_agents_id_names_this_very_process() -> None:
    host, pid, started = agent_id().split("/", 2)
    assert (host, int(pid)) == (socket.gethostname(), os.getpid())
    assert is_alive(Identity(int(pid), started))
