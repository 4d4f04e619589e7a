"""The core of the rounds: events in, commands out."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsched.core.ids import ClusterName
from fedsched.core.rounds import (
    Absence,
    Combine,
    Combined,
    CombineFailed,
    DeadlinePassed,
    MemberJoined,
    MemberLeft,
    MemberReported,
    NewWeights,
    OfferPolicy,
    RefuseMember,
    RejectUpdate,
    RequestUpdates,
    RoundCommand,
    RoundEvent,
    RoundOutcome,
    RoundRecord,
    RoundRules,
    Rounds,
    RoundSaved,
    SaveRound,
    Stage,
    TimePassed,
    UpdateArrived,
    UpdateWithheld,
)
from fedsched.runtime import codec

EAST, NORTH, SOUTH, WEST = (ClusterName(name) for name in ("east", "north", "south", "west"))
RULES = RoundRules(interval_s=60, quorum=2, deadline_s=10, samples_min=32, norm_max=100)
WEIGHTS = NewWeights("abc", "policies/dl2/000008.safetensors", 1000, "policies/dl2/000008.optimiser.safetensors", "def")


def rounds(rules: RoundRules = RULES, number_last: int = 3) -> Rounds:
    return Rounds(rules, policy="dl2", version=5, version_last=7, number_last=number_last, now_s=1000)


def joined(cluster: ClusterName, term: int = 1, version: int = 5, samples: int = 50) -> MemberJoined:
    return MemberJoined(cluster, term, version, samples)


def update(cluster: ClusterName, **changes: object) -> UpdateArrived:
    usual: dict[str, object] = {
        "number": 4,
        "cluster": cluster,
        "term": 1,
        "base_version": 5,
        "samples": 50,
        "norm": 1.0,
        "finite": True,
        "misfit": "",
        "now_s": 1061.0,
    }
    return UpdateArrived(**{**usual, **changes})  # type: ignore[arg-type]


def begun(*clusters: ClusterName) -> Rounds:
    """A round that has asked these."""
    core = rounds()
    for cluster in clusters:
        core.handle(joined(cluster))
    assert core.handle(TimePassed(1060)) == [RequestUpdates(4, 5, tuple(sorted(clusters)), 10)]
    return core


def record(commands: list[RoundCommand]) -> RoundRecord:
    (save,) = [command for command in commands if isinstance(command, SaveRound)]
    return save.record


def test_a_round_goes_from_request_to_offer() -> None:
    """The whole reason for the aggregator: what two clusters learnt reaches both, once it is durable."""
    core = begun(WEST, EAST)

    assert core.handle(update(WEST)) == []
    assert core.handle(update(EAST)) == [Combine(4, 8, (EAST, WEST))]
    (save,) = core.handle(Combined(4, WEIGHTS, 1062))
    assert isinstance(save, SaveRound)
    assert save.policy is not None
    assert (save.policy.version, save.policy.parent_version, save.policy.samples) == (8, 5, 100)
    assert save.policy.contributors == (EAST, WEST)
    assert save.record.outcome is RoundOutcome.COMBINED
    assert core.version == 5, "nothing is in force before it is saved"
    assert core.handle(RoundSaved(4)) == [OfferPolicy(8, (EAST, WEST))]
    assert core.version == 8


def test_a_new_version_never_takes_a_number_that_was_given_before() -> None:
    """After a fallback to version 5 the broken 7 still exists somewhere; a second 7 would be taken for it."""
    core = begun(EAST, WEST)
    core.handle(update(EAST))

    assert core.handle(update(WEST)) == [Combine(4, 8, (EAST, WEST))]


def test_the_round_closes_at_its_deadline_with_what_has_come() -> None:
    """One hanging cluster must not hold up the others."""
    core = begun(EAST, NORTH, WEST)
    core.handle(update(EAST))
    core.handle(update(WEST))

    assert core.handle(DeadlinePassed(4, 1070)) == [Combine(4, 8, (EAST, WEST))]
    (absent,) = record(core.handle(Combined(4, WEIGHTS, 1071))).absent
    assert (absent.cluster, absent.absence) == (NORTH, Absence.MISSING)
    assert "within 10 s" in absent.why


def test_a_round_names_whose_update_was_left_out_of_what_it_made() -> None:
    """`fedsched federation rounds` is where people look for why a cluster does not count."""
    core = begun(EAST, NORTH, WEST)
    for cluster in (EAST, NORTH, WEST):
        core.handle(update(cluster))

    (save,) = core.handle(Combined(4, WEIGHTS, 1062, left_out=((NORTH, "it points against the others'"),)))

    assert isinstance(save, SaveRound)
    assert save.policy is not None
    assert save.policy.contributors == (EAST, WEST)
    assert save.policy.samples == 100
    assert [given.cluster for given in save.record.contributions] == [EAST, WEST]
    (absent,) = save.record.absent
    assert (absent.cluster, absent.absence, absent.why) == (NORTH, Absence.REJECTED, "it points against the others'")


def test_too_few_updates_leave_the_policy_as_it_is_and_say_so() -> None:
    """A round that a single cluster could decide is what the quorum is there to prevent."""
    core = begun(EAST, WEST)
    core.handle(update(EAST))

    saved = record(core.handle(DeadlinePassed(4, 1070)))

    assert saved.outcome is RoundOutcome.NO_QUORUM
    assert saved.version == saved.base_version == 5
    assert [given.cluster for given in saved.contributions] == [EAST]
    assert core.handle(RoundSaved(4)) == []
    assert core.version == 5


def test_a_cluster_that_declines_does_not_make_the_others_wait() -> None:
    """When everybody has answered there is nothing left to wait for."""
    core = begun(EAST, WEST)
    core.handle(update(EAST))

    saved = record(core.handle(UpdateWithheld(4, WEST, Absence.DECLINED, "3 of 32 decisions", 1062)))

    assert saved.outcome is RoundOutcome.NO_QUORUM
    assert saved.absent[0].why == "3 of 32 decisions"
    assert saved.finished_s == 1062


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"misfit": "array policy.0.bias is missing"}, "policy.0.bias is missing"),
        ({"finite": False, "norm": math.inf}, "NaN or infinity"),
        ({"norm": math.nan}, "norm"),
        ({"norm": math.inf}, "norm"),
        ({"norm": 100.5}, "norm is 100.5; norm_max is 100"),
        ({"samples": 0}, "0 samples"),
        ({"samples": -5}, "-5 samples"),
        ({"base_version": 4}, "version 4; the round is about 5"),
        ({"base_version": 9}, "version 9; the round is about 5"),
        ({"term": 0}, "term 0 is over"),
    ],
)
def test_an_update_that_cannot_count_is_rejected_with_the_reason(changes: dict[str, object], why: str) -> None:
    """One broken learner must not poison the policy of all clusters, and its operator must learn why."""
    core = begun(EAST, NORTH, WEST)

    (reject,) = core.handle(update(NORTH, **changes))

    assert isinstance(reject, RejectUpdate)
    assert why in reject.why
    core.handle(update(EAST))
    assert core.handle(update(WEST)) == [Combine(4, 8, (EAST, WEST))]
    (absent,) = record(core.handle(Combined(4, WEIGHTS, 1062))).absent
    assert (absent.cluster, absent.absence) == (NORTH, Absence.REJECTED)
    assert why in absent.why


def test_an_update_of_an_agent_that_was_replaced_does_not_count() -> None:
    """Two agents of one cluster would give its jobs twice the weight."""
    core = begun(EAST, WEST)
    core.handle(joined(WEST, term=2))

    (reject,) = core.handle(update(WEST, term=1))

    assert isinstance(reject, RejectUpdate)
    assert "term 1 is over" in reject.why


def test_the_same_update_twice_counts_once() -> None:
    """A retransmission must neither count double nor close the round."""
    core = begun(EAST, WEST)
    core.handle(update(EAST))

    assert core.handle(update(EAST, samples=1000)) == []
    core.handle(update(WEST))
    given = record(core.handle(Combined(4, WEIGHTS, 1062))).contributions
    assert [entry.samples for entry in given] == [50, 50]


@pytest.mark.parametrize(
    "event",
    [
        UpdateWithheld(4, EAST, Absence.DECLINED, "a" * 2_000_000, 1061.0),
        UpdateWithheld(4, EAST, Absence.MISSING, "a" * 2_000_000, 1061.0),
        update(EAST, misfit="array " + "a" * 2_000_000 + " is not one of the policy's"),
        update(EAST, metrics=tuple((f"metric-{number:06d}", 1.0) for number in range(100_000))),
        update(EAST, metrics=(("a" * 2_000_000, 1.0), ("loss", 1.0))),
    ],
)
def test_what_a_cluster_says_of_itself_never_makes_a_record_too_large_to_keep(
    event: UpdateWithheld | UpdateArrived,
) -> None:
    """The store refuses a large record; one talkative agent would have ended the aggregator in every round."""
    core = begun(EAST, NORTH, WEST)
    told = [*core.handle(event), *core.handle(update(NORTH)), *core.handle(update(WEST))]
    kept = record(core.handle(Combined(4, WEIGHTS, 1070.0)))

    assert len(codec.dumps(kept)) < 4000
    assert all(len(command.why) < 1000 for command in told if isinstance(command, RejectUpdate))


def test_a_late_or_unasked_update_is_thrown_away() -> None:
    """It was computed from weights that are no longer in force."""
    core = begun(EAST, WEST)
    assert isinstance(core.handle(update(NORTH))[0], RejectUpdate)
    assert isinstance(core.handle(update(EAST, number=3))[0], RejectUpdate)
    core.handle(DeadlinePassed(4, 1070))
    core.handle(RoundSaved(4))

    (reject,) = core.handle(update(EAST))

    assert isinstance(reject, RejectUpdate)
    assert "late" in reject.why
    assert core.handle(UpdateWithheld(4, EAST, Absence.MISSING, "gone", 1071)) == []
    assert core.handle(DeadlinePassed(4, 1071)) == []


def test_a_failed_step_is_recorded_and_changes_nothing() -> None:
    """A full disk costs one round, not the policy."""
    core = begun(EAST, WEST)
    core.handle(update(EAST))
    core.handle(update(WEST))

    saved = record(core.handle(CombineFailed(4, "no space left on device", 1062)))

    assert (saved.outcome, saved.message, saved.version) == (RoundOutcome.FAILED, "no space left on device", 5)
    assert core.handle(RoundSaved(4)) == []


def test_no_round_is_held_with_fewer_agents_than_the_quorum() -> None:
    """It could only fail, and would fill the store with records that say so."""
    core = rounds()
    core.handle(joined(EAST))

    assert core.handle(TimePassed(5000)) == []
    core.handle(joined(WEST))
    assert core.handle(TimePassed(5001)) == [RequestUpdates(4, 5, (EAST, WEST), 10)]


def test_rounds_keep_their_interval() -> None:
    """Agents compute gradients on the cores that their cluster's jobs want."""
    core = begun(EAST, WEST)
    assert core.handle(TimePassed(9999)) == [], "one round at a time"
    core.handle(DeadlinePassed(4, 1070))
    core.handle(RoundSaved(4))

    assert core.handle(TimePassed(1119)) == []
    assert core.handle(TimePassed(1120)) == [RequestUpdates(5, 5, (EAST, WEST), 10)]


