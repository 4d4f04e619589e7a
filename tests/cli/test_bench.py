"""Benchmarks measure every policy in one run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from fedsched.cli.main import main
from tests.waiting import eventually

JOB = """
import time
from fedsched.bench.job import Load, bench_job
with bench_job(Load(), 10_000) as job:
    job.start(1, 1)
    print(job.steps_dir.parent, flush=True)
    time.sleep(600)
"""


def test_the_core_benchmark_tells_every_policys_cost_beside_the_baselines(capsys: pytest.CaptureFixture[str]) -> None:
    """A cost without its baseline from the same run says nothing on another machine."""
    assert main(["bench", "core", "--scenarios", "1", "-o", "json"]) == 0
    costs = json.loads(capsys.readouterr().out)
    assert [cost["policy"] for cost in costs] == ["fifo", "dl2", "drf", "optimus", "srtf"]
    assert costs[0]["ratio"] == 1.0
    for cost in costs:
        assert 0 < cost["decision_ms_p50"] <= cost["decision_ms_p99"]
        assert cost["jobs"] == costs[0]["jobs"]


def test_the_simulators_benchmark_runs_every_job_of_a_case(capsys: pytest.CaptureFixture[str]) -> None:
    """A rate over jobs that never ended would flatter the simulator."""
    assert main(["bench", "sim", "--cases", "queue-1000,dl2-drf", "-o", "json"]) == 0
    crowded, dl2 = json.loads(capsys.readouterr().out)["cases"]
    assert (crowded["name"], crowded["policy"], crowded["jobs"]) == ("queue-1000", "srtf", 1001)
    assert (dl2["name"], dl2["policy"], dl2["jobs"]) == ("dl2-drf", "dl2_drf", 200)
    for case in (crowded, dl2):
        assert case["jobs_per_cpu_s"] == pytest.approx(case["jobs"] / case["cpu_s"])
        assert case["peak_mib"] > 10


def test_a_case_that_is_not_there_is_told_with_those_that_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "sim", "--cases", "itp05"]) == 2
    assert "the cases are itp04-fifo" in capsys.readouterr().err


@pytest.mark.live
@pytest.mark.timeout(600)
def test_the_benchmark_of_resizes_makes_each_change_on_a_real_job_and_restarts_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A pause without the restart it replaces, from the same run, says nothing on another machine."""
    assert main(["bench", "scaling", "--rounds", "1", "-o", "json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert 90 < result["model_mb"] < 110
    assert [case["change"] for case in result["cases"]] == ["+1 ps", "-1 ps", "+1 worker", "-1 worker"]
    for case in result["cases"]:
        assert case["resizes"] == 1
        assert 0 < case["pause_ms_p50"] <= case["pause_ms_p99"] < case["longest_step_ms_p50"]
        assert case["longest_step_before_ms_p50"] > 0
        assert case["ratio"] == pytest.approx(case["checkpoint_restart_ms"] / case["pause_ms_p50"])
        assert case["throughput_kept"] > 0


@pytest.mark.live
@pytest.mark.timeout(300)
def test_a_benchmark_that_is_killed_leaves_neither_its_job_nor_its_folder() -> None:
    """Its launcher is made to outlive agents, and would train on for hours beside the next measurement."""
    with subprocess.Popen([sys.executable, "-c", JOB], stdout=subprocess.PIPE, text=True) as bench:
        assert bench.stdout is not None
        folder = Path(bench.stdout.readline().strip())
        assert running_for(folder)
        bench.send_signal(signal.SIGKILL)
    eventually(lambda: not running_for(folder) and not folder.exists(), "everything of the job ends", 60.0)


def running_for(folder: Path) -> list[int]:
    """Processes whose command line names the folder; forked tasks keep their launcher's."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if process.pid != os.getpid() and any(str(folder) in word for word in process.info["cmdline"] or ()):
            found.append(process.pid)
    return found


@pytest.mark.live
@pytest.mark.timeout(600)
def test_the_benchmark_of_training_runs_both_ways_and_counts_what_goes_over_the_wire(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A transport that sends more than gradients and parameters wastes a network that others share."""
    assert main(["bench", "training", "--pairs", "1", "--steps", "3", "-o", "json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["ratio"] == pytest.approx(result["ps_steps_per_s"] / result["ddp_steps_per_s"])
    assert result["wire_bytes_ratio"] == pytest.approx(1.0, abs=0.05)


def test_the_training_benchmark_counts_what_the_learner_was_told(capsys: pytest.CaptureFixture[str]) -> None:
    """Steps that taught nobody anything would flatter it."""
    assert main(["bench", "train", "--cases", "mix-online", "-o", "json"]) == 0
    (case,) = json.loads(capsys.readouterr().out)["cases"]
    assert (case["name"], case["policy"], case["mode"], case["clusters"]) == ("mix-online", "dl2", "online", 1)
    assert case["steps"] > case["slots"] >= case["updates"] > 0
    for what in ("steps", "slots", "updates"):
        assert case[f"{what}_per_cpu_s"] == pytest.approx(case[what] / case["cpu_s"])
    assert main(["bench", "train", "--cases", "mix"]) == 2
    assert "the cases are mix-online" in capsys.readouterr().err


def test_a_policy_that_there_is_not_is_no_fault_of_ours(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "decision", "--policies", "nobody"]) == 2
    assert "there is no policy 'nobody'" in capsys.readouterr().err
