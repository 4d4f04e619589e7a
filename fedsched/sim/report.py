"""Writes a comparison as one HTML file that needs nothing else: tables, and plots drawn into it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedsched import __version__
from fedsched.errors import InvalidInput
from fedsched.files import write_whole
from fedsched.sim.comparing import Summary, arms, cluster_summaries, differences, summarise
from fedsched.sim.figures import figures, readable
from fedsched.sim.plots import Names
from fedsched.sim.results import RunResult

TEMPLATE = "report.html.j2"


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
        clusters=[(names.of(row.arm), row) for row in cluster_summaries(runs)],
        partial=[run for run in runs if run.partial],
        figures=[
            (figure, figure.inline(number), number) for number, figure in enumerate(figures(runs, names), start=1)
        ],
    )
    write_whole(path, text.encode())


def _clock(run: RunResult) -> str:
    return f"slots of {run.slot_length_s:g} s" if run.clock == "slots" else "exact times"


def _summary_rows(summaries: Sequence[Summary], names: Names) -> list[tuple[str, Summary, bool]]:
    """Each arm's name and figures, and whether it is the fastest."""
    best_s = min((item.jct_s.mean for item in summaries if item.jct_s), default=None)
    return [(names.of(item.arm), item, item.jct_s is not None and item.jct_s.mean == best_s) for item in summaries]
