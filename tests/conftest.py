"""Fixtures that every part shares."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from fedsched.adapters import etcd_server
from fedsched.executor import slurm as slurm_tasks
from tests.executor.kube import Kube
from tests.executor.on_kubernetes import OnKubernetes
from tests.executor.on_ray import OnRay, Ray
from tests.executor.slurm import OnSlurm, Slurm, is_installed

# A busy machine is slow, and no test of a property is about that.
settings.register_profile("patient", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of a group share a cluster or an order; spread over processes they would fail now and then, and slowly."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        spread = [item.nodeid for item in items if item.get_closest_marker("xdist_group") and "@" not in item.nodeid]
        if spread:
            raise pytest.UsageError(f"run with --dist loadgroup, and a pytest that it works with: {spread[0]}")


@pytest.fixture(scope="session")
def etcd_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real etcd on a free port, one for each test process; tests share it and so keep to keys of their own."""
    with _etcd(tmp_path_factory.mktemp("etcd")) as address:
        yield address


@pytest.fixture
def own_etcd_address(tmp_path: Path) -> Iterator[str]:
    """A real etcd for one test. An aggregator needs it: its rounds and versions have the same keys everywhere, so it
    would go on from those of another test."""
    with _etcd(tmp_path / "etcd") as address:
        yield address


@contextmanager
def _etcd(folder: Path) -> Iterator[str]:
    folder.mkdir(exist_ok=True)
    server = etcd_server.start(folder / "data")
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


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OnSlurm]:
    """A real Slurm with two nodes; `.ci/run` installs what it needs."""
    if not is_installed() or os.getuid() != 0:
        problem = "needs root and Debian's packages slurm-wlm and munge"
        if "CI" in os.environ:
            pytest.fail(problem)
        pytest.skip(problem)
    daemons = Slurm(tmp_path_factory.mktemp("slurm"))
    with pytest.MonkeyPatch.context() as quick:
        quick.setattr(slurm_tasks, "POLL_S", 0.2)  # a small cluster answers at once; most of the time was spent waiting
        yield OnSlurm(daemons)
    daemons.stop()


@pytest.fixture(scope="session")
def kubernetes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OnKubernetes]:
    """A small API server with two nodes, whose kubelets run processes."""
    kube = Kube(tmp_path_factory.mktemp("kube"), {"n1": (8.0, 8000), "n2": (8.0, 8000)})
    yield OnKubernetes(kube)
    kube.stop()


@pytest.fixture(scope="session")
def ray() -> Iterator[OnRay]:
    """A real Ray cluster of two nodes."""
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:  # short: Ray puts sockets into it
        cluster = Ray(Path(folder))
        try:
            cluster.start()
            yield OnRay(cluster)
        finally:
            cluster.stop()
