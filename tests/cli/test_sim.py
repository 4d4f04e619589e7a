"""What `fedsched sim run` and `sim compare` tell people and programs, and the same bytes for the same experiment."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from hashlib import sha256
from pathlib import Path

import psutil
import pytest

from fedsched.cli import simulated
from fedsched.policy.tetris import Tetris
from tests.cli.conftest import Run
from tests.waiting import eventually

WARM_S = 0.5
"""CPU time after which a worker process has loaded what it needs and is in its runs."""


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    """An experiment of five short jobs that want more than there is, in three files."""
    (tmp_path / "clusters.yaml").write_text("- {name: one, nodes: [{name: n, cpus: 6}]}\n")
    (tmp_path / "workload.yaml").write_text("{jobs: 5, gap_s: 4, alone_s_max: 60}\n")
    path = tmp_path / "tiny.yaml"
    path.write_text(
        "clusters: clusters.yaml\nworkload: workload.yaml\nseeds: 2\n"
        "policies: {drf: {name: drf}, srtf: {name: srtf}, optimus: {name: optimus}, dl2: {name: dl2}}\n"
    )
    return str(path)


def test_people_get_one_line_per_policy(run: Run, tiny: str) -> None:
    """Which policy is better, and whether the difference means anything, at a glance."""
    result = run("sim", "run", tiny, "--policy", "srtf,drf", "--check", "--workers", "1")
    assert result.code == 0, result.err
    head, *rows = result.out.splitlines()
    columns = "POLICY SEEDS JCT 95% INTERVAL SLOTS MAKESPAN UTILISED RESIZES FALLBACKS UNFINISHED"
    assert " ".join(head.split()) == columns
    assert [row.split()[:2] for row in rows] == [["srtf", "2"], ["drf", "2"]]
    assert all(
        re.search(r" \d+\.\ds +-?\d+\.\ds\.\.\d+\.\ds +\d+\.\d\d +\d+\.\ds +\d+% +\d+\.\d +0 +0$", row) for row in rows
    )


def test_how_much_work_comes_is_told_before_the_run(run: Run, tiny: str) -> None:
    """Policies differ little where nothing is scarce; whoever compares them has to know the load."""
    result = run("sim", "run", tiny, "--policy", "drf", "--seeds", "1")
    (line,) = result.err.splitlines()
    assert re.fullmatch(
        r"tiny: slots of 10 s; seed 0: offered load \d+\.\d\d: 5 jobs, [\d.]+ core-hours of work, "
        r"come within [\d.]+ s to 6 cores",
        line,
    )


def test_programs_get_every_run_and_the_mean_over_them(run: Run, tiny: str, tmp_path: Path) -> None:
    """Whoever doubts the mean can compute it, from runs or from jobs."""
    jobs = tmp_path / "jobs.csv"
    result = run(
        "sim", "run", tiny, "--seeds", "3", "--policy", "drf", "-o", "json", "--per-job", str(jobs), "--workers", "1"
    )
    assert result.code == 0, result.err
    told = json.loads(result.out)
    assert [(one["policy"], one["seed"], one["jobs"], one["partial"]) for one in told["results"]] == [
        ("drf", seed, 5, False) for seed in range(3)
    ]
    with jobs.open() as file:
        lines = list(csv.DictReader(file))
    for one in told["results"]:
        ours = [line for line in lines if line["seed"] == str(one["seed"])]
        jcts_s = [float(line["finish_s"]) - float(line["submit_s"]) for line in ours]
        assert [float(line["jct_s"]) for line in ours] == jcts_s
        assert one["avg_jct_s"] == pytest.approx(sum(jcts_s) / 5)
        assert one["avg_jct_slots"] == pytest.approx(one["avg_jct_s"] / 10)
        assert one["cpu_s"] > 0
    (summary,) = told["summary"]
    assert summary["avg_jct_s"] == pytest.approx(sum(one["avg_jct_s"] for one in told["results"]) / 3)
    assert summary["ci95_s"] > 0


def test_a_comparison_is_made_seed_by_seed(run: Run, tiny: str, tmp_path: Path) -> None:
    """Seeds differ more than policies; two separate intervals would hide what is plain on the same jobs."""
    other = tmp_path / "slow.yaml"
    other.write_text(Path(tiny).read_text() + "costs: {start_s: 20}\n")
    result = run(
        "sim", "compare", tiny, str(other), "--policies", "drf,srtf", "--seeds", "3", "-o", "json", "--workers", "1"
    )
    assert result.code == 0, result.err
    told = json.loads(result.out)
    assert [(one["experiment"], one["policy"]) for one in told["summary"]] == [
        (name, policy) for name in ("tiny", "slow") for policy in ("drf", "srtf")
    ]
    slow = next(one for one in told["differences"] if (one["experiment"], one["policy"]) == ("slow", "drf"))
    assert (slow["baseline_experiment"], slow["baseline_policy"], slow["seeds"]) == ("tiny", "drf", 3)
    assert slow["ci95_low_s"] > 10
    assert slow["certain"]
    shown = run("sim", "compare", tiny, "--policies", "drf,srtf", "--seeds", "2", "--workers", "1").out
    assert "against drf in tiny, seed by seed:" in shown


@pytest.mark.parametrize(
    "option", ["--format itp", "--nodes 4", "--clock slots", "--slot-length 9", "--placement nodes"]
)
def test_options_of_traces_are_refused_with_an_experiment(run: Run, tiny: str, option: str) -> None:
    """Ignored, they would be taken for what was simulated; given as they are by default, too."""
    refused = run("sim", "run", tiny, *option.split())
    assert refused.code == 2
    assert f"{option.split()[0]} is for a run of a --trace; an experiment's file is given" in refused.err


def test_one_seed_has_no_interval(run: Run, tiny: str) -> None:
    row = run("sim", "run", tiny, "--seeds", "1", "--policy", "drf").out.splitlines()[1]
    assert row.split()[3] == "-"


def test_what_cannot_be_run_is_one_clear_error(run: Run, tiny: str, tmp_path: Path) -> None:
    """What was expected and what to try, never a stack."""
    unknown = run("sim", "run", tiny, "--policy", "dl3")
    assert (unknown.code, unknown.out) == (2, "")
    assert "[FS100] there is no policy dl3; the experiment has drf, srtf, optimus, dl2" in unknown.err
    assert "  try: did you mean dl2?" in unknown.err
    missing = run("sim", "run", str(tmp_path / "none.yaml"))
    assert (missing.code, missing.err.split()[0]) == (2, "[FS101]")
    neither = run("sim", "run")
    assert (neither.code, neither.err.split()[0]) == (2, "[FS100]")
    nowhere = run("sim", "run", tiny, "--html", str(tmp_path / "no" / "report.html"))
    assert "there is no folder" in nowhere.err


def test_without_ray_it_is_said_how_to_get_it(run: Run, tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not installed, whether or not it is
    result = run("sim", "run", tiny, "--engine", "ray")
    assert result.code == 2
    assert "--engine ray needs Ray, which is not installed\n  try: pip install 'fedsched[ray]'" in result.err


def test_jobs_that_never_end_end_the_command_with_an_error(run: Run, tmp_path: Path) -> None:
    """A script that compares policies must not take such a run for a result; it is told how to look at it again."""
    path = tmp_path / "endless.yaml"
    path.write_text(
        "clusters: [{name: one, nodes: [{name: n, cpus: 3}]}]\n"
        "workload: {jobs: 2, gap_s: 0, alone_s_min: 400, worker_cpus: [2], ps_cpus: [1], workers_max: 1}\n"
        "policies: {drf: {name: drf}}\nseeds: 1\nslots_max: 3\n"
    )
    result = run("sim", "run", str(path))
    assert result.code == 1
    assert result.out.splitlines()[1].split()[2] == "-"
    assert "[FS300] 1 of 1 runs are partial" in result.err
    assert "drf, seed 0: 1 jobs never ended" in result.err
    assert f"try: fedsched sim run {path} --policies drf --seed 0 --seeds 1" in result.err
    told = json.loads(run("sim", "run", str(path), "-o", "json").out)
    assert told["results"][0]["partial"] is True
    assert told["results"][0]["avg_jct_s"] > 400
    assert told["summary"][0]["avg_jct_s"] is None


def test_the_same_experiment_gives_the_same_bytes_in_fresh_interpreters_under_any_hash_seed(
    tiny: str, tmp_path: Path
) -> None:
    """One process cannot show an order taken from a set; whoever reproduces a result starts another one."""
    outputs: set[tuple[str, ...]] = set()
    for seed in ("0", "1", "12345"):
        files = [tmp_path / f"{seed}.{kind}" for kind in ("csv", "parquet", "html")]
        done = subprocess.run(
            [
                *(sys.executable, "-m", "fedsched.cli.main", "sim", "run", tiny, "-o", "json", "--workers", "1"),
                *("--seeds", "1", "--per-job", str(files[0]), "--parquet", str(files[1]), "--html", str(files[2])),
            ],
            env={**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            timeout=150,
            check=True,
        )
        told = json.loads(done.stdout)
        for one in told["results"]:
            del one["cpu_s"]  # the one thing that is measured and not computed
        outputs.add((json.dumps(told), *(sha256(file.read_bytes()).hexdigest() for file in files)))
    assert len(outputs) == 1
    assert len(json.loads(outputs.pop()[0])["results"]) == 4


def test_help_shows_the_command_and_stays_light() -> None:
    """`fedsched --help` and `fedsched sim run --help` must answer at once; torch and scipy take seconds to load."""
    heavy = ("torch", "numpy", "scipy", "pydantic", "yaml", "msgspec")
    code = (
        "import sys\nfrom fedsched.cli.main import main\n"
        "assert main(['--help']) == 0 and main(['sim', 'run', '--help']) == 0\n"
        f"sys.exit(','.join(name for name in {heavy!r} if name in sys.modules) or 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    assert re.search(r"^  sim +Compare policies in simulation\.$", result.stdout, re.MULTILINE)


def test_a_mistake_is_told_before_anything_heavy_is_loaded() -> None:
    """Who mistypes a path or a policy waits for no library; heuristics never need torch, and so no worker loads it."""
    heavy = ("torch", "scipy", "matplotlib", "pyarrow", "fedsched.sim.world")
    code = (
        "import sys\nfrom fedsched.cli.main import main\n"
        "assert main(['sim', 'run', 'nowhere.yaml']) == 2\n"
        "assert main(['sim', 'run', '--trace', 'a', 'b']) == 2\n"
        f"print(','.join(name for name in {heavy!r} if name in sys.modules))\n"
        "import fedsched.sim.sweep\n"
        "print('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.splitlines() == ["", "False"]


def test_progress_is_told_where_nobody_looks_at_a_terminal(
    run: Run, tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who reads the log of a batch job wants to know whether it still moves, for every kind of run."""
    monkeypatch.setattr(simulated, "TOLD_EVERY_S", 0.0)
    trace = Path(tiny).parent / "trace.csv"
    trace.write_text("job_id,num_gpu,submit_s,duration_s\n" + "".join(f"{n},1,{n},50\n" for n in range(30)))
    policies = "fifo,srtf,las,las2d,themis,tetris,drf,gavel_maxmin"
    for arguments in ((tiny, "--policies", "drf,srtf"), ("--trace", str(trace), "--policies", policies)):
        for workers in ("1", "2"):
            result = run("sim", "run", *arguments, "--seeds", "1", "--workers", workers)
            assert result.code == 0, result.err
            lines = [line for line in result.err.splitlines() if "runs are done after" in line]
            assert len(lines) >= 3
            assert "to go" in lines[-1]
            assert "done" not in result.out


