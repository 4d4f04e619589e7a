"""The Jobs service on the wire: records to messages and back, errors across the connection, server and client."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import grpc
import msgspec
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from fedsched import __version__, addresses, errors, tracing
from fedsched.core.ids import JobId
from fedsched.core.job import JobSpec, Transition
from fedsched.core.rounds import PolicyRecord, RoundRecord
from fedsched.core.versions import Candidate, Comparison, Promotion, VersionName
from fedsched.core.views import ClusterView, Explanation, Job, PolicyVersion, Submission
from fedsched.errors import AddressInUse, FedschedError, InvalidInput, TimedOut, Unreachable, VersionSkew
from fedsched.pb import jobs_pb2 as pb
from fedsched.pb import jobs_pb2_grpc as pb_grpc
from fedsched.runtime import codec
from fedsched.runtime.ports import LogPiece

T = TypeVar("T")
M = TypeVar("M", bound=Message)

_log = logging.getLogger(__name__)

ERROR_KEY = "fedsched-error-bin"
TRACE_KEY = "traceparent"
"""Metadata of a call: the product error that ended it, and the caller's span."""
STREAMS_MAX = 256
"""Calls that a server works on at once, streams included."""
READERS_MAX = STREAMS_MAX // 2
"""So many of them may be streams to readers; more are refused. Who watches and hangs keeps nobody from other calls, nor
an agent from attaching."""
ERROR_CHARS_MAX = 4000
"""Longer error messages are cut: the transport drops metadata above 8 KiB."""
MESSAGE_BYTES_MAX = 64 * 1024 * 1024
"""A policy's weights and lists of many thousand jobs fit."""
KEEPALIVE_MS = 20_000
"""A peer that is silent for so long is asked whether it is there."""

