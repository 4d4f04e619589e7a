"""Options of the command line, all at once: what is promised of one kind holds for every command that has it."""

from __future__ import annotations

from collections.abc import Iterator

import click
import pytest
import typer.main

from fedsched.cli.main import app


def options(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[str, click.Parameter]]:
    """All parameters of a command and of those below it, by what the user types."""
    for param in command.params:
        yield " ".join((*path, param.opts[0])), param
    if isinstance(command, click.Group):
        for name, below in command.commands.items():
            yield from options(below, (*path, name))


OPTIONS = dict(options(typer.main.get_command(app)))
NUMBERS = {name: param for name, param in OPTIONS.items() if isinstance(param.type, click.types.FloatParamType)}


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e999"])
def test_no_option_takes_what_is_no_number(value: str) -> None:
    """NaN passes every bound, and is found as weights that are not finite, after an hour of training."""
    assert {"submit --timeout", "train online --learning-rate"} <= set(NUMBERS)
    taken = []
    for name, param in NUMBERS.items():
        try:
            param.type.convert(value, param, None)
        except click.BadParameter:
            continue
        taken.append(name)
    assert not taken
