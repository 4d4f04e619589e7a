"""The generated code is what the protos say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import fedsched

PACKAGE = Path(fedsched.__file__).parent
ROOT = PACKAGE.parent


def test_the_committed_code_is_what_the_protos_make(tmp_path: Path) -> None:
    """A message that was changed in one of the two only would be read wrongly by somebody's other version."""
    protos = [f"fedsched/pb/{path.name}" for path in sorted((ROOT / "proto" / "fedsched" / "v1").glob("*.proto"))]
    kinds = ("python_out", "grpc_python_out", "mypy_out", "mypy_grpc_out")
    subprocess.run(
        [
            sys.executable,
            "-m",
            "grpc_tools.protoc",
            f"-Ifedsched/pb={ROOT / 'proto' / 'fedsched' / 'v1'}",
            *(f"--{kind}={tmp_path}" for kind in kinds),
            *protos,
        ],
        check=True,
        capture_output=True,
        timeout=60,
        # The plugins for types are programs beside the interpreter.
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"},
    )
    made = {path.name: path.read_text() for path in (tmp_path / "fedsched" / "pb").iterdir()}
    committed = {path.name: path.read_text() for path in (PACKAGE / "pb").glob("*_pb2*")}
    assert len(made) == len(kinds) * len(protos)
    assert sorted(made) == sorted(committed), "run `make proto`"
    assert [name for name in sorted(made) if made[name] != committed[name]] == [], "run `make proto`"
