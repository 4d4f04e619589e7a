"""Who among those that give gradients pulls against the rest, round after round, and is therefore left out.

A cluster with other jobs pulls elsewhere, and that is what a mean is for; one whose gradients point backwards undoes
what the others do, and no look at one of them can tell. So in each round the cosine between a cluster's gradient and
the mean of the others' (each of length one, so that nobody weighs more by being longer) is noted. Whose cosines are
below zero by more than chance explains is left out: its gradients are still asked for and noted, and it comes back once
they agree on average. Who is left out follows from the rounds before, not from the round that is combined. It is the
idea of FLTrust (Cao et al., NDSS 2021), with the rest in place of a trusted data set.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from math import sqrt

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from fedsched.core.ids import ClusterName
from fedsched.core.record import Record
from fedsched.federation.averaging import Update

MEMORY = 0.95
"""What a round counts after each further one: some twenty are remembered."""
ROUNDS_MIN = 5.0
"""Before so many rounds nobody is left out."""
ERRORS = 3.0
"""Standard errors below zero that a mean cosine has to be. Gradients of successive rounds share decisions, so they
resemble each other, and a cluster is looked at in every round."""
OTHERS_MIN = 2
"""With fewer others it could be them."""


class Repute(Record, frozen=True):
    """What is remembered of a cluster's cosines; sums over rounds, older ones counting less."""

    rounds: float = 0.0
    total: float = 0.0
    squares: float = 0.0
    out: bool = False
    """It is left out."""

    @property
    def mean(self) -> float:
        """Cosine."""
        return self.total / self.rounds

    @property
    def error(self) -> float:
        """Of the mean."""
        return sqrt(max(0.0, self.squares / self.rounds - self.mean**2) / self.rounds)


Reputes = Mapping[ClusterName, Repute]


def left_out(reputes: Reputes) -> dict[ClusterName, str]:
    """Who is left out, and why."""
    return {
        cluster: f"its gradients point against the others' (cosine {one.mean:+.2f} on average, {one.error:.2f} error)"
        for cluster, one in sorted(reputes.items())
        if one.out
    }


def noted(reputes: Reputes, updates: Sequence[Update], without: Set[ClusterName]) -> dict[ClusterName, Repute]:
    """The reputes after a round, the same for whatever order of the updates.

    Args:
        without: who is not one of the rest: it is left out.
    """
    found = dict(reputes)
    flat = {update.cluster: _direction(update) for update in sorted(updates, key=lambda update: update.cluster)}
    for cluster, direction in flat.items():
        others = [flat[other] for other in flat if other != cluster and other not in without]
        if len(others) < OTHERS_MIN or direction is None:
            continue
        mean = np.zeros_like(direction)
        for other in others:
            if other is not None:
                mean += other
        length = _length(mean)
        if length == 0.0:
            continue
        cosine = float((direction * mean).sum()) / length
        found[cluster] = _after(found.get(cluster, Repute()), cosine)
    return found


def _after(before: Repute, cosine: float) -> Repute:
    now = Repute(
        MEMORY * before.rounds + 1,
        MEMORY * before.total + cosine,
        MEMORY * before.squares + cosine**2,
    )
    against = now.rounds >= ROUNDS_MIN and now.mean + ERRORS * now.error < 0
    return replace(now, out=against or (before.out and now.mean < 0))


def _direction(update: Update) -> NDArray[np.float64] | None:
    """The gradient as one vector of length one; None where it is zero."""
    flat = np.concatenate([update.gradients[name].ravel().astype(np.float64) for name in sorted(update.gradients)])
    length = _length(flat)
    return flat / length if length else None


def _length(flat: NDArray[np.float64]) -> float:
    # Not a dot product: see `averaging.norm`.
    return float(np.sqrt(np.square(flat).sum()))
