"""Workloads in a scenario: a trace or parameters, where they start and end, and one error for what is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedsched.config import parse
from fedsched.errors import FedschedError, InvalidConfiguration, InvalidInput, InvalidTrace, NotFound
from fedsched.sim.ports import SimulatedJob, Workload
from fedsched.sim.traces import formats
from fedsched.sim.traces.config import FittedWorkloadConfig, TraceWorkloadConfig
from fedsched.sim.traces.names import TraceFormat
from fedsched.sim.traces.record import Refusals

HEADER = "job_id,num_gpu,submit_s,duration_s,deadline_s\n"


def drawn(workload: Workload, seed: int = 1) -> list[SimulatedJob]:
    return list(workload.draw(seed))


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(HEADER + "b,8,200,60,300\na,1,100,60,\nc,16,300,60,\n")
    return path


def test_a_trace_begins_with_its_first_job_in_order_of_arrival(trace: Path) -> None:
    """The world takes jobs as they come; a month of nothing before the first would be simulated too."""
    jobs = drawn(TraceWorkloadConfig(file=trace.name, cluster="east").workload(trace.parent))

    assert [(job.spec.job_id, job.spec.submitted_s) for job in jobs] == [("a", 0), ("b", 100), ("c", 200)]
    assert {job.origin for job in jobs} == {"east"}


def test_a_window_counts_from_its_own_start_and_leaves_out_its_end(trace: Path) -> None:
    """Jobs at a border must not be in two windows; and several clusters' windows must begin at one moment."""
    config = TraceWorkloadConfig.model_validate({"file": str(trace), "window": {"start_s": 150, "end_s": 300}})

    assert [(job.spec.job_id, job.spec.submitted_s) for job in drawn(config.workload())] == [("b", 50)]


def test_a_higher_rate_brings_jobs_together_and_leaves_them_their_time(trace: Path) -> None:
    """Load is changed by arrivals alone; jobs and the slack of their deadlines stay as they were."""
    workload = TraceWorkloadConfig(file=str(trace), rate=4).workload()

    assert [(job.submit_s, job.duration_s) for job in workload.records] == [(0, 60), (25, 60), (50, 60)]
    assert workload.records[1].deadline_s == 125


@pytest.mark.parametrize("option", [{"throughputs": "t.csv"}, {"worker_type": "k80"}])
def test_options_of_one_format_are_refused_with_any_other(trace: Path, option: dict[str, Any]) -> None:
    """Ignored, they would let who named them believe that durations had been worked out anew."""
    told = "throughputs and a worker type are for traces of format gavel; this one is of format csv"
    with pytest.raises(InvalidConfiguration, match=told):
        parse(TraceWorkloadConfig, {"file": str(trace), **option}, "test")
    with pytest.raises(InvalidInput, match=told):
        formats.read(trace, TraceFormat.CSV, Refusals(), **option)
    assert parse(TraceWorkloadConfig, {"file": str(trace), "format": "gavel", **option}, "test").format == "gavel"


def test_a_malformed_row_stops_a_simulation_and_says_how_to_leave_it_out(tmp_path: Path) -> None:
    """A result on a trace with holes that nobody knows of cannot be compared with anything."""
    path = tmp_path / "trace.csv"
    path.write_text(HEADER + "a,1,0,60,\nb,x,0,60,\nc,0,0,60,\nd,1,-1,60,\n")

    with pytest.raises(InvalidTrace) as problem:
        drawn(TraceWorkloadConfig(file=str(path)).workload())

    assert problem.value.message.startswith(f"{path}:3: num_gpu is 'x'; a number was expected; 2 row(s)")
    assert "fedsched trace import csv" in problem.value.hint


@pytest.mark.parametrize(
    ("rows", "config", "told"),
    [
        ("", {}, "trace.csv has no rows"),
        ("a,0,0,60,\nb,0,5,60,\n", {}, "none of the 2 rows of "),
        ("a,1,0,60,\n", {"window": {"start_s": 10, "end_s": 20}}, "comes between 10 s and 20 s"),
    ],
    ids=["a header alone", "no GPU jobs", "none in the window"],
)
def test_a_trace_without_a_job_says_what_it_has_instead(
    tmp_path: Path, rows: str, config: dict[str, Any], told: str
) -> None:
    """`No job between 0 s and inf s` sends its reader to look for a window that there is none of."""
    path = tmp_path / "trace.csv"
    path.write_text(HEADER + rows)

    with pytest.raises(InvalidTrace, match=told) as problem:
        drawn(TraceWorkloadConfig.model_validate({"file": str(path), **config}).workload())

    assert str(path) in problem.value.message
    assert "inf" not in problem.value.message
    assert problem.value.hint


