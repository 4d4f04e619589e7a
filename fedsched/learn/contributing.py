"""What a cluster gives to the federation's rounds and takes from them, live and simulated."""

from __future__ import annotations

from collections.abc import Callable

from fedsched.core.ids import ClusterName
from fedsched.core.versions import Version
from fedsched.errors import CorruptCheckpoint
from fedsched.federation.source import Arrays, Declined, Gradient, PolicyOffer
from fedsched.learn.learner import ClusterLearner
from fedsched.policy import checkpoint
from fedsched.policy.learnable import Learnable, misfit


class ClusterLearning:
    """What an agent gives to the federation and takes from it.

    Args:
        offered: takes a version's file once it was found to be sound; whether and when it decides is not said here.
    """

    def __init__(
        self,
        cluster: ClusterName,
        policy: Learnable,
        learner: ClusterLearner,
        offered: Callable[[Version, bytes], None],
    ) -> None:
        self._offered = offered
        self._cluster = cluster
        self._policy = policy
        self._learner = learner
        self._given_at = learner.recorded
        """What the learner had been told when it last gave a gradient."""
        self._counted_at = learner.recorded
        """The same of the last gradient that is known to have counted in a round."""
        self.version = 0
        """The newest that was taken from the federation; 0 before the first."""

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
        """Look at an offered version and pass it on; None, or what is wrong with it."""
        try:
            offered = checkpoint.from_bytes(offer.checkpoint, f"policy {offer.name} version {offer.version}")
        except CorruptCheckpoint as problem:
            return problem.message
        if offered.digest != offer.digest:
            return f"its digest is {offered.digest}; announced was {offer.digest}"
        if offered.shape.FORMAT != self._policy.shape.FORMAT:
            return f"it holds weights of format {offered.shape.FORMAT}; {self._policy.shape.FORMAT} was expected"
        wrong = misfit(offered.arrays, self._policy.shape.layers())
        if wrong:
            return f"weights of version {offer.version} cannot be used: {wrong}"
        if self._cluster in str(offered.made.get("contributors", "")).split(", "):
            self._counted_at = self._given_at
        self._offered(Version(offer.name, offer.version, offer.digest), offer.checkpoint)
        self.version = offer.version
        return None
