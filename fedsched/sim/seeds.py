"""How far apart the seeds lie that the parts of a run, or of a training, draw from."""

from __future__ import annotations

_APART = 1_000_003
"""A prime, so that no whole number of runs from neighbouring seeds ends at another part's first one."""
HELD_OUT_OFFSET = 500_000_000
"""Held-out runs draw from seeds this far from those of training."""


def apart(seed: int, part: int) -> int:
    """The seed of a part, of which there are several; that of part 0 is the whole one's own."""
    return seed + part * _APART
