"""Federated rounds among simulated clusters: the live core and loop, over a link on which anything may happen."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import yaml
from msgspec import structs

from fedsched.cli.main import main
from fedsched.config import load, parse
from fedsched.core.ids import ClusterName
from fedsched.core.rounds import Contribution, RoundOutcome, RoundRecord
from fedsched.errors import InvalidConfiguration
from fedsched.federation.exchange import GradientReply
from fedsched.federation.loop import BaseVersion, Standing
from fedsched.federation.source import Hello, PolicyOffer
from fedsched.policy import checkpoint
from fedsched.sim.clock import VirtualClock
from fedsched.sim.experiment import ExperimentConfig, load_experiment
from fedsched.sim.federation import first_standing, spoil
from fedsched.sim.federation_config import AwayConfig, FederationSectionConfig, LinkConfig, SpoilConfig
from fedsched.sim.federation_judges import FederationJudge
from fedsched.sim.federation_link import Answer, Errands, Link, Way
from fedsched.sim.federation_results import ClusterRounds, FederationResult
from fedsched.sim.judges import BrokenPromise
from fedsched.sim.results import RunResult
from fedsched.sim.running import Request, perform
from fedsched.sim.swarm import judge_seed

SHIPPED = Path(__file__).parents[2] / "simulations" / "experiments" / "federation.yaml"
EAST, WEST = ClusterName("east"), ClusterName("west")

PLAIN: dict[str, Any] = {
    "clusters": [
        {"name": name, "nodes": [{"name": "node", "cpus": 8, "count": count}]}
        for name, count in (("east", 2), ("north", 1), ("west", 3))
    ],
    "workload": {"jobs": 40, "gap_s": 4},
    "policies": {"dl2": {"name": "dl2"}},
    "seeds": 1,
}
SECTION: dict[str, Any] = {
    "interval_s": 40,
    "deadline_s": 15,
    "batch_size": 64,
    "samples_min": 8,
    "learning_rate": 1e-3,
}


def declared(**section: Any) -> ExperimentConfig:
    return parse(ExperimentConfig, {**PLAIN, "federation": {**SECTION, **section}}, "the test")


def run(experiment: ExperimentConfig, seed: int = 0, policy: str = "dl2") -> RunResult:
    result = perform(Request("test", experiment, policy, seed, check=True))
    assert not result.partial, result.partial
    return result


def learnt(result: RunResult) -> FederationResult:
    (federation,) = result.federations
    return federation


def part(federation: FederationResult, cluster: str) -> ClusterRounds:
    return next(one for one in federation.clusters if one.cluster == cluster)


def test_clusters_learn_together_while_their_jobs_run() -> None:
    """The point of it all: updates of all clusters make versions, and every cluster runs the newest one."""
    federation = learnt(run(declared()))

    assert federation.combined >= 3
    assert federation.version == 1 + federation.combined
    assert [record.number for record in federation.records] == list(range(1, federation.rounds + 1))
    assert {one.version for one in federation.clusters} == {federation.version}
    assert all(one.counted >= 2 for one in federation.clusters)
    combined = [record for record in federation.records if record.outcome is RoundOutcome.COMBINED]
    assert all(record.finished_s - record.started_s < 1 for record in combined), "nobody waits once all have answered"
    assert federation.digest != checkpoint.load(checkpoint.BUILTIN).digest


def test_a_cluster_lets_a_version_decide_only_after_it_was_compared() -> None:
    """As the live agent does by default; what is taken and what decides are two things then."""
    federation = learnt(run(declared(promotion={"accept": "shadow", "slots_min": 4, "margin": 0.5})))

    assert all(one.version == federation.version for one in federation.clusters), "all have the newest one"
    assert all(1 <= one.accepted < federation.combined for one in federation.clusters), federation.clusters
    assert all(1 < one.decides <= one.version for one in federation.clusters)


def test_versions_of_rounds_that_wreck_the_policy_are_mostly_refused_where_they_are_compared_first() -> None:
    """With a learning rate far too large rounds make policies that nobody should decide with."""
    wrecking = {"learning_rate": 0.1, "norm_max": 1e9}
    at_once = run(declared(**wrecking), seed=1)
    compared = run(declared(**wrecking, promotion={"accept": "shadow", "slots_min": 6, "slots_max": 60}), seed=1)

    assert all(one.accepted == learnt(at_once).combined for one in learnt(at_once).clusters)
    assert all(one.accepted < learnt(compared).combined / 2 for one in learnt(compared).clusters)


def test_a_policy_that_does_not_learn_keeps_its_weights() -> None:
    result = run(declared(together={"dl2": 0}))

    assert result.federations == ()


def test_clusters_may_learn_in_groups() -> None:
    """What eight clusters gain together is measured against the same clusters alone and in pairs."""
    alone, pairs = run(declared(together={"dl2": 1})), run(declared(together={"dl2": 2}))

    assert [[one.cluster for one in group.clusters] for group in alone.federations] == [["east"], ["north"], ["west"]]
    assert [[one.cluster for one in group.clusters] for group in pairs.federations] == [["east", "north"], ["west"]]
    assert len({group.digest for group in alone.federations}) == 3


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("nan", "NaN or infinity"),
        ("huge", "norm_max is N"),
        ("dimensions", "has shape"),
        ("stale", "it was computed from version N"),
    ],
)
def test_a_cluster_that_sends_nonsense_is_rejected_and_the_others_learn_on(kind: str, why: str) -> None:
    """One broken learner must neither poison nor stop a federation; the judge computes again what a round may make."""
    federation = learnt(run(declared(members={"north": {"spoils": {"kind": kind}}})))

    broken = part(federation, "north")
    assert broken.counted == 0 < broken.rejected
    assert all(why in reason for reason, _ in broken.why if "decision" not in reason), broken.why
    assert broken.version == federation.version, "it still gets what the others have learnt"
    assert all(part(federation, name).counted > 2 for name in ("east", "west"))


def test_rounds_close_at_their_deadline_without_a_straggler() -> None:
    """A learner that takes an hour is no reason for anybody to wait."""
    federation = learnt(run(declared(members={"west": {"compute_s": 25}})))

    lasted_s = [record.finished_s - record.started_s for record in federation.records if WEST in record.asked]
    assert max(lasted_s) == pytest.approx(15)
    assert part(federation, "west").counted == 0
    assert part(federation, "west").missing > 0
    assert federation.combined > 2


def test_a_cluster_that_leaves_and_returns_takes_part_again() -> None:
    """Sites lose their uplink for hours; the rounds go on, and who comes back gets the version in force."""
    away = {"first_s": 60, "for_s": 70, "every_s": 10_000}
    federation = learnt(run(declared(members={"east": {"away": away}})))

    asked = [(record.started_s, EAST in record.asked) for record in federation.records]
    assert any(taking for started_s, taking in asked if started_s < 60)
    assert not any(taking for started_s, taking in asked if 80 < started_s < 130)
    assert any(taking for started_s, taking in asked if started_s > 140)
    assert part(federation, "east").version == federation.version


def test_a_link_that_loses_and_repeats_messages_costs_rounds_but_breaks_no_promise() -> None:
    federation = learnt(run(declared(link={"delay_s": 2, "jitter_s": 6, "loss": 0.3, "twice": 0.3}, quorum=2)))

    assert federation.lost > 0.2 * federation.messages
    assert {record.outcome for record in federation.records} >= {RoundOutcome.COMBINED}
    assert sum(one.missing for one in federation.clusters) > 0


def test_an_idle_federation_stops_learning_from_what_it_remembers() -> None:
    """A policy that drifts while nothing runs is found broken on Monday morning."""
    late = {"jobs": 12, "gap_s": 300}
    plain = {**PLAIN, "workload": late, "federation": {**SECTION, "interval_s": 20}}
    federation = learnt(run(parse(ExperimentConfig, plain, "the test")))

    reasons = {why for one in federation.clusters for why, _ in one.why}
    assert "no decision was made since this cluster's last update that counted" in reasons
    idle = [record for record in federation.records if not record.contributions]
    assert len(idle) > len(federation.records) / 2
    assert all(record.outcome is RoundOutcome.NO_QUORUM for record in idle)


def test_the_same_seed_gives_the_same_bytes_in_fresh_interpreters() -> None:
    """A result that depends on the hash seed cannot be reproduced by anybody; one process cannot show it."""
    code = (
        "from fedsched.sim.running import Request, perform\n"
        "from tests.sim.test_federation import declared\n"
        "members = {'north': {'spoils': {'kind': 'noise', 'share': 0.5}}, 'west': {'compute_s': 9}}\n"
        "link = {'delay_s': 1, 'jitter_s': 3, 'loss': 0.1, 'twice': 0.2}\n"
        "done = perform(Request('t', declared(members=members, link=link), 'dl2', 7, check=True))\n"
        "print(done.partial, done.digest, done.federations)\n"
    )
    told = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            cwd=Path(__file__).parents[2],
        ).stdout
        for seed in ("0", "1", "12345")
    }
    assert len(told) == 1
    assert "FederationResult" in told.pop()


def test_the_command_shows_each_clusters_part_in_the_rounds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whose updates count, and whose do not and why, is what an operator looks at first."""
    file = tmp_path / "one.yaml"
    members = {"north": {"spoils": {"kind": "nan"}}}
    file.write_text(yaml.safe_dump({**PLAIN, "federation": {**SECTION, "members": members}}))

    assert main(["sim", "run", str(file)]) == 0
    shown = capsys.readouterr().out.split("rounds of the federation, over all seeds:\n")[1].splitlines()
    assert shown[0].split()[:5] == ["POLICY", "CLUSTER", "ASKED", "COUNTED", "DECLINED"]
    assert [line.split()[1] for line in shown[1:]] == ["east", "north", "west"]
    assert shown[2].split()[3] == "0"
    assert main(["sim", "run", str(file), "-o", "json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)["results"]
    assert told["federations"][0]["clusters"][1]["rejected"] == int(shown[2].split()[5])


def test_another_seed_gives_other_rounds() -> None:
    assert learnt(run(declared(), seed=1)).digest != learnt(run(declared(), seed=2)).digest


def test_the_shipped_federation_shows_every_kind_of_absence() -> None:
    """It is the first one that people run; it should show what the rounds bear."""
    federation = learnt(run(load_experiment(SHIPPED)))

    assert part(federation, "east").rejected > 0
    assert part(federation, "north").asked < federation.rounds
    assert sum(one.missing for one in federation.clusters) > 0
    assert federation.combined > 2


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        ({"members": {"eats": {}}}, r"members names eats; known are east, north, west"),
        ({"together": {"dl3": 2}}, r"together names dl3; known are dl2"),
        ({"together": {"dl2": -1}}, r"together.dl2 is -1"),
        ({"members": {"east": {"away": {"for_s": 9, "every_s": 5}}}}, r"for_s is 9; it must be below every_s \(5\)"),
        ({"members": {"east": {"spoils": {"kind": "evil"}}}}, r"kind is 'evil'"),
        ({"intervall_s": 4}, r"did you mean interval_s"),
        ({"link": {"loss": 1.5}}, r"link.loss is 1.5"),
    ],
)
def test_a_section_that_cannot_be_meant_is_refused_with_its_path(section: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidConfiguration, match=problem):
        declared(**section)