def test_rows_that_are_no_gpu_jobs_are_left_out_and_counted(tmp_path: Path) -> None:
    """Published logs hold CPU jobs by the thousand; they are no mistake."""
    path = tmp_path / "trace.csv"
    path.write_text(HEADER + "a,1,0,60,\nb,0,0,60,\n")
    workload = TraceWorkloadConfig(file=str(path)).workload()

    assert len(drawn(workload)) == 1
    assert workload.left_out.total == 1


def test_public_data_is_found_by_name(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shipped scenario cannot know where somebody keeps the data."""
    monkeypatch.setenv("FEDSCHED_DATA", str(data_dir.parent))
    config = {"file": "data:elasticflow-itp/cluster06.csv.gz", "format": "itp", "shape": {"gpus_per_node": None}}

    jobs = drawn(TraceWorkloadConfig.model_validate(config).workload())

    assert len(jobs) == 2_396
    assert max(job.spec.worker_demand.gpu_milli for job in jobs) == 64_000


def test_missing_data_is_one_error_that_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most who run a shipped scenario for the first time have no data yet."""
    monkeypatch.setenv("FEDSCHED_DATA", str(tmp_path))
    config = TraceWorkloadConfig(file="data:elasticflow-itp/cluster06.csv.gz")

    with pytest.raises(NotFound) as problem:
        config.workload()

    assert str(tmp_path / "data" / "elasticflow-itp" / "cluster06.csv.gz") in problem.value.message
    assert "set FEDSCHED_DATA" in problem.value.hint
    assert "fedsched trace import" in problem.value.hint
    with pytest.raises(NotFound, match="there is no file"):
        TraceWorkloadConfig(file="none.csv").workload(tmp_path)


def test_drawn_jobs_end_where_the_configuration_says() -> None:
    """Jobs and days are both limits; whoever names one must get just that."""
    by_jobs = drawn(FittedWorkloadConfig(fit="itp", jobs=500).workload())
    by_days = drawn(FittedWorkloadConfig(fit="itp", days=0.5).workload())

    assert len(by_jobs) == 500
    assert by_days[-1].spec.submitted_s < 43_200
    assert [job.spec for job in by_days[:50]] == [job.spec for job in by_jobs[:50]]
    assert [job.spec.submitted_s for job in by_jobs] == sorted(job.spec.submitted_s for job in by_jobs)
    assert len({job.spec.job_id for job in by_jobs}) == 500


def test_clusters_are_chosen_copied_and_pooled() -> None:
    """Scale comes from more clusters of the same kind, whose jobs must differ."""
    chosen = FittedWorkloadConfig(fit="itp", jobs=400, clusters=("cluster04", "cluster08"), copies=2).workload()
    pooled = FittedWorkloadConfig(fit="itp", jobs=10, pooled=True).workload()

    names = {"cluster04-1", "cluster04-2", "cluster08-1", "cluster08-2"}
    assert {job.origin for job in drawn(chosen)} == names
    arrivals = {name: [job.spec.submitted_s for job in drawn(chosen) if job.origin == name] for name in names}
    assert arrivals["cluster04-1"][:5] != arrivals["cluster04-2"][:5]
    assert {job.origin for job in drawn(pooled)} == {""}
    with pytest.raises(NotFound, match="no cluster west"):
        FittedWorkloadConfig(fit="itp", jobs=1, clusters=("west",)).workload()


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"kind": "fitted", "fit": "itp"}, "days or jobs must say where it ends"),
        ({"kind": "fitted", "fit": "itp", "days": -1}, "days is -1"),
        ({"kind": "fitted", "fit": "itp", "jobs": 1, "rat": 2}, "did you mean rate"),
    ],
)
def test_contradictions_are_told_by_their_field(config: dict[str, object], problem: str) -> None:
    """A scenario that means nothing must not run as something else."""
    with pytest.raises(InvalidConfiguration, match=problem):
        parse(FittedWorkloadConfig, config, "workload.yaml")


def test_a_window_that_ends_before_it_starts_is_told(trace: Path) -> None:
    """It would be an empty trace."""
    with pytest.raises(InvalidConfiguration, match="it must be above start_s"):
        parse(TraceWorkloadConfig, {"file": "x", "window": {"start_s": 9, "end_s": 9}}, "workload.yaml")
    empty = TraceWorkloadConfig.model_validate({"file": str(trace), "window": {"start_s": 1e6, "end_s": 2e6}})
    with pytest.raises(FedschedError, match=r"none of the 3 jobs of .* comes between"):
        drawn(empty.workload())
