"""Small worlds in which everything goes wrong, under all judges; and that the swarm finds what is planted."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from fedsched.core import scheduler
from fedsched.core.cluster import Node
from fedsched.core.commands import Command
from fedsched.core.events import JobScaled, ScaleFailed
from fedsched.core.ids import JobId
from fedsched.core.job import JobSpec, JobStatus
from fedsched.core.scheduler import Scheduler
from fedsched.sim.faults import BadAnswer, draw_plan
from fedsched.sim.swarm import judge_seed
from fedsched.sim.workload import draw_scenario
from tests.cli.conftest import Run, run

__all__ = ["run"]

FOUND = (40, 66, 180, 381, 396, 436, 7036)
"""Seeds that showed faults: an answer to an older order that was believed, room given away while tasks were leaving."""


CONFUSED = (15, 32, 45)
"""Seeds whose plans have an answer come when the next resize of the same job is under way."""


@pytest.mark.parametrize("seed", [*range(12), *FOUND])
def test_no_promise_is_broken_whatever_goes_wrong(seed: int) -> None:
    """To see a failure again: fedsched sim swarm --first SEED --seeds 1."""
    verdict = judge_seed(seed)
    assert not verdict.problem, f"{verdict.problem}\n{verdict.plan}\n{verdict.command}"
    assert verdict.steps > 50


@pytest.mark.parametrize("seed", CONFUSED)
def test_a_scheduler_that_believes_answers_to_older_resizes_is_found(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plans in which resizes fail and answers come late and twice show it, and nothing else is wrong with them."""
    assert not judge_seed(seed).problem

    def hear_without_order(core: Scheduler, event: JobScaled | ScaleFailed) -> list[Command]:
        return heard[type(event)](core, replace(event, term=0, seq=0))

    heard = dict(scheduler._HANDLERS)
    for kind in (JobScaled, ScaleFailed):
        monkeypatch.setitem(scheduler._HANDLERS, kind, hear_without_order)
    assert judge_seed(seed).problem


def test_a_seed_says_the_same_twice() -> None:
    """A failure that cannot be shown again cannot be mended."""
    assert judge_seed(5) == judge_seed(5)


def test_plans_hold_every_kind_of_fault() -> None:
    """Faults that are never drawn are never found."""
    plans = []
    for seed in range(30):
        scenario = draw_scenario(seed, jobs=10)
        plans.append(draw_plan(seed, scenario.nodes, scenario.jobs, 300.0))
    assert {type(event).__name__ for plan in plans for event in plan.events} == {
        "NodeLost",
        "NodeChanged",
        "CancelRequested",
    }
    assert {kind for plan in plans for _, kind in plan.bad_answers} == set(BadAnswer)
    assert any(plan.outages for plan in plans)
    assert any(plan.late and plan.twice and plan.store_s_max and plan.resizes_fail for plan in plans)


def test_a_planted_fault_is_found_and_the_command_that_shows_it_is_printed(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheduler that forgets a job which waits would leave its user waiting for ever."""
    admit = Scheduler._admit

    def forgetful(self: Scheduler, time_s: float, spec: JobSpec, status: JobStatus) -> None:
        if spec.job_id != JobId("job-0003"):
            admit(self, time_s, spec, status)

    monkeypatch.setattr(Scheduler, "_admit", forgetful)
    told = run("sim", "swarm", "--first", "2", "--seeds", "1", "--workers", "1")
    assert told.code == 1
    assert "1 jobs are lost, the first is job job-0003" in told.out
    assert "fedsched sim swarm --first 2 --seeds 1" in told.out
    assert "[FS300] 1 of 1 worlds broke a promise" in told.err


def test_lost_nodes_return() -> None:
    """Else a job could wait for ever and nobody would be to blame."""
    scenario = draw_scenario(4, jobs=10)
    plan = draw_plan(4, scenario.nodes, scenario.jobs, 300.0)
    there: dict[str, Node] = {node.name: node for node in scenario.nodes}
    for event in plan.events:
        match type(event).__name__:
            case "NodeLost":
                del there[event.name]  # type: ignore[union-attr]
            case "NodeChanged":
                there[event.node.name] = event.node  # type: ignore[union-attr]
    assert sorted(there) == sorted(node.name for node in scenario.nodes)
