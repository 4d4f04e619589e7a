"""Federated rounds: who is asked, whose update counts, when a round closes and what comes out of it. Decides only.

One round at a time: `COLLECTING` until every asked cluster has answered or the deadline has passed, `COMBINING` while
the gradients are averaged and applied, `SAVING` until the record is durable, then the new version is offered. Weights
never pass through here, only what is known about them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import assert_never

from fedsched.core.ids import ClusterName
from fedsched.core.record import Record

TEXT_CHARS_MAX = 500
"""So much of a text of a cluster's is kept: the store takes no record above 1.5 MB, and no round ends without one."""
METRICS_MAX = 16
"""So many of a contribution's metrics are kept."""


class RoundOutcome(StrEnum):
    """How a round ended; stable names, part of the public interface."""

    COMBINED = "combined"
    NO_QUORUM = "no quorum"
    FAILED = "failed"
    """There were enough updates, and the new weights could not be used."""


class Absence(StrEnum):
    """Why an asked cluster does not count in a round."""

    DECLINED = "declined"
    """It had nothing to give, too few decisions for example."""
    REJECTED = "rejected"
    """Its update did not pass the checks."""
    MISSING = "missing"
    """Nothing came: it failed, left, or was too slow."""


class Contribution(Record, frozen=True):
    """An update that counts in a round."""

    cluster: ClusterName
    term: int
    samples: int
    norm: float
    """Euclidean norm of the whole gradient."""
    metrics: tuple[tuple[str, float], ...] = ()
    """What the learner says of its batch: loss, entropy, mean_reward."""


class Absentee(Record, frozen=True):
    """An asked cluster whose update does not count, and why."""

    cluster: ClusterName
    absence: Absence
    why: str


class RoundRecord(Record, frozen=True):
    """What is kept of a round for ever after."""

    number: int
    policy: str
    base_version: int
    """Version that the gradients were to be computed from."""
    version: int
    """Version in force after the round; the base version unless it combined."""
    outcome: RoundOutcome
    quorum: int
    asked: tuple[ClusterName, ...]
    contributions: tuple[Contribution, ...]
    absent: tuple[Absentee, ...]
    started_s: float
    """Unix time, as `finished_s`."""
    finished_s: float
    message: str = ""
    """Why it failed; empty otherwise."""
    traceparent: str = ""
    """Trace of the round; written by whoever held it, the core knows none."""


class PolicyRecord(Record, frozen=True):
    """One version of a policy; its weights lie in the aggregator's blob directory."""

    name: str
    version: int
    digest: str
    """Of the checkpoint's arrays; a blob that does not have it is corrupt."""
    location: str
    """File of the checkpoint, relative to the aggregator's state directory."""
    size_bytes: int
    created_s: float
    parent_version: int = 0
    """Version it was made from; 0 for the first."""
    round_number: int = 0
    """Round that made it; 0 for the first checkpoint."""
    contributors: tuple[ClusterName, ...] = ()
    samples: int = 0
    """Decisions that the round's gradients were computed from, all clusters together."""
    optimiser_location: str = ""
    optimiser_digest: str = ""
    """Of the server optimiser's state as it was when this version was made."""
    message: str = ""
    """What happened to it later: that its blob was found corrupt, for example."""


class NewWeights(Record, frozen=True):
    """What combining made, already durable under `location`."""

    digest: str
    location: str
    size_bytes: int
    optimiser_location: str
    optimiser_digest: str


# Events


class MemberJoined(Record, frozen=True):
    """An agent connected, or connected again."""

    cluster: ClusterName
    term: int
    version: int
    """Policy version that it runs."""
    samples: int
    """Decisions it has recorded."""


class MemberReported(Record, frozen=True):
    """A connected agent told its numbers anew."""

    cluster: ClusterName
    term: int
    version: int
    samples: int


class MemberLeft(Record, frozen=True):
    """An agent's connection ended."""

    cluster: ClusterName


class TimePassed(Record, frozen=True):
    """The clock moved; the core sees whether a round is due."""

    now_s: float


class UpdateArrived(Record, frozen=True):
    """An agent's gradient came and was looked at."""

    number: int
    cluster: ClusterName
    term: int
    base_version: int
    samples: int
    norm: float
    finite: bool
    misfit: str
    """How its arrays differ from the policy's; empty when names and shapes are the same."""
    now_s: float
    metrics: tuple[tuple[str, float], ...] = ()