# --- the link


def sent_over(config: LinkConfig, count: int = 300, seed: int = 3) -> list[tuple[float, int]]:
    clock = VirtualClock()
    errands = Errands(clock)
    link = Link(errands, config, seed, lambda cluster, time_s: False)
    came: list[tuple[float, int]] = []
    hello = Hello(EAST, 1, "0.1.0", "dl2", 1, 5)

    def deliver(number: int) -> Callable[[], None]:
        return lambda: came.append((clock.now_s, number))

    def send(number: int) -> Callable[[], None]:
        return lambda: link.send(Way.UP, EAST, hello, deliver(number))

    for number in range(count):
        errands.at(number * 0.5, send(number))
    clock.run()
    assert errands.alone
    return came


def test_messages_of_one_cluster_keep_their_order_however_late() -> None:
    """An older policy that overtakes a newer one would put the clock back."""
    came = sent_over(LinkConfig(delay_s=0.1, jitter_s=9, loss=0.2, twice=0.3))

    numbers = [number for _, number in came]
    assert numbers == sorted(numbers)
    assert 0.1 * 300 < 300 - len(set(numbers)) < 0.3 * 300, "about a fifth is lost"
    assert 0.2 * len(set(numbers)) < len(numbers) - len(set(numbers)) < 0.4 * len(set(numbers))


