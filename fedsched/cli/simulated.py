"""Carries simulations out for the command line: what is offered, how far it is, what came out, where it is written."""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import typer

from fedsched.cli.federated import show_federations
from fedsched.cli.lessons import (
    give_lessons,
    plain_lessons,
    plain_progress,
    show_by_cluster,
    show_differences_by_cluster,
    show_lessons,
)
from fedsched.cli.output import span, table
from fedsched.cli.sim import Selection
from fedsched.errors import Failed, InvalidInput
from fedsched.files import refuse_clashes, write_all
from fedsched.sim import offered_load, running
from fedsched.sim.comparing import Arm, Difference, Interval, Summary, differences, summarise
from fedsched.sim.lessons import Taught
from fedsched.sim.result_files import write_csv, write_parquet
from fedsched.sim.results import RunResult
from fedsched.sim.running import Request, lost
from fedsched.sim.swarm import judge_seed, lost_verdict
from fedsched.sim.sweep import Engine, sweep
from fedsched.sim.workers import INTERRUPTED, over_cores

TOLD_EVERY_S = 30.0
"""Between two lines on progress, where nobody looks at a terminal."""
REASONS_SHOWN = 10
"""Of why runs are partial."""


@dataclass(frozen=True, slots=True)
class Files:
    """What is written beside the output; None where it is not wanted."""

    per_job: Path | None = None
    parquet: Path | None = None
    html: Path | None = None

    def refuse_bad_places(self, read: Sequence[Path]) -> None:
        """Nobody wants to learn of a mistyped place after an hour of simulation.

        Args:
            read: files that the runs are made from.

        Raises:
            InvalidInput: a file could not be written, or would be written over another.
        """
        for file, needs in ((self.parquet, ("pyarrow",)), (self.html, ("jinja2", "matplotlib"))):
            missing = [name for name in needs if file is not None and find_spec(name) is None]
            if missing:
                raise InvalidInput(
                    f"{file} needs {', '.join(missing)}, which is not installed", "pip install 'fedsched[sim]'"
                )
        refuse_clashes(read, [path for path in (self.per_job, self.parquet, self.html) if path is not None])

    def write(self, runs: Sequence[RunResult]) -> None:
        """Write those that are wanted.

        Raises:
            Failed: some could not be written; the others are.
        """
        from fedsched.sim.report import write_report

        wanted = ((self.per_job, write_csv), (self.parquet, write_parquet), (self.html, write_report))
        write_all(*(functools.partial(write, path, runs) for path, write in wanted if path is not None))


def carry_out(
    plans: Sequence[Selection],
    files: Files,
    *,
    engine: str,
    workers: int | None,
    check: bool,
    as_json: bool,
    paired: bool = False,
) -> None:
    """Run, write, print; then say what went wrong in single runs.

    Args:
        engine: a name of `Engine`.
        paired: compare everything with the first arm, seed by seed.

    Raises:
        InvalidInput: what is asked for cannot be done.
        Unreachable: there is no Ray cluster.
        Failed: some runs are partial. Everything is printed and written before.
    """
    if engine == Engine.RAY and workers is not None:
        raise InvalidInput("--workers counts this machine's processes, and --engine ray uses none", "leave one out")
    files.refuse_bad_places([source for plan in plans for source in plan.sources])
    jobs = {plan.name: _tell_load(plan) for plan in plans}
    taught = give_lessons(plans, _progress, engine=Engine(engine), workers=workers)
    tasks = [task for plan in plans for task in _tasks(plan, taught, jobs[plan.name], check=check)]
    with _progress(len(tasks), "runs") as told:
        wanted = [request for request, problem in tasks if not problem]
        made = iter(sweep(wanted, engine=Engine(engine), workers=workers, told=told))
    runs = tuple(lost(request, problem) if problem else next(made) for request, problem in tasks)
    try:
        files.write(runs)
    finally:  # a full disk must not cost what took an hour
        compared = differences(runs) if paired else ()
        if as_json:
            plain = _plain(runs, compared, paired=paired)
            if taught:
                plain["training"] = plain_lessons(plans, taught)
                plain["progress"] = plain_progress(plans, taught)
            print(json.dumps(plain, indent=2))
        else:
            summaries = summarise(runs)
            at_slots = {plan.name for plan in plans if plan.experiment.clock == "slots"}
            _show(summaries, with_names=len(plans) > 1, at_slots=at_slots)
            show_federations(runs)
            show_lessons(plans, taught)
            show_by_cluster(plans, summaries)
            show_differences_by_cluster(plans, compared)
            _show_differences(compared)
    _refuse_partial(plans, runs, check=check)


