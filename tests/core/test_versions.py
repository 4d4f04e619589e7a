"""Who decides in a cluster is what was ordered last and could be done; whatever dies, and whoever orders at once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from fedsched.core.gate import GateOutcome, GateRule
from fedsched.core.ids import ClusterName
from fedsched.core.versions import (
    OWN,
    AcceptRule,
    Action,
    Arrived,
    Began,
    Candidate,
    CandidateFailed,
    Case,
    Compared,
    Comparison,
    Named,
    Offered,
    Ordered,
    Promotion,
    State,
    Version,
    VersionEvent,
    Versions,
    earlier,
)
from fedsched.runtime.versioning import NotHere, VersionLoop

EAST = ClusterName("east")
CONFIGURED = Version("dl2", 0, "d0", "builtin")
RULE = AcceptRule("shadow", GateRule(cases_min=10, cases_max=40))


def version(number: int) -> Version:
    return Version("dl2", number, f"d{number}")


def own(number: int) -> Version:
    return Version("dl2", 0, f"o{number}", OWN)


class Killed(Exception):
    """The agent's process ends here."""


class Agents:
    """One agent after the other on one store and one disk; `kill_at` ends the next one at its so-manieth effect."""

    def __init__(self, rule: AcceptRule = RULE, configured: Version = CONFIGURED) -> None:
        self.rule, self.configured = rule, configured
        self.store: dict[int, Promotion] = {}
        self.weights = {"d0"}
        self.comparison: Comparison | None = None
        self.cases: tuple[Case, ...] = ()
        self.decides = "d0"
        self.shadow: Candidate | None = None
        self.asked_for: list[Version] = []
        self.effects = 0
        self.kill_at: int | None = None
        self.start()

    def start(self) -> None:
        """A new agent: what is not in the store or on the disk is gone."""
        self.kill_at, self.decides, self.shadow = None, self.configured.digest, None
        self.loop = VersionLoop(Versions(EAST, self.rule), self)
        compared = self.comparison
        going = compared.candidate if compared is not None and compared.running else None
        history = tuple(self.store[seq] for seq in sorted(self.store))
        self.tell(Began(1.0, self.configured, history, going, compared, self.cases))

    def tell(self, event: VersionEvent) -> None:
        try:
            self.loop.handle(event)
        except Killed:
            self.start()

    def order(
        self,
        wanted: Version,
        action: Action = Action.PROMOTED,
        *,
        pinned: bool = True,
        told: bool = True,
        back_to: int = 0,
    ) -> Promotion:
        """What a controller writes, and the agent hears of."""
        seq = max(self.store, default=0) + 1
        promotion = Promotion(EAST, seq, wanted, action, "li", 5.0, "a test", pinned, back_to)
        self.store[seq] = promotion
        if told:
            self.tell(Ordered(5.0, promotion))
        return self.store[seq]

    def roll_back(self) -> Promotion:
        target = earlier(self.history)
        assert target is not None
        return self.order(target.version, Action.ROLLED_BACK, back_to=target.seq)

    def offer(self, number: int) -> None:
        self.weights.add(f"d{number}")
        self.tell(Offered(2.0, version(number)))

    def learn_alone(self, number: int) -> None:
        """The cluster's own track has made its so-manieth version."""
        self.weights.add(f"o{number}")
        self.tell(Offered(2.0, own(number)))

    def compare(self, times: int, better: float, problem: str = "") -> None:
        """So many slots in which the candidate is worth so many times as much."""
        for slot in range(times):
            candidate = self.loop.core.candidate
            if candidate is None:
                return
            worth = 1.0 + slot % 3
            case = Case(slot, worth, None if problem else worth * better, 0.5, 0.001, 0.002, problem)
            self.tell(Compared(3.0, candidate, case))

    @property
    def history(self) -> tuple[Promotion, ...]:
        return tuple(self.store[seq] for seq in sorted(self.store))

    def told(self) -> list[str]:
        return [f"{order.version} {order.action.value} {order.state.value}" for order in self.history]

    # --- the ports

    def _effect(self) -> None:
        self.effects += 1
        if self.effects == self.kill_at:
            raise Killed

    def now_s(self) -> float:
        return 4.0

    def keep_promotion(self, promotion: Promotion) -> bool:
        self._effect()
        known = self.store.get(promotion.seq)
        if known is not None and known.by != promotion.by:
            return False
        self.store[promotion.seq] = promotion
        self._effect()
        return True

    def install(self, wanted: Version) -> str:
        self._effect()
        if wanted.version and wanted.digest not in self.weights:
            self.asked_for.append(wanted)
            raise NotHere(f"waits for the aggregator to send {wanted}")
        if wanted.digest == "damaged":
            raise ValueError(f"the digest of {wanted} is another one")
        self.decides = wanted.digest
        self._effect()
        return wanted.digest

    def run_shadow(self, candidate: Candidate | None) -> None:
        self._effect()
        self.shadow = candidate

    def keep_comparison(self, comparison: Comparison, cases: tuple[Case, ...]) -> None:
        self._effect()
        self.comparison, self.cases = comparison, cases


