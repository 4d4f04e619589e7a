"""Draws what simulated runs come to, as SVG; texts stay texts, and the same runs give the same bytes."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from fedsched.sim.comparing import Arm, ClusterSummary, Difference, Summary, arms, runs_of
from fedsched.sim.results import SPENT, Floats, RunResult, Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CURVE_POINTS = 400
"""Points of a distribution; more would only make the file larger."""
WIDE_IN, HIGH_IN = 7.2, 3.6
INK, SOFT, AXIS, LINE, WAITING = "#334155", "#475569", "#94a3b8", "#e2e8f0", "#cbd5e1"
THEMED = {INK: "--ink", SOFT: "--soft", AXIS: "--axis", LINE: "--line", WAITING: "--waiting"}
"""Colours that the page chooses for light and dark, by what stands for them in a plot; the others suit both."""
SPENT_COLOURS = (WAITING, "#ca8a04", "#3b82f6", "#dc2626", "#8b5cf6")
"""Of where a job's time goes, in the order of `SPENT`."""
COLOURS = (
    "#3b82f6",
    "#ea580c",
    "#059669",
    "#db2777",
    "#8b5cf6",
    "#0891b2",
    "#ca8a04",
    "#64748b",
    "#dc2626",
    "#4d8a0b",
)
"""Of policies; where there are more they come again, with other lines."""
LINES = ("-", "--", ":", "-.")
MARKS = ("o", "s", "D", "^")
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "fedsched",
    "font.size": 11,
    "text.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": AXIS,
    "axes.labelcolor": INK,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": LINE,
    "xtick.color": AXIS,
    "ytick.color": AXIS,
    "xtick.labelcolor": SOFT,
    "ytick.labelcolor": SOFT,
    "legend.frameon": False,
    "legend.fontsize": 10,
}


