"""Statistics that another thread hands to a policy while it decides."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from fedsched.core.commands import AskPolicy
from fedsched.core.decision import Decision
from fedsched.core.placement import TentativePlacement
from fedsched.core.speeds import SpeedCell, SpeedStatistics, observed
from fedsched.policy import guardrail, registry
from fedsched.policy.learned_speed import LearnedSpeed, LearnedSpeedOptions
from tests.agent.test_remembering import taught


def _interrupted(decide: Callable[[], Decision], after: int, interrupt: Callable[[], None]) -> tuple[Decision, int]:
    """Decide, with something else happening before the line of that number; how many lines there were in all."""
    lines = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal lines
        if frame.f_code.co_filename.rpartition("/")[2] not in ("learned_speed.py", "speed_model.py"):
            return None
        if event == "line":
            lines += 1
            if lines == after:
                sys.settrace(None)
                interrupt()
                sys.settrace(trace)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        return decide(), lines
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("how", ["load", "take"])
def test_whenever_other_statistics_come_a_slot_is_decided_with_the_old_or_with_the_new(how: str) -> None:
    """Another thread brings them: between any two lines of a decision. Half of each would be neither's decision."""
    known = SpeedStatistics()
    for job_type, power in (("scales", 0.2), ("does not", 0.9), ("in between", 0.7)):
        for workers in (1, 2, 3, 4, 6):
            known.add(SpeedCell(job_type, "", workers, 0, 0), observed(workers**power / 600))
    policy, cluster = taught(20)
    memory, questions = policy.state(), []
    for _ in range(2):
        questions.append(cluster.question())
        cluster.train(questions[-1], guardrail.decide(questions[-1], policy, registry.heuristic("fifo")))

    def run(after: int) -> tuple[list[Decision], bytes, int]:
        one = LearnedSpeed(LearnedSpeedOptions(resize_s=0.0, period_s=6000.0))
        one.restore(memory)

        def bring() -> None:
            if how == "load":
                one.load(known)
            else:
                one.take(7, [known])

        def ask(question: AskPolicy) -> Decision:
            budget = TentativePlacement(question.observation, question.keep_running)
            return one.decide(question.observation, budget)

        first, lines = _interrupted(lambda: ask(questions[0]), after, bring)
        if after > lines:
            bring()
        return [first, ask(questions[1])], one.state(), lines

    new, old = run(1), run(10**9)
    assert new[0][0] != old[0][0], "the statistics make a difference"
    seen = set()
    for after in range(1, old[2], max(1, old[2] // 60)):
        decisions, state, _ = run(after)
        matches = [name for name, one in (("new", new), ("old", old)) if (decisions, state) == one[:2]]
        assert matches, f"what came before line {after} of {old[2]} is half of each"
        seen.update(matches)
    assert seen == {"new", "old"}