def test_a_perfect_link_is_only_slow() -> None:
    assert sent_over(LinkConfig(delay_s=0.25), count=4) == [(0.25, 0), (0.75, 1), (1.25, 2), (1.75, 3)]


def test_nothing_passes_while_a_cluster_is_away() -> None:
    away = AwayConfig(first_s=10, for_s=5, every_s=20)

    assert [time_s for time_s in (0, 9, 10, 14, 15, 29, 30, 34, 36) if away.covers(time_s)] == [10, 14, 30, 34]
    assert not AwayConfig(first_s=10, for_s=5).covers(30)


# --- the judges


def judged() -> tuple[FederationJudge, Standing, FederationSectionConfig]:
    section = FederationSectionConfig(**SECTION)
    standing = first_standing("dl2", checkpoint.load(checkpoint.BUILTIN), section.learning_rate)
    return FederationJudge(standing, section), standing, section


def record(**changes: Any) -> RoundRecord:
    usual = RoundRecord(1, "dl2", 1, 1, RoundOutcome.NO_QUORUM, 1, (), (), (), 100.0, 101.0)
    return structs.replace(usual, **changes)


def test_the_judge_sees_a_trace_that_leaves_its_cluster() -> None:
    """A reason that quotes a job's name is how traces leak; nobody means to."""
    judge, _, _ = judged()
    judge._jobs.add("secret-project-7")
    reply = GradientReply(1, 1, {}, 0, (), "", "job secret-project-7 has no reward yet")
    judge.crossed(Way.UP, EAST, Answer(1, reply), 3.0)

    with pytest.raises(BrokenPromise, match="job secret-project-7 is named"):
        judge.close(held=False)


