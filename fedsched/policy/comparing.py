"""Asks a candidate what the active policy was asked, and values both answers by one estimate; nothing is acted on."""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite

from fedsched.core.commands import AskPolicy
from fedsched.core.decision import Decision, Observation, Policy, SpeedSample
from fedsched.core.job import Allocation
from fedsched.core.versions import Case
from fedsched.policy import estimate, guardrail, optimus

NOTHING = Allocation()


def compare(
    question: AskPolicy, active: Decision, active_s: float, candidate: Policy, clock: Callable[[], float]
) -> Case:
    """One slot decided by both.

    Args:
        question: of a policy that is asked for allocations, not for ranks.
        active: the answer that was acted on; if the heuristic gave it, the active policy had none that could be used.
        active_s: how long it took.
        clock: seconds, to time the candidate by.
    """
    began_s = clock()
    consulted = guardrail.consult(question, candidate)
    took_s = clock() - began_s
    observation = question.observation
    curves = estimate.curves_of(observation)
    active_worth = estimate.worth(observation, active.allocations, curves)
    answer = consulted.decision if not consulted.problem else None
    worth = estimate.worth(observation, answer.allocations, curves) if answer is not None else None
    return Case(
        slot=observation.slot,
        active_worth=active_worth if isfinite(active_worth) and not active.fallback else None,
        candidate_worth=worth if worth is not None and isfinite(worth) else None,
        agreement=_agreement(observation, active, answer) if answer is not None else 0.0,
        active_s=active_s,
        candidate_s=took_s,
        problem=consulted.problem,
    )


def unanswered(question: AskPolicy, active_s: float, waited_s: float, problem: str) -> Case:
    """A slot in which the candidate gave no answer at all."""
    return Case(question.observation.slot, 0.0, None, 0.0, active_s, waited_s, problem)


def warm_up() -> None:
    """Load what the estimate needs, which takes seconds, before the first slot is waited for."""
    sample = SpeedSample(1, 1, 1.0)
    optimus.fit([sample])


def _agreement(observation: Observation, one: Decision, other: Decision) -> float:
    if not observation.jobs:
        return 1.0
    first, second = dict(one.allocations), dict(other.allocations)
    ids = [view.job_id for view in observation.jobs]
    return sum(first.get(job_id, NOTHING) == second.get(job_id, NOTHING) for job_id in ids) / len(ids)
