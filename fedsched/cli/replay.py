"""The command that repeats an agent's journal: sim replay."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedsched.cli.sim import Form


def replay(
    journal: Annotated[
        Path,
        typer.Option(
            "--journal", exists=True, dir_okay=False, help="An agent's journal.jsonl, in its state directory."
        ),
    ],
    output: Annotated[Form, typer.Option("-o", "--output", help="How to show the result.")] = Form.TABLE,
) -> None:
    """Repeat what an agent recorded: the scheduler of today must order the same.

    Ends with exit code 1 at the first command that differs.
    """
    import json
    from dataclasses import asdict

    from fedsched.cli.output import table
    from fedsched.sim.replaying import replay as repeat

    found = repeat(journal)
    if output is Form.JSON:
        print(json.dumps({"journal": str(journal), "identical": True, **asdict(found)}, indent=2))
        return
    table(
        ("AGENTS", "EVENTS", "DECISIONS", "COMMANDS", "ORDERS", "SKIPPED", "LENGTH", "RESULT"),
        [
            (
                found.agents,
                found.events,
                found.decisions,
                found.commands,
                found.orders,
                found.skipped,
                f"{found.length_s:.1f}s",
                "identical",
            )
        ],
    )
