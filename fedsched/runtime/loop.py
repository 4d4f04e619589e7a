"""Repeats: take an event, ask the core, persist, then act. The same loop runs live and simulated; it never waits.

Writes go to a `Ledger`, which answers later. What a step ordered goes out when its writes and those of all steps before
it are confirmed, so orders leave in the order in which they were given.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, assert_never

from fedsched.core.commands import (
    AdoptJobs,
    AskPolicy,
    Command,
    Order,
    RewardSlot,
    SaveJob,
    ScaleJob,
    StartJob,
    StopJob,
)
from fedsched.core.events import Event
from fedsched.core.scheduler import Scheduler
from fedsched.runtime.ports import Executor, PolicyPort


class Ledger(Protocol):
    """Persists job records under the agent's term, in order, one transaction per step."""

    def save(self, ticket: int, records: Sequence[SaveJob]) -> None:
        """Write all of `records` or nothing. `Loop.confirm(ticket)` follows, from any thread, through the inbox."""


class Recorder(Protocol):
    """Keeps the order of events and commands."""

    def append(self, event: Event, commands: Sequence[Command]) -> None:
        """Record one step."""


Observer = Callable[[Event, Sequence[Command]], None]
"""Sees every step after it was handled: traces and metrics hang here."""


@dataclass(slots=True)
class _Step:
    ticket: int
    orders: list[Order]
    confirmed: bool


@dataclass(slots=True)
class Loop:
    """One scheduler and its edges.

    Single-threaded: whoever owns it feeds `step` and `confirm` from one inbox.
    """

    scheduler: Scheduler
    ledger: Ledger
    executor: Executor
    policy: PolicyPort
    journal: Recorder
    observers: Sequence[Observer] = ()
    _waiting: deque[_Step] = field(default_factory=deque)
    _ticket: int = 0

    def step(self, event: Event) -> None:
        """Handle one event. Journal first, persist second, act when that is confirmed."""
        commands = self.scheduler.handle(event)
        self.journal.append(event, commands)
        for observe in self.observers:
            observe(event, commands)
        records = [command for command in commands if isinstance(command, SaveJob)]
        orders = [command for command in commands if not isinstance(command, SaveJob)]
        if not records and not orders:
            return
        self._ticket += 1
        self._waiting.append(_Step(self._ticket, orders, confirmed=not records))
        if records:
            self.ledger.save(self._ticket, records)
        self._release()

    def confirm(self, ticket: int) -> None:
        """The ledger has written the step's records."""
        for step in self._waiting:
            if step.ticket == ticket:
                step.confirmed = True
        self._release()

    @property
    def unconfirmed(self) -> int:
        """Steps whose orders wait for the store."""
        return len(self._waiting)

    def _release(self) -> None:
        while self._waiting and self._waiting[0].confirmed:
            for order in self._waiting.popleft().orders:
                self._act(order)

    def _act(self, order: Order) -> None:
        match order:
            case StartJob() | ScaleJob() | StopJob() | AdoptJobs():
                self.executor.submit(order)
            case AskPolicy():
                self.policy.ask(order)
            case RewardSlot():
                self.policy.reward(order)
            case _:
                assert_never(order)
