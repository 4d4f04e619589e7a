"""A controller over a store in memory, reached through real gRPC."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from fedsched.adapters.memory import MemoryStore
from fedsched.adapters.rpc import JobsClient
from fedsched.config import ControllerConfig
from fedsched.controller.app import Controller
from fedsched.core.ids import JobId
from fedsched.core.job import JobSpec, Range
from fedsched.core.resources import Resources
from fedsched.runtime.ports import Store

StartController = Callable[..., tuple[Controller, JobsClient]]
"""Starts a controller on a store, and a client of it; both end with the test."""


@pytest.fixture
def start_controller(tmp_path: Path) -> Iterator[StartController]:
    with ExitStack() as stack:
        count = 0

        def start(store: Store, history_after_s: float = 3600.0) -> tuple[Controller, JobsClient]:
            nonlocal count
            count += 1
            config = ControllerConfig(
                listen="127.0.0.1:0",
                etcd="127.0.0.1:1",
                state_dir=tmp_path / f"controller-{count}",
                lease_ttl_s=2,
                history_after_s=history_after_s,
            )
            controller = Controller(config, store)
            stack.callback(controller.close)
            return controller, stack.enter_context(JobsClient(controller.address))

        yield start


@pytest.fixture
def store() -> Iterator[MemoryStore]:
    memory = MemoryStore()
    yield memory
    memory.close()


@pytest.fixture
def client(store: MemoryStore, start_controller: StartController) -> JobsClient:
    return start_controller(store)[1]


@pytest.fixture
def spec() -> JobSpec:
    return JobSpec(
        job_id=JobId(""),
        name="digits",
        run="python train.py",
        workers=Range(2, 4),
        ps=Range(1, 2),
        worker_demand=Resources(1000, 1024),
        ps_demand=Resources(1000, 512),
        epochs=10.0,
        user="ana",
        env=(("EPOCHS", "10"),),
    )
