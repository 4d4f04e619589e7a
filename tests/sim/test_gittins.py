"""The gittins discipline against Tiresias's loop with the paper's index, job by job, and by hand."""

from __future__ import annotations

import csv
import gzip
from pathlib import Path
from typing import TextIO, cast

import pytest

from fedsched.config import PolicyConfig
from fedsched.policy import gittins
from fedsched.sim.experiment import trace_experiment
from fedsched.sim.running import Request, perform
from fedsched.sim.traces.names import TraceFormat
from tests.sim import tiresias_loop
from tests.sim.tiresias_loop import LoopJob

LIMITS = (3250, 7200)
CASES = pytest.mark.parametrize(
    ("trace", "nodes", "gpus_per_node", "golden"),
    [
        ("trace_60job.csv", 4, 4, "60job_16gpu_count__dlas_gpu.csv"),
        ("trace_itp06.csv.gz", 16, 8, "itp06_128gpu_count__dlas_gpu.csv.gz"),
    ],
)


def rows(path: Path) -> list[dict[str, str]]:
    with cast(TextIO, gzip.open(path, "rt") if path.suffix == ".gz" else path.open()) as file:
        return list(csv.DictReader(file))


def trace_jobs(path: Path) -> list[LoopJob]:
    return [
        LoopJob(
            row["job_id"],
            int(row["num_gpu"]),
            int(row.get("submit_s") or row["submit_time"]),
            int(row.get("duration_s") or row["duration"]),
        )
        for row in rows(path)
    ]


def simulated(trace: Path, nodes: int, gpus_per_node: int, options: dict[str, object]) -> dict[str, float]:
    """Completion times from the product's own world."""
    experiment = trace_experiment(
        trace, TraceFormat.TIRESIAS, nodes=nodes, gpus_per_node=gpus_per_node, clock="exact", slot_length_s=1.0
    ).model_copy(update={"policies": {"gittins": PolicyConfig(name="gittins", options=options)}})
    result = perform(Request("gittins", experiment, "gittins", seed=0, check=nodes == 4))
    assert (result.partial, result.fallbacks) == ("", 0)
    return dict(zip(result.jobs.job_id, result.jobs.jct_s.tolist(), strict=True))


@CASES
def test_the_loop_that_we_compare_with_is_tiresiass(
    golden_dir: Path, trace: str, nodes: int, gpus_per_node: int, golden: str
) -> None:
    """Without an index it must give what Tiresias's own simulator gave, else it proves nothing."""
    folder = golden_dir / "tiresias"
    found = tiresias_loop.run(trace_jobs(folder / trace), nodes * gpus_per_node, LIMITS)
    assert found == {row["job_id"]: float(row["jct_s"]) for row in rows(folder / golden)}


@CASES
@pytest.mark.parametrize("limits", [LIMITS, ()])
def test_every_job_takes_as_long_as_in_tiresiass_loop_with_the_papers_index(
    golden_dir: Path, trace: str, nodes: int, gpus_per_node: int, golden: str, limits: tuple[int, ...]
) -> None:
    """Tiresias's rules with what its jobs took as the known distribution; without limits the index alone decides."""
    jobs = trace_jobs(golden_dir / "tiresias" / trace)
    sample = sorted(float(job.gpus * job.duration_s) for job in jobs)
    index = gittins.Gittins(sample, 3250.0)
    expected = tiresias_loop.run(jobs, nodes * gpus_per_node, limits, lambda service: float(index(service)))
    options: dict[str, object] = {"sample": sample, "memory": 0, "limits": list(limits)}
    assert simulated(golden_dir / "tiresias" / trace, nodes, gpus_per_node, options) == expected


def test_it_learns_from_jobs_that_have_ended_whom_to_prefer(tmp_path: Path) -> None:
    """One GPU. Ten jobs took 10 s and two took 100 s, one after the other: of a job that has run for 50 s and one that
    comes, the newcomer is likely to be over in 10 s, so it goes first. Least attained service would say the same; of a
    job that has had 95 s and a newcomer, the index says that the old one is nearly done, and it stays.
    """
    before = [(10, 200 * n) for n in range(10)] + [(100, 2000), (100, 2200)]
    lines = [f"{n},1,{submit_s},{takes_s}" for n, (takes_s, submit_s) in enumerate(before)]
    lines += ["12,1,3000,100", "13,1,3050,10", "14,1,3105,10"]
    trace = tmp_path / "trace.csv"
    trace.write_text("job_id,num_gpu,submit_time,duration\n" + "\n".join(lines) + "\n")
    options: dict[str, object] = {"limits": [], "delta": 10.0}
    found = simulated(trace, 1, 1, options)
    # Job 12 is stopped at 3050 for 10 s; at 3105 it has had 95 s, and job 14 waits for its end at 3110.
    assert found["13"] == 10
    assert found["12"] == 110
    assert found["14"] == 15
