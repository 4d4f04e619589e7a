"""The aggregator's end of the agents' streams: who is connected, what goes to them, what comes from them."""

from __future__ import annotations

import logging
import re
import threading
from collections import deque
from collections.abc import Iterator
from typing import Protocol

import grpc

from fedsched import __version__
from fedsched.adapters import rpc
from fedsched.adapters.flower import node_of
from fedsched.adapters.flower_grid import StreamGrid
from fedsched.core.ids import NAME_PATTERN, ClusterName
from fedsched.errors import FedschedError, StoreUnavailable
from fedsched.federation.source import WIRE_VERSION, Hello, PolicyOffer
from fedsched.pb import federation_pb2 as pb
from fedsched.pb import federation_pb2_grpc as pb_grpc

_log = logging.getLogger(__name__)

HELLO_S = 10.0
"""A stream on which no hello came by then is closed."""
OUTGOING_MAX = 16
"""Messages that may wait for a slow agent; with more its stream is closed, and it connects again."""


_NAME = re.compile(NAME_PATTERN)


class Membership(Protocol):
    """Whom the server tells about the agents. Answers at once: all but `version` are called with the server's lock."""

    def joined(self, hello: Hello) -> str:
        """An agent wants to take part; returns why it may not, or nothing."""

    def reported(self, hello: Hello) -> None:
        """A connected agent told its numbers again."""

    def answered_offer(self, cluster: ClusterName, version: int, refused: str) -> None:
        """An agent took a policy version, or did not and says why."""

    def version(self, number: int) -> PolicyOffer:
        """A version that an agent asks for.

        Raises:
            FedschedError: there is none, or its file cannot be used.
        """

    def left(self, cluster: ClusterName) -> None:
        """An agent's stream ended."""


class Connection:
    """One agent's stream: a bounded queue of what is to be sent, and its end."""

    def __init__(self) -> None:
        self.cluster: ClusterName | None = None
        """Set by the first hello that was welcomed."""
        self._change = threading.Condition()
        self._outgoing: deque[pb.ServerMessage] = deque()
        self._closed = False

    def send(self, message: pb.ServerMessage) -> bool:
        """Queue a message; False when the stream is closed, or is closed now because its agent does not read."""
        with self._change:
            if len(self._outgoing) >= OUTGOING_MAX:
                self._closed = True
                self._outgoing.clear()
            if not self._closed:
                self._outgoing.append(message)
            self._change.notify_all()
            return not self._closed

    def close(self) -> None:
        """End the stream after what is queued."""
        with self._change:
            self._closed = True
            self._change.notify_all()

    def messages(self) -> Iterator[pb.ServerMessage]:
        """What is to be sent, until the stream is closed."""
        while True:
            with self._change:
                # The first message is the answer to the hello, so only it has a deadline.
                limit_s = HELLO_S if self.cluster is None else None
                if not self._change.wait_for(lambda: self._outgoing or self._closed, limit_s):
                    return
                if not self._outgoing:
                    return
                message = self._outgoing.popleft()
            yield message


