"""A convolutional network on handwritten digits: long enough to be resized several times while it trains.

EPOCHS, BATCH and SEED come from the environment.
"""

from __future__ import annotations

import os

import torch
from torch import nn

from fedsched import elastic
from fedsched.examples import digits


def network() -> nn.Module:
    """Three convolutions, the first normalised, and two dense layers."""
    return nn.Sequential(
        nn.Conv2d(1, 24, 3, padding=1),
        nn.BatchNorm2d(24),
        nn.ReLU(),
        nn.Conv2d(24, 48, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(48, 64, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * 16, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def main() -> None:
    """Train with a falling learning rate; print the loss now and then, the accuracy at the end."""
    epochs, batch, seed = (int(os.environ.get(name, value)) for name, value in DEFAULTS)
    torch.manual_seed(seed)
    train, test = digits.load()
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9995)

    session = elastic.join(model, optimizer, seed=seed, scheduler=scheduler)
    printed = -1
    for images, labels in session.batches(train, batch_size=batch, epochs=epochs):
        loss = nn.functional.cross_entropy(model(images), labels)
        session.step(loss)
        if session.is_chief and session.epoch > printed:
            printed = session.epoch
            print(f"epoch {printed}: loss {loss.item():.4f}", flush=True)

    if session.is_chief:
        reached = digits.accuracy(model, test)
        print(f"test accuracy {reached:.3f} after {epochs} epochs", flush=True)
        session.report(accuracy=reached)


DEFAULTS = (("EPOCHS", "20"), ("BATCH", "96"), ("SEED", "0"))

if __name__ == "__main__":
    main()
