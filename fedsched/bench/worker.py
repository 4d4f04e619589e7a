"""The training that benchmarks run: the ResNet-50 example, with the end of every step written down.

EDGE, BATCH and STEPS come from the environment; STEPS_DIR takes one file per task, with lines of step and seconds on
the machine's monotonic clock, which all of its processes share.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import torch
from torch import nn

from fedsched import elastic
from fedsched.examples import resnet50

SEED = 0
"""Of the weights and of the samples' order."""


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    """What is trained, in a job and without one."""
    torch.manual_seed(SEED)
    model = resnet50.network()
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def main() -> None:
    """Train to the end of STEPS steps, or until the job is stopped."""
    edge, batch, steps = (int(os.environ[name]) for name in ("EDGE", "BATCH", "STEPS"))
    model, optimizer = model_and_optimizer()
    task, attempt = os.environ["FEDSCHED_TASK"], os.environ["FEDSCHED_ATTEMPT"]
    # One epoch: what is measured is not the order of samples.
    data = resnet50.Synthetic(batch * steps, edge)
    session = elastic.join(model, optimizer, seed=SEED)
    first = 0
    with (Path(os.environ["STEPS_DIR"]) / f"{task}.{attempt}.txt").open("a", buffering=1) as out:
        for images, labels in session.batches(data, batch_size=batch, epochs=1):
            session.step(nn.functional.cross_entropy(model(images), labels))
            out.write(f"{session.steps} {time.monotonic():.6f}\n")
            first = first or session.wire_bytes
    # Without the first step, which also fetches the parameters.
    told = {"wire_bytes": session.wire_bytes - first, "steps": session.steps - 1}
    (Path(os.environ["STEPS_DIR"]) / f"{task}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
