"""Which version of its policy decides in a cluster, which one runs in its shadow, and when that changes. Decides only.

Every change is an order that is kept before it has an effect: somebody's (`promoted`, `rolled back`), or the cluster's
own (`configured` at its first start, `accepted` when a new version of the federation may decide). The newest order
counts. It is `pending` until its weights are in force, then `active`; an agent that dies in between goes on with it.

A candidate in shadow is asked what the active version is asked, and nothing that it says is acted on. Who is promoted
by hand stays: the federation's versions are accepted again after a promotion to the newest one.

A cluster may have two tracks: the federation's versions, and those of its own, which it learns by itself from the same
slots as if there were nobody else. New versions of the track that decides are taken at once, so nobody waits; those
of the other one follow each other in the shadow, and the tracks change places when the gate says so. It is always
asked the same: does the federation's do harm, compared with the cluster's own? So who gains from the others has all of
it, and who would be better off alone is, up to the gate's margin. (Ditto, Li et al., ICML 2021, and APFL, Deng et al.,
2020, keep a model of each cluster's own beside the common one, too; they mix both, which promises nothing where the
common one is bad.)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import isfinite, nan
from typing import Literal, assert_never

from msgspec.structs import replace

from fedsched.core.gate import GateOutcome, GateRule, GateVerdict, accepts, due
from fedsched.core.ids import ClusterName
from fedsched.core.record import Record

HISTORY_KEPT = 100
"""Older orders are forgotten."""
REFUSED_KEPT = 50
"""Versions that were refused and are not tried again when they are offered again."""
OWN = "own track"
"""Stands where the file of a version is named: the cluster has learned it by itself, beside the federation."""


class Version(Record, frozen=True):
    """A policy with certain weights."""

    policy: str
    version: int = 0
    """The federation's number; 0 where the weights come from a file."""
    digest: str = ""
    """Of the weights; empty while nobody has looked."""
    checkpoint: str = ""
    """File on the agent's machine, `builtin` or `OWN`; empty for a version of the federation."""

    def __str__(self) -> str:
        if self.version:
            return f"{self.policy} v{self.version}"
        if self.own:
            return f"{self.policy} of its own track"
        return f"{self.policy} of {self.checkpoint}" if self.checkpoint else self.policy

    @property
    def own(self) -> bool:
        """Whether the cluster has learned it by itself."""
        return self.checkpoint == OWN

    def same(self, other: Version) -> bool:
        """Whether both are the same weights, as far as is known."""
        if self.digest and other.digest:
            return (self.policy, self.digest) == (other.policy, other.digest)
        return (self.policy, self.version, self.checkpoint) == (other.policy, other.version, other.checkpoint)


class VersionName(Record, frozen=True):
    """How people name a version; exactly one of the last three is given."""

    policy: str = ""
    """Empty: the one that the cluster runs."""
    version: int = 0
    newest: bool = False
    """The one in force in the federation."""
    checkpoint: str = ""
    """Path on the machine of the cluster's agent, or `builtin`."""


class Action(StrEnum):
    """Why a version was to decide; stable names, part of the public interface."""

    CONFIGURED = "configured"
    PROMOTED = "promoted"
    ROLLED_BACK = "rolled back"
    ACCEPTED = "accepted"


class State(StrEnum):
    """What became of an order; stable names, part of the public interface."""

    PENDING = "pending"
    ACTIVE = "active"
    """It took effect: it decides, or did until the next one did."""
    REFUSED = "refused"
    """Its weights could not be used; what decided before goes on."""
    REPLACED = "replaced"
    """A newer order came before it took effect."""


class Promotion(Record, frozen=True):
    """An order that a version decide in a cluster, and what became of it."""

    cluster: ClusterName
    seq: int
    """Counts the cluster's orders, from 1."""
    version: Version
    action: Action
    by: str
    time_s: float
    """Unix time of the order."""
    why: str = ""
    pinned: bool = False
    """The federation's newer versions are not accepted as long as this one is in force."""
    back_to: int = 0
    """Of a rollback: the order that it repeats."""
    state: State = State.PENDING
    message: str = ""
    """Why it was refused, or what it waits for."""
    before: int = 0
    """The order that a rollback would return to; 0: there is none, or it has no effect yet."""


class Candidate(Record, frozen=True):
    """A version that is to run in a cluster's shadow."""

    version: Version
    by: str
    time_s: float
    promote: bool = False
    """It is to decide as soon as it has shown that it does no harm."""


