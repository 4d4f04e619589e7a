"""What a run leaves: every second of every job accounted for, in bounded space, in files that say the same."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from pyarrow import parquet

from fedsched.config import parse
from fedsched.core.cluster import Node
from fedsched.core.commands import SaveJob
from fedsched.core.events import JobAssigned, SlotStarted
from fedsched.core.ids import ClusterName, JobId, NodeName
from fedsched.core.job import Allocation, JobPhase, JobSpec, JobStatus, Range, Reason, Transition
from fedsched.core.resources import Resources
from fedsched.sim.collecting import LANES_MAX, POINTS_MAX, Collector
from fedsched.sim.experiment import ExperimentConfig
from fedsched.sim.result_files import COLUMNS, write_csv, write_parquet
from fedsched.sim.results import RunResult, together
from fedsched.sim.running import Request, perform

NODE = Node(NodeName("n"), Resources(cpu_milli=8000, memory_mib=8192, gpu_milli=4000))


def experiment() -> ExperimentConfig:
    plain = {
        "clusters": [{"name": "one", "nodes": [{"name": "n", "cpus": 8}]}],
        "workload": {"jobs": 12, "gap_s": 3, "alone_s_max": 60},
        "policies": {"srtf": {"name": "srtf"}},
        "keep_running": False,
        "seeds": 1,
    }
    return parse(ExperimentConfig, plain, "test")


@pytest.fixture(scope="module")
def result() -> RunResult:
    return perform(Request("test", experiment(), "srtf", 3, check=True))


def test_every_second_of_a_job_is_spent_somewhere(result: RunResult) -> None:
    """Who asks why a job took so long gets an answer that adds up."""
    assert not result.partial
    np.testing.assert_allclose(result.jobs.spent_s.sum(axis=1), result.jobs.jct_s)
    assert (result.jobs.spent_s >= 0).all()
    assert result.jobs.resizes.sum() > 0


def test_what_clusters_gave_is_what_jobs_got(result: RunResult) -> None:
    """Utilisation over time and the jobs' own core-seconds are two views of one thing."""
    whole = together(result.series)
    length_s = np.full(len(whole.levels), whole.step_s)
    length_s[-1] = result.jobs.finish_s.max() - whole.step_s * (len(length_s) - 1)
    given = float((whole.level("cores_held")[:-1] * length_s[:-1]).sum())
    assert given == pytest.approx(float(result.jobs.core_s.sum()), rel=0.02)
    assert 0.3 < result.utilisation < 1


class _Tape:
    """Feeds a collector the life of jobs that each hold one GPU for a while."""

    def __init__(self) -> None:
        self.collector = Collector()
        self._observe = self.collector.on(ClusterName("c"), [NODE])

    def assign(self, name: str, time_s: float) -> None:
        one = Resources(cpu_milli=1000, gpu_milli=1000)
        spec = JobSpec(JobId(name), name, "x", Range(1, 1), Range(0, 0), one, Resources(), 1.0, submitted_s=time_s)
        self._observe(JobAssigned(time_s, spec, JobStatus(spec.job_id, phase=JobPhase.DISPATCHED)), [])

    def move(self, name: str, time_s: float, source: JobPhase, target: JobPhase) -> None:
        step = Transition(
            1, time_s, "agent/c", JobId(name), 1, 1, source, target, Reason.NONE, allocation=Allocation(1, 0)
        )
        self._observe(SlotStarted(time_s, 0), [SaveJob(JobStatus(JobId(name), phase=target), step)])


def test_a_year_takes_no_more_room_than_an_hour() -> None:
    """Who simulates a long trace must not run out of memory for the sake of a plot."""
    tape = _Tape()
    for index in range(2000):
        name, at_s = f"job-{index:04d}", index * 15_000.0
        tape.assign(name, at_s)
        tape.move(name, at_s + 1000, JobPhase.DISPATCHED, JobPhase.STARTING)
        tape.move(name, at_s + 1000, JobPhase.STARTING, JobPhase.RUNNING)
        tape.move(name, at_s + 7000, JobPhase.RUNNING, JobPhase.SUCCEEDED)
    until_s = 2000 * 15_000.0
    (series,) = tape.collector.series(until_s)
    assert POINTS_MAX / 2 <= len(series.levels) <= POINTS_MAX
    assert float(series.level("gpus_held").mean()) * 15 == pytest.approx(6, rel=0.01)
    assert float(series.level("queued").mean()) * 15 == pytest.approx(1, rel=0.01)
    assert LANES_MAX / 2 <= len(tape.collector.lanes(until_s)) <= LANES_MAX
    jobs = tape.collector.jobs(until_s)
    assert set(jobs.gpu_s.tolist()) == {6000.0}


def test_a_job_that_is_not_over_counts_until_the_end_of_the_run() -> None:
    """The queue of a run that was stopped is what one wants to see."""
    tape = _Tape()
    tape.assign("a", 10.0)
    jobs = tape.collector.jobs(50.0)
    assert jobs.spent_s[0].tolist() == [40.0, 0.0, 0.0, 0.0, 0.0]
    assert not jobs.over[0]
    assert np.isnan(jobs.jct_s[0])


def test_files_say_the_same_to_the_last_bit(result: RunResult, tmp_path: Path) -> None:
    """Whoever recomputes a mean from a file must get the mean that was printed."""
    write_csv(tmp_path / "jobs.csv", [result, result])
    write_parquet(tmp_path / "jobs.parquet", [result, result])
    with (tmp_path / "jobs.csv").open() as file:
        lines = list(csv.DictReader(file))
    table = parquet.read_table(tmp_path / "jobs.parquet")
    assert table.column_names == list(lines[0]) == list(COLUMNS)
    assert len(lines) == table.num_rows == 2 * len(result.jobs)
    for name in ("submit_s", "finish_s", "jct_s", "running_s", "core_s"):
        assert [float(line[name]) for line in lines] == table[name].to_pylist()
    assert [float(line["jct_s"]) for line in lines[: len(result.jobs)]] == result.jobs.jct_s.tolist()
    told = json.loads(table.schema.metadata[b"fedsched.runs"])
    assert told[0]["avg_jct_s"] == result.avg_jct_s
    assert sorted(path.name for path in tmp_path.iterdir()) == ["jobs.csv", "jobs.parquet"]
