"""Finds public data that is not part of the package: files named `data:<folder>/<file>`."""

from __future__ import annotations

import os
from pathlib import Path

from fedsched.errors import NotFound

PREFIX = "data:"
VARIABLE = "FEDSCHED_DATA"
BESIDE = "../shared"
"""Where the data is looked for when the variable is not set."""


def resolve(name: str, base: Path = Path()) -> Path:
    """The path that a configuration means by `name`.

    Args:
        name: `data:<path>` is looked up under `data/` in the folder that FEDSCHED_DATA names; anything else is a path.
        base: folder that a relative path starts from.

    Raises:
        NotFound: there is no such file; the message says where it was looked for and how to get it.
    """
    if not name.startswith(PREFIX):
        path = base / Path(name).expanduser()
        if not path.is_file():
            raise NotFound(f"there is no file {path}", "check the path; public data is named data:<folder>/<file>")
        return path
    folder = Path(os.environ.get(VARIABLE, BESIDE)).expanduser()
    path = folder / "data" / name.removeprefix(PREFIX)
    if not path.is_file():
        raise NotFound(
            f"there is no file {path} for {name}",
            f"set {VARIABLE} to the folder whose data/ holds it; from the publisher's original it is made with "
            "`fedsched trace import FORMAT ORIGINAL OUT` (dl2/speed.csv with FORMAT dl2); the experiments small, mixed "
            "and dl2_fitted need no data at all",
        )
    return path
