"""A policy can be anybody's code: whatever it answers, its run ends with one clear reason and keeps what it did."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from fedsched.config import parse
from fedsched.core.decision import Decision, Ranking
from fedsched.core.ids import JobId
from fedsched.core.job import Allocation
from fedsched.policy.disciplines import Fifo
from fedsched.policy.tetris import Tetris
from fedsched.sim.experiment import ExperimentConfig, trace_experiment
from fedsched.sim.running import Request, perform
from fedsched.sim.traces.names import TraceFormat

DECIDE, RANK = Tetris.decide, Fifo.rank
GOOD_DECISIONS = 4
NAN: Any = math.nan


def request(policy: str, clock: str) -> Request:
    plain = {
        "clusters": [{"name": "one", "nodes": [{"name": "n", "cpus": 9}]}],
        "workload": {"jobs": 8, "gap_s": 30, "alone_s_max": 40},
        "policies": {policy: {"name": policy}},
        "clock": clock,
    }
    return Request("t", parse(ExperimentConfig, plain, "test"), policy, 0, check=True)


def first(decision: Decision, allocation: Any) -> Decision:
    """The same with another allocation for its first job."""
    (job, _), *others = decision.allocations
    return replace(decision, allocations=((job, allocation), *others))


def raising(error: BaseException) -> Callable[[Decision], Decision]:
    def answer(decision: Decision) -> Decision:
        raise error

    return answer


ANSWERS: dict[str, tuple[Callable[[Decision], Any], str]] = {
    "throws": (raising(ValueError("no idea")), r"ValueError: no idea \(test_bad_policies\.py, line \d+\)"),
    "exits": (raising(SystemExit(3)), r"SystemExit: 3"),
    "recurses": (raising(RecursionError("too deep")), r"RecursionError: too deep"),
    "wants memory": (raising(MemoryError()), r"MemoryError"),
    "nothing": (lambda decision: None, r"answered with NoneType; a Decision was expected"),
    "a number": (lambda decision: math.nan, r"answered with float"),
    "too many workers": (lambda decision: first(decision, Allocation(10_000, 1)), r"Allocation|allowed are"),
    "no number of workers": (
        lambda decision: first(decision, Allocation(NAN, 1)),
        r"Expected `int`, got `float` - at `\$\.allocations\[0\]\[1\]\.workers`",
    ),
    "endlessly many": (lambda decision: first(decision, Allocation(math.inf, 1)), r"Expected `int`, got `float`"),  # type: ignore[arg-type]
    "not whole": (lambda decision: first(decision, Allocation(1.5, 1)), r"Expected `int`, got `float`"),  # type: ignore[arg-type]
    "no allocation": (lambda decision: first(decision, "two"), r"Expected `object`, got `str`"),
    "a job that is not there": (
        lambda decision: replace(decision, allocations=((JobId("ghost"), Allocation(1, 1)),)),
        r"names job ghost, which is not in this slot",
    ),
    "a job twice": (lambda decision: replace(decision, allocations=decision.allocations * 2), r"names a job twice"),
    "another slot": (lambda decision: replace(decision, slot=decision.slot + 1), r"its answer is for slot"),
    "nobody may run": (
        lambda decision: replace(decision, allocations=()),
        r"it runs nothing, although the minimum of job",
    ),
}


@pytest.mark.parametrize("clock", ["slots", "exact"])
@pytest.mark.parametrize("way", ANSWERS)
def test_a_bad_answer_ends_the_run_with_its_reason_and_keeps_what_was_done(
    way: str, clock: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reason names the policy, the slot and what is wrong; no stack, no crash, and no credit for a fallback."""
    answer, expected = ANSWERS[way]
    good = 0

    def decide(self: Tetris, observation: Any, budget: Any) -> Any:
        nonlocal good
        decision = DECIDE(self, observation, budget)
        if good < GOOD_DECISIONS or not decision.allocations:
            good += 1
            return decision
        return answer(decision)

    whole = perform(request("tetris", clock))
    assert not whole.partial
    monkeypatch.setattr(Tetris, "decide", decide)
    run = perform(request("tetris", clock))
    assert "\n" not in run.partial
    assert "policy tetris (version" in run.partial
    assert run.partial.startswith("in slot ")
    assert re.search(expected, run.partial), run.partial
    assert len(run.jobs) > 0
    assert run.plain()["partial"] is True
    ended = run.jobs.over
    assert run.jobs.finish_s[ended].tolist() == whole.jobs.finish_s[: len(ended)][ended].tolist()


RANKINGS: dict[str, tuple[Callable[[Ranking], Any], str]] = {
    "no number": (
        lambda ranking: replace(ranking, ranks=tuple((job, (math.nan,)) for job, _ in ranking.ranks)),
        r"by \(nan,\); a key is a tuple of numbers",
    ),
    "no key": (lambda ranking: replace(ranking, ranks=tuple((job, ()) for job, _ in ranking.ranks)), r"by \(\)"),
    "one too few": (lambda ranking: replace(ranking, ranks=ranking.ranks[1:]), r"it ranks 0 jobs; asked were 1"),
    "somebody else": (
        lambda ranking: replace(ranking, ranks=((JobId("ghost"), (1.0,)), *ranking.ranks[1:])),
        r"asked were",
    ),
    "nothing": (lambda ranking: None, r"it gives no ranks"),
}


@pytest.mark.parametrize("way", RANKINGS)
def test_bad_ranks_end_the_run_with_their_reason(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that does not compare would order the queue at random from then on."""
    answer, expected = RANKINGS[way]
    good = 0

    def rank(self: Fifo, observation: Any) -> Any:
        nonlocal good
        good += 1
        ranking = RANK(self, observation)
        return ranking if good <= GOOD_DECISIONS else answer(ranking)

    trace = tmp_path / "trace.csv"
    trace.write_text("job_id,num_gpu,submit_s,duration_s\n" + "".join(f"j{n},1,{9 * n},20\n" for n in range(12)))
    rigid = trace_experiment(trace, TraceFormat.CSV, nodes=1, gpus_per_node=2, clock="exact", slot_length_s=10.0)
    monkeypatch.setattr(Fifo, "rank", rank)
    run = perform(Request("t", rigid, "fifo", 0, check=True))
    assert re.search(expected, run.partial), run.partial
    assert "policy fifo (version" in run.partial
    assert len(run.jobs) > 0