class UpdateWithheld(Record, frozen=True):
    """An asked agent will give nothing in this round."""

    number: int
    cluster: ClusterName
    absence: Absence
    why: str
    now_s: float


class DeadlinePassed(Record, frozen=True):
    """The round has lasted as long as it may."""

    number: int
    now_s: float


class Combined(Record, frozen=True):
    """The gradients were combined and the new weights lie durable on disk."""

    number: int
    weights: NewWeights
    now_s: float
    left_out: tuple[tuple[ClusterName, str], ...] = ()
    """Whose update was not made use of, and why."""


class CombineFailed(Record, frozen=True):
    """The gradients could not be combined, or the new weights cannot be used."""

    number: int
    why: str
    now_s: float


class RoundSaved(Record, frozen=True):
    """The round's record, and with it the new version, is durable."""

    number: int


RoundEvent = (
    MemberJoined
    | MemberReported
    | MemberLeft
    | TimePassed
    | UpdateArrived
    | UpdateWithheld
    | DeadlinePassed
    | Combined
    | CombineFailed
    | RoundSaved
)


# Commands


class RequestUpdates(Record, frozen=True):
    """Ask the clusters for a gradient of this version, and give `DeadlinePassed` after `deadline_s`."""

    number: int
    base_version: int
    clusters: tuple[ClusterName, ...]
    deadline_s: float


class RejectUpdate(Record, frozen=True):
    """Throw an update away and say why."""

    number: int
    cluster: ClusterName
    why: str


class Combine(Record, frozen=True):
    """Combine these clusters' gradients, in this order, into this version."""

    number: int
    version: int
    accepted: tuple[ClusterName, ...]


class SaveRound(Record, frozen=True):
    """Make the record, and the new version if there is one, durable in one step; then give `RoundSaved`."""

    record: RoundRecord
    policy: PolicyRecord | None


class OfferPolicy(Record, frozen=True):
    """Send the active version to these clusters."""

    version: int
    clusters: tuple[ClusterName, ...]


class RefuseMember(Record, frozen=True):
    """End the connection of an agent that may not take part."""

    cluster: ClusterName
    why: str


RoundCommand = RequestUpdates | RejectUpdate | Combine | SaveRound | OfferPolicy | RefuseMember


class RoundRules(Record, frozen=True):
    """When a round is held and what counts in it."""

    interval_s: float
    quorum: int
    deadline_s: float
    samples_min: int
    norm_max: float
    asked_max: int | None = None
    """Most clusters that one round asks, those first that were asked longest ago; None: all. With 1 every gradient is a
    step of its own, as in asynchronous actor-critic (A3C), which the paper's federation is."""


class Member(Record, frozen=True):
    """A connected agent."""

    term: int
    version: int
    samples: int


class Stage(StrEnum):
    """Where the open round is."""

    COLLECTING = "collecting"
    COMBINING = "combining"
    SAVING = "saving"


@dataclass(slots=True)
class OpenRound:
    """The round that is being held; `contributions` and `absent` together never name a cluster twice."""

    number: int
    base_version: int
    asked: tuple[ClusterName, ...]
    started_s: float
    stage: Stage = Stage.COLLECTING
    contributions: dict[ClusterName, Contribution] = field(default_factory=dict)
    absent: dict[ClusterName, Absentee] = field(default_factory=dict)
    saving: SaveRound | None = None
    """Set exactly while the stage is `SAVING`."""

    def waits_for(self) -> list[ClusterName]:
        """Asked clusters that have not answered, sorted."""
        return [name for name in self.asked if name not in self.contributions and name not in self.absent]


