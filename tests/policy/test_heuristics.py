"""Each heuristic's own rule, on clusters small enough to work out by hand."""

from __future__ import annotations

from fedsched.core.decision import JobView, SpeedSample
from fedsched.core.job import Allocation
from fedsched.core.placement import TentativePlacement
from fedsched.core.resources import Resources
from fedsched.policy.optimus import PRIOR, SpeedCurve, fit
from fedsched.policy.registry import heuristic
from tests.policy.observations import job, node, observation


def decide(name: str, cpus: list[int], jobs: list[JobView]) -> dict[str, str]:
    seen = observation([node(f"n{index}", count) for index, count in enumerate(cpus)], jobs)
    decision = heuristic(name).decide(seen, TentativePlacement(seen))
    return {str(job_id): str(allocation) for job_id, allocation in decision.allocations}


def test_fifo_fills_the_first_job_after_everybody_has_a_minimum() -> None:
    """Without the minima first, the newcomer would wait for the whole run of the first."""
    assert decide("fifo", [8], [job("a"), job("b")]) == {"a": "4w+2ps", "b": "1w+1ps"}
    assert decide("fifo", [10], [job("a"), job("b")]) == {"a": "4w+2ps", "b": "2w+2ps"}


def test_a_job_that_finds_no_room_does_not_block_the_ones_behind_it() -> None:
    """DL2's reference ends the slot there and leaves up to half the cluster idle."""
    wide = job("a", workers=(6, 6))
    assert decide("fifo", [4], [wide, job("b")]) == {"b": "2w+2ps"}


def test_drf_gives_the_next_bundle_to_the_poorest_job() -> None:
    """Two jobs, one twice as hungry per bundle: it ends with half as many bundles."""
    hungry = job("a", workers=(1, 8), ps=(1, 8), worker_demand=Resources(2000, 100), ps_demand=Resources(2000, 100))
    modest = job("b", workers=(1, 8), ps=(1, 8))
    assert decide("drf", [16], [hungry, modest]) == {"a": "2w+2ps", "b": "4w+4ps"}


def test_drf_gives_jobs_without_parameter_servers_workers_only() -> None:
    """An all-reduce job that got a parameter server could not be started."""
    assert decide("drf", [4], [job("a", ps=(0, 0))]) == {"a": "4w+0ps"}


def test_srtf_prefers_the_job_that_is_done_sooner_not_the_one_with_fewer_epochs() -> None:
    """A fast job with many epochs left may be nearly done."""
    slow = job("a", epochs=10.0, speeds=(SpeedSample(1, 1, 0.1),))
    fast = job("b", epochs=50.0, speeds=(SpeedSample(1, 1, 5.0),))
    assert decide("srtf", [6], [slow, fast]) == {"a": "1w+1ps", "b": "2w+2ps"}


def test_srtf_takes_a_new_jobs_speed_from_its_type() -> None:
    """Until it has run, a job of a slow type must not pass for a short one."""
    known = job("a", epochs=4.0, job_type="vgg", speeds=(SpeedSample(1, 1, 0.1),))
    same_type = job("b", epochs=2.0, job_type="vgg")
    other = job("c", epochs=10.0, job_type="mlp", speeds=(SpeedSample(1, 1, 1.0),))
    assert decide("srtf", [8], [known, same_type, other]) == {"a": "1w+1ps", "b": "1w+1ps", "c": "2w+2ps"}


COMPUTE = SpeedCurve((4.0, 0.1, 0.1, 0.01, 0.01))
TRAFFIC = SpeedCurve((0.5, 0.1, 2.0, 0.02, 0.02))
TRIED = [Allocation(1, 1), Allocation(2, 1), Allocation(2, 2), Allocation(4, 2), Allocation(4, 4), Allocation(1, 3)]


def samples(curve: SpeedCurve) -> tuple[SpeedSample, ...]:
    return tuple(SpeedSample(size.workers, size.ps, curve(size)) for size in TRIED)


def test_optimus_learns_the_curve_from_a_handful_of_speeds() -> None:
    """Everything it decides rests on this fit; a size that was never tried must come out right too."""
    for curve in (COMPUTE, TRAFFIC):
        fitted = fit(samples(curve))
        for size in (*TRIED, Allocation(3, 2), Allocation(3, 4)):
            assert abs(fitted(size) / curve(size) - 1) < 0.05


def test_optimus_expects_the_prior_shape_until_something_was_seen() -> None:
    """A cluster's first jobs must not stand still for want of data; one sample sets the level, not the shape."""
    assert abs(fit(())(Allocation(2, 2)) / SpeedCurve(PRIOR)(Allocation(2, 2)) - 1) < 0.05
    one = fit((SpeedSample(1, 1, 0.01),))
    assert abs(one(Allocation(1, 1)) / 0.01 - 1) < 0.1
    assert one(Allocation(2, 2)) > 1.3 * one(Allocation(1, 1))


def test_optimus_gives_each_job_what_helps_it() -> None:
    """Workers to the compute-bound job, parameter servers to the one that waits for the network."""
    compute = job("a", job_type="cnn", speeds=samples(COMPUTE))
    traffic = job("b", job_type="vgg", ps=(1, 4), speeds=samples(TRAFFIC))
    given = decide("optimus", [9], [compute, traffic])
    assert given["a"] == "4w+1ps"
    assert given["b"] == "1w+3ps"


def test_optimus_leaves_room_unused_that_would_slow_a_job_down() -> None:
    """More tasks than help only cost; other jobs may come."""
    slowed = SpeedCurve((0.1, 0.1, 0.3, 0.5, 0.5))
    alone = job("a", job_type="linear", workers=(1, 8), ps=(1, 8), speeds=samples(slowed))
    assert decide("optimus", [16], [alone]) == {"a": "1w+1ps"}
