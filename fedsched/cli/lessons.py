"""What `sim run` and `sim compare` do before they judge: have policies taught, and show how that went."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import typer

from fedsched.cli.output import table
from fedsched.cli.sim import Selection
from fedsched.sim.comparing import Difference, Interval, Summary
from fedsched.sim.lessons import (
    Lesson,
    Needed,
    Ratio,
    Taught,
    TeachingProgress,
    lessons_of,
    progress_of,
    teach,
    untaught,
)
from fedsched.sim.sweep import Engine, make_all

Progressing = Callable[[int, str], AbstractContextManager[Callable[[float], None]]]
"""Shows how many of so many things are done, and what they are."""


def give_lessons(
    plans: Sequence[Selection], progress: Progressing, *, engine: Engine, workers: int | None
) -> tuple[Taught, ...]:
    """Teach what the experiments say is taught, of the policies that will run."""
    lessons: list[Lesson] = [
        lesson for plan in plans for lesson in lessons_of(plan.name, plan.experiment, plan.policies)
    ]
    if not lessons:
        return ()
    first = "1 training comes" if len(lessons) == 1 else f"{len(lessons)} trainings come"
    typer.echo(f"{first} first", err=True)
    with progress(len(lessons), "trainings") as told:
        return make_all(teach, lessons, untaught, engine=engine, workers=workers, told=told)


def plain_lessons(plans: Sequence[Selection], taught: Sequence[Taught]) -> list[dict[str, Any]]:
    """All looks of all trainings, as data."""
    qualities = _qualities(plans)
    return [one.plain(qualities[one.arm.experiment]) for one in taught]


def plain_progress(plans: Sequence[Selection], taught: Sequence[Taught]) -> list[dict[str, Any]]:
    """What `show_lessons` shows, as data."""
    return [one.plain() for one in progress_of(taught, _qualities(plans))]


def show_lessons(plans: Sequence[Selection], taught: Sequence[Taught]) -> None:
    """A line per policy that was taught; nothing where none was."""
    shown = progress_of(taught, _qualities(plans))
    if not shown:
        return
    asked = any(_qualities(plans).values())
    print("\nwhile they were taught, JCT in slots on further held-out jobs:")
    more = ("GOOD ENOUGH AFTER", "TO THE FIRST", "FOR GOOD AFTER", "TO THE FIRST") if asked else ()
    columns = ("POLICY", "TRAININGS", "SLOTS", "START", "LOWEST", "LAST", *more)
    table(columns, [(*_cells(one), *(_all_needed(one) if asked else ())) for one in shown])


def _cells(one: TeachingProgress) -> tuple[object, ...]:
    looks = (_figure(figure) for figure in (one.start, one.lowest, one.last))
    return (one.arm.policy, one.trainings, f"{one.slots:.0f}", *looks)


def _all_needed(one: TeachingProgress) -> tuple[str | None, ...]:
    return _needed(one.to_quality), _ratio(one.ratio), _needed(one.for_good), _ratio(one.ratio_for_good)


def _needed(needed: Needed | None) -> str | None:
    if needed is None:
        return None
    if needed.mean is not None:
        return f"{_figure(needed.mean, 0)} slots"
    return f"{needed.reached} of {len(needed.slots)} trainings" if needed.reached else "never"


def _ratio(ratio: Ratio | None) -> str | None:
    """With its interval."""
    if ratio is None:
        return None
    spread = "" if ratio.low is None else f" ({ratio.low:.2f} to {ratio.high:.2f})"
    return f"{ratio.bound} {ratio.mean:.2f}{spread}".strip()


def _figure(figure: Interval, digits: int = 2) -> str:
    spread = "" if figure.half is None else f" ±{figure.half:.{digits}f}"
    return f"{figure.mean:.{digits}f}{spread}"


def _qualities(plans: Sequence[Selection]) -> dict[str, float | None]:
    return {
        plan.name: plan.experiment.training.quality_jct_slots if plan.experiment.training else None for plan in plans
    }


# --- By cluster ----------------------------------------------------------------------------------------------------


def show_by_cluster(plans: Sequence[Selection], summaries: Sequence[Summary]) -> None:
    """Where clusters are taught together: what each of them has of it."""
    for plan in _together(plans):
        shown = [item for item in summaries if item.arm.experiment == plan.name and item.clusters]
        print("\nJCT in slots by cluster:")
        _by_cluster(plan, {item.arm.policy: dict(item.clusters) for item in shown}, _mean)


def show_differences_by_cluster(plans: Sequence[Selection], compared: Sequence[Difference]) -> None:
    """Where clusters are taught together: whether any of them would be better off with the first policy."""
    for plan in _together(plans):
        shown = [item for item in compared if item.arm.experiment == plan.name and item.clusters]
        if not shown:
            continue
        print(f"\nJCT in slots by cluster, less than with {shown[0].baseline.policy} below 0, with 95 % intervals:")
        _by_cluster(plan, {item.arm.policy: dict(item.clusters) for item in shown}, _difference)


def _together(plans: Sequence[Selection]) -> list[Selection]:
    return [plan for plan in plans if plan.experiment.federation is not None and plan.experiment.training is not None]


def _by_cluster(
    plan: Selection, figures: Mapping[str, Mapping[str, Interval]], cell: Callable[[Interval | None, float], str | None]
) -> None:
    """A line per cluster, a column per policy."""
    length_s = plan.experiment.slot_length_s
    rows = [
        (cluster.name, *(cell(one.get(cluster.name), length_s) for one in figures.values()))
        for cluster in plan.experiment.clusters
    ]
    table(("CLUSTER", *(label.upper() for label in figures)), rows)


def _difference(figure: Interval | None, length_s: float) -> str | None:
    if figure is None:
        return None
    spread = "" if figure.half is None else f" ±{figure.half / length_s:.2f}"
    return f"{figure.mean / length_s:+.2f}{spread}"


def _mean(figure: Interval | None, length_s: float) -> str | None:
    return None if figure is None else f"{figure.mean / length_s:.2f}"