def test_the_judge_knows_what_may_leave_a_cluster() -> None:
    judge, standing, _ = judged()
    with pytest.raises(BrokenPromise, match="PolicyOffer left cluster east"):
        judge.crossed(Way.UP, EAST, PolicyOffer("dl2", 1, "", b""), 3.0)
    told = GradientReply(1, 1, dict(standing.active.checkpoint.arrays), 5, (("jobs", 3.0),), "")
    with pytest.raises(BrokenPromise, match="told \\['jobs'\\]"):
        judge.crossed(Way.UP, EAST, Answer(1, told), 3.0)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"number": 0}, "round 0 comes after round 0"),
        ({"finished_s": 200.0}, "lasted 100.0 s"),
        ({"asked": (EAST,)}, "tells of"),
        ({"version": 2}, "left version 2 in force"),
        ({"outcome": RoundOutcome.COMBINED}, "is combined and made None"),
    ],
)
def test_the_judge_sees_a_record_that_cannot_be_true(changes: dict[str, Any], why: str) -> None:
    judge, standing, _ = judged()
    with pytest.raises(BrokenPromise, match=why):
        judge.saved(record(**changes), standing.active, None)


def test_the_judge_sees_a_policy_that_a_rejected_update_has_changed() -> None:
    """It is what checks are for: a version must follow from the updates that count, and from nothing else."""
    judge, standing, _ = judged()
    before = standing.active
    moved = {name: array + np.float32(1e-3) for name, array in before.checkpoint.arrays.items()}
    after = BaseVersion(
        structs.replace(before.record, version=2), before.checkpoint.replaced(moved, {}), b"", before.optimiser
    )
    good = GradientReply(1, 1, {name: np.ones_like(array) for name, array in moved.items()}, 5, (), "")
    judge.crossed(Way.UP, EAST, Answer(1, good), 100.5)
    combined = record(
        asked=(EAST,), contributions=(Contribution(EAST, 1, 5, 1.0),), outcome=RoundOutcome.COMBINED, version=2
    )
    with pytest.raises(BrokenPromise, match=r"too long|does not follow"):
        judge.saved(combined, before, after)
    with pytest.raises(BrokenPromise, match="changed before round 2, outside any round"):
        judge.saved(record(number=2), after, None)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (None, "it never crossed the link"),
        ({"samples": 0}, "there is nothing in it"),
        ({"declined": "no reward yet"}, "there is nothing in it"),
        ({"base_version": 7}, "it is of another version"),
        ({"gradients": {"other": np.ones(3, np.float32)}}, "it is of another shape than the policy"),
        ({"value": np.nan}, "it is not finite"),
        ({"value": 1e6}, "it is too long"),
    ],
)
def test_the_judge_sees_every_update_that_must_not_count(changes: dict[str, Any] | None, why: str) -> None:
    """One that counts all the same would be the policy of all clusters a second later."""
    judge, standing, _ = judged()
    before = standing.active
    if changes is not None:
        value = changes.pop("value", 1e-6)
        gradients = {name: np.full_like(array, value) for name, array in before.checkpoint.arrays.items()}
        usual = GradientReply(1, 1, gradients, 5, (), "")
        judge.crossed(Way.UP, EAST, Answer(1, replace(usual, **changes)), 100.5)
    after = BaseVersion(structs.replace(before.record, version=2), before.checkpoint, b"", before.optimiser)
    combined = record(
        asked=(EAST,), contributions=(Contribution(EAST, 1, 5, 1.0),), outcome=RoundOutcome.COMBINED, version=2
    )
    with pytest.raises(BrokenPromise, match=f"counts an update of east, and {why}"):
        judge.saved(combined, before, after)