class Rounds:
    """Holds one policy's rounds.

    Args:
        rules: when a round is held and what counts.
        policy: name of the policy.
        version: version in force.
        version_last: highest version ever made; numbers are not used twice.
        number_last: number of the last finished round; 0 before the first.
        now_s: the time; the first interval is counted from it.
    """

    def __init__(
        self,
        rules: RoundRules,
        *,
        policy: str,
        version: int,
        version_last: int,
        number_last: int,
        now_s: float,
    ) -> None:
        if version > version_last:
            raise ValueError(f"version {version} in force is above the highest version made, {version_last}")
        self._rules = rules
        self._policy = policy
        self._version = version
        self._version_last = version_last
        self._number_last = number_last
        self._began_s = now_s
        # Nobody waits a whole interval for the very first round: it is held once enough agents have decisions to give.
        self._first_pending = number_last == 0
        self._members: dict[ClusterName, Member] = {}
        self._terms: dict[ClusterName, int] = {}
        self._asked_in: dict[ClusterName, int] = {}
        """Number of the last round that asked each cluster; forgotten with the process, which costs fairness once."""
        self._open: OpenRound | None = None

    @property
    def version(self) -> int:
        """The version in force."""
        return self._version

    @property
    def quorum(self) -> int:
        """Fewest updates that make a round count."""
        return self._rules.quorum

    @property
    def members(self) -> dict[ClusterName, Member]:
        """The connected agents, sorted by cluster."""
        return dict(sorted(self._members.items()))

    @property
    def open(self) -> OpenRound | None:
        """The round that is being held, if any. Read only."""
        return self._open

    def handle(self, event: RoundEvent) -> list[RoundCommand]:
        """What follows from `event`."""
        match event:
            case MemberJoined():
                return self._join(event)
            case MemberReported(cluster, term, version, samples):
                if cluster in self._members:
                    self._terms[cluster] = max(term, self._terms[cluster])
                    self._members[cluster] = Member(term, version, samples)
                return []
            case MemberLeft(cluster):
                self._members.pop(cluster, None)
                return []
            case TimePassed(now_s):
                return self._begin(now_s) if self._is_due(now_s) else []
            case UpdateArrived():
                return self._receive(event)
            case UpdateWithheld(number, cluster, absence, why, now_s):
                held = self._collecting(number)
                if held is None or cluster not in held.waits_for():
                    return []
                held.absent[cluster] = Absentee(cluster, absence, _shortened(why))
                return self._close_if_complete(held, now_s)
            case DeadlinePassed(number, now_s):
                held = self._collecting(number)
                return self._close(held, now_s) if held is not None else []
            case Combined():
                return self._combined(event)
            case CombineFailed(number, why, now_s):
                return self._save(self._at(number, Stage.COMBINING), RoundOutcome.FAILED, now_s, message=why)
            case RoundSaved(number):
                return self._saved(self._at(number, Stage.SAVING))
            case _:
                assert_never(event)

    def _join(self, event: MemberJoined) -> list[RoundCommand]:
        known_term = self._terms.get(event.cluster, 0)
        if event.term < known_term:
            why = f"term {event.term} is over; the cluster's agent holds term {known_term}"
            return [RefuseMember(event.cluster, why)]
        self._terms[event.cluster] = event.term
        self._members[event.cluster] = Member(event.term, event.version, event.samples)
        return [OfferPolicy(self._version, (event.cluster,))] if event.version != self._version else []

    def _is_due(self, now_s: float) -> bool:
        if self._open is not None or len(self._members) < self._rules.quorum:
            return False
        ready = sum(1 for member in self._members.values() if member.samples >= self._rules.samples_min)
        return now_s - self._began_s >= self._rules.interval_s or (self._first_pending and ready >= self._rules.quorum)

    def _begin(self, now_s: float) -> list[RoundCommand]:
        ready = sum(1 for member in self._members.values() if member.samples >= self._rules.samples_min)
        self._first_pending = self._first_pending and ready < self._rules.quorum
        self._began_s = now_s
        number = self._number_last + 1
        in_turn = sorted(self._members, key=lambda name: (self._asked_in.get(name, 0), name))
        asked = tuple(sorted(in_turn[: self._rules.asked_max]))
        self._asked_in.update(dict.fromkeys(asked, number))
        self._open = OpenRound(number, self._version, asked, now_s)
        return [RequestUpdates(self._open.number, self._version, asked, self._rules.deadline_s)]

    def _receive(self, event: UpdateArrived) -> list[RoundCommand]:
        held = self._collecting(event.number)
        if held is None:
            return [RejectUpdate(event.number, event.cluster, f"it came late: round {event.number} is closed")]
        if event.cluster not in held.asked:
            return [RejectUpdate(event.number, event.cluster, "it was not asked in this round")]
        if event.cluster not in held.waits_for():
            return []  # The same answer twice; the first one counts.
        why = _shortened(self._fault(event, held))
        if why:
            held.absent[event.cluster] = Absentee(event.cluster, Absence.REJECTED, why)
            reject: list[RoundCommand] = [RejectUpdate(event.number, event.cluster, why)]
            return reject + self._close_if_complete(held, event.now_s)
        metrics = tuple((name, value) for name, value in event.metrics if len(name) <= TEXT_CHARS_MAX)[:METRICS_MAX]
        held.contributions[event.cluster] = Contribution(event.cluster, event.term, event.samples, event.norm, metrics)
        return self._close_if_complete(held, event.now_s)

    def _fault(self, event: UpdateArrived, held: OpenRound) -> str:
        """Why an update cannot count; empty if it can."""
        known_term = self._terms.get(event.cluster, 0)
        if event.misfit:
            return event.misfit
        if not event.finite:
            return "the gradient holds NaN or infinity"
        if event.samples <= 0:
            return f"it was computed from {event.samples} samples; at least 1 is needed"
        # Also true for a norm that overflowed: no number is below it.
        if not (math.isfinite(event.norm) and event.norm <= self._rules.norm_max):
            return f"the gradient's norm is {event.norm:g}; norm_max is {self._rules.norm_max:g}"
        if event.base_version != held.base_version:
            return f"it was computed from version {event.base_version}; the round is about {held.base_version}"
        if event.term < known_term:
            return f"term {event.term} is over; the cluster's agent holds term {known_term}"
        return ""

    def _close_if_complete(self, held: OpenRound, now_s: float) -> list[RoundCommand]:
        return [] if held.waits_for() else self._close(held, now_s)

    def _close(self, held: OpenRound, now_s: float) -> list[RoundCommand]:
        for cluster in held.waits_for():
            why = f"no answer within {self._rules.deadline_s:g} s"
            held.absent[cluster] = Absentee(cluster, Absence.MISSING, why)
        if len(held.contributions) < self._rules.quorum:
            return self._save(held, RoundOutcome.NO_QUORUM, now_s)
        held.stage = Stage.COMBINING
        return [Combine(held.number, self._version_last + 1, tuple(sorted(held.contributions)))]

    def _combined(self, event: Combined) -> list[RoundCommand]:
        held = self._at(event.number, Stage.COMBINING)
        weights = event.weights
        for cluster, why in event.left_out:
            del held.contributions[cluster]
            held.absent[cluster] = Absentee(cluster, Absence.REJECTED, why)
        policy = PolicyRecord(
            name=self._policy,
            version=self._version_last + 1,
            digest=weights.digest,
            location=weights.location,
            size_bytes=weights.size_bytes,
            created_s=event.now_s,
            parent_version=held.base_version,
            round_number=held.number,
            contributors=tuple(sorted(held.contributions)),
            samples=sum(given.samples for given in held.contributions.values()),
            optimiser_location=weights.optimiser_location,
            optimiser_digest=weights.optimiser_digest,
        )
        return self._save(held, RoundOutcome.COMBINED, event.now_s, policy=policy)

    def _save(
        self,
        held: OpenRound,
        outcome: RoundOutcome,
        now_s: float,
        *,
        policy: PolicyRecord | None = None,
        message: str = "",
    ) -> list[RoundCommand]:
        record = RoundRecord(
            number=held.number,
            policy=self._policy,
            base_version=held.base_version,
            version=policy.version if policy is not None else held.base_version,
            outcome=outcome,
            quorum=self._rules.quorum,
            asked=held.asked,
            contributions=tuple(held.contributions[name] for name in sorted(held.contributions)),
            absent=tuple(held.absent[name] for name in sorted(held.absent)),
            started_s=held.started_s,
            finished_s=now_s,
            message=message,
        )
        held.stage = Stage.SAVING
        held.saving = SaveRound(record, policy)
        return [held.saving]

    def _saved(self, held: OpenRound) -> list[RoundCommand]:
        assert held.saving is not None
        self._open = None
        self._number_last = held.number
        if held.saving.policy is None:
            return []
        self._version = self._version_last = held.saving.policy.version
        self._first_pending = False
        behind = tuple(name for name, member in self.members.items() if member.version != self._version)
        return [OfferPolicy(self._version, behind)] if behind else []

    def _collecting(self, number: int) -> OpenRound | None:
        """The open round if it is this one and still collects: what comes for another one is late."""
        held = self._open
        return held if held is not None and held.number == number and held.stage is Stage.COLLECTING else None

    def _at(self, number: int, stage: Stage) -> OpenRound:
        """The open round, which must be this one at this stage: our own answers never come out of turn."""
        held = self._open
        if held is None or held.number != number or held.stage is not stage:
            found = "none is open" if held is None else f"round {held.number} is {held.stage.value}"
            raise AssertionError(f"round {number} was to be {stage.value}, but {found}")
        return held


def _shortened(text: str) -> str:
    return text if len(text) <= TEXT_CHARS_MAX else f"{text[:TEXT_CHARS_MAX]} ..."
