"""Repeats: take an event, ask the core, persist, then act. The same loop runs live and simulated; it never waits.

Writes go to a `Ledger`, which answers later. What a step ordered goes out when its writes and those of all steps before
it are confirmed, so orders leave in the order in which they were given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

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

    def save(self, ticket: int, records: Sequence[SaveJob]) -> bool | None:
        """Write all of `records` or nothing.

        Returns:
            True where they are written already; else `Loop.confirm(ticket)` follows through the inbox, from any thread.
        """


class Recorder(Protocol):
    """Keeps the order of events and commands."""

    def append(self, event: Event, commands: Sequence[Command]) -> None:
        """Record one step."""


Observer = Callable[[Event, Sequence[Command]], None]
"""Sees every step after it was handled: traces and metrics hang here."""


class _Step:
    """What one event led to and is not done yet."""

    __slots__ = ("confirmed", "orders")

    def __init__(self, orders: list[Order], confirmed: bool) -> None:
        self.orders = orders
        self.confirmed = confirmed


class Loop:
    """One scheduler and its edges.

    Single-threaded: whoever owns it feeds `step` and `confirm` from one inbox.

    Args:
        journal: of every step; None where nobody will read it.
        observers: see every step, after the journal and before anything is persisted.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        ledger: Ledger,
        executor: Executor,
        policy: PolicyPort,
        journal: Recorder | None,
        observers: Sequence[Observer] = (),
    ) -> None:
        self.scheduler = scheduler
        self.ledger = ledger
        self._record = observers if journal is None else (journal.append, *observers)
        self._act: dict[type[Order], Callable[[Any], None]] = {
            StartJob: executor.submit,
            ScaleJob: executor.submit,
            StopJob: executor.submit,
            AdoptJobs: executor.submit,
            AskPolicy: policy.ask,
            RewardSlot: policy.reward,
        }
        self._steps: dict[int, _Step] = {}
        """By ticket; those whose writes, or the writes of one before them, are not confirmed."""
        self._oldest = 1
        """Ticket of the first of them; nothing while there is none."""
        self._ticket = 0

    def step(self, event: Event) -> None:
        """Handle one event. Journal first, persist second, act when that is confirmed."""
        commands = self.scheduler.handle(event)
        for record in self._record:
            record(event, commands)
        if not commands:
            return
        records: list[SaveJob] = []
        orders: list[Order] = []
        for command in commands:
            if type(command) is SaveJob:
                records.append(command)
            else:
                orders.append(command)  # type: ignore[arg-type]
        steps = self._steps
        if not records and not steps:
            self._give(orders)
            return
        self._ticket = ticket = self._ticket + 1
        written = not records or bool(self.ledger.save(ticket, records))
        if written and not steps:
            self._give(orders)
            return
        if not steps:
            self._oldest = ticket
        steps[ticket] = _Step(orders, written)

    def confirm(self, ticket: int) -> None:
        """The ledger has written the step's records."""
        step = self._steps.get(ticket)
        if step is not None:
            step.confirmed = True
            self._release()

    @property
    def unconfirmed(self) -> int:
        """Steps whose orders wait for the store."""
        return len(self._steps)

    def _release(self) -> None:
        """Let the orders go of all steps that nothing holds back any more."""
        steps = self._steps
        while (step := steps.get(self._oldest)) is not None and step.confirmed:
            del steps[self._oldest]
            self._oldest += 1
            self._give(step.orders)

    def _give(self, orders: list[Order]) -> None:
        for order in orders:
            self._act[type(order)](order)
