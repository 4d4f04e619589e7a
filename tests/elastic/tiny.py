"""A training script of milliseconds, run by the tests as a worker of a real job.

Convex and in double precision, so that different orders of summation stay far below any fault in the arithmetic.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import safetensors.torch
import torch
from torch import nn
from torch.utils.data import TensorDataset

from fedsched import elastic


class Net(nn.Module):
    """Blocks of different sizes, a frozen one, and statistics that only the forward pass changes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(12, width)
        self.second = nn.Linear(width, 1)
        self.frozen = nn.Parameter(torch.full((width,), (6 / width) ** 0.5), requires_grad=False)
        self.seen: torch.Tensor
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """A linear function: the loss over it is smooth."""
        self.seen += 1
        result: torch.Tensor = self.second(self.first(inputs) * self.frozen).squeeze(1)
        return result


def optimizer_of(model: nn.Module, name: str) -> torch.optim.Optimizer:
    """Two groups with settings of their own."""
    first, rest = model.first.parameters(), model.second.parameters()  # type: ignore[union-attr]
    if name == "adam":
        return torch.optim.AdamW([{"params": first, "lr": 2e-3}, {"params": rest}], lr=1e-3, weight_decay=0.1)
    if name == "adagrad":
        return torch.optim.Adagrad([{"params": first}, {"params": rest}], lr=0.01, initial_accumulator_value=0.5)
    return torch.optim.SGD([{"params": first, "lr": 0.002}, {"params": rest}], lr=0.001, momentum=0.9)


def main() -> None:
    """Train, then write the final parameters to OUT/<task>.safetensors."""
    task = os.environ.get("FEDSCHED_TASK", "alone")
    torch.manual_seed(hash(task) % 1000)  # Only the chief's first values may count.
    if task in ("alone", "worker-0"):
        torch.manual_seed(1)
    model = Net(int(os.environ.get("WIDTH", "6"))).double()
    optimizer = optimizer_of(model, os.environ.get("OPTIMIZER", "sgd"))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)
    samples = torch.Generator().manual_seed(7)
    inputs = torch.randn(int(os.environ.get("SAMPLES", "50")), 12, generator=samples, dtype=torch.float64)
    labels = inputs.sum(dim=1)
    crash_at = int(os.environ.get("CRASH_AT", "-1"))

    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if "SCALED" in os.environ else None
    session = elastic.join(
        model, optimizer, seed=3, scheduler=scheduler, scaler=scaler, asynchronous="ASYNCHRONOUS" in os.environ
    )
    batches = session.batches(
        TensorDataset(inputs, labels),
        batch_size=int(os.environ.get("BATCH", "8")),
        epochs=int(os.environ.get("EPOCHS", "10")),
    )
    recording = os.environ.get("RECORD")
    out = (Path(recording) / f"{task}.{os.getpid()}").open("w", buffering=1) if recording else None
    hurry = Path(os.environ.get("HURRY", "/"))
    for batch, wanted in batches:
        if not hurry.exists():  # Steps of a model that has more to do, until the test has seen enough of them.
            time.sleep(0.03)
        if session.steps == crash_at:
            raise RuntimeError("the script has a fault")
        if out is not None and session._turn is not None:  # No rehearsal.
            out.write(f"{session.steps} {' '.join(f'{label:.9f}' for label in wanted.tolist())}\n")
        overflows = task != "worker-1" and str(session.steps) in os.environ.get("OVERFLOW_AT", "").split(",")
        factor = float("inf") if overflows else 1.0
        session.step(nn.functional.mse_loss(model(batch), wanted) * factor)
    if "ABRUPT" in os.environ:  # As a library does that ends the process itself.
        os._exit(0)
    if session.is_chief:
        session.report(accuracy=0.5)
    folder = Path(os.environ["OUT"])
    safetensors.torch.save_file(dict(model.state_dict()), folder / f"{task}.draft")
    (folder / f"{task}.draft").rename(folder / f"{task}.safetensors")


if __name__ == "__main__":
    main()
