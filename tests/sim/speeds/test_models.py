"""Models of how speed grows with what a job is given."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from fedsched.errors import InvalidInput
from fedsched.policy.optimus import SpeedCurve
from fedsched.sim.ports import TrueSpeeds
from fedsched.sim.speeds.analytic import AnalyticSpeeds, fit_curves
from fedsched.sim.speeds.coefficients import load_goodput, load_scaling, shipped
from fedsched.sim.speeds.goodput import BatchEfficiency, GoodputSpeeds, Iteration, Timing, fit_timing, goodput
from fedsched.sim.speeds.recorded import RecordedSpeeds
from fedsched.sim.speeds.scaling import Measurement, ScalingCurve, ScalingSpeeds, fit_curve
from tests.sim.speeds.jobs import at, job

NO_NETWORK = Timing(0.0, 0.001, 0.0, 0.0, 0.0, 0.0, 1.0)
"""Nothing but a millisecond for each sample."""


def rate(model: TrueSpeeds, kind: str, workers: int, ps: int = 1, *, on: str = "", nodes: int = 1) -> float:
    return model.epochs(job(kind, gpus=1 if on else 0, workers=1024), at(workers, ps, on=on, nodes=nodes), 1.0)


def test_an_analytic_curve_is_found_again_in_what_it_gives() -> None:
    """The fit is what users bring their own measurements to."""
    truth = SpeedCurve((2.0, 0.1, 0.3, 0.02, 0.01))
    model = AnalyticSpeeds({"any": truth})
    points = {(ps, w): 50 * rate(model, "any", w, ps) for ps in (1, 2, 4, 8) for w in (1, 2, 4, 8, 16)}
    found = fit_curves({"any": {**points, (9, 9): 0.0}}, {"any": 50})["any"]
    again = AnalyticSpeeds({"any": found})
    for w, ps in ((1, 1), (3, 5), (16, 8)):
        assert rate(again, "any", w, ps) == pytest.approx(rate(model, "any", w, ps), rel=0.01)


def test_a_job_that_needs_parameter_servers_does_not_train_without() -> None:
    """All-reduce jobs have none and train; the others wait."""
    model = AnalyticSpeeds({"any": SpeedCurve((1.0, 0, 0, 0, 0))})
    assert model.epochs(job(ps_least=1), at(2, ps=0), 3.0) == 0
    assert model.epochs(job(ps_least=0), at(2, ps=0), 3.0) == 6.0
    assert model.epochs(job(), at(0), 3.0) == 0
    with pytest.raises(InvalidInput, match="no speed is known for job type other; known are any"):
        rate(model, "other", 1)


def test_a_scaling_curve_is_found_again_in_what_it_gives() -> None:
    """Of every coefficient, or some network would come for nothing."""
    truth = ScalingCurve(1.0, 0.05, 0.02, 0.03, 0.001, 0.004)
    seen = [Measurement(n, k, truth(n, k)) for n, k in ((1, 1), (2, 1), (4, 1), (8, 1), (8, 2), (16, 2), (32, 4))]
    assert fit_curve([*seen, Measurement(64, 8, 0.0)])(24, 3) == pytest.approx(truth(24, 3))
    with pytest.raises(ValueError, match="at least one measurement"):
        fit_curve([Measurement(1, 1, 0.0)])


def test_more_gpus_help_less_and_less_and_a_network_costs() -> None:
    """The shape that every elastic policy lives on."""
    curves = load_scaling(shipped("scaling_fitted"))
    model = ScalingSpeeds(curves, {"resnet50 (batch size 256)": 2.0})
    kind = "resnet50 (batch size 256)"
    speeds = [rate(model, kind, workers, on="a100") for workers in (1, 2, 4, 8)]
    gains = [after / before for before, after in pairwise(speeds)]
    assert 1.0 < gains[2] < gains[1] < gains[0] < 2.0
    assert rate(model, kind, 8, on="A100", nodes=8) < speeds[3]
    assert speeds[0] == pytest.approx(curves["A100"][kind](1, 1) / 2)
    assert rate(model, kind, 0, on="A100") == 0
    assert rate(model, "ResNet-50 (batch size 64)", 2, on="V100") > rate(
        model, "ResNet-50 (batch size 64)", 2, on="K80"
    )


def test_workers_bring_as_many_gpus_as_they_hold() -> None:
    """A worker with four GPUs is as fast as four with one; with half a GPU it is slower than with one."""
    model = ScalingSpeeds({"X": {"any": ScalingCurve(1.0, 0.1)}})
    one = model.epochs(job(gpus=4), at(1, on="X"), 1.0)
    assert one == model.epochs(job(gpus=1), at(4, on="X"), 1.0)
    assert model.epochs(job(gpus=0.5), at(1, on="X"), 1.0) == pytest.approx(1 / 2.1)


def test_a_job_without_a_curve_is_refused_or_takes_anothers() -> None:
    """Traces name models that nobody measured."""
    curves = {"X": {"any": ScalingCurve(1.0)}}
    with pytest.raises(InvalidInput, match=r"no speed is known for job type odd on X; known are any"):
        rate(ScalingSpeeds(curves), "odd", 1, on="X")
    with pytest.raises(InvalidInput, match=r"no speed is known on GPUs of type \(none\); known are X"):
        rate(ScalingSpeeds(curves), "any", 1)
    assert rate(ScalingSpeeds(curves, otherwise="any"), "odd", 2, on="X") == 2.0


def test_without_a_network_goodput_is_throughput_times_efficiency() -> None:
    """Worked by hand: 1000 samples/s a GPU; at ten times the batch and with noise 9 each counts for (9+1)/(9+10)."""
    alone = BatchEfficiency(batch=1, batch_max=1, gpu_batch_max=1, noise=9, epoch_samples=1)
    assert goodput(NO_NETWORK, alone, 1, 1) == pytest.approx(1000)
    ten = BatchEfficiency(batch=1, batch_max=10, gpu_batch_max=1, noise=9, epoch_samples=1)
    assert goodput(NO_NETWORK, ten, 10, 1) == pytest.approx(10_000 * 10 / 19)
    assert goodput(NO_NETWORK, ten, 11, 1) == 0  # Every GPU needs at least one sample.
    assert goodput(NO_NETWORK, ten, 0, 1) == 0


def test_iteration_times_follow_the_published_form() -> None:
    """Worked by hand: gradient 0.3 s and network 0.4 s overlap with gamma 2 to 0.5 s; accumulation adds gradients."""
    timing = Timing(0.1, 0.02, 0.4, 0.1, 0.8, 0.1, 2.0)
    batch = np.array(10.0)
    assert float(timing.iteration_s(2, 1, batch, np.array(0.0))) == pytest.approx(0.5)
    assert float(timing.iteration_s(2, 1, batch, np.array(2.0))) == pytest.approx(0.5 + 2 * 0.3)
    assert float(timing.iteration_s(1, 1, batch, np.array(2.0))) == pytest.approx(3 * 0.3)
    assert float(timing.iteration_s(4, 1, batch, np.array(0.0))) == pytest.approx((0.3**2 + 0.6**2) ** 0.5)
    assert float(timing.iteration_s(4, 2, batch, np.array(0.0))) == pytest.approx((0.3**2 + 1.0**2) ** 0.5)


def test_accumulation_helps_where_the_network_is_slow() -> None:
    """Memory may hold no larger batch, but several steps can share one exchange."""
    slow = Timing(0.0, 0.001, 0.5, 0.0, 0.5, 0.0, 1.0)
    roomy = BatchEfficiency(batch=10, batch_max=1000, gpu_batch_max=10, noise=1e6, epoch_samples=1)
    tight = BatchEfficiency(batch=10, batch_max=20, gpu_batch_max=10, noise=1e6, epoch_samples=1)
    assert goodput(slow, roomy, 2, 1) > 3 * goodput(slow, tight, 2, 1)


def test_noisy_gradients_make_more_gpus_worthwhile() -> None:
    """What Pollux sees and a throughput model does not."""
    timings, trainings = load_goodput(shipped("goodput_fitted"))
    calm = {**trainings, "resnet50": BatchEfficiency(128, 8192, 256, 100, 1e6)}
    model, calm_model = GoodputSpeeds(timings, trainings), GoodputSpeeds(timings, calm)
    gain = rate(model, "resnet50", 16, on="A100", nodes=2) / rate(model, "resnet50", 1, on="A100")
    calm_gain = rate(calm_model, "resnet50", 16, on="A100", nodes=2) / rate(calm_model, "resnet50", 1, on="A100")
    assert 1 < calm_gain < gain < 16
    with pytest.raises(InvalidInput, match="no goodput is known of job type resnet50 on TPU"):
        rate(model, "resnet50", 1, on="TPU")


def test_goodput_of_a_part_of_a_gpu_is_an_error_and_not_a_job_that_stands_still_for_ever() -> None:
    model = GoodputSpeeds(*load_goodput(shipped("goodput_fitted")))
    assert model.epochs(job("resnet50", gpus=0.5), at(2, on="A100"), 1.0) > 0
    with pytest.raises(InvalidInput, match=r"of job type resnet50 on 0\.5 GPUs; whole ones were expected"):
        model.epochs(job("resnet50", gpus=0.5), at(1, on="A100"), 1.0)


def test_a_timing_is_found_again_in_what_it_gives() -> None:
    """And a network that nobody measured counts as fast as the one that somebody did."""
    truth = Timing(0.02, 0.002, 0.03, 0.004, 0.06, 0.006, 1.5)
    seen = [
        Iteration(n, k, m, float(truth.iteration_s(n, k, np.array(m), np.array(0.0))))
        for n, k in ((1, 1), (2, 1), (4, 1), (8, 1), (16, 2), (32, 4))
        for m in (8.0, 16.0, 32.0)
    ]
    found = fit_timing(seen)
    for one in seen:
        again = float(found.iteration_s(one.gpus, one.nodes, np.array(one.gpu_batch), np.array(0.0)))
        assert again == pytest.approx(one.seconds, rel=0.01)
    at_home = fit_timing([one for one in seen if one.nodes == 1])
    assert (at_home.network_base_s, at_home.network_further_s) == (at_home.local_base_s, at_home.local_further_s)
    with pytest.raises(ValueError, match="on several GPUs"):
        fit_timing([one for one in seen if one.gpus == 1])


def test_a_recorded_job_takes_its_recorded_time_at_full_size() -> None:
    """Equality with simulators that replay durations: a second is a second, to the bit."""
    model = RecordedSpeeds()
    assert model.epochs(job(workers=7), at(7), 1234.5) == 1234.5
    assert model.epochs(job(workers=8), at(2), 100.0) == 25.0
    assert RecordedSpeeds(0.5).epochs(job(workers=4), at(1), 100.0) == 50.0
    assert RecordedSpeeds(0.0).epochs(job(workers=4), at(0), 100.0) == 0.0
