"""Fixtures that every part shares."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fedsched.adapters import etcd_server


@pytest.fixture(scope="session")
def etcd_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real etcd on a free port, one for each test process; tests share it and so keep to keys of their own."""
    server = etcd_server.start(tmp_path_factory.mktemp("etcd") / "data")
    yield server.address
    etcd_server.stop(server.pid)
