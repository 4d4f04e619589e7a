"""Measured speeds: what was measured is met, what lies between is interpolated as DL2's reference does it."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedsched.errors import InvalidInput, NotFound
from fedsched.sim.dl2_workload import EPOCH_SAMPLES
from fedsched.sim.speeds.points import read_points
from fedsched.sim.speeds.table import MeasuredSpeeds, MeasuredSurface
from tests.sim import dl2_golden
from tests.sim.speeds.jobs import at, job

HEADER = "model,num_ps,num_worker,total_speed_batches_per_s"


def written(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "speed.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_dl2s_table_gives_the_references_speeds(data_dir: Path, golden_dir: Path) -> None:
    """Its schedulers decide some ties in the last of these decimals."""
    speeds = MeasuredSpeeds(read_points(data_dir / "dl2" / "speed.csv"), EPOCH_SAMPLES)
    grid = dl2_golden.speed_grid(golden_dir)
    wrong = {
        at: (speed, grid[at])
        for at in sorted(grid)
        # The table has six digits; dssm's sums above 1000 had more.
        if abs((speed := speeds.samples_per_s(*at)) - grid[at]) > (0.01 if at[0] == "dssm" else 0)
    }
    assert wrong == {}
    assert len(grid) == 8 * 33 * 33


def test_a_grid_of_interpolated_speeds_is_a_table_too(golden_dir: Path) -> None:
    """Who has only such a grid need not interpolate again, and what it holds comes out as it went in."""
    speeds = MeasuredSpeeds(read_points(golden_dir / "dl2" / "speed_grid.csv"), EPOCH_SAMPLES)
    for where, speed in dl2_golden.speed_grid(golden_dir).items():
        assert speeds.samples_per_s(*where) == speed


def test_epochs_are_samples_over_the_epochs_length_in_the_references_order() -> None:
    """speed * time / length, not speed / length * time: they differ in the last bit."""
    speeds = MeasuredSpeeds({"any": {(1, 1): 15.783, (1, 2): 15.404}}, {"any": 115})
    assert speeds.epochs(job(), at(1), 1200.0) == 15.783 * 1200.0 / 115
    assert speeds.epochs(job(), at(0), 1200.0) == 0
    assert speeds.epochs(job(), at(2, ps=0), 1200.0) == 0


def test_what_was_measured_is_met_and_nothing_is_below_zero() -> None:
    """A negative speed would let a job lose epochs."""
    points = {(1, 1): 10.0, (2, 2): 0.0, (3, 3): 10.0, (6, 6): 0.5}
    surface = MeasuredSurface(points)
    assert [surface(*at) for at in points] == list(points.values())
    assert surface(2, 3) >= 0
    assert min(surface(ps, workers) for ps in range(1, 20) for workers in range(1, 20)) == 0
    assert MeasuredSurface({(2, 2): 7.0})(9, 1) == 7.0


def test_failed_measurements_can_be_left_out() -> None:
    """A zero that was a failed measurement drags everything around it down."""
    points = {"any": {(1, 1): 10.0, (1, 2): 0.0, (1, 3): 10.0, (3, 1): 10.0}}
    kept = MeasuredSpeeds(points, {"any": 1})
    left_out = MeasuredSpeeds(points, {"any": 1}, keep_failed=False, digits=None)
    assert kept.samples_per_s("any", 1, 2) == 0
    assert left_out.samples_per_s("any", 1, 2) > 9


def test_a_job_type_without_speeds_is_named_with_those_that_have_some() -> None:
    """A mistyped job type must not look like a slow job."""
    speeds = MeasuredSpeeds({"vgg": {(1, 1): 1.0}, "cnn": {(1, 1): 1.0}}, {"vgg": 10})
    with pytest.raises(InvalidInput, match="no speed is known for job type vgh; known are vgg"):
        speeds.epochs(job("vgh"), at(1), 1.0)
    with pytest.raises(InvalidInput, match="no epoch is given for job type cnn"):
        speeds.epochs(job("cnn"), at(1), 1.0)


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        (["model,num_ps,speed", "a,1,2"], r"speed.csv:1: the header is 'model,num_ps,speed'"),
        ([HEADER], "holds no measurement"),
        ([HEADER, "a,1,1"], r"speed.csv:2: the row has 3 fields"),
        ([HEADER, "a,1,1,2.0", "a,1,2,fast"], r"speed.csv:3: total_speed_batches_per_s is 'fast'"),
        ([HEADER, "a,1,1,nan"], r"speed.csv:2: total_speed_batches_per_s is 'nan'"),
        ([HEADER, "a,1,1,-2"], r"speed.csv:2: total_speed_batches_per_s is '-2'"),
        ([HEADER, "a,0,1,2.0"], r"speed.csv:2: num_ps is '0'; a whole number from 1 to 10000"),
        ([HEADER, "a,1,1e3,2.0"], r"speed.csv:2: num_worker is '1e3'"),
        ([HEADER, "a,1,1,2.0", "", "a,1,1,3.0"], r"speed.csv:4: a with 1 parameter servers and 1 workers was measured"),
    ],
)
def test_a_row_that_cannot_be_used_is_named_by_line_and_column(tmp_path: Path, lines: list[str], problem: str) -> None:
    """Tables come from scripts; nobody finds the fault in 800 rows by eye."""
    with pytest.raises(InvalidInput, match=problem):
        read_points(written(tmp_path, *lines))


def test_a_table_that_is_not_there_or_not_text_is_said_to_be_so(tmp_path: Path) -> None:
    """Both happen when a download failed."""
    with pytest.raises(NotFound, match="there is no table"):
        read_points(tmp_path / "none.csv")
    (tmp_path / "speed.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidInput, match="cannot read"):
        read_points(tmp_path / "speed.csv")
