"""The report: one file that needs nothing else, and says what went wrong as well as what went well."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from fedsched.config import parse
from fedsched.sim.experiment import ExperimentConfig
from fedsched.sim.report import readable, write_report
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
        "Policies",
        "Against drf, seed by seed",
        "Completion times",
        "Where the time went",
        "Difference to drf",
        "Utilisation",
        "Queue",
        "Allocation under drf",
        "Allocation under fifo",
        "Clusters",
    ]
    assert text.count("<svg") == 7
    assert all(f"<td>{name}</td>" in text for name in ("east", "west"))


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
