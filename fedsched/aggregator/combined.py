"""What an aggregator can combine, by the policy that clusters run: gradients of weights or statistics of speeds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fedsched.config import COMBINED, AggregatorConfig
from fedsched.errors import InvalidConfiguration
from fedsched.federation.loop import Combining, Weights, gradients
from fedsched.policy import registry
from fedsched.policy.registry import LEARNED_SPEED


@dataclass(frozen=True, slots=True)
class CombinedPolicy:
    """One policy, as the aggregator handles it."""

    first: Path
    """What the first version is made of."""
    read: Callable[[Path], Weights]
    combining: Combining


def combined(config: AggregatorConfig) -> CombinedPolicy:
    """What is combined, and how.

    Raises:
        InvalidConfiguration: the policy has nothing that could be.
    """
    name, source = config.policy.name, config.policy.checkpoint
    if name not in COMBINED:
        known = f"{', '.join(COMBINED[:-1])} or {COMBINED[-1]}"
        raise InvalidConfiguration(
            f"policy.name is {name}, which has nothing to combine; {known} was expected",
            f"set policy.name to {known}, or run the federation without an aggregator",
        )
    if name == LEARNED_SPEED:
        from fedsched.learn.sharing import Sums
        from fedsched.policy import speed_checkpoint, speed_pool

        first = speed_checkpoint.BUILTIN if source == "builtin" else Path(source)
        return CombinedPolicy(first, speed_pool.load, Sums(registry.make_learned_speed(config.policy).period_s))
    combining = gradients(config.rounds)
    # Whatever the file, it must hold this policy's weights: agents of another could decide with none of its versions.
    return CombinedPolicy(
        registry.weights_file(name, source), lambda path: registry.weights(name, str(path)), combining
    )
