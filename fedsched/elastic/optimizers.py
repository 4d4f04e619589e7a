"""Takes an optimiser apart into what a server needs to build it again, and refuses what cannot be split."""

from __future__ import annotations

import importlib
import inspect
import itertools
import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, cast

import torch
from torch.nn import Module
from torch.optim import Optimizer

from fedsched.elastic.model import BlockSpec, Hyperparameters
from fedsched.elastic.tensors import dtype_name
from fedsched.errors import InvalidInput


def name_of(optimizer: Optimizer) -> str:
    """The optimiser's class as `module:name`.

    Raises:
        InvalidInput: it cannot work on several servers, or a server could not import it.
    """
    kind = type(optimizer)
    closure = inspect.signature(kind.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise _refused(optimizer, "it evaluates the model several times a step (a closure), which servers cannot do")
    known = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    if any(key not in known for key in optimizer.state):
        raise _refused(optimizer, "it keeps state that belongs to no single parameter, which cannot be split")
    if kind.__module__ == "__main__" or "<locals>" in kind.__qualname__:
        raise _refused(optimizer, f"servers cannot import it from {kind.__module__}; put it in a module of its own")
    return f"{kind.__module__}:{kind.__qualname__}"


def _refused(optimizer: Optimizer, why: str) -> InvalidInput:
    return InvalidInput(
        f"the optimiser {type(optimizer).__name__} cannot train elastically: {why}",
        "use one that treats every parameter for itself: SGD, Adam, AdamW, RMSprop, Adagrad, SparseAdam",
    )


def hyperparameters(optimizer: Optimizer) -> Hyperparameters:
    """The present settings of each parameter group: learning rate, momentum and so on.

    Raises:
        InvalidInput: a setting is neither a number, a text, a flag nor a list of such.
    """
    groups = []
    for group in optimizer.param_groups:
        plain = {key: _plain(value) for key, value in group.items() if key not in ("params", "param_names")}
        try:
            groups.append(json.loads(json.dumps(plain)))
        except TypeError as problem:
            raise _refused(optimizer, f"one of its settings cannot be sent: {problem}") from problem
    return tuple(groups)


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value


def build(name: str, groups: Hyperparameters, parameters: Sequence[Sequence[torch.nn.Parameter]]) -> Optimizer:
    """The optimiser again, over some of the parameters of each group.

    Args:
        name: as `name_of` gives it.
        parameters: of each group, those that are here.

    Raises:
        ImportError, AttributeError: this process cannot import it.
    """
    module, _, kind_name = name.partition(":")
    kind: Any = importlib.import_module(module)
    for part in kind_name.split("."):
        kind = getattr(kind, part)
    settings = [_settings(group) for group in groups]
    # Some constructors use their arguments beyond the defaults of groups (Adagrad fills its state with one).
    accepted = inspect.signature(kind).parameters
    arguments = {key: value for key, value in settings[0].items() if key in accepted}
    members = [{**group, "params": list(some)} for group, some in zip(settings, parameters, strict=True)]
    return cast(Optimizer, kind(members, **arguments))


def rehearse(name: str, groups: Hyperparameters) -> None:
    """Take a step with one element: the first step of a process costs a multiple of every later one."""
    parameters = [[torch.nn.Parameter(torch.zeros(1))] for _ in groups]
    for (parameter,) in parameters:
        parameter.grad = torch.zeros(1)
    # One that takes only sparse gradients, say: it is ready as far as it can be.
    with suppress(RuntimeError, ValueError, TypeError):
        build(name, groups, parameters).step()


def update(optimizer: Optimizer, groups: Hyperparameters) -> None:
    """Set each group's settings, as a learning-rate schedule changes them."""
    for group, settings in zip(optimizer.param_groups, groups, strict=True):
        group.update(_settings(settings))


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in group.items()}


