"""Lets no bad answer out: what a policy says is checked, and where it cannot be used the heuristic answers instead."""

from __future__ import annotations

import os
import threading
import traceback
from operator import ne
from pathlib import PurePath

import msgspec
from msgspec.structs import replace

from fedsched.core.commands import AskPolicy
from fedsched.core.decision import Decision, JobView, Observation, Policy, Ranking
from fedsched.core.ids import JobId
from fedsched.core.job import Allocation, allocation_of
from fedsched.core.placement import TentativePlacement
from fedsched.core.rebuilding import Rebuilding
from fedsched.core.record import Record
from fedsched.core.resources import total
from fedsched.policy import estimate
from fedsched.policy.disciplines import Discipline
from fedsched.policy.heuristics import by_arrival

COLLAPSE = 0.25
"""A learned policy has collapsed where its answer is worth less than this share of what the heuristic's would be."""
SAID_MAX = 1000
"""Characters of what somebody else's code says of itself: it is kept with every decision, and shown to people."""
VERSION_MAX = 2**63 - 1
"""What every store and message takes."""


class Interruption(BaseException):
    """Ends a policy's answer from outside; a guardrail in the main thread lets it through, as `KeyboardInterrupt`."""


class Consulted(Record, frozen=True):
    """What a policy said, and whether it can be used."""

    decision: Decision | None
    """None where it gave none."""
    problem: str
    """Why it cannot be used; empty when it can."""


def decide(question: AskPolicy, policy: Policy, fallback: Policy) -> Decision:
    """The policy's answer or, where it fails or cannot be used, the fallback's; then `Decision.fallback` says why.

    Each has a budget of its own, so what a failing policy spent is not missing afterwards. The time it may take is the
    caller's to watch.
    """
    consulted = consult(question, policy)
    problem = consulted.problem or _worthless(question, consulted.decision, fallback)
    if consulted.decision is not None and not problem:
        return consulted.decision
    return fall_back(question, fallback, f"{title(policy)}: {problem}")


def identity(policy: Policy) -> tuple[str, int]:
    """Name and version as they can be kept and sent, whatever the policy has in their place."""
    try:
        name, version = policy.name, policy.version
    except Exception:  # they can be properties of anybody's
        return "without a name", 0
    known = type(name) is str and type(version) is int and 0 <= version <= VERSION_MAX
    return (_sayable(name), version) if known else ("without a name", 0)


def title(policy: Policy) -> str:
    """What reasons call it."""
    name, version = identity(policy)
    return f"policy {name} (version {version})"


def consult(question: AskPolicy, policy: Policy) -> Consulted:
    """The policy's answer, whatever it does, and what is wrong with its form."""
    process = os.getpid()
    try:
        answer = _answer(question, policy)
        return Consulted(answer, judge(question, answer) or "")
    except _Malformed as problem:
        return Consulted(None, str(problem))
    except BaseException as error:  # A policy can be anybody's code; nothing it raises may stop the cluster.
        if is_interruption(error):
            raise
        return Consulted(None, told(error))
    finally:
        if os.getpid() != process:
            os._exit(1)  # a process that the policy forked must not decide, too: it holds all that its parent holds


def is_interruption(error: BaseException) -> bool:
    """Whether it came from outside, to end whatever goes on: signals are handled in the main thread only."""
    in_main = threading.current_thread() is threading.main_thread()
    return in_main and isinstance(error, KeyboardInterrupt | Interruption)


class _Malformed(Exception):
    """An answer is no decision."""


def _well_formed(answer: object) -> Decision:
    """The answer as it reads when it was written down and read back: that is what a journal keeps of it.

    Raises:
        _Malformed: with what is wrong.
    """
    if not isinstance(answer, Decision):
        raise _Malformed(f"it answered with {type(answer).__name__}; a Decision was expected")
    try:
        # Bytes would be written as text.
        same = msgspec.convert(msgspec.to_builtins(answer, builtin_types=(bytes, bytearray, memoryview)), Decision)
    except (TypeError, ValueError, RecursionError) as problem:
        raise _Malformed(f"its answer is no decision that can be kept: {_sayable(str(problem))}") from problem
    if not 0 <= same.version <= VERSION_MAX:
        raise _Malformed(f"its answer is of version {_sayable(str(same.version))}")
    if same.fallback:
        raise _Malformed("its answer says why the heuristic was asked, and it was not")
    for text in (same.policy, *(text for _, text in same.notes), *(kind for _, kind in same.accelerators)):
        if text != _sayable(text):
            raise _Malformed(f"its answer holds a text that cannot be shown: {_sayable(text)}")
    # The same object where it can be: equal keys of ranks may be whole numbers or not.
    return answer if same == answer else same


def told(error: BaseException) -> str:
    """What somebody else's code raised, in one line: what, and where."""
    try:
        text = str(error)
    except Exception:  # its own method, too, is anybody's
        text = "without a message that could be read"
    return f"{type(error).__name__}: {_sayable(' '.join(text.split()))} ({_where(error)})"


def _sayable(text: str) -> str:
    """The text as every store, message and terminal takes it; the beginning where it is long."""
    cut = text if len(text) <= SAID_MAX else f"{text[: SAID_MAX - 1]}…"
    return cut if cut.isprintable() else "".join(char if char.isprintable() else ascii(char)[1:-1] for char in cut)


