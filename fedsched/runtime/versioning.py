"""Repeats for a cluster's versions what the scheduler's loop does for jobs: tells the core, carries out its orders.

The same loop runs live and simulated. What differs are the ports: where orders and weights are kept, and who asks the
candidate. Single-threaded: whoever owns it feeds `handle`.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol, assert_never

from fedsched.core.versions import (
    Candidate,
    Case,
    Comparison,
    Install,
    InstallDelayed,
    Installed,
    InstallFailed,
    KeepComparison,
    KeepPromotion,
    Ordered,
    Promotion,
    RunShadow,
    State,
    Version,
    VersionCommand,
    VersionEvent,
    Versions,
)
from fedsched.errors import FedschedError


class NotHere(Exception):
    """A version's weights are not here yet; the message says what they are waited for from."""


class VersionPorts(Protocol):
    """What a cluster's versions need from the world."""

    def now_s(self) -> float:
        """The time for the core's events."""

    def keep_promotion(self, promotion: Promotion) -> bool:
        """Make an order durable; False where another order came first with its number, or it could not be kept."""

    def install(self, version: Version) -> str:
        """Have the policy decide with these weights; returns their digest.

        Raises:
            NotHere: they have been asked for; `Arrived` follows.
            ValueError: they cannot be used.
        """

    def run_shadow(self, candidate: Candidate | None) -> None:
        """Ask this candidate, in place of the one before; `Compared` or `CandidateFailed` follows."""

    def keep_comparison(self, comparison: Comparison, cases: tuple[Case, ...]) -> None:
        """Make it durable; may be left out when the store is away, for there will be another one."""


class VersionLoop:
    """One cluster's versions and their edges."""

    def __init__(self, core: Versions, ports: VersionPorts) -> None:
        self.core = core
        self._ports = ports

    def handle(self, event: VersionEvent) -> None:
        """Tell the core, carry out what it orders, and what follows from that."""
        events = deque([event])
        while events:
            for command in self.core.handle(events.popleft()):
                answer = self._carry_out(command)
                if answer is not None:
                    events.append(answer)

    def _carry_out(self, command: VersionCommand) -> VersionEvent | None:
        ports = self._ports
        match command:
            case KeepPromotion(promotion):
                kept = ports.keep_promotion(promotion)
                is_new = kept and promotion.state is State.PENDING and not promotion.message
                return Ordered(ports.now_s(), promotion) if is_new else None
            case Install(seq, version):
                return self._install(seq, version)
            case RunShadow(candidate):
                ports.run_shadow(candidate)
            case KeepComparison(comparison, cases):
                ports.keep_comparison(comparison, cases)
            case _:
                assert_never(command)
        return None

    def _install(self, seq: int, version: Version) -> VersionEvent:
        try:
            digest = self._ports.install(version)
        except NotHere as problem:
            return InstallDelayed(self._ports.now_s(), seq, str(problem))
        except FedschedError as problem:
            return InstallFailed(self._ports.now_s(), seq, problem.message)
        except ValueError as problem:
            return InstallFailed(self._ports.now_s(), seq, str(problem))
        return Installed(self._ports.now_s(), seq, digest)
