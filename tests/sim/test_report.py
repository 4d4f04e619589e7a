"""The report: one file that needs nothing else, and says what went wrong as well as what went well."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from fedsched.config import parse
from fedsched.sim.experiment import ExperimentConfig
from fedsched.sim.figures import readable
from fedsched.sim.plots import COLOURS, SPENT_COLOURS, THEMED
from fedsched.sim.report import write_report
from fedsched.sim.results import RunResult
from fedsched.sim.running import Request, lost, perform


@pytest.fixture(scope="module")
def runs() -> list[RunResult]:
    plain = {
        "clusters": [{"name": name, "nodes": [{"name": "n", "cpus": 6}]} for name in ("east", "west")],
        "workload": {"jobs": 8, "gap_s": 2, "alone_s_max": 40},
        "policies": {"drf": {"name": "drf"}, "fifo": {"name": "fifo"}},
    }
    experiment = parse(ExperimentConfig, plain, "test")
    return [perform(Request("two", experiment, label, seed)) for label in ("drf", "fifo") for seed in range(2)]


def test_the_report_is_whole_without_a_network(runs: list[RunResult], tmp_path: Path) -> None:
    """It is mailed around, and opened on trains."""
    path = tmp_path / "report.html"
    write_report(path, runs)
    text = path.read_text()
    assert not re.search(r"(?:src|href)\s*=\s*[\"'](?!#)|@import|url\((?![\"']?#)", text)
    assert "<script" not in text
    titles = re.findall(r"<h2>([^<]+)</h2>", text)
    assert titles == [
        *("Policies", "Against drf, seed by seed"),
        *("Completion times", "Mean completion time", "Difference to drf", "Where the time went"),
        *("Utilisation", "Queue", "Completion times by cluster", "Utilisation by cluster"),
        *("Where each job&#39;s time went under drf", "Where each job&#39;s time went under fifo"),
        *("Allocation under drf", "Allocation under fifo", "Clusters"),
    ]
    assert text.count("<svg") == 12
    assert all(f"<td>{name}</td>" in text for name in ("east", "west"))


class Page(HTMLParser):
    """What a browser and a screen reader find in a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.references: list[str] = []
        self.pictures: list[dict[str, str | None]] = []
        self.words: dict[str, str] = {}
        self.rows: list[list[str]] = []
        self._open = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self._open = found.get("id") or ""
        self.ids += [self._open] if self._open else []
        self.references += (found.get("aria-labelledby") or "").split()
        for value in found.values():
            self.references += re.findall(r"url\(#([\w-]+)\)", value or "")
            self.references += re.findall(r"^#([A-Za-z][\w-]*)$", value or "") if tag in ("a", "use") else []
        if tag == "svg":
            self.pictures.append(found)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self._open = "cell"

    def handle_endtag(self, tag: str) -> None:
        self._open = ""

    def handle_data(self, data: str) -> None:
        if self._open == "cell":
            self.rows[-1][-1] += data
        elif self._open:
            self.words[self._open] = data


@pytest.fixture(scope="module")
def page(runs: list[RunResult], tmp_path_factory: pytest.TempPathFactory) -> Page:
    path = tmp_path_factory.mktemp("report") / "report.html"
    write_report(path, runs)
    return Page(path.read_text())


def test_every_plot_says_what_it_shows_to_those_who_do_not_see_it(page: Page) -> None:
    assert len(page.pictures) == 12
    for picture in page.pictures:
        assert picture["role"] == "img"
        title, words = (picture["aria-labelledby"] or "").split()
        assert page.words[title]
        assert re.search(r"\d", page.words[words]), page.words[words]


def test_every_name_in_the_page_is_there_once_and_every_reference_leads_somewhere(page: Page) -> None:
    """Plots that share names take each other's clipping, and a page that is not valid is shown as browsers please."""
    assert len(page.ids) == len(set(page.ids))
    assert set(page.references) <= set(page.ids)


