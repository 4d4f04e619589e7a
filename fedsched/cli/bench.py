"""The commands that measure: bench core, bench sim."""

from __future__ import annotations

from typing import Annotated

import typer

from fedsched.cli.output import Format, Output, emit, table


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    group = typer.Typer(help="Measure what things cost here.", no_args_is_help=True, rich_markup_mode=None)
    group.command()(core)
    group.command()(sim)
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
    from fedsched.errors import InvalidInput
    from fedsched.sim.pace import CASES, DEFAULT, measure

    names = tuple(name.strip() for name in cases.split(",") if name.strip()) or DEFAULT
    unknown = [name for name in names if name not in CASES]
    if unknown:
        raise InvalidInput(f"there is no case {', '.join(unknown)}", f"the cases are {', '.join(CASES)}")
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
