"""DL2's job-aware exploration: hand-made rules that now and then choose in the network's place while it learns.

They push the policy out of corners: a job far smaller than the rest, an action kind that has died out, a job with
workers but no parameter servers or the reverse, a lopsided job. As in the reference (INJECT_SAMPLES), but rule b checks
the probability of the action that it takes (there it checks another one), and jobs that use no parameter servers are
not lopsided. An override is not corrected for: the learner sees the network's own probability of the action.

How many parameter servers for a worker are lopsided is drawn once a slot. Drawn at each look instead, the lowest of
many draws would decide: jobs would get a worker for every three to four servers in all slots, and where one worker does
best, what was learnt would be forgotten again (simulations/experiments/dl2_small.yaml).
"""

from __future__ import annotations

from random import Random

import numpy as np
from numpy.typing import NDArray

from fedsched.policy.dl2 import BUNDLE, PS, WORKER, Window

PROBABILITY_MIN = 1e-20
RARE = 0.001
"""A kind that was used, but in less than this share of the choices, is brought back."""

RATIO = 3, 7
"""More parameter servers for a worker than a number between these are lopsided."""


class JobAware:
    """The rules, with the count of action kinds used so far."""

    def __init__(self) -> None:
        self._used = [0, 0, 0]
        self._chance: Random | None = None
        """Of the slot that is decided: every slot has a stream of its own."""
        self._ratio = 0

    def choose(self, window: Window, chances: NDArray[np.float64], action: int, chance: Random) -> int:
        """Override the network's `action` where a rule applies."""
        if chance is not self._chance:
            self._chance, self._ratio = chance, _between(chance, *RATIO)
        chosen = self._for_the_smallest(window, chances, action, chance)
        for index in range(len(window.jobs)):
            override = self._for_one(window, chances, index, chance)
            if override is not None:
                chosen = override
                break
        if chosen < 3 * window.size:
            self._used[chosen % 3] += 1
        return chosen

    def _for_the_smallest(self, window: Window, chances: NDArray[np.float64], action: int, chance: Random) -> int:
        """Rule 1: when the largest job holds several times the smallest, the smallest grows."""
        sizes = [have.workers + have.ps for have in window.held()]
        if not sizes or min(sizes) == 0 or max(sizes) // min(sizes) <= _between(chance, 3, 5):
            return action
        kind = BUNDLE if chance.random() < 0.5 else WORKER
        return _if_possible(chances, sizes.index(min(sizes)), kind, action)

    def _for_one(self, window: Window, chances: NDArray[np.float64], index: int, chance: Random) -> int | None:
        """Rules a to d for one job; None where none applies."""
        have = window.held()[index]
        total = sum(self._used)
        for kind in (WORKER, PS, BUNDLE):
            if 0 < self._used[kind] < RARE * total and _possible(chances, index, kind):
                return 3 * index + kind
        if have.workers == 0 or (have.ps == 0 and window.jobs[index].ps.maximum > 0):
            kind = WORKER if have.workers == 0 else PS
            return 3 * index + kind if _possible(chances, index, kind) else None
        if have.ps > have.workers * self._ratio:
            kind = BUNDLE if chance.random() < 0.5 else WORKER
        elif have.ps and have.workers >= 0.5 * have.ps:
            kind = PS if chance.random() < 0.99 else BUNDLE
        else:
            return None
        return 3 * index + kind if chance.random() < 0.5 and _possible(chances, index, kind) else None


def _possible(chances: NDArray[np.float64], index: int, kind: int) -> bool:
    return bool(chances[3 * index + kind] > PROBABILITY_MIN)


def _if_possible(chances: NDArray[np.float64], index: int, kind: int, otherwise: int) -> int:
    return 3 * index + kind if _possible(chances, index, kind) else otherwise


def _between(chance: Random, low: int, high: int) -> int:
    """A whole number from `low` to `high`, both included, from `random()` only: its sequence is stable for ever."""
    return low + int(chance.random() * (high - low + 1))
