"""`fedsched policy card`: where weights come from."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from fedsched.cli.output import Format, Output, emit, table


def card(
    weights: Annotated[
        str, typer.Argument(metavar="WEIGHTS", help="A policy whose weights ship, or a checkpoint file.")
    ] = "dl2",
    output: Output = Format.TABLE,
) -> None:
    """Show what made a checkpoint: command, data, seeds, steps, time, results. The file is verified, too."""
    from fedsched.policy import cards

    found = cards.read(cards.SHIPPED.get(weights) or Path(weights))
    plain = asdict(found)
    if not emit(plain, output, [found.file]):
        told = {**{name: value for name, value in plain.items() if name != "made"}, **found.made}
        table(("CHECKPOINT", ""), list(told.items()))
