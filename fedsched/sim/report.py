"""Writes a comparison as one HTML file that needs nothing else: tables, and plots drawn into it."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedsched import __version__
from fedsched.errors import InvalidInput
from fedsched.files import write_whole
from fedsched.sim.comparing import Arm, Difference, Summary, arms, differences, summarise
from fedsched.sim.results import SPENT, Floats, RunResult, Series, together

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TEMPLATE = "report.html.j2"
CURVE_POINTS = 400
"""Points of a distribution; more would only make the file larger."""
LANES_SHOWN = 40
WIDE_IN, HIGH_IN = 7.2, 3.4
SPENT_COLOURS = ("#cbd5e1", "#fbbf24", "#2563eb", "#dc2626", "#7c3aed")
"""Of where a job's time goes, in the order of `SPENT`."""
COLOURS = (
    "#2563eb",
    "#ea580c",
    "#059669",
    "#db2777",
    "#7c3aed",
    "#0891b2",
    "#ca8a04",
    "#64748b",
    "#dc2626",
    "#65a30d",
)
"""Of policies; where there are more they come again, with other lines."""
LINES = ("-", "--", ":", "-.")
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "fedsched",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#94a3b8",
    "axes.labelcolor": "#334155",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e2e8f0",
    "xtick.color": "#475569",
    "ytick.color": "#475569",
    "legend.frameon": False,
}


@dataclass(frozen=True, slots=True)
class Figure:
    """A plot with its words."""

    title: str
    svg: str
    caption: str


def write_report(path: Path, runs: Sequence[RunResult]) -> None:
    """Write the report; the same runs give the same bytes, but for the CPU time that they took.

    Raises:
        InvalidInput: what draws the plots is not installed.
        OSError: it could not be written.
    """
    try:
        import jinja2
        import matplotlib  # noqa: F401 - drawn with further below
    except ImportError as problem:
        missing = f"reports need {problem.name}, which is not installed"
        raise InvalidInput(missing, "pip install 'fedsched[sim]'") from problem
    page = jinja2.Environment(
        loader=jinja2.PackageLoader("fedsched", "sim"), autoescape=True, undefined=jinja2.StrictUndefined
    )
    page.filters["time"] = readable
    names = Names(arms(runs))
    text = page.get_template(TEMPLATE).render(
        version=__version__,
        experiments=list(dict.fromkeys(run.experiment for run in runs)),
        clocks=list(dict.fromkeys(_clock(run) for run in runs)),
        runs=runs,
        total_jobs=sum(len(run.jobs) for run in runs),
        rows=_summary_rows(summarise(runs), names),
        differences=[(names.of(item.arm), item) for item in differences(runs)],
        baseline=names.of(arms(runs)[0]) if runs else "",
        clusters=_cluster_rows(runs, names),
        partial=[run for run in runs if run.partial],
        figures=figures(runs, names),
    )
    write_whole(path, text.encode())


def readable(length_s: float | None) -> str:
    """A length of time with three digits and the unit that suits it."""
    if length_s is None:
        return "–"
    for unit, size_s in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if abs(length_s) >= 2 * size_s:
            return f"{length_s / size_s:,.3g} {unit}"
    return f"{length_s:,.3g} s"


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


def _clock(run: RunResult) -> str:
    return f"slots of {run.slot_length_s:g} s" if run.clock == "slots" else "exact times"


def _summary_rows(summaries: Sequence[Summary], names: Names) -> list[tuple[str, Summary, bool]]:
    """Each arm's name and figures, and whether it is the fastest."""
    best_s = min((item.jct_s.mean for item in summaries if item.jct_s), default=None)
    return [(names.of(item.arm), item, item.jct_s is not None and item.jct_s.mean == best_s) for item in summaries]


@dataclass(frozen=True, slots=True)
class ClusterRow:
    """One cluster under one arm, over all of its seeds."""

    cluster: str
    name: str
    jobs: int
    avg_jct_s: float | None
    avg_queued_s: float
    utilisation: float


def _cluster_rows(runs: Sequence[RunResult], names: Names) -> list[ClusterRow]:
    clusters = sorted({one.cluster for run in runs for one in run.series})
    rows = []
    for cluster in clusters:
        for arm in arms(runs):
            ours = [run for run in runs if Arm(run.experiment, run.policy) == arm]
            row = _cluster_row(cluster, names.of(arm), ours)
            if row is not None:
                rows.append(row)
    return rows


