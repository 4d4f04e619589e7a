"""Holds the rounds while this process leads: the live edges of the rounds' loop, over Flower, gRPC and etcd."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from msgspec.structs import replace

from fedsched import tracing
from fedsched.adapters import flower
from fedsched.adapters.federation_server import FederationServer
from fedsched.adapters.flower_strategy import GradientStrategy
from fedsched.aggregator.combined import combined
from fedsched.aggregator.policies import PolicyStore
from fedsched.config import AggregatorConfig
from fedsched.core.ids import ClusterName
from fedsched.core.rounds import (
    DeadlinePassed,
    MemberJoined,
    MemberLeft,
    MemberReported,
    NewWeights,
    PolicyRecord,
    RefuseMember,
    RejectUpdate,
    RequestUpdates,
    RoundRecord,
    Rounds,
    TimePassed,
    UpdateArrived,
    UpdateWithheld,
)
from fedsched.errors import StoreUnavailable
from fedsched.federation.averaging import Inspection, Update
from fedsched.federation.loop import BaseVersion, RoundLoop
from fedsched.federation.optimiser import ServerOptimiser
from fedsched.federation.source import Arrays, Hello, PolicyOffer
from fedsched.runtime.backoff import Backoff

if TYPE_CHECKING:
    from opentelemetry.trace import Span

_log = logging.getLogger(__name__)

TICK_S = 0.5
"""How often the core hears of the time when nothing happens."""
BACKOFF_S = (0.2, 5.0)
"""First and longest pause between attempts to save a round while etcd is away."""


class Aggregator:
    """Serves the agents' streams from construction to `close`, and holds rounds in `run`: the live ports of the loop.

    The loop's lock also guards the agents' connections. What takes long happens in `run`'s thread without it.

    Args:
        config: the process's configuration.
        policies: the versions and rounds so far.

    Raises:
        AddressInUse: the port is taken.
        CorruptCheckpoint: there is no sound version to start from.
        StoreUnavailable: etcd does not answer.
        Conflict: another process leads meanwhile.
    """

    def __init__(self, config: AggregatorConfig, policies: PolicyStore) -> None:
        what = combined(config)
        standing = policies.load(what.first)
        self._policies = policies
        self._started_s = time.time() - time.monotonic()
        rules = config.rounds
        samples_min = what.combining.samples_min(rules.samples_min)
        core = Rounds(
            rules.rules(samples_min),
            policy=config.policy.name,
            version=standing.active.record.version,
            version_last=standing.version_last,
            number_last=standing.number_last,
            now_s=self.now_s(),
        )
        self._loop = RoundLoop(core, standing.active, what.combining, self)
        self._strategy = GradientStrategy(
            self,
            flower.node_of,
            batch_size=rules.batch_size,
            samples_min=samples_min,
            seed=config.policy.seed,
        )
        self._span: Span | None = None
        """The open round's span."""
        self._closing = threading.Event()
        self._stir = threading.Event()
        with self._loop.lock:  # An agent that connects at once waits until the server is in its place.
            self._server = FederationServer(config.listen, config.policy.name, self, self._loop.lock)
        _log.info(
            "serving %s; policy %s version %d, %d rounds so far",
            self.address,
            config.policy.name,
            core.version,
            standing.number_last,
        )

    @property
    def address(self) -> str:
        """Where agents connect, host:port."""
        return self._server.address

    @property
    def arrays(self) -> Arrays:
        """Weights of the version in force."""
        return self._loop.arrays

    def inspect(self, update: Arrays) -> Inspection:
        """Look at an update for these weights."""
        return self._loop.inspect(update)

    def now_s(self) -> float:
        """Unix time that never jumps: as it was at the start, moved on by the monotonic clock."""
        return self._started_s + time.monotonic()

    def run(self) -> None:
        """Hold rounds until `close`.

        Raises:
            Conflict: another process leads meanwhile.
        """
        while not self._closing.is_set():
            self._loop.handle(TimePassed(self.now_s()))
            self._stir.wait(TICK_S)
            self._stir.clear()

    def close(self) -> None:
        """End `run`, the open round and the streams; a round that is not saved yet is forgotten. From any thread."""
        self._closing.set()
        self._stir.set()
        self._server.close()

    # What the agents' streams bring; the lock is held.

    def joined(self, hello: Hello) -> str:
        """An agent wants to take part; returns why it may not, or nothing."""
        commands = self._loop.handle(MemberJoined(hello.cluster, hello.term, hello.policy_version, hello.samples))
        self._stir.set()
        return next((command.why for command in commands if isinstance(command, RefuseMember)), "")

    def reported(self, hello: Hello) -> None:
        """A connected agent told its numbers again."""
        self._loop.handle(MemberReported(hello.cluster, hello.term, hello.policy_version, hello.samples))
        self._stir.set()

    def left(self, cluster: ClusterName) -> None:
        """An agent's stream ended."""
        self._loop.handle(MemberLeft(cluster))

    def answered_offer(self, cluster: ClusterName, version: int, refused: str) -> None:
        """An agent took a policy version, or did not and says why."""
        if refused:
            _log.warning("cluster %s does not run version %d: %s", cluster, version, refused)
        else:
            _log.info("cluster %s runs version %d", cluster, version)

    def version(self, number: int) -> PolicyOffer:
        """A version that an agent asks for.

        Raises:
            NotFound: there is none of that number any more.
            CorruptCheckpoint: its file is damaged or gone.
            CorruptRecord: its record cannot be read.
            StoreUnavailable: etcd does not answer.
        """
        found = self._policies.read(number)
        return PolicyOffer(found.record.name, number, found.record.digest, found.data)

    # What the strategy brings, in `run`'s thread.

    def answered(self, event: UpdateArrived | UpdateWithheld, update: Update | None, traceparent: str) -> None:
        """An asked agent answered."""
        if self._span is not None and traceparent:
            tracing.link(self._span, traceparent)
        self._loop.answered(event, update)

    def deadline_passed(self, event: DeadlinePassed) -> None:
        """No more answers come: the time is over, or all have come."""
        # When this process is ending the agents were cut off by us; that is no fact to record about them.
        if not self._closing.is_set():
            self._loop.handle(event)

    # What the rounds' loop orders.

    def ask(self, request: RequestUpdates) -> None:
        """Hold the round over Flower; returns when it is over."""
        attributes = {"round": request.number, "base_version": request.base_version, "asked": len(request.clusters)}
        with tracing.span("round", attributes=attributes) as span:
            self._span = span
            self._strategy.prepare(request, tracing.traceparent(span))
            arrays = flower.to_record(self.arrays)
            self._strategy.start(self._server.grid, arrays, num_rounds=1, timeout=request.deadline_s)
            self._span = None

    def rejected(self, command: RejectUpdate) -> None:
        """Say so, here and to the cluster."""
        self._server.reject(command.cluster, command.number, command.why)
        _log.warning("round %d: the update of %s is rejected: %s", command.number, command.cluster, command.why)

    def write(self, version: int, digest: str, data: bytes, optimiser: ServerOptimiser) -> NewWeights:
        """Make a version's files durable.

        Raises:
            OSError: the disk is full, or the like.
        """
        return self._policies.write(version, digest, data, optimiser)

    def save(self, record: RoundRecord, policy: PolicyRecord | None) -> bool:
        """Save, waiting as long as etcd is away: without it there is nothing else to do. False when closing.

        Raises:
            Conflict: another process leads meanwhile.
        """
        if self._span is not None:
            self._span.set_attributes({"outcome": record.outcome.value, "version": record.version})
            record = replace(record, traceparent=tracing.traceparent(self._span))
        if not self._save_patiently(record, policy):
            return False
        _log.info(
            "round %d: %s, version %d; counted: %s; absent: %s",
            record.number,
            record.outcome.value,
            record.version,
            ", ".join(given.cluster for given in record.contributions) or "nobody",
            "; ".join(f"{gone.cluster} ({gone.why})" for gone in record.absent) or "nobody",
        )
        if record.message:
            _log.error("round %d made no version: %s", record.number, record.message)
        return True

    def _save_patiently(self, record: RoundRecord, policy: PolicyRecord | None) -> bool:
        backoff = Backoff(*BACKOFF_S)
        while True:
            try:
                self._policies.save(record, policy)
                return True
            except StoreUnavailable as problem:
                _log.warning("round %d waits to be saved: %s", record.number, problem.message)
            if self._closing.wait(backoff.pause_s()):
                return False

    def offer(self, version: BaseVersion, clusters: tuple[ClusterName, ...]) -> None:
        """Send a version to these clusters."""
        record = version.record
        offer = PolicyOffer(record.name, record.version, record.digest, version.data, tracing.traceparent())
        self._server.offer(offer, clusters)

    @contextmanager
    def stage(self, name: str, attributes: Mapping[str, tracing.Value]) -> Iterator[None]:
        """A span around what takes long."""
        with tracing.span(name, attributes=attributes):
            yield