def _where(error: BaseException) -> str:
    """The line that raised it, for whoever wrote the policy."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{PurePath(frame.filename).name}, line {frame.lineno}"


def fall_back(question: AskPolicy, fallback: Policy, reason: str) -> Decision:
    """The heuristic's answer, marked with why it was asked.

    Where ranks were asked for there is none: ranks of two disciplines do not compare. Ranked jobs keep their ranks, the
    others come last, in the order of arrival, and are asked about again.
    """
    if question.ranks:
        return Decision(question.observation.slot, (), fallback.name, fallback=reason)
    return replace(_answer(question, fallback), fallback=reason)


def _answer(question: AskPolicy, policy: Policy) -> Decision:
    observation = question.observation
    if question.ranks:
        if not isinstance(policy, Discipline):
            raise TypeError("it was asked for ranks and is no discipline")
        ranking = policy.rank(observation)
        return _well_formed(Decision(observation.slot, (), policy.name, policy.version, ranking=ranking))
    if question.rebuild:
        rebuilt = Rebuilding(observation)
        answer = _well_formed(policy.decide(observation, rebuilt))
        return replace(answer, placements=rebuilt.placements())  # ours, and thousands of tasks: not to be looked at
    budget = TentativePlacement(observation, question.keep_running, question.placement)
    return _well_formed(policy.decide(observation, budget))


def judge(question: AskPolicy, answer: Decision) -> str | None:
    """Why this answer cannot be used, in one sentence; None when it can.

    Checked are the form (this slot, known jobs, each once), every job's limits, pinned jobs, the sum against the
    cluster, and that it does not run nothing although some job's minimum fits. Whether the sum also fits node by node
    depends on the order of grants; placement leaves out what does not.
    """
    observation = question.observation
    if answer.slot != observation.slot:
        return f"its answer is for slot {answer.slot}; asked was slot {observation.slot}"
    if question.ranks:
        return _judge_ranks(observation, answer.ranking)
    views = {view.job_id: view for view in observation.jobs}
    if len({job_id for job_id, _ in answer.allocations}) < len(answer.allocations):
        return "its answer names a job twice"
    for job_id, allocation in answer.allocations:
        if job_id not in views:
            return f"its answer names job {job_id}, which is not in this slot"
        problem = _beyond_limits(views[job_id], allocation)
        if problem is not None:
            return problem
    return _beyond_capacity(observation, views, answer) or _idle(question, answer)


def _judge_ranks(observation: Observation, ranking: Ranking | None) -> str | None:
    if ranking is None:
        return "it gives no ranks"
    asked = [view.job_id for view in observation.jobs]
    named = [job_id for job_id, _ in ranking.ranks]
    if named != asked and sorted(named) != sorted(asked):
        return f"it ranks {len(named)} jobs; asked were {len(asked)}, each once"
    for job_id, key in ranking.ranks:
        if not key or _has_nan(key):
            return f"it ranks job {job_id} by {key}; a key is a tuple of numbers"
    return None


def _has_nan(key: tuple[float, ...]) -> bool:
    return any(map(ne, key, key))


def _beyond_limits(view: JobView, allocation: Allocation) -> str | None:
    if view.pinned:
        now = allocation_of(view.placement)
        return None if allocation == now else f"it gives pinned job {view.job_id} {allocation}; it holds {now}"
    if not (isinstance(allocation.workers, int) and isinstance(allocation.ps, int)):
        return f"it gives job {view.job_id} {allocation}; whole numbers of tasks were expected"
    if not allocation:
        return None
    if not view.minimum.workers <= allocation.workers <= view.workers.maximum:
        allowed = f"{view.minimum.workers}..{view.workers.maximum} workers"
        return f"it gives job {view.job_id} {allocation}; allowed are {allowed}"
    if allocation.ps not in view.ps:
        return f"it gives job {view.job_id} {allocation}; allowed are {view.ps} parameter servers"
    return None


def _beyond_capacity(observation: Observation, views: dict[JobId, JobView], answer: Decision) -> str | None:
    promised = total(
        [
            views[job_id].worker_demand * allocation.workers + views[job_id].ps_demand * allocation.ps
            for job_id, allocation in answer.allocations
            # A pinned job may still be counted on a node that has just been lost.
            if not views[job_id].pinned
        ]
    )
    if promised.fits_in(observation.capacity):
        return None
    return f"it promises {promised}; the whole cluster has {observation.capacity}"


def _worthless(question: AskPolicy, answer: Decision | None, fallback: Policy) -> str:
    """Why a learned policy's answer counts as collapsed; empty where it does not.

    Heuristics may leave a cluster idle on purpose, so they are not measured. Almost all answers pass by a look that
    costs next to nothing; the heuristic is asked about the others only.
    """
    if answer is None or not answer.version or question.ranks or question.rebuild:
        return ""
    observation = question.observation
    if estimate.share_of_best(observation, answer.allocations) >= COLLAPSE:
        return ""
    curves = estimate.curves_of(observation)
    own = estimate.worth(observation, answer.allocations, curves)
    heuristic = estimate.worth(observation, _answer(question, fallback).allocations, curves)
    if own >= COLLAPSE * heuristic:
        return ""
    return (
        f"its answer has collapsed: in this slot jobs would train {own:.3g} of their epochs in all, "
        f"with that of {fallback.name} {heuristic:.3g}"
    )


def _idle(question: AskPolicy, answer: Decision) -> str | None:
    if any(allocation for _, allocation in answer.allocations):
        return None
    if question.rebuild:
        return None
    budget = TentativePlacement(question.observation, question.keep_running, question.placement)
    for view in by_arrival(question.observation.jobs):
        least = view.minimum
        if budget.allocation(view.job_id) or budget.grant(view.job_id, least.workers, least.ps):
            return f"it runs nothing, although the minimum of job {view.job_id}, {least}, fits"
    return None
