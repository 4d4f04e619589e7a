"""What a cluster that learns speeds gives to the federation's rounds and takes from them, live and simulated."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedsched.core.ids import ClusterName
from fedsched.core.speeds import SpeedStatistics
from fedsched.errors import CorruptCheckpoint
from fedsched.federation.averaging import Inspection, Update
from fedsched.federation.loop import BaseVersion, Story, Weights
from fedsched.federation.optimiser import ServerOptimiser
from fedsched.federation.source import Arrays, Declined, PolicyOffer
from fedsched.policy import speed_pool
from fedsched.policy.learned_speed import LearnedSpeed
from fedsched.policy.speed_pool import CELLS_MAX, STATISTICS, Part, Pool, part_of

_log = logging.getLogger(__name__)

UNTOLD = float("nan")


@dataclass(frozen=True, slots=True)
class Shared:
    """Statistics as an update of a round."""

    gradients: Arrays
    samples: int
    """Jobs counted, over all cells."""
    loss: float = UNTOLD
    entropy: float = UNTOLD
    mean_reward: float = UNTOLD


class SpeedSharing:
    """What an agent gives to the federation and takes from it.

    Args:
        policy: decides in the cluster, maybe with what an earlier process of the agent remembered.
        term: the agent's.
    """

    def __init__(self, cluster: ClusterName, policy: LearnedSpeed, term: int) -> None:
        self._cluster = cluster
        self._policy = policy
        self._term = term
        policy.explorer = cluster
        if not policy.epoch:
            policy.epoch = term
        self._counted = (0, 0)
        """Term and number of what the federation counts of this cluster."""

    @property
    def version(self) -> int:
        """Of what was taken from the federation; 0 before anything was."""
        return self._policy.taken

    @property
    def samples(self) -> int:
        """Jobs counted, over all cells."""
        return self._policy.shown()[1].observations

    def gradient(self, arrays: Arrays, batch_size: int, seed: int) -> Shared:
        """All that was seen here.

        Raises:
            Declined: nothing has been seen, or nothing since it was counted last.
        """
        number, seen = self._policy.shown()
        if not seen.observations:
            raise Declined("no job of this cluster has shown a speed yet")
        if (self._term, number) == self._counted:
            raise Declined("nothing was seen since this cluster's statistics were counted last")
        part = Part(self._policy.epoch, self._term, number, self._policy.period_s, _newest(seen))
        return Shared({STATISTICS: part.to_array()}, part.statistics.observations)

    def take(self, offer: PolicyOffer) -> str | None:
        """Decide with the others' statistics from the next slot on; None, or why not."""
        try:
            pool = speed_pool.from_bytes(offer.checkpoint, f"policy {offer.name} version {offer.version}")
        except CorruptCheckpoint as problem:
            return problem.message
        if pool.digest != offer.digest:
            return f"its digest is {pool.digest}; announced was {offer.digest}"
        own = (self._cluster, self._policy.epoch)
        mine = pool.parts.get(own)
        if mine is not None:
            self._counted = (mine.term, mine.number)
        # What the federation began with, this cluster may have begun with too.
        base = self._policy.base
        others = [part.statistics for key, part in sorted(pool.parts.items()) if key != own]
        self._policy.take(offer.version, [seen for seen in others if seen != base])
        _log.info("what %d clusters have seen, version %d, counts from the next slot on", len(others), offer.version)
        return None


def _newest(seen: SpeedStatistics) -> SpeedStatistics:
    """As many cells as may be given."""
    if len(seen) <= CELLS_MAX:
        return seen
    return SpeedStatistics(sorted(seen, key=lambda entry: (-entry[0].period, entry[0]))[:CELLS_MAX])


class Sums:
    """Updates are statistics of speeds: the newest of each cluster is kept beside the others'.

    Args:
        period_s: length of the periods that cells name.
    """

    def __init__(self, period_s: float) -> None:
        self._period_s = period_s

    def samples_min(self, configured: int) -> int:
        """One: each sum says how many jobs it is of."""
        return 1

    def inspect(self, weights: Weights, update: Arrays) -> Inspection:
        """Whether they can have been observed, and are of the same calendar."""
        try:
            part = part_of(update)
        except ValueError as problem:
            return Inspection(str(problem), finite=True, norm=0.0)
        if part.period_s != self._period_s:
            why = f"its periods last {part.period_s:g} s; the federation's last {self._period_s:g} s"
            return Inspection(why, finite=True, norm=0.0)
        return Inspection("", finite=True, norm=0.0)

    def left_out(self, before: BaseVersion) -> Mapping[ClusterName, str]:
        """Nobody: each cluster judges what the others have seen, class by class (`fedsched.policy.speed_trust`)."""
        return {}

    def step(self, before: BaseVersion, updates: Sequence[Update], story: Story) -> tuple[Weights, ServerOptimiser]:
        """The pool with what is news; nothing descends, so the optimiser stays as it is."""
        pool = before.checkpoint
        assert isinstance(pool, Pool)
        parts = [(update.cluster, part_of(update.gradients)) for update in updates]
        return pool.merged(parts).replaced({}, story), before.optimiser