def test_the_judge_sees_a_version_that_does_not_grow_and_a_round_that_is_left_open() -> None:
    judge, standing, _ = judged()
    combined = record(outcome=RoundOutcome.COMBINED, version=1)
    with pytest.raises(BrokenPromise, match="version 1 comes after 1"):
        judge.saved(combined, standing.active, standing.active)
    with pytest.raises(BrokenPromise, match="a round was still open"):
        judge.close(held=True)


@pytest.mark.parametrize("version", [1, 9])
def test_the_judge_sees_an_agent_that_goes_back(version: int) -> None:
    judge, _, _ = judged()
    judge._version_last = 3
    judge.took(EAST, 1, 2)
    with pytest.raises(BrokenPromise, match=f"from version 2 to {version}"):
        judge.took(EAST, 1, version)
    judge.took(EAST, 2, 1)  # a new agent begins with its own first weights


@pytest.mark.parametrize("kind", ["nan", "huge", "dimensions", "stale", "noise", "reversed"])
def test_every_kind_of_bad_gradient_differs_from_the_good_one(kind: Any) -> None:
    good = GradientReply(1, 4, {"a": np.ones(3, np.float32), "b": np.ones((2, 2), np.float32)}, 5, (), "")
    bad = spoil(good, SpoilConfig(kind=kind), Random(0))
    same = all(good.gradients[name].tobytes() == bad.gradients[name].tobytes() for name in good.gradients)
    assert not same or bad.base_version != good.base_version
    assert replace(bad, gradients=good.gradients, base_version=4) == good


def test_a_cluster_that_sends_its_gradients_backwards_is_left_out_by_the_rounds_and_named() -> None:
    """No look at a single gradient finds it; the record of the round is where its operator looks for why."""
    section = {
        "interval_s": 10,
        "deadline_s": 5,
        "half_after": 100,
        "members": {"north": {"spoils": {"kind": "reversed"}}},
    }
    federation = learnt(run(declared(**section)))

    assert part(federation, "north").rejected >= 3
    (why,) = [why for why, _ in part(federation, "north").why if "point against" in why]
    assert why.startswith("its gradients point against the others' (cosine ")
    for name in ("east", "west"):
        assert not part(federation, name).rejected
    last = [record for record in federation.records if record.outcome is RoundOutcome.COMBINED][-1]
    assert "north" not in [given.cluster for given in last.contributions]


@pytest.mark.parametrize("seed", [10, 12, 23])
def test_the_swarm_draws_federations_too(seed: int) -> None:
    """A quarter of the seeds; their digest tells of both worlds, so both are the same each time."""
    verdict = judge_seed(seed)
    assert not verdict.problem, verdict.problem
    assert len(verdict.digest.split()) == 4
    assert len(judge_seed(11).digest.split()) == 1


def test_the_file_that_ships_is_what_the_classes_declare() -> None:
    section = yaml.safe_load(SHIPPED.read_text())["federation"]
    assert load(ExperimentConfig, SHIPPED, {"folder": SHIPPED.parent}).federation == FederationSectionConfig(**section)
