"""Makes the coefficients that ship with the package from the public tables that they were fitted to."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import astuple
from pathlib import Path

from fedsched.policy.optimus import SpeedCurve
from fedsched.sim.dl2_workload import EPOCH_SAMPLES
from fedsched.sim.speeds.analytic import fit_curves
from fedsched.sim.speeds.goodput import BatchEfficiency, Iteration, Timing, fit_timing
from fedsched.sim.speeds.points import read_points
from fedsched.sim.speeds.scaling import Measurement, ScalingCurve, fit_curve

GPUS_PER_NODE = 8
"""Of the machines on which ElasticFlow's authors measured."""

SCALING_ERRORS = {"A100": (0.9, 3.4), "K80": (3.5, 9.8), "P100": (1.2, 5.4), "T4": (3.4, 17.6), "V100": (6.6, 26.8)}
"""Of the scaling curves by GPU type, in percent: the median, and what nine in ten measurements stay within."""

UNSEEN_ERRORS = {"A100": (3.2, 8.7), "K80": (7.5, 20.0), "P100": (4.0, 16.0), "T4": (7.6, 39.5), "V100": (22.0, 46.4)}
"""The same of measurements that the curve was not fitted to, between others of the same job type."""

Key = tuple[str, str]
"""GPU type and job type."""

TRAININGS = {
    "LM": BatchEfficiency(20, 640, 80, 200, 60_000),
    "ResNet-18": BatchEfficiency(128, 4096, 256, 1500, 50_000),
    "ResNet-50": BatchEfficiency(128, 8192, 128, 8000, 1_281_167),
    "Transformer": BatchEfficiency(64, 2048, 256, 2000, 29_000),
    "bert": BatchEfficiency(64, 1024, 128, 500, 88_000),
    "cifar10": BatchEfficiency(128, 8192, 4096, 1500, 50_000),
    "deepspeech2": BatchEfficiency(32, 640, 64, 300, 28_000),
    "gpt2": BatchEfficiency(64, 1024, 256, 1000, 20_000),
    "imagenet": BatchEfficiency(256, 8192, 256, 8000, 1_281_167),
    "inception3": BatchEfficiency(128, 4096, 128, 8000, 1_281_167),
    "resnet50": BatchEfficiency(128, 8192, 256, 8000, 1_281_167),
    "resnet50_cifar10": BatchEfficiency(128, 4096, 256, 1500, 50_000),
    "vgg16": BatchEfficiency(128, 4096, 256, 6000, 1_281_167),
}
"""Assumed, not measured: sizes of well-known data sets, and batches and noise scales of the usual magnitude."""