def test_a_first_start_is_in_the_history_so_that_there_is_something_to_return_to() -> None:
    agents = Agents()
    assert agents.told() == ["dl2 of builtin configured active"]
    agents.start()
    assert len(agents.store) == 1, "a second start is no news"


def test_what_is_promoted_decides_from_then_on_and_after_a_restart() -> None:
    agents = Agents()
    agents.weights.add("d7")
    agents.order(version(7))
    assert agents.decides == "d7"
    agents.start()
    assert agents.decides == "d7"
    assert agents.told() == ["dl2 of builtin configured active", "dl2 v7 promoted active"]


def test_rolling_back_returns_to_the_version_before_step_by_step_and_no_further() -> None:
    """Twice back must not be forth again: whoever rolls back twice wants the version before the one before."""
    agents = Agents()
    agents.weights |= {"d7", "d8"}
    agents.order(version(7))
    agents.order(version(8))
    agents.roll_back()
    assert agents.decides == "d7"
    agents.roll_back()
    assert agents.decides == "d0"
    assert earlier(agents.history) is None
    agents.order(version(8))
    agents.roll_back()
    assert agents.decides == "d0"


def test_rolling_back_an_order_that_has_no_effect_yet_keeps_what_decides() -> None:
    agents = Agents()
    agents.order(version(9))
    assert agents.decides == "d0"
    assert agents.history[-1].message == "waits for the aggregator to send dl2 v9"
    agents.roll_back()
    assert agents.told()[1:] == ["dl2 v9 promoted replaced", "dl2 of builtin rolled back active"]


def test_weights_that_are_not_here_are_waited_for_and_then_decide() -> None:
    agents = Agents()
    agents.order(version(9))
    assert agents.asked_for == [version(9)]
    agents.weights.add("d9")
    agents.tell(Arrived(6.0, version(9)))
    assert (agents.decides, agents.history[-1].state, agents.history[-1].message) == ("d9", State.ACTIVE, "")


def test_weights_that_will_never_come_are_refused_with_the_reason() -> None:
    agents = Agents()
    agents.order(version(9))
    agents.tell(Arrived(6.0, version(9), "its file is gone"))
    assert (agents.decides, agents.history[-1].state) == ("d0", State.REFUSED)
    assert agents.history[-1].message == "its file is gone"


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        (Version("set", 3, "d3"), "set v3 does not fit: the agent of east is configured for dl2"),
        (replace(version(0), digest="damaged", checkpoint="/a/file"), "the digest of dl2 of /a/file is another one"),
    ],
)
def test_what_cannot_decide_is_refused_and_what_did_goes_on(wanted: Version, why: str) -> None:
    agents = Agents()
    order = agents.order(wanted)
    assert (order.state, agents.decides) == (State.REFUSED, "d0")
    assert why in order.message
    assert earlier(agents.history) is None, "a refused order is nothing to return from"


def test_of_two_orders_that_wait_the_newest_counts() -> None:
    """Two people promote while the agent is away."""
    agents = Agents()
    agents.weights |= {"d7", "d8"}
    agents.order(version(7), told=False)
    agents.order(version(8), told=False)
    agents.start()
    assert agents.decides == "d8"
    assert agents.told()[1:] == ["dl2 v7 promoted replaced", "dl2 v8 promoted active"]
    assert agents.history[1].message == "order 3 came before it took effect"


def test_an_agent_configured_for_another_policy_begins_with_that() -> None:
    """The history stays, and nothing of it is tried on a policy that it does not fit."""
    agents = Agents()
    agents.weights.add("d7")
    agents.order(version(7))
    agents.configured = Version("set", 0, "s0", "builtin")
    agents.start()
    assert agents.decides == "s0"
    assert agents.told()[-1] == "set of builtin configured active"
    assert agents.history[-1].why == "the agent is configured for set now"


