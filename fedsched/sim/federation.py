"""A federation of simulated clusters: the live aggregator's core and loop, and the agents' own learning, over a link.

Only the edges are simulated: the link instead of gRPC and Flower, virtual time, memory instead of etcd and files.
Agents tell their numbers again and again instead of keeping a stream alive; who is silent for three reports has left.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from random import Random
from typing import Any, Protocol

import numpy as np
from msgspec.structs import replace

from fedsched import __version__
from fedsched.core.decision import Policy
from fedsched.core.ids import ClusterName, stream
from fedsched.core.rounds import (
    Absence,
    DeadlinePassed,
    MemberJoined,
    MemberLeft,
    MemberReported,
    NewWeights,
    PolicyRecord,
    RejectUpdate,
    RequestUpdates,
    RoundOutcome,
    RoundRecord,
    Rounds,
    TimePassed,
)
from fedsched.core.speeds import UNIT, SpeedCell, SpeedStatistics, SpeedSums
from fedsched.core.versions import AcceptRule, Action
from fedsched.federation.exchange import GradientReply, decline, heard, question_to, respond
from fedsched.federation.loop import BaseVersion, Combining, RoundLoop, Standing, Weights, gradients
from fedsched.federation.optimiser import ServerOptimiser, digest_of
from fedsched.federation.source import Arrays, Gradient, Hello, PolicyOffer
from fedsched.learn.contributing import ClusterLearning
from fedsched.learn.learner import ClusterLearner
from fedsched.learn.own_track import OwnTrack
from fedsched.learn.sharing import SpeedSharing
from fedsched.learn.tensors import one_thread
from fedsched.policy import speed_pool
from fedsched.policy.checkpoint import Checkpoint
from fedsched.policy.learnable import Learnable
from fedsched.policy.learned_speed import LearnedSpeed
from fedsched.sim.cluster import SimulatedCluster
from fedsched.sim.federation_config import FederationSectionConfig, MemberConfig, SpoilConfig
from fedsched.sim.federation_link import Answer, Errands, Link, Message, Question, Way
from fedsched.sim.federation_results import ClusterRounds, FederationResult
from fedsched.sim.versioning import SimulatedVersions

SILENT_BEATS = 3
"""An agent that told nothing for so many reports has left."""
HUGE = 1e12
CLAIMED = 100


def first_standing(policy: str, weights: Weights, learning_rate: float) -> Standing:
    """Before any round: these weights are version 1."""
    optimiser = ServerOptimiser(learning_rate)
    data = weights.to_bytes()
    made = _written(1, weights.digest, data, optimiser)
    return Standing(BaseVersion(_record(policy, made), weights, data, optimiser), 1, 0)


def _record(policy: str, made: NewWeights) -> PolicyRecord:
    return PolicyRecord(
        name=policy,
        version=1,
        digest=made.digest,
        location=made.location,
        size_bytes=made.size_bytes,
        created_s=0.0,
        optimiser_location=made.optimiser_location,
        optimiser_digest=made.optimiser_digest,
    )


def _written(version: int, digest: str, data: bytes, optimiser: ServerOptimiser) -> NewWeights:
    location = f"{version:06d}"
    return NewWeights(digest, location, len(data), f"{location}.optimiser", digest_of(optimiser.to_bytes()))


class Judge:
    """Sees what crosses the link and what becomes of rounds; this one does nothing, see `federation_judges`."""

    def crossed(self, way: Way, cluster: ClusterName, message: Message, time_s: float) -> None:
        """A message arrived."""

    def saved(self, record: RoundRecord, before: BaseVersion, after: BaseVersion | None) -> None:
        """A round is over; `after` is what it made, if anything."""

    def took(self, cluster: ClusterName, term: int, version: int) -> None:
        """An agent was offered a version; from now on it runs this one."""

    def close(self, held: bool) -> None:
        """The world has come to its end; `held` tells whether a round is still open."""


# --- An agent's side ---------------------------------------------------------------------------------------------


class Exchange(Protocol):
    """What an agent gives to the rounds and takes from them: the live agent's own code."""

    @property
    def version(self) -> int:
        """That it has taken; 0 before the first."""

    @property
    def samples(self) -> int:
        """From which it could give."""

    def gradient(self, arrays: Arrays, batch_size: int, seed: int) -> Gradient:
        """What it gives.

        Raises:
            Declined: it has nothing.
        """

    def take(self, offer: PolicyOffer) -> str | None:
        """Decide with the offer; None, or why not."""