class Wish(Record, frozen=True):
    """Somebody's word on what runs in a cluster's shadow."""

    candidate: Candidate | None
    """None: nothing any more."""


class Case(Record, frozen=True):
    """One slot that both have decided, the active version for real."""

    slot: int
    active_worth: float | None
    """Estimated; None where its answer could not be used."""
    candidate_worth: float | None
    """The same; None where it gave no answer in time or one that cannot be used."""
    agreement: float
    """Share of the slot's jobs that both give the same."""
    active_s: float
    """How long it took to answer."""
    candidate_s: float
    problem: str = ""
    """What was wrong with the candidate's answer."""


class Comparison(Record, frozen=True):
    """How a candidate stands against the active version: what a person needs to choose."""

    cluster: ClusterName
    active: Version
    candidate: Candidate
    verdict: GateVerdict
    cases: int
    """Slots that both were asked about."""
    valid: int
    """Those in which the candidate's answer could have been used."""
    agreement: float
    """Mean share of jobs that both gave the same, where it could."""
    active_worth: float
    """Mean over cases in which both could be valued; see `fedsched.policy.comparing`."""
    candidate_worth: float
    active_ms: tuple[float, float]
    """Median and largest time to answer."""
    candidate_ms: tuple[float, float]
    newest_s: float
    """When it last changed."""
    running: bool = True
    """Whether it goes on; else this is how it ended."""
    problem: str = ""
    """Why the candidate does not run, or what was last wrong with an answer."""


# Events


class Began(Record, frozen=True):
    """The agent starts. Always the first event."""

    now_s: float
    configured: Version
    history: tuple[Promotion, ...] = ()
    candidate: Candidate | None = None
    """Is to run in the shadow."""
    compared: Comparison | None = None
    """What was kept last of a comparison, and its cases."""
    cases: tuple[Case, ...] = ()


class Ordered(Record, frozen=True):
    """An order is in the store: somebody's, or the cluster's own after it was kept."""

    now_s: float
    promotion: Promotion


class Installed(Record, frozen=True):
    """The order's weights are in force from the next decision on."""

    now_s: float
    seq: int
    digest: str


class InstallFailed(Record, frozen=True):
    """The order's weights cannot be used."""

    now_s: float
    seq: int
    why: str


class InstallDelayed(Record, frozen=True):
    """The order's weights are not here yet; `Arrived` follows when they are."""

    now_s: float
    seq: int
    why: str


class Offered(Record, frozen=True):
    """The federation has made a new version, or the cluster one of its own, and its weights are here."""

    now_s: float
    version: Version


class Arrived(Record, frozen=True):
    """Weights that were asked for are here; `why` says why they never will be."""

    now_s: float
    version: Version
    why: str = ""


class Named(Record, frozen=True):
    """Somebody names a candidate, or None to end the comparison."""

    now_s: float
    candidate: Candidate | None


class Compared(Record, frozen=True):
    """A slot was decided by both."""

    now_s: float
    candidate: Candidate
    case: Case


class CandidateFailed(Record, frozen=True):
    """The candidate cannot run at all."""

    now_s: float
    candidate: Candidate
    why: str


VersionEvent = (
    Began
    | Ordered
    | Installed
    | InstallFailed
    | InstallDelayed
    | Offered
    | Arrived
    | Named
    | Compared
    | CandidateFailed
)


# Commands


class KeepPromotion(Record, frozen=True):
    """Make the order durable. Of a new one `Ordered` follows, unless another order came first with its number."""

    promotion: Promotion


class Install(Record, frozen=True):
    """Have the policy decide with these weights; `Installed`, `InstallFailed` or `InstallDelayed` follows."""

    seq: int
    version: Version


class RunShadow(Record, frozen=True):
    """Ask this candidate what the policy is asked, in place of the one before; None: nobody any more."""

    candidate: Candidate | None


class KeepComparison(Record, frozen=True):
    """Make this durable, so that people see it and a restarted agent goes on from it."""

    comparison: Comparison
    cases: tuple[Case, ...]


VersionCommand = KeepPromotion | Install | RunShadow | KeepComparison


