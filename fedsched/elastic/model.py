"""Describes what is trained, in words that every process of a job understands without torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import Any

from fedsched.core.blocks import Block

Hyperparameters = tuple[dict[str, Any], ...]
"""Settings of each parameter group, without the parameters."""


@dataclass(frozen=True, slots=True)
class BlockSpec:
    """One tensor of the model, or some rows of a large one: what lives on one server as a whole."""

    name: str
    group: int
    """Parameter group of the optimiser; -1 for what is not optimised: buffers and frozen parameters."""
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    tensor: int = 0
    """Which of the model's tensors it belongs to."""
    start: int = 0
    """Its first row there."""

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}{list(self.shape)}"


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The model, how it is optimised and over what."""

    optimizer: str
    """Class of the optimiser as `module:name`."""
    hyperparameters: Hyperparameters
    blocks: tuple[BlockSpec, ...]
    samples: int
    """Size of the data set."""
    batch_size: int
    """Samples of one step, over all workers."""
    steps_per_epoch: int
    steps: int
    seed: int
    state_keys: tuple[str, ...] = ()
    """What the optimiser keeps for each parameter in the parameter's own form: momentum, moments and so on."""
    asynchronous: bool = False
    """Whether workers go on without waiting for each other. Then `batch_size` counts the samples of one worker, and a
    step is one worker's batch."""

    def dumps(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self), sort_keys=True)

    @staticmethod
    def loads(text: str) -> ModelSpec:
        """Read back what `dumps` wrote."""
        plain = json.loads(text)
        blocks = tuple(BlockSpec(**{**block, "shape": tuple(block["shape"])}) for block in plain.pop("blocks"))
        groups = tuple(plain.pop("hyperparameters"))
        keys = tuple(plain.pop("state_keys"))
        return ModelSpec(blocks=blocks, hyperparameters=groups, state_keys=keys, **plain)

    def core_blocks(self) -> tuple[Block, ...]:
        """What the protocol needs to know of them."""
        return tuple(Block(block.name, block.size_bytes) for block in self.blocks)

    def difference(self, other: ModelSpec) -> str:
        """In what the two cannot train together; empty when they can. Learning rates and the like may differ."""
        same = replace(self, hyperparameters=other.hyperparameters)
        if same == other:
            return ""
        for field in ("optimizer", "samples", "batch_size", "steps", "seed", "asynchronous", "state_keys"):
            mine, theirs = getattr(self, field), getattr(other, field)
            if mine != theirs:
                return f"{field} is {mine!r} there and {theirs!r} here"
        return "the models' " + (block_difference(self.blocks, other.blocks) or "steps differ")


def block_difference(mine: tuple[BlockSpec, ...], theirs: tuple[BlockSpec, ...]) -> str:
    """The first way in which two models' tensors differ; empty when they do not."""
    for here, there in zip(mine, theirs, strict=False):
        if here != there:
            return f"tensors differ: {here} there, {there} here"
    return "" if len(mine) == len(theirs) else f"tensors differ: {len(mine)} there, {len(theirs)} here"