class Member:
    """One cluster's end: what the agent's federation client does, with the agent's own exchange.

    Args:
        policy: decides in the cluster.
        learner: watches it there, where one is needed.
    """

    def __init__(self, name: ClusterName, policy: Policy, learner: ClusterLearner | None, config: MemberConfig) -> None:
        self.name = name
        self.config = config
        self.learner = learner
        self.policy = policy
        self._exchange: Exchange | None = None
        self._cluster: SimulatedCluster | None = None
        self._errands: Errands | None = None
        self.versions: SimulatedVersions | None = None
        self._answer: Callable[[int, GradientReply], None] = lambda number, reply: None
        self._judge = Judge()
        self._busy_term = 0
        """Term of the agent that computes a gradient; 0 while none does."""
        self._chance: Random = stream(0, "")
        self.refused = 0
        """Offers that the cluster could not use."""

    def begin(self, term: int) -> Exchange:
        """An agent of that term begins to take part."""
        raise NotImplementedError

    @property
    def learning(self) -> Exchange:
        """The present agent's."""
        if self._exchange is None:
            self._exchange = self.begin(self._cluster.term if self._cluster is not None else 0)
        return self._exchange

    def join(
        self,
        cluster: SimulatedCluster,
        errands: Errands,
        answer: Callable[[int, GradientReply], None],
        *,
        seed: int,
        judge: Judge,
    ) -> None:
        """Take part for this cluster."""
        self._cluster, self._errands, self._answer, self._judge = cluster, errands, answer, judge
        self._chance = stream(seed, f"spoils/{self.name}")

    def restarted(self) -> None:
        """The agent died and another one began."""
        self._exchange = None
        self._busy_term = 0

    @property
    def alive(self) -> bool:
        """Whether there is an agent."""
        return self._cluster is not None and self._cluster.scheduler is not None

    def away(self, time_s: float) -> bool:
        """Whether the link to the cluster is cut at that time."""
        return self.config.away is not None and self.config.away.covers(time_s)

    def hello(self) -> Hello:
        """Who the agent is now."""
        assert self._cluster is not None
        learning = self.learning
        return Hello(self.name, self._cluster.term, __version__, self.policy.name, learning.version, learning.samples)

    def receive(self, message: Message) -> None:
        """What came from the aggregator."""
        if not self.alive:
            return
        if isinstance(message, PolicyOffer):
            self.refused += self.learning.take(message) is not None
            self._judge.took(self.name, self.hello().term, self.learning.version)
        elif isinstance(message, Question):
            self._compute(message)

    def _compute(self, question: Question) -> None:
        assert self._errands is not None
        hello, request = self.hello(), question.request
        if self._busy_term == hello.term:
            why = "it still computes the gradient of an earlier round"
            self._answer(request.number, decline(hello.term, request, why))
            return
        reply = self._spoilt(respond(hello, self.learning, question.arrays, request))
        if not self.config.compute_s:
            self._answer(request.number, reply)
            return
        self._busy_term = hello.term
        self._errands.after(self.config.compute_s, partial(self._finish, request.number, reply))

    def _finish(self, number: int, reply: GradientReply) -> None:
        # A gradient dies with the agent that computed it.
        if self.alive and self._busy_term == reply.term:
            self._busy_term = 0
            self._answer(number, reply)

    def _spoilt(self, reply: GradientReply) -> GradientReply:
        spoils = self.config.spoils
        if spoils is None or reply.declined or self._chance.random() >= spoils.share:
            return reply
        return self.spoil(reply, spoils)

    def spoil(self, reply: GradientReply, spoils: SpoilConfig) -> GradientReply:
        """A bad answer in place of a good one."""
        return spoil(reply, spoils, self._chance)


