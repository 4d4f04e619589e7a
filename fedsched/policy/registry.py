"""Policies by the name they are configured by."""

from __future__ import annotations

from pathlib import Path

from fedsched.config import PolicyConfig
from fedsched.core.decision import Policy
from fedsched.policy import checkpoint
from fedsched.policy.dl2 import DL2
from fedsched.policy.heuristics import Drf, Fifo, Heuristic, Srtf
from fedsched.policy.optimus import Optimus

HEURISTICS: dict[str, type[Heuristic]] = {kind.name: kind for kind in (Drf, Fifo, Optimus, Srtf)}


def heuristic(name: str) -> Heuristic:
    """The heuristic of this name; `PolicyConfig` admits no other."""
    return HEURISTICS[name]()


def make(config: PolicyConfig) -> Policy:
    """The configured policy, bare: deadline, checks and fallback are around it, not in it.

    Raises:
        CorruptCheckpoint: its weights cannot be used.
    """
    return make_dl2(config) if config.name == DL2.name else heuristic(config.name)


def make_dl2(config: PolicyConfig) -> DL2:
    """DL2 with the configured weights, which count as version 1 until the aggregator offers newer ones.

    Raises:
        CorruptCheckpoint: the weights cannot be used.
    """
    path = checkpoint.BUILTIN if config.checkpoint == "builtin" else Path(config.checkpoint)
    first = checkpoint.load(path)
    return DL2(first.arrays, shape=first.shape, seed=config.seed, explore=config.explore)