class AcceptRule(Record, frozen=True):
    """What becomes of the federation's new versions."""

    accept: Literal["shadow", "at_once", "own_track"] = "shadow"
    """Compare them first and promote those that do no harm; promote all of them; or promote all of them unless they do
    harm compared with what the cluster learns by itself."""
    gate: GateRule = GateRule()


_NOTHING_YET = GateVerdict(GateOutcome.UNDECIDED, 0, 0, 0.0, None, "")


@dataclass(slots=True)
class _Shadow:
    """The candidate that runs."""

    candidate: Candidate
    cases: list[Case] = field(default_factory=list)
    count: int = 0
    verdict: GateVerdict = _NOTHING_YET
    problem: str = ""
    asked: bool = False
    """Since it is this version."""


class Versions:
    """One cluster's.

    Args:
        cluster: whose.
        rule: what becomes of new versions.
    """

    def __init__(self, cluster: ClusterName, rule: AcceptRule) -> None:
        self._cluster = cluster
        self._rule = rule
        self._policy = ""
        self._configured: Version | None = None
        self._history: dict[int, Promotion] = {}
        self._in_force: Promotion | None = None
        self._gone = False
        """The weights of `_in_force` are not here: the configured ones decide in their place."""
        self._waiting: dict[bool, Version] = {}
        """The newest version of the federation, and the own one (under True), while an order or another candidate is in
        its way."""
        self._shadow: _Shadow | None = None
        self._refused: list[str] = []
        """Digests of versions that the gate refused, oldest first."""

    @property
    def history(self) -> tuple[Promotion, ...]:
        """All orders, oldest first."""
        return tuple(self._history[seq] for seq in sorted(self._history))

    @property
    def in_force(self) -> Promotion | None:
        """The order whose version decides."""
        return self._in_force

    @property
    def candidate(self) -> Candidate | None:
        """What runs in the shadow."""
        return self._shadow.candidate if self._shadow is not None else None

    def handle(self, event: VersionEvent) -> list[VersionCommand]:
        """Take one event in; return what is to be done because of it, in order."""
        match event:
            case Began():
                return self._begin(event)
            case Ordered(now_s, promotion):
                return self._take_order(now_s, promotion)
            case Installed(now_s, seq, digest):
                return self._finish(now_s, seq, digest)
            case InstallFailed(now_s, seq, why):
                return self._fail(now_s, seq, why)
            case InstallDelayed(_, seq, why):
                self._gone = self._in_force is not None and self._in_force.seq == seq
                return self._close(seq, State.PENDING, why)
            case Offered(now_s, version):
                return [*self._arrive(now_s, version, ""), *self._consider(now_s, version)]
            case Arrived(now_s, version, why):
                return self._arrive(now_s, version, why)
            case Named(now_s, candidate):
                return self._name(now_s, candidate)
            case Compared(now_s, candidate, case):
                return self._compare(now_s, candidate, case)
            case CandidateFailed(now_s, candidate, why):
                return self._give_up(now_s, candidate, why)
            case _:
                assert_never(event)

    # --- orders

    def _begin(self, event: Began) -> list[VersionCommand]:
        self._policy, self._configured = event.configured.policy, event.configured
        self._history = {promotion.seq: promotion for promotion in event.history}
        mine = [p for p in self.history if p.version.policy == self._policy]
        active = [p for p in mine if p.state is State.ACTIVE]
        commands: list[VersionCommand] = []
        if active:
            self._in_force = active[-1]
            commands.append(Install(active[-1].seq, active[-1].version))
        else:
            why = "the agent's first start" if not event.history else f"the agent is configured for {self._policy} now"
            commands += self._order(event.now_s, event.configured, Action.CONFIGURED, why)
        for promotion in self.history:
            if promotion.state is State.PENDING:
                commands += self._take_order(event.now_s, promotion)
        if event.candidate is not None:
            compared, in_force = event.compared, self._in_force
            goes_on = (
                compared is not None
                and compared.candidate == event.candidate
                and in_force is not None
                and self._still(compared.active, in_force)
            )
            commands += self._start(event.now_s, event.candidate, event.cases if goes_on else ())
        return commands

    def _order(
        self, now_s: float, version: Version, action: Action, why: str, *, pinned: bool = False
    ) -> list[VersionCommand]:
        """An order of the cluster's own; it is taken up when it has been kept."""
        seq = max(self._history, default=0) + 1
        actor = f"agent/{self._cluster}"
        return [KeepPromotion(Promotion(self._cluster, seq, version, action, actor, now_s, why, pinned))]

    def _take_order(self, now_s: float, promotion: Promotion) -> list[VersionCommand]:
        known = self._history.get(promotion.seq)
        if known is not None and known.state is not State.PENDING:
            return []  # what this agent itself has written comes back by the watch
        self._history[promotion.seq] = promotion
        if promotion.state is not State.PENDING:
            return []
        commands: list[VersionCommand] = []
        newest = max(self._history)
        for older in self.history:
            if older.state is State.PENDING and older.seq < newest:
                commands += self._close(older.seq, State.REPLACED, f"order {newest} came before it took effect")
        if promotion.seq < newest:
            return commands
        if promotion.version.policy != self._policy:
            why = (
                f"{promotion.version} does not fit: the agent of {self._cluster} is configured for {self._policy}; "
                f"set policy.name in its configuration first"
            )
            return commands + self._close(promotion.seq, State.REFUSED, why)
        return [*commands, Install(promotion.seq, promotion.version)]

    def _finish(self, now_s: float, seq: int, digest: str) -> list[VersionCommand]:
        promotion = self._history.get(seq)
        if promotion is None or promotion.state is not State.PENDING:
            self._gone = False  # what was in force before the agent's start is so again
            return []
        version = replace(promotion.version, digest=digest)
        replaced = self._in_force
        before = replaced.seq if replaced is not None else 0
        if promotion.action is Action.ROLLED_BACK:
            repeated = self._history.get(promotion.back_to)
            before = repeated.before if repeated is not None else 0
        done = replace(promotion, version=version, state=State.ACTIVE, before=before, message="")
        self._history[seq] = self._in_force = done
        for old in [old for old in self._history if old <= seq - HISTORY_KEPT]:
            del self._history[old]
        commands: list[VersionCommand] = [KeepPromotion(done)]
        candidate = self.candidate
        same = candidate is not None and version.same(candidate.version)
        if replaced is not None and self._still(replaced.version, done) and not same:
            return commands + self._next(now_s)
        return commands + self._restart_shadow(now_s)

    def _close(self, seq: int, state: State, why: str) -> list[VersionCommand]:
        promotion = self._history.get(seq)
        if (
            promotion is None
            or promotion.state is not State.PENDING
            or (promotion.state, promotion.message) == (state, why)
        ):
            return []
        self._history[seq] = replace(promotion, state=state, message=why)
        return [KeepPromotion(self._history[seq])]

    def _fail(self, now_s: float, seq: int, why: str) -> list[VersionCommand]:
        in_force = self._in_force
        if in_force is None or in_force.seq != seq or self._configured is None:
            return self._close(seq, State.REFUSED, why)
        if in_force.version == self._configured:
            return []
        # The agent has begun anew, and what decided before cannot be had any more. That must be seen in the history.
        why = f"{in_force.version} cannot be used any more: {why}"
        return self._order(now_s, self._configured, Action.CONFIGURED, why)

    def _arrive(self, now_s: float, version: Version, why: str) -> list[VersionCommand]:
        """Weights have come, or never will; an order may have waited for them."""
        in_force = self._in_force
        if self._gone and in_force is not None and _names(in_force.version, version):
            self._gone = False
            return self._fail(now_s, in_force.seq, why) if why else [Install(in_force.seq, in_force.version)]
        for promotion in reversed(self.history):
            if promotion.state is State.PENDING and _names(promotion.version, version):
                if why:
                    return self._close(promotion.seq, State.REFUSED, why)
                return [Install(promotion.seq, promotion.version)]
        return []

    # --- the federation's versions

    def _consider(self, now_s: float, version: Version) -> list[VersionCommand]:
        if version.policy != self._policy:
            return []
        in_force = self._in_force
        if in_force is None or in_force.version.same(version) or version.digest in self._refused:
            return []
        if in_force.pinned:
            return []
        if any(promotion.state is State.PENDING for promotion in self.history):
            self._waiting[version.own] = version
            return []
        if self._rule.accept == "at_once" or self._goes_on(in_force, version):
            why = "the cluster learned it by itself" if version.own else "the federation offered it"
            return self._order(now_s, version, Action.ACCEPTED, why)
        if self._shadow is not None:
            if self._follows(self._shadow, version):
                return self._renew(now_s, self._shadow, version)
            # A version that is being compared is not thrown out for the next one, or none would ever be through.
            self._waiting[version.own] = version
            return []
        candidate = Candidate(version, f"agent/{self._cluster}", now_s, promote=True)
        return self._start(now_s, candidate)

    def _goes_on(self, in_force: Promotion, version: Version) -> bool:
        """Whether it is the next one of the track that decides, of two."""
        return self._rule.accept == "own_track" and version.own == in_force.version.own

    def _follows(self, shadow: _Shadow, version: Version) -> bool:
        """Whether it takes the place of the candidate: of two tracks it is the tracks that are compared, and an old
        version of one that still learns would speak for the other. Each is asked once at least, however slow it is.
        """
        candidate = shadow.candidate
        chosen = self._rule.accept == "own_track" and _is_own(candidate)
        return chosen and shadow.asked and candidate.version.own == version.own

    def _renew(self, now_s: float, shadow: _Shadow, version: Version) -> list[VersionCommand]:
        self._waiting.pop(version.own, None)
        shadow.candidate, shadow.asked = replace(shadow.candidate, version=version, time_s=now_s), False
        return [RunShadow(shadow.candidate), self._report(now_s)]

    def _still(self, compared: Version, in_force: Promotion) -> bool:
        """Whether what was compared with that one holds for this one: the same, or a later one of the same track."""
        return compared.same(in_force.version) or (
            not in_force.pinned and in_force.action is Action.ACCEPTED and self._goes_on(in_force, compared)
        )

    # --- the candidate

    def _name(self, now_s: float, candidate: Candidate | None) -> list[VersionCommand]:
        shadow = self._shadow
        if candidate is None:
            return [*self._end(now_s, "ended by hand"), *self._next(now_s)] if shadow is not None else []
        if shadow is not None and shadow.candidate == candidate:
            return []
        return self._start(now_s, candidate)

    def _start(self, now_s: float, candidate: Candidate, cases: Iterable[Case] = ()) -> list[VersionCommand]:
        self._shadow = shadow = _Shadow(candidate, list(cases))
        shadow.count = len(shadow.cases)
        return [RunShadow(candidate), self._report(now_s)]

    def _restart_shadow(self, now_s: float) -> list[VersionCommand]:
        """The candidate stands against another version now; what was compared before says nothing."""
        shadow, in_force = self._shadow, self._in_force
        assert in_force is not None
        if shadow is None:
            return self._next(now_s)
        if in_force.version.same(shadow.candidate.version) or (in_force.pinned and _is_own(shadow.candidate)):
            return self._end(now_s, f"{in_force.version} decides now")
        self._shadow = _Shadow(shadow.candidate)
        return [self._report(now_s)]

    def _compare(self, now_s: float, candidate: Candidate, case: Case) -> list[VersionCommand]:
        shadow, rule = self._shadow, self._rule.gate
        if shadow is None or shadow.candidate != candidate:
            return []  # the answer of one that ran before
        shadow.count, shadow.asked = shadow.count + 1, True
        shadow.cases = [*shadow.cases[-(rule.cases_max - 1) :], case]
        shadow.problem = case.problem or shadow.problem
        if shadow.count < rule.cases_min:
            shadow.verdict = self._verdict(shadow)
        elif shadow.count <= rule.cases_max and due(shadow.count, rule):
            shadow.verdict = self._verdict(shadow)
            if shadow.candidate.promote and shadow.verdict.outcome is not GateOutcome.UNDECIDED:
                return self._conclude(now_s, shadow)
        return [self._report(now_s)]

    def _verdict(self, shadow: _Shadow) -> GateVerdict:
        """On the candidate. One of the cluster's own takes the place of the federation's where that does harm."""
        own = self._rule.accept == "own_track" and shadow.candidate.version.own
        return (harm_without if own else verdict_on)(shadow.cases, self._rule.gate)

    def _conclude(self, now_s: float, shadow: _Shadow) -> list[VersionCommand]:
        version, verdict = shadow.candidate.version, shadow.verdict
        commands = self._end(now_s, "")
        if verdict.accepted:
            return commands + self._order(now_s, version, Action.ACCEPTED, verdict.why)
        self._refused = [*self._refused, version.digest][-REFUSED_KEPT:]
        return commands + self._next(now_s)

    def _give_up(self, now_s: float, candidate: Candidate, why: str) -> list[VersionCommand]:
        if self._shadow is None or self._shadow.candidate != candidate:
            return []
        if _is_own(self._shadow.candidate):
            self._refused = [*self._refused, self._shadow.candidate.version.digest][-REFUSED_KEPT:]
        return [*self._end(now_s, why), *self._next(now_s)]

    def _end(self, now_s: float, problem: str) -> list[VersionCommand]:
        assert self._shadow is not None
        self._shadow.problem = problem or self._shadow.problem
        report = self._report(now_s, running=False)
        self._shadow = None
        return [RunShadow(None), report]

    def _next(self, now_s: float) -> list[VersionCommand]:
        """A version that came while another one was in its way."""
        waiting, self._waiting = self._waiting, {}
        commands: list[VersionCommand] = []
        for own in sorted(waiting):
            commands += self._consider(now_s, waiting[own])
        return commands

    def _report(self, now_s: float, *, running: bool = True) -> KeepComparison:
        shadow, in_force = self._shadow, self._in_force
        assert shadow is not None
        active = in_force.version if in_force is not None else Version(self._policy)
        comparison = _summary(self._cluster, active, shadow.candidate, shadow.cases, shadow.verdict)
        return KeepComparison(
            replace(comparison, newest_s=now_s, running=running, cases=shadow.count, problem=shadow.problem),
            tuple(shadow.cases) if running else (),
        )


