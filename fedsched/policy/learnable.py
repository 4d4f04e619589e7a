"""What a policy must offer to be taught: its choices can be looked at, its weights replaced while it decides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from numpy.typing import NDArray

from fedsched.core.decision import Policy


@runtime_checkable
class Learnable(Policy, Protocol):
    """A policy with weights."""

    def load(self, version: int, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Decide with these weights from the next slot on.

        Raises:
            ValueError: they cannot be used; the old ones stay.
        """

    def last_trace(self) -> Sequence[Any]:
        """The choices of the slot decided last, as the policy's own learner needs them; empty where it made none."""