def test_clusters_are_asked_in_turn_where_a_round_asks_only_some() -> None:
    """None is asked again before all others were; one that joins, or joins again, is not forgotten."""
    core = rounds(RoundRules(60, 1, 10, 32, 100, asked_max=2))
    for cluster in (EAST, NORTH, WEST):
        core.handle(joined(cluster))
    asked = [held_round(core, 1060 + 60 * index) for index in range(3)]
    assert asked == [(EAST, NORTH), (EAST, WEST), (EAST, NORTH)], "who was asked as long ago comes by name"
    core.handle(MemberLeft(EAST))
    core.handle(joined(SOUTH))
    assert held_round(core, 1240) == (SOUTH, WEST), "a new one comes first, then who has waited longest"
    core.handle(joined(EAST))
    assert held_round(core, 1300) == (EAST, NORTH), "one that comes back has its old place"


def held_round(core: Rounds, now_s: float) -> tuple[ClusterName, ...]:
    """Who is asked in a round that nobody answers."""
    (request,) = core.handle(TimePassed(now_s))
    assert isinstance(request, RequestUpdates)
    core.handle(DeadlinePassed(request.number, now_s + 10))
    core.handle(RoundSaved(request.number))
    return request.clusters


def test_the_very_first_round_comes_as_soon_as_enough_agents_are_ready() -> None:
    """A new federation should show that it works without waiting a whole interval."""
    core = rounds(number_last=0)
    core.handle(joined(EAST))
    core.handle(joined(WEST, samples=31))
    assert core.handle(TimePassed(1001)) == []

    core.handle(MemberReported(WEST, 1, 5, 32))

    assert core.handle(TimePassed(1002)) == [RequestUpdates(1, 5, (EAST, WEST), 10)]
    core.handle(DeadlinePassed(1, 1003))
    core.handle(RoundSaved(1))
    assert core.handle(TimePassed(1004)) == [], "only the first one hurries"


