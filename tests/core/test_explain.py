"""What a running job's user should look at."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from fedsched.core.cluster import ClusterRecord
from fedsched.core.explain import explain
from fedsched.core.ids import ClusterName, JobId, NodeName, TaskName
from fedsched.core.job import JobPhase, JobSpec, JobStatus, Progress, Range, TaskPlacement
from fedsched.core.resources import Resources
from fedsched.core.routing import CandidateCluster
from fedsched.core.views import Job


def told(progress: Progress, phase: JobPhase = JobPhase.RUNNING) -> str:
    spec = JobSpec(JobId("1"), "j", "python x.py", Range(1, 2), Range(1, 1), Resources(1000), Resources(1000), 1.0)
    placement = (TaskPlacement(TaskName("worker-0"), NodeName("n1")),)
    status = JobStatus(JobId("1"), phase, cluster=ClusterName("c"), placement=placement, progress=progress)
    return "\n".join(explain(Job(spec, status), [], [], 0.0).evidence)


@pytest.mark.parametrize(
    ("progress", "words"),
    [
        (
            Progress(1.0, 9, idle_s=41.6),
            "no step for 42 s when it was last heard of: does the script wait for something?",
        ),
        (
            Progress(1.0, 9, loss=float("nan")),
            "the loss is nan: the training has diverged; a lower learning rate may help",
        ),
        (Progress(1.0, 9, loss=float("inf")), "the loss is inf: the training has diverged"),
        (
            Progress(1.0, 9, complaint="the checkpoint of step 9 could not be written: No space left on device"),
            "No space left on device",
        ),
    ],
)
def test_what_is_wrong_with_a_job_that_runs_is_told(progress: Progress, words: str) -> None:
    """`Running` and nothing else lets a user wait for days."""
    assert words in told(progress)


def test_a_job_that_is_well_is_told_without_worries() -> None:
    """Advice that always comes is read by nobody."""
    assert told(Progress(1.0, 9, loss=0.5)) == told(Progress(1.0, 9, loss=0.5, idle_s=0.0))
    for sign in ("no step", "diverged", "could not"):
        assert sign not in told(Progress(1.0, 9, loss=0.5))


def test_a_job_that_is_over_no_longer_hangs() -> None:
    """What it waited for does not matter any more; that it diverged does."""
    words = told(Progress(1.0, 9, loss=float("nan"), idle_s=100.0), JobPhase.FAILED)
    assert "no step" not in words
    assert "diverged" in words


def test_a_job_that_the_heuristic_takes_care_of_is_told_so_and_why() -> None:
    """Whoever wonders about a job's size must not look for the reason in a policy that did not decide it."""
    spec = JobSpec(JobId("1"), "j", "python x.py", Range(1, 2), Range(1, 1), Resources(1000), Resources(1000), 1.0)
    status = JobStatus(JobId("1"), JobPhase.RUNNING, cluster=ClusterName("c"))
    record = ClusterRecord(ClusterName("c"), 1, "h/1/1", "0.1.0", "h", 1, (), Resources(), 0, 1, "dl2", 4, 9, 0.0)
    fine = explain(Job(spec, status), [], [CandidateCluster(ClusterName("c"), record, True)], 0.0).evidence
    assert not any("heuristic" in line for line in fine)
    fallen = replace(record, decisions=40, fallbacks=3, fallback="policy dl2 (version 4): it gives job 7 nothing")
    told = explain(Job(spec, status), [], [CandidateCluster(ClusterName("c"), fallen, True)], 0.0).evidence
    assert "c: the heuristic decided its newest slot: policy dl2 (version 4): it gives job 7 nothing" in told
    assert "c: the heuristic decided 3 of 40 slots" in told
