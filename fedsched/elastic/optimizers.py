"""Takes an optimiser apart into what a server needs to build it again, and refuses what cannot be split."""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Sequence
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
    if kind.__name__ == "SparseAdam":
        raise _refused(optimizer, "it needs sparse gradients, which are not exchanged")
    known = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    if any(key not in known for key in optimizer.state):
        raise _refused(optimizer, "it keeps state that belongs to no single parameter, which cannot be split")
    if kind.__module__ == "__main__" or "<locals>" in kind.__qualname__:
        raise _refused(optimizer, f"servers cannot import it from {kind.__module__}; put it in a module of its own")
    return f"{kind.__module__}:{kind.__qualname__}"


def _refused(optimizer: Optimizer, why: str) -> InvalidInput:
    return InvalidInput(
        f"the optimiser {type(optimizer).__name__} cannot train elastically: {why}",
        "use one that treats every parameter for itself: SGD, Adam, AdamW, RMSprop, Adagrad",
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
    """The optimiser again, over some of the parameters of each group."""
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


def update(optimizer: Optimizer, groups: Hyperparameters) -> None:
    """Set each group's settings, as a learning-rate schedule changes them."""
    for group, settings in zip(optimizer.param_groups, groups, strict=True):
        group.update(_settings(settings))


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in group.items()}


def blocks_of(model: Module, optimizer: Optimizer) -> tuple[tuple[BlockSpec, ...], list[torch.Tensor]]:
    """Every tensor of the model, described and itself, in one order that all workers share.

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
    specs = tuple(
        BlockSpec(name, group_of.get(id(t), -1), dtype_name(t), tuple(t.shape), t.numel() * t.element_size())
        for name, t in named
    )
    return specs, [tensor for _, tensor in named]
