"""The command that shows everything at once: demo."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import typer

from fedsched.cli.jobs import COLUMNS, SPARE, row
from fedsched.cli.output import Format, Output, emit, emit_line, moment, span, table

if TYPE_CHECKING:
    from fedsched.core.views import Job
    from fedsched.demo import DemoSummary


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command()(demo)


def demo(output: Output = Format.TABLE) -> int:
    """Show everything at once, and end it again.

    Two clusters, six real training jobs, resizes and federated rounds; a minute or a few, as the machine allows.
    """
    import signal

    from fedsched import demo as story

    # Whoever ends the demo wants its federation ended, too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    begun_s = time.monotonic()
    with ExitStack() as stack:
        screen = _Screen(output, stack)
        summary = story.run(screen.say, screen.show)
    _print(summary, time.monotonic() - begun_s, output)
    return 1 if summary.problems else 0


class _Screen:
    """Lines that stay, and below them at a terminal the queue as it is. Programs get the lines on stderr."""

    def __init__(self, output: Format, stack: ExitStack) -> None:
        self._live: Any = None
        self._stderr = output is not Format.TABLE
        self._begun_s = time.monotonic()
        if not self._stderr and sys.stdout.isatty():
            from rich.live import Live

            self._live = stack.enter_context(Live(refresh_per_second=4))

    def say(self, line: str) -> None:
        """Show a line with the time since the start."""
        text = f"{time.monotonic() - self._begun_s:6.1f} s  {line}"
        if self._live is not None:
            self._live.console.print(text, highlight=False, markup=False, soft_wrap=True)
        else:
            print(text, file=sys.stderr if self._stderr else sys.stdout, flush=True)

    def show(self, jobs: tuple[Job, ...]) -> None:
        """Show the queue."""
        if self._live is not None:
            from fedsched.cli.output import grid

            rows = [row(job, time.time()) for job in jobs]
            self._live.update(grid(COLUMNS, rows, SPARE, self._live.console.width))


def _print(summary: DemoSummary, took_s: float, output: Format) -> None:
    result = {
        "jobs": [_job(job) for job in summary.jobs],
        "resizes": summary.resizes,
        "rounds": len(summary.rounds),
        "policy_versions": {
            "before": dict(summary.versions_before),
            "after": dict(summary.versions_after),
        },
        "lost": summary.lost,
        "doubled": summary.doubled,
        "trace_file": summary.trace_file,
        "took_s": round(took_s, 1),
        "problems": list(summary.problems),
    }
    if output is Format.JSON:
        # One line, so that it is the last one whatever was said before.
        emit_line(result, output)
    elif not emit(result, output, [f"job/{job.spec.job_id}" for job in summary.jobs]):
        print()
        table(
            ("ID", "NAME", "CLUSTER", "STATE", "JCT", "RESIZES", "ATT", "LOSS", "ACCURACY"),
            [
                (
                    job.spec.job_id,
                    job.spec.name,
                    job.status.cluster,
                    job.status.phase.value,
                    f"{_jct_s(job):.1f}s" if job.status.finished_s else None,
                    job.status.resizes,
                    job.status.attempt,
                    _number(job.status.progress.loss),
                    _number(job.status.progress.accuracy),
                )
                for job in summary.jobs
            ],
        )
        print()
        for cluster, version in summary.versions_after:
            print(f"policy of {cluster}: v{dict(summary.versions_before)[cluster]} -> v{version}")
        print(f"rounds with both clusters: {len(summary.rounds)}; resizes while training: {summary.resizes}")
        print(f"lost jobs: {summary.lost}; jobs run twice: {summary.doubled}")
        print(f"trace: {summary.trace_file} (fedsched trace show JOB --file ...)")
        for problem in summary.problems:
            print(f"NOT AS PROMISED: {problem}")
        print(f"{'done' if not summary.problems else 'failed'} after {span(took_s)}")


def _job(job: Job) -> dict[str, Any]:
    status = job.status
    return {
        "id": job.spec.job_id,
        "name": job.spec.name,
        "cluster": status.cluster,
        "phase": status.phase.value,
        "submitted_at": moment(job.spec.submitted_s),
        "finished_at": moment(status.finished_s),
        "jct_s": round(_jct_s(job), 3) if status.finished_s else None,
        "resizes": status.resizes,
        "attempts": status.attempt,
        "loss": status.progress.loss,
        "accuracy": status.progress.accuracy,
    }


def _jct_s(job: Job) -> float:
    """Completion time: from submission to the end, queueing included."""
    return (job.status.finished_s or 0.0) - job.spec.submitted_s


def _number(value: float | None) -> str | None:
    return None if value is None else f"{value:.3f}"
