"""The allocator by marginal value: what is counted out at once is what would be counted out step by step."""

from __future__ import annotations

from unittest import mock

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fedsched.core.ids import JobId
from fedsched.core.job import NO_TASKS, Allocation
from fedsched.core.resources import Resources
from fedsched.policy import marginal
from fedsched.policy.marginal import Claim, Curve, per_unit, spend, staircase
from tests.policy.observations import job

CAPACITY = Resources(cpu_milli=40_000, memory_mib=60_000, gpu_milli=8_000)
DEMANDS = st.builds(Resources, st.integers(0, 3000), st.integers(0, 4000), st.sampled_from([0, 0, 500, 1000]))


class Plenty:
    """A budget that finds a place for everything."""

    def __init__(self, held: tuple[tuple[JobId, Allocation], ...]) -> None:
        self.held = dict(held)

    def grant(self, job_id: JobId, workers: int = 0, ps: int = 0, accelerator: str = "") -> bool:
        self.held[job_id] = self.held.get(job_id, Allocation()) + Allocation(workers, ps)
        return True

    def allocation(self, job_id: JobId) -> Allocation:
        return self.held.get(job_id, Allocation())

    def allocations(self) -> tuple[tuple[JobId, Allocation], ...]:
        return tuple(sorted(self.held.items()))


@st.composite
def wishes(draw: st.DrawFn) -> list[tuple[Claim, Allocation]]:
    """Jobs that may have up to four tasks of each role, some of which hold one of each already."""
    found = []
    for number in range(draw(st.integers(1, 8))):
        worker, ps = draw(DEMANDS), draw(DEMANDS)
        workers, servers = (axis.ravel() for axis in np.meshgrid(np.arange(1, 5), np.arange(5), indexing="ij"))
        rates = np.array(draw(st.lists(st.integers(1, 9), min_size=20, max_size=20)), dtype=np.float64)
        curve = Curve(workers, servers, rates, per_unit(worker, CAPACITY), per_unit(ps, CAPACITY))
        have = draw(st.sampled_from([Allocation(), Allocation(1, 1)]))
        view = job(
            f"job-{number}",
            workers=(1, 4),
            ps=(0, 4),
            worker_demand=worker,
            ps_demand=ps,
            priority=draw(st.sampled_from([50, 50, 60])),
        )
        stairs = staircase(curve, {}, start=(have.workers, have.ps))
        found.append((Claim(view, curve, draw(st.sampled_from([0.5, 1.0, 1.0, 2.0])), stairs, NO_TASKS), have))
    return found


@given(wishes())
def test_steps_counted_out_at_once_are_those_counted_out_one_by_one(drawn: list[tuple[Claim, Allocation]]) -> None:
    """A faster way to the same allocations, or a job loses what it was worth most to."""
    asked = [wish for wish, _ in drawn]
    held = tuple((wish.view.job_id, have) for wish, have in drawn if have)
    outcomes = []
    for at_once in (True, False):
        budget = Plenty(held)
        with mock.patch.object(marginal._Room, "_take_first", marginal._Room._take_first if at_once else _none_first):
            spend(asked, [wish.view for wish in asked], CAPACITY, budget)
        outcomes.append(budget.allocations())
    assert outcomes[0] == outcomes[1]


def _none_first(room: object, steps: object, numbers: object) -> int:
    return 0
