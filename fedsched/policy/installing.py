"""Has a policy decide with other weights, after all that could be wrong with them was looked at."""

from __future__ import annotations

from fedsched.core.decision import Policy
from fedsched.core.versions import Version
from fedsched.errors import CorruptCheckpoint
from fedsched.policy import checkpoint, speed_checkpoint
from fedsched.policy.learnable import Learnable

FROM_FILE = 1
"""What weights that are no version of the federation count as, as those do that an agent begins with."""


def install(policy: Policy, version: Version, data: bytes) -> str:
    """Decide with these weights from the next slot on; returns their digest.

    Args:
        policy: decides now.
        data: the checkpoint's file.

    Raises:
        ValueError: they are damaged, have another digest than was announced, or do not fit the policy; the old ones
            stay. The message says which.
    """
    if not isinstance(policy, Learnable):
        return _install_speeds(policy, version, data)
    try:
        found = checkpoint.from_bytes(data, str(version))
    except CorruptCheckpoint as problem:
        raise ValueError(problem.message) from problem
    _check_digest(version, found.digest)
    if found.shape.FORMAT != policy.shape.FORMAT:
        raise ValueError(f"{version} holds weights of format {found.shape.FORMAT}; {policy.shape.FORMAT} was expected")
    policy.load(version.version or FROM_FILE, found.arrays)
    return found.digest


def _install_speeds(policy: Policy, version: Version, data: bytes) -> str:
    from fedsched.policy.learned_speed import LearnedSpeed  # its solver takes seconds to load

    if not isinstance(policy, LearnedSpeed):
        raise ValueError(f"policy {policy.name} has no weights that could be replaced")
    try:
        found = speed_checkpoint.from_bytes(data, str(version))
    except CorruptCheckpoint as problem:
        raise ValueError(problem.message) from problem
    _check_digest(version, found.digest)
    policy.load(found.statistics)
    return found.digest


def _check_digest(version: Version, digest: str) -> None:
    if version.digest and digest != version.digest:
        raise ValueError(f"the digest of {version} is {digest[:12]}; {version.digest[:12]} was announced")
