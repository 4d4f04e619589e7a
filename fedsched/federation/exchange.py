"""A round's question and its answer: what the aggregator asks, how an agent answers, what the core hears of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from fedsched.core.ids import ClusterName, stream
from fedsched.core.rounds import Absence, RequestUpdates, UpdateArrived, UpdateWithheld
from fedsched.federation.averaging import Inspection, Update
from fedsched.federation.source import Arrays, Declined, Gradient, GradientSource, Hello


@dataclass(frozen=True, slots=True)
class GradientRequest:
    """What a round asks of one agent, next to the weights."""

    number: int
    base_version: int
    batch_size: int
    seed: int
    traceparent: str
    samples_min: int = 1
    """An agent that knows the reward of fewer decisions has nothing to give."""


@dataclass(frozen=True, slots=True)
class GradientReply:
    """What an agent answers: a gradient, or why there is none."""

    term: int
    base_version: int
    gradients: Arrays
    samples: int
    metrics: tuple[tuple[str, float], ...]
    traceparent: str
    declined: str = ""


def question_to(
    cluster: ClusterName,
    request: RequestUpdates,
    *,
    batch_size: int,
    samples_min: int,
    seed: int,
    traceparent: str = "",
) -> GradientRequest:
    """The question for one of the clusters that the core asks; each draws its batch with a seed of its own."""
    chance = stream(seed, f"round/{request.number}/{cluster}")
    return GradientRequest(
        number=request.number,
        base_version=request.base_version,
        batch_size=batch_size,
        seed=int(chance.random() * 2**31),
        traceparent=traceparent,
        samples_min=samples_min,
    )


def respond(hello: Hello, learner: GradientSource, arrays: Arrays, question: GradientRequest) -> GradientReply:
    """An agent's answer, from its learner or without it.

    Args:
        hello: who the agent is now.
        arrays: the weights that the gradient is to be of.
    """
    if hello.samples < question.samples_min:
        # Before the learner is asked: a gradient of three decisions is noise that counts as an update.
        why = f"{hello.samples} decisions have a reward; the federation asks for at least {question.samples_min}"
        return decline(hello.term, question, why)
    try:
        gradient = learner.gradient(arrays, question.batch_size, question.seed)
    except Declined as declined:
        return decline(hello.term, question, str(declined))
    return GradientReply(
        hello.term,
        question.base_version,
        gradient.gradients,
        gradient.samples,
        metrics_of(gradient),
        question.traceparent,
    )


def decline(term: int, question: GradientRequest, why: str) -> GradientReply:
    """The answer of an agent that gives nothing."""
    return GradientReply(term, question.base_version, {}, 0, (), question.traceparent, why)


def metrics_of(gradient: Gradient) -> tuple[tuple[str, float], ...]:
    """What a learner says of its batch, sorted by name; what is no number is left out."""
    told = {
        "entropy": float(gradient.entropy),
        "loss": float(gradient.loss),
        "mean_reward": float(gradient.mean_reward),
    }
    return tuple((name, value) for name, value in told.items() if math.isfinite(value))


def heard(
    number: int, cluster: ClusterName, reply: GradientReply, inspect: Callable[[Arrays], Inspection], now_s: float
) -> tuple[UpdateArrived | UpdateWithheld, Update | None]:
    """What the core hears of a reply, and the update in it; the gradient is looked at here and nowhere else.

    Args:
        inspect: looks at what a reply gives, for the policy's weights as they are.
    """
    if reply.declined:
        return UpdateWithheld(number, cluster, Absence.DECLINED, reply.declined, now_s), None
    seen = inspect(reply.gradients)
    arrived = UpdateArrived(
        number=number,
        cluster=cluster,
        term=reply.term,
        base_version=reply.base_version,
        samples=reply.samples,
        norm=seen.norm,
        finite=seen.finite,
        misfit=seen.misfit,
        now_s=now_s,
        metrics=reply.metrics,
    )
    return arrived, Update(cluster, reply.samples, reply.gradients)
