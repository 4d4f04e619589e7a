"""Repeats for the rounds what the scheduler's loop does for jobs: tells the core, carries out what it orders.

The same loop holds rounds live and simulated. What differs are the ports: how questions and policies travel, and where
versions and records are kept.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, Self, assert_never

import numpy as np

from fedsched.core.ids import ClusterName
from fedsched.core.rounds import (
    Combine,
    Combined,
    CombineFailed,
    NewWeights,
    OfferPolicy,
    PolicyRecord,
    RefuseMember,
    RejectUpdate,
    RequestUpdates,
    RoundCommand,
    RoundEvent,
    RoundRecord,
    Rounds,
    RoundSaved,
    SaveRound,
)
from fedsched.federation.averaging import Inspection, Update, inspect, trimmed_mean, weighted_mean
from fedsched.federation.optimiser import ServerOptimiser
from fedsched.federation.repute import left_out, noted
from fedsched.federation.source import Arrays


class Weights(Protocol):
    """A policy's weights with their story, as they are kept and sent."""

    @property
    def arrays(self) -> Arrays:
        """By name."""

    @property
    def digest(self) -> str:
        """Identifies the weights, whatever their story."""

    @property
    def made(self) -> Mapping[str, str | int | float]:
        """Their story."""

    def to_bytes(self) -> bytes:
        """The file's contents; the same weights and story always give the same bytes."""

    def replaced(self, arrays: Arrays, made: Mapping[str, str | int | float]) -> Self:
        """Weights of the same shape with these values and this story."""


@dataclass(frozen=True, slots=True)
class BaseVersion:
    """A policy version with everything that a round starts from."""

    record: PolicyRecord
    checkpoint: Weights
    data: bytes
    """The checkpoint's file."""
    optimiser: ServerOptimiser


@dataclass(frozen=True, slots=True)
class Standing:
    """Where the rounds stand: the version in force and the highest numbers given so far, to go on from later."""

    active: BaseVersion
    version_last: int
    number_last: int


Story = Mapping[str, str | int | float]
"""How weights came to be."""


class Unusable(Exception):
    """What came of combining cannot be used; the message says why, for the round's record."""


class Combining(Protocol):
    """What becomes of a round's updates."""

    def samples_min(self, configured: int) -> int:
        """Fewest samples that are worth an update, where so many are configured."""

    def inspect(self, weights: Weights, update: Arrays) -> Inspection:
        """Look at an update for these weights before anything is computed with it."""

    def left_out(self, before: BaseVersion) -> Mapping[ClusterName, str]:
        """Whose updates do not count in a round that starts from there, and why."""

    def step(self, before: BaseVersion, updates: Sequence[Update], story: Story) -> tuple[Weights, ServerOptimiser]:
        """The weights after the round, and the optimiser; the same for whatever order of the updates.

        Args:
            updates: of all, those that are left out too.

        Raises:
            Unusable: they cannot be used.
        """


Combiner = Callable[[Sequence[Update]], Arrays]
"""Makes one gradient of several."""


