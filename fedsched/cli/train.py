"""`fedsched train`: the commands that teach policies in simulation."""

from __future__ import annotations

import typer

from fedsched.cli.train_online import federated, online
from fedsched.cli.train_set import train_set
from fedsched.cli.train_speeds import speeds
from fedsched.cli.train_supervised import supervised

app = typer.Typer(help="Train policies in simulation.", no_args_is_help=True, rich_markup_mode=None)
app.command()(supervised)
app.command()(online)
app.command()(federated)
app.command("set")(train_set)
app.command()(speeds)
