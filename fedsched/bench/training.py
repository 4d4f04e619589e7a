"""Measures synchronous training with parameter servers beside torch's DistributedDataParallel over gloo."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedsched.bench.job import Load, bench_job
from fedsched.errors import Failed

WORKERS = 2
SERVERS = 2
"""Of the job; DistributedDataParallel has as many workers."""
WARM_UP = 3
"""Steps that are not counted: memory and kernels are got ready in them."""
STREAMED_STEPS = 6
"""Steps through gRPC that are counted."""
_DEADLINE_S = 600.0
"""Longest wait for DistributedDataParallel to end."""


@dataclass(frozen=True, slots=True)
class TrainingBench:
    """Of one run: medians over its pairs."""

    model_mb: float
    pairs: int
    ps_steps_per_s: float
    """Two workers and two servers of one job, tensors through shared memory."""
    ddp_steps_per_s: float
    """Two processes, the same model, optimiser and samples per process."""
    ratio: float
    """Median of the pairs' own ratios: each pair runs one after the other, at nearly the same load."""
    streamed_steps_per_s: float
    """The job again, as if every task were on a machine of its own: tensors through gRPC."""
    wire_bytes_ratio: float
    """What a worker sends and receives per step there, over its gradients and parameters."""


def measure(pairs: int, steps: int, load: Load, tell: Callable[[str], None]) -> TrainingBench:
    """Run a job and DistributedDataParallel in turn, `pairs` times."""
    ps: list[float] = []
    ddp: list[float] = []
    for number in range(pairs):
        tell(f"pair {number + 1} of {pairs}")
        ps.append(_ps(steps, load)[0])
        ddp.append(_ddp(steps, load))
    tell("through gRPC")
    streamed, wire = _ps(STREAMED_STEPS, load, streamed=True)
    size = _model_bytes()
    return TrainingBench(
        model_mb=size / 1e6,
        pairs=pairs,
        ps_steps_per_s=statistics.median(ps),
        ddp_steps_per_s=statistics.median(ddp),
        ratio=statistics.median(mine / theirs for mine, theirs in zip(ps, ddp, strict=True)),
        streamed_steps_per_s=streamed,
        wire_bytes_ratio=wire / (2 * size),
    )


def _ps(steps: int, load: Load, *, streamed: bool = False) -> tuple[float, float]:
    """Steps per second, and bytes that a worker exchanged per step."""
    with bench_job(load, WARM_UP + steps, streamed=streamed) as job:
        job.start(WORKERS, SERVERS)
        job.wait_for_end()
        ends = [time_s for _, time_s in job.ends_of_steps(1)["worker-0"]]
        told = [json.loads(path.read_text()) for path in sorted(job.steps_dir.glob("*.json"))]
    wire = statistics.mean(count["wire_bytes"] / count["steps"] for count in told)
    return _pace(ends), wire


def _pace(ends: Sequence[float]) -> float:
    return (len(ends) - WARM_UP) / (ends[-1] - ends[WARM_UP - 1])


def _ddp(steps: int, load: Load) -> float:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="fedsched-bench-") as folder:
        context = multiprocessing.get_context("spawn")
        out = Path(folder) / "ends.json"
        processes = [
            context.Process(target=_ddp_process, args=(rank, port, WARM_UP + steps, load, str(out)))
            for rank in range(WORKERS)
        ]
        for process in processes:
            process.start()
        until_s = time.monotonic() + _DEADLINE_S
        for process in processes:
            process.join(max(0.0, until_s - time.monotonic()))
        alive = [process for process in processes if process.is_alive()]
        for process in alive:
            process.kill()
        if alive or any(process.exitcode for process in processes):
            raise Failed("DistributedDataParallel did not come to its end", "see what it printed above")
        return _pace(json.loads(out.read_text()))


def _ddp_process(rank: int, port: int, steps: int, load: Load, out: str) -> None:
    import torch
    import torch.distributed
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    from fedsched.bench.worker import model_and_optimizer
    from fedsched.examples.resnet50 import Synthetic

    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.distributed.init_process_group("gloo", rank=rank, world_size=WORKERS)
    model, optimizer = model_and_optimizer()
    parallel = DistributedDataParallel(model)
    share = load.batch // WORKERS
    data = Synthetic(load.batch * steps, load.edge)
    ends = []
    for step in range(steps):
        first = step * load.batch + rank * share
        samples = [data[index] for index in range(first, first + share)]
        images = torch.stack([image for image, _ in samples])
        labels = torch.tensor([label for _, label in samples])
        nn.functional.cross_entropy(parallel(images), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        ends.append(time.monotonic())
    if rank == 0:
        Path(out).write_text(json.dumps(ends))
    torch.distributed.destroy_process_group()


def _model_bytes() -> int:
    from fedsched.bench.worker import model_and_optimizer

    model, _ = model_and_optimizer()
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