class LearningMember(Member):
    """Gives gradients, takes weights.

    Args:
        first: weights that it begins with.
        rule: what becomes of the federation's versions.
        make: makes a policy like it, of other weights and their version.
    """

    def __init__(
        self,
        name: ClusterName,
        policy: Learnable,
        learner: ClusterLearner,
        config: MemberConfig,
        first: Checkpoint,
        rule: AcceptRule,
        make: Callable[[Checkpoint, int], Policy],
    ) -> None:
        super().__init__(name, policy, learner, config)
        self._taught, self._learner = policy, learner
        self.versions: SimulatedVersions = SimulatedVersions(
            name,
            policy,
            first,
            rule,
            make,
            lambda: self._errands.now_s if self._errands is not None else 0.0,
        )
        if isinstance(learner, OwnTrack):
            learner.join(policy, self.versions.offered)

    def begin(self, term: int) -> Exchange:
        """From what the learner remembers."""
        return ClusterLearning(self.name, self._taught, self._learner, self.versions.offered)

    def restarted(self) -> None:
        """The new agent remembers nothing and runs the version that was in force."""
        super().restarted()
        self.versions.restarted()
        self._learner.forget()


class Sharing(Member):
    """Gives what it has seen of speeds, takes what the others have.

    Args:
        deciding: what decides in the cluster, where it is more than the policy itself.
    """

    def __init__(
        self, name: ClusterName, policy: LearnedSpeed, config: MemberConfig, deciding: Policy | None = None
    ) -> None:
        super().__init__(name, deciding or policy, None, config)
        self._speeds = policy

    def begin(self, term: int) -> Exchange:
        """With what the policy remembers."""
        return SpeedSharing(self.name, self._speeds, term)

    def restarted(self) -> None:
        """The new agent goes on with what the dead one had written down."""
        super().restarted()
        self._speeds.restore(self._speeds.state())

    def spoil(self, reply: GradientReply, spoils: SpoilConfig) -> GradientReply:
        """Bad statistics in place of good ones."""
        return spoil_statistics(reply, spoils, self._chance)


def spoil_statistics(reply: GradientReply, spoils: SpoilConfig, chance: Random) -> GradientReply:
    """Bad statistics in place of good ones; those that no check finds claim a hundred jobs in every cell."""
    part = speed_pool.part_of(reply.gradients)
    cells: list[tuple[SpeedCell, SpeedSums]] = []
    logs = [sums.total / sums.count for _, sums in part.statistics]
    middle = sum(logs) / len(logs)
    for (cell, sums), log in zip(part.statistics, logs, strict=True):
        match spoils.kind:
            case "nan":
                bad = replace(sums, count=-sums.count)
            case "huge":
                bad = replace(sums, total=sums.total + 41 * UNIT * sums.count)
            case "dimensions":
                return dataclasses.replace(reply, gradients={speed_pool.STATISTICS: np.zeros((1, 1, 1), np.float32)})
            case "stale":
                return dataclasses.replace(reply, base_version=reply.base_version - 1)
            case "noise":
                bad = _claimed(round((chance.random() * 12 - 12) * UNIT))
            case "reversed":
                bad = _claimed(round(2 * middle - log))
        cells.append((cell, bad))
    spoilt = dataclasses.replace(part, statistics=SpeedStatistics(cells))
    return dataclasses.replace(reply, gradients={speed_pool.STATISTICS: spoilt.to_array()})


def _claimed(log: int) -> SpeedSums:
    return SpeedSums(CLAIMED, CLAIMED * log, CLAIMED * log**2)


def spoil(reply: GradientReply, spoils: SpoilConfig, chance: Random) -> GradientReply:
    """A bad answer in place of a good one."""
    names = sorted(reply.gradients)
    arrays = dict(reply.gradients)
    match spoils.kind:
        case "nan":
            arrays[names[0]] = np.full_like(arrays[names[0]], np.nan)
        case "huge":
            arrays = {name: arrays[name] + np.float32(HUGE) for name in names}
        case "dimensions":
            arrays[names[0]] = np.zeros((1, 1, 1), np.float32)
        case "stale":
            return dataclasses.replace(reply, base_version=reply.base_version - 1)
        case "noise":
            noise = np.random.default_rng(int(chance.random() * 2**31))
            arrays = {name: noise.normal(size=arrays[name].shape).astype(arrays[name].dtype) for name in names}
        case "reversed":
            arrays = {name: -arrays[name] for name in names}
    return dataclasses.replace(reply, gradients=arrays)