def _tasks(plan: Selection, taught: Sequence[Taught], jobs: int, *, check: bool) -> Iterator[tuple[Request, str]]:
    """The runs to be made, each with why it cannot be; empty if it can."""
    for label in plan.policies:
        trainings = [one for one in taught if one.arm == Arm(plan.name, label)]
        attempts: list[Taught | None] = [*trainings] or [None]
        for training in attempts:
            for seed in plan.seeds:
                request = Request(plan.name, plan.experiment, label, seed, jobs, check)
                if training is None:
                    yield request, ""
                    continue
                problem = f"it was not taught, training {training.seed}: {training.problem}" if training.problem else ""
                yield replace(request, training_seed=training.seed, taught=training.weights), problem


def swarm_out(seeds: range, *, workers: int | None) -> None:
    """Judge a small world per seed; say which promises were broken, and how to see that again.

    Raises:
        Failed: any was.
    """
    with _progress(len(seeds), "worlds") as told:
        verdicts = over_cores(judge_seed, seeds, lost_verdict, workers=workers, told=told)
    broken = [verdict for verdict in verdicts if verdict.problem]
    steps = sum(verdict.steps for verdict in verdicts)
    print(f"{len(verdicts)} worlds, {steps} events, {len(broken)} broken")
    for verdict in broken:
        print(f"\nseed {verdict.seed}: {verdict.policy}, {verdict.clock}: {verdict.problem}")
        print(f"  {verdict.plan}")
        print(f"  {verdict.command}")
    if broken:
        raise Failed(f"{len(broken)} of {len(verdicts)} worlds broke a promise", broken[0].command)


def _tell_load(plan: Selection) -> int:
    """What comes to the clusters with the first seed, and how many jobs that are.

    Also finds out whether jobs and policies can be made at all, before anything runs.
    """
    for label in plan.policies:
        policy = running.make_policy(plan.experiment.policies[label], plan.experiment.seed)
        if getattr(policy, "rebuilds", False) and not plan.experiment.rebuild:
            raise InvalidInput(
                f"policy {label} fills an empty cluster every slot, and {plan.name} keeps tasks where they run",
                "give the experiment `clock: slots` and `rebuild: true`, or choose another policy",
            )
    load = offered_load.load_of(plan.experiment)
    length = f"slots of {plan.experiment.slot_length_s:g} s"
    clock = length if plan.experiment.clock == "slots" else "exact times"
    typer.echo(f"{plan.name}: {clock}; seed {plan.experiment.seed}: {load}", err=True)
    if load.homeless:
        which = (
            f"{load.homeless} jobs fit on no cluster and will wait for ever, the first of them {load.first_homeless}"
        )
        typer.echo(f"{plan.name}: {which}", err=True)
    return load.jobs


@contextmanager
def _progress(count: int, what: str) -> Iterator[Callable[[float], None]]:
    """A bar for people who wait; a line now and then where the output goes to a file."""
    if not sys.stderr.isatty():
        yield _Lines(count, what).tell
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn(what), MofNCompleteColumn(), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=count)
        yield lambda done: bar.update(task, completed=done)


class _Lines:
    """Progress for those who read it later."""

    def __init__(self, count: int, what: str) -> None:
        self._count = count
        self._what = what
        self._begun_s = self._told_s = time.monotonic()

    def tell(self, done: float) -> None:
        """So many are done, fractions included."""
        now_s = time.monotonic()
        if now_s - self._told_s < TOLD_EVERY_S or done >= self._count:
            return
        self._told_s = now_s
        gone_s = now_s - self._begun_s
        left = f", about {span(gone_s * (self._count - done) / done)} to go" if done else ""
        typer.echo(f"{done:.4g} of {self._count} {self._what} are done after {span(gone_s)}{left}", err=True)


# What is shown.