class FederationServer(pb_grpc.FederationServicer):
    """Serves the agents' streams and is the link under Flower's grid.

    Args:
        listen: host:port; port 0 takes a free one.
        policy: name of the policy; agents of another one are refused.
        membership: whom to tell.
        lock: guards the connections and is held while `membership` is told, so that whoever shares it sees
            both change together.

    Raises:
        AddressInUse: the port is taken.
    """

    def __init__(self, listen: str, policy: str, membership: Membership, lock: threading.RLock) -> None:
        self._policy = policy
        self._membership = membership
        self._lock = lock
        self._connections: dict[ClusterName, Connection] = {}
        self.grid = StreamGrid(self._send, self._node_ids)
        self._server, self.address = rpc.serve(
            listen, lambda server: pb_grpc.add_FederationServicer_to_server(self, server)
        )

    def offer(self, offer: PolicyOffer, clusters: tuple[ClusterName, ...]) -> None:
        """Send a policy version to these clusters as far as they are connected; does not wait."""
        message = pb.ServerMessage(policy_offer=_offer_message(offer))
        with self._lock:
            for cluster in clusters:
                connection = self._connections.get(cluster)
                if connection is not None:
                    connection.send(message)

    def reject(self, cluster: ClusterName, number: int, why: str) -> None:
        """Tell a cluster that its update does not count in a round, as far as it is connected; does not wait."""
        with self._lock:
            connection = self._connections.get(cluster)
            if connection is not None:
                connection.send(pb.ServerMessage(update_rejected=pb.UpdateRejected(round=number, why=why)))

    def close(self) -> None:
        """End all streams and free the port."""
        self.grid.close()
        with self._lock:
            for connection in self._connections.values():
                connection.close()
        self._server.stop(grace=0.5).wait(5)

    def Connect(
        self, request_iterator: Iterator[pb.AgentMessage], context: grpc.ServicerContext
    ) -> Iterator[pb.ServerMessage]:
        """One agent's stream: the calling thread sends, another one receives."""
        connection = Connection()
        context.add_callback(connection.close)
        threading.Thread(
            target=self._receive, args=(connection, request_iterator), name="federation-receive", daemon=True
        ).start()
        yield from connection.messages()

    def _receive(self, connection: Connection, messages: Iterator[pb.AgentMessage]) -> None:
        try:
            for message in messages:
                if not self._take(connection, message):
                    break
        except grpc.RpcError:
            pass  # The stream was cut; what follows is the same as at its orderly end.
        except ValueError as problem:
            _log.warning("the stream of %s is closed: %s", connection.cluster or "an unknown agent", problem)
        finally:
            self._leave(connection)
            connection.close()

    def _take(self, connection: Connection, message: pb.AgentMessage) -> bool:
        """Handle one message; False when the stream is to end."""
        kind = message.WhichOneof("body")
        if kind == "hello":
            return self._greet(connection, message.hello)
        if connection.cluster is None:
            raise ValueError(f"it began with {kind or 'an unknown message'}; a hello was expected")
        if kind == "reply":
            self.grid.deliver(node_of(connection.cluster), message.reply)
        elif kind == "policy_answer":
            with self._lock:
                if self._connections.get(connection.cluster) is connection:
                    self._membership.answered_offer(
                        connection.cluster, message.policy_answer.version, message.policy_answer.refused
                    )
        elif kind == "policy_request":
            answer = self._requested(message.policy_request.version)
            if answer is not None:
                connection.send(pb.ServerMessage(requested_policy=answer))
        return True  # What a newer agent says beyond this is not for us.

    def _requested(self, version: int) -> pb.RequestedPolicy | None:
        try:
            return pb.RequestedPolicy(policy=_offer_message(self._membership.version(version)))
        except StoreUnavailable as problem:
            # No answer is none: the agent asks again when it connects anew.
            _log.warning("version %d cannot be looked up: %s", version, problem.message)
            return None
        except FedschedError as problem:
            return pb.RequestedPolicy(
                policy=pb.PolicyOffer(name=self._policy, version=version), missing=problem.message
            )

    def _greet(self, connection: Connection, said: pb.AgentHello) -> bool:
        refusal = _skew(said) or self._other_policy(said)
        if refusal is not None:
            return self._refuse(connection, said, refusal)
        if not _NAME.fullmatch(said.cluster) or connection.cluster not in (None, said.cluster):
            raise ValueError(f"it is of a cluster {said.cluster[:100]!r}, which is no name or not the one of before")
        hello = Hello(
            ClusterName(said.cluster), said.term, said.agent_version, said.policy, said.policy_version, said.samples
        )
        with self._lock:
            previous = self._connections.get(hello.cluster)
            if previous is connection:
                self._membership.reported(hello)
                return True
            connection.cluster = hello.cluster
            self._connections[hello.cluster] = connection
            connection.send(pb.ServerMessage(welcome=pb.Welcome(wire_version=WIRE_VERSION, server_version=__version__)))
            why = self._membership.joined(hello)
            if why:
                self._restore(hello.cluster, previous)
        if why:
            hint = "stop this agent: another process has taken over its cluster"
            return self._refuse(connection, said, pb.Refusal(code=pb.Refusal.OLD_TERM, why=why, hint=hint))
        if previous is not None:
            self.grid.lose(node_of(hello.cluster), "the agent connected anew")
            why = f"a newer connection of cluster {hello.cluster} took this one's place"
            self._refuse(previous, said, pb.Refusal(code=pb.Refusal.REPLACED, why=why))
        _log.info("cluster %s takes part: term %d, policy version %d", said.cluster, said.term, said.policy_version)
        return True

    def _restore(self, cluster: ClusterName, previous: Connection | None) -> None:
        if previous is None:
            del self._connections[cluster]
        else:
            self._connections[cluster] = previous

    def _refuse(self, connection: Connection, said: pb.AgentHello, refusal: pb.Refusal) -> bool:
        _log.warning("cluster %s is refused: %s", said.cluster, refusal.why)
        connection.send(pb.ServerMessage(refusal=refusal))
        connection.close()
        return False

    def _other_policy(self, said: pb.AgentHello) -> pb.Refusal | None:
        if said.policy == self._policy:
            return None
        theirs = said.policy or "(none)"
        return pb.Refusal(
            code=pb.Refusal.OTHER_POLICY,
            why=f"the agent of {said.cluster} learns policy {theirs}; this aggregator combines {self._policy}",
            hint="set policy.name alike on both sides",
        )

    def _leave(self, connection: Connection) -> None:
        cluster = connection.cluster
        if cluster is None:
            return
        with self._lock:
            if self._connections.get(cluster) is not connection:
                return
            del self._connections[cluster]
            self._membership.left(cluster)
        self.grid.lose(node_of(cluster), "the connection was lost")
        _log.info("cluster %s left", cluster)

    def _send(self, node_id: int, data: bytes) -> bool:
        with self._lock:
            for cluster, connection in self._connections.items():
                if node_of(cluster) == node_id:
                    return connection.send(pb.ServerMessage(request=data))
        return False

    def _node_ids(self) -> list[int]:
        with self._lock:
            return sorted(node_of(cluster) for cluster in self._connections)


def _offer_message(offer: PolicyOffer) -> pb.PolicyOffer:
    return pb.PolicyOffer(
        name=offer.name,
        version=offer.version,
        digest=offer.digest,
        checkpoint=offer.checkpoint,
        traceparent=offer.traceparent,
    )


def _skew(said: pb.AgentHello) -> pb.Refusal | None:
    if said.wire_version == WIRE_VERSION:
        return None
    older = "agent" if said.wire_version < WIRE_VERSION else "aggregator"
    return pb.Refusal(
        code=pb.Refusal.VERSION_SKEW,
        why=(
            f"the agent of {said.cluster} (fedsched {said.agent_version}) speaks version {said.wire_version} of the "
            f"federation stream; this aggregator (fedsched {__version__}) speaks version {WIRE_VERSION}"
        ),
        hint=f"upgrade the {older}",
    )