def elasticflow(data_dir: Path) -> Iterator[tuple[Key, int, Measurement]]:
    """GPU and job type, batch over all GPUs, and the measurement."""
    for accelerator in ("A100", "T4"):
        for path in sorted((data_dir / "elasticflow-profiles" / f"throughputs_{accelerator}").glob("*.csv")):
            with path.open() as file:
                for row in csv.DictReader(file):
                    batch = int(row.pop("global_batch_size"))
                    for gpus, speed in row.items():
                        if speed and float(speed) > 0:
                            nodes = max(1, int(gpus) // GPUS_PER_NODE)
                            yield (accelerator, path.stem), batch, Measurement(int(gpus), nodes, float(speed))


def gavel(data_dir: Path) -> Iterator[tuple[Key, int, Measurement]]:
    """GPU and job type, batch of each GPU, and the measurement. Each GPU's steps count, so they add up."""
    with (data_dir / "gavel" / "isolated_throughputs.csv").open() as file:
        for row in csv.DictReader(file):
            accelerator, _, spread = row["worker_type"].partition("_")
            model = re.fullmatch(r"(.*) \(batch size (\d+)\)", row["job_type"])
            gpus, speed = int(row["scale_factor"]), float(row["steps_per_s"])
            if model is None or speed <= 0 or (spread and gpus == 1):
                continue
            measured = Measurement(gpus, gpus if spread else 1, speed)
            yield (accelerator.upper(), model[1]), int(model[2]), measured


def analytic(data_dir: Path) -> dict[str, SpeedCurve]:
    return fit_curves(read_points(data_dir / "dl2" / "speed.csv"), EPOCH_SAMPLES)


def scaling_measurements(data_dir: Path) -> dict[Key, list[Measurement]]:
    """By GPU type and job type, which names the batch; only those that were measured on several GPUs."""
    found: dict[Key, list[Measurement]] = {}
    for source in (elasticflow, gavel):
        for (accelerator, model), batch, measured in source(data_dir):
            found.setdefault((accelerator, f"{model} (batch size {batch})"), []).append(measured)
    return {key: seen for key, seen in found.items() if len({one.gpus for one in seen}) > 1}


def unseen(data_dir: Path) -> dict[str, list[float]]:
    """By GPU type: errors, in percent, at each measurement between others, of a curve that is fitted to the others."""
    found: dict[str, list[float]] = {}
    for (accelerator, _), measured in scaling_measurements(data_dir).items():
        most = max(one.gpus for one in measured)
        for left_out in (one for one in measured if 1 < one.gpus < most):
            others = [one for one in measured if (one.gpus, one.nodes) != (left_out.gpus, left_out.nodes)]
            told = fit_curve(others)(left_out.gpus, left_out.nodes)
            found.setdefault(accelerator, []).append(100 * abs(told / left_out.iterations_per_s - 1))
    return found


def scaling(data_dir: Path) -> dict[Key, ScalingCurve]:
    return {key: fit_curve(measured) for key, measured in scaling_measurements(data_dir).items()}


def iterations(data_dir: Path) -> dict[Key, list[Iteration]]:
    """By GPU type and job type; only those whose training is assumed above."""
    found: dict[Key, list[Iteration]] = {}
    for key, batch, one in elasticflow(data_dir):
        seconds = 1 / one.iterations_per_s
        found.setdefault(key, []).append(Iteration(one.gpus, one.nodes, batch / one.gpus, seconds))
    for key, batch, one in gavel(data_dir):
        seconds = one.gpus / one.iterations_per_s
        found.setdefault(key, []).append(Iteration(one.gpus, one.nodes, batch, seconds))
    return {key: seen for key, seen in found.items() if key[1] in TRAININGS}


def goodput(data_dir: Path) -> dict[Key, Timing]:
    return {key: fit_timing(seen) for key, seen in iterations(data_dir).items()}


def numbers(values: Iterable[float]) -> str:
    """A YAML list; a millionth of a second in a curve of milliseconds is nothing."""
    return "[" + ", ".join(f"{value:.5g}" if value > 1e-8 else "0" for value in values) + "]"


def grouped(of: Mapping[Key, str]) -> Iterator[str]:
    for accelerator in sorted({accelerator for accelerator, _ in of}):
        yield f"  {accelerator}:"
        for key in sorted(of):
            if key[0] == accelerator:
                yield f"    {key[1]}: {of[key]}"


def analytic_text(curves: Mapping[str, SpeedCurve]) -> str:
    return "\n".join(
        [
            "# How DL2's eight kinds of model scale: Optimus's form, fitted by us to DL2's measured speeds.",
            "# Seconds per epoch with w workers and p parameter servers: a/w + b + c*w/p + d*w + e*p.",
            "# Median error 2 to 7 % by model, nine in ten measurements within 7 to 21 %.",
            "curves:",
            *(f"  {job_type}: {numbers(curves[job_type].coefficients)}" for job_type in sorted(curves)),
            "",
        ]
    )


def scaling_text(curves: Mapping[Key, ScalingCurve]) -> str:
    return "\n".join(
        [
            "# Seconds per iteration on n GPUs in k nodes, fitted by us to public tables of ElasticFlow (A100, T4)",
            "# and Gavel (K80, P100, V100): compute/n + fixed + [n>1] sync/n + [k>1] (network/n + shared)",
            "# + log2(n) per_doubling + log2(k) per_node_doubling. With A100 and T4 the batch is that of all GPUs;",
            "# with the others each GPU has its own, and its steps count.",
            "# Errors: the median, and what nine in ten measurements stay within; of measurements that were left",
            "# out of the fit in brackets. On V100 most jobs were measured slower on 4 GPUs of a node than on 2 or 8,",
            "# which no curve that grows follows.",
            *(
                f"# {accelerator}: {median} %, {ninety} % ({' %, '.join(map(str, UNSEEN_ERRORS[accelerator]))} %)"
                for accelerator, (median, ninety) in SCALING_ERRORS.items()
            ),
            "curves:",
            *grouped({key: numbers(astuple(curve)) for key, curve in curves.items()}),
            "",
        ]
    )


def goodput_text(timings: Mapping[Key, Timing]) -> str:
    lines = {
        key: f"{{compute: {numbers((one.compute_base_s, one.compute_sample_s))}, "
        f"local: {numbers((one.local_base_s, one.local_further_s))}, "
        f"network: {numbers((one.network_base_s, one.network_further_s))}, gamma: {one.gamma:.4g}}}"
        for key, one in timings.items()
    }
    return "\n".join(
        [
            "# Iteration times in Pollux's form, fitted by us to public tables of ElasticFlow (A100, T4) and Gavel",
            "# (K80, P100, V100). Median error by model up to 7 %, on V100 and of ResNet-18 on K80 up to 23 %.",
            "timings:",
            *grouped(lines),
            "# Assumed, not measured: sizes of well-known data sets, batches and noise scales of the usual magnitude.",
            "trainings:",
            *(
                f"  {job_type}: {{batch: {one.batch}, batch_max: {one.batch_max}, gpu_batch_max: {one.gpu_batch_max}, "
                f"noise: {one.noise:g}, epoch_samples: {one.epoch_samples:.7g}}}"
                for job_type, one in sorted(TRAININGS.items())
            ),
            "",
        ]
    )