@dataclass(frozen=True, slots=True)
class Gradients:
    """Updates are gradients: one is made of them, and the weights take a step down.

    With `half_after` the learning rate is that of a single gradient: a round of n steps as far as n rounds of one
    would, so that eight clusters learn from eight times as many decisions and not only from better means (the linear
    rule of Goyal et al., 2017). And the m-th gradient's step is shorter by 1 + m / `half_after` (Robbins and Monro,
    1951), or who takes more steps would sooner be where policy gradients do harm: what is at its best gets worse again.
    """

    combine: Combiner
    half_after: float | None = None
    """None: all rounds step as far."""

    def samples_min(self, configured: int) -> int:
        """As configured: a gradient of three decisions is noise."""
        return configured

    def inspect(self, weights: Weights, update: Arrays) -> Inspection:
        """Whether it is finite and fits, and how long it is."""
        return inspect(weights.arrays, update)

    def left_out(self, before: BaseVersion) -> Mapping[ClusterName, str]:
        """Who points against the rest."""
        return left_out(before.optimiser.reputes)

    def step(self, before: BaseVersion, updates: Sequence[Update], story: Story) -> tuple[Weights, ServerOptimiser]:
        """One step of the optimiser, and a note of who pulls against the rest.

        Raises:
            Unusable: the new weights are not finite, or everybody is left out.
        """
        known = before.optimiser
        without = self.left_out(before).keys()
        counted = [update for update in updates if update.cluster not in without]
        if not counted:
            raise Unusable("each of those that gave an update is left out")
        arrays, optimiser = known.step(
            before.checkpoint.arrays,
            self.combine(counted),
            factor=step_length(self.half_after, known.given, len(counted)),
            given=len(counted),
            reputes=noted(known.reputes, updates, without),
        )
        if not all(bool(np.isfinite(array).all()) for array in arrays.values()):
            raise Unusable("the new weights hold NaN or infinity")
        return before.checkpoint.replaced(arrays, story), optimiser


def step_length(half_after: float | None, before: int, given: int) -> float:
    """How many times the learning rate a step is long, see `Gradients`.

    Args:
        before: gradients that the steps before it were made of.
        given: those of this one.
    """
    if half_after is None:
        return 1.0
    return sum(1 / (1 + number / half_after) for number in range(before, before + given))


class GradientRules(Protocol):
    """How configuration says that gradients become a step; see `fedsched.config.RoundConfig`."""

    @property
    def combine(self) -> str:
        """Name of the combiner."""

    @property
    def trim_fraction(self) -> float:
        """Of the trimmed mean."""

    @property
    def half_after(self) -> float | None:
        """As `Gradients` has it."""


def gradients(config: GradientRules) -> Gradients:
    """How configuration says that gradients are combined."""
    return Gradients(combiner(config.combine, config.trim_fraction), config.half_after)


def combiner(name: str, trim_fraction: float) -> Combiner:
    """The strategy that configuration names.

    Raises:
        ValueError: there is none of that name.
    """
    if name == "weighted_mean":
        return weighted_mean
    if name == "trimmed_mean":
        return lambda updates: trimmed_mean(updates, trim_fraction)
    raise ValueError(f"there is no strategy {name!r}; weighted_mean or trimmed_mean was expected")


class RoundPorts(Protocol):
    """What the rounds need from the world."""

    def now_s(self) -> float:
        """The time for the core's events."""

    def ask(self, request: RequestUpdates) -> None:
        """Put the question to the clusters. `RoundLoop.answered` follows for each answer, then `DeadlinePassed`."""

    def rejected(self, command: RejectUpdate) -> None:
        """An update was thrown away."""

    def write(self, version: int, digest: str, data: bytes, optimiser: ServerOptimiser) -> NewWeights:
        """Make a version's files durable; nobody sees them before `save`.

        Raises:
            OSError: the disk is full, or the like.
        """

    def save(self, record: RoundRecord, policy: PolicyRecord | None) -> bool:
        """Make a round's record, and the version it made, durable in one step; False: given up, the process ends."""

    def offer(self, version: BaseVersion, clusters: tuple[ClusterName, ...]) -> None:
        """Send a version to these clusters."""

    def stage(self, name: str, attributes: Mapping[str, Any]) -> AbstractContextManager[None]:
        """A context around what takes long, for traces."""


