"""The agent's end of the stream to the aggregator: answers rounds, takes policies, comes back by itself."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
from flwr.app import Message

from fedsched import tracing
from fedsched.adapters import flower, flower_client, rpc
from fedsched.federation.source import WIRE_VERSION, GradientSource, Hello, PolicyOffer
from fedsched.pb import federation_pb2 as pb
from fedsched.pb import federation_pb2_grpc as pb_grpc
from fedsched.runtime.backoff import Backoff

_log = logging.getLogger(__name__)

REPORT_EVERY_S = 1.0
"""How often the hello is looked at anew; it is sent only when it changed."""
BACKOFF_S = (0.2, 5.0)
"""First and longest pause before the aggregator is called again."""
BACKOFF_REFUSED_S = 30.0
"""After a refusal that only people can resolve, by another version or configuration."""
LASTED_S = 10.0
"""After a stream that lived this long the backoff starts from its minimum."""
OUTGOING_MAX = 16
"""Messages that may wait for a slow aggregator; with more the stream is ended, and begun anew."""


class _Session:
    """One stream: what is to be sent on it, and whether it is over."""

    def __init__(self) -> None:
        self.outgoing: queue.Queue[pb.AgentMessage | None] = queue.Queue(OUTGOING_MAX)
        self.over = threading.Event()
        self.welcomed = False
        self.refusal: pb.Refusal | None = None
        self.call: Any = None

    def send(self, message: pb.AgentMessage) -> None:
        """Queue a message; what does not fit ends the stream, for it is stuck."""
        try:
            self.outgoing.put_nowait(message)
        except queue.Full:
            self.end()

    def end(self) -> None:
        self.over.set()
        if self.call is not None:
            self.call.cancel()
        with contextlib.suppress(queue.Full):
            self.outgoing.put_nowait(None)  # Wakes the sender at once; it also looks every second.


class FederationClient:
    """Takes part in rounds as long as it is open, whether or not there is an aggregator to talk to.

    It starts at once, in threads of its own; nothing here ever blocks the agent. A gradient is computed in a second
    thread, so a slow learner delays no policy; while it computes, further rounds are declined.

    Args:
        address: host:port of the aggregator.
        hello: who the agent is now; called from the client's threads, often, so it must be quick.
        learner: gives gradients; called from one thread of the client's.
        on_policy: takes an offered version; returns None, or why it does not run it. Called from the stream's thread.
        on_requested: takes the answer to a `request`: the version, and why there is none where there is none. Called
            from the stream's thread.
    """

    def __init__(
        self,
        address: str,
        *,
        hello: Callable[[], Hello],
        learner: GradientSource,
        on_policy: Callable[[PolicyOffer], str | None],
        on_requested: Callable[[PolicyOffer, str], None] = lambda offer, missing: None,
    ) -> None:
        self._address = address
        self._hello = hello
        self._on_policy = on_policy
        self._on_requested = on_requested
        self._wanted: set[int] = set()
        """Versions that were asked for and have not come; asked for again on every new stream."""
        self._app = flower_client.client_app(hello, learner)
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._session: _Session | None = None
        self._busy = False
        """A gradient is being computed, or waits to be."""
        self._work: queue.Queue[tuple[_Session, Message] | None] = queue.Queue()
        """Never more than one message, because `_busy` is set before; `None` ends the thread."""
        self._told = ""
        self._threads = [
            threading.Thread(target=self._keep_connected, name="federation-client", daemon=True),
            threading.Thread(target=self._compute, name="federation-gradient", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def connected(self) -> bool:
        """Whether the aggregator has welcomed this agent and the stream lives."""
        session = self._session
        return session is not None and session.welcomed and not session.over.is_set()

    def request(self, version: int) -> None:
        """Ask for a version of the policy; does not wait, and is not forgotten while there is no aggregator."""
        with self._lock:
            self._wanted.add(version)
            session = self._session
        if session is not None and session.welcomed and not session.over.is_set():
            session.send(_request(version))

    def close(self) -> None:
        """Leave the federation. Returns at once even when a gradient is being computed; that one is given up."""
        self._closing.set()
        with self._lock:
            if self._session is not None:
                self._session.end()
        self._work.put(None)
        self._threads[0].join(2)

    def _keep_connected(self) -> None:
        backoff = Backoff(*BACKOFF_S)
        while not self._closing.is_set():
            began_s = time.monotonic()
            refusal = self._hold_stream()
            if time.monotonic() - began_s >= LASTED_S:
                backoff.reset()
            refused = refusal is not None and refusal.code in (pb.Refusal.VERSION_SKEW, pb.Refusal.OTHER_POLICY)
            self._closing.wait(BACKOFF_REFUSED_S if refused else backoff.pause_s())

    def _hold_stream(self) -> pb.Refusal | None:
        """Connect and serve the stream until it ends; returns the refusal if it ended by one."""
        session = _Session()
        with grpc.insecure_channel(self._address, options=rpc.channel_options(self._address)) as channel:
            try:
                with self._lock:
                    if self._closing.is_set():
                        return None
                    self._session = session
                    session.call = pb_grpc.FederationStub(channel).Connect(self._messages(session))
                for message in session.call:
                    self._take(session, message)
                self._tell(f"the aggregator at {self._address} closed the stream")
            except grpc.RpcError as problem:
                if not self._closing.is_set():
                    self._tell(f"no aggregator at {self._address}: {rpc.error_of(problem, 'it').message}")
            except ValueError as problem:
                self._tell(f"the aggregator at {self._address} sent what cannot be read: {problem}")
            finally:
                session.end()
        return session.refusal

    def _messages(self, session: _Session) -> Iterator[pb.AgentMessage]:
        """What goes to the aggregator: the hello first and whenever it changed, and what was queued."""
        said: Hello | None = None
        while not session.over.is_set():
            now = self._hello()
            if now != said:
                said = now
                yield _hello_message(now)
            try:
                message = session.outgoing.get(timeout=REPORT_EVERY_S)
            except queue.Empty:
                continue
            if message is not None:
                yield message

    def _take(self, session: _Session, message: pb.ServerMessage) -> None:
        kind = message.WhichOneof("body")
        if kind == "welcome":
            session.welcomed = True
            self._told = ""
            with self._lock:
                wanted = sorted(self._wanted)
            for version in wanted:
                session.send(_request(version))
            _log.info("taking part in the rounds of %s (fedsched %s)", self._address, message.welcome.server_version)
        elif kind == "refusal":
            session.refusal = message.refusal
            hint = f"; try: {message.refusal.hint}" if message.refusal.hint else ""
            self._tell(f"the aggregator at {self._address} refused this agent: {message.refusal.why}{hint}")
        elif kind == "request":
            self._accept(session, flower.from_bytes(message.request))
        elif kind == "policy_offer":
            self._consider(session, message.policy_offer)
        elif kind == "requested_policy":
            self._receive(message.requested_policy)
        elif kind == "update_rejected":
            told = message.update_rejected
            _log.warning("round %d: what this cluster gave does not count: %s", told.round, told.why)

    def _receive(self, answer: pb.RequestedPolicy) -> None:
        with self._lock:
            known = answer.policy.version in self._wanted
            self._wanted.discard(answer.policy.version)
        if known:
            self._on_requested(_offer(answer.policy), answer.missing)

    def _accept(self, session: _Session, request: Message) -> None:
        with self._lock:
            busy, self._busy = self._busy, True
        if not busy:
            self._work.put((session, request))
            return
        why = "it still computes the gradient of an earlier round"
        session.send(_reply(flower_client.decline(request, self._hello().term, why)))

    def _compute(self) -> None:
        context = flower.context(flower.node_of(self._hello().cluster))
        while (work := self._work.get()) is not None:
            session, request = work
            reply = flower_client.answer(self._app, request, context)
            with self._lock:
                self._busy = False
            # If the stream has ended meanwhile, the round has gone on without this agent.
            if not session.over.is_set():
                session.send(_reply(reply))

    def _consider(self, session: _Session, offered: pb.PolicyOffer) -> None:
        offer = _offer(offered)
        attributes: dict[str, tracing.Value] = {"cluster": self._hello().cluster, "version": offer.version}
        with tracing.span("policy.take", parent=offer.traceparent, attributes=attributes) as span:
            try:
                refused = self._on_policy(offer)
            except Exception as problem:  # the agent's own code; the federation goes on without it
                _log.exception("policy %s version %d could not be taken", offer.name, offer.version)
                refused = f"the agent failed at it: {problem!r}"
            span.set_attribute("refused", refused or "")
        answer = pb.PolicyAnswer(version=offer.version, refused=refused or "")
        session.send(pb.AgentMessage(policy_answer=answer))

    def _tell(self, news: str) -> None:
        """Log what happened to the stream, once as long as it stays the same."""
        if news != self._told:
            self._told = news
            _log.warning("%s; scheduling goes on with the policy at hand", news)


def _offer(offered: pb.PolicyOffer) -> PolicyOffer:
    return PolicyOffer(offered.name, offered.version, offered.digest, offered.checkpoint, offered.traceparent)


def _request(version: int) -> pb.AgentMessage:
    return pb.AgentMessage(policy_request=pb.PolicyRequest(version=version))


def _hello_message(hello: Hello) -> pb.AgentMessage:
    return pb.AgentMessage(
        hello=pb.AgentHello(
            wire_version=WIRE_VERSION,
            agent_version=hello.agent_version,
            cluster=hello.cluster,
            term=hello.term,
            policy=hello.policy,
            policy_version=hello.policy_version,
            samples=hello.samples,
        )
    )


def _reply(message: Message) -> pb.AgentMessage:
    return pb.AgentMessage(reply=flower.to_bytes(message))
