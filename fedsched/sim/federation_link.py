"""The simulated link between agents and aggregator: late, lossy, repeating and cut, but in order as on one stream."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from random import Random

from fedsched.core.ids import ClusterName, stream
from fedsched.federation.exchange import GradientReply, GradientRequest
from fedsched.federation.source import Arrays, Hello, PolicyOffer
from fedsched.sim.clock import ARRIVAL, VirtualClock
from fedsched.sim.federation_config import LinkConfig


class Way(StrEnum):
    """Which way a message goes."""

    UP = "up"
    """From an agent to the aggregator."""
    DOWN = "down"


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """A round's question on its way, with the weights."""

    arrays: Arrays
    request: GradientRequest


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """An agent's answer on its way; Flower's messages name theirs by an id."""

    number: int
    reply: GradientReply


Message = Hello | Question | Answer | PolicyOffer
Watch = Callable[[Way, ClusterName, Message, float], None]
"""Sees each message that arrives, with the time."""


class Errands:
    """What the federations of a world have planned on the clock that they share with its clusters.

    `alone` tells that nothing else is planned any more: the world has come to its end, and who does something again
    and again must stop.
    """

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._planned = 0

    @property
    def now_s(self) -> float:
        """The time."""
        return self._clock.now_s

    @property
    def alone(self) -> bool:
        """Whether only errands are left."""
        return len(self._clock) <= self._planned

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        """Have it happen at a time, which is not before now."""
        self._planned += 1
        self._clock.at(time_s, self._happen, action, rank=ARRIVAL)

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        """Have it happen in so long."""
        self.at(self._clock.now_s + delay_s, action)

    def _happen(self, action: Callable[[], None]) -> None:
        self._planned -= 1
        action()


class Link:
    """Carries messages between the aggregator and each cluster.

    Args:
        cut: whether nothing passes to or from a cluster at a time.
        watch: sees what arrives.
    """

    def __init__(
        self,
        errands: Errands,
        config: LinkConfig,
        seed: int,
        cut: Callable[[ClusterName, float], bool],
        watch: Watch | None = None,
    ) -> None:
        self._errands = errands
        self._config = config
        self._seed = seed
        self._cut = cut
        self._watch = watch
        self._chance: dict[tuple[ClusterName, Way], Random] = {}
        self._last_s: dict[tuple[ClusterName, Way], float] = {}
        self.sent = 0
        self.lost = 0

    def send(self, way: Way, cluster: ClusterName, message: Message, deliver: Callable[[], None]) -> None:
        """Have `deliver` called when the message arrives: once, twice, or never."""
        line = (cluster, way)
        chance = self._chance.setdefault(line, stream(self._seed, f"link/{cluster}/{way.value}"))
        # Always as many draws, so that a message's fate does not depend on that of the one before.
        late, lost, twice, again = (chance.random() for _ in range(4))
        config, now_s = self._config, self._errands.now_s
        self.sent += 1
        if lost < config.loss or self._cut(cluster, now_s):
            self.lost += 1
            return
        arrives_s = max(now_s + config.delay_s + late * config.jitter_s, self._last_s.get(line, 0.0))
        self._last_s[line] = arrives_s
        self._errands.at(arrives_s, lambda: self._arrive(way, cluster, message, deliver))
        if twice < config.twice:
            self._last_s[line] = arrives_s = arrives_s + again * (config.delay_s + config.jitter_s)
            self._errands.at(arrives_s, lambda: self._arrive(way, cluster, message, deliver))

    def _arrive(self, way: Way, cluster: ClusterName, message: Message, deliver: Callable[[], None]) -> None:
        if self._cut(cluster, self._errands.now_s):
            self.lost += 1
            return
        if self._watch is not None:
            self._watch(way, cluster, message, self._errands.now_s)
        deliver()