class RoundLoop:
    """One policy's rounds: the core, the version in force, and the updates of the open round.

    `lock` guards the core, so that a policy that is offered is always the one in force. What takes long, combining and
    saving, happens without it.

    Args:
        active: the version in force.
        combining: what becomes of updates.
    """

    def __init__(self, core: Rounds, active: BaseVersion, combining: Combining, ports: RoundPorts) -> None:
        self.lock = threading.RLock()
        self._core = core
        self._active = active
        self._combining = combining
        self._ports = ports
        self._updates: dict[ClusterName, Update] = {}
        self._made: tuple[Weights, bytes, ServerOptimiser] | None = None
        """What was combined and is not yet saved."""

    @property
    def core(self) -> Rounds:
        """Read only."""
        return self._core

    @property
    def active(self) -> BaseVersion:
        """The version in force."""
        return self._active

    @property
    def arrays(self) -> Arrays:
        """Weights of the version in force."""
        return self._active.checkpoint.arrays

    def inspect(self, update: Arrays) -> Inspection:
        """Look at an update for the version in force."""
        return self._combining.inspect(self._active.checkpoint, update)

    def handle(self, event: RoundEvent) -> list[RoundCommand]:
        """Tell the core, carry out what it orders; returns that."""
        return self.answered(event, None)

    def answered(self, event: RoundEvent, update: Update | None) -> list[RoundCommand]:
        """An asked cluster answered; `update` is set exactly for an `UpdateArrived`.

        Only an update that the core counts is kept: not a late one, not the second one of a cluster.
        """
        with self.lock:
            before = self._counted()
            commands = self._core.handle(event)
            if update is not None and update.cluster in self._counted() - before:
                self._updates[update.cluster] = update
        for command in commands:
            self._carry_out(command)
        return commands

    def _counted(self) -> set[ClusterName]:
        held = self._core.open
        return set(held.contributions) if held is not None else set()

    def made(self, policy: PolicyRecord | None) -> BaseVersion | None:
        """The version that a round has made, while it is being saved; None where it made none."""
        return BaseVersion(policy, *self._made) if policy is not None and self._made is not None else None

    def _carry_out(self, command: RoundCommand) -> None:
        match command:
            case RequestUpdates():
                self._updates = {}
                self._ports.ask(command)
            case RejectUpdate():
                self._ports.rejected(command)
            case Combine():
                self.handle(self._combine(command))
            case SaveRound():
                self._save(command)
            case OfferPolicy(_, clusters):
                self._ports.offer(self._active, clusters)
            case RefuseMember():
                pass  # Whoever told of the member sees the command and ends the connection.
            case _:
                assert_never(command)

    def _combine(self, command: Combine) -> Combined | CombineFailed:
        with self._ports.stage("round.combine", {"updates": len(command.accepted)}):
            without = self._combining.left_out(self._active)
            story: dict[str, str | int | float] = {
                "round": command.number,
                "parent_version": self._active.record.version,
                "contributors": ", ".join(name for name in command.accepted if name not in without),
            }
            updates = [self._updates[cluster] for cluster in command.accepted]
            counted = sum(cluster not in without for cluster in command.accepted)
            if counted < self._core.quorum:
                why = f"{len(updates) - counted} of {len(updates)} updates are left out: {'; '.join(without.values())}"
                return CombineFailed(command.number, why, self._ports.now_s())
            try:
                weights, optimiser = self._combining.step(self._active, updates, story)
            except Unusable as problem:
                return CombineFailed(command.number, str(problem), self._ports.now_s())
            data = weights.to_bytes()
            try:
                written = self._ports.write(command.version, weights.digest, data, optimiser)
            except OSError as problem:
                why = f"the new weights cannot be written: {problem}"
                return CombineFailed(command.number, why, self._ports.now_s())
            self._made = (weights, data, optimiser)
            out = tuple((name, without[name]) for name in command.accepted if name in without)
            return Combined(command.number, written, self._ports.now_s(), left_out=out)

    def _save(self, command: SaveRound) -> None:
        attributes = {"outcome": command.record.outcome.value, "version": command.record.version}
        with self._ports.stage("policy.store", attributes):
            if not self._ports.save(command.record, command.policy):
                return
        self._updates = {}
        with self.lock:
            if command.policy is not None:
                made = self.made(command.policy)
                assert made is not None, "a version is saved that was never combined"
                self._active = made
            self._made = None
            self.handle(RoundSaved(command.record.number))
