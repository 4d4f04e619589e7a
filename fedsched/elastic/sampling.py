"""Says which samples belong to which step and worker: a function of the seed and the step alone.

Because nothing depends on who trains, no resize and no restart can lose a sample of an epoch or use one twice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from fedsched.core.ids import stream
from fedsched.errors import InvalidInput


@dataclass(slots=True)
class Sampling:
    """The order of a whole training: each epoch is a permutation of its own, cut into global batches."""

    samples: int
    batch_size: int
    epochs: int
    seed: int
    _epoch: int = -1
    _order: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name in ("samples", "batch_size", "epochs"):
            if getattr(self, name) < 1:
                raise InvalidInput(f"{name} is {getattr(self, name)}; a training needs at least 1", "check the call")

    @property
    def steps_per_epoch(self) -> int:
        """The last step of an epoch may be smaller than the others."""
        return math.ceil(self.samples / self.batch_size)

    @property
    def steps(self) -> int:
        """Steps of all epochs together."""
        return self.steps_per_epoch * self.epochs

    def batch(self, step: int) -> list[int]:
        """The samples of a step, over all workers."""
        epoch, position = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            generator = torch.Generator()
            generator.manual_seed(stream(self.seed, f"epoch/{epoch}").getrandbits(63))
            self._order = torch.randperm(self.samples, generator=generator).tolist()
            self._epoch = epoch
        return self._order[position * self.batch_size : (position + 1) * self.batch_size]

    def part(self, step: int, rank: int, workers: int) -> tuple[list[int], float]:
        """One worker's samples of a step and its share of all; empty when there are more workers than samples."""
        batch = self.batch(step)
        mine = batch[len(batch) * rank // workers : len(batch) * (rank + 1) // workers]
        return mine, len(mine) / len(batch)
