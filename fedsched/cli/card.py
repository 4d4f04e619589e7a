"""`fedsched policy card`: where weights come from."""

from __future__ import annotations

import difflib
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
    from fedsched.errors import NotFound
    from fedsched.policy import cards, plugins

    path = cards.SHIPPED.get(weights) or Path(weights)
    if not path.exists():
        ship = ", ".join(cards.SHIPPED)
        if weights in plugins.available():
            raise NotFound(f"policy {weights} has no weights", f"{ship} have, and any file that was trained")
        near = difflib.get_close_matches(weights, cards.SHIPPED, n=1)
        raise NotFound(
            f"there is no file {weights}, and no policy of this name whose weights ship",
            f"did you mean {near[0]}?" if near else f"check the path; the weights of {ship} ship",
        )
    found = cards.read(path)
    plain = asdict(found)
    if not emit(plain, output, [found.file]):
        told = {**{name: value for name, value in plain.items() if name != "made"}, **found.made}
        table(("CHECKPOINT", ""), list(told.items()))
