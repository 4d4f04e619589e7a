"""Numbers on the command line: without `nan`, which passes every bound, and `inf`, which nothing can be done with."""

from __future__ import annotations

import math
from typing import Any

import click


class Finite(click.FloatRange):
    """A number with a lower bound, an upper one, or both."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number.

        Raises:
            click.BadParameter: it is out of bounds, or none.
        """
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number", param, ctx)
        return number
