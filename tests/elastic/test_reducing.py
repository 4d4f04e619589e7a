"""Workers without parameter servers meet wherever they run."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import torch
from torch import nn

from fedsched.elastic.arena import Arena
from fedsched.elastic.model import ModelSpec
from fedsched.elastic.reducing import Reduction
from fedsched.pb import training_pb2 as pb
from tests.elastic.test_memory import spec_of

HOSTS = ("127.0.0.2", "127.0.0.3")
"""Both lead to this machine, but only who was told so listens there."""


def spec() -> ModelSpec:
    model = nn.Linear(3, 2)
    return spec_of(model, torch.optim.SGD(model.parameters(), lr=1.0))


@pytest.mark.live
def test_workers_meet_and_sum_at_the_addresses_that_they_were_given() -> None:
    """On a cluster workers are on machines of their own: a group that listens on loopback would never come together."""
    form = spec()
    workers = [Reduction(f"worker-{rank}", form, 20.0, host) for rank, host in enumerate(HOSTS)]
    assert [worker.address.rpartition(":")[0] for worker in workers] == list(HOSTS)
    plan = pb.PlanView(number=1, workers=[f"worker-{rank}" for rank in range(2)], rendezvous=workers[0].address)
    blocks = range(len(form.blocks))

    def step(rank: int) -> bool:
        worker, gradients = workers[rank], Arena.of_gradients(form)
        for index in blocks:
            worker.arena.value(index).zero_()
            gradients.value(index).fill_(rank + 1.0)
        worker.fill()
        worker.prepare(plan)
        worker.group(plan)
        return worker.step(plan, gradients, list(blocks), False, form.hyperparameters)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(step, range(2))) == [True, True]
    for worker in workers:
        assert all((worker.arena.value(index) == -3.0).all() for index in blocks)
    listening = {line.laddr.ip for line in psutil.Process().net_connections("inet") if line.laddr}
    assert set(HOSTS) <= listening
    for worker in workers:
        worker.close()
