"""The commands that measure: bench core."""

from __future__ import annotations

from typing import Annotated

import typer

from fedsched.cli.output import Format, Output, emit, table


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    group = typer.Typer(help="Measure what things cost here.", no_args_is_help=True, rich_markup_mode=None)
    group.callback()(_group)
    group.command()(core)
    app.add_typer(group, name="bench")


def _group() -> None:
    """Keeps `core` a command of its own: a group of one would be merged into it."""


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