_CHANNEL_OPTIONS = (
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_MS // 2),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)
_SERVER_OPTIONS = (
    # Without this a second server binds the same port and takes half of the calls.
    ("grpc.so_reuseport", 0),
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_MS // 2),
    ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
)


def channel_options(address: str) -> tuple[tuple[str, int], ...]:
    """Options of a channel to a controller or aggregator at host:port."""
    return (*_CHANNEL_OPTIONS, *addresses.channel_options(address))


def to_message(value: object, kind: type[M]) -> M:
    """A record as its message; fields have the same names on both sides, and what only the record has is left out."""
    return kind(**_fields_for(msgspec.to_builtins(value), kind.DESCRIPTOR))


def from_message(kind: type[T], message: Message) -> T:
    """The record that a message carries.

    Raises:
        InvalidInput: the message does not make a valid `kind`.
    """
    try:
        return codec.from_plain(kind, _plain_of(message))
    except ValueError as problem:
        raise InvalidInput(f"the request cannot be used: {problem}", "compare it with proto/fedsched/v1") from problem


@dataclass(frozen=True, slots=True)
class _Field:
    """What the way to and fro has to know of a message's field: looked up once, for a list has thousands of them."""

    name: str
    message: Any
    """Descriptor of what it holds, if that is a message."""
    is_map: bool
    is_many: bool
    is_optional: bool
    """Whether it may be absent, as None is."""


_known_fields: dict[str, tuple[_Field, ...]] = {}
"""Of each message, by its full name."""


def _fields_of(shape: Any) -> tuple[_Field, ...]:
    found = _known_fields.get(shape.full_name)
    if found is None:
        found = _known_fields[shape.full_name] = tuple(_field(field) for field in shape.fields)
    return found


def _field(field: Any) -> _Field:
    is_map = field.message_type is not None and bool(field.message_type.GetOptions().map_entry)
    return _Field(field.name, field.message_type, is_map, field.is_repeated, field.containing_oneof is not None)


def _fields_for(plain: Mapping[str, Any], shape: Any) -> dict[str, Any]:
    """A message's arguments; tuples of pairs become protobuf maps."""
    arguments: dict[str, Any] = {}
    for field in _fields_of(shape):
        value = plain.get(field.name)
        if value is None:
            continue
        if field.is_map:
            value = dict(value)
        elif field.message is not None:
            value = (
                [_fields_for(item, field.message) for item in value]
                if field.is_many
                else _fields_for(value, field.message)
            )
        arguments[field.name] = value
    return arguments


def _plain_of(message: Any) -> dict[str, Any]:
    """The way back; an `optional` field that was not sent is None, and a message that was not sent is left out."""
    plain: dict[str, Any] = {}
    for field in _fields_of(message.DESCRIPTOR):
        if field.is_optional and not message.HasField(field.name):
            plain[field.name] = None
            continue
        value = getattr(message, field.name)
        if field.is_map:
            value = sorted(value.items())
        elif field.is_many:
            value = [_plain_of(item) for item in value] if field.message is not None else list(value)
        elif field.message is not None:
            if not message.HasField(field.name):
                continue
            value = _plain_of(value)
        plain[field.name] = value
    return plain


_STATUS: tuple[tuple[type[FedschedError], grpc.StatusCode], ...] = (
    (errors.InvalidInput, grpc.StatusCode.INVALID_ARGUMENT),
    (errors.NotFound, grpc.StatusCode.NOT_FOUND),
    (errors.Conflict, grpc.StatusCode.ABORTED),
    (errors.TimedOut, grpc.StatusCode.DEADLINE_EXCEEDED),
    (errors.Unreachable, grpc.StatusCode.UNAVAILABLE),
    (errors.VersionSkew, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.FedschedError, grpc.StatusCode.UNKNOWN),
)


def _kinds(kind: type[FedschedError] = FedschedError) -> dict[str, type[FedschedError]]:
    found = {kind.code: kind}
    for below in kind.__subclasses__():
        found |= _kinds(below)
    return found


def _abort(context: grpc.ServicerContext, problem: FedschedError) -> NoReturn:
    message, hint = problem.message, problem.hint
    if len(message) > ERROR_CHARS_MAX:
        message = f"{message[:ERROR_CHARS_MAX]} ..."
    detail = json.dumps({"code": problem.code, "message": message, "hint": hint[:ERROR_CHARS_MAX]})
    context.set_trailing_metadata(((ERROR_KEY, detail.encode()),))
    status = next(status for kind, status in _STATUS if isinstance(problem, kind))
    context.abort(status, f"[{problem.code}] {message[:1000]}")


@contextmanager
def _answering(context: grpc.ServicerContext, method: str) -> Iterator[None]:
    """Product errors go to the caller as they are; a fault of ours is logged here and named there."""
    try:
        yield
    except FedschedError as problem:
        _abort(context, problem)
    except Exception:
        # `abort` and a caller that hung up end a handler by an exception, too.
        if context.is_active() and not context.code():  # type: ignore[attr-defined]
            _log.exception("%s failed", method)
            context.abort(grpc.StatusCode.INTERNAL, "the server failed at this; its log says where")
        raise


class _Errors(grpc.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    """Puts `_answering` around every method of a server, and lets only so many streams be read at once."""

    def __init__(self) -> None:
        self._free = threading.Semaphore(READERS_MAX)
        """Streams that can yet be given to readers."""

    def intercept_service(self, continuation: Callable[[Any], Any], handler_call_details: Any) -> Any:
        """Wrap the method's handler."""
        handler = continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method

        def one(request: Any, context: grpc.ServicerContext) -> Any:
            with _answering(context, method):
                return handler.unary_unary(request, context)

        def many(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
            if not handler.request_streaming:
                self._take_free(context)
            with _answering(context, method):
                yield from (handler.unary_stream or handler.stream_stream)(request, context)

        serializers = (handler.request_deserializer, handler.response_serializer)
        if handler.request_streaming:
            return grpc.stream_stream_rpc_method_handler(many, *serializers)
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(many, *serializers)
        return grpc.unary_unary_rpc_method_handler(one, *serializers)

    def _take_free(self, context: grpc.ServicerContext) -> None:
        """Take one of the streams until the call is over, or end the call."""
        if not self._free.acquire(blocking=False):
            why = f"{READERS_MAX} streams are being read, and no more are served at once"
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, why)
        if not context.add_callback(self._free.release):
            self._free.release()  # the caller has hung up meanwhile


def serve(listen: str, add_services: Callable[[grpc.Server], None], *, waiting_max: int = 0) -> tuple[grpc.Server, str]:
    """Start a server on `listen` (port 0: any free one); returns it and its real address.

    Args:
        waiting_max: calls that may wait while `STREAMS_MAX` are worked on; more are refused.

    Raises:
        AddressInUse: the port is taken.
    """
    server = grpc.server(
        ThreadPoolExecutor(STREAMS_MAX, thread_name_prefix="rpc"),
        interceptors=[_Errors()],
        options=_SERVER_OPTIONS,
        maximum_concurrent_rpcs=STREAMS_MAX + waiting_max,
    )
    add_services(server)
    try:
        port = server.add_insecure_port(listen)
    except RuntimeError as problem:
        raise AddressInUse(
            f"cannot listen on {listen}: another process has this address, or it is not one of this machine's",
            "stop that process (`fedsched down` if it is ours) or choose another port",
        ) from problem
    server.start()
    return server, f"{listen.rsplit(':', 1)[0]}:{port}"


def parent_of(context: grpc.ServicerContext) -> str:
    """The caller's traceparent; empty if it sent none."""
    return next((str(value) for key, value in context.invocation_metadata() if key == TRACE_KEY), "")


class JobsClient:
    """The Jobs service for Python callers: records in, records out, product errors raised as they were there.

    Args:
        address: host:port of a controller.
        timeout_s: deadline of every call that is not a stream.
    """

    def __init__(self, address: str, timeout_s: float = 15.0) -> None:
        self._address = address
        self._timeout_s = timeout_s
        self._channel = grpc.insecure_channel(address, options=channel_options(address))
        self._stub = pb_grpc.JobsStub(self._channel)

    def submit(self, spec: JobSpec, idempotency_key: str = "", dry_run: bool = False) -> Submission:
        """Submit the job; its id, submission time and place come back with it."""
        request = pb.SubmitRequest(spec=to_message(spec, pb.JobSpec), idempotency_key=idempotency_key, dry_run=dry_run)
        return from_message(Submission, self._one(self._stub.Submit, request))

    def get(self, job_id: JobId) -> Job:
        """The job as it is now."""
        return from_message(Job, self._one(self._stub.Get, pb.GetRequest(job_id=job_id)))

    def list(self, live_only: bool = False, limit: int = 0) -> tuple[Job, ...]:
        """Jobs in the order of submission, finished ones too; the newest `limit` of them if it is not 0."""
        reply = self._one(self._stub.List, pb.ListRequest(live_only=live_only, limit=limit))
        return tuple(from_message(Job, job) for job in reply.jobs)

    def watch(self, job_id: JobId | None = None, timeout_s: float | None = None) -> Iterator[Job]:
        """The jobs as they are, then each again when it changes; with an id until that job is over.

        Raises:
            TimedOut: it went on for `timeout_s`.
        """
        for message in self._many(self._stub.Watch, pb.WatchRequest(job_id=job_id or ""), timeout_s):
            yield from_message(Job, message)

    def cancel(self, job_id: JobId) -> Job:
        """Order the job's end."""
        return from_message(Job, self._one(self._stub.Cancel, pb.CancelRequest(job_id=job_id)))

    def explain(self, job_id: JobId) -> Explanation:
        """Why the job is where it is."""
        return from_message(Explanation, self._one(self._stub.Explain, pb.ExplainRequest(job_id=job_id)))

    def events(self, job_id: JobId | None = None, follow: bool = False) -> Iterator[Transition]:
        """Transitions of one job or all, in order."""
        for message in self._many(self._stub.Events, pb.EventsRequest(job_id=job_id or "", follow=follow)):
            yield from_message(Transition, message)

    def logs(self, job_id: JobId, follow: bool = False, read: Mapping[str, int] | None = None) -> Iterator[LogPiece]:
        """What the job's tasks printed; of each file in `read` what comes after so many bytes."""
        begun = b""
        for message in self._many(self._stub.Logs, pb.LogsRequest(job_id=job_id, follow=follow, read=read)):
            begun += message.data
            # Of a piece that breaks off nothing is shown: it comes again.
            if not message.partial:
                yield LogPiece(begun, message.file, message.offset)
                begun = b""

    def clusters(self) -> tuple[ClusterView, ...]:
        """All known clusters by name."""
        reply = self._one(self._stub.Clusters, pb.ClustersRequest())
        return tuple(from_message(ClusterView, cluster) for cluster in reply.clusters)

    def rounds(self, limit: int = 0) -> tuple[RoundRecord, ...]:
        """The aggregator's round records, oldest first; the newest `limit` of them if it is not 0."""
        reply = self._one(self._stub.Rounds, pb.RoundsRequest(limit=limit))
        return tuple(_record(RoundRecord, record) for record in reply.rounds)

    def policies(self, name: str = "") -> tuple[PolicyVersion, ...]:
        """Stored policy versions by name and version."""
        reply = self._one(self._stub.Policies, pb.PoliciesRequest(name=name))
        return tuple(
            PolicyVersion(item.name, item.version, item.active, _record(PolicyRecord, item.record))
            for item in reply.policies
        )

    def promote(self, cluster: str, version: VersionName, by: str, why: str = "") -> Promotion:
        """Order that this version decide in a cluster; `promotions` tells what becomes of it."""
        request = pb.PromoteRequest(cluster=cluster, version=to_message(version, pb.VersionName), by=by, why=why)
        return _record(Promotion, self._one(self._stub.Promote, request).promotion)

    def rollback(self, cluster: str, by: str, why: str = "") -> Promotion:
        """Order that what decided before decides again."""
        request = pb.RollbackRequest(cluster=cluster, by=by, why=why)
        return _record(Promotion, self._one(self._stub.Rollback, request).promotion)

    def promotions(self, cluster: str) -> tuple[Promotion, ...]:
        """A cluster's orders, oldest first."""
        reply = self._one(self._stub.Promotions, pb.PromotionsRequest(cluster=cluster))
        return tuple(_record(Promotion, item) for item in reply.promotions)

    def shadow(self, cluster: str, version: VersionName | None, by: str, promote: bool = False) -> Candidate | None:
        """Have this version run in a cluster's shadow; None ends what does."""
        wanted = to_message(version, pb.VersionName) if version is not None else None
        reply = self._one(self._stub.Shadow, pb.ShadowRequest(cluster=cluster, version=wanted, promote=promote, by=by))
        return _record(Candidate, reply.candidate) if reply.HasField("candidate") else None

    def comparisons(self, cluster: str = "") -> tuple[Comparison, ...]:
        """How candidates stand, by cluster."""
        reply = self._one(self._stub.Comparisons, pb.ComparisonsRequest(cluster=cluster))
        return tuple(_record(Comparison, item) for item in reply.comparisons)

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()

    def __enter__(self) -> JobsClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _one(self, method: Any, request: Message) -> Any:
        try:
            return method(request, timeout=self._timeout_s, metadata=_metadata())
        except grpc.RpcError as problem:
            raise self._error(problem) from problem

    def _many(self, method: Any, request: Message, timeout_s: float | None = None) -> Iterator[Any]:
        stream = method(request, timeout=timeout_s, metadata=_metadata())
        try:
            yield from stream
        except grpc.RpcError as problem:
            raise self._error(problem) from problem
        finally:
            stream.cancel()

    def _error(self, problem: grpc.RpcError) -> FedschedError:
        return error_of(problem, f"the controller at {self._address}")


def _plain(value: Any) -> Any:
    """A `Struct` knows only floating-point numbers; whole ones become integers again."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _record(kind: type[T], message: Message) -> T:
    return codec.from_plain(kind, _plain(MessageToDict(message)))


def _metadata() -> tuple[tuple[str, str], ...]:
    parent = tracing.traceparent()
    return (("fedsched-version", __version__), *(((TRACE_KEY, parent),) if parent else ()))


def error_of(problem: grpc.RpcError, server: str) -> FedschedError:
    """The product error behind a failed call to `server` (a phrase that names it)."""
    call: Any = problem
    for key, value in call.trailing_metadata() or ():
        if key == ERROR_KEY:
            detail = json.loads(value)
            kind = _kinds().get(detail["code"], FedschedError)
            return kind(detail["message"], detail["hint"])
    code = call.code()
    if code is grpc.StatusCode.UNAVAILABLE:
        return Unreachable(
            f"{server} does not answer", "start it (`fedsched up`), or name another with --server or FEDSCHED_SERVER"
        )
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return TimedOut(f"{server} did not answer in time", "try again; its log may say what it waits for")
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return VersionSkew(
            f"{server} does not know this call; this side is fedsched {__version__}",
            "upgrade the controller, or check that the address is a controller's",
        )
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return Unreachable(f"{server} is busy: {call.details()}", "try again in a moment")
    return FedschedError(f"{server} failed: {call.details()}", "read the controller's log")
