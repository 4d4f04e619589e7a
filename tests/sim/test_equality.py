"""Other people's simulators, job for job, through the core and loop that the agent runs."""

from __future__ import annotations

import csv
import gzip
from pathlib import Path

import pytest

from fedsched.core.cluster import Node
from fedsched.core.ids import ClusterName, JobId, NodeName
from fedsched.core.job import JobSpec, Range
from fedsched.core.resources import Resources
from fedsched.policy.plugins import make
from fedsched.sim.cluster import Rules, Setup
from fedsched.sim.ports import SimulatedJob
from fedsched.sim.speeds.recorded import RecordedSpeeds
from fedsched.sim.world import run

CASES = [
    ("60job_16gpu_count__fifo.csv", "fifo", True),
    ("60job_16gpu_count__fjf.csv", "fifo", False),
    ("60job_16gpu_count__sjf_by_gpu.csv", "smallest", False),
    ("60job_16gpu_count__srtf.csv", "srtf", False),
    ("60job_16gpu_count__srsf.csv", "srsf", False),
    ("60job_16gpu_count__dlas_gpu.csv", "las2d", False),
    ("itp06_128gpu_count__fifo.csv.gz", "fifo", True),
    ("itp06_128gpu_count__sjf_by_gpu.csv.gz", "smallest", False),
    ("itp06_128gpu_count__srtf.csv.gz", "srtf", False),
    ("itp06_128gpu_count__srsf.csv.gz", "srsf", False),
    ("itp06_128gpu_count__dlas_gpu.csv.gz", "las2d", False),
]


def _rows(path: Path) -> list[dict[str, str]]:
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return list(csv.DictReader(text.decode().splitlines()))


def _job(row: dict[str, str]) -> SimulatedJob:
    """One task of all the job's GPUs: on a pooled cluster only their number counts."""
    length_s = float(row.get("duration") or row["duration_s"])
    name, nothing = row["job_id"], Resources()
    gang = Resources(gpu_milli=1000 * int(row["num_gpu"]))
    spec = JobSpec(
        JobId(name),
        name,
        "x",
        Range(1, 1),
        Range(0, 0),
        gang,
        nothing,
        length_s,
        submitted_s=float(row.get("submit_time") or row["submit_s"]),
        expected_s=length_s,
    )
    return SimulatedJob(spec, length_s)


@pytest.mark.parametrize(("golden", "policy", "blocking"), CASES, ids=lambda case: str(case))
def test_every_job_ends_when_it_ends_in_tiresias(golden: str, policy: str, blocking: bool, golden_dir: Path) -> None:
    """Who compares policies with us must get what the system's authors get, to the second."""
    folder = golden_dir / "tiresias"
    trace, gpus = ("trace_60job.csv", 16) if golden.startswith("60job") else ("trace_itp06.csv.gz", 128)
    jobs = sorted((_job(row) for row in _rows(folder / trace)), key=lambda job: job.spec.submitted_s)
    pool = Node(NodeName("pool"), Resources(gpu_milli=1000 * gpus))
    discipline = make(policy, {"blocking": True} if blocking else {})
    setup = Setup(ClusterName("pool"), (pool,), discipline, make("fifo", {}))
    rules = Rules(clock="exact", store_s=0.0, keep_running=False)
    result = run([setup], jobs, RecordedSpeeds(), rules, check=len(jobs) < 100)
    ours = {outcome.job.spec.job_id: outcome.jct_s for outcome in result.outcomes}
    assert ours == {row["job_id"]: float(row["jct_s"]) for row in _rows(folder / golden)}
