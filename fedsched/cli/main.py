"""The `fedsched` command: puts the commands together and turns every ending into an exit code.

Command modules import what they need inside the commands, so that `fedsched --help` stays quick.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer
import typer.core

from fedsched import __version__
from fedsched.cli import bench, demo, federation, jobs, policy, servers, sim, trace, train
from fedsched.errors import FedschedError, of_the_world

INTERRUPTED = 130

# Typer escapes brackets for Rich wherever Rich is installed, also where help is plain text, as it is here.
typer.core.HAS_RICH = False

app = typer.Typer(
    name="fedsched",
    help="Schedules elastic deep-learning training over many clusters.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
jobs.register(app)
federation.register(app)
policy.register(app)
servers.register(app)
trace.register(app)
bench.register(app)
sim.register(app)
demo.register(app)
app.add_typer(train.app, name="train")


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"fedsched {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code (see fedsched/errors.py)."""
    import click

    _open_streams()
    try:
        result = app(args=arguments, standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except FedschedError as problem:
        return _tell(problem)
    except click.exceptions.NoArgsIsHelpError as problem:
        problem.show()
        return 2
    except click.ClickException as problem:
        problem.show()
        return problem.exit_code
    except (KeyboardInterrupt, click.Abort):
        return INTERRUPTED
    except BrokenPipeError:
        # The reader (`head`, a pager) has seen enough; nothing may complain about that at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as problem:
        return _tell(of_the_world(problem))
    except Exception as problem:
        sys.stderr.write(f"[FS000] this should not have happened: {type(problem).__name__}: {problem}\n")
        sys.stderr.write(f"  try: report it with {_write_down(traceback.format_exc())}\n")
        return 1


def _open_streams() -> None:
    """Whoever starts a command without a standard stream wants to hear nothing; else the next file that is opened
    would take its place, and a library's word would end up in it."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  # for as long as the process lives


def _tell(problem: FedschedError) -> int:
    sys.stderr.write(f"{problem}\n")
    return problem.exit_code


def _write_down(story: str) -> str:
    """Keep the traceback in a file; returns where it is."""
    from fedsched.local import home

    try:
        home().mkdir(parents=True, exist_ok=True)
        file = home() / "last-error.txt"
        file.write_text(f"{sys.argv}\n{story}")
        return str(file)
    except OSError:
        return f"this traceback:\n{story}"


if __name__ == "__main__":
    sys.exit(main())
