"""A parameter server alone: what it does with plans and pushes, in whatever order they reach it."""

from __future__ import annotations

import gc
import json
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from fedsched.elastic import memory, optimizers
from fedsched.elastic.arena import Arena
from fedsched.elastic.model import ModelSpec
from fedsched.elastic.server import ParameterServer
from fedsched.elastic.streams import serve
from fedsched.pb import training_pb2 as pb
from fedsched.pb.training_pb2_grpc import ParametersStub
from tests.waiting import eventually

WAIT_S = 30.0


@dataclass
class Served:
    """A server with one block of three ones, trained by SGD with a learning rate of 1."""

    server: ParameterServer
    told: pb.MemberReport
    """What it says of itself."""
    spec: ModelSpec
    parameters: Arena
    stub: ParametersStub
    address: str
    following: threading.Thread

    def begin(self) -> None:
        """Let it look at its plans; the chief's values are there."""
        self.following.start()
        self.stub.Fill(pb.Done(), timeout=WAIT_S)

    def plan(self, number: int, from_step: int, **gradients: str) -> pb.PlanView:
        """For these workers; each with what leads to its gradients."""
        return pb.PlanView(
            number=number,
            from_step=from_step,
            workers=list(gradients),
            servers=["ps-1"],
            addresses=[self.address],
            owners=[0] * len(self.spec.blocks),
            shared=[True],
            gradients=list(gradients.values()),
        )

    def see(self, *plans: pb.PlanView) -> None:
        view = pb.MemberView(
            model=self.spec.dumps(), machine=memory.machine(), parameters=self.parameters.handle, plans=plans
        )
        self.server.see(view)

    def push(self, worker: str, plan: int, step: int) -> pb.Stepped:
        request = pb.Push(
            worker=worker,
            plan=plan,
            step=step,
            gradients=range(len(self.spec.blocks)),
            hyperparameters=json.dumps(self.spec.hyperparameters),
        )
        reply: pb.Stepped = self.stub.Exchange(request, timeout=WAIT_S)
        return reply


@contextmanager
def serving(folder: Path) -> Iterator[Served]:
    model = nn.Linear(3, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    blocks, _ = optimizers.blocks_of(model, optimizer)
    settings = optimizers.hyperparameters(optimizer)
    spec = ModelSpec(optimizers.name_of(optimizer), settings, blocks, 10, 2, 5, 20, 0)
    parameters = Arena.of_parameters(spec)
    parameters.value(0).fill_(1.0)
    told = pb.MemberReport()
    server = ParameterServer("ps-1", folder, WAIT_S, lambda change: change(told))
    endpoint = grpc.server(ThreadPoolExecutor(8))
    serve(server, endpoint)
    address = f"127.0.0.1:{endpoint.add_insecure_port('127.0.0.1:0')}"
    endpoint.start()
    following = threading.Thread(target=server.run)
    with grpc.insecure_channel(address) as channel:
        try:
            yield Served(server, told, spec, parameters, ParametersStub(channel), address, following)
        finally:
            server.see(pb.MemberView(leave=True))
            endpoint.stop(0).wait()
    following.join(WAIT_S)
    assert not following.is_alive()


@pytest.mark.parametrize("together", [True, False])
def test_a_worker_that_is_taken_out_before_its_plan_has_begun_still_counts_in_that_plan(
    tmp_path: Path, together: bool
) -> None:
    """A resize may be ordered before a server that is short of processor time has looked at the plan before: the last
    gradients of whoever leaves must not be taken for zeros."""
    with serving(tmp_path) as served:
        leaver, stayer = Arena.of_gradients(served.spec), Arena.of_gradients(served.spec)
        leaver.value(0).fill_(0.25)
        stayer.value(0).fill_(0.5)
        first = served.plan(1, 0, **{"worker-0": leaver.handle, "worker-1": stayer.handle})
        second = served.plan(2, 1, **{"worker-1": stayer.handle})
        if not together:
            served.see(first)
        served.see(first, second)
        served.begin()
        with ThreadPoolExecutor(2) as workers:
            taken = list(workers.map(lambda worker: served.push(worker, 1, 0), ("worker-0", "worker-1")))

        assert [reply.version for reply in taken] == [1, 1]
        assert served.parameters.value(0).tolist() == [[0.25] * 3]
        stayer.value(0).fill_(0.125)
        assert served.push("worker-1", 2, 1).version == 2
        assert served.parameters.value(0).tolist() == [[0.125] * 3]


def test_gradients_that_cannot_be_reached_fail_the_step_instead_of_counting_as_zeros(tmp_path: Path) -> None:
    """Out of descriptors, or kept out of the worker's memory: a training that silently leaves a worker's samples out
    is worse than one that ends."""
    with serving(tmp_path) as served:
        mine = Arena.of_gradients(served.spec)
        pid, number, inode, size = mine.handle.split(":")
        served.see(served.plan(1, 0, **{"worker-0": f"{pid}:{number}:{int(inode) + 1}:{size}"}))
        served.begin()

        with pytest.raises(grpc.RpcError, match="the gradients of worker-0 cannot be reached"):
            served.push("worker-0", 1, 0)
        assert served.parameters.value(0).tolist() == [[1.0] * 3]


def test_a_server_that_joins_a_training_has_all_memory_in_place_before_it_is_counted_on(tmp_path: Path) -> None:
    """Workers would wait for hundreds of megabytes of fresh pages in the middle of a switch; and what was for a worker
    that has left is given back, or a job that is resized for days would fill the machine."""
    with serving(tmp_path) as served:
        parameters, gradients = segments("parameters"), segments("gradients")
        steps: list[object] = []
        hook = register_optimizer_step_post_hook(lambda *_: steps.append(None))
        served.following.start()
        assert not served.told.ready
        served.server.see(pb.MemberView(machine="elsewhere", model=served.spec.dumps()))
        eventually(lambda: served.told.ready, "it is ready", WAIT_S)
        hook.remove()
        assert segments("parameters") == parameters + 1
        assert steps, "the optimiser's first step, which takes longest, is over"

        first, second = served.plan(3, 7, **{"worker-0": "", "worker-1": ""}), served.plan(4, 9, **{"worker-1": ""})
        for plan in (first, second):
            plan.owners[:], plan.servers[:] = [0] * len(plan.owners), ["ps-0"]
        served.server.see(pb.MemberView(plans=[first]))
        eventually(lambda: segments("gradients") == gradients + 2, "a buffer for what each worker will send", WAIT_S)
        served.server.see(pb.MemberView(plans=[first, second]))
        eventually(lambda: segments("gradients") == gradients + 1, "the leaver's is given back", WAIT_S)


def segments(name: str) -> int:
    """How much such memory this process has open."""
    gc.collect()
    found: set[int] = set()
    for path in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            if f"fedsched-{name}" in os.readlink(path):
                found.add(path.stat().st_ino)
    return len(found)


def test_a_push_says_how_long_it_waited_for_the_blocks_of_its_plan(tmp_path: Path) -> None:
    """Whoever judges what a resize costs has to know what workers stood still for."""
    with serving(tmp_path) as served, ThreadPoolExecutor(1) as pool:
        mine = Arena.of_gradients(served.spec)
        served.see(served.plan(1, 0, **{"worker-0": mine.handle}))
        early = pool.submit(served.push, "worker-0", 1, 0)
        threading.Event().wait(0.5)
        assert not early.done()
        served.begin()

        first, second = early.result(WAIT_S), served.push("worker-0", 1, 1)
        assert first.waited_s > 0.3
        assert 0.0 <= second.waited_s < first.waited_s
