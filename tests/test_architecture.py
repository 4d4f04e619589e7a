"""The shape that the design promises."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import fedsched

PACKAGE = Path(fedsched.__file__).parent
RANDOM_STATE = {"random", "choice", "shuffle", "randint", "uniform", "seed", "sample"}


def test_imports_point_down_only() -> None:
    """A core that knows its edges can be neither simulated nor replayed."""
    tool = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([tool, "--no-cache"], cwd=PACKAGE.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_core_draws_no_chance_but_from_named_streams() -> None:
    """A draw from the module's state depends on everybody else's draws."""
    for path in sorted((PACKAGE / "core").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "random":
                assert node.attr not in RANDOM_STATE, f"{path.name}:{node.lineno} uses random.{node.attr}"


def test_the_core_imports_nothing_but_the_standard_library_its_records_base_and_itself() -> None:
    for path in sorted((PACKAGE / "core").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for name in names:
                top = name.split(".")[0]
                assert top in {*sys.stdlib_module_names, "msgspec"} or name.startswith("fedsched.core"), (
                    f"{path.name}: {name}"
                )


def test_every_module_says_its_one_job() -> None:
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.parent.name == "pb":
            continue
        assert ast.get_docstring(ast.parse(path.read_text())), f"{path.relative_to(PACKAGE)} has no docstring"


def test_every_file_that_the_map_for_contributors_names_is_there() -> None:
    """A newcomer who is sent to a file that was renamed stops trusting the map."""
    text = (PACKAGE.parent / ".github" / "CONTRIBUTING.md").read_text()
    rows = [re.findall(r"`([\w*/]+(?:\.py|/))`", line) for line in text.splitlines() if line.startswith("| ")]
    assert sum(map(len, rows)) > 40
    for row in rows:
        for name in row:
            folders = [PACKAGE.parent, PACKAGE, *(PACKAGE.parent / first for first in row if first.endswith("/"))]
            assert any(list(folder.glob(name)) for folder in folders), f"{name} does not exist"
