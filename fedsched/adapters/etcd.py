"""The store in etcd: etcd3's stubs under our own list-watch-resume loop, since etcd3's watch may hang or end."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from fedsched.adapters.etcd_shim import etcdrpc
from fedsched.adapters.memory import check_transaction
from fedsched.addresses import channel_options
from fedsched.errors import NotFound, StoreUnavailable
from fedsched.runtime.backoff import Backoff
from fedsched.runtime.ports import (
    Committed,
    Entry,
    Guard,
    KeyChanged,
    Put,
    RevisionIs,
    Snapshot,
    Watch,
    Write,
)

PAGE_KEYS = 500
"""Keys that one request of a listing brings."""
STREAM_S = 30.0
"""A watch is opened anew after this, from where it was: a stream that hangs silently costs no more than this."""
BACKOFF_S = (0.05, 2.0)
"""First and longest pause before a watch that broke is opened again."""
CLOSE_S = 10.0
"""How long `close` waits for a callback that still runs."""

_log = logging.getLogger(__name__)

_CHANNEL = (
    # By default gRPC waits up to two minutes before it tries a lost server again.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # Not a pause, for all its name: how long one attempt to connect may take, over a slow network, too.
    ("grpc.min_reconnect_backoff_ms", 5000),
    # Notices a connection that is dead without a word; etcd allows one ping every 5 seconds.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.max_receive_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),
)


class EtcdStore:
    """`Store` in the etcd at `address` (host:port); connects at the first call. Thread-safe.

    Args:
        timeout_s: longest time that one call may take before it raises `StoreUnavailable`.
    """

    def __init__(self, address: str, *, timeout_s: float = 5.0) -> None:
        self.address = address
        self._timeout_s = timeout_s
        self._channel = grpc.insecure_channel(address, options=(*_CHANNEL, *channel_options(address)))
        self._kv = etcdrpc.KVStub(self._channel)
        self._leases = etcdrpc.LeaseStub(self._channel)
        self._watches = etcdrpc.WatchStub(self._channel)
        self._lock = threading.Lock()
        self._open: dict[_EtcdWatch, None] = {}
        self._closed = False

    def get(self, key: str) -> Entry | None:
        """The key's entry now."""
        response = self._call(self._kv.Range, etcdrpc.RangeRequest(key=key.encode()))
        return _entry(response.kvs[0]) if response.kvs else None

    def list(self, prefix: str) -> Snapshot:
        """All entries under `prefix`, sorted by key and all as of one revision."""
        start, end = _range(prefix)
        entries: list[Entry] = []
        revision = 0
        while True:
            page = self._call(
                self._kv.Range,
                etcdrpc.RangeRequest(key=start, range_end=end, limit=PAGE_KEYS, revision=revision),
            )
            entries += (_entry(found) for found in page.kvs)
            revision = revision or page.header.revision
            if not page.more:
                return Snapshot(tuple(entries), revision)
            start = page.kvs[-1].key + b"\0"

    def commit(self, guards: tuple[Guard, ...], writes: tuple[Write, ...]) -> Committed:
        """Write all of `writes` in one transaction if every guard holds, else nothing.

        Raises:
            NotFound: a put names a lease that has ended; nothing was written.
        """
        check_transaction(guards, writes)
        response = self._call(
            self._kv.Txn,
            etcdrpc.TxnRequest(compare=[_compare(guard) for guard in guards], success=[_operation(w) for w in writes]),
        )
        return Committed(response.succeeded, response.header.revision)

    def watch(
        self, prefix: str, on_snapshot: Callable[[Snapshot], None], on_change: Callable[[KeyChanged], None]
    ) -> Watch:
        """List, then follow: `on_snapshot` first, then each change once and in order, from a thread of its own.

        Returns at once and never raises for an etcd that does not answer: it keeps trying until closed.
        """
        watch = _EtcdWatch(self, prefix, on_snapshot, on_change)
        with self._lock:
            if self._closed:
                raise self.unavailable("the store is closed")
            self._open[watch] = None
        watch.start()
        return watch

    def grant_lease(self, ttl_s: int) -> int:
        """A lease that ends `ttl_s` (at least etcd's minimum, about 2 s) after its last `keep_alive`."""
        if ttl_s < 1:
            raise ValueError(f"a lease of {ttl_s} s; at least 1 s is needed")
        return int(self._call(self._leases.LeaseGrant, etcdrpc.LeaseGrantRequest(TTL=ttl_s)).ID)

    def keep_alive(self, lease: int) -> bool:
        """Renew the lease; False when it has ended."""

        def once(request: Any, timeout: float) -> Any:
            stream = self._leases.LeaseKeepAlive(iter((request,)), timeout=timeout)
            try:
                return next(stream)
            finally:
                stream.cancel()

        return bool(self._call(once, etcdrpc.LeaseKeepAliveRequest(ID=lease)).TTL > 0)

    def revoke(self, lease: int) -> None:
        """End the lease and remove its keys; an ended one is fine."""
        try:
            self._call(self._leases.LeaseRevoke, etcdrpc.LeaseRevokeRequest(ID=lease))
        except NotFound:
            return

    def close(self) -> None:
        """End all watches and the connection; later calls raise `StoreUnavailable`."""
        with self._lock:
            self._closed = True
            watches = tuple(self._open)
        for watch in watches:
            watch.signal()
        # Before the watches are waited for: it also ends a listing that waits for an answer.
        self._channel.close()
        for watch in watches:
            watch.close()

    def _call(self, method: Callable[..., Any], request: Any) -> Any:
        if self._closed:
            raise self.unavailable("the store is closed")
        try:
            return method(request, timeout=self._timeout_s)
        except grpc.RpcError as error:
            raise self.translated(error) from error
        except ValueError as error:
            # gRPC's word for a channel that another thread has closed meanwhile.
            raise self.unavailable("the store is closed") from error
        except StopIteration as error:
            raise self.unavailable("etcd ended the call without an answer") from error

    def open_watch(self, prefix: str, first: int, ended: threading.Event) -> Any:
        """A stream of etcd's answers about `prefix` from revision `first` on; it is kept open until `ended`."""
        start, end = _range(prefix)
        create = etcdrpc.WatchCreateRequest(key=start, range_end=end, start_revision=first, progress_notify=True)

        def requests() -> Iterator[Any]:
            yield etcdrpc.WatchRequest(create_request=create)
            # The server ends the stream as soon as we have no more to ask.
            ended.wait()

        try:
            # With `hasleader` a member that has lost the others ends the stream instead of staying silent.
            return self._watches.Watch(requests(), timeout=STREAM_S, metadata=(("hasleader", "true"),))
        except ValueError as error:
            raise self.unavailable("the store is closed") from error

    def translated(self, error: Any) -> Exception:
        """gRPC's error as one of ours."""
        code, details = error.code(), error.details() or ""
        if code is grpc.StatusCode.NOT_FOUND and "lease" in details:
            return NotFound("the lease has ended", "grant a new lease and write again")
        if code is grpc.StatusCode.INVALID_ARGUMENT:
            return ValueError(f"etcd refused a request: {details}")
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            details = f"no answer within {self._timeout_s:g} s"
        return self.unavailable(f"{code.name}: {details}")

    def unavailable(self, reason: str) -> StoreUnavailable:
        """The error that names this etcd."""
        hint = f"check that etcd runs there: etcdctl --endpoints={self.address} endpoint health"
        if "space exceeded" in reason:
            hint = "etcd is full: compact and defragment it, then disarm its alarm (etcdctl alarm disarm)"
        return StoreUnavailable(f"etcd at {self.address} is not available: {reason}", hint)

    def _forget(self, watch: _EtcdWatch) -> None:
        with self._lock:
            self._open.pop(watch, None)


