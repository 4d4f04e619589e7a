"""How a learned policy learns from its own decisions, as it is configured: every switch of DL2's ablations is here."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from fedsched.config import Tree


class LearningConfig(Tree):
    """DL2's recipe; its section 6.5 turns off exploration, replay and the value network."""

    exploration: bool = True
    """Whether job-aware rules choose in the network's place now and then, while it learns."""
    replay: Literal["prioritised", "plain", "off"] = "prioritised"
    """How the batch is drawn from what is remembered: by surprise, evenly, or only the newest of it is remembered."""
    memory: int = Field(default=8192, ge=1, le=1_000_000)
    """Decisions that are remembered."""
    baseline: Literal["value", "mean"] = "value"
    """What a reward is compared with: the value network's guess, or the mean of what is remembered."""
    entropy_weight: float = Field(default=0.1, ge=0)
    """Of the bonus for staying undecided, which is a mean over all actions."""

    def capacity(self, batch_size: int) -> int:
        """Decisions to remember where gradients are over `batch_size`."""
        return min(self.memory, batch_size) if self.replay == "off" else self.memory