def state_keys(optimizer: Optimizer) -> tuple[str, ...]:
    """What the optimiser keeps for a parameter in the parameter's own form, as one step of a tiny one shows."""
    settings = hyperparameters(optimizer)
    kept: set[str] = set()
    with torch.random.fork_rng(devices=[]):
        for index in range(len(settings)):
            parameter = torch.nn.Parameter(torch.ones(2, 3))
            alone: list[list[torch.nn.Parameter]] = [[] for _ in settings]
            alone[index].append(parameter)
            for sparse in (False, True):
                parameter.grad = torch.ones(2, 3).to_sparse(1) if sparse else torch.ones(2, 3)
                try:
                    small = build(name_of(optimizer), settings, alone)
                    small.step()
                except (RuntimeError, ValueError, TypeError):
                    continue  # One that takes only dense gradients, or only sparse ones.
                state = small.state[parameter].items()
                kept |= {key for key, item in state if isinstance(item, torch.Tensor) and item.shape == (2, 3)}
                break
    return tuple(sorted(kept))


_ELEMENTWISE = frozenset(
    f"torch.optim.{place}"
    for place in (
        "sgd:SGD",
        "adam:Adam",
        "adamw:AdamW",
        "adamax:Adamax",
        "nadam:NAdam",
        "radam:RAdam",
        "rmsprop:RMSprop",
        "rprop:Rprop",
        "adagrad:Adagrad",
        "adadelta:Adadelta",
        "sparse_adam:SparseAdam",
    )
)
"""Optimisers that treat each element for itself: for them, a part of a tensor is as good as a tensor. Others, which
look at a whole tensor's norm or rank, keep each tensor on one server."""
_PARTS = 128
"""Into so many parts a model is cut at most, so that servers can share it evenly."""
_PART_BYTES_MIN = 64 * 1024
"""Smaller parts would cost more in messages than they even out."""


def blocks_of(model: Module, optimizer: Optimizer) -> tuple[tuple[BlockSpec, ...], list[torch.Tensor]]:
    """Every tensor of the model, described as blocks, and the tensors, in one order that all workers share.

    A tensor that is large beside the whole model makes several blocks, so that servers can share it evenly. How it is
    cut follows from the model alone: checkpoints of all allocations fit each other.

    Raises:
        InvalidInput: the optimiser holds parameters that the model does not have.
    """
    group_of = {id(p): index for index, group in enumerate(optimizer.param_groups) for p in group["params"]}
    named = [*model.named_parameters(), *model.named_buffers()]
    strangers = group_of.keys() - {id(tensor) for _, tensor in named}
    if strangers:
        raise InvalidInput(
            f"the optimiser holds {len(strangers)} parameters that are not in the model",
            "put all that is trained under one torch.nn.Module",
        )
    total = sum(tensor.numel() * tensor.element_size() for _, tensor in named)
    limit = max(_PART_BYTES_MIN, total // _PARTS) if name_of(optimizer) in _ELEMENTWISE else max(total, 1)
    specs: list[BlockSpec] = []
    for number, (name, tensor) in enumerate(named):
        specs += _cut(name, group_of.get(id(tensor), -1), tensor, number, limit)
    return tuple(specs), [tensor for _, tensor in named]


def _cut(name: str, group: int, tensor: torch.Tensor, number: int, limit: int) -> list[BlockSpec]:
    """One tensor as blocks of whole rows, of nearly equal size and at most `limit` bytes where a row is not larger."""
    size_bytes, dtype, shape = tensor.numel() * tensor.element_size(), dtype_name(tensor), tuple(tensor.shape)
    rows = shape[0] if shape and size_bytes else 1
    count = min(rows, -(-size_bytes // limit)) if group >= 0 else 1
    if count <= 1:
        return [BlockSpec(name, group, dtype, shape, size_bytes, number)]
    row_bytes = size_bytes // rows
    edges = [rows * part // count for part in range(count + 1)]
    return [
        BlockSpec(f"{name}[{a}:{b}]", group, dtype, (b - a, *shape[1:]), (b - a) * row_bytes, number, a)
        for a, b in itertools.pairwise(edges)
    ]