# --- The aggregator's side ---------------------------------------------------------------------------------------


class Federation:
    """One aggregator and its members in a world.

    Args:
        members: one per cluster.
        standing: where the rounds stand.
        seed: of the run; the section's own is added to it.
        combining: what becomes of updates; gradients are combined as the section says where nothing is given.
        judge: watches.
    """

    def __init__(
        self,
        members: Sequence[Member],
        standing: Standing,
        config: FederationSectionConfig,
        *,
        combining: Combining | None = None,
        seed: int,
        judge: Judge | None = None,
    ) -> None:
        self.members = {member.name: member for member in members}
        self.records: list[RoundRecord] = []
        self._standing = standing
        self._config = config
        self._seed = config.seed + seed
        self._combining = combining or gradients(config)
        self._samples_min = self._combining.samples_min(config.samples_min)
        self._judge = judge or Judge()
        self._loop: RoundLoop | None = None

    def join(self, errands: Errands, clusters: Mapping[ClusterName, SimulatedCluster]) -> None:
        """Begin in a world, before it runs.

        Args:
            errands: one for all federations of the world, or they keep each other waiting for its end.
            clusters: of the world.
        """
        config, standing = self._config, self._standing
        self._errands = errands
        self._link = Link(self._errands, config.link, self._seed, self._cut, self._judge.crossed)
        self._heard_s: dict[ClusterName, float] = {}
        self._offered_s: dict[ClusterName, float] = {}
        core = Rounds(
            config.rules(self._samples_min),
            policy=standing.active.record.name,
            version=standing.active.record.version,
            version_last=standing.version_last,
            number_last=standing.number_last,
            now_s=errands.now_s,
        )
        self._loop = RoundLoop(core, standing.active, self._combining, self)
        for index, name in enumerate(sorted(self.members)):
            member = self.members[name]
            member.join(clusters[name], self._errands, partial(self._reply, name), seed=self._seed, judge=self._judge)
            # Spread, so that a round never depends on which of two reports of one instant comes first.
            self._errands.at(index * config.beat_s / len(self.members), partial(self._beat, member))

    @property
    def loop(self) -> RoundLoop:
        """The rounds' loop."""
        assert self._loop is not None, "the federation has not joined a world"
        return self._loop

    def standing(self) -> Standing:
        """Where the rounds stand now."""
        last = max([self._standing.version_last, *(record.version for record in self.records)])
        number = self.records[-1].number if self.records else self._standing.number_last
        return Standing(self.loop.active, last, number)

    @property
    def traffic(self) -> tuple[int, int]:
        """Messages that were sent over the link, and how many of them got lost."""
        return self._link.sent, self._link.lost

    def close(self) -> None:
        """The world has come to its end.

        Raises:
            BrokenPromise: something happened that must not; only with a judge.
        """
        self._judge.close(self.loop.core.open is not None)

    def _cut(self, cluster: ClusterName, time_s: float) -> bool:
        return self.members[cluster].away(time_s)

    # --- reports

    def _beat(self, member: Member) -> None:
        if self._errands.alone:
            return
        if member.alive:
            hello = member.hello()
            self._link.send(Way.UP, member.name, hello, partial(self._hear, hello))
        self._errands.after(self._config.beat_s, partial(self._beat, member))

    def _hear(self, hello: Hello) -> None:
        now_s, loop = self._errands.now_s, self.loop
        self._heard_s[hello.cluster] = now_s
        known = loop.core.members.get(hello.cluster)
        if known is None or known.term != hello.term or self._missed_an_offer(hello, now_s):
            loop.handle(MemberJoined(hello.cluster, hello.term, hello.policy_version, hello.samples))
        else:
            loop.handle(MemberReported(hello.cluster, hello.term, hello.policy_version, hello.samples))
        for cluster, heard_s in sorted(self._heard_s.items()):
            if cluster in loop.core.members and now_s - heard_s > SILENT_BEATS * self._config.beat_s:
                loop.handle(MemberLeft(cluster))
        loop.handle(TimePassed(now_s))

    def _missed_an_offer(self, hello: Hello, now_s: float) -> bool:
        """Whether an offer got lost, which ends the stream live, so that the agent connects again."""
        behind = hello.policy_version != self.loop.core.version
        return behind and now_s - self._offered_s.get(hello.cluster, now_s) > self._config.beat_s

    # --- what the rounds' loop orders

    def now_s(self) -> float:
        """Virtual time."""
        return self._errands.now_s

    def ask(self, request: RequestUpdates) -> None:
        """Put the question on the link, and see to the deadline."""
        arrays, config = self.loop.arrays, self._config
        for cluster in request.clusters:
            question = Question(
                arrays,
                question_to(
                    cluster,
                    request,
                    batch_size=config.batch_size,
                    samples_min=self._samples_min,
                    seed=self._seed,
                ),
            )
            self._link.send(Way.DOWN, cluster, question, partial(self.members[cluster].receive, question))
        self._errands.after(request.deadline_s, partial(self._close_round, request.number))

    def _reply(self, cluster: ClusterName, number: int, reply: GradientReply) -> None:
        self._link.send(Way.UP, cluster, Answer(number, reply), partial(self._take, cluster, number, reply))

    def _take(self, cluster: ClusterName, number: int, reply: GradientReply) -> None:
        event, update = heard(number, cluster, reply, self.loop.inspect, self.now_s())
        self.loop.answered(event, update)

    def _close_round(self, number: int) -> None:
        self.loop.handle(DeadlinePassed(number, self.now_s()))

    def rejected(self, command: RejectUpdate) -> None:
        """The round's record says so; a late update stands in none, its cluster counts as missing."""

    def write(self, version: int, digest: str, data: bytes, optimiser: ServerOptimiser) -> NewWeights:
        """Memory never fails."""
        return _written(version, digest, data, optimiser)

    def save(self, record: RoundRecord, policy: PolicyRecord | None) -> bool:
        """Keep the record; the loop keeps the version in force, and nobody asks for older ones."""
        self.records.append(record)
        self._judge.saved(record, self.loop.active, self.loop.made(policy))
        return True

    def offer(self, version: BaseVersion, clusters: tuple[ClusterName, ...]) -> None:
        """Send it over the link."""
        record = version.record
        offer = PolicyOffer(record.name, record.version, record.digest, version.data)
        for cluster in clusters:
            self._offered_s[cluster] = self.now_s()
            self._link.send(Way.DOWN, cluster, offer, partial(self.members[cluster].receive, offer))

    @contextmanager
    def stage(self, name: str, attributes: Mapping[str, Any]) -> Iterator[None]:
        """Nobody traces simulations; what is computed has one thread, as in the live aggregator."""
        with one_thread():
            yield


