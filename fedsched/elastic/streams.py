"""The parameter servers' service over gRPC; the streams of tensors in it go around the generated code's copies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

import grpc

from fedsched.pb import training_pb2 as pb

_SERVICE = "fedsched.v1.Parameters"


class Parameters(Protocol):
    """What a parameter server does for workers and other servers; see the service of this name."""

    def Put(self, request_iterator: Iterator[bytes], context: grpc.ServicerContext) -> pb.Done:
        """Fill a buffer."""

    def Get(self, request: pb.Pieces, context: grpc.ServicerContext) -> Iterator[bytes]:
        """The values of blocks."""

    def Fill(self, request: pb.Done, context: grpc.ServicerContext) -> pb.Done:
        """The chief's initial values are there."""

    def Pull(self, request: pb.PullRequest, context: grpc.ServicerContext) -> pb.Stepped:
        """Wait for a version."""

    def Exchange(self, request: pb.Push, context: grpc.ServicerContext) -> pb.Stepped:
        """One worker's part of a step."""

    def Hand(self, request: pb.Handover, context: grpc.ServicerContext) -> pb.Done:
        """Blocks are there from another server."""


def _as_it_is(message: bytes) -> bytes:
    return message


def serve(servicer: Parameters, endpoint: grpc.Server) -> None:
    """Add the service to a server; `Put` and `Get` deal in the bytes of `Part` messages."""
    handlers = {
        name: grpc.unary_unary_rpc_method_handler(
            getattr(servicer, name), request.FromString, lambda reply: reply.SerializeToString()
        )
        for name, request in (
            ("Fill", pb.Done),
            ("Pull", pb.PullRequest),
            ("Exchange", pb.Push),
            ("Hand", pb.Handover),
        )
    }
    handlers["Put"] = grpc.stream_unary_rpc_method_handler(servicer.Put, _as_it_is, pb.Done.SerializeToString)
    handlers["Get"] = grpc.unary_stream_rpc_method_handler(servicer.Get, pb.Pieces.FromString, _as_it_is)
    endpoint.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))


def put(channel: grpc.Channel, stream: Iterable[bytes], timeout_s: float) -> None:
    """Send a stream of `Part` messages and wait until it is stored.

    Raises:
        grpc.RpcError: the server does not answer.
    """
    call = channel.stream_unary(f"/{_SERVICE}/Put", _as_it_is, pb.Done.FromString)
    call(iter(stream), timeout=timeout_s)


def get(channel: grpc.Channel, pieces: pb.Pieces, timeout_s: float) -> Iterator[bytes]:
    """Read a stream of `Part` messages.

    Raises:
        grpc.RpcError: the server does not answer.
    """
    call = channel.unary_stream(f"/{_SERVICE}/Get", pb.Pieces.SerializeToString, _as_it_is)
    yield from call(pieces, timeout=timeout_s)
