"""ResNet-50 on synthetic images: 25.6 million parameters (102 MB), the size that resizes are measured with.

EPOCHS, BATCH, SAMPLES, IMAGE (edge in pixels) and SEED come from the environment.
"""

from __future__ import annotations

import os

import torch
from torch import nn
from torch.utils.data import Dataset

from fedsched import elastic
from fedsched.core.ids import stream

STAGES = ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2))
"""Width, blocks and first stride of each stage (He et al. 2016, table 1)."""
EXPANSION = 4
CLASSES = 1000


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions around a shortcut."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = width * EXPANSION
        self.path = nn.Sequential(
            nn.Conv2d(channels, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, out, 1, bias=False),
            nn.BatchNorm2d(out),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != out:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """(N, channels, H, W) to (N, 4 width, H / stride, W / stride)."""
        return nn.functional.relu(self.path(images) + self.shortcut(images))


def network() -> nn.Module:
    """ResNet-50 for images of three channels and any size."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    ]
    channels = 64
    for width, blocks, stride in STAGES:
        for index in range(blocks):
            layers.append(Bottleneck(channels, width, stride if index == 0 else 1))
            channels = width * EXPANSION
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES))


class Synthetic(Dataset[tuple[torch.Tensor, int]]):
    """Images of noise, the same ones every time; each is made when it is asked for."""

    def __init__(self, samples: int, edge: int) -> None:
        self._samples = samples
        self._edge = edge

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        label = int(stream(index, "label").random() * CLASSES)
        return torch.randn(3, self._edge, self._edge, generator=generator), label


def main() -> None:
    """Train; the chief prints the loss of each epoch."""
    epochs, batch, samples, edge, seed = (int(os.environ.get(name, value)) for name, value in DEFAULTS)
    torch.manual_seed(seed)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    session = elastic.join(model, optimizer, seed=seed)
    printed = -1
    for images, labels in session.batches(Synthetic(samples, edge), batch_size=batch, epochs=epochs):
        loss = nn.functional.cross_entropy(model(images), labels)
        session.step(loss)
        if session.is_chief and session.epoch > printed:
            printed = session.epoch
            print(f"epoch {printed}: loss {loss.item():.4f}", flush=True)


DEFAULTS = (("EPOCHS", "1"), ("BATCH", "8"), ("SAMPLES", "64"), ("IMAGE", "32"), ("SEED", "0"))

if __name__ == "__main__":
    main()
