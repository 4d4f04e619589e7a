"""AFS-L's rule, and the order of its fold."""

from __future__ import annotations

from fedsched.core.decision import JobView, SpeedSample
from fedsched.core.job import Allocation
from fedsched.policy.afs import Afs, Contender, chosen, preferred
from tests.policy.deciding import decide
from tests.policy.observations import job

LINEAR = {workers: float(workers) for workers in range(1, 9)}
POOR = {1: 1.0, 2: 1.2, 3: 1.3, 4: 1.35, 5: 1.37, 6: 1.38, 7: 1.385, 8: 1.39}


def speeds(table: dict[int, float]) -> tuple[SpeedSample, ...]:
    return tuple(SpeedSample(workers, 0, speed) for workers, speed in table.items())


def allreduce(name: str, table: dict[int, float], **fields: object) -> JobView:
    """A job without parameter servers of a type of its own, whose speeds are all known."""
    given = {"job_type": name, "ps": (0, 0), "workers": (1, 8), "speeds": speeds(table), **fields}
    return job(name, **given)  # type: ignore[arg-type]


def candidate(name: str, left: float, speed: float, next_speed: float) -> Contender:
    return Contender(job(name, epochs=left), Allocation(1), speed, next_speed)


def test_of_two_jobs_that_wait_the_shorter_one_is_preferred_and_the_earlier_where_they_are_alike() -> None:
    """Length is time, not epochs: the fast job with more of them is the shorter one."""
    fast, slow = candidate("a", 50.0, 0.0, 10.0), candidate("b", 10.0, 0.0, 1.0)
    assert preferred(fast, slow) is fast
    assert preferred(slow, fast) is fast
    twin = candidate("c", 50.0, 0.0, 10.0)
    assert preferred(fast, twin) is fast


def test_the_longer_job_wins_only_where_its_gain_is_relatively_greater() -> None:
    """The two sides are divided by different speeds; copies that divide both by the new one decide wrongly here."""
    short, long = candidate("a", 10.0, 1.0, 1.6), candidate("b", 100.0, 1.0, 2.0)
    # b: (2 - 1) / 2 = 0.5; a: (1.6 - 1) / 1 = 0.6, but (1.6 - 1) / 1.6 = 0.375.
    assert preferred(short, long) is short
    assert preferred(long, short) is short
    assert preferred(candidate("a", 10.0, 1.0, 1.4), long) is long


def test_the_relation_has_circles_so_the_fold_goes_by_arrival() -> None:
    """x beats y, y beats z and z beats x: the answer hangs on the order, which must be one that everybody knows."""
    x, y, z = candidate("x", 1.0, 1.0, 1.34), candidate("y", 2.0, 1.0, 1.5), candidate("z", 3.0, 1.0, 5 / 3)
    assert [preferred(x, y), preferred(y, z), preferred(z, x)] == [x, y, z]
    assert chosen([x, y, z]) == 2
    assert chosen([y, z, x]) == 2
    assert chosen([z, x, y]) == 2


def test_who_scales_better_gets_more_and_who_scales_alike_gets_as_much() -> None:
    """That is what AFS is for: neither the short job nor the many-worker job takes all."""
    alike = [allreduce("a", LINEAR, epochs=10.0), allreduce("b", LINEAR, epochs=100.0)]
    assert decide(Afs(), [8], alike) == {"a": "4w+0ps", "b": "4w+0ps"}
    given = decide(Afs(), [8], [allreduce("a", POOR, epochs=10.0), allreduce("b", LINEAR, epochs=100.0)])
    assert int(given["b"][0]) >= 6
    assert set(given) == {"a", "b"}


def test_a_unit_that_slows_a_job_down_is_not_given() -> None:
    """Tasks that only cost keep other jobs out."""
    slowed = {1: 1.0, 2: 0.9, 3: 0.7, 4: 0.5}
    assert decide(Afs(), [8], [allreduce("a", slowed)]) == {"a": "1w+0ps"}


def test_a_job_of_higher_priority_is_served_first() -> None:
    jobs = [allreduce("a", LINEAR, epochs=1.0), allreduce("b", LINEAR, epochs=100.0, priority=90)]
    assert decide(Afs(), [8], jobs) == {"b": "8w+0ps"}
