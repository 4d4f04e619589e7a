"""Holds the rounds while this process leads: the core decides, this carries out what it orders."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, assert_never

import numpy as np
from msgspec.structs import replace

from fedsched import tracing
from fedsched.adapters import flower
from fedsched.adapters.federation_server import FederationServer
from fedsched.adapters.flower_strategy import GradientStrategy
from fedsched.aggregator.policies import PolicyStore, Version
from fedsched.config import AggregatorConfig
from fedsched.core.ids import ClusterName
from fedsched.core.rounds import (
    Combine,
    Combined,
    CombineFailed,
    DeadlinePassed,
    MemberJoined,
    MemberLeft,
    MemberReported,
    OfferPolicy,
    PolicyRecord,
    RefuseMember,
    RejectUpdate,
    RequestUpdates,
    RoundCommand,
    RoundEvent,
    RoundRecord,
    RoundRules,
    Rounds,
    RoundSaved,
    SaveRound,
    TimePassed,
    UpdateArrived,
    UpdateWithheld,
)
from fedsched.errors import InvalidConfiguration, StoreUnavailable
from fedsched.federation.averaging import Update, trimmed_mean, weighted_mean
from fedsched.federation.optimiser import ServerOptimiser
from fedsched.federation.source import Arrays, Hello, PolicyOffer
from fedsched.policy.checkpoint import BUILTIN, Checkpoint

if TYPE_CHECKING:
    from opentelemetry.trace import Span

_log = logging.getLogger(__name__)

LEARNS = "dl2"
"""The policy that has weights to combine."""
TICK_S = 0.5
"""How often the core hears of the time when nothing happens."""
SAVE_BACKOFF_S = (0.2, 5.0)
"""First and longest pause between attempts to save a round while etcd is away."""


class Aggregator:
    """Serves the agents' streams from construction to `close`, and holds rounds in `run`.

    One lock guards the core and the agents' connections, so that a policy that is offered is always the one in force.
    What takes long, combining and saving, happens in `run`'s thread without it.

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
        first = BUILTIN if config.policy.checkpoint == "builtin" else Path(config.policy.checkpoint)
        standing = policies.load(first)
        self._config = config
        self._policies = policies
        self._active = standing.active
        self._started_s = time.time() - time.monotonic()
        rules = config.rounds
        self._rounds = Rounds(
            RoundRules(rules.interval_s, rules.quorum, rules.deadline_s, rules.samples_min, rules.norm_max),
            policy=config.policy.name,
            version=standing.active.record.version,
            version_last=standing.version_last,
            number_last=standing.number_last,
            now_s=self.now_s(),
        )
        self._strategy = GradientStrategy(self, flower.node_of, rules.batch_size, config.policy.seed)
        self._updates: dict[ClusterName, Update] = {}
        self._made: tuple[Checkpoint, bytes, ServerOptimiser] | None = None
        """What was combined and is not yet saved."""
        self._span: Span | None = None
        """The open round's span."""
        self._closing = threading.Event()
        self._stir = threading.Event()
        self._lock = threading.RLock()
        with self._lock:  # An agent that connects at once waits until the server is in its place.
            self._server = FederationServer(config.listen, config.policy.name, self, self._lock)
        _log.info(
            "serving %s; policy %s version %d, %d rounds so far",
            self.address,
            config.policy.name,
            self._rounds.version,
            standing.number_last,
        )

    @property
    def address(self) -> str:
        """Where agents connect, host:port."""
        return self._server.address

    @property
    def arrays(self) -> Arrays:
        """Weights of the version in force."""
        return self._active.checkpoint.arrays

    def now_s(self) -> float:
        """Unix time that never jumps: as it was at the start, moved on by the monotonic clock."""
        return self._started_s + time.monotonic()

    def run(self) -> None:
        """Hold rounds until `close`.

        Raises:
            Conflict: another process leads meanwhile.
        """
        while not self._closing.is_set():
            self._handle(TimePassed(self.now_s()))
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
        commands = self._handle(MemberJoined(hello.cluster, hello.term, hello.policy_version, hello.samples))
        self._stir.set()
        return next((command.why for command in commands if isinstance(command, RefuseMember)), "")

    def reported(self, hello: Hello) -> None:
        """A connected agent told its numbers again."""
        self._handle(MemberReported(hello.cluster, hello.term, hello.policy_version, hello.samples))
        self._stir.set()

    def left(self, cluster: ClusterName) -> None:
        """An agent's stream ended."""
        self._handle(MemberLeft(cluster))

    def answered_offer(self, cluster: ClusterName, version: int, refused: str) -> None:
        """An agent took a policy version, or did not and says why."""
        if refused:
            _log.warning("cluster %s does not run version %d: %s", cluster, version, refused)
        else:
            _log.info("cluster %s runs version %d", cluster, version)

    # What the strategy brings, in `run`'s thread.

    def answered(self, event: UpdateArrived | UpdateWithheld, update: Update | None, traceparent: str) -> None:
        """An asked agent answered."""
        if self._span is not None and traceparent:
            tracing.link(self._span, traceparent)
        if update is not None:
            self._updates[update.cluster] = update
        self._handle(event)

    def deadline_passed(self, event: DeadlinePassed) -> None:
        """No more answers come: the time is over, or all have come."""
        # When this process is ending the agents were cut off by us; that is no fact to record about them.
        if not self._closing.is_set():
            self._handle(event)

    def _handle(self, event: RoundEvent) -> list[RoundCommand]:
        with self._lock:
            commands = self._rounds.handle(event)
        for command in commands:
            self._carry_out(command)
        return commands

    def _carry_out(self, command: RoundCommand) -> None:
        match command:
            case RequestUpdates():
                self._hold(command)
            case RejectUpdate(number, cluster, why):
                _log.warning("round %d: the update of %s is rejected: %s", number, cluster, why)
            case Combine():
                self._handle(self._combine(command))
            case SaveRound():
                self._save(command)
            case OfferPolicy(_, clusters):
                self._offer(clusters)
            case RefuseMember():
                pass  # `joined` hands it to the server.
            case _:
                assert_never(command)

    def _hold(self, request: RequestUpdates) -> None:
        attributes = {"round": request.number, "base_version": request.base_version, "asked": len(request.clusters)}
        with tracing.span("round", attributes=attributes) as span:
            self._span = span
            self._updates = {}
            self._strategy.prepare(request, tracing.traceparent(span))
            arrays = flower.to_record(self.arrays)
            self._strategy.start(self._server.grid, arrays, num_rounds=1, timeout=request.deadline_s)
            self._updates = {}
            self._span = None

    def _combine(self, command: Combine) -> Combined | CombineFailed:
        rules = self._config.rounds
        with tracing.span("round.combine", attributes={"updates": len(command.accepted)}):
            updates = [self._updates[cluster] for cluster in command.accepted]
            if rules.combine == "weighted_mean":
                gradient = weighted_mean(updates)
            else:
                gradient = trimmed_mean(updates, rules.trim_fraction)
            arrays, optimiser = self._active.optimiser.step(self.arrays, gradient)
            if not all(bool(np.isfinite(array).all()) for array in arrays.values()):
                return CombineFailed(command.number, "the new weights hold NaN or infinity", self.now_s())
            made = {"round": command.number, "parent_version": self._active.record.version}
            story = made | {"contributors": ", ".join(command.accepted)}
            weights = dataclasses.replace(self._active.checkpoint, arrays=arrays, made=story)
            data = weights.to_bytes()
            try:
                written = self._policies.write(command.version, weights.digest, data, optimiser)
            except OSError as problem:
                return CombineFailed(command.number, f"the new weights cannot be written: {problem}", self.now_s())
            self._made = (weights, data, optimiser)
            return Combined(command.number, written, self.now_s())

    def _save(self, command: SaveRound) -> None:
        record = replace(command.record, traceparent=tracing.traceparent())
        attributes = {"outcome": record.outcome.value, "version": record.version}
        if self._span is not None:
            self._span.set_attributes(attributes)
        with tracing.span("policy.store", attributes=attributes):
            if not self._save_patiently(command, record):
                return
        _log.info(
            "round %d: %s, version %d; counted: %s; absent: %s",
            record.number,
            record.outcome.value,
            record.version,
            ", ".join(given.cluster for given in record.contributions) or "nobody",
            "; ".join(f"{gone.cluster} ({gone.why})" for gone in record.absent) or "nobody",
        )
        with self._lock:
            if command.policy is not None:
                self._put_in_force(command.policy)
            self._handle(RoundSaved(record.number))

    def _save_patiently(self, command: SaveRound, record: RoundRecord) -> bool:
        """Save, waiting as long as etcd is away: without it there is nothing else to do. False when closing."""
        pause_s, longest_s = SAVE_BACKOFF_S
        while True:
            try:
                self._policies.save(record, command.policy)
                return True
            except StoreUnavailable as problem:
                _log.warning("round %d waits to be saved: %s", record.number, problem.message)
            if self._closing.wait(pause_s):
                return False
            pause_s = min(longest_s, pause_s * 2)

    def _put_in_force(self, policy: PolicyRecord) -> None:
        assert self._made is not None
        weights, data, optimiser = self._made
        self._made = None
        self._active = Version(policy, weights, data, optimiser)

    def _offer(self, clusters: tuple[ClusterName, ...]) -> None:
        active = self._active.record
        offer = PolicyOffer(active.name, active.version, active.digest, self._active.data, tracing.traceparent())
        self._server.offer(offer, clusters)


def check(config: AggregatorConfig) -> None:
    """Refuse what can never hold a round.

    Raises:
        InvalidConfiguration: the policy has nothing to learn.
    """
    if config.policy.name != LEARNS:
        raise InvalidConfiguration(
            f"policy.name is {config.policy.name}, which has no weights to combine; {LEARNS} was expected",
            f"set policy.name to {LEARNS}, or run the federation without an aggregator",
        )