def verdict_on(cases: Sequence[Case], rule: GateRule) -> GateVerdict:
    """Whether the candidate does no harm, by what both were worth."""
    return accepts(
        [_or_nan(case.active_worth) for case in cases], [_or_nan(case.candidate_worth) for case in cases], rule
    )


def harm_without(cases: Sequence[Case], rule: GateRule) -> GateVerdict:
    """The same the other way round: the candidate is accepted where the active version does harm compared with it; of
    cases that leave it open, see `GateRule.by_estimate`.
    """
    stays = accepts(
        [_or_nan(case.candidate_worth) for case in cases], [_or_nan(case.active_worth) for case in cases], rule
    )
    opposite = {GateOutcome.ACCEPTED: GateOutcome.REFUSED, GateOutcome.REFUSED: GateOutcome.ACCEPTED}
    why = f"of what decides, compared with it: {stays.why}"
    return replace(stays, outcome=opposite.get(stays.outcome, stays.outcome), change=-stays.change, why=why)


def earlier(history: Sequence[Promotion]) -> Promotion | None:
    """The order that a rollback repeats: what decided before; where the newest one is pending, what decides now.

    None where there is nothing to return to.
    """
    by_seq = {promotion.seq: promotion for promotion in history}
    active = [promotion for promotion in history if promotion.state is State.ACTIVE]
    if not active:
        return None
    if history[-1].state is State.PENDING:
        return active[-1]
    return by_seq.get(active[-1].before)