class Names:
    """What arms are called, with a colour and a line for each: experiments are told only where there are several."""

    def __init__(self, found: Sequence[Arm]) -> None:
        self._several = len({arm.experiment for arm in found}) > 1
        self._place = {arm: place for place, arm in enumerate(found)}

    def of(self, arm: Arm) -> str:
        """The arm's name."""
        return f"{arm.policy} ({arm.experiment})" if self._several else arm.policy

    def look(self, arm: Arm) -> dict[str, Any]:
        """How its lines are drawn."""
        place = self._place[arm]
        return {"color": COLOURS[place % len(COLOURS)], "linestyle": LINES[place // len(COLOURS) % len(LINES)]}

    def mark(self, arm: Arm) -> dict[str, Any]:
        """How its points are drawn."""
        place = self._place[arm]
        return {"color": COLOURS[place % len(COLOURS)], "marker": MARKS[place // len(COLOURS) % len(MARKS)]}


def draw(paint: Callable[[Axes], None], high_in: float = HIGH_IN) -> str:
    """An SVG of what `paint` draws. Texts stay texts, and nothing in it depends on when it was made."""
    import matplotlib as mpl
    from matplotlib.figure import Figure as Canvas

    with mpl.rc_context(STYLE):
        canvas = Canvas(figsize=(WIDE_IN, high_in), layout="constrained")
        axes = canvas.subplots()
        paint(axes)
        text = io.StringIO()
        canvas.savefig(text, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
    svg = text.getvalue()
    return svg[svg.index("<svg") :]


def axis_unit(longest_s: float) -> tuple[str, float]:
    """The unit of an axis that goes so far, and its seconds."""
    for unit, size_s in (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if longest_s >= 3 * size_s:
            return unit, size_s
    return "seconds", 1.0


def draw_jcts(axes: Axes, runs: Sequence[RunResult], names: Names) -> None:
    """Distribution of completion times, a curve per arm; logarithmic where they differ by more than a factor of 50."""
    times_s: dict[Arm, Floats] = {}
    for arm in arms(runs):
        times_s[arm] = np.concatenate([run.jobs.jct_s[run.jobs.succeeded] for run in runs_of(runs, arm)])
    longest_s = max((float(values.max()) for values in times_s.values() if len(values)), default=1.0)
    unit, size_s = axis_unit(longest_s)
    shares = np.linspace(0, 1, CURVE_POINTS)
    for arm, values in times_s.items():
        if len(values):
            axes.plot(np.quantile(values, shares) / size_s, shares * 100, label=names.of(arm), **names.look(arm))
    shortest_s = min((float(values.min()) for values in times_s.values() if len(values)), default=1.0)
    if shortest_s > 0 and longest_s > 50 * shortest_s:
        axes.set_xscale("log")
    axes.set_xlabel(f"completion time, {unit}")
    axes.set_ylabel("share of jobs, %")
    axes.set_ylim(0, 100)
    _legend(axes)


def draw_spent(axes: Axes, spent_s: dict[Arm, Floats], names: Names) -> None:
    """Where the mean time of a job went, a bar per arm in parts. `spent_s` is in seconds, in the order of `SPENT`."""
    found, means_s = list(spent_s), np.array(list(spent_s.values()))
    unit, size_s = axis_unit(float(means_s.sum(axis=1).max()))
    left = np.zeros(len(found))
    for column, kind in enumerate(SPENT):
        values = means_s[:, column] / size_s
        label = kind.removesuffix("_s")
        axes.barh(range(len(found)), values, left=left, height=0.62, color=SPENT_COLOURS[column], label=label)
        left += values
    axes.set_yticks(range(len(found)), [names.of(arm) for arm in found])
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_xlabel(f"mean time of a job, {unit}")
    _legend_above(axes, len(SPENT))


def draw_over_time(
    axes: Axes, series: dict[Arm, Series], names: Names, of: Callable[[Series], Floats], label: str
) -> None:
    """A level of all clusters over time, a curve per arm; `of` takes it from a series."""
    from matplotlib.ticker import MaxNLocator

    unit, size_s = axis_unit(max((len(one.levels) * one.step_s for one in series.values()), default=1.0))
    for arm, one in series.items():
        shown = one.coarser(one.step_s * 2 ** max(0, (len(one.levels) // CURVE_POINTS).bit_length()))
        axes.plot(shown.time_s / size_s, of(shown), label=names.of(arm), linewidth=1.3, **names.look(arm))
    axes.set_xlabel(f"time, {unit}")
    axes.set_ylabel(label)
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    _legend(axes)


def draw_means(axes: Axes, summaries: Sequence[Summary], names: Names) -> None:
    """Mean completion times with their confidence intervals, a bar per arm. Each summary has a mean."""
    means = [(item.arm, item.jct_s) for item in summaries if item.jct_s is not None]
    unit, size_s = axis_unit(max(jct_s.mean for _, jct_s in means))
    for place, (arm, jct_s) in enumerate(means):
        axes.barh(place, jct_s.mean / size_s, height=0.55, color=names.look(arm)["color"], alpha=0.35)
        half = (jct_s.half or 0.0) / size_s
        axes.errorbar(jct_s.mean / size_s, place, xerr=half, capsize=3, markersize=5, ls="", **names.mark(arm))
    axes.set_yticks(range(len(means)), [names.of(arm) for arm, _ in means])
    axes.set_ylim(len(means) - 0.5, -0.5)
    axes.set_xlim(left=0)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel(f"mean completion time, {unit}")


def draw_clusters(
    axes: Axes, rows: Sequence[ClusterSummary], names: Names, of: Callable[[ClusterSummary], float | None], label: str
) -> None:
    """A figure of each cluster, `of` its summary, a point per arm; None is not drawn."""
    clusters = sorted({row.cluster for row in rows})
    for arm in dict.fromkeys(row.arm for row in rows):
        points = [(of(row), clusters.index(row.cluster)) for row in rows if row.arm == arm]
        known = [(value, place) for value, place in points if value is not None]
        axes.plot(
            [value for value, _ in known],
            [place for _, place in known],
            linestyle="",
            markersize=7,
            alpha=0.8,
            label=names.of(arm),
            **names.mark(arm),
        )
    axes.set_yticks(range(len(clusters)), clusters)
    axes.set_ylim(len(clusters) - 0.5, -0.5)
    axes.set_xlim(left=0)
    axes.set_xlabel(label)
    _legend(axes)


def draw_differences(axes: Axes, compared: Sequence[Difference], names: Names) -> None:
    """Differences of mean completion times to the baseline with their confidence intervals."""
    unit, size_s = axis_unit(max(abs(item.jct_s.mean) + (item.jct_s.half or 0.0) for item in compared))
    for place, item in enumerate(compared):
        half = (item.jct_s.half or 0.0) / size_s
        axes.errorbar(
            item.jct_s.mean / size_s, place, xerr=half, ls="", capsize=3, markersize=6, **names.mark(item.arm)
        )
    axes.axvline(0, color=INK, linewidth=1)
    axes.set_yticks(range(len(compared)), [names.of(item.arm) for item in compared])
    axes.set_ylim(len(compared) - 0.5, -0.5)
    axes.set_xlabel(f"difference of mean completion times, {unit}; left of 0 is faster")


def draw_stay(axes: Axes, shares: Floats) -> None:
    """Where the time of groups of jobs went, in percent: a row of `shares` per group, a column per part of `SPENT`."""
    width = 100 / len(shares)
    lefts = np.arange(len(shares)) * width
    below = np.zeros(len(shares))
    for column, kind in enumerate(SPENT):
        label = kind.removesuffix("_s")
        axes.bar(
            lefts, shares[:, column], width * 0.92, bottom=below, align="edge", color=SPENT_COLOURS[column], label=label
        )
        below += shares[:, column]
    axes.set_xlim(0, 100)
    axes.set_ylim(0, 100)
    axes.grid(visible=False, axis="x")
    axes.set_xlabel("jobs by their completion times, %")
    axes.set_ylabel("share of their time, %")
    _legend_above(axes, len(SPENT))


def draw_lanes(axes: Axes, run: RunResult, stride: int, end_s: float) -> None:
    """How many tasks every `stride`-th of a run's lanes held, up to `end_s`."""
    lanes = run.lanes[::stride]
    most = max((tasks for lane in lanes for _, _, tasks in lane.steps), default=1) or 1
    unit, size_s = axis_unit(end_s)
    bars: dict[str, list[tuple[float, float, float, float]]] = {kind: [] for kind in SPENT}
    for place, lane in enumerate(lanes):
        steps = ((lane.submit_s, SPENT[0], 0), *lane.steps)
        for (begun_s, kind, tasks), (ended_s, _, _) in pairwise(steps):
            # Thickness goes with the root, so that one task beside a hundred can still be seen.
            height = 0.12 if kind == SPENT[0] else 0.25 + 0.65 * (tasks / most) ** 0.5
            bars[kind].append((begun_s / size_s, (ended_s - begun_s) / size_s, place, height))
    for colour, kind in zip(SPENT_COLOURS, SPENT, strict=True):
        if bars[kind]:
            lefts, widths, places, heights = zip(*bars[kind], strict=True)
            axes.barh(places, widths, left=lefts, height=heights, color=colour, label=kind.removesuffix("_s"))
    axes.set_ylim(len(lanes) - 0.4, -0.6)
    axes.set_yticks(range(len(lanes)), [lane.job_id for lane in lanes], fontsize=8)
    axes.grid(visible=False, axis="y")
    axes.set_xlim(0, end_s / size_s)
    axes.set_xlabel(f"time, {unit}")
    _legend_above(axes, len(SPENT))


def _legend_above(axes: Axes, columns: int) -> None:
    axes.legend(ncols=columns, loc="lower left", bbox_to_anchor=(0, 1), handlelength=1, columnspacing=1.2)


def _legend(axes: Axes) -> None:
    if len(axes.get_lines()) > 1:
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), handlelength=1.8)
