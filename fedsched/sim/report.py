"""Writes a comparison as one HTML file that needs nothing else: tables, and plots drawn into it."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
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
GROUPS = 20
"""Of jobs by their completion times, where single ones would be too many to see."""
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


def write_report(path: Path, runs: Sequence[RunResult]) -> None:
    """Write the report; the same runs give the same bytes.

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
        figures=[
            (figure, figure.inline(number), number) for number, figure in enumerate(figures(runs, names), start=1)
        ],
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

    def mark(self, arm: Arm) -> dict[str, Any]:
        """How its points are drawn."""
        place = self._place[arm]
        return {"color": COLOURS[place % len(COLOURS)], "marker": MARKS[place // len(COLOURS) % len(MARKS)]}


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
    arm: Arm
    name: str
    """Of the arm."""
    jobs: int
    avg_jct_s: float | None
    avg_queued_s: float
    utilisation: float


def _cluster_rows(runs: Sequence[RunResult], names: Names) -> list[ClusterRow]:
    clusters = sorted({one.cluster for run in runs for one in run.series})
    rows = []
    for cluster in clusters:
        for arm in arms(runs):
            ours = _of(runs, arm)
            row = _cluster_row(cluster, arm, names.of(arm), ours)
            if row is not None:
                rows.append(row)
    return rows


def _cluster_row(cluster: str, arm: Arm, name: str, runs: Sequence[RunResult]) -> ClusterRow | None:
    series = [one for run in runs for one in run.series if one.cluster == cluster]
    if not series:
        return None
    here = [np.array([place == cluster for place in run.jobs.cluster], dtype=bool) for run in runs]
    done = [run.jobs.jct_s[mask & run.jobs.succeeded] for run, mask in zip(runs, here, strict=True)]
    jcts_s = np.concatenate(done)
    queued_s = np.concatenate([run.jobs.spent_s[mask, 0] for run, mask in zip(runs, here, strict=True)])
    return ClusterRow(
        cluster=cluster,
        arm=arm,
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
    end_s = max((lane.steps[-1][0] for run in firsts for lane in run.lanes), default=1.0)
    return [
        *_time_figures(shown, names),
        *_level_figures(firsts, names),
        *_cluster_figures(shown, names),
        *(_stay(arm, _of(shown, arm), names) for arm in arms(shown)),
        *(_gantt(run, names, end_s) for run in firsts if run.lanes),
    ]


def _time_figures(runs: Sequence[RunResult], names: Names) -> list[Figure]:
    """How long jobs take, by policy."""
    found = arms(runs)
    summaries = [item for item in summarise(runs) if item.jct_s is not None]
    made = [
        Figure(
            "Completion times",
            _draw(lambda axes: _draw_jcts(axes, runs, names)),
            "Share of the jobs of all seeds that were done within a time of their submission; further left is better.",
            "Half of the jobs, and nine of ten, were done within: "
            + "; ".join(f"{names.of(arm)} {_quantiles(_of(runs, arm))}" for arm in found)
            + ".",
        )
    ]
    if summaries:
        made.append(
            Figure(
                "Mean completion time",
                _draw(lambda axes: _draw_means(axes, summaries, names), high_in=1.0 + 0.32 * len(summaries)),
                "Mean over the seeds, with its 95 % confidence interval where there are several; less is better.",
                "; ".join(f"{names.of(item.arm)} {_interval(item)}" for item in summaries) + ".",
            )
        )
    compared = differences(runs)
    if compared:
        made.append(
            Figure(
                f"Difference to {names.of(compared[0].baseline)}",
                _draw(lambda axes: _draw_differences(axes, compared, names), high_in=1.0 + 0.32 * len(compared)),
                "Of mean completion times, on the same jobs, with the 95 % confidence interval over seeds.",
                "; ".join(f"{names.of(item.arm)} {readable(item.jct_s.mean)}" for item in compared) + ".",
            )
        )
    means_s = {arm: np.concatenate([run.jobs.spent_s for run in _of(runs, arm)]).mean(axis=0) for arm in found}
    made.append(
        Figure(
            "Where the time went",
            _draw(lambda axes: _draw_spent(axes, means_s, names), high_in=1.1 + 0.34 * len(found)),
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
            _draw(lambda axes: _draw_over_time(axes, series, names, held, f"{kind} held, %")),
            f"Share of the {kind} that tasks held, in all clusters; seed {seed}.",
            "Mean over time: "
            + "; ".join(f"{names.of(arm)} {held(one).mean():.0f} %" for arm, one in series.items())
            + ".",
        ),
        Figure(
            "Queue",
            _draw(lambda axes: _draw_over_time(axes, series, names, queued, "waiting jobs")),
            f"Jobs that wait, in all clusters; seed {seed}.",
            "At most: " + "; ".join(f"{names.of(arm)} {queued(one).max():,.0f}" for arm, one in series.items()) + ".",
        ),
    ]


def _cluster_figures(runs: Sequence[RunResult], names: Names) -> list[Figure]:
    """The clusters side by side; nothing where there is one."""
    rows = _cluster_rows(runs, names)
    clusters = sorted({row.cluster for row in rows})
    if len(clusters) < 2:
        return []
    high_in = 1.2 + 0.3 * len(clusters)
    slowest = max(rows, key=lambda row: row.avg_jct_s or 0.0)
    fullest = max(rows, key=lambda row: row.utilisation)
    unit, size_s = _unit(slowest.avg_jct_s or 1.0)

    def jct(row: ClusterRow) -> float | None:
        return None if row.avg_jct_s is None else row.avg_jct_s / size_s

    def used(row: ClusterRow) -> float | None:
        return row.utilisation * 100

    return [
        Figure(
            "Completion times by cluster",
            _draw(
                lambda axes: _draw_clusters(axes, rows, names, jct, f"mean completion time, {unit}"), high_in=high_in
            ),
            "Mean over the jobs of all seeds that ended there.",
            f"The longest: {readable(slowest.avg_jct_s)}, in {slowest.cluster} under {slowest.name}.",
        ),
        Figure(
            "Utilisation by cluster",
            _draw(lambda axes: _draw_clusters(axes, rows, names, used, "held, %"), high_in=high_in),
            "Mean over time and seeds of the share that tasks held.",
            f"The highest: {fullest.utilisation:.0%}, in {fullest.cluster} under {fullest.name}.",
        ),
    ]


def _of(runs: Sequence[RunResult], arm: Arm) -> list[RunResult]:
    return [run for run in runs if Arm(run.experiment, run.policy) == arm]


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
        times_s[arm] = np.concatenate([run.jobs.jct_s[run.jobs.succeeded] for run in _of(runs, arm)])
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
    axes.set_ylabel("share of jobs, %")
    axes.set_ylim(0, 100)
    _legend(axes)


def _draw_spent(axes: Axes, spent_s: dict[Arm, Floats], names: Names) -> None:
    found, means_s = list(spent_s), np.array(list(spent_s.values()))
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
    axes.set_xlabel(f"mean time of a job, {unit}")
    _legend_above(axes, len(SPENT))


def _draw_over_time(
    axes: Axes, series: dict[Arm, Series], names: Names, of: Callable[[Series], Floats], label: str
) -> None:
    from matplotlib.ticker import MaxNLocator

    unit, size_s = _unit(max((len(one.levels) * one.step_s for one in series.values()), default=1.0))
    for arm, one in series.items():
        shown = one.coarser(one.step_s * 2 ** max(0, (len(one.levels) // CURVE_POINTS).bit_length()))
        axes.plot(shown.time_s / size_s, of(shown), label=names.of(arm), linewidth=1.3, **names.look(arm))
    axes.set_xlabel(f"time, {unit}")
    axes.set_ylabel(label)
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    _legend(axes)


def _draw_means(axes: Axes, summaries: Sequence[Summary], names: Names) -> None:
    means = [(item.arm, item.jct_s) for item in summaries if item.jct_s is not None]
    unit, size_s = _unit(max(jct_s.mean for _, jct_s in means))
    for place, (arm, jct_s) in enumerate(means):
        axes.barh(place, jct_s.mean / size_s, height=0.55, color=names.look(arm)["color"], alpha=0.35)
        half = (jct_s.half or 0.0) / size_s
        axes.errorbar(jct_s.mean / size_s, place, xerr=half, capsize=3, markersize=5, ls="", **names.mark(arm))
    axes.set_yticks(range(len(means)), [names.of(arm) for arm, _ in means])
    axes.set_ylim(len(means) - 0.5, -0.5)
    axes.set_xlim(left=0)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel(f"mean completion time, {unit}")


def _draw_clusters(
    axes: Axes, rows: Sequence[ClusterRow], names: Names, of: Callable[[ClusterRow], float | None], label: str
) -> None:
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


def _draw_differences(axes: Axes, compared: Sequence[Difference], names: Names) -> None:
    unit, size_s = _unit(max(abs(item.jct_s.mean) + (item.jct_s.half or 0.0) for item in compared))
    for place, item in enumerate(compared):
        half = (item.jct_s.half or 0.0) / size_s
        axes.errorbar(
            item.jct_s.mean / size_s, place, xerr=half, ls="", capsize=3, markersize=6, **names.mark(item.arm)
        )
    axes.axvline(0, color=INK, linewidth=1)
    axes.set_yticks(range(len(compared)), [names.of(item.arm) for item in compared])
    axes.set_ylim(len(compared) - 0.5, -0.5)
    axes.set_xlabel(f"difference of mean completion times, {unit}; left of 0 is faster")


def _stay(arm: Arm, runs: Sequence[RunResult], names: Names) -> Figure:
    """Where each job's time went: jobs in order of their completion times, in groups where they are many."""
    stays_s = np.concatenate([run.jobs.spent_s for run in runs])
    order = np.argsort(stays_s.sum(axis=1), kind="stable")
    groups = [stays_s[rows].sum(axis=0) for rows in np.array_split(order, min(GROUPS, len(order)))]
    shares = np.array([values / max(values.sum(), 1e-12) for values in groups]) * 100
    first, last = shares[0], shares[-1]
    return Figure(
        f"Where each job's time went under {names.of(arm)}",
        _draw(lambda axes: _draw_stay(axes, shares)),
        f"{len(stays_s):,} jobs of all seeds from the shortest stay (left) to the longest (right), "
        f"in {len(groups)} groups of equal size: the share of their time that went where.",
        f"Of the time of the shortest stays {first[0]:.0f} % was spent queued and {first[2]:.0f} % running; "
        f"of the longest {last[0]:.0f} % queued and {last[2]:.0f} % running.",
    )


def _draw_stay(axes: Axes, shares: Floats) -> None:
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


def _gantt(run: RunResult, names: Names, end_s: float) -> Figure:
    stride = -(-len(run.lanes) // LANES_SHOWN)
    lanes = run.lanes[::stride]
    drawn = _draw(lambda axes: _draw_lanes(axes, run, stride, end_s), high_in=1.1 + 0.2 * len(lanes))
    some = f"{len(lanes)} of {len(run.jobs):,} jobs" if len(lanes) < len(run.jobs) else "All jobs"
    most = max((tasks for lane in lanes for _, _, tasks in lane.steps), default=0)
    caption = (
        f"{some} in order of arrival; seed {run.seed}. The thicker a bar, the more tasks the job held, {most:,} at "
        "most. The axis is the same for all policies."
    )
    last = max(lanes, key=lambda lane: lane.steps[-1][0])
    says = f"{some}; the last of them, {last.job_id}, ended after {readable(last.steps[-1][0])}."
    return Figure(f"Allocation under {names.of(Arm(run.experiment, run.policy))}", drawn, caption, says)


def _draw_lanes(axes: Axes, run: RunResult, stride: int, end_s: float) -> None:
    lanes = run.lanes[::stride]
    most = max((tasks for lane in lanes for _, _, tasks in lane.steps), default=1) or 1
    unit, size_s = _unit(end_s)
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
