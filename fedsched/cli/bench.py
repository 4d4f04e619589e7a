"""The commands that measure: bench core, sim, decision, train, scaling, training, sharing."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedsched.cli.finite import Finite
from fedsched.cli.output import Format, Output, emit, table

if TYPE_CHECKING:
    from fedsched.sim.comparing import Interval


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    group = typer.Typer(help="Measure what things cost here.", no_args_is_help=True, rich_markup_mode=None)
    group.command()(core)
    group.command()(sim)
    group.command()(decision)
    group.command()(train)
    group.command()(scaling)
    group.command()(training)
    group.command()(sharing)
    app.add_typer(group, name="bench")


def core(
    scenarios: Annotated[int, typer.Option(min=1, help="Simulated clusters that every policy runs.")] = 10,
    output: Output = Format.TABLE,
) -> None:
    """Measure the scheduling core and each policy.

    In CPU time over whole simulations, and in latency of a decision.
    """
    from fedsched.sim.bench import BASELINE, measure

    costs = measure(scenarios)
    if not emit(costs, output, [cost.policy for cost in costs]):
        table(
            ("POLICY", "JOBS", "SLOTS", "CPU", f"TO {BASELINE.upper()}", "DECISION P50", "P99"),
            [
                (
                    cost.policy,
                    cost.jobs,
                    cost.slots,
                    f"{cost.cpu_s:.2f}s",
                    f"{cost.ratio:.2f}",
                    f"{cost.decision_ms_p50:.2f}ms",
                    f"{cost.decision_ms_p99:.2f}ms",
                )
                for cost in costs
            ],
        )


def sim(
    cases: Annotated[
        str, typer.Option(help="Only these, with commas between them; `million` runs only if it is named.")
    ] = "",
    output: Output = Format.TABLE,
) -> None:
    """Measure how fast the simulator runs workloads of known size: CPU time, jobs and events a second, memory."""
    from fedsched.sim.pace import CASES, DEFAULT, measure

    names = _chosen(cases, CASES, DEFAULT)
    paces = measure(names, lambda name: typer.echo(f"running {name}", err=True))
    if not emit({"cases": paces}, output, names):
        table(
            ("CASE", "JOBS", "POLICY", "CPU", "JOBS/S", "EVENTS/S", "PEAK"),
            [
                (
                    pace.name,
                    f"{pace.jobs:,}",
                    pace.policy,
                    f"{pace.cpu_s:.2f}s",
                    f"{pace.jobs_per_cpu_s:,.0f}",
                    f"{pace.events_per_cpu_s:,.0f}",
                    f"{pace.peak_mib:,.0f} MiB",
                )
                for pace in paces
            ],
        )


def scaling(
    rounds: Annotated[int, typer.Option(min=1, help="How often each kind of change is made.")] = 10,
    batch: Annotated[int, typer.Option(min=4, help="Images of one step: how much it computes.")] = 4,
    streamed: Annotated[
        bool, typer.Option("--streamed", help="As if every task had a machine of its own: tensors through gRPC.")
    ] = False,
    output: Output = Format.TABLE,
) -> None:
    """Measure how long a resize holds up a running job, beside a checkpoint and a restart of the same job.

    Trains ResNet-50 (102 MB) on synthetic images with real processes of this machine.
    """
    from fedsched.bench.job import Load
    from fedsched.bench.scaling import measure

    result = measure(rounds, Load(batch=batch), lambda text: typer.echo(text, err=True), streamed=streamed)
    if not emit(result, output, [case.change for case in result.cases]):
        table(
            (
                "CHANGE",
                "RESIZES",
                "PAUSE P50",
                "P99",
                "STEP P50",
                "LONGEST BEFORE",
                "LONGEST STEP",
                "RESTART",
                "RATIO",
                "KEPT",
            ),
            [
                (
                    case.change,
                    case.resizes,
                    f"{case.pause_ms_p50:.2f}ms",
                    f"{case.pause_ms_p99:.2f}ms",
                    f"{case.step_ms_p50:.0f}ms",
                    f"{case.longest_step_before_ms_p50:.0f}ms",
                    f"{case.longest_step_ms_p50:.0f}ms",
                    f"{case.checkpoint_restart_ms:,.0f}ms",
                    f"{case.ratio:,.0f}",
                    f"{case.throughput_kept:.0%}",
                )
                for case in result.cases
            ],
        )


def training(
    pairs: Annotated[int, typer.Option(min=1, help="How often the two are run in turn.")] = 3,
    steps: Annotated[int, typer.Option(min=1, help="Steps of each run that count.")] = 20,
    batch: Annotated[int, typer.Option(min=4, help="Images of one step, over both workers.")] = 4,
    output: Output = Format.TABLE,
) -> None:
    """Measure synchronous training with two workers and two parameter servers beside DistributedDataParallel.

    Trains ResNet-50 (102 MB) on synthetic images, with gloo over as many processes as there are workers.
    """
    from fedsched.bench.job import Load
    from fedsched.bench.training import measure

    result = measure(pairs, steps, Load(batch=batch), lambda text: typer.echo(text, err=True))
    if not emit(result, output, ["training"]):
        table(
            ("MODEL", "PS", "DDP", "RATIO", "THROUGH GRPC", "WIRE BYTES"),
            [
                (
                    f"{result.model_mb:.0f} MB",
                    f"{result.ps_steps_per_s:.2f}/s",
                    f"{result.ddp_steps_per_s:.2f}/s",
                    f"{result.ratio:.2f}",
                    f"{result.streamed_steps_per_s:.2f}/s",
                    f"{result.wire_bytes_ratio:.3f}",
                )
            ],
        )


def decision(
    policies: Annotated[str, typer.Option(help="Policies to measure, with commas between them.")] = "",
    slots: Annotated[int, typer.Option(min=2, help="Decisions of each.")] = 300,
    output: Output = Format.TABLE,
) -> None:
    """Measure how long policies take to decide a slot, in CPU time of one core.

    On two clusters of DL2's servers that stay full of jobs; places for what is granted are found meanwhile.
    """
    import os

    # Before numpy is loaded: threads of its own would be timed too.
    os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"))
    from fedsched.sim.decision_pace import POLICIES, measure

    names = tuple(name.strip() for name in policies.split(",") if name.strip()) or POLICIES
    paces = measure(names, slots=slots)
    if not emit({"cases": paces}, output, [f"{pace.policy}/{pace.jobs}" for pace in paces]):
        table(
            ("JOBS", "SERVERS", "POLICY", "P50", "P99"),
            [(pace.jobs, pace.servers, pace.policy, f"{pace.p50_ms:.2f}ms", f"{pace.p99_ms:.2f}ms") for pace in paces],
        )


def train(
    cases: Annotated[str, typer.Option(help="Only these, with commas between them.")] = "",
    output: Output = Format.TABLE,
) -> None:
    """Measure how fast policies are trained: environment steps, slots and updates a second of CPU."""
    from fedsched.sim.teaching_pace import CASES, measure

    names = _chosen(cases, CASES, CASES)
    paces = measure(names, lambda name: typer.echo(f"training {name}", err=True))
    if not emit({"cases": paces}, output, names):
        table(
            ("CASE", "POLICY", "MODE", "CLUSTERS", "CPU", "STEPS/S", "SLOTS/S", "UPDATES/S"),
            [
                (
                    pace.name,
                    pace.policy,
                    pace.mode,
                    pace.clusters,
                    f"{pace.cpu_s:.2f}s",
                    f"{pace.steps_per_cpu_s:,.0f}",
                    f"{pace.slots_per_cpu_s:,.1f}",
                    f"{pace.updates_per_cpu_s:,.1f}",
                )
                for pace in paces
            ],
        )


def _chosen(text: str, cases: Collection[str], usual: Iterable[str]) -> tuple[str, ...]:
    """The cases that the text names, or the usual ones where it names none.

    Raises:
        InvalidInput: there is no such case.
    """
    from fedsched.errors import InvalidInput

    names = tuple(name.strip() for name in text.split(",") if name.strip())
    unknown = [name for name in names if name not in cases]
    if unknown:
        raise InvalidInput(f"there is no case {', '.join(unknown)}", f"the cases are {', '.join(cases)}")
    return names or tuple(usual)


def sharing(
    experiment: Annotated[Path, typer.Argument(help="The experiment's YAML file, with a federation.")],
    policy: Annotated[str, typer.Option(help="Label of the policy that learns speeds; by default the first.")] = "",
    together: Annotated[str, typer.Option(help="How many clusters share, with commas between.")] = "1,2,4,8",
    seeds: Annotated[int, typer.Option(min=1, help="Trainings of each.")] = 3,
    held_out: Annotated[int, typer.Option(min=1, help="Workloads that what was learned is judged on.")] = 1,
    tolerance: Annotated[
        float, typer.Option(click_type=Finite(min=0.0), help="What is good enough, over the greedy's JCT.")
    ] = 0.1,
    slots: Annotated[int, typer.Option(min=2, max=64, help="Of each cluster, until which it is looked at.")] = 20,
    output: Output = Format.TABLE,
) -> None:
    """Measure how many slots clusters need to learn speeds, alone and sharing what they see.

    Good enough is a mean JCT within the tolerance of that of the greedy policy that knows the true speeds.
    """
    from fedsched.errors import InvalidInput
    from fedsched.sim.experiment import load_experiment
    from fedsched.sim.speed_curves import curves, summary

    try:
        sizes = sorted({1, *(int(size) for size in together.split(","))})
        if sizes[0] < 1:
            raise ValueError
    except ValueError:
        raise InvalidInput(
            f"--together is {together!r}; whole numbers above 0 were expected, with commas between", "try 1,2,4,8"
        ) from None
    declared = load_experiment(experiment)
    label = policy or next(iter(declared.policies))
    if label not in declared.policies:
        raise InvalidInput(f"{experiment} has no policy {label}", f"take one of {', '.join(declared.policies)}")
    found = curves(
        declared,
        label,
        sizes=sizes,
        seeds=range(seeds),
        held_out=held_out,
        slots=slots,
        tell=lambda text: typer.echo(text, err=True),
    )
    speedups = summary(found, tolerance)
    if not emit({"speedups": speedups, "curves": found}, output, [str(speedup.together) for speedup in speedups]):
        table(
            ("TOGETHER", "SLOTS", "TO ALONE", "REACHED", "AT THE END", "WORST AGAINST ALONE"),
            [
                (
                    speedup.together,
                    _told(speedup.slots, ".1f"),
                    _told(speedup.to_alone, ".2f"),
                    f"{speedup.reached:.0%}",
                    _told(speedup.excess, "+.1%"),
                    f"{speedup.worst_cluster} {_told(speedup.worst, '+.1%')}",
                )
                for speedup in speedups
            ],
        )


def _told(found: Interval, form: str) -> str:
    """A mean, and half its interval where there is one."""
    half = "" if found.half is None else f" ±{found.half:{form.removeprefix('+')}}"
    return f"{found.mean:{form}}{half}"