def test_a_version_whose_weights_are_lost_is_replaced_by_the_configured_one_and_the_history_says_so() -> None:
    agents = Agents()
    agents.weights.add("d7")
    agents.order(version(7))
    agents.weights.discard("d7")
    agents.start()
    assert (agents.decides, agents.asked_for) == ("d0", [version(7)]), "the aggregator may still have it"
    agents.tell(Arrived(6.0, version(7), "version 7 is not kept any more"))
    assert agents.told()[-1] == "dl2 of builtin configured active"
    assert agents.history[-1].why == "dl2 v7 cannot be used any more: version 7 is not kept any more"


# --- the federation's versions


def test_a_new_version_decides_after_it_has_done_no_harm_in_the_shadow() -> None:
    """And not a slot before: it was asked, and nothing was done."""
    agents = Agents()
    agents.offer(2)
    assert agents.shadow is not None
    agents.compare(9, better=1.1)
    assert agents.decides == "d0"
    agents.compare(1, better=1.1)
    assert agents.decides == "d2"
    assert agents.loop.core.candidate is None
    assert agents.told()[-1] == "dl2 v2 accepted active"
    assert agents.history[-1].by == "agent/east"
    assert "does no harm: +10.0%" in agents.history[-1].why
    assert agents.comparison is not None
    assert (agents.comparison.running, agents.comparison.verdict.outcome) == (False, GateOutcome.ACCEPTED)


def test_a_version_that_does_harm_never_decides_however_often_it_is_offered() -> None:
    """Agents are offered the version in force whenever they connect."""
    agents = Agents()
    agents.offer(2)
    agents.compare(40, better=0.8)
    agents.offer(2)
    assert (agents.decides, agents.shadow) == ("d0", None)
    assert agents.comparison is not None
    assert agents.comparison.verdict.outcome is GateOutcome.REFUSED
    agents.offer(3)
    assert agents.shadow is not None
    assert agents.shadow.version == version(3)


def test_a_version_that_gives_no_usable_answers_is_refused() -> None:
    agents = Agents()
    agents.offer(2)
    agents.compare(10, better=1.0, problem="did not answer within 1 s")
    assert (agents.decides, agents.shadow) == ("d0", None)
    assert agents.comparison is not None
    assert agents.comparison.problem == "did not answer within 1 s"
    assert "failed in 10 of 10 cases" in agents.comparison.verdict.why


def test_a_version_is_judged_to_its_end_and_then_the_newest_one_follows() -> None:
    """Rounds may be held more often than verdicts are reached; each new one must not throw out the one before."""
    agents = Agents()
    for number in (2, 3, 4):
        agents.offer(number)
    agents.compare(10, better=1.0)
    assert agents.decides == "d2"
    assert agents.shadow is not None
    assert agents.shadow.version == version(4)


def test_at_once_every_version_decides_at_once_and_stands_in_the_history() -> None:
    agents = Agents(AcceptRule("at_once"))
    for number in (2, 3):
        agents.offer(number)
    assert agents.decides == "d3"
    assert agents.told()[1:] == ["dl2 v2 accepted active", "dl2 v3 accepted active"]


@pytest.mark.parametrize("accept", ["shadow", "at_once"])
def test_who_is_promoted_by_hand_stays_until_somebody_promotes_the_newest(accept: str) -> None:
    """A rollback that the next round undoes is none."""
    agents = Agents(AcceptRule(accept, RULE.gate))  # type: ignore[arg-type]
    agents.weights.add("d2")
    agents.order(version(2))
    agents.offer(3)
    agents.compare(40, better=2.0)
    assert agents.decides == "d2"
    assert agents.loop.core.candidate is None
    agents.order(version(3), pinned=False)
    agents.offer(4)
    agents.compare(40, better=2.0)
    assert agents.decides == "d4"


def test_a_comparison_goes_on_after_a_restart() -> None:
    agents = Agents()
    agents.offer(2)
    agents.compare(6, better=1.1)
    agents.start()
    assert agents.shadow is not None
    agents.compare(4, better=1.1)
    assert agents.decides == "d2"


