"""Flower's Strategy for policy gradients: asks whom the core asks, and hands every answer to the core."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedsched import tracing
from fedsched.adapters import flower
from fedsched.core.ids import ClusterName
from fedsched.core.rounds import Absence, DeadlinePassed, RequestUpdates, UpdateArrived, UpdateWithheld
from fedsched.federation.averaging import Inspection, Update
from fedsched.federation.exchange import heard, question_to
from fedsched.federation.source import Arrays

if TYPE_CHECKING:
    from opentelemetry.trace import Span

_log = logging.getLogger(__name__)


class RoundHost(Protocol):
    """Who holds the rounds' core and carries out what it orders."""

    @property
    def arrays(self) -> Arrays:
        """Weights of the version in force."""

    def inspect(self, update: Arrays) -> Inspection:
        """Look at an update for these weights."""

    def now_s(self) -> float:
        """The time for the core's events."""

    def answered(self, event: UpdateArrived | UpdateWithheld, update: Update | None, traceparent: str) -> None:
        """An asked agent answered; `update` is set exactly for an `UpdateArrived`."""

    def deadline_passed(self, event: DeadlinePassed) -> None:
        """No more answers come."""


class GradientStrategy(Strategy):
    """Holds the round that `prepare` was given; replies carry gradients, not parameters.

    Args:
        host: takes the answers.
        node_of: the Flower node of a cluster.
        batch_size: decisions that each gradient is to be computed from.
        samples_min: fewest decisions that an agent must know the reward of to give one.
        seed: root of the seeds that agents draw their batches with.
    """

    def __init__(
        self, host: RoundHost, node_of: Callable[[ClusterName], int], *, batch_size: int, samples_min: int, seed: int
    ) -> None:
        self._host = host
        self._node_of = node_of
        self._batch_size = batch_size
        self._samples_min = samples_min
        self._seed = seed
        self._request: RequestUpdates | None = None
        self._traceparent = ""
        self._asked: dict[int, tuple[ClusterName, Span]] = {}

    def prepare(self, request: RequestUpdates, traceparent: str) -> None:
        """The round that the next `start` is to hold, and the trace it belongs to."""
        self._request = request
        self._traceparent = traceparent

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """One message to each asked cluster, with the weights and a seed of its own."""
        request = self._prepared()
        self._asked = {}
        messages = []
        for cluster in request.clusters:
            node = self._node_of(cluster)
            span = tracing.start("round.request", parent=self._traceparent, attributes={"cluster": cluster})
            self._asked[node] = (cluster, span)
            question = question_to(
                cluster,
                request,
                batch_size=self._batch_size,
                samples_min=self._samples_min,
                seed=self._seed,
                traceparent=tracing.traceparent(span) or self._traceparent,
            )
            content = flower.request_content(arrays, question)
            messages.append(
                grid.create_message(content, flower.TRAIN, node, group_id=str(request.number), ttl=request.deadline_s)
            )
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Hand each reply to the host as it comes, then close the round; the weights in force afterwards."""
        request = self._prepared()
        try:
            for reply in replies:
                cluster, span = self._asked.pop(reply.metadata.src_node_id)
                self._answer(request, cluster, reply)
                span.end()
        finally:
            for _, span in self._asked.values():
                span.add_event("no answer in time")
                span.end()
        self._host.deadline_passed(DeadlinePassed(request.number, self._host.now_s()))
        return flower.to_record(self._host.arrays), None

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Nothing: a policy shows what it is worth in the clusters' own schedules."""
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Nothing was asked."""
        return None

    def summary(self) -> None:
        """Say how the next round is held."""
        _log.debug("round %s over %d decisions of each agent", self._request, self._batch_size)

    def _prepared(self) -> RequestUpdates:
        assert self._request is not None, "start was called before prepare"
        return self._request

    def _answer(self, request: RequestUpdates, cluster: ClusterName, message: Message) -> None:
        now_s = self._host.now_s()
        if message.has_error():
            why = message.error.reason or f"Flower error {message.error.code}"
            self._host.answered(UpdateWithheld(request.number, cluster, Absence.MISSING, why, now_s), None, "")
            return
        try:
            reply = flower.read_reply(message)
        except ValueError as problem:
            unread = UpdateWithheld(request.number, cluster, Absence.REJECTED, str(problem), now_s)
            self._host.answered(unread, None, "")
            return
        event, update = heard(request.number, cluster, reply, self._host.inspect, now_s)
        self._host.answered(event, update, reply.traceparent)
