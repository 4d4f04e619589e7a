"""A worker of a job without servers: it has all blocks and the optimiser, and sums gradients with the others."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
from torch._C._distributed_c10d import PrefixStore, ProcessGroup, ProcessGroupGloo, Store, TCPStore

from fedsched.elastic.arena import Arena
from fedsched.elastic.checkpoint import verified
from fedsched.elastic.handing import pack, unpack
from fedsched.elastic.model import Hyperparameters, ModelSpec
from fedsched.elastic.shard import BlockState, Shard, read_blocks
from fedsched.pb import training_pb2 as pb


class Reduction:
    """One worker's copy of the parameters and its place in the groups of workers, one group for each plan.

    Args:
        task: this worker's name.
        wait_s: longest wait for the others in one exchange, in seconds.
        host: where the other workers reach this one.
    """

    def __init__(self, task: str, model: ModelSpec, wait_s: float, host: str) -> None:
        self._task = task
        self._host = host
        self._wait = timedelta(seconds=wait_s)
        self.arena = Arena.of_parameters(model)
        self.shard = Shard(model, self.arena)
        self._all = range(len(model.blocks))
        # Every worker may become the chief, whose store the others of its plans meet at.
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=self._wait)
        self._pool = ThreadPoolExecutor(1, "group")
        self._groups: dict[int, Future[tuple[Store, ProcessGroup]]] = {}

    @property
    def address(self) -> str:
        """Where the others find this worker's store, which listens on all of the machine's addresses."""
        return f"{self._host}:{self._store.port}"

    def prepare(self, plan: pb.PlanView) -> None:
        """Meet the others of a plan in the background, while steps of the one before are still taken."""
        if plan.number not in self._groups and self._task in plan.workers:
            self._groups = {number: known for number, known in self._groups.items() if number >= plan.number - 1}
            self._groups[plan.number] = self._pool.submit(self._meet, plan)

    def _meet(self, plan: pb.PlanView) -> tuple[Store, ProcessGroup]:
        rank = list(plan.workers).index(self._task)
        host, _, port = plan.rendezvous.rpartition(":")
        store: Store = (
            self._store
            if rank == 0
            else TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=self._wait)
        )
        store = PrefixStore(f"plan-{plan.number}", store)
        gloo: Any = ProcessGroupGloo  # The stubs know neither these options nor that it is a group.
        options = gloo._Options()
        options._timeout = self._wait
        # By itself gloo listens where the machine's own name leads, which on many machines is the machine alone.
        options._devices = [gloo.create_device(hostname=self._host)]
        return store, cast(ProcessGroup, gloo(store, rank, len(plan.workers), options))

    def group(self, plan: pb.PlanView) -> ProcessGroup:
        """The workers of a plan, met.

        Raises:
            RuntimeError: one of them cannot be reached.
        """
        return self._groups[plan.number].result(self._wait.total_seconds())[1]

    # Parameters for who has none.

    def fill(self) -> None:
        """The chief's initial values are in the arena."""
        self.shard.add({index: BlockState(self.arena.value(index), {}, {}) for index in self._all})

    def resume(self, checkpoint: Path) -> None:
        """Read everything from a checkpoint."""
        self.shard.add(*read_blocks(self.shard.model, verified(checkpoint).files, self._all))

    def give(self, plan: pb.PlanView, newcomers: Sequence[str]) -> None:
        """Let newcomers have the parameters; none of them is changed before they have joined in a sum."""
        group = self.group(plan)
        store = self._groups[plan.number].result()[0]
        # The stubs do not know that a store takes bytes.
        store.set("state", cast(str, pack(self.shard, self.shard.states()).SerializeToString()))
        for rank, worker in enumerate(plan.workers):
            if worker in newcomers and not self._sees(plan, rank):
                for stretch in self._everything(self.arena):
                    group.send([stretch], rank, 0).wait(self._wait)

    def take(self, plan: pb.PlanView) -> None:
        """Have the chief's parameters and optimiser state."""
        group = self.group(plan)
        store = self._groups[plan.number].result()[0]
        store.wait(["state"], self._wait)
        given = pb.Handover.FromString(store.get("state"))
        mine = self._everything(self.arena)
        if self._sees(plan, list(plan.workers).index(self._task)):
            chief = self._everything(Arena.of_parameters(self.shard.model, plan.parameters))
            for stretch, its in zip(mine, chief, strict=True):
                stretch.copy_(its)
        else:
            for stretch in mine:
                group.recv([stretch], 0, 0).wait(self._wait)
        self.shard.add(unpack(self.arena, given), tuple(json.loads(given.hyperparameters)))

    def _everything(self, arena: Arena) -> Sequence[torch.Tensor]:
        return list(arena.stretches(self._all, 1 + len(arena.layout.keys)))

    def _sees(self, plan: pb.PlanView, rank: int) -> bool:
        """Whether this worker shares memory with the chief."""
        return bool(plan.parameters and plan.gradients[rank])

    # Steps.

    def step(
        self,
        plan: pb.PlanView,
        gradients: Arena,
        dense: Sequence[int],
        overflow: bool,
        hyperparameters: Hyperparameters,
    ) -> bool:
        """Sum the gradients with the others' and take the optimiser's step; False when one had overflowed."""
        used = list(dense)
        if len(plan.workers) > 1:
            group = self.group(plan)
            flags = torch.zeros(len(self._all) + 1, dtype=torch.int32)
            flags[used] = 1
            flags[-1] = overflow
            group.allreduce([flags]).wait(self._wait)
            overflow = bool(flags[-1])
            mine = set(used)
            used = [index for index in self._all if flags[index]]
            for index in used:
                if index not in mine:
                    gradients.value(index).zero_()
            if not overflow:
                sums = [group.allreduce([stretch]) for stretch in gradients.stretches(used)]
                for under_way in sums:
                    under_way.wait(self._wait)
        if not overflow:
            self.shard.apply([{index: gradients.value(index) for index in used}], hyperparameters)
        return not overflow

    def keep_buffers(self, of_tensor: Callable[[int], torch.Tensor | None]) -> None:
        """Put the chief's buffers beside the parameters, for a checkpoint or a newcomer."""
        found = {index: of_tensor(index) for index in self._all}
        self.shard.set_buffers({index: value for index, value in found.items() if value is not None})

    def close(self) -> None:
        """Meet nobody any more."""
        self._pool.shutdown(wait=False, cancel_futures=True)
