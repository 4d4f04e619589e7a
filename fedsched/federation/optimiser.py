"""The server's step: Adam over the combined gradient, with a state that survives a restart bit by bit.

Beside Adam's moments the state holds what is known of those that give gradients (`fedsched.federation.repute`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np
import torch
from msgspec.structs import astuple
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch.optim.adam import adam

from fedsched.core.ids import ClusterName
from fedsched.errors import CorruptCheckpoint
from fedsched.federation.repute import Repute, Reputes
from fedsched.federation.source import Arrays

_MOMENTS = ("exp_avg", "exp_avg_sq", "step")
"""What Adam remembers of each array, by torch's names."""
_REPUTE = "repute"
_GRADIENTS = "gradients"


class ServerOptimiser:
    """Adam over named arrays: an immutable value. The weights are given to each step, only the moments live here.

    Args:
        learning_rate: Adam's step size.
        moments: what an earlier step left, by the array's name.
        reputes: what is known of those that give gradients.
        given: gradients that all steps so far were made of.
    """

    def __init__(
        self,
        learning_rate: float,
        moments: Mapping[str, Mapping[str, torch.Tensor]] | None = None,
        reputes: Reputes | None = None,
        given: int = 0,
    ) -> None:
        self._learning_rate = learning_rate
        self._moments = dict(moments or {})
        self.reputes: Reputes = dict(reputes or {})
        self.given = given

    def step(
        self,
        arrays: Arrays,
        gradients: Arrays,
        *,
        factor: float = 1.0,
        given: int = 1,
        reputes: Reputes | None = None,
    ) -> tuple[dict[str, np.ndarray], ServerOptimiser]:
        """The weights after one step down the gradient, and the optimiser after it.

        Args:
            factor: the step is so many times as long as the learning rate says.
            given: gradients that this one is made of.
            reputes: what is known now of those that give gradients; None: what was known before.
        """
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
            self._descend(weights, torch.from_numpy(np.array(gradients[name])), moments[name], factor)
            stepped[name] = weights.numpy()
        return stepped, ServerOptimiser(
            self._learning_rate, moments, self.reputes if reputes is None else reputes, self.given + given
        )

    def _descend(
        self, weights: torch.Tensor, gradient: torch.Tensor, moments: Mapping[str, torch.Tensor], factor: float
    ) -> None:
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
            lr=self._learning_rate * factor,
            weight_decay=0.0,
            eps=1e-8,
            maximize=False,
        )

    def to_bytes(self) -> bytes:
        """The state as a safetensors file; the same state always gives the same bytes."""
        flat = {f"{moment}/{name}": kept[moment] for name, kept in self._moments.items() for moment in _MOMENTS}
        flat |= {
            f"{_REPUTE}/{cluster}": torch.tensor(astuple(one), dtype=torch.float64)
            for cluster, one in self.reputes.items()
        }
        if self.given:
            flat[_GRADIENTS] = torch.tensor(self.given)
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
        reputes: dict[ClusterName, Repute] = {}
        given = int(flat.pop(_GRADIENTS, torch.tensor(0)).item())
        for key in sorted(flat):
            kind, _, name = key.partition("/")
            if kind == _REPUTE:
                reputes[ClusterName(name)] = _repute(*flat[key].tolist())
            else:
                moments.setdefault(name, {})[kind] = flat[key]
        return cls(learning_rate, moments, reputes, given)


def _repute(rounds: float, total: float, squares: float, out: float) -> Repute:
    return Repute(rounds, total, squares, bool(out))


def digest_of(data: bytes) -> str:
    """SHA-256 of the bytes, in hexadecimal."""
    return hashlib.sha256(data).hexdigest()
