"""Policies with weights: what they must offer to be taught, and what is the same in all of ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Generic, Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from fedsched.core.decision import Policy
from fedsched.core.ids import stream

Array = NDArray[np.float32]
Arrays = Mapping[str, Array]
"""Weights by name; those that decide begin with `policy.`, those of the baseline with `value.`."""


class Shape(Protocol):
    """Sizes that weights must agree on."""

    FORMAT: ClassVar[str]
    """Of checkpoint files."""

    def layers(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every weight array, sorted by name."""

    def card(self) -> dict[str, Any]:
        """What a checkpoint file says of the shape."""


S = TypeVar("S", bound=Shape)
T = TypeVar("T")
"""One choice, as a policy's learner needs it."""


@runtime_checkable
class Learnable(Policy, Protocol):
    """A policy whose choices can be looked at, and whose weights can be replaced while it decides."""

    @property
    def shape(self) -> Any:
        """Sizes that its weights agree on, as its own learner needs them."""

    @property
    def weights(self) -> Mapping[str, NDArray[Any]]:
        """What the next slot is decided with."""

    def load(self, version: int, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Decide with these weights from the next slot on.

        Raises:
            ValueError: they cannot be used; the old ones stay.
        """

    def last_trace(self) -> Sequence[Any]:
        """The choices of the slot decided last, as the policy's own learner needs them; empty where it made none."""


class Weighted(Generic[S, T]):
    """Keeps a policy's weights and what it chose last. `load` may be called while another thread decides.

    Args:
        arrays: weights of `shape`.
        version: theirs.

    Raises:
        ValueError: the weights are not of this shape or not finite.
    """

    def __init__(self, arrays: Arrays, version: int, shape: S) -> None:
        self.shape = shape
        self._trace: tuple[T, ...] = ()
        self._weights: tuple[int, dict[str, Array]]
        self.load(version, arrays)

    @property
    def version(self) -> int:
        """Version of the weights that the next slot is decided with."""
        return self._weights[0]

    @property
    def weights(self) -> Arrays:
        """What the next slot is decided with."""
        return self._weights[1]

    def load(self, version: int, arrays: Arrays) -> None:
        """Decide with these weights from the next slot on.

        Raises:
            ValueError: they are not of this policy's shape or not finite; the old ones stay.
        """
        problem = misfit(arrays, self.shape.layers())
        if problem:
            raise ValueError(f"weights of version {version} cannot be used: {problem}")
        # One assignment, so that another thread sees the old pair or the new one.
        self._weights = (version, {name: np.array(arrays[name]) for name in sorted(arrays)})

    def last_trace(self) -> tuple[T, ...]:
        """The choices of the slot decided last; empty when there was nothing to choose."""
        return self._trace


def fresh(
    layers: Mapping[str, tuple[int, ...]], bound: Callable[[str], float | None], stream_name: str, seed: int
) -> dict[str, Array]:
    """Weights that know nothing, the same in every process.

    Args:
        layers: name and shape of every array.
        bound: by name, what an array's values are drawn evenly within on either side of 0; None: all are 0.
        stream_name: each array is drawn from a stream of its own below it.
        seed: of the streams.
    """
    result = {}
    for name, size in layers.items():
        array, within = np.zeros(size, dtype=np.float32), bound(name)
        if within is not None:
            draw = stream(seed, f"{stream_name}/{name}").random
            array[:] = np.array([(2 * draw() - 1) * within for _ in range(array.size)]).reshape(size)
        result[name] = array
    return result


def misfit(arrays: Arrays, layers: Mapping[str, tuple[int, ...]]) -> str:
    """What keeps these from being weights of these layers: one sentence, empty if nothing does."""
    if sorted(arrays) != sorted(layers):
        missing = ", ".join(sorted(set(layers) - set(arrays))) or "none"
        extra = ", ".join(sorted(set(arrays) - set(layers))) or "none"
        return f"the arrays are not those of the policy: missing {missing}; unknown {extra}"
    for name, size in layers.items():
        if tuple(arrays[name].shape) != size:
            return f"array {name} has shape {tuple(arrays[name].shape)}; expected {size}"
        if arrays[name].dtype != np.float32:
            return f"array {name} is {arrays[name].dtype}; expected float32"
        if not np.isfinite(arrays[name]).all():
            return f"array {name} holds values that are not finite"
    return ""
