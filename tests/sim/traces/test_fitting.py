"""The fitted generator: as alike its traces as it says, the same for the same seed, and fast."""

from __future__ import annotations

import heapq
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fedsched.errors import InvalidConfiguration, InvalidTrace, NotFound
from fedsched.sim import fit_drawing, fit_goodness, fitting, trace_fit
from fedsched.sim.fit_drawing import Drawn
from fedsched.sim.fitting import By
from fedsched.sim.trace_fit import ClusterFit, Floats, SizeClass
from fedsched.sim.traces.record import TraceJob
from tests.sim.traces.public import shipped_trace

ENOUGH_JOBS = 1_000


def drawn(clusters: tuple[ClusterFit, ...], seed: int, days: float, rate: float = 1.0) -> Drawn:
    """All chunks in one."""
    chunks = list(fit_drawing.draw(clusters, seed, rate=rate, days=days))
    names = ("submit_s", "duration_s", "gpus", "cluster")
    return Drawn(*(np.concatenate([getattr(chunk, name) for chunk in chunks]) for name in names))


@pytest.mark.parametrize("name", trace_fit.shipped())
def test_shipped_parameters_are_those_of_their_trace_and_draw_jobs_like_it(name: str, data_dir: Path) -> None:
    """Whoever simulates without data must get the load, sizes, durations and bursts of the clusters named.

    Measured over the 23 clusters: durations at most 0.047 apart, sizes 0.035, hours 0.09 (0.22 below 1,000 jobs),
    GPU-hours 6 % (15 % below 1,000 jobs, where twenty jobs hold most of them), burstiness 12 %; demand swings within a
    factor of 1.6, which was 1.9 before classes had bursts of their own, with waits up to thirty times too long.
    """
    jobs, source, by = shipped_trace(name, data_dir)
    parameters = trace_fit.load_fit(name)

    assert fitting.fit(jobs, source, by) == parameters
    for found in fit_goodness.goodness(parameters, jobs, by):
        enough = found.jobs >= ENOUGH_JOBS
        assert found.duration_ks < 0.05, found
        assert found.gpus_tv < 0.04, found
        assert found.hours_tv < (0.11 if enough else 0.23), found
        assert found.gpu_hours_ratio == pytest.approx(1, abs=0.08 if enough else 0.18), found
        assert found.drawn_burstiness == pytest.approx(found.burstiness, rel=0.2), found
        if name != "helios-venus":  # so full that users waited for each other, which no draw does
            assert 1 / 1.65 < found.drawn_swing / found.swing < 1.65, found


def test_queues_on_drawn_jobs_are_like_those_on_the_trace(data_dir: Path) -> None:
    """Policies are chosen by how they fare when jobs wait; a trace of the right load and the wrong bursts misleads.

    Mean completion times of first come, first served on a pool of 70 % load, over eight draws against the trace.
    Measured by cluster: 0.95, 0.56, 0.64, 1.17, 0.50, 0.87, 1.45, 1.51, 0.97, 1.19 times the trace's; without batches
    of like jobs and bursts by size, over five draws, 1.88, 0.60, 0.61, 3.00, 0.46, 0.81, 1.59, 0.87, 0.90, 0.84.
    """
    jobs, source, by = shipped_trace("itp", data_dir)
    groups = fitting.grouped(jobs, source, by)
    for cluster in trace_fit.load_fit("itp").clusters:
        real = sorted(groups[cluster.name], key=lambda job: job.submit_s)
        submit_s, duration_s, gpus = (
            np.array([getattr(job, name) for job in real], dtype=np.float64)
            for name in ("submit_s", "duration_s", "num_gpu")
        )
        days = float(np.ptp(submit_s)) / 86_400
        ours = [drawn((cluster,), seed, days) for seed in range(8)]
        found_s = float(np.mean([fifo_jct_s(one.submit_s, one.duration_s, one.gpus) for one in ours]))
        assert 0.45 < found_s / fifo_jct_s(submit_s, duration_s, gpus) < 1.8, cluster.name


def fifo_jct_s(submit_s: Floats, duration_s: Floats, gpus: Floats, load: float = 0.7) -> float:
    """Mean completion time on a pool of GPUs that just bears the load; nobody passes who does not fit."""
    free = max(math.ceil(float((duration_s * gpus).sum()) / float(np.ptp(submit_s)) / load), gpus.max())
    running: list[tuple[float, float]] = []
    now_s = total_s = 0.0
    for arrived_s, lasts_s, wanted in zip(submit_s.tolist(), duration_s.tolist(), gpus.tolist(), strict=True):
        now_s = max(now_s, arrived_s)
        while running and (running[0][0] <= now_s or free < wanted):
            ended_s, given_back = heapq.heappop(running)
            now_s, free = max(now_s, ended_s), free + given_back
        free -= wanted
        heapq.heappush(running, (now_s + lasts_s, wanted))
        total_s += now_s + lasts_s - arrived_s
    return total_s / len(submit_s)


