"""What a cluster gives to the federation's rounds and takes from them, live and simulated."""

from __future__ import annotations

import logging

from fedsched.core.ids import ClusterName
from fedsched.errors import CorruptCheckpoint
from fedsched.federation.source import Arrays, Declined, Gradient, PolicyOffer
from fedsched.learn.learner import ClusterLearner
from fedsched.policy import checkpoint
from fedsched.policy.learnable import Learnable

_log = logging.getLogger(__name__)


class ClusterLearning:
    """What an agent gives to the federation and takes from it."""

    def __init__(self, cluster: ClusterName, policy: Learnable, learner: ClusterLearner) -> None:
        self._cluster = cluster
        self._policy = policy
        self._learner = learner
        self._given_at = learner.recorded
        """What the learner had been told when it last gave a gradient."""
        self._counted_at = learner.recorded
        """The same of the last gradient that is known to have counted in a round."""
        self.version = 0
        """Of the weights taken from the federation; 0 while the agent still runs its own first ones."""

    @property
    def samples(self) -> int:
        """Decisions with a known reward."""
        return len(self._learner)

    def gradient(self, arrays: Arrays, batch_size: int, seed: int) -> Gradient:
        """The gradient at the federation's weights over what happened in this cluster.

        Raises:
            Declined: nothing has happened yet, or nothing since the last gradient that counted: an idle cluster that
                went on giving gradients of the same memories would let the policy drift while nothing runs.
        """
        recorded = self._learner.recorded
        if not recorded:
            raise Declined("no decision of this cluster has a reward yet")
        if recorded == self._counted_at:
            raise Declined("no decision was made since this cluster's last update that counted")
        gradient = self._learner.gradient(arrays, batch_size, seed)
        self._given_at = recorded
        return gradient

    def take(self, offer: PolicyOffer) -> str | None:
        """Decide with the offered version from the next slot on; None, or why not."""
        try:
            offered = checkpoint.from_bytes(offer.checkpoint, f"policy {offer.name} version {offer.version}")
        except CorruptCheckpoint as problem:
            return problem.message
        if offered.digest != offer.digest:
            return f"its digest is {offered.digest}; announced was {offer.digest}"
        if self._cluster in str(offered.made.get("contributors", "")).split(", "):
            self._counted_at = self._given_at
        try:
            self._policy.load(offer.version, offered.arrays)
        except ValueError as problem:
            return str(problem)
        self.version = offer.version
        _log.info("policy %s version %d decides from the next slot on", offer.name, offer.version)
        return None
