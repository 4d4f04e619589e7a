"""A small network on handwritten digits: a job of some seconds. EPOCHS, BATCH and SEED come from the environment."""

from __future__ import annotations

import os

import torch
from torch import nn

from fedsched import elastic
from fedsched.examples import digits


def main() -> None:
    """Train, then print and report the accuracy on images that were not trained on."""
    epochs, batch, seed = (int(os.environ.get(name, value)) for name, value in DEFAULTS)
    torch.manual_seed(seed)
    train, test = digits.load()
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    session = elastic.join(model, optimizer, seed=seed)
    for images, labels in session.batches(train, batch_size=batch, epochs=epochs):
        session.step(nn.functional.cross_entropy(model(images), labels))

    if session.is_chief:
        reached = digits.accuracy(model, test)
        print(f"test accuracy {reached:.3f} after {epochs} epochs", flush=True)
        session.report(accuracy=reached)


DEFAULTS = (("EPOCHS", "20"), ("BATCH", "64"), ("SEED", "0"))

if __name__ == "__main__":
    main()
