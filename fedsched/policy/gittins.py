"""The Gittins index of a job from how much service such jobs needed before (Tiresias, Gu et al., NSDI 2019, section 4).

With S drawn from the sample, a the service received and D the next quantum,

    G(a) = P(S - a <= D | S > a) / E[min(S - a, D) | S > a]:

the chance to finish within the next quantum per service that it would cost. The job with the greatest index goes first.
Tiresias's public simulator sums S instead of S - a in the denominator; this is the paper's definition. Both fix D
instead of taking the best one.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray


class Gittins:
    """The index as a function of attained service, over one sample; each answer costs two binary searches.

    Args:
        sample: service demands seen before, in any order; units are the caller's (task-seconds, say).
        delta: the quantum in the same units.

    Raises:
        ValueError: the quantum is not positive.
    """

    def __init__(self, sample: ArrayLike, delta: float) -> None:
        if not delta > 0:
            raise ValueError(f"the quantum is {delta}; it must be above 0")
        self._sample = np.sort(np.asarray(sample, dtype=np.float64))
        self._sums = np.concatenate([[0.0], np.cumsum(self._sample)])
        self._delta = delta

    def __call__(self, attained: ArrayLike) -> NDArray[np.float64]:
        """The index of each job; zero where every sampled job was over with less service."""
        received = np.asarray(attained, dtype=np.float64)
        over = np.searchsorted(self._sample, received, side="right")
        soon = np.searchsorted(self._sample, received + self._delta, side="right")
        ending = soon - over
        # Jobs that end within the quantum cost what they still need, the others all of it.
        cost = self._sums[soon] - self._sums[over] - received * ending + self._delta * (len(self._sample) - soon)
        result: NDArray[np.float64] = np.divide(ending, cost, out=np.zeros(received.shape), where=ending > 0)
        return result


def index(sample: ArrayLike, attained: float, delta: float) -> float:
    """The index of one job; build a `Gittins` once where there are many."""
    return float(Gittins(sample, delta)(attained))
