"""The coefficients that ship are those that the public measurements give, and describe them as well as they say.

`FEDSCHED_REWRITE=1` writes the files anew.
"""

from __future__ import annotations

import os
from dataclasses import astuple
from pathlib import Path

import numpy as np
import pytest

from fedsched.core.job import Allocation
from fedsched.sim.dl2_workload import CLASSES, EPOCH_SAMPLES
from fedsched.sim.speeds.coefficients import load_analytic, load_goodput, load_scaling, shipped
from fedsched.sim.speeds.points import read_points
from tests.sim.speeds import fitted


def compare(name: str, text: str) -> None:
    """Write the file if asked to; that it holds the same is for the caller to say, digits differ between machines."""
    if os.environ.get("FEDSCHED_REWRITE"):
        shipped(name).write_text(text)
    comments = [line for line in text.splitlines() if line.startswith("#")]
    assert [line for line in shipped(name).read_text().splitlines() if line.startswith("#")] == comments


def errors_within(errors: list[float], median: float, ninety: float) -> bool:
    return bool(np.median(errors) <= median and np.quantile(errors, 0.9) <= ninety)


def test_dl2s_models_in_optimus_form(data_dir: Path) -> None:
    """`dl2_fitted` stands for DL2's measurements wherever they may not go."""
    curves = fitted.analytic(data_dir)
    compare("dl2_fitted", fitted.analytic_text(curves))
    loaded = load_analytic(shipped("dl2_fitted"))
    assert list(loaded) == sorted(one.model for one in CLASSES)
    for model, points in read_points(data_dir / "dl2" / "speed.csv").items():
        assert loaded[model].coefficients == pytest.approx(curves[model].coefficients, rel=1e-2, abs=1e-4)
        errors = [
            abs(loaded[model](Allocation(workers, ps)) * EPOCH_SAMPLES[model] / speed - 1)
            for (ps, workers), speed in points.items()
            if speed > 0
        ]
        assert errors_within(errors, 0.075, 0.215), model


def test_scaling_curves(data_dir: Path) -> None:
    """Whoever compares GPU types in simulation compares these curves."""
    curves = fitted.scaling(data_dir)
    compare("scaling_fitted", fitted.scaling_text(curves))
    loaded = load_scaling(shipped("scaling_fitted"))
    assert {(accelerator, kind) for accelerator in loaded for kind in loaded[accelerator]} == set(curves)
    errors: dict[str, list[float]] = {}
    for (accelerator, kind), measured in fitted.scaling_measurements(data_dir).items():
        curve = loaded[accelerator][kind]
        assert astuple(curve) == pytest.approx(astuple(curves[accelerator, kind]), rel=1e-3, abs=1e-5)
        found = [100 * abs(curve(one.gpus, one.nodes) / one.iterations_per_s - 1) for one in measured]
        errors.setdefault(accelerator, []).extend(found)
    assert sorted(errors) == sorted(fitted.SCALING_ERRORS)
    for accelerator, (median, ninety) in fitted.SCALING_ERRORS.items():
        assert errors_within(errors[accelerator], median + 0.1, ninety + 0.1), accelerator


def test_scaling_curves_say_what_was_not_measured(data_dir: Path) -> None:
    """A form with a coefficient per measurement repeats what it was told, and nothing else."""
    errors = fitted.unseen(data_dir)
    assert sorted(errors) == sorted(fitted.UNSEEN_ERRORS)
    for accelerator, (median, ninety) in fitted.UNSEEN_ERRORS.items():
        assert errors_within(errors[accelerator], median, ninety), accelerator


def test_goodput_timings(data_dir: Path) -> None:
    """Goodput is only as good as the iteration times under it."""
    timings = fitted.goodput(data_dir)
    compare("goodput_fitted", fitted.goodput_text(timings))
    loaded, trainings = load_goodput(shipped("goodput_fitted"))
    assert trainings == fitted.TRAININGS
    assert {(accelerator, kind) for accelerator in loaded for kind in loaded[accelerator]} == set(timings)
    for (accelerator, kind), seen in fitted.iterations(data_dir).items():
        errors = []
        for one in seen:
            batch, steps = np.array(one.gpu_batch), np.array(0.0)
            now = float(loaded[accelerator][kind].iteration_s(one.gpus, one.nodes, batch, steps))
            again = float(timings[accelerator, kind].iteration_s(one.gpus, one.nodes, batch, steps))
            assert now == pytest.approx(again, rel=0.02)
            errors.append(abs(now / one.seconds - 1))
        scattered = accelerator == "V100" or (accelerator, kind) == ("K80", "ResNet-18")
        assert np.median(errors) <= (0.23 if scattered else 0.07), (accelerator, kind)