def _cluster_row(cluster: str, name: str, runs: Sequence[RunResult]) -> ClusterRow | None:
    series = [one for run in runs for one in run.series if one.cluster == cluster]
    if not series:
        return None
    here = [np.array([place == cluster for place in run.jobs.cluster], dtype=bool) for run in runs]
    done = [run.jobs.jct_s[mask & run.jobs.succeeded] for run, mask in zip(runs, here, strict=True)]
    jcts_s = np.concatenate(done)
    queued_s = np.concatenate([run.jobs.spent_s[mask, 0] for run, mask in zip(runs, here, strict=True)])
    return ClusterRow(
        cluster=cluster,
        name=name,
        jobs=sum(int(mask.sum()) for mask in here),
        avg_jct_s=float(jcts_s.mean()) if len(jcts_s) else None,
        avg_queued_s=float(queued_s.mean()) if len(queued_s) else 0.0,
        utilisation=float(np.mean([one.utilisation.mean() if len(one.levels) else 0.0 for one in series])),
    )


# --- Plots -------------------------------------------------------------------------------------------------------


def figures(runs: Sequence[RunResult], names: Names) -> list[Figure]:
    """All plots that these runs give anything for."""
    shown = [run for run in runs if len(run.jobs)]
    if not shown:
        return []
    firsts = _firsts(shown)
    seed = firsts[0].seed
    plots = [
        Figure(
            "Completion times",
            _draw(lambda axes: _draw_jcts(axes, shown, names)),
            "Share of the jobs of all seeds that were done within a time of their submission; further left is better.",
        ),
        Figure(
            "Where the time went",
            _draw(lambda axes: _draw_spent(axes, shown, names), high_in=0.9 + 0.34 * len(firsts)),
            "Mean over the jobs of all seeds. A job trains only while it is running.",
        ),
        Figure(
            "Utilisation",
            _draw(lambda axes: _draw_over_time(axes, firsts, names, lambda series: series.utilisation * 100, "% held")),
            f"Share of the GPUs that tasks held, of the CPU cores where there are no GPUs; seed {seed}.",
        ),
        Figure(
            "Queue",
            _draw(lambda axes: _draw_over_time(axes, firsts, names, lambda series: series.level("queued"), "jobs")),
            f"Jobs that wait, in all clusters; seed {seed}.",
        ),
    ]
    compared = differences(shown)
    if compared:
        title = f"Difference to {names.of(compared[0].baseline)}"
        drawn = _draw(lambda axes: _draw_differences(axes, compared, names), high_in=0.9 + 0.3 * len(compared))
        caption = "Of mean completion times, on the same jobs, with the 95 % confidence interval over seeds."
        plots.insert(2, Figure(title, drawn, caption))
    return plots + [_gantt(run, names) for run in firsts if run.lanes]


def _firsts(runs: Sequence[RunResult]) -> list[RunResult]:
    """The first run of each arm."""
    found: dict[Arm, RunResult] = {}
    for run in runs:
        found.setdefault(Arm(run.experiment, run.policy), run)
    return list(found.values())


def _draw(paint: Callable[[Axes], None], high_in: float = HIGH_IN) -> str:
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


