"""`fedsched sim run`: what people read, what programs read, and the same bytes for the same experiment."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Run


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    """An experiment of five short jobs that want more than there is, in three files."""
    (tmp_path / "cluster.yaml").write_text("nodes: [{name: n, cpus: 6}]\n")
    (tmp_path / "workload.yaml").write_text("{jobs: 5, gap_s: 4, alone_s_max: 60}\n")
    path = tmp_path / "tiny.yaml"
    path.write_text(
        "cluster: cluster.yaml\nworkload: workload.yaml\nseeds: 2\n"
        "policies: {drf: {name: drf}, srtf: {name: srtf}, optimus: {name: optimus}, dl2: {name: dl2}}\n"
    )
    return str(path)


def test_people_get_one_line_per_policy(run: Run, tiny: str) -> None:
    """Which policy is better, and whether the difference means anything, at a glance."""
    result = run("sim", "run", tiny, "--policy", "srtf,drf", "--check")
    assert result.code == 0, result.err
    head, *rows = result.out.splitlines()
    columns = "POLICY SEEDS JCT 95% INTERVAL MAKESPAN RESIZES CPUS HELD FALLBACKS UNFINISHED"
    assert " ".join(head.split()) == columns
    assert [row.split()[:2] for row in rows] == [["srtf", "2"], ["drf", "2"]]
    assert all(re.search(r" \d+\.\ds +-?\d+\.\ds\.\.\d+\.\ds +\d+\.\ds +\d+\.\d +\d+% +0 +0$", row) for row in rows)
    assert result.err.splitlines() == ["srtf: seed 0", "srtf: seed 1", "drf: seed 0", "drf: seed 1"]


def test_programs_get_every_job_of_every_run(run: Run, tiny: str) -> None:
    """Whoever doubts the mean can compute it."""
    result = run("sim", "run", tiny, "--seeds", "3", "--policy", "drf", "-o", "json")
    assert result.code == 0, result.err
    told = json.loads(result.out)
    assert told["experiment"] == "tiny"
    (policy,) = told["policies"]
    assert (policy["policy"], policy["seeds"], policy["fallbacks"], policy["unfinished"]) == ("drf", 3, 0, 0)
    means = [sum(job["finished_s"] - job["arrived_s"] for job in one["jobs"]) / 5 for one in policy["runs"]]
    assert [one["seed"] for one in policy["runs"]] == [0, 1, 2]
    assert [one["jct_s"] for one in policy["runs"]] == pytest.approx(means)
    assert policy["jct_s"]["mean"] == pytest.approx(sum(means) / 3)
    assert policy["jct_s"]["low"] < policy["jct_s"]["mean"] < policy["jct_s"]["high"]


def test_one_seed_has_no_interval(run: Run, tiny: str) -> None:
    row = run("sim", "run", tiny, "--seeds", "1", "--policy", "drf").out.splitlines()[1]
    assert row.split()[3] == "-"


def test_what_cannot_be_run_is_one_clear_error(run: Run, tiny: str, tmp_path: Path) -> None:
    """What was expected and what to try, never a stack."""
    unknown = run("sim", "run", tiny, "--policy", "dl3")
    assert (unknown.code, unknown.out) == (2, "")
    assert "[FS100] the experiment has no policy dl3; it has drf, srtf, optimus, dl2" in unknown.err
    assert "  try: did you mean dl2?" in unknown.err
    missing = run("sim", "run", str(tmp_path / "none.yaml"))
    assert (missing.code, missing.err.split()[0]) == (2, "[FS101]")


def test_jobs_that_never_end_end_the_command_with_an_error(run: Run, tmp_path: Path) -> None:
    """A script that compares policies must not take such a run for a result; the table says which policy it was."""
    path = tmp_path / "endless.yaml"
    path.write_text(
        "cluster: {nodes: [{name: n, cpus: 3}]}\n"
        "workload: {jobs: 2, gap_s: 0, alone_s_min: 400, worker_cpus: [2], ps_cpus: [1], workers_max: 1}\n"
        "policies: {drf: {name: drf}}\nseeds: 1\nslots_max: 3\n"
    )
    result = run("sim", "run", str(path))
    assert result.code == 1
    assert result.out.splitlines()[1].split()[2] == "-"
    assert "[FS300] jobs never ended: 1 under drf" in result.err
    told = json.loads(run("sim", "run", str(path), "-o", "json").out)
    assert told["policies"][0]["runs"][0]["jct_s"] is None


def test_the_same_experiment_gives_the_same_bytes_in_fresh_interpreters_under_any_hash_seed(tiny: str) -> None:
    """One process cannot show an order taken from a set; whoever reproduces a result starts another one."""
    outputs = set()
    for seed in ("0", "1", "12345"):
        done = subprocess.run(
            [sys.executable, "-m", "fedsched.cli.main", "sim", "run", tiny, "-o", "json"],
            env={**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            timeout=50,
            check=True,
        )
        outputs.add(done.stdout)
    assert len(outputs) == 1
    assert len(json.loads(outputs.pop())["policies"]) == 4


def test_help_shows_the_command_and_stays_light() -> None:
    """`fedsched --help` and `fedsched sim run --help` must answer at once; torch and scipy take seconds to load."""
    heavy = ("torch", "numpy", "scipy", "pydantic", "yaml")
    code = (
        "import sys\nfrom fedsched.cli.main import main\n"
        "assert main(['--help']) == 0 and main(['sim', 'run', '--help']) == 0\n"
        f"sys.exit(','.join(name for name in {heavy!r} if name in sys.modules) or 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    assert re.search(r"^  sim +Compare policies in simulation\.$", result.stdout, re.MULTILINE)