def _names(wanted: Version, here: Version) -> bool:
    """Whether what is here is the version of the federation that is wanted; its digest is looked at when it is used."""
    return bool(wanted.version) and (wanted.policy, wanted.version) == (here.policy, here.version)


def _is_own(candidate: Candidate) -> bool:
    """Whether the cluster chose it by itself, because the federation offered it."""
    return candidate.by.startswith("agent/")


def _or_nan(worth: float | None) -> float:
    return nan if worth is None else worth


def _summary(
    cluster: ClusterName, active: Version, candidate: Candidate, cases: Sequence[Case], verdict: GateVerdict
) -> Comparison:
    usable = [case for case in cases if case.candidate_worth is not None]
    both = [case for case in usable if case.active_worth is not None]
    return Comparison(
        cluster=cluster,
        active=active,
        candidate=candidate,
        verdict=verdict,
        cases=len(cases),
        valid=len(usable),
        agreement=_mean([case.agreement for case in usable]),
        active_worth=_mean([_or_nan(case.active_worth) for case in both]),
        candidate_worth=_mean([_or_nan(case.candidate_worth) for case in both]),
        active_ms=_times_ms([case.active_s for case in cases]),
        candidate_ms=_times_ms([case.candidate_s for case in usable]),
        newest_s=0.0,
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _times_ms(times_s: Sequence[float]) -> tuple[float, float]:
    ordered = sorted(value for value in times_s if isfinite(value))
    return (ordered[len(ordered) // 2] * 1e3, ordered[-1] * 1e3) if ordered else (0.0, 0.0)
