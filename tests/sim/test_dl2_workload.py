"""DL2's generator draws here what it drew there."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from fedsched.config import parse
from fedsched.errors import InvalidConfiguration
from fedsched.sim.dl2_workload import CLASSES, STARTS, Dl2Workload, Dl2WorkloadConfig
from fedsched.sim.ports import SimulatedJob
from tests.sim import dl2_golden


def config_of(golden: dl2_golden.Golden) -> Dl2WorkloadConfig:
    """The golden run's parameters. Where its pattern is not ours to have, the arrivals themselves stand for it."""
    params = golden.params
    counts: list[int] = []
    if params["JOB_ARRIVAL_PATTERN"] == "Google_Trace":
        slots = [round(job.spec.submitted_s / golden.slot_length_s) for job in golden.jobs]
        counts = [slots.count(slot) for slot in range(slots[-1] + STARTS)]
        # The last slot was cut short when there were jobs enough; a full one would be cut alike.
        start = int(np.random.RandomState(golden.seed).randint(STARTS))
        counts = [counts[(index - start) % len(counts)] for index in range(len(counts))]
    return Dl2WorkloadConfig(
        pattern="poisson" if params["JOB_ARRIVAL_PATTERN"] == "Poisson" else "uniform",
        counts=tuple(counts),
        jobs=params["TOT_NUM_JOBS"],
        arrivals_max=params["MAX_ARRVS_PER_TS"],
        epochs_max=params["MAX_NUM_EPOCHS"],
        tasks_max=params["MAX_NUM_WORKERS"],
        slot_length_s=params["TS_DURATION"],
    )


def test_the_same_seed_draws_the_same_jobs_as_the_original(golden_dir: Path) -> None:
    """Results on drawn workloads can only be compared if the workloads are the same."""
    files = sorted((golden_dir / "dl2").glob("*.json"))
    assert len(files) >= 14
    for path in files:
        golden = dl2_golden.load(path)
        assert tuple(Dl2Workload(config_of(golden)).draw(golden.seed)) == golden.jobs, path.name


def arrivals(jobs: list[SimulatedJob], slot_length_s: float) -> list[int]:
    slots = [round(job.spec.submitted_s / slot_length_s) for job in jobs]
    return [slots.count(slot) for slot in range(max(slots))]


@pytest.mark.parametrize("pattern", ["uniform", "poisson", "uneven", "diurnal"])
def test_no_slot_brings_more_jobs_than_allowed_and_all_come(pattern: str) -> None:
    """The cap is what keeps the reference's arrivals from swamping a small cluster."""
    config = parse(Dl2WorkloadConfig, {"pattern": pattern, "jobs": 500, "arrivals_max": 10}, "here")
    jobs = list(Dl2Workload(config).draw(3))
    per_slot = arrivals(jobs, config.slot_length_s)
    assert len({job.spec.job_id for job in jobs}) == 500
    assert max(per_slot) <= 10
    assert all(one.spec.submitted_s <= other.spec.submitted_s for one, other in pairwise(jobs))
    mean = sum(per_slot) / len(per_slot)
    expected = {"uniform": (10, 10), "poisson": (7, 10), "uneven": (5.4, 6.8), "diurnal": (5, 7)}[pattern]
    assert expected[0] <= mean <= expected[1]


def test_a_day_has_a_night() -> None:
    """What matters of daily load is its valley: capacity is free there."""
    jobs = list(Dl2Workload(Dl2WorkloadConfig(pattern="diurnal", jobs=2000, arrivals_max=20)).draw(0))
    day = arrivals(jobs, 1200.0)[:72]
    assert min(day) <= 4
    assert max(day) == 20


def test_lengths_vary_and_declarations_err_only_where_asked_to() -> None:
    """An estimate that is always right flatters every policy that trusts it."""
    exact = list(Dl2Workload(Dl2WorkloadConfig(jobs=50)).draw(1))
    assert all(job.epochs == job.spec.epochs for job in exact)
    assert {job.spec.epochs for job in exact} <= {int(one.length * 30_000) for one in CLASSES}
    wrong = list(Dl2Workload(Dl2WorkloadConfig(jobs=50, length_error=0.2)).draw(1))
    assert [job.spec for job in wrong] == [job.spec for job in exact]
    errors = [job.epochs / job.spec.epochs - 1 for job in wrong]
    assert min(errors) < -0.1
    assert max(errors) > 0.1
    assert max(map(abs, errors)) <= 0.2
    varied = list(Dl2Workload(Dl2WorkloadConfig(jobs=50, lengths_vary=True)).draw(1))
    assert len({job.spec.epochs for job in varied}) > len(CLASSES)


def test_only_the_first_classes_occur_where_others_are_not_there_yet() -> None:
    """How the paper tests a policy that meets new kinds of job."""
    jobs = list(Dl2Workload(Dl2WorkloadConfig(jobs=100, classes=2)).draw(1))
    assert {job.spec.job_type for job in jobs} == {"resnet-50", "vgg-16"}


def test_a_pattern_without_arrivals_is_refused() -> None:
    """It would be drawn from for ever."""
    with pytest.raises(InvalidConfiguration, match="at least one slot must bring a job"):
        parse(Dl2WorkloadConfig, {"counts": [0, 0]}, "here")
