"""The figures of a report: which there are, what stands under them, and the same in words for who cannot see them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from fedsched.sim.comparing import (
    Arm,
    ClusterSummary,
    Summary,
    arms,
    cluster_summaries,
    differences,
    runs_of,
    summarise,
)
from fedsched.sim.plots import (
    THEMED,
    Names,
    axis_unit,
    draw,
    draw_clusters,
    draw_differences,
    draw_jcts,
    draw_lanes,
    draw_means,
    draw_over_time,
    draw_spent,
    draw_stay,
)
from fedsched.sim.results import SPENT, Floats, RunResult, Series, together

LANES_SHOWN = 40
GROUPS = 20
"""Of jobs by their completion times, where single ones would be too many to see."""
# What the plots' library calls its parts, which would be there once per plot, and what it refers to by a digest.
PART_ID = re.compile(r' id="[A-Za-z][A-Za-z0-9.]*_\d+"')
SHARED_ID = re.compile(r'(id="|#)([a-z][0-9a-f]{10})\b')


@dataclass(frozen=True, slots=True)
class Figure:
    """A plot with its words."""

    title: str
    svg: str
    caption: str
    says: str
    """The same in words, for those who do not see it."""

    def inline(self, number: int) -> str:
        """To stand in a page as its `number`-th figure: named for screen readers, its ids its own."""
        svg = SHARED_ID.sub(rf"\1f{number}-\2", PART_ID.sub("", self.svg))
        for colour, name in THEMED.items():
            svg = svg.replace(colour, f"var({name})")
        named = f'role="img" aria-labelledby="t{number} d{number}"'
        words = f'<title id="t{number}">{escape(self.title)}</title><desc id="d{number}">{escape(self.says)}</desc>'
        head, rest = svg.split(">", 1)
        return f"{head} {named}>{words}{rest}"


def readable(length_s: float | None) -> str:
    """A length of time with three digits and the unit that suits it."""
    if length_s is None:
        return "–"
    for unit, size_s in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if abs(length_s) >= 2 * size_s:
            return f"{length_s / size_s:,.3g} {unit}"
    return f"{length_s:,.3g} s"


def figures(runs: Sequence[RunResult], names: Names) -> list[Figure]:
    """All plots that these runs give anything for."""
    shown = [run for run in runs if len(run.jobs)]
    if not shown:
        return []
    firsts = _firsts(shown)
    end_s = max((lane.steps[-1][0] for run in firsts for lane in run.lanes), default=1.0)
    return [
        *_time_figures(shown, names),
        *_level_figures(firsts, names),
        *_cluster_figures(shown, names),
        *(_stay(arm, runs_of(shown, arm), names) for arm in arms(shown)),
        *(_gantt(run, names, end_s) for run in firsts if run.lanes),
    ]


def _time_figures(runs: Sequence[RunResult], names: Names) -> list[Figure]:
    """How long jobs take, by policy."""
    found = arms(runs)
    summaries = [item for item in summarise(runs) if item.jct_s is not None]
    made = [
        Figure(
            "Completion times",
            draw(lambda axes: draw_jcts(axes, runs, names)),
            "Share of the jobs of all seeds that were done within a time of their submission; further left is better.",
            "Half of the jobs, and nine of ten, were done within: "
            + "; ".join(f"{names.of(arm)} {_quantiles(runs_of(runs, arm))}" for arm in found)
            + ".",
        )
    ]
    if summaries:
        made.append(
            Figure(
                "Mean completion time",
                draw(lambda axes: draw_means(axes, summaries, names), high_in=1.0 + 0.32 * len(summaries)),
                "Mean over the seeds, with its 95 % confidence interval where there are several; less is better.",
                "; ".join(f"{names.of(item.arm)} {_interval(item)}" for item in summaries) + ".",
            )
        )
    compared = differences(runs)
    if compared:
        made.append(
            Figure(
                f"Difference to {names.of(compared[0].baseline)}",
                draw(lambda axes: draw_differences(axes, compared, names), high_in=1.0 + 0.32 * len(compared)),
                "Of mean completion times, on the same jobs, with the 95 % confidence interval over seeds.",
                "; ".join(f"{names.of(item.arm)} {readable(item.jct_s.mean)}" for item in compared) + ".",
            )
        )
    means_s = {arm: np.concatenate([run.jobs.spent_s for run in runs_of(runs, arm)]).mean(axis=0) for arm in found}
    made.append(
        Figure(
            "Where the time went",
            draw(lambda axes: draw_spent(axes, means_s, names), high_in=1.1 + 0.34 * len(found)),
            "Mean over the jobs of all seeds. A job trains only while it is running.",
            "; ".join(f"{names.of(arm)} {_parts(values)}" for arm, values in means_s.items()) + ".",
        )
    )
    return made


def _level_figures(firsts: Sequence[RunResult], names: Names) -> list[Figure]:
    """How full the clusters are over time, in the first run of each policy."""
    series = {
        Arm(run.experiment, run.policy): together(run.series)
        for run in firsts
        if run.series and any(len(one.levels) for one in run.series)
    }
    if not series:
        return []
    seed = firsts[0].seed
    kind = "GPUs" if any(one.level("gpus").any() for one in series.values()) else "CPU cores"

    def held(one: Series) -> Floats:
        return one.utilisation * 100

    def queued(one: Series) -> Floats:
        return one.level("queued")

    return [
        Figure(
            "Utilisation",
            draw(lambda axes: draw_over_time(axes, series, names, held, f"{kind} held, %")),
            f"Share of the {kind} that tasks held, in all clusters; seed {seed}.",
            "Mean over time: "
            + "; ".join(f"{names.of(arm)} {held(one).mean():.0f} %" for arm, one in series.items())
            + ".",
        ),
        Figure(
            "Queue",
            draw(lambda axes: draw_over_time(axes, series, names, queued, "waiting jobs")),
            f"Jobs that wait, in all clusters; seed {seed}.",
            "At most: " + "; ".join(f"{names.of(arm)} {queued(one).max():,.0f}" for arm, one in series.items()) + ".",
        ),
    ]


def _cluster_figures(runs: Sequence[RunResult], names: Names) -> list[Figure]:
    """The clusters side by side; nothing where there is one."""
    rows = cluster_summaries(runs)
    clusters = sorted({row.cluster for row in rows})
    if len(clusters) < 2:
        return []
    high_in = 1.2 + 0.3 * len(clusters)
    slowest = max(rows, key=lambda row: row.avg_jct_s or 0.0)
    fullest = max(rows, key=lambda row: row.utilisation)
    unit, size_s = axis_unit(slowest.avg_jct_s or 1.0)

    def jct(row: ClusterSummary) -> float | None:
        return None if row.avg_jct_s is None else row.avg_jct_s / size_s

    def used(row: ClusterSummary) -> float | None:
        return row.utilisation * 100

    return [
        Figure(
            "Completion times by cluster",
            draw(lambda axes: draw_clusters(axes, rows, names, jct, f"mean completion time, {unit}"), high_in=high_in),
            "Mean over the jobs of all seeds that ended there.",
            f"The longest: {readable(slowest.avg_jct_s)}, in {slowest.cluster} under {names.of(slowest.arm)}.",
        ),
        Figure(
            "Utilisation by cluster",
            draw(lambda axes: draw_clusters(axes, rows, names, used, "held, %"), high_in=high_in),
            "Mean over time and seeds of the share that tasks held.",
            f"The highest: {fullest.utilisation:.0%}, in {fullest.cluster} under {names.of(fullest.arm)}.",
        ),
    ]


def _quantiles(runs: Sequence[RunResult]) -> str:
    times_s = np.concatenate([run.jobs.jct_s[run.jobs.succeeded] for run in runs])
    if not len(times_s):
        return "none"
    half_s, most_s = np.quantile(times_s, (0.5, 0.9))
    return f"{readable(float(half_s))} and {readable(float(most_s))}"


def _interval(item: Summary) -> str:
    assert item.jct_s is not None
    mean = readable(item.jct_s.mean)
    if item.jct_s.half is None:
        return mean
    return f"{mean} ({readable(item.jct_s.low)} to {readable(item.jct_s.high)})"


def _parts(spent_s: Floats) -> str:
    """Where the time went, in words."""
    return ", ".join(
        f"{kind.removesuffix('_s')} {readable(float(value))}" for kind, value in zip(SPENT, spent_s, strict=True)
    )


def _firsts(runs: Sequence[RunResult]) -> list[RunResult]:
    """The first run of each arm."""
    found: dict[Arm, RunResult] = {}
    for run in runs:
        found.setdefault(Arm(run.experiment, run.policy), run)
    return list(found.values())


def _stay(arm: Arm, runs: Sequence[RunResult], names: Names) -> Figure:
    """Where each job's time went: jobs in order of their completion times, in groups where they are many."""
    stays_s = np.concatenate([run.jobs.spent_s for run in runs])
    order = np.argsort(stays_s.sum(axis=1), kind="stable")
    groups = [stays_s[rows].sum(axis=0) for rows in np.array_split(order, min(GROUPS, len(order)))]
    shares = np.array([values / max(values.sum(), 1e-12) for values in groups]) * 100
    first, last = shares[0], shares[-1]
    return Figure(
        f"Where each job's time went under {names.of(arm)}",
        draw(lambda axes: draw_stay(axes, shares)),
        f"{len(stays_s):,} jobs of all seeds from the shortest stay (left) to the longest (right), "
        f"in {len(groups)} groups of equal size: the share of their time that went where.",
        f"Of the time of the shortest stays {first[0]:.0f} % was spent queued and {first[2]:.0f} % running; "
        f"of the longest {last[0]:.0f} % queued and {last[2]:.0f} % running.",
    )


def _gantt(run: RunResult, names: Names, end_s: float) -> Figure:
    stride = -(-len(run.lanes) // LANES_SHOWN)
    lanes = run.lanes[::stride]
    drawn = draw(lambda axes: draw_lanes(axes, run, stride, end_s), high_in=1.1 + 0.2 * len(lanes))
    some = f"{len(lanes)} of {len(run.jobs):,} jobs" if len(lanes) < len(run.jobs) else "All jobs"
    most = max((tasks for lane in lanes for _, _, tasks in lane.steps), default=0)
    caption = (
        f"{some} in order of arrival; seed {run.seed}. The thicker a bar, the more tasks the job held, {most:,} at "
        "most. The axis is the same for all policies."
    )
    last = max(lanes, key=lambda lane: lane.steps[-1][0])
    says = f"{some}; the last of them, {last.job_id}, ended after {readable(last.steps[-1][0])}."
    return Figure(f"Allocation under {names.of(Arm(run.experiment, run.policy))}", drawn, caption, says)