def test_what_was_drawn_from_known_parameters_is_found_again() -> None:
    """The method itself: on jobs of its own making a fit must find what they were made with."""
    size = SizeClass(
        gpus=(1.0,),
        shares=(1.0,),
        seconds=(60.0, 600.0, 6000.0),
        tail=0.05,
        tail_exponent=1.2,
        longest_s=1e5,
        day_variance=0.2,
        hour_variance=0.5,
        batch_jobs=12.0,
        likeness=0.6,
        burst_bias=-0.3,
    )
    size = size.model_copy(update={"shares": (0.75,)})
    large = size.model_copy(
        update={"gpus": (8.0,), "shares": (0.25,), "day_variance": 0.0, "hour_variance": 0.0, "batch_jobs": 1.0}
    )
    large = large.model_copy(update={"likeness": 0.0, "burst_bias": 0.0})
    made = ClusterFit(
        name="c",
        jobs_per_day=100,
        by_hour=(0.5,) * 12 + (1.5,) * 12,
        by_day=(1.2,) * 5 + (0.5,) * 2,
        classes=(size, large),
    )
    chunk = drawn((made,), seed=1, days=700)
    rows = zip(chunk.submit_s.tolist(), chunk.duration_s.tolist(), chunk.gpus.tolist(), strict=True)
    jobs = [TraceJob(str(number), *row) for number, row in enumerate(rows)]

    found = fitting.fit(jobs, "c").clusters[0]

    assert found.jobs_per_day == pytest.approx(100, rel=0.05)
    assert found.by_hour == pytest.approx(made.by_hour, abs=0.2)
    assert found.by_day[0] / found.by_day[6] == pytest.approx(2.4, rel=0.15)
    bursty, steady = found.classes
    assert bursty.day_variance == pytest.approx(0.2, abs=0.05)
    assert bursty.hour_variance == pytest.approx(0.5, abs=0.05)
    assert bursty.batch_jobs == pytest.approx(12, rel=0.2)
    assert bursty.likeness == pytest.approx(0.6, abs=0.06)
    assert bursty.burst_bias == pytest.approx(-0.2, abs=0.1)  # of counts, which follow the rates with noise
    assert max(steady.day_variance, steady.hour_variance) < 0.03
    assert steady.likeness < 0.05
    assert abs(steady.burst_bias) < 0.05
    assert {gpus: share for part in found.classes for gpus, share in zip(part.gpus, part.shares, strict=True)} == (
        pytest.approx({1.0: 0.75, 8.0: 0.25}, abs=0.01)
    )


def test_the_tail_is_bounded_and_has_the_mean_that_it_was_given() -> None:
    """Most GPU-hours lie in the longest jobs; an unbounded tail would make jobs of centuries."""
    exponent = fitting._exponent(1_000.0, 100_000.0, 5_000.0)
    part = SizeClass(
        gpus=(1.0,), shares=(1.0,), seconds=(1.0, 1_000.0), tail=0.5, tail_exponent=exponent, longest_s=1e5
    )

    durations = part.durations_s(np.linspace(0.5, 1.0, 200_001)[1:])

    assert durations.mean() == pytest.approx(5_000, rel=0.001)
    assert (durations.min(), durations.max()) == (1_000, 100_000)


@pytest.mark.parametrize("exponent", [-3.0, 0.0, 1.0, 2.5])
def test_any_exponent_gives_durations_that_rise_within_bounds(exponent: float) -> None:
    """At 0 and 1 the formulas divide by nothing."""
    part = SizeClass(gpus=(1.0,), shares=(1.0,), seconds=(5.0, 50.0), tail=0.2, tail_exponent=exponent, longest_s=500.0)

    durations = part.durations_s(np.linspace(0, 1, 1001))

    assert (np.diff(durations) >= 0).all()
    assert (durations[0], durations[-1]) == (5, 500)


def test_a_cluster_draws_the_same_jobs_whoever_is_beside_it() -> None:
    """Adding a cluster to a scenario must not change what the others are tested with."""
    clusters = trace_fit.load_fit("itp").clusters
    alone = drawn(clusters[3:4], seed=7, days=90)
    beside = drawn(clusters, seed=7, days=90)

    mine = beside.cluster == 3
    assert beside.submit_s[mine].tolist() == alone.submit_s.tolist()
    assert beside.duration_s[mine].tolist() == alone.duration_s.tolist()
    other = drawn(clusters[3:4], seed=8, days=90)
    assert other.submit_s.tolist() != alone.submit_s.tolist()


