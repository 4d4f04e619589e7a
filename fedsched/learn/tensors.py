"""Named numpy weights to torch parameters and back, and torch on one thread."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedsched.policy.learnable import Array, Arrays


def parameters(arrays: Arrays, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Trainable copies, sorted by name."""
    return {name: torch.tensor(arrays[name], dtype=dtype, requires_grad=True) for name in sorted(arrays)}


def to_arrays(tensors: Mapping[str, torch.Tensor]) -> dict[str, Array]:
    """Copies that torch does not touch any more."""
    return {name: tensor.detach().numpy().astype(np.float32) for name, tensor in tensors.items()}


def adam_state(optimiser: torch.optim.Adam) -> dict[str, NDArray[Any]]:
    """The moments, by names that begin with `adam/`."""
    return {
        f"adam/{index}/{name}": tensor.numpy().copy()
        for index, moments in optimiser.state_dict()["state"].items()
        for name, tensor in moments.items()
    }


_MOMENTS = {"step", "exp_avg", "exp_avg_sq"}
"""What Adam keeps of each weight."""


def restore_adam(optimiser: torch.optim.Adam, state: Mapping[str, NDArray[Any]]) -> None:
    """Go on from the moments that `adam_state` gave.

    Raises:
        ValueError: some are missing.
    """
    moments: dict[int, dict[str, torch.Tensor]] = {}
    for key, array in state.items():
        if key.startswith("adam/"):
            _, index, name = key.split("/")
            moments.setdefault(int(index), {})[name] = torch.tensor(array)
    if any(set(one) != _MOMENTS for one in moments.values()):
        raise ValueError("not all of the optimiser's moments are there")
    optimiser.load_state_dict({**optimiser.state_dict(), "state": moments})


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one thread: the sums have one order, and these networks are too small to share out anyway."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
