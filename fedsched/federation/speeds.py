"""Adds up what clusters know of speeds: each gives its own sums, and all get the total."""

from __future__ import annotations

from collections.abc import Mapping

from fedsched.core.ids import ClusterName
from fedsched.core.speeds import SpeedStatistics, problem_with
from fedsched.errors import InvalidInput


def merge(contributions: Mapping[ClusterName, SpeedStatistics]) -> SpeedStatistics:
    """All clusters' statistics together, exactly, whatever order they came in.

    A contribution is what a cluster has seen itself since it first contributed, not what it was given: so the newest
    one takes the place of the one before, and nothing is counted twice. It names job types, and no job and no time of
    day.

    Raises:
        InvalidInput: one of them holds what nobody can have observed; the message names the cluster and the cell.
    """
    for cluster in sorted(contributions):
        problem = problem_with(contributions[cluster])
        if problem:
            raise InvalidInput(
                f"cluster {cluster} sent statistics of speeds that cannot be right: {problem}",
                "leave the cluster out, and look at what its agent observes",
            )
    total = SpeedStatistics().merged(contributions[cluster] for cluster in sorted(contributions))
    problem = problem_with(total)
    if problem:
        raise InvalidInput(f"the clusters' statistics of speeds are too many to add up: {problem}", "forget old ones")
    return total