def test_an_interruption_is_told_in_a_line(run: Run, tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forty runs that were never begun are no forty problems."""

    def stop(self: Tetris, observation: object, budget: object) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Tetris, "decide", stop)
    result = run("sim", "run", tiny, "--policies", "srtf,tetris", "--seeds", "20", "--workers", "1")
    assert result.code == 1
    assert len(result.err.splitlines()) <= 5
    assert "20 of 40 runs are partial; what they did until then is kept:" in result.err
    assert "  - 20 were interrupted, 1 of them under way" in result.err


def test_what_failed_is_told_up_to_a_number(run: Run, tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Tetris, observation: object, budget: object) -> None:
        raise ValueError("no")

    monkeypatch.setattr(Tetris, "decide", fail)
    result = run("sim", "run", tiny, "--policy", "tetris", "--seeds", "15", "--workers", "1")
    assert result.err.count("ValueError: no (test_sim.py, line ") == simulated.REASONS_SHOWN
    assert "  - and 5 more" in result.err


def test_a_policy_that_does_not_answer_in_time_ends_its_run_only(
    run: Run, tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is the user's to choose: a linear program of a large cluster may take its time."""

    def wait(self: Tetris, observation: object, budget: object) -> None:
        time.sleep(1000)

    monkeypatch.setattr(Tetris, "decide", wait)
    arguments = ("--policies", "tetris,srtf", "--seeds", "1", "--workers", "1", "--decision-s-max", "0.3")
    result = run("sim", "run", tiny, *arguments)
    assert result.code == 1
    told = r"  - tetris, seed 0: .* policy tetris .*TooLong: no answer within 0\.3 s; it was in test_sim\.py, line \d+"
    assert re.search(told, result.err)
    assert result.out.splitlines()[2].startswith("srtf")


def test_a_policy_for_rebuilt_clusters_is_refused_before_anything_runs(run: Run, tiny: str) -> None:
    """The other policies' hours would be spent for a table with a hole."""
    result = run("sim", "run", tiny, "--policies", "drf,dl2_drf")
    assert (result.code, result.out) == (2, "")
    assert "give the experiment `clock: slots` and `rebuild: true`" in result.err


def test_jobs_that_fit_nowhere_are_told_before_the_run(run: Run, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("job_id,num_gpu,submit_s,duration_s\nsmall,1,0,10\nlarge,99,0,10\n")
    result = run("sim", "run", "--trace", str(trace), "--nodes", "1", "--policy", "srtf")
    assert result.code == 1
    assert "1 jobs fit on no cluster and will wait for ever, the first of them large" in result.err


def test_completion_is_told_in_slots_where_decisions_fall_on_slots_only(run: Run, tmp_path: Path) -> None:
    """Claims are told in slots; a trace that is decided at every event has none."""
    trace = tmp_path / "trace.csv"
    trace.write_text("job_id,num_gpu,submit_s,duration_s\none,1,0,360\n")
    exact, slots = (run("sim", "run", "--trace", str(trace), "--clock", clock).out for clock in ("exact", "slots"))
    assert "SLOTS" not in exact
    head, row = slots.splitlines()
    assert row[head.index("SLOTS") :].split()[0] == "1.00"


def test_a_policy_that_ends_the_process_ends_its_run_only(run: Run, tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that were made before it are somebody's night of work."""

    def leave(self: Tetris, observation: object, budget: object) -> None:
        raise SystemExit(0)

    monkeypatch.setattr(Tetris, "decide", leave)
    result = run("sim", "run", tiny, "--policies", "srtf,tetris", "--seeds", "1", "--workers", "1")
    assert result.code == 1
    assert "SystemExit" in result.err
    assert "srtf" in result.out


def test_workers_whose_command_was_killed_end_without_a_word(tiny: str) -> None:
    """A traceback of each in the user's terminal would look like what killed it."""
    words = ["-m", "fedsched.cli.main", "sim", "run", tiny, "--seeds", "3000", "--workers", "2"]
    command = subprocess.Popen([sys.executable, *words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    workers = psutil.Process(command.pid).children
    eventually(lambda: sum(worker.cpu_times().user > WARM_S for worker in workers()) == 2, "both are at work", 60.0)
    command.kill()
    _, told = command.communicate(timeout=60)  # until the last worker has closed it
    assert "Traceback" not in told