class _Relist(Exception):
    """The watch cannot go on from where it was."""


class _EtcdWatch:
    """One thread that lists, follows, and resumes after whatever may happen, until closed."""

    def __init__(
        self,
        store: EtcdStore,
        prefix: str,
        on_snapshot: Callable[[Snapshot], None],
        on_change: Callable[[KeyChanged], None],
    ) -> None:
        self._store = store
        self._prefix = prefix
        self._on_snapshot = on_snapshot
        self._on_change = on_change
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._stream: Any = None
        self._is_interrupted = False
        self._backoff = Backoff(*BACKOFF_S)
        self._thread = threading.Thread(target=self._run, name=f"watch {prefix}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def signal(self) -> None:
        """Tell the thread to end, without waiting for it."""
        with self._lock:
            self._closing.set()
            stream = self._stream
        if stream is not None:
            stream.cancel()

    def close(self) -> None:
        """Stop; no callback begins after this has returned, and one that runs is waited for."""
        self.signal()
        if self._thread is not threading.current_thread():
            self._thread.join(CLOSE_S)
            if self._thread.is_alive():
                _log.error("a callback of the watch on %s has not returned for %g s", self._prefix, CLOSE_S)
        self._store._forget(self)

    def _run(self) -> None:
        # The callbacks run here and not within the generator, so that their errors are never taken for etcd's.
        for item in self._items():
            if self._closing.is_set():
                return
            if isinstance(item, Snapshot):
                self._on_snapshot(item)
            else:
                self._on_change(item)

    def _items(self) -> Iterator[Snapshot | KeyChanged]:
        following: int | None = None
        while not self._closing.is_set():
            try:
                if following is None:
                    snapshot = self._store.list(self._prefix)
                    following = snapshot.revision + 1
                    yield snapshot
                for response in self._responses(following):
                    self._recovered()
                    if response.events:
                        # All events of one revision come in one response, so none is left behind by this.
                        following = max(event.kv.mod_revision for event in response.events) + 1
                        yield from map(_change, response.events)
                    elif not response.created:
                        following = max(following, response.header.revision + 1)
            except _Relist as reason:
                _log.info("watch on %s lists again: %s", self._prefix, reason)
                following = None
                self._back_off()
            except StoreUnavailable as problem:
                self._report(problem)
                self._back_off()

    def _responses(self, first: int) -> Iterator[Any]:
        """The answers of one stream that starts at revision `first`; ends when the stream has had its time.

        Raises:
            _Relist: the store cannot tell what happened since `first`.
            StoreUnavailable: the stream broke.
        """
        ended = threading.Event()
        try:
            with self._lock:
                if self._closing.is_set():
                    return
                self._stream = stream = self._store.open_watch(self._prefix, first, ended)
            for response in stream:
                if response.compact_revision:
                    raise _Relist(f"revision {first} was compacted at {response.compact_revision}")
                if response.canceled:
                    raise self._store.unavailable(f"it canceled a watch: {response.cancel_reason}")
                if response.header.revision < first - 1:
                    raise _Relist(f"the store went back to revision {response.header.revision}; was it restored?")
                yield response
            raise self._store.unavailable("it ended a watch")
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED and not self._closing.is_set():
                raise self._store.translated(error) from error
        finally:
            ended.set()
            with self._lock:
                stream, self._stream = self._stream, None
            if stream is not None:
                stream.cancel()

    def _report(self, problem: StoreUnavailable) -> None:
        if not self._is_interrupted and not self._closing.is_set():
            _log.warning("watch on %s is interrupted and will resume: %s", self._prefix, problem.message)

    def _recovered(self) -> None:
        if self._is_interrupted:
            _log.info("watch on %s goes on", self._prefix)
        self._is_interrupted = False
        self._backoff.reset()

    def _back_off(self) -> None:
        self._is_interrupted = True
        self._closing.wait(self._backoff.pause_s())


def _range(prefix: str) -> tuple[bytes, bytes]:
    """First key and the end (exclusive) of all keys under `prefix`; zero bytes mean all keys."""
    start = prefix.encode()
    if not start:
        return b"\0", b"\0"
    # The last byte of UTF-8 text is never 0xff, so there is always a next one.
    return start, start[:-1] + bytes([start[-1] + 1])


def _entry(found: Any) -> Entry:
    return Entry(found.key.decode(), found.value, found.mod_revision, found.create_revision)


def _change(event: Any) -> KeyChanged:
    removed = event.type == event.DELETE
    return KeyChanged(event.kv.key.decode(), None if removed else _entry(event.kv), event.kv.mod_revision)


def _compare(guard: Guard) -> Any:
    compare = etcdrpc.Compare
    if isinstance(guard, RevisionIs):
        return compare(
            result=compare.EQUAL, target=compare.MOD, key=guard.key.encode(), mod_revision=guard.mod_revision
        )
    return compare(result=compare.EQUAL, target=compare.VALUE, key=guard.key.encode(), value=guard.value)


def _operation(write: Write) -> Any:
    if isinstance(write, Put):
        put = etcdrpc.PutRequest(key=write.key.encode(), value=write.value, lease=write.lease or 0)
        return etcdrpc.RequestOp(request_put=put)
    return etcdrpc.RequestOp(request_delete_range=etcdrpc.DeleteRangeRequest(key=write.key.encode()))