def test_after_a_first_round_that_combined_nothing_hurries_any_more() -> None:
    """Else a second version follows at once, from the same decisions, when the agents have enough of them."""
    core = rounds(number_last=0)
    core.handle(joined(EAST, samples=1))
    core.handle(joined(WEST, samples=1))
    assert core.handle(TimePassed(1060)) == [RequestUpdates(1, 5, (EAST, WEST), 10)]
    for cluster in (EAST, WEST):
        core.handle(update(cluster, number=1, samples=1))
    core.handle(Combined(1, WEIGHTS, 1062))
    core.handle(RoundSaved(1))
    for cluster in (EAST, WEST):
        core.handle(MemberReported(cluster, 1, 8, 50))

    assert core.handle(TimePassed(1063)) == []
    assert core.handle(TimePassed(1120)) == [RequestUpdates(2, 8, (EAST, WEST), 10)]


def test_an_agent_that_joins_later_is_offered_the_version_in_force() -> None:
    """A cluster that was away must not schedule with an old policy until the next round."""
    core = rounds()

    assert core.handle(joined(EAST, version=2)) == [OfferPolicy(5, (EAST,))]
    assert core.handle(joined(WEST, version=5)) == []


def test_an_agent_of_an_older_term_is_refused() -> None:
    """After a take-over the old agent may still run; it speaks for nobody."""
    core = rounds()
    core.handle(joined(EAST, term=3))

    (refuse,) = core.handle(joined(EAST, term=2))

    assert isinstance(refuse, RefuseMember)
    assert "term 2 is over" in refuse.why
    assert core.members[EAST].term == 3


