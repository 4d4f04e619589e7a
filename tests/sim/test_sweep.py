"""Sweeps: the same results however many processes make them, and no failure takes another run's results with it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from fedsched.config import parse
from fedsched.sim.experiment import ExperimentConfig
from fedsched.sim.running import Request
from fedsched.sim.sweep import sweep
from fedsched.sim.workers import INTERRUPTED, Share, over_cores
from tests.waiting import eventually


def requests(seeds: int) -> list[Request]:
    plain = {
        "clusters": [{"name": "one", "nodes": [{"name": "n", "cpus": 6}]}],
        "workload": {"jobs": 4, "gap_s": 5, "alone_s_max": 40},
        "policies": {"drf": {"name": "drf"}, "fifo": {"name": "fifo"}},
    }
    experiment = parse(ExperimentConfig, plain, "test")
    return [Request("t", experiment, policy, seed, check=True) for policy in ("drf", "fifo") for seed in range(seeds)]


def test_processes_make_the_same_results_in_the_same_order() -> None:
    """A table whose rows depend on which core was faster cannot be compared with yesterday's."""
    asked = requests(2)
    told: list[float] = []
    many = sweep(asked, workers=2, told=told.append)
    assert [(run.policy, run.seed) for run in many] == [(one.policy, one.seed) for one in asked]
    assert [run.digest for run in many] == [run.digest for run in sweep(asked, workers=1)]
    assert told == sorted(told)
    assert told[-1] == 4


def double_or_die(number: int, share: Share) -> int:
    """Ends its process where it is asked for 3 or 5."""
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    if number == 5:
        os._exit(7)
    return 2 * number


def test_a_process_that_dies_takes_only_its_own_task_with_it() -> None:
    """One run that needs too much memory must not cost a night's work, nor be made again and again."""
    made = over_cores(double_or_die, [1, 2, 3, 4, 5, 6], lambda number, why: f"{number}: {why}", workers=2)
    assert made == (
        *(2, 4, "3: its process was killed by SIGKILL, perhaps for want of memory", 8),
        *("5: its process ended with exit code 7 in the middle of it", 12),
    )


def die_first(number: int, share: Share) -> int:
    """The first ends its process at once; the others take their time."""
    if number == 0:
        os._exit(1)
    time.sleep(3600)
    return number


def test_a_death_is_heard_at_once() -> None:
    """Who watches the progress sees what goes wrong while it goes wrong, not after the longest run of the sweep."""

    def told(done: float) -> None:
        raise KeyboardInterrupt

    made = over_cores(die_first, [0, 1], lambda number, why: why, workers=2, told=told)
    assert made == ("its process ended with exit code 1 in the middle of it", INTERRUPTED)


def fail(number: int, share: Share) -> int:
    """Has a fault of ours."""
    raise AssertionError(f"number {number}")


def test_a_fault_of_ours_stops_everything() -> None:
    """It would be taken for a result otherwise."""
    with pytest.raises(AssertionError, match="number 0"):
        over_cores(fail, [0, 0], lambda number, why: 0, workers=2)
    assert not [child for child in multiprocessing.active_children() if child.is_alive()]


def slow(number: int, share: Share) -> str:
    """Quick for the first, endless for the others, which say how far they came when they are interrupted."""
    if number == 0:
        return "done"
    try:
        share(0.25)
        time.sleep(3600)
    except KeyboardInterrupt:
        if number == 2:
            raise
        return "a quarter"
    return "never"


def test_an_interruption_keeps_what_is_done_and_what_is_half_done_and_leaves_no_process() -> None:
    """Who stops a long sweep wants what it has made, at once."""
    heard: list[float] = []

    def told(done: float) -> None:
        heard.append(done)
        if heard.count(1.5) == 1:
            os.kill(os.getpid(), signal.SIGINT)

    made = over_cores(slow, [0, 1, 2, 3], lambda number, why: why, workers=2, told=told)
    assert made == ("done", "a quarter", INTERRUPTED, INTERRUPTED)
    assert not [child for child in multiprocessing.active_children() if child.is_alive()]


def test_an_interrupted_run_is_kept_as_far_as_it_came() -> None:
    """The first half of a long run is worth looking at too."""
    asked = [Request(one.name, one.experiment, one.policy, one.seed, jobs=4) for one in requests(1)]
    done: list[float] = []

    def told(share: float) -> None:
        done.append(share)
        if len(done) == 2:
            signal.raise_signal(signal.SIGINT)

    assert threading.current_thread() is threading.main_thread()
    first, second = sweep(asked, workers=1, told=told)
    assert (first.partial, second.partial) == (INTERRUPTED, INTERRUPTED)
    assert 0 < int(first.jobs.over.sum()) < 4
    assert len(second.jobs) == 0


def test_an_interruption_while_processes_begin_shows_nobody_a_traceback(tmp_path: Path) -> None:
    """Ctrl-C goes to the whole group, also to interpreters that have just been started."""
    file = tmp_path / "one.yaml"
    file.write_text(
        "clusters: [{name: one, nodes: [{name: n, cpus: 6}]}]\nworkload: {jobs: 400, gap_s: 5}\n"
        "policies: {drf: {name: drf}}\nseeds: 40\n"
    )
    command = [sys.executable, "-m", "fedsched.cli.main", "sim", "run", str(file), "--workers", "2"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as sweeping:
        parent = psutil.Process(sweeping.pid)
        eventually(lambda: any("spawn_main" in " ".join(one.cmdline()) for one in parent.children()), "one begins")
        os.killpg(sweeping.pid, signal.SIGINT)
        _, told = sweeping.communicate(timeout=60)
    assert sweeping.returncode == 1
    assert "were interrupted" in told
    assert "Traceback" not in told
