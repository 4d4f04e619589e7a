"""How GPUs of a trace become gangs of tasks, and that these run as long as the trace says."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from fedsched.core.job import Allocation, Range
from fedsched.errors import InvalidTrace
from fedsched.sim.ports import Setting
from fedsched.sim.traces.demand import Demand, counted
from fedsched.sim.traces.record import TraceJob
from fedsched.sim.traces.shaping import Elasticity, ElasticSpeed, GangShape, RigidSpeed, gang, jobs_of, simulated


@pytest.mark.parametrize(
    ("gpus", "per_node", "expected"),
    [
        (1, 8, (1, 1)),
        (8, 8, (1, 8)),
        (16, 8, (2, 8)),
        (12, 8, (2, 8)),
        (0.46, 8, (1, 0.46)),
        (4, 1, (4, 1)),
        (64, None, (1, 64)),
    ],
)
def test_a_job_becomes_whole_nodes_or_a_part_of_one(
    gpus: float, per_node: int | None, expected: tuple[int, float]
) -> None:
    """Gangs of another form than a trace's jobs had would wait for other holes in the cluster."""
    assert gang(gpus, per_node) == expected


def test_a_rigid_job_runs_as_long_as_in_the_trace_and_only_with_its_whole_gang() -> None:
    """This is what makes a simulation comparable with other simulators' job by job."""
    job = simulated(TraceJob("a", 7, 3890, 16, cluster="east", vc="vcX", user="u1", deadline_s=9000), GangShape())

    assert (job.spec.workers, job.spec.ps, job.spec.worker_demand.gpu_milli) == (Range(2, 2), Range(0, 0), 8000)
    assert (job.spec.submitted_s, job.spec.epochs, job.epochs, job.origin) == (7, 3890, 3890, "east")
    assert (job.spec.queue, job.spec.user, job.spec.job_type) == ("vcX", "u1", "rigid")
    assert (job.spec.expected_s, job.spec.deadline_s) == (3890, 9000)
    assert RigidSpeed().epochs(job, Setting(Allocation(2, 0)), 3890) == job.epochs
    assert RigidSpeed().epochs(job, Setting(Allocation(1, 0)), 3890) == 0


def test_an_elastic_job_takes_its_time_on_as_many_workers_as_it_had_and_less_on_more() -> None:
    """Else elastic policies would be compared on other jobs than rigid ones."""
    job = simulated(TraceJob("a", 0, 1000, 4), GangShape(gpus_per_node=1, elastic=Elasticity(exponent=0.5)))
    speed = ElasticSpeed(exponent=0.5)

    assert job.spec.workers == Range(1, 8)
    assert job.spec.expected_s == 2000
    assert speed.epochs(job, Setting(Allocation(4, 0)), 1000) == pytest.approx(job.epochs)
    assert speed.epochs(job, Setting(Allocation(1, 0)), 2000) == pytest.approx(job.epochs)
    assert speed.epochs(job, Setting(Allocation(9, 0)), 1) == speed.epochs(job, Setting(Allocation(8, 0)), 1)
    assert speed.epochs(job, Setting(Allocation(0, 0)), 1000) == 0


def test_a_job_asks_for_the_cores_that_the_trace_names_or_the_shape_gives() -> None:
    """Where cores are short, a trace that names them must not be made to ask for others."""
    shape = GangShape(cpus_per_gpu=2, memory_gib_per_gpu=4)

    named = simulated(TraceJob("a", 0, 60, 1, cpus=12, memory_gib=16), shape).spec.worker_demand
    unnamed = simulated(TraceJob("b", 0, 60, 16), shape).spec.worker_demand

    assert (named.cpu_milli, named.memory_mib) == (12_000, 16_384)
    assert (unnamed.cpu_milli, unnamed.memory_mib) == (16_000, 32_768)


def test_jobs_come_one_by_one_however_many_there_are() -> None:
    """A million jobs must not be in memory before the first one starts."""
    endless = (TraceJob(str(number), number, 60, 1) for number in iter(int, 1))

    assert next(iter(jobs_of(endless, GangShape()))).spec.job_id == "0"


def test_a_gang_beyond_all_measure_is_an_error_that_names_the_job() -> None:
    """It could never be placed, and would be known by its waiting only."""
    with pytest.raises(InvalidTrace, match="job a of 20000 GPUs would have 20000 workers"):
        simulated(TraceJob("a", 0, 60, 20_000), GangShape(gpus_per_node=1))


def demand_of(jobs: Sequence[TraceJob], shape: GangShape | None = None) -> Demand:
    demand = Demand()
    assert list(counted(jobs, demand, shape)) == jobs
    return demand


def test_offered_load_counts_what_gangs_hold() -> None:
    """A job of 12 GPUs that takes two whole nodes loads the cluster with 16."""
    jobs = [TraceJob("a", 0, 100, 12), TraceJob("b", 100, 100, 4)]

    asked, held = demand_of(jobs), demand_of(jobs, GangShape())

    assert (asked.gpus, held.gpus) == (16, 20)
    assert (held.load(10), held.gpus_max, held.span_s) == (2, 16, 100)
    assert demand_of(jobs[:1]).gpus is None
