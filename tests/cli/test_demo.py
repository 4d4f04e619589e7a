"""`fedsched demo` tells the truth: what it promises is checked, and its exit code says so."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fedsched import demo
from fedsched.core.ids import JobId
from fedsched.core.job import JobPhase, JobSpec, JobStatus, Range, Reason, Transition
from fedsched.core.resources import Resources
from fedsched.core.rounds import RoundOutcome, RoundRecord
from fedsched.core.views import Job
from fedsched.demo import CLUSTERS, JOBS, DemoSummary

ONE = Resources(1000, 100)


def job(number: int, phase: JobPhase = JobPhase.SUCCEEDED) -> Job:
    job_id = JobId(str(number))
    return Job(
        JobSpec(job_id, f"job-{number}", "x", Range(1, 1), Range(1, 1), ONE, ONE, 1.0), JobStatus(job_id, phase=phase)
    )


GOOD = DemoSummary(
    jobs=tuple(job(number) for number in range(len(JOBS))),
    resizes=2,
    rounds=(RoundRecord(1, "dl2", 1, 2, RoundOutcome.COMBINED, 2, (), (), (), 1.0, 2.0),),
    versions_before=tuple((name, 1) for name in CLUSTERS),
    versions_after=tuple((name, 2) for name in CLUSTERS),
    lost=0,
    doubled=0,
    trace_file="trace.jsonl",
)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"jobs": (*GOOD.jobs[1:], job(0, JobPhase.FAILED))}, "job 0 Failed"),
        ({"jobs": GOOD.jobs[1:]}, "only 5 of 6 jobs"),
        ({"resizes": 0}, "no job was resized"),
        ({"rounds": ()}, "no round combined"),
        ({"versions_after": GOOD.versions_before}, "not every agent loaded"),
        ({"versions_after": GOOD.versions_after[:1]}, "not every agent loaded"),
        ({"versions_after": ()}, "not every agent loaded"),
        ({"lost": 1}, "1 job(s) lost"),
        ({"doubled": 1}, "1 job(s) ran twice"),
    ],
)
def test_whatever_did_not_happen_as_promised_is_a_problem(changes: dict[str, Any], problem: str) -> None:
    """A demo that says "done" whatever happened proves nothing."""
    assert GOOD.problems == ()
    (found,) = replace(GOOD, **changes).problems
    assert problem in found


def step(job_id: str, source: JobPhase, target: JobPhase, attempt: int = 0) -> Transition:
    return Transition(1, 1.0, "test", JobId(job_id), attempt, 1, source, target, Reason.NONE)


def test_a_job_is_doubled_by_two_dispatches_or_two_starts_of_one_attempt() -> None:
    """A second attempt after a preemption is none; the same attempt twice is two runs at once."""
    given = step("1", JobPhase.QUEUED, JobPhase.DISPATCHED)
    first, second = (step("1", JobPhase.DISPATCHED, JobPhase.STARTING, attempt) for attempt in (1, 2))
    other = step("2", JobPhase.DISPATCHED, JobPhase.STARTING, 1)
    assert demo._doubled([given, first, second, other]) == 0
    assert demo._doubled([given, first, given]) == 1
    assert demo._doubled([given, first, other, first, other]) == 2
