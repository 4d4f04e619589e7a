"""What all trainings share on the command line: where their files lie, how they go on, and what is seen meanwhile."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from fedsched.cli.output import note
from fedsched.errors import InvalidInput
from fedsched.files import alone, refuse_clashes, sweep, write_whole

Resume = Annotated[bool, typer.Option("--resume", help="Go on with a training that was interrupted.")]
Restart = Annotated[bool, typer.Option("--restart", help="Begin anew over an older training's files.")]
File = Annotated[
    Path,
    typer.Argument(
        metavar="FILE", help="Checkpoint file to write; the log and the state lie beside it.", show_default=False
    ),
]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a training's files lie: the weights, and beside them the best ones, the log and the state.

    Raises:
        InvalidInput: it is a folder.
    """

    file: Path

    def __post_init__(self) -> None:
        if self.file.is_dir() or not self.file.name:
            raise InvalidInput(f"{self.file} is a folder; a file to write was expected", "name a file in it")

    @property
    def best(self) -> Path:
        """Weights of the look with the lowest JCT."""
        return self._beside(".best" + self.file.suffix)

    @property
    def log(self) -> Path:
        """A CSV line for every row that is told."""
        return self._beside(".csv")

    @property
    def state(self) -> Path:
        """All that an interrupted training goes on from."""
        return self._beside(".state")

    def of(self, index: int, groups: int) -> Path:
        """Weights of one of several federations."""
        return self.file if groups == 1 else self._beside(f".{index + 1}{self.file.suffix}")

    def best_of(self, index: int, groups: int) -> Path:
        """The best weights of one of several federations."""
        return self.best if groups == 1 else self._beside(f".{index + 1}.best{self.file.suffix}")

    def _beside(self, ending: str) -> Path:
        return self.file.with_name(self.file.name.removesuffix(self.file.suffix) + ending)


def experiments_and_file(files: Sequence[Path]) -> tuple[list[Path], Path]:
    """What is named on the command line: experiments to learn from, and last the file to write.

    Raises:
        InvalidInput: there is no experiment.
    """
    *experiments, file = files
    if not experiments:
        raise InvalidInput(
            "one path is given; an experiment, or several, and a file to write were expected",
            "name the file to write last",
        )
    return experiments, file


def look_around(place: Place, read: Iterable[Path], weights: Iterable[Path] = ()) -> None:
    """Before anything else: whether all files can be written.

    Args:
        place: where the training's files lie.
        read: files that it is made from.
        weights: checkpoint files that are written, if not the place's own one only.

    Raises:
        InvalidInput: one cannot, or something else would be lost.
    """
    from fedsched.policy.checkpoint import refuse_bad_places

    read, weights = list(read), list(weights) or [place.file]
    if place.file.exists() and not place.file.is_file():
        raise InvalidInput(
            f"{place.file} is no regular file; a training keeps its log and its state beside one", "name a file"
        )
    refuse_clashes([*read, *weights], [place.log, place.state])
    refuse_bad_places(read, weights)


def goes_on(place: Place, *, resume: bool, restart: bool) -> bool:
    """Whether the training goes on from its state, or begins.

    Raises:
        InvalidInput: an older training's files are in the way, or there is nothing to go on from.
    """
    if resume and restart:
        raise InvalidInput("--resume and --restart were both given; one of them was expected", "leave one out")
    if resume:
        if not place.state.exists():
            raise InvalidInput(f"there is no training to go on with: {place.state} is missing", "leave --resume out")
        return True
    if place.state.exists() and not restart:
        raise InvalidInput(
            f"{place.state} is the state of a training that was begun before",
            "--resume goes on with it, --restart begins anew",
        )
    if place.log.exists() and not restart:
        raise InvalidInput(
            f"{place.log} is there and no training's state is; the log would be written over it",
            "name another file, or --restart",
        )
    return False


@contextmanager
def at_work(place: Place, weights: Iterable[Path] = ()) -> Iterator[None]:
    """While a training runs no other writes its files; whoever interrupts it is told whether it can go on.

    Args:
        weights: as in `look_around`.

    Raises:
        Conflict: another training is at work on them.
    """
    with alone(place.state):
        for path in (place.state, place.log, place.file, *weights):
            sweep(path)
        try:
            yield
        except (KeyboardInterrupt, OSError):
            left = f"--resume goes on from {place.state}" if place.state.exists() else "nothing is kept yet"
            note(f"the training is interrupted; {left}")
            raise


Row = Mapping[str, Any]


def write_log(path: Path, rows: Sequence[Row]) -> None:
    """Put the log in place in one step: CSV, a line per row; the same training writes the same one."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_whole(path, text.getvalue().encode())


def say(line: str) -> None:
    """A line for whoever watches; that nobody can any more ends no training."""
    with suppress(OSError):
        typer.echo(line, err=True)


# --- What is shown -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class View:
    """What people see of a log while it grows."""

    columns: Mapping[str, str]
    """Of the log, by their headings."""
    curve: str
    """The column whose course is drawn."""
    about: str
    """What that is."""
    done: str
    """The column that counts how far it is."""
    spare: tuple[str, ...] = ()
    """Headings that are left out where a terminal is narrow, the first one first."""

    def line(self, row: Row) -> str:
        """A row where there is no terminal."""
        named = ((name, row.get(name)) for name in self.columns.values())
        return ", ".join(f"{name} {_number(value)}" for name, value in named if value is not None)


Show = Callable[[Sequence[Row]], None]
"""Shows the log so far; the last row is the new one."""


@contextmanager
def shown(view: View, total: int, done: int = 0) -> Iterator[Show]:
    """Live numbers at a terminal, a line per row elsewhere.

    Args:
        view: what of it.
        total: how far it goes, in the view's unit.
        done: how far it is already.
    """
    if not sys.stderr.isatty():
        yield _Lines(view, gone_on=done > 0).show
        return
    from rich.console import Console, Group
    from rich.live import Live
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from fedsched.cli.output import grid

    bar = Progress(TextColumn(f"{view.done}s"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    task = bar.add_task(view.done, total=total, completed=done)
    terminal = Console(stderr=True)
    with Live(bar, console=terminal, refresh_per_second=4) as live:

        def show(rows: Sequence[Row]) -> None:
            bar.update(task, completed=rows[-1][view.done])
            lines = [tuple(_number(row.get(name)) for name in view.columns.values()) for row in rows[-12:]]
            table = grid(tuple(view.columns), lines, view.spare, terminal.width)
            live.update(Group(table, f"{view.about}: {curve(rows, view.curve)}", bar))

        yield show


class _Lines:
    """A line for each row that is new, for those who read them later.

    Args:
        view: what of it.
        gone_on: whether the first rows were told before an interruption.
    """

    def __init__(self, view: View, *, gone_on: bool) -> None:
        self._view = view
        self._told = -1 if gone_on else 0

    def show(self, rows: Sequence[Row]) -> None:
        """So many there are now."""
        for row in rows[self._told :]:
            say(self._view.line(row))
        self._told = len(rows)


def _number(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def curve(rows: Sequence[Row], column: str) -> str:
    """A column over the rows that have it, as a line of blocks, with its first, lowest and last value."""
    values = [row[column] for row in rows if column in row]
    if not values:
        return ""
    low, high = min(values), max(values)
    step = (high - low) / 7 or 1.0
    blocks = "".join("▁▂▃▄▅▆▇█"[round((value - low) / step)] for value in values[-60:])
    return f"{blocks}  first {values[0]:.4g}, lowest {low:.4g}, last {values[-1]:.4g}"