def test_records_survive_the_store() -> None:
    """A record that cannot be read back would keep an aggregator from starting again."""
    core = begun(EAST, NORTH, WEST)
    core.handle(update(EAST, metrics=(("loss", 0.25),)))
    core.handle(update(WEST))
    core.handle(update(NORTH, finite=False, norm=math.inf))
    (save,) = core.handle(Combined(4, WEIGHTS, 1062))
    assert isinstance(save, SaveRound)

    assert codec.loads(RoundRecord, codec.dumps(save.record)) == save.record
    assert save.policy is not None
    assert codec.loads(type(save.policy), codec.dumps(save.policy)) == save.policy


names = st.sampled_from([EAST, NORTH, WEST])
numbers = st.integers(3, 6)
moments = st.integers(0, 500)


@st.composite
def steps(draw: st.DrawFn) -> list[RoundEvent | str]:
    """What the world may say in any order; `answer` stands for our own answer to an open command."""
    one = st.one_of(
        st.builds(MemberJoined, names, st.integers(1, 3), st.integers(4, 9), st.integers(0, 64)),
        st.builds(MemberReported, names, st.integers(1, 3), st.integers(4, 9), st.integers(0, 64)),
        st.builds(MemberLeft, names),
        st.builds(TimePassed, st.integers(1000, 2000)),
        st.builds(
            UpdateArrived,
            numbers,
            names,
            st.integers(0, 3),
            st.integers(4, 6),
            st.integers(-1, 9),
            st.floats(),
            st.booleans(),
            st.sampled_from(["", "", "", "array x is missing"]),
            moments,
        ),
        st.builds(UpdateWithheld, numbers, names, st.sampled_from(Absence), st.just("why"), moments),
        st.builds(DeadlinePassed, numbers, moments),
        st.sampled_from(["answer", "fail"]),
    )
    return draw(st.lists(one, max_size=60))


def own_answer(core: Rounds, how: str) -> RoundEvent | None:
    held = core.open
    if held is None or held.stage is Stage.COLLECTING:
        return None
    if held.stage is Stage.SAVING:
        return RoundSaved(held.number)
    return Combined(held.number, WEIGHTS, 5000) if how == "answer" else CombineFailed(held.number, "disk", 5000)


@given(steps(), st.integers(1, 3))
@settings(max_examples=300)
def test_whatever_comes_a_round_ends_once_and_only_good_updates_count(
    events: list[RoundEvent | str], quorum: int
) -> None:
    """No order of joins, losses, answers and deadlines may lose a round, count somebody twice or skip the quorum."""
    core = rounds(RoundRules(60, quorum, 10, 32, 100))
    saved: list[RoundRecord] = []
    for step in events:
        event = own_answer(core, step) if isinstance(step, str) else step
        if event is None:
            continue
        version = core.version
        for command in core.handle(event):
            if isinstance(command, Combine):
                assert len(command.accepted) >= quorum
                assert list(command.accepted) == sorted(set(command.accepted))
                assert command.version > version
            elif isinstance(command, SaveRound):
                check_record(command, quorum)
                saved.append(command.record)
            elif isinstance(command, (RequestUpdates, OfferPolicy)):
                assert command.clusters
                assert list(command.clusters) == sorted(set(command.clusters))
        assert core.version == version or isinstance(event, RoundSaved)
    assert [entry.number for entry in saved] == list(range(4, 4 + len(saved)))
    if core.open is not None and core.open.stage is Stage.COLLECTING:
        ended = core.handle(DeadlinePassed(core.open.number, 9999))
        assert ended, "a deadline always ends the collecting"


def check_record(save: SaveRound, quorum: int) -> None:
    entry = save.record
    counted = [given.cluster for given in entry.contributions]
    assert sorted([*counted, *(gone.cluster for gone in entry.absent)]) == list(entry.asked)
    assert all(given.samples > 0 and given.norm <= 100 for given in entry.contributions)
    assert (save.policy is not None) == (entry.outcome is RoundOutcome.COMBINED)
    assert (entry.outcome is RoundOutcome.NO_QUORUM) == (len(counted) < quorum)
    assert (entry.version != entry.base_version) == (entry.outcome is RoundOutcome.COMBINED)
