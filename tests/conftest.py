"""Fixtures that every part shares."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedsched.adapters import etcd_server


@pytest.fixture(scope="session")
def etcd_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real etcd on a free port, one for each test process; tests share it and so keep to keys of their own."""
    server = etcd_server.start(tmp_path_factory.mktemp("etcd") / "data")
    yield server.address
    etcd_server.stop(server.pid)


def _shared(folder: str) -> Path:
    """A folder of the public data and golden results that lie beside the project; no run of CI goes without them."""
    path = Path(os.environ.get("FEDSCHED_DATA", "../shared")) / folder
    if not path.is_dir():
        problem = f"{path} is not there; FEDSCHED_DATA names the folder that holds it"
        if "CI" in os.environ:
            pytest.fail(problem)
        pytest.skip(problem)
    return path


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Public traces and speed tables, one folder per source."""
    return _shared("data")


@pytest.fixture(scope="session")
def golden_dir() -> Path:
    """Other simulators' results, one folder per simulator."""
    return _shared("golden")