def test_a_comparison_begins_anew_when_another_version_decides() -> None:
    """Who was better than the old one may be worse than the new one."""
    agents = Agents()
    agents.weights |= {"d5", "d7"}
    agents.tell(Named(2.0, Candidate(version(5), "li", 2.0)))
    agents.compare(6, better=1.1)
    agents.order(version(7))
    assert agents.comparison is not None
    assert (agents.comparison.cases, agents.comparison.active) == (0, version(7))


def test_a_candidate_named_by_hand_is_compared_and_nothing_else() -> None:
    """Of another policy, too: that is how one sees whether to change to it."""
    agents = Agents()
    other = Candidate(Version("set", 0, "", "builtin"), "li", 2.0)
    agents.tell(Named(2.0, other))
    agents.compare(60, better=2.0)
    assert agents.decides == "d0"
    assert agents.loop.core.candidate == other
    assert agents.comparison is not None
    assert (agents.comparison.cases, agents.comparison.valid, agents.comparison.verdict.accepted) == (60, 40, True)
    agents.tell(Named(3.0, None))
    assert agents.loop.core.candidate is None
    assert not agents.comparison.running


def test_a_candidate_named_for_promotion_is_promoted_when_it_has_shown_that_it_does_no_harm() -> None:
    agents = Agents()
    agents.weights.add("d5")
    agents.tell(Named(2.0, Candidate(version(5), "li", 2.0, promote=True)))
    agents.compare(10, better=1.0)
    assert agents.decides == "d5"


def test_a_candidate_that_cannot_run_is_told_of_and_does_not_stand_in_the_way() -> None:
    """Its file was deleted, say."""
    agents = Agents()
    gone = Candidate(Version("dl2", 0, "", "/gone"), "li", 2.0)
    agents.tell(Named(2.0, gone))
    agents.tell(CandidateFailed(2.0, gone, "cannot read checkpoint /gone"))
    assert agents.comparison is not None
    assert (agents.comparison.running, agents.comparison.problem) == (False, "cannot read checkpoint /gone")
    assert (agents.comparison.cases, agents.comparison.verdict.error) == (0, None), "of no case no error is known"
    agents.offer(2)
    assert agents.shadow is not None


def test_an_answer_of_a_candidate_that_ran_before_counts_for_nobody() -> None:
    agents = Agents()
    agents.offer(2)
    old = agents.shadow
    assert old is not None
    agents.tell(Named(2.0, Candidate(version(5), "li", 2.0)))
    agents.tell(Compared(3.0, old, Case(1, 1.0, 1.0, 1.0, 0.0, 0.0)))
    assert agents.comparison is not None
    assert agents.comparison.cases == 0


# --- what the cluster learns alone, beside the federation


TWO_TRACKS = AcceptRule("own_track", replace(RULE.gate, by_estimate=True))


def test_beside_an_own_track_the_federations_versions_decide_at_once() -> None:
    """Who gains from the others must not wait for a comparison at every round; the own track costs it nothing."""
    agents = Agents(TWO_TRACKS)
    for number in range(2, 30):
        agents.offer(number)
        agents.learn_alone(number)
        assert agents.shadow is not None
        assert agents.shadow.version == own(number), "the newest stands for what is learned alone"
        agents.compare(1, better=0.9)
        assert agents.decides == f"d{number}"


def test_what_was_learned_alone_decides_where_the_federations_versions_do_harm() -> None:
    """However often new ones come: harm is of the track, so what was compared with one of it holds for the next."""
    agents = Agents(TWO_TRACKS)
    for number in range(2, 12):
        agents.offer(number)
        agents.learn_alone(number)
        assert agents.decides == f"d{number}"
        agents.compare(1, better=1.3)
    assert agents.decides == "o11", "the newest, not the one that was compared"
    accepted = next(order for order in agents.history if order.version.own)
    assert accepted.version == own(11), "the newest stands for what is learned alone"
    assert "of what decides, compared with it: it does harm: -23.1%" in accepted.why
    agents.learn_alone(12)
    assert agents.decides == "o12"


def test_what_is_learned_alone_is_compared_as_it_is_now_and_each_version_is_asked() -> None:
    """A version of twenty slots ago would speak for the federation; one replaced before it answers says nothing."""
    agents = Agents(TWO_TRACKS)
    for number in (2, 3, 4):
        agents.learn_alone(number)
    assert agents.shadow is not None
    assert agents.shadow.version == own(2), "it was not asked yet"
    agents.compare(1, better=1.0)
    agents.learn_alone(5)
    assert agents.shadow.version == own(5)
    assert agents.comparison is not None
    assert (agents.comparison.cases, agents.comparison.candidate.version) == (1, own(5))
    agents.compare(9, better=1.0)
    assert agents.shadow is None, "ten cases have been enough, whichever versions they were of"
    assert agents.decides == "d0"