def test_the_numbers_are_those_of_the_results(page: Page, runs: list[RunResult]) -> None:
    """A report that rounds wrongly, or takes one policy's figures for another's, is worse than none."""
    for policy in ("drf", "fifo"):
        ours = [run for run in runs if run.policy == policy]
        jct_s = float(np.mean([run.avg_jct_s for run in ours]))
        makespan_s = float(np.mean([run.makespan_s for run in ours]))
        row = next(row for row in page.rows if row and row[0] == policy)
        assert row[1:3] == ["2", readable(jct_s)]
        assert row[5] == readable(makespan_s)
        assert row[6] == f"{np.mean([run.utilisation for run in ours]):.0%}".replace("%", " %")
        jcts_s = np.concatenate([run.jobs.jct_s for run in ours])
        said = f"{policy} {readable(float(np.quantile(jcts_s, 0.5)))} and {readable(float(np.quantile(jcts_s, 0.9)))}"
        assert said in page.words["d1"]
        assert f"{policy} {readable(jct_s)} (" in page.words["d2"]
        queued_s = float(np.concatenate([run.jobs.spent_s[:, 0] for run in ours]).mean())
        assert f"{policy} queued {readable(queued_s)}, " in page.words["d4"]
        for cluster in ("east", "west"):
            here = [np.array(run.jobs.cluster) == cluster for run in ours]
            row = next(row for row in page.rows if row[:2] == [cluster, policy])
            assert row[2] == str(sum(int(mask.sum()) for mask in here))
            mean_s = float(np.concatenate([run.jobs.jct_s[mask] for run, mask in zip(ours, here, strict=True)]).mean())
            assert row[3] == readable(mean_s)


def test_plots_follow_the_page_from_light_to_dark(runs: list[RunResult], tmp_path: Path) -> None:
    """Black letters on a dark page cannot be read; what does not follow must stand out on both."""
    path = tmp_path / "report.html"
    write_report(path, runs)
    text = path.read_text()
    drawn = "".join(re.findall(r"<svg.*?</svg>", text, re.DOTALL))
    used = set(re.findall(r"#[0-9a-f]{6}\b", drawn))
    assert used <= {*COLOURS, *SPENT_COLOURS} - set(THEMED)
    light, dark = re.findall(r"--panel: (#[0-9a-f]{6})", text)
    assert set(re.findall(r"var\((--\w+)\)", drawn)) <= set(re.findall(r"(--\w+):", text))
    for colour in {*COLOURS, *SPENT_COLOURS} - set(THEMED):
        for ground in (light, dark):
            assert contrast(colour, ground) >= 2.9, f"{colour} on {ground}"  # WCAG 1.4.11 wants about 3 of graphics


def contrast(one: str, other: str) -> float:
    """Of two colours, as WCAG 2 has it: 1 to 21."""
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def luminance(colour: str) -> float:
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_the_same_runs_give_the_same_bytes(runs: list[RunResult], tmp_path: Path) -> None:
    """A report that changes for no reason cannot be kept under version control."""
    for name in ("first", "second"):
        write_report(tmp_path / name, runs)
    assert (tmp_path / "first").read_bytes() == (tmp_path / "second").read_bytes()


def test_what_went_wrong_stands_at_the_top_and_cannot_break_the_page(runs: list[RunResult], tmp_path: Path) -> None:
    """A mean over half a run must not be taken for a result."""
    path = tmp_path / "report.html"
    broken = replace(runs[0], partial="policy <b>failed</b>")
    write_report(path, [broken, *runs[1:]])
    text = path.read_text()
    assert "1 of 4 runs are partial" in text
    assert "policy &lt;b&gt;failed&lt;/b&gt;" in text
    assert text.index("partial") < text.index("<table")


def test_a_sweep_of_which_nothing_is_left_still_has_a_report(tmp_path: Path) -> None:
    request = Request("none", parse(ExperimentConfig, _LEAST, "test"), "drf", 0)
    write_report(tmp_path / "report.html", [lost(request, "its process died")])
    assert "its process died" in (tmp_path / "report.html").read_text()


_LEAST = {
    "clusters": [{"name": "c", "nodes": [{"name": "n", "cpus": 6}]}],
    "workload": {"gap_s": 1},
    "policies": {"drf": {"name": "drf"}},
}


@pytest.mark.parametrize(
    ("length_s", "expected"),
    [(None, "–"), (0.5, "0.5 s"), (119, "119 s"), (120, "2 min"), (-7300, "-2.03 h"), (200_000, "2.31 d")],
)
def test_times_are_told_in_the_unit_that_suits_them(length_s: float | None, expected: str) -> None:
    assert readable(length_s) == expected
