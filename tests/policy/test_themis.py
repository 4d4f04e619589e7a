"""Finish-time fairness: who is offered what, and what it leads to."""

from __future__ import annotations

import pytest

from fedsched.core.decision import JobView, SpeedSample
from fedsched.core.job import Allocation
from fedsched.core.placement import TentativePlacement
from fedsched.core.resources import Resources
from fedsched.policy.optimus import SpeedCurve
from fedsched.policy.themis import Themis, ThemisOptions, fair_speed
from tests.policy.observations import job, node, observation

SLOT_S = 2.0
"""Of the hand-made observations."""
ALONE = SpeedCurve((1.0, 0.0, 0.0, 0.0, 0.0))
"""Perfect scaling: one epoch a second and worker."""


def allreduce(name: str, waited_s: float = 0.0, **fields: object) -> JobView:
    given = {
        "ps": (0, 0),
        "workers": (1, 4),
        "speeds": (SpeedSample(1, 0, 1.0),),
        "arrived_s": 100 - waited_s,
        **fields,
    }
    return job(name, **given)  # type: ignore[arg-type]


def decide(policy: Themis, cpus: int, jobs: list[JobView]) -> dict[str, str]:
    """Allocations at second 100; `waited_s` of the jobs below says when they came."""
    seen = observation([node("n", cpus)], jobs, time_s=100.0)
    decision = policy.decide(seen, TentativePlacement(seen, keep_running=False))
    return {str(job_id): str(allocation) for job_id, allocation in decision.allocations}


def test_the_fair_speed_is_that_of_an_equal_part_of_the_cluster() -> None:
    """Too high and everybody counts as wronged, too low and nobody does."""
    cluster = Resources(8000, 8000)
    wide = allreduce("a", workers=(1, 8))
    assert fair_speed(wide, ALONE, cluster, jobs=2) == pytest.approx(4.0)
    assert fair_speed(allreduce("a", workers=(1, 3)), ALONE, cluster, jobs=2) == pytest.approx(3.0)
    assert fair_speed(allreduce("a", workers=(4, 8)), ALONE, cluster, jobs=4) == pytest.approx(4.0 / 2)


def test_the_worst_off_is_offered_everything_first() -> None:
    """A job that waited long against its length comes before those that have hardly begun to wait."""
    jobs = [allreduce("a", waited_s=6.0), allreduce("b", waited_s=18.0), allreduce("c", waited_s=2.0)]
    assert decide(Themis(), 4, jobs) == {"b": "4w+0ps"}
    old_and_long = allreduce("a", epochs=900.0, waited_s=40.0)
    assert decide(Themis(), 4, [old_and_long, allreduce("b", waited_s=18.0)]) == {"b": "4w+0ps"}


def test_the_filter_decides_how_many_are_offered_at_once() -> None:
    """With f = 0 everybody bids at once and gets a part; with f = 0.8 one of five takes what it can use."""
    jobs = [allreduce(name, waited_s=10.0) for name in "abcde"]
    assert decide(Themis(ThemisOptions(fairness=0.0)), 10, jobs) == dict.fromkeys("abcde", "2w+0ps")
    given = decide(Themis(), 10, jobs)
    assert sorted(given.values()).count("4w+0ps") == 1


def test_what_the_worst_off_leave_goes_to_the_others() -> None:
    """Room that nobody was offered would be idle until the next slot."""
    jobs = [allreduce("a", waited_s=18.0), allreduce("b"), allreduce("c")]
    assert decide(Themis(), 8, jobs) == {"a": "4w+0ps", "b": "2w+0ps", "c": "2w+0ps"}


@pytest.mark.parametrize("jobs", [2, 5, 12])
def test_identical_jobs_end_no_later_than_alone_on_their_part_of_the_cluster(jobs: int) -> None:
    """The sharing incentive, which the paper is about: nobody should wish for a private part of the cluster."""
    policy, workers_s = Themis(), 40.0
    done = dict.fromkeys([f"job-{index:02}" for index in range(jobs)], 0.0)
    ended: dict[str, int] = {}
    slot = 0
    while done:
        views = [
            allreduce("a", job_id=name, arrived_s=0.0, epochs=workers_s, progress_epochs=epochs)
            for name, epochs in done.items()
        ]
        seen = observation([node("n", 4)], views, slot=slot, time_s=slot * SLOT_S)
        decision = policy.decide(seen, TentativePlacement(seen, keep_running=False))
        slot += 1
        for name, allocation in decision.allocations:
            done[name] += ALONE(Allocation(allocation.workers)) * SLOT_S
            if done[name] >= workers_s:
                ended[name] = slot
                del done[name]
    alone_s = workers_s * jobs / 4
    slack_s = SLOT_S * jobs / 4 + SLOT_S  # Leases are whole slots, and each job may lose a part of one to rounding.
    assert max(ended.values()) * SLOT_S <= alone_s + slack_s
