"""A policy that does not answer ends its own run, in whichever way it does not answer; what was done before is kept."""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from fedsched.config import parse
from fedsched.policy.tetris import Tetris
from fedsched.sim.deadline import StepDeadline
from fedsched.sim.experiment import ExperimentConfig
from fedsched.sim.running import Request, lost, perform
from fedsched.sim.workers import Share, over_cores

DECIDE = Tetris.decide
LIMIT_S = 0.5


def request(**changes: object) -> Request:
    plain = {
        "clusters": [{"name": "one", "nodes": [{"name": "n", "cpus": 6}]}],
        "workload": {"jobs": 6, "gap_s": 30, "alone_s_max": 40},
        "policies": {"tetris": {"name": "tetris"}},
        "decision_s_max": LIMIT_S,
        **changes,
    }
    return Request("t", parse(ExperimentConfig, plain, "test"), "tetris", 0)


def hang_in(way: Callable[[], None], after_slot: int = 12) -> Callable[..., Any]:
    """Decides as ever up to a slot, and then never again."""

    def decide(self: Tetris, observation: Any, budget: Any) -> Any:
        if observation.slot > after_slot:
            way()
        return DECIDE(self, observation, budget)

    return decide


def compute() -> None:
    while True:
        pass


def wait() -> None:
    time.sleep(1e6)


def hold_on() -> None:
    """Tries again whatever happens."""
    while True:
        try:
            compute()
        except Exception:
            continue


def hold_fast() -> None:
    """Tries again whatever happens, even if it is told to leave."""
    while True:
        with suppress(BaseException):
            compute()


def sink() -> None:
    """Lets no other thread run, and no signal through."""
    sum(itertools.repeat(0))


@pytest.mark.parametrize("way", [compute, wait, hold_on])
def test_a_policy_that_never_answers_ends_its_run_and_what_was_done_is_kept(
    way: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One endless loop must not cost the night's other runs, nor this one's first half."""
    whole = perform(request())
    monkeypatch.setattr(Tetris, "decide", hang_in(way))
    run = perform(request())
    assert "no answer within 0.5 s; it was in test_deadline.py, line" in run.partial
    assert 0 < int(run.jobs.over.sum()) < 6
    done = run.jobs.over
    assert run.jobs.finish_s[done].tolist() == whole.jobs.finish_s[: len(done)][done].tolist()
    assert run.series
    assert run.lanes


def test_where_the_fallback_may_decide_it_does_as_it_would_live(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tetris, "decide", hang_in(wait, after_slot=15))
    run = perform(request(on_bad_answer="fall_back", slots_max=40))
    assert run.fallbacks > 0
    assert "no answer" not in run.partial


def never_return(one: Request, share: Share) -> Any:
    """In a worker: the policies of the first runs never return, from where nothing can get them."""
    if one.seed < len(HOPELESS):
        Tetris.decide = hang_in(HOPELESS[one.seed])  # type: ignore[method-assign]
    return perform(one, share)


HOPELESS = (sink, hold_fast)


def test_a_policy_that_nothing_can_interrupt_ends_its_process_and_its_run_only(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Foreign code that holds the interpreter cannot be asked for anything any more; the others go on."""
    runs = over_cores(never_return, [replace(request(), seed=seed) for seed in range(4)], lost, workers=2)
    ended = "its process ended with exit code 1 in the middle of it"
    assert [run.partial for run in runs] == [ended, ended, "", ""]
    told = capfd.readouterr().err
    assert told.count("Timeout (") == 2
    assert all(f" in {way.__name__}\n" in told for way in HOPELESS)


def test_a_run_in_time_is_untouched_by_its_deadline() -> None:
    """Results must not depend on how fast the machine is, nor leave anything behind in the process."""
    before = signal.getsignal(signal.SIGVTALRM)
    tight, loose = perform(request(decision_s_max=20.0)), perform(request(decision_s_max=86_400.0))
    assert tight.jobs.finish_s.tolist() == loose.jobs.finish_s.tolist()
    assert not tight.partial
    assert signal.getsignal(signal.SIGVTALRM) is before


def test_many_quick_steps_may_take_longer_than_the_deadline_together() -> None:
    """A run of an hour is no step of an hour: `TooLong` would be raised in here."""
    with StepDeadline(1.0) as deadline:
        for _ in range(30):
            time.sleep(0.04)
            deadline.steps += 1
    assert deadline.steps == 30