def _plain(runs: Sequence[RunResult], compared: Sequence[Difference], *, paired: bool) -> dict[str, Any]:
    told: dict[str, Any] = {
        "results": [run.plain() for run in runs],
        "summary": [summary.plain() for summary in summarise(runs)],
    }
    if paired:
        told["differences"] = [difference.plain() for difference in compared]
    return told


def _show(summaries: Sequence[Summary], *, with_names: bool, at_slots: Collection[str]) -> None:
    """A line per policy.

    Args:
        summaries: of the policies.
        with_names: tell of which experiment each is.
        at_slots: names of experiments whose decisions fall on slots; of them SLOTS tells JCT as claims do.
    """
    columns = {
        "EXPERIMENT": [item.arm.experiment for item in summaries] if with_names else None,
        "POLICY": [item.arm.policy for item in summaries],
        "SEEDS": [item.seeds for item in summaries],
        "JCT": [item.jct_s and f"{item.jct_s.mean:.1f}s" for item in summaries],
        "95% INTERVAL": [item.jct_s and _bounds(item.jct_s) for item in summaries],
        "SLOTS": [_slots(item, at_slots) for item in summaries] if at_slots else None,
        "MAKESPAN": [None if item.makespan_s is None else f"{item.makespan_s:.1f}s" for item in summaries],
        "UTILISED": [f"{item.utilisation:.0%}" for item in summaries],
        "RESIZES": [f"{item.resizes:.1f}" for item in summaries],
        "FALLBACKS": [item.fallbacks for item in summaries],
        "UNFINISHED": [item.unfinished for item in summaries],
    }
    shown = {name: cells for name, cells in columns.items() if cells is not None}
    table(tuple(shown), zip(*shown.values(), strict=True))


def _slots(item: Summary, at_slots: Collection[str]) -> str | None:
    return None if item.jct_slots is None or item.arm.experiment not in at_slots else f"{item.jct_slots:.2f}"


def _show_differences(compared: Sequence[Difference]) -> None:
    if not compared:
        return
    baseline = compared[0].baseline
    print(f"\nagainst {baseline.policy} in {baseline.experiment}, seed by seed:")
    table(
        ("EXPERIMENT", "POLICY", "SEEDS", "JCT", "95% INTERVAL", "RATIO", "CERTAIN"),
        [
            (
                item.arm.experiment,
                item.arm.policy,
                item.seeds,
                f"{item.jct_s.mean:+.1f}s",
                _bounds(item.jct_s, "+"),
                f"{item.ratio:.3f}",
                "yes" if item.certain else "no",
            )
            for item in compared
        ],
    )


def _bounds(interval: Interval, sign: str = "") -> str | None:
    """None where one seed says nothing of the spread."""
    return None if interval.low is None else f"{interval.low:{sign}.1f}s..{interval.high:{sign}.1f}s"


def _refuse_partial(plans: Sequence[Selection], runs: Sequence[RunResult], *, check: bool) -> None:
    partial = [run for run in runs if run.partial]
    if not partial:
        return
    arguments = {plan.name: plan.arguments for plan in plans}
    first = next((run for run in partial if run.partial != INTERRUPTED), partial[0])
    again = f"fedsched sim run {arguments[first.experiment]} --policies {first.policy} --seed {first.seed} --seeds 1"
    raise Failed(
        f"{len(partial)} of {len(runs)} runs are partial; what they did until then is kept:\n"
        + "\n".join(_reasons(partial)),
        f"{again}{' --check' if check else ''}",
    )


def _reasons(partial: Sequence[RunResult]) -> list[str]:
    """A line per run that failed by itself, up to a number, and one for all that were interrupted."""
    stopped = [run for run in partial if run.partial == INTERRUPTED]
    failed = [run for run in partial if run.partial != INTERRUPTED]
    lines = [f"  - {run.policy}, seed {run.seed}: {run.partial}" for run in failed[:REASONS_SHOWN]]
    if len(failed) > REASONS_SHOWN:
        lines.append(f"  - and {len(failed) - REASONS_SHOWN} more")
    if stopped:
        begun = sum(len(run.jobs) > 0 for run in stopped)
        lines.append(f"  - {len(stopped)} were interrupted, {begun} of them under way")
    return lines
