"""The server's step: Adam over the combined gradient, with a state that survives a restart bit by bit."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch.optim.adam import adam

from fedsched.errors import CorruptCheckpoint
from fedsched.federation.source import Arrays

_MOMENTS = ("exp_avg", "exp_avg_sq", "step")
"""What Adam remembers of each array, by torch's names."""


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
        stepped: dict[str, np.ndarray] = {}
        moments: dict[str, Mapping[str, torch.Tensor]] = {}
        for name in sorted(arrays):
            weights = torch.from_numpy(np.array(arrays[name]))
            kept = self._moments.get(name) or {
                "exp_avg": torch.zeros_like(weights),
                "exp_avg_sq": torch.zeros_like(weights),
                "step": torch.tensor(0.0),
            }
            moments[name] = {moment: kept[moment].clone() for moment in _MOMENTS}
            self._descend(weights, torch.from_numpy(np.array(gradients[name])), moments[name])
            stepped[name] = weights.numpy()
        return stepped, ServerOptimiser(self._learning_rate, moments)

    def _descend(self, weights: torch.Tensor, gradient: torch.Tensor, moments: Mapping[str, torch.Tensor]) -> None:
        """One step of torch's Adam with its defaults; weights and moments change in place.

        The function under `torch.optim.Adam`, because the class loads torch's compiler with its first instance: three
        seconds and 100 MB for one step over a small network.
        """
        adam(
            [weights],
            [gradient],
            [moments["exp_avg"]],
            [moments["exp_avg_sq"]],
            [],
            [moments["step"]],
            foreach=False,
            amsgrad=False,
            beta1=0.9,
            beta2=0.999,
            lr=self._learning_rate,
            weight_decay=0.0,
            eps=1e-8,
            maximize=False,
        )

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
