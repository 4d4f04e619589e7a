"""The server's step: Adam over the combined gradient, with a state that survives a restart bit by bit."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from fedsched.errors import CorruptCheckpoint
from fedsched.federation.source import Arrays

_MOMENTS = ("exp_avg", "exp_avg_sq", "step")
"""What torch's Adam remembers of each parameter."""


class ServerOptimiser:
    """Adam over named arrays: an immutable value. The weights are given to each step, only the moments live here.

    Args:
        learning_rate: Adam's step size.
        moments: what an earlier step left, by the array's name.
    """

    def __init__(self, learning_rate: float, moments: Mapping[str, Mapping[str, torch.Tensor]] | None = None) -> None:
        self._learning_rate = learning_rate
        self._moments = dict(moments or {})

    def step(self, arrays: Arrays, gradients: Arrays) -> tuple[dict[str, np.ndarray], ServerOptimiser]:
        """The weights after one step down the gradient, and the optimiser after it."""
        names = sorted(arrays)
        parameters = [torch.nn.Parameter(torch.from_numpy(np.array(arrays[name]))) for name in names]
        # One tensor at a time (foreach=False): the result does not depend on how tensors would be grouped.
        adam = torch.optim.Adam(parameters, lr=self._learning_rate, foreach=False)
        for name, parameter in zip(names, parameters, strict=True):
            parameter.grad = torch.from_numpy(np.array(gradients[name]))
            if name in self._moments:
                adam.state[parameter] = {moment: kept.clone() for moment, kept in self._moments[name].items()}
        adam.step()
        moments = {
            name: {moment: adam.state[parameter][moment] for moment in _MOMENTS}
            for name, parameter in zip(names, parameters, strict=True)
        }
        stepped = {name: parameter.detach().numpy() for name, parameter in zip(names, parameters, strict=True)}
        return stepped, ServerOptimiser(self._learning_rate, moments)

    def to_bytes(self) -> bytes:
        """The state as a safetensors file; the same state always gives the same bytes."""
        flat = {f"{moment}/{name}": kept[moment] for name, kept in self._moments.items() for moment in _MOMENTS}
        return save(dict(sorted(flat.items())))

    @classmethod
    def from_bytes(cls, learning_rate: float, data: bytes, digest: str) -> ServerOptimiser:
        """Read back what `to_bytes` wrote.

        Raises:
            CorruptCheckpoint: the bytes do not have that digest, or are no optimiser state.
        """
        found = digest_of(data)
        if found != digest:
            raise CorruptCheckpoint(
                f"the optimiser's state has digest {found[:12]}; {digest[:12]} was expected",
                "restore the file from a backup",
            )
        try:
            flat = load(data)
        except SafetensorError as problem:
            raise CorruptCheckpoint(f"the optimiser's state cannot be read: {problem}") from problem
        moments: dict[str, dict[str, torch.Tensor]] = {}
        for key in sorted(flat):
            moment, _, name = key.partition("/")
            moments.setdefault(name, {})[moment] = flat[key]
        return cls(learning_rate, moments)


def digest_of(data: bytes) -> str:
    """SHA-256 of the bytes, in hexadecimal."""
    return hashlib.sha256(data).hexdigest()
