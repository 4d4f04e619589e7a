"""What became of the federations of a run, and of each cluster in their rounds; importing it loads no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fedsched.core.rounds import RoundRecord


@dataclass(frozen=True, slots=True)
class ClusterRounds:
    """What became of one cluster's part in the rounds."""

    cluster: str
    asked: int
    counted: int
    declined: int
    rejected: int
    missing: int
    why: tuple[tuple[str, int], ...]
    """Reasons of those that did not count, and how often; numbers in them are left out, so that like reasons add up."""
    version: int
    """The newest that it has taken from the federation."""
    decides: int = 0
    """The one that decides in the end; an older one where newer ones were not accepted."""
    accepted: int = 0
    """Versions that it let decide."""


@dataclass(frozen=True, slots=True)
class FederationResult:
    """What became of one federation in a run."""

    clusters: tuple[ClusterRounds, ...]
    rounds: int
    combined: int
    version: int
    """In force in the end."""
    digest: str
    """Of the weights in force in the end."""
    messages: int
    lost: int
    records: tuple[RoundRecord, ...] = ()

    def plain(self) -> dict[str, Any]:
        """As plain data, without the single records."""
        return {
            "rounds": self.rounds,
            "combined": self.combined,
            "version": self.version,
            "digest": self.digest,
            "messages": self.messages,
            "lost": self.lost,
            "clusters": [
                {
                    "cluster": one.cluster,
                    "asked": one.asked,
                    "counted": one.counted,
                    "declined": one.declined,
                    "rejected": one.rejected,
                    "missing": one.missing,
                    "why": dict(one.why),
                    "version": one.version,
                    "decides": one.decides,
                    "accepted": one.accepted,
                }
                for one in self.clusters
            ],
        }
