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
from fedsched.elastic.arena import Arena
from fedsched.elastic.model import Hyperparameters, ModelSpec
from fedsched.elastic.tensors import dtype_name
from fedsched.errors import CorruptCheckpoint


@dataclass(slots=True)
class BlockState:
    """One block and what the optimiser keeps for it."""

    value: torch.Tensor
    tensors: dict[str, torch.Tensor]
    scalars: dict[str, Any]
    """Optimiser state that is no tensor."""


Gradients = Mapping[int, torch.Tensor]
"""One worker's gradients by block, each multiplied by the worker's share of the step's samples. Dense ones may be
written to."""


class Shard:
    """Blocks by index, their tensors in an arena. Not safe for several threads; the server sees to that."""

    def __init__(self, model: ModelSpec, arena: Arena) -> None:
        self.model = model
        self.arena = arena
        self.hyperparameters: Hyperparameters = model.hyperparameters
        self._values: dict[int, torch.Tensor] = {}
        self._optimizer: Optimizer | None = None
        self._settled = False
        """Whether all optimiser state that belongs there is known to lie in the arena."""

    @property
    def blocks(self) -> frozenset[int]:
        """Which blocks are here."""
        return frozenset(self._values)

    def add(self, blocks: Mapping[int, BlockState], hyperparameters: Hyperparameters | None = None) -> None:
        """Take blocks, with the optimiser's present settings where the giver knows them.

        Tensors that do not lie in the arena yet are copied there.
        """
        if hyperparameters is not None:
            self.hyperparameters = hyperparameters
        states = self._states()
        for index, block in sorted(blocks.items()):
            value = _place(self.arena.value(index), block.value)
            optimised = self.model.blocks[index].group >= 0
            self._values[index] = torch.nn.Parameter(value) if optimised else value
            states[index] = {**block.tensors, **block.scalars}
        self._rebuild(states)
        self._settle()

    def remove(self, indexes: Iterable[int]) -> dict[int, BlockState]:
        """Give blocks away with their optimiser state."""
        self._settle()
        gone = {index: self._state_of(index) for index in sorted(indexes)}
        if not gone:
            return {}
        states = self._states()
        for index in gone:
            del self._values[index]
        self._rebuild(states)
        return gone

    def apply(self, contributions: Sequence[Gradients], hyperparameters: Hyperparameters) -> None:
        """One step of the optimiser with the sum of the workers' gradients.

        Floating-point sums depend on their order, so contributions come in the plan's order of workers, never in the
        order of arrival: the same workers always give the same bits.
        """
        self.hyperparameters = hyperparameters
        if self._optimizer is None:
            return
        optimizers.update(self._optimizer, hyperparameters)
        for index, parameter in self._values.items():
            if isinstance(parameter, torch.nn.Parameter):
                parameter.grad = _sum(index, contributions)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        if not self._settled:
            self._settle()

    def set_buffers(self, buffers: Mapping[int, torch.Tensor]) -> None:
        """Take the chief's buffers."""
        for index, value in buffers.items():
            self._values[index].copy_(value)

    def lies_in_arena(self, index: int, key: str, tensor: torch.Tensor) -> bool:
        """Whether this part of a block's optimiser state is where others can find it."""
        return self._has_place(index, key, tensor) and tensor.data_ptr() == self.arena.state(index, key).data_ptr()

    def _has_place(self, index: int, key: str, tensor: torch.Tensor) -> bool:
        spec = self.model.blocks[index]
        in_form = tuple(tensor.shape) == spec.shape and dtype_name(tensor) == spec.dtype and tensor.numel() > 0
        return in_form and key in self.arena.layout.keys

    def _settle(self) -> None:
        """Bring optimiser state into the arena that the optimiser has made somewhere else, as it does at first.

        From then on it changes it in place; one that makes a new tensor at each step is only slower to give away.
        """
        for index, state in self._states().items():
            for key, tensor in state.items():
                if isinstance(tensor, torch.Tensor) and self._has_place(index, key, tensor):
                    state[key] = _place(self.arena.state(index, key), tensor)
        self._settled = bool(self._values) and (self._optimizer is None or len(self._states()) > 0)

    def states(self) -> dict[int, BlockState]:
        """All blocks with their optimiser state, in the arena as far as it belongs there."""
        self._settle()
        return {index: self._state_of(index) for index in sorted(self._values)}

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


def _place(place: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, at this place."""
    if place.data_ptr() != tensor.data_ptr():
        place.copy_(tensor)
    return place


def _sum(index: int, contributions: Sequence[Gradients]) -> torch.Tensor | None:
    result: torch.Tensor | None = None
    for contribution in contributions:
        gradient = contribution.get(index)
        if gradient is None:
            continue
        if result is None:
            result = gradient
        elif result.is_sparse:
            result = result + gradient
        else:
            result += gradient  # Into the first worker's buffer, which nobody reads again.
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
            raise CorruptCheckpoint(
                f"the checkpoint in {files[0].parent} holds no {name} that fits the model",
                "train the model that the checkpoint is of, or submit the changed one as a new job",
            )
    return found, hyperparameters
