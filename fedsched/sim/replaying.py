"""Replays a recorded journal in virtual time: the same core and loop over simulated edges must order the same.

Events come in at their recorded times, the policy's recorded decisions among them (they are not computed anew: the
outputs of a network depend on its library and machine). What the scheduler orders is compared with what was recorded,
command by command, and what the loop hands to its edges with what it must hand over, order by order.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace

from fedsched.config import PolicyConfig
from fedsched.core.commands import AskPolicy, Command, ExecutorCommand, Order, RewardSlot, SaveJob
from fedsched.core.decision import Decision
from fedsched.core.events import Event, PolicyDecided
from fedsched.core.gate import GateRule
from fedsched.core.ids import ClusterName
from fedsched.core.invariants import BrokenInvariant
from fedsched.core.job import IllegalTransition, JobStatus
from fedsched.core.scheduler import Scheduler
from fedsched.core.versions import (
    AcceptRule,
    Began,
    Candidate,
    Compared,
    Comparison,
    KeepComparison,
    Named,
    Version,
    Versions,
    verdict_on,
)
from fedsched.errors import Failed, InvalidInput
from fedsched.policy.comparing import compare, model
from fedsched.policy.registry import make
from fedsched.runtime import journal
from fedsched.runtime.codec import dumps
from fedsched.runtime.journal import Begun, Step
from fedsched.runtime.loop import Loop
from fedsched.sim.clock import VirtualClock
from fedsched.sim.cluster import MemoryLedger

STORE_S = 0.01
"""How long the simulated store takes; orders wait for it, as they did live."""
HINT = "if the scheduler was changed on purpose, record the journal anew; else look at that change"


class Differs(Failed):
    """A scheduler of today orders something else than the recorded one did."""


@dataclass(slots=True)
class Replayed:
    """What was repeated, all of it identical."""

    agents: int = 0
    """Schedulers that one after the other wrote the journal."""
    events: int = 0
    commands: int = 0
    orders: int = 0
    """Commands that went to executor and policy."""
    first_s: float = 0.0
    """Time of the first event, unix seconds."""
    length_s: float = 0.0
    """Virtual time from there to the last."""
    decisions: int = 0
    skipped: int = 0
    """Events at the start of a journal whose older part is lost; what their scheduler knew before is not known."""


@dataclass(slots=True)
class _Edges:
    """Executor, policy and recorder of the loop: they take orders and compare; events come from the record alone."""

    step: Step | None = None
    """The one that is being handled."""
    due: deque[tuple[str, Order]] = field(default_factory=deque)
    """Orders that the loop must hand over, each with where it is recorded, oldest first."""
    orders: int = 0

    def append(self, event: Event, commands: Sequence[Command]) -> None:
        """As the loop's journal: compare a step."""
        assert self.step is not None
        _compare(self.step, commands)
        self.due.extend((self.step.where, order) for order in commands if not isinstance(order, SaveJob))

    def submit(self, command: ExecutorCommand) -> None:
        """As the executor."""
        self._take(command)

    def ask(self, question: AskPolicy) -> None:
        """As the policy; its answer is in the record."""
        self._take(question)

    def reward(self, reward: RewardSlot) -> None:
        """As the learner."""
        self._take(reward)

    def close(self) -> None:
        """Nothing to let go of."""

    def _take(self, order: Order) -> None:
        where, expected = self.due.popleft() if self.due else ("the end", None)
        if not _same(order, expected):
            raise Differs(f"{where}: the loop hands over {order!r}; next in order was {expected!r}", HINT)
        self.orders += 1


def replay(path: Path, *, check: bool = True) -> Replayed:
    """Repeat the journal.

    Args:
        check: look at all of the scheduler's invariants after every event.

    Raises:
        InvalidInput: the file is no journal, or does not say what its first scheduler is made of.
        Differs: a command differs; the message names the first that does.
    """
    found = Replayed()
    clock, edges = VirtualClock(), _Edges()
    loop: Loop | None = None
    for entry in _entries(path):
        if isinstance(entry, Begun):
            clock.run()  # what the agent before had ordered went out, or was lost with it
            edges.due.clear()
            loop = _begin(clock, edges, entry, check)
            found.agents += 1
            continue
        if loop is None:
            found.skipped += 1
            continue
        _run_until(clock, entry.event.time_s)
        edges.step = entry
        _step(loop, entry)
        found.first_s = found.first_s or entry.event.time_s
        found.length_s = clock.now_s - found.first_s
        found.events += 1
        found.commands += len(entry.commands)
        found.decisions += sum(isinstance(command, AskPolicy) for command in entry.commands)
    clock.run()
    if loop is None:
        raise InvalidInput(
            f"{path} does not say what its scheduler is made of; a line with its configuration and nodes was expected "
            f"before its {found.skipped} events",
            "name the journal of an agent of this version, with its older part (.old) beside it",
        )
    found.orders = edges.orders
    return found


