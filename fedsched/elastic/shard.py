"""The blocks of one parameter server with their optimiser: adds gradients, steps, gives blocks away and takes them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch.optim import Optimizer

from fedsched.elastic import optimizers
from fedsched.elastic.model import Hyperparameters, ModelSpec
from fedsched.errors import CorruptCheckpoint


@dataclass(slots=True)
class BlockState:
    """One block and what the optimiser keeps for it."""

    value: torch.Tensor
    tensors: dict[str, torch.Tensor]
    scalars: dict[str, Any]
    """Optimiser state that is no tensor."""


@dataclass(frozen=True, slots=True)
class Contribution:
    """One worker's part of a step."""

    weight: float
    gradients: Mapping[int, torch.Tensor]


class Shard:
    """Blocks by index. Not safe for several threads; the server sees to that."""

    def __init__(self, model: ModelSpec) -> None:
        self.model = model
        self.hyperparameters: Hyperparameters = model.hyperparameters
        self._values: dict[int, torch.Tensor] = {}
        self._optimizer: Optimizer | None = None

    @property
    def blocks(self) -> frozenset[int]:
        """Which blocks are here."""
        return frozenset(self._values)

    def add(self, blocks: Mapping[int, BlockState], hyperparameters: Hyperparameters | None = None) -> None:
        """Take blocks, with the optimiser's present settings where the giver knows them."""
        if hyperparameters is not None:
            self.hyperparameters = hyperparameters
        states = self._states()
        for index, block in sorted(blocks.items()):
            optimised = self.model.blocks[index].group >= 0
            self._values[index] = torch.nn.Parameter(block.value) if optimised else block.value
            states[index] = {**block.tensors, **block.scalars}
        self._rebuild(states)

    def remove(self, indexes: Iterable[int]) -> dict[int, BlockState]:
        """Give blocks away with their optimiser state."""
        gone = {index: self._state_of(index) for index in sorted(indexes)}
        states = self._states()
        for index in gone:
            del self._values[index]
        self._rebuild(states)
        return gone

    def apply(self, contributions: Sequence[Contribution], hyperparameters: Hyperparameters) -> None:
        """One step of the optimiser with the weighted sum of the workers' gradients.

        Floating-point sums depend on their order, so contributions come in the plan's order of workers, never in the
        order of arrival: the same workers always give the same bits.
        """
        self.hyperparameters = hyperparameters
        if self._optimizer is None:
            return
        optimizers.update(self._optimizer, hyperparameters)
        for index, parameter in self._values.items():
            if isinstance(parameter, torch.nn.Parameter):
                parameter.grad = _weighted_sum(index, contributions)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def set_buffers(self, buffers: Mapping[int, torch.Tensor]) -> None:
        """Take the chief's buffers."""
        for index, value in buffers.items():
            self._values[index] = value

    def values(self, *, buffers: bool) -> list[tuple[int, torch.Tensor]]:
        """The blocks' values by index; buffers and frozen parameters only when asked for."""
        return [
            (index, value)
            for index, value in sorted(self._values.items())
            if buffers or isinstance(value, torch.nn.Parameter)
        ]

    def snapshot(self) -> ShardSnapshot:
        """A copy that later steps do not touch."""
        names = [block.name for block in self.model.blocks]
        tensors: dict[str, torch.Tensor] = {}
        scalars: dict[str, dict[str, Any]] = {}
        for index in sorted(self._values):
            state = self._state_of(index)
            tensors[f"value/{names[index]}"] = state.value.detach().clone()
            for key, tensor in sorted(state.tensors.items()):
                tensors[f"state/{key}/{names[index]}"] = tensor.detach().clone()
            scalars[names[index]] = state.scalars
        return ShardSnapshot(tensors, scalars, self.hyperparameters)

    def _rebuild(self, states: Mapping[int, dict[str, Any]]) -> None:
        """The optimiser over the blocks that are here now, each with the state it had.

        Built anew because some optimisers prepare their state in the constructor.
        """
        parameters: list[list[torch.nn.Parameter]] = [[] for _ in self.hyperparameters]
        for index, value in sorted(self._values.items()):
            if isinstance(value, torch.nn.Parameter):
                parameters[self.model.blocks[index].group].append(value)
        if not any(parameters):
            self._optimizer = None
            return
        self._optimizer = optimizers.build(self.model.optimizer, self.hyperparameters, parameters)
        for index, state in sorted(states.items()):
            if index in self._values and state:
                self._optimizer.state[self._values[index]] = state

    def _states(self) -> dict[int, dict[str, Any]]:
        if self._optimizer is None:
            return {}
        state = self._optimizer.state
        return {index: state[value] for index, value in sorted(self._values.items()) if value in state}

    def _state_of(self, index: int) -> BlockState:
        value = self._values[index]
        state = self._optimizer.state.get(value, {}) if self._optimizer else {}
        tensors = {key: item for key, item in state.items() if isinstance(item, torch.Tensor)}
        return BlockState(value.detach(), tensors, {key: item for key, item in state.items() if key not in tensors})


def _weighted_sum(index: int, contributions: Sequence[Contribution]) -> torch.Tensor | None:
    result: torch.Tensor | None = None
    for contribution in contributions:
        gradient = contribution.gradients.get(index)
        if gradient is None:
            continue
        part = gradient if contribution.weight == 1.0 else gradient * contribution.weight
        result = part if result is None else result + part
    return result


@dataclass(frozen=True, slots=True)
class ShardSnapshot:
    """A shard at one version, on its way to disk."""

    tensors: dict[str, torch.Tensor]
    scalars: dict[str, dict[str, Any]]
    hyperparameters: Hyperparameters

    def write(self, path: Path) -> None:
        """Write a safetensors file: no code in it that a reader would run."""
        metadata = {"scalars": json.dumps(self.scalars), "hyperparameters": json.dumps(self.hyperparameters)}
        safetensors.torch.save_file(self.tensors, path, metadata)


def read_blocks(
    model: ModelSpec, files: Sequence[Path], indexes: Iterable[int]
) -> tuple[dict[int, BlockState], Hyperparameters]:
    """Read some blocks of a checkpoint, however its shards were cut, and the settings of its optimiser.

    Raises:
        CorruptCheckpoint: a block is missing or has another shape.
    """
    wanted = {model.blocks[index].name: index for index in indexes}
    found: dict[int, BlockState] = {}
    hyperparameters = model.hyperparameters
    for file in files:
        with safetensors.safe_open(file, framework="pt") as shard:
            metadata = shard.metadata()
            scalars = json.loads(metadata["scalars"])
            hyperparameters = tuple(json.loads(metadata["hyperparameters"]))
            keys = sorted(shard.keys())
            for key in (key for key in keys if key.startswith("value/")):
                name = key.removeprefix("value/")
                if name in wanted:
                    found[wanted[name]] = BlockState(shard.get_tensor(key), {}, scalars.get(name, {}))
            for key in (key for key in keys if key.startswith("state/")):
                _, part, name = key.split("/", 2)
                if name in wanted:
                    found[wanted[name]].tensors[part] = shard.get_tensor(key)
    for name, index in wanted.items():
        if index not in found or tuple(found[index].value.shape) != model.blocks[index].shape:
            raise CorruptCheckpoint(f"the checkpoint in {files[0].parent} holds no {name} that fits the model")
    return found, hyperparameters