def test_the_federations_versions_decide_again_once_they_do_no_harm() -> None:
    agents = Agents(TWO_TRACKS)
    agents.offer(2)
    agents.learn_alone(2)
    agents.compare(10, better=1.3)
    assert agents.decides == "o2"
    agents.offer(3)
    assert agents.shadow is not None
    for number in range(3, 13):
        agents.learn_alone(number)
        agents.offer(number + 1)
        agents.compare(1, better=1.0)
    assert agents.decides == "d13", "the newest, not the one that was compared"
    agents.learn_alone(13)
    assert agents.decides == "d13"


def test_who_decides_by_its_own_track_goes_on_so_while_nobody_hears_of_the_federation() -> None:
    """A cluster that is away learns on."""
    agents = Agents(TWO_TRACKS)
    agents.learn_alone(2)
    agents.compare(10, better=1.3)
    for number in (3, 4):
        agents.learn_alone(number)
    assert agents.decides == "o4"


def test_which_track_decides_and_how_they_compare_outlives_the_agent() -> None:
    agents = Agents(TWO_TRACKS)
    agents.offer(2)
    agents.learn_alone(2)
    agents.compare(7, better=1.3)
    agents.offer(3)
    agents.start()
    assert agents.comparison is not None
    assert agents.comparison.cases == 7
    agents.compare(3, better=1.3)
    assert agents.decides == "o2"
    agents.start()
    assert agents.decides == "o2"
    agents.learn_alone(3)
    assert agents.decides == "o3"


def test_what_was_promoted_by_hand_stays_whatever_is_learned_alone() -> None:
    agents = Agents(TWO_TRACKS)
    agents.learn_alone(2)
    agents.order(version(7))
    agents.weights.add("d7")
    agents.tell(Arrived(3.0, version(7)))
    agents.learn_alone(3)
    agents.offer(8)
    assert (agents.decides, agents.shadow) == ("d7", None)


# --- whatever happens


Step = Callable[[Agents], object]
STEPS = st.one_of(
    st.builds(lambda n: lambda agents: agents.order(version(n)), st.integers(2, 6)),
    st.builds(lambda n: lambda agents: agents.order(version(n), pinned=False, told=False), st.integers(2, 6)),
    st.builds(lambda n: lambda agents: agents.offer(n), st.integers(2, 6)),
    st.builds(lambda n: lambda agents: agents.learn_alone(n), st.integers(2, 6)),
    st.builds(lambda n, w: lambda agents: agents.compare(n, w), st.integers(1, 12), st.sampled_from([0.8, 1.0, 1.2])),
    st.builds(lambda n: lambda agents: agents.tell(Arrived(3.0, version(n))), st.integers(2, 6)),
    st.just(lambda agents: agents.roll_back() if earlier(agents.history) else None),
    st.builds(
        lambda n: lambda agents: agents.tell(Named(2.0, Candidate(version(n), "li", 2.0) if n else None)),
        st.sampled_from([0, 4, 5]),
    ),
    st.just(lambda agents: agents.start()),
    st.builds(lambda n: lambda agents: setattr(agents, "kill_at", agents.effects + n), st.integers(1, 6)),
)


@settings(max_examples=200)
@given(st.lists(STEPS, max_size=14), st.sampled_from(["shadow", "at_once", "own_track"]))
def test_whatever_dies_and_whoever_orders_the_newest_order_that_can_be_done_decides(
    steps: list[Step], accept: str
) -> None:
    """An agent killed between an order and its effect must neither lose the order nor obey one that never was kept."""
    agents = Agents(AcceptRule(accept, RULE.gate))  # type: ignore[arg-type]
    for step in steps:
        step(agents)
        known = {order.version.digest for order in agents.history}
        assert agents.decides in known | {"d0"}, "somebody decides whom nobody ordered"
    agents.weights |= {f"d{number}" for number in range(2, 7)}
    agents.start()
    last = agents.history[-1]
    assert last.state is State.ACTIVE
    assert agents.decides == last.version.digest
    assert [order.state for order in agents.history].count(State.PENDING) == 0
    agents.start()
    assert agents.decides == last.version.digest
    assert agents.history[-1] == last, "a restart alone changes nothing"