def shadow(path: Path, config: PolicyConfig, *, cases_max: int = GateRule().cases_max) -> Comparison:
    """Have a candidate decide what the journal's policy decided, as if it had run in its shadow.

    Args:
        config: of the candidate.
        cases_max: slots that are compared, the newest ones.

    Raises:
        InvalidInput: the file is no journal, or holds no slot that the candidate could decide.
        CorruptCheckpoint: the candidate's weights cannot be used.
    """
    slots = _decided(path)[-cases_max:]
    if not slots:
        raise InvalidInput(
            f"{path} holds no slot in which a policy was asked for allocations, so there is nothing to compare",
            "name the journal of an agent whose policy is no discipline, with some jobs in it",
        )
    policy = make(config)
    cluster = next((entry.config.cluster for entry in _entries(path) if isinstance(entry, Begun)), ClusterName(""))
    active = slots[-1][1]
    core = Versions(cluster, AcceptRule(gate=GateRule(cases_max=cases_max)))
    core.handle(Began(0.0, Version(active.policy, active.version)))
    candidate = Candidate(Version(config.name, checkpoint=config.checkpoint), "replay", 0.0)
    told = core.handle(Named(0.0, candidate))
    valued = model()
    for question, decision, took_s, time_s in slots:
        case = compare(question, decision, took_s, policy, time.perf_counter, valued)
        told = core.handle(Compared(time_s, candidate, case))
    kept = next(command for command in reversed(told) if isinstance(command, KeepComparison))
    # Nobody waits for more slots: the verdict is on all that there are.
    return replace(kept.comparison, verdict=verdict_on(kept.cases, GateRule()), running=False)


def _decided(path: Path) -> list[tuple[AskPolicy, Decision, float, float]]:
    """What was asked and answered, how long that took and when it was."""
    found = []
    asked: tuple[AskPolicy, float] | None = None
    for entry in _entries(path):
        if isinstance(entry, Begun):
            asked = None
            continue
        event = entry.event
        if isinstance(event, PolicyDecided) and asked is not None:
            question, asked_s = asked
            if event.decision.slot == question.observation.slot:
                found.append((question, event.decision, event.time_s - asked_s, event.time_s))
                asked = None
        for command in entry.commands:
            if isinstance(command, AskPolicy):
                asked = None if command.ranks else (command, event.time_s)
    return found


def _step(loop: Loop, step: Step) -> None:
    """Handle one event. A record that was changed may tell what cannot have happened; a live scheduler's never does."""
    try:
        loop.step(step.event)
    except (BrokenInvariant, IllegalTransition) as problem:
        raise Differs(
            f"{step.where}: what is recorded cannot have happened: after {_named(step.event)}, {problem}",
            "take the journal as the agent wrote it; if it is, the scheduler has a fault: report it with the journal",
        ) from problem


def _run_until(clock: VirtualClock, time_s: float) -> None:
    """Let happen what is due before; threads read their clocks before they post, so events may go back a little."""
    arrived: list[bool] = []
    clock.at(max(time_s, clock.now_s), arrived.append, True)
    while not arrived:
        clock.step()


def _begin(clock: VirtualClock, edges: _Edges, begun: Begun, check: bool) -> Loop:
    ledger = MemoryLedger(clock, STORE_S, None, _nobody_hears)
    scheduler = Scheduler(begun.config, begun.nodes, check=check)
    loop = Loop(scheduler, ledger, edges, edges, edges)
    ledger.loop = loop
    return loop


def _nobody_hears(status: JobStatus) -> None:
    """A job has ended; the record says what follows."""


def _entries(path: Path) -> list[Begun | Step]:
    """All lines; those of the older part come first where the journal begins in the middle of an agent's life."""
    older = path.with_name(path.name + ".old")
    try:
        found = list(journal.read(path))
        if found and not isinstance(found[0], Begun) and older.is_file():
            found = [*journal.read(older), *found]
    except UnicodeDecodeError as problem:
        raise InvalidInput(f"{path} is no journal: it is not text", "name an agent's journal.jsonl") from problem
    except ValueError as problem:
        raise InvalidInput(f"{problem}", "name an agent's journal.jsonl, as it was written") from problem
    return found


def _same(one: Command | None, other: Command | None) -> bool:
    """Equal, or alike to the last letter: a loss that is not a number equals nothing, not even itself."""
    return one == other or (one is not None and other is not None and dumps(one) == dumps(other))


def _compare(step: Step, got: Sequence[Command]) -> None:
    """Raise at the first command that differs."""
    expected = step.commands
    for number in range(max(len(expected), len(got))):
        was = expected[number] if number < len(expected) else None
        now = got[number] if number < len(got) else None
        if not _same(was, now):
            raise Differs(
                f"{step.where}: command {number + 1} of {len(expected)} differs after {_named(step.event)}\n"
                f"  recorded: {_shown(was, now)}\n"
                f"  replayed: {_shown(now, was)}",
                HINT,
            )


def _named(event: Event) -> str:
    """The event with what tells it from others; whole observations and decisions are too long to read."""
    parts = [f"{name} {getattr(event, name)}" for name in ("job_id", "slot", "term", "name") if hasattr(event, name)]
    return " ".join([f"{type(event).__name__} at {event.time_s:.3f} s", *parts])


def _shown(one: Command | None, other: Command | None) -> str:
    """A command, or what of it differs from another of its kind."""
    if one is None:
        return "nothing"
    if type(one) is not type(other):
        return repr(one)
    parts = [f"{name} {value!r}" for name, value in _differing(one, other)]
    job = getattr(one, "job_id", None) or getattr(getattr(one, "status", None), "job_id", None)
    return f"{type(one).__name__}{f' of job {job}' if job else ''} with {', '.join(parts)}"


def _differing(one: object, other: object, prefix: str = "") -> list[tuple[str, object]]:
    """Fields that differ, those of records within by their path."""
    found: list[tuple[str, object]] = []
    for name in type(one).__struct_fields__:  # type: ignore[attr-defined]
        mine, theirs = getattr(one, name), getattr(other, name)
        if mine == theirs:
            continue
        if hasattr(mine, "__struct_fields__") and type(mine) is type(theirs):
            found += _differing(mine, theirs, f"{prefix}{name}.")
        else:
            found.append((f"{prefix}{name}", mine))
    return found
