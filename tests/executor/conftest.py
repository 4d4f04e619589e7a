"""Clusters under test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.executor.cluster import Cluster, Local, ended


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """A cluster on this machine."""
    with ended(Cluster(tmp_path / "root", Local())) as cluster:
        yield cluster
