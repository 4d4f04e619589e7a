"""Sweeps: the same results however many processes make them, and no failure takes another run's results with it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time

import pytest

from fedsched.config import parse
from fedsched.sim.experiment import ExperimentConfig
from fedsched.sim.running import INTERRUPTED, Request
from fedsched.sim.sweep import DIED, over_cores, sweep


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
    assert told == [1, 2, 3, 4]


def double_or_die(number: int) -> int:
    """Kills its process where it is asked for 3."""
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return 2 * number


def test_a_process_that_dies_takes_only_its_own_run_with_it() -> None:
    """One run that needs too much memory must not cost a night's work."""
    made = over_cores(double_or_die, [1, 2, 3, 4], lambda number, why: f"{number}: {why}", workers=2)
    assert made == (2, 4, f"3: {DIED}", 8)


def slow(number: int) -> int:
    """Quick for the first, endless for the others."""
    time.sleep(0 if number == 0 else 60)
    return number


def test_an_interruption_keeps_what_is_done_and_leaves_no_process() -> None:
    """Who stops a long sweep wants what it has made, at once."""
    begun_s = time.monotonic()
    made = over_cores(
        slow, [0, 1, 2], lambda number, why: why, workers=2, told=lambda _: os.kill(os.getpid(), signal.SIGINT)
    )
    assert made == (0, INTERRUPTED, INTERRUPTED)
    assert time.monotonic() - begun_s < 50
    assert not [child for child in multiprocessing.active_children() if child.is_alive()]


def test_an_interrupted_run_is_kept_as_far_as_it_came(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first half of a long run is worth looking at too."""
    monkeypatch.setattr("fedsched.sim.running.TOLD_EVERY", 1)
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
