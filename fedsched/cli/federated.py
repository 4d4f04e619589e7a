"""Shows what became of simulated federations: each cluster's part in the rounds."""

from __future__ import annotations

from collections.abc import Sequence

from fedsched.cli.output import table
from fedsched.sim.federation_results import ClusterRounds
from fedsched.sim.results import RunResult


def show_federations(runs: Sequence[RunResult]) -> None:
    """A line per policy and cluster, over all seeds; nothing where nobody learnt."""
    parts: dict[tuple[str, str], list[ClusterRounds]] = {}
    for run in runs:
        for federation in run.federations:
            for part in federation.clusters:
                parts.setdefault((run.policy, part.cluster), []).append(part)
    if not parts:
        return
    print("\nrounds of the federation, over all seeds:")
    columns = ("POLICY", "CLUSTER", "ASKED", "COUNTED", "DECLINED", "REJECTED", "MISSING", "VERSION", "MOSTLY BECAUSE")
    table(columns, [(policy, cluster, *_line(parts[policy, cluster])) for policy, cluster in parts])


def _line(parts: Sequence[ClusterRounds]) -> tuple[object, ...]:
    reasons: dict[str, int] = {}
    for part in parts:
        for why, times in part.why:
            reasons[why] = reasons.get(why, 0) + times
    versions = sorted({part.version for part in parts})
    return (
        sum(part.asked for part in parts),
        sum(part.counted for part in parts),
        sum(part.declined for part in parts),
        sum(part.rejected for part in parts),
        sum(part.missing for part in parts),
        str(versions[0]) if len(versions) == 1 else f"{versions[0]}..{versions[-1]}",
        max(reasons, key=lambda why: (reasons[why], why), default=None),
    )
