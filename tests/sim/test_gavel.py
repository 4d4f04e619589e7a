"""Gavel's cases on the product's own world: core, loop, placement and moves between types, in rounds of 360 s."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.policy import gavel_rounds
from tests.sim import gavel_world


@pytest.mark.parametrize(
    ("aware", "average", "median"),
    [
        # Measured: average +0.13 %, median of the jobs' differences 0.005 %. Rounds are 360 s here and a little less
        # there, where they end when the last job has done its whole steps; ties do the rest.
        (True, 0.004, 0.0005),
        # Blind to types all jobs of one size have equal shares, and rounding breaks ties in Gavel's simulator.
        # Measured: +0.5 %, median 3.5 %.
        (False, 0.015, 0.06),
    ],
)
def test_completion_times_are_those_of_gavels_simulator(
    golden_dir: Path, data_dir: Path, aware: bool, average: float, median: float
) -> None:
    """Rounds move jobs between types on a full cluster; a core that cannot do that gives other schedules."""
    speeds = gavel_rounds.read_speeds(data_dir / "gavel" / "simulation_throughputs.json.gz")
    jobs = gavel_rounds.read_trace(golden_dir / "gavel" / "max_min_fairness.trace")
    policy = gavel_rounds.AsThere(speeds, aware=aware)
    found = gavel_world.run(policy, jobs, speeds, check=True)
    assert found.fallbacks == 0
    assert found.stops > 100
    difference = gavel_rounds.compare(found.jct_s, golden_dir, aware)
    assert abs(difference.average) <= average
    assert difference.median <= median
    assert difference.correlation >= 0.97