def test_the_same_seed_draws_the_same_jobs_in_fresh_interpreters() -> None:
    """One process cannot show an order that depends on its hash seed."""
    program = (
        "import hashlib; from fedsched.sim.traces.config import FittedWorkloadConfig as C;"
        "jobs = C(fit='itp', jobs=2000).workload().draw(5);"
        "rows = [(job.spec.job_id, job.spec.submitted_s, job.epochs, job.origin) for job in jobs];"
        "print(hashlib.sha256(repr(rows).encode()).hexdigest())"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "12345")
    }

    assert len(digests) == 1


def test_chunks_follow_each_other_in_time_without_end() -> None:
    """A million jobs are never in memory at once; the world must get them in order all the same."""
    chunks = fit_drawing.draw(trace_fit.load_fit("itp").clusters, seed=1)
    first, second = next(chunks), next(chunks)

    assert len(first) > 10_000
    assert (np.diff(first.submit_s) >= 0).all()
    assert first.submit_s[-1] <= second.submit_s[0]


def test_traces_that_cannot_be_fitted_are_told() -> None:
    """Parameters of ten jobs would be believed."""
    few = [TraceJob(str(number), number * 86_400.0, 60, 1) for number in range(10)]
    at_once = [TraceJob(str(number), 0, 60, 1) for number in range(100)]

    with pytest.raises(InvalidTrace, match="no cluster with 50 jobs"):
        fitting.fit(few, "few")
    with pytest.raises(InvalidTrace, match="covers 0 s"):
        fitting.fit(at_once, "at once")


def test_a_cluster_with_too_few_jobs_is_left_out_and_the_others_are_fitted() -> None:
    """Philly has virtual clusters of three jobs beside one of forty thousand."""
    jobs = [TraceJob(f"a{number}", number * 3_600.0, 60 + number, 1, vc="a") for number in range(200)]
    jobs += [TraceJob(f"b{number}", number * 3_600.0, 60, 1, vc="b") for number in range(9)]

    assert [cluster.name for cluster in fitting.fit(jobs, "both", By.VC).clusters] == ["a"]
    pooled = fitting.fit(jobs, "both", By.ALL).clusters
    assert [(cluster.name, len(cluster.classes)) for cluster in pooled] == [("both", 1)]


def test_parameters_are_saved_and_loaded_whole(tmp_path: Path) -> None:
    """Parameters of somebody's own trace are a file like those that ship."""
    parameters = trace_fit.load_fit("helios-venus")
    trace_fit.save(tmp_path / "mine.yaml", parameters)

    assert trace_fit.load_fit("mine.yaml", tmp_path) == parameters
    with pytest.raises(NotFound, match="the package has helios-venus, itp, philly"):
        trace_fit.load_fit("none")


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("day_variance", "-1", "day_variance is -1"),
        ("tail_exponent", "1000", "tail_exponent is 1000"),
        ("shares", "[0.9]", "add up to"),
        ("shares", "[]", "one each was expected"),
        ("longest_s", "1", "cannot be below the last of seconds"),
        ("gpus", "[0]", "gpus and shares must be above 0"),
        ("tail", "1", "tail is 1"),
    ],
)
def test_parameters_that_are_no_distribution_are_told_by_their_field(
    field: str, value: str, problem: str, tmp_path: Path
) -> None:
    """They would draw jobs, only not those meant."""
    text, changed = re.subn(
        rf"\b{field}: .*", f"{field}: {value}", (trace_fit.SHIPPED / "helios-venus.yaml").read_text(), count=1
    )
    assert changed
    path = tmp_path / "bad.yaml"
    path.write_text(text)

    with pytest.raises(InvalidConfiguration, match=problem):
        trace_fit.load_fit(str(path))


def test_a_rate_of_arrival_scales_the_load_and_nothing_else() -> None:
    """Load sweeps compare the same kind of jobs, in the same busy and quiet days."""
    clusters = trace_fit.load_fit("itp").clusters[3:4]
    once, twice = (drawn(clusters, seed=2, days=150, rate=rate) for rate in (1.0, 2.0))

    assert len(twice) / len(once) == pytest.approx(2, rel=0.05)
    assert math.log(twice.duration_s.mean() / once.duration_s.mean()) == pytest.approx(0, abs=0.1)
    busiest = [np.bincount((chunk.submit_s // 86_400).astype(int)).argmax() for chunk in (once, twice)]
    assert busiest[0] == busiest[1]
