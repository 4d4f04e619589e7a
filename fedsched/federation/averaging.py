"""Combines clusters' gradients into one, the same bits whatever order they came in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedsched.core.ids import ClusterName
from fedsched.federation.source import Arrays


@dataclass(frozen=True, slots=True)
class Update:
    """One cluster's gradient and how many decisions it was computed from."""

    cluster: ClusterName
    samples: int
    gradients: Arrays


@dataclass(frozen=True, slots=True)
class Inspection:
    """What can be said of a gradient without using it."""

    misfit: str
    """How its arrays differ from the policy's; empty when they do not."""
    finite: bool
    norm: float


def inspect(arrays: Arrays, gradients: Arrays) -> Inspection:
    """Look at a gradient of `arrays` before anything is computed with it."""
    misfit = _misfit(arrays, gradients)
    finite = not misfit and all(bool(np.isfinite(gradients[name]).all()) for name in sorted(gradients))
    return Inspection(misfit, finite, norm(gradients) if finite else float("inf"))


def norm(gradients: Arrays) -> float:
    """Euclidean norm over all arrays together, in double precision."""
    total = 0.0
    for name in sorted(gradients):
        # Not a dot product: that goes to BLAS, whose threads fight over the cores that jobs train on.
        total += float(np.square(gradients[name], dtype=np.float64).sum())
    return float(np.sqrt(total))


def weighted_mean(updates: Sequence[Update]) -> Arrays:
    """The mean of the gradients, weighted by samples.

    Floating-point sums depend on their order, and updates arrive in any order, so they are added up by cluster name:
    the same updates always give the same bits. Summed in double precision, returned in the gradients' own.
    """
    ordered = _ordered(updates)
    total = sum(update.samples for update in ordered)
    if total <= 0:
        raise ValueError(f"{total} samples altogether; a mean needs at least one")
    mean = {}
    for name in sorted(ordered[0].gradients):
        first = ordered[0].gradients[name]
        summed = np.zeros(first.shape, np.float64)
        for update in ordered:
            summed += np.float64(update.samples) * update.gradients[name]
        mean[name] = (summed / total).astype(first.dtype)
    return mean


def trimmed_mean(updates: Sequence[Update], fraction: float) -> Arrays:
    """The mean of each coordinate without its extreme values (Yin et al. 2018), so that a few liars cannot steer it.

    Not weighted: a liar would claim many samples.

    Args:
        updates: one per cluster.
        fraction: share of the updates that is left out at either end, rounded down; below one half.
    """
    if not 0 <= fraction < 0.5:
        raise ValueError(f"fraction {fraction} is not in 0..0.5 (0.5 excluded)")
    ordered = _ordered(updates)
    cut = int(fraction * len(ordered))
    mean = {}
    for name in sorted(ordered[0].gradients):
        stacked = np.sort(np.stack([update.gradients[name] for update in ordered]).astype(np.float64), axis=0)
        kept = stacked[cut : len(ordered) - cut]
        mean[name] = (kept.sum(axis=0) / len(kept)).astype(ordered[0].gradients[name].dtype)
    return mean


def _ordered(updates: Sequence[Update]) -> list[Update]:
    if not updates:
        raise ValueError("no updates to combine")
    return sorted(updates, key=lambda update: update.cluster)


def _misfit(arrays: Arrays, gradients: Arrays) -> str:
    lacking = sorted(arrays.keys() - gradients.keys())
    if lacking:
        return f"array {lacking[0]} is missing ({len(lacking)} of {len(arrays)} are)"
    extra = sorted(gradients.keys() - arrays.keys())
    if extra:
        return f"array {extra[0]} is not one of the policy's"
    for name in sorted(arrays):
        found, wanted = gradients[name], arrays[name]
        if found.shape != wanted.shape:
            return f"array {name} has shape {list(found.shape)}; the policy's has {list(wanted.shape)}"
        if found.dtype != wanted.dtype:
            return f"array {name} holds {found.dtype}; the policy's holds {wanted.dtype}"
    return ""