def _unit(longest_s: float) -> tuple[str, float]:
    """The unit of an axis that goes so far, and its seconds."""
    for unit, size_s in (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if longest_s >= 3 * size_s:
            return unit, size_s
    return "seconds", 1.0


def _draw_jcts(axes: Axes, runs: Sequence[RunResult], names: Names) -> None:
    times_s: dict[Arm, Floats] = {}
    for arm in arms(runs):
        ours = [run.jobs.jct_s[run.jobs.succeeded] for run in runs if Arm(run.experiment, run.policy) == arm]
        times_s[arm] = np.concatenate(ours)
    longest_s = max((float(values.max()) for values in times_s.values() if len(values)), default=1.0)
    unit, size_s = _unit(longest_s)
    shares = np.linspace(0, 1, CURVE_POINTS)
    for arm, values in times_s.items():
        if len(values):
            axes.plot(np.quantile(values, shares) / size_s, shares * 100, label=names.of(arm), **names.look(arm))
    shortest_s = min((float(values.min()) for values in times_s.values() if len(values)), default=1.0)
    if shortest_s > 0 and longest_s > 50 * shortest_s:
        axes.set_xscale("log")
    axes.set_xlabel(f"completion time, {unit}")
    axes.set_ylabel("% of jobs")
    axes.set_ylim(0, 100)
    _legend(axes)


def _draw_spent(axes: Axes, runs: Sequence[RunResult], names: Names) -> None:
    found = arms(runs)
    means_s = np.array(
        [
            np.concatenate(
                [run.jobs.spent_s for run in runs if Arm(run.experiment, run.policy) == arm],
            ).mean(axis=0)
            for arm in found
        ]
    )
    unit, size_s = _unit(float(means_s.sum(axis=1).max()))
    left = np.zeros(len(found))
    for column, kind in enumerate(SPENT):
        values = means_s[:, column] / size_s
        label = kind.removesuffix("_s")
        axes.barh(range(len(found)), values, left=left, height=0.62, color=SPENT_COLOURS[column], label=label)
        left += values
    axes.set_yticks(range(len(found)), [names.of(arm) for arm in found])
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_xlabel(unit)
    axes.legend(ncols=len(SPENT), loc="lower left", bbox_to_anchor=(0, 1), handlelength=1, columnspacing=1.2)


def _draw_over_time(
    axes: Axes, runs: Sequence[RunResult], names: Names, of: Callable[[Series], Floats], label: str
) -> None:
    series = [(Arm(run.experiment, run.policy), together(run.series)) for run in runs if run.series]
    unit, size_s = _unit(max((len(one.levels) * one.step_s for _, one in series), default=1.0))
    for arm, one in series:
        shown = one.coarser(one.step_s * 2 ** max(0, (len(one.levels) // CURVE_POINTS).bit_length()))
        axes.plot(shown.time_s / size_s, of(shown), label=names.of(arm), linewidth=1.3, **names.look(arm))
    axes.set_xlabel(unit)
    axes.set_ylabel(label)
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    _legend(axes)


def _draw_differences(axes: Axes, compared: Sequence[Difference], names: Names) -> None:
    unit, size_s = _unit(max(abs(item.jct_s.mean) + (item.jct_s.half or 0.0) for item in compared))
    for place, item in enumerate(compared):
        half = (item.jct_s.half or 0.0) / size_s
        colour = names.look(item.arm)["color"]
        axes.errorbar(item.jct_s.mean / size_s, place, xerr=half, fmt="o", color=colour, capsize=3, markersize=5)
    axes.axvline(0, color="#334155", linewidth=1)
    axes.set_yticks(range(len(compared)), [names.of(item.arm) for item in compared])
    axes.set_ylim(len(compared) - 0.5, -0.5)
    axes.set_xlabel(f"{unit}; left of 0 is faster")


def _gantt(run: RunResult, names: Names) -> Figure:
    stride = -(-len(run.lanes) // LANES_SHOWN)
    lanes = run.lanes[::stride]
    drawn = _draw(lambda axes: _draw_lanes(axes, run, stride), high_in=0.9 + 0.17 * len(lanes))
    some = f"{len(lanes)} of {len(run.jobs):,} jobs" if len(lanes) < len(run.jobs) else "All jobs"
    caption = (
        f"{some} in order of arrival; seed {run.seed}. The thicker a bar, the more tasks the job held. "
        "Grey: it waits. Yellow: it starts. Blue: it trains. Red: it is resized. Violet: it is stopped."
    )
    return Figure(f"Allocation under {names.of(Arm(run.experiment, run.policy))}", drawn, caption)


def _draw_lanes(axes: Axes, run: RunResult, stride: int) -> None:
    lanes = run.lanes[::stride]
    most = max((tasks for lane in lanes for _, _, tasks in lane.steps), default=1) or 1
    unit, size_s = _unit(max((lane.steps[-1][0] for lane in lanes), default=1.0))
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
            axes.barh(places, widths, left=lefts, height=heights, color=colour)
    axes.set_ylim(len(lanes) - 0.4, -0.6)
    axes.set_yticks(range(len(lanes)), [lane.job_id for lane in lanes], fontsize=6)
    axes.grid(visible=False, axis="y")
    axes.set_xlim(left=0)
    axes.set_xlabel(unit)


def _legend(axes: Axes) -> None:
    if len(axes.get_lines()) > 1:
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), handlelength=1.8)
