"""A controller in this process, and the command line run against it as a user does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from fedsched.adapters.memory import MemoryStore
from fedsched.cli.main import main
from fedsched.config import ControllerConfig
from fedsched.controller.app import Controller


@dataclass(frozen=True)
class Result:
    """How a command ended and what it said."""

    code: int
    out: str
    err: str


Run = Callable[..., Result]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Runs `fedsched` with these arguments, in a home of its own and with no server named."""
    monkeypatch.setenv("FEDSCHED_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("FEDSCHED_SERVER", raising=False)

    def call(*arguments: str) -> Result:
        capfd.readouterr()
        code = main(arguments)
        return Result(code, *capfd.readouterr())

    return call


@pytest.fixture
def store() -> Iterator[MemoryStore]:
    memory = MemoryStore()
    yield memory
    memory.close()


@pytest.fixture
def server(store: MemoryStore, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Address of a controller, named by FEDSCHED_SERVER."""
    config = ControllerConfig(
        listen="127.0.0.1:0", etcd="127.0.0.1:1", state_dir=tmp_path / "controller", lease_ttl_s=2
    )
    controller = Controller(config, store)
    monkeypatch.setenv("FEDSCHED_SERVER", controller.address)
    yield controller.address
    controller.close()


@pytest.fixture
def file(tmp_path: Path) -> str:
    """A good job file."""
    path = tmp_path / "job.yaml"
    path.write_text("name: digits\nrun: python train.py\nelastic: {workers: 1..3}\nestimate: {epochs: 4}\n")
    return str(path)