# --- What came of it ---------------------------------------------------------------------------------------------


def result_of(federation: Federation) -> FederationResult:
    """Sum a federation up."""
    records = federation.records
    active = federation.loop.active.record
    return FederationResult(
        clusters=tuple(_part_of(federation.members[name], records) for name in sorted(federation.members)),
        rounds=len(records),
        combined=sum(record.outcome is RoundOutcome.COMBINED for record in records),
        version=active.version,
        digest=active.digest,
        messages=federation.traffic[0],
        lost=federation.traffic[1],
        records=tuple(records),
    )


def _part_of(member: Member, records: Sequence[RoundRecord]) -> ClusterRounds:
    absent = [gone for record in records for gone in record.absent if gone.cluster == member.name]
    reasons: dict[str, int] = {}
    for gone in absent:
        kind = _like(gone.why)
        reasons[kind] = reasons.get(kind, 0) + 1
    orders = member.versions.orders if member.versions is not None else ()
    times = {absence: sum(gone.absence is absence for gone in absent) for absence in Absence}
    return ClusterRounds(
        cluster=member.name,
        asked=sum(member.name in record.asked for record in records),
        counted=sum(given.cluster == member.name for record in records for given in record.contributions),
        declined=times[Absence.DECLINED],
        rejected=times[Absence.REJECTED],
        missing=times[Absence.MISSING],
        why=tuple(sorted(reasons.items())),
        version=member.learning.version,
        decides=member.policy.version,
        accepted=sum(order.action is Action.ACCEPTED for order in orders),
    )


def _like(why: str) -> str:
    """A reason without its numbers."""
    return re.sub(r"(?<![\w.])\d[\d.e+]*", "N", why)
