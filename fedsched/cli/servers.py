"""Commands that are the federation's processes: agent run, server run, aggregator run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Config = Annotated[Path, typer.Option("--config", metavar="FILE", help="Configuration of the process (YAML).")]


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    for name, help_text, command in (
        ("agent", "The process beside a cluster.", agent),
        ("server", "The controller.", server),
        ("aggregator", "The process that combines the clusters' policy gradients.", aggregator),
    ):
        group = typer.Typer(help=help_text, no_args_is_help=True, rich_markup_mode=None)
        group.callback()(_group)
        group.command("run")(command)
        app.add_typer(group, name=name)


def _group() -> None:
    """Keeps `run` a command of its own: a group of one would be merged into it."""


def agent(config: Config) -> int:
    """Run a cluster's agent until it is told to end."""
    from fedsched.agent.app import main
    from fedsched.config import AgentConfig
    from fedsched.process import run_from

    return run_from(config, "agent", AgentConfig, main)


def server(config: Config) -> int:
    """Run a controller until it is told to end."""
    from fedsched.config import ControllerConfig
    from fedsched.controller.app import main
    from fedsched.process import run_from

    return run_from(config, "controller", ControllerConfig, main)


def aggregator(config: Config) -> int:
    """Run the aggregator until it is told to end."""
    from fedsched.aggregator.app import main
    from fedsched.config import AggregatorConfig
    from fedsched.process import run_from

    return run_from(config, "aggregator", AggregatorConfig, main)
