"""Carries trainings out for the command line: what is there already, how far it is, what came out, where it lies."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from fedsched.errors import InvalidInput
from fedsched.files import refuse_clashes
from fedsched.policy.checkpoint import refuse_bad_places
from fedsched.sim import teaching_state
from fedsched.sim.experiment import files_of
from fedsched.sim.teaching import Recipe, State, Tell, Training, write_log

SHOWN = {
    "RUN": "episode",
    "SLOTS": "slots",
    "CHOICES": "decisions",
    "VERSION": "version",
    "LOSS": "loss",
    "ENTROPY": "entropy",
    "REWARD": "mean_reward",
    "JCT": "train_jct_slots",
    "HELD-OUT": "jct_slots.all",
}
"""Columns that people see while it runs, and of the log; both JCTs are averages in slots."""
SPARE = ("LOSS", "CHOICES", "VERSION")
"""Left out where a terminal is narrow, the first one first."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a training's files lie: the weights, and beside them the best ones, the log and the state."""

    file: Path

    @property
    def best(self) -> Path:
        """Weights of the look with the lowest JCT."""
        return self._beside(".best" + self.file.suffix)

    @property
    def log(self) -> Path:
        """A line of CSV per run."""
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


def look_around(place: Place, recipe: Recipe, scenario: Path) -> None:
    """Before anything else: whether all files can be written.

    Raises:
        InvalidInput: one cannot, or something else would be lost.
    """
    read = [*files_of(scenario), *([] if recipe.source in ("builtin", "scratch") else [Path(recipe.source)])]
    groups = range(recipe.groups)
    weights = [name(index, len(groups)) for index in groups for name in (place.of, place.best_of)]
    refuse_clashes([*read, *weights], [place.log, place.state])
    refuse_bad_places(read, weights)


def begin(place: Place, recipe: Recipe, *, resume: bool, restart: bool) -> Training:
    """The training to carry out, from its beginning or from where it was.

    Raises:
        InvalidInput: an older training's files are in the way, or there is nothing to go on from.
        CorruptCheckpoint: the state or the first weights cannot be used.
    """
    if resume and restart:
        raise InvalidInput("--resume and --restart were both given; one of them was expected", "leave one out")
    if resume:
        if not place.state.exists():
            raise InvalidInput(f"there is no training to go on with: {place.state} is missing", "leave --resume out")
        return teaching_state.load(place.state, recipe)
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
    return Training(recipe)


def carry_out(training: Training, episodes: int, place: Place, command: str) -> dict[str, Any]:
    """Train, keep the state after every run, write weights and log; returns what came of it.

    Raises:
        Failed: a run ended early; what was learnt before is kept.
        KeyboardInterrupt: the same.
    """
    begun_s, decided = time.process_time(), _decisions(training.state)
    slots = sum(training.state.slots.values())
    with _shown(episodes, training.state) as show:

        def tell(row: dict[str, Any], state: State) -> None:
            # The state first: what the log tells must never be ahead of what can be gone on from.
            teaching_state.kept(training).save(place.state)
            write_log(place.log, state.rows)
            show(row, state)

        training.run(episodes, tell)
    cpu_s = time.process_time() - begun_s
    state = training.state
    write_log(place.log, state.rows)  # it may have been missed by a training that was killed after its last run
    _write_weights(training, place, command)
    looks = [row for row in state.rows if "jct_slots.all" in row]
    return {
        "file": str(place.file),
        "best_file": str(place.best),
        "log": str(place.log),
        "episodes": state.episodes,
        "slots": sum(state.slots.values()),
        "decisions": _decisions(state),
        "version": max(standing.active.record.version for standing in state.standings),
        "first_jct_slots": round(looks[0]["jct_slots.all"], 3),
        "best_jct_slots": round(state.best["jct_slots.all"], 3),
        "best_episode": state.best["episode"],
        "last_jct_slots": round(looks[-1]["jct_slots.all"], 3),
        "cpu_s": round(cpu_s, 2),
        "slots_per_cpu_s": round((sum(state.slots.values()) - slots) / cpu_s, 1),
        "decisions_per_cpu_s": round((_decisions(state) - decided) / cpu_s, 1),
    }


def _decisions(state: State) -> int:
    return sum(learner.recorded for learner in state.learners.values())


def _write_weights(training: Training, place: Place, command: str) -> None:
    state, recipe = training.state, training.recipe
    groups = len(state.standings)
    story: dict[str, str | int | float] = {
        "command": command,
        "experiment": recipe.name,
        "seed": recipe.seed,
        "episodes": state.episodes,
        "slots": sum(state.slots.values()),
        "decisions": _decisions(state),
        "best_episode": state.best["episode"],
        "best_jct_slots": round(state.best["jct_slots.all"], 3),
    }
    for index, standing in enumerate(state.standings):
        active = standing.active
        made = {**story, "version": active.record.version}
        training.checkpoint(active.checkpoint.arrays, made).save(place.of(index, groups))
        training.checkpoint(state.best_arrays[index], story).save(place.best_of(index, groups))


# --- What is shown -----------------------------------------------------------------------------------------------


@contextmanager
def _shown(episodes: int, state: State) -> Iterator[Tell]:
    """Live numbers at a terminal, a line per run elsewhere."""
    if not sys.stderr.isatty():
        yield lambda row, _: typer.echo(_line(row), err=True)
        return
    from rich.console import Console, Group
    from rich.live import Live
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from fedsched.cli.output import grid

    bar = Progress(TextColumn("runs"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    task = bar.add_task("runs", total=episodes, completed=state.episodes)
    terminal = Console(stderr=True)
    with Live(bar, console=terminal, refresh_per_second=4) as live:

        def show(row: dict[str, Any], now: State) -> None:
            bar.update(task, completed=now.episodes)
            lines = [_cells(row) for row in now.rows[-12:]]
            live.update(
                Group(grid(tuple(SHOWN), lines, SPARE, terminal.width), f"held-out JCT: {curve(now.rows)}", bar)
            )

        yield show


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(_number(row.get(name)) for name in SHOWN.values())


def _line(row: Mapping[str, Any]) -> str:
    named = ((name, row.get(name)) for name in SHOWN.values())
    return ", ".join(f"{name} {_number(value)}" for name, value in named if value is not None)


def _number(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def curve(rows: Sequence[Mapping[str, Any]]) -> str:
    """The held-out JCT over the looks so far, as a line of blocks, with its first, lowest and last value."""
    values = [row["jct_slots.all"] for row in rows if "jct_slots.all" in row]
    if not values:
        return ""
    low, high = min(values), max(values)
    step = (high - low) / 7 or 1.0
    blocks = "".join("▁▂▃▄▅▆▇█"[round((value - low) / step)] for value in values[-60:])
    return f"{blocks}  first {values[0]:.4g}, lowest {low:.4g}, last {values[-1]:.4g}"
