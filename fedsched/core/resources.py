"""Resource vectors in whole units, so that sums are exact in every order."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from fedsched.core.record import Record

FIELD_BITS = 48
"""Of one resource within an amount; 2**47 is far above what a node or a job may have of any."""
Amount = Annotated[int, Meta(ge=0, lt=1 << (FIELD_BITS - 1))]
"""What a record from outside may say; a difference that is computed here may be below zero."""


class Resources(Record, frozen=True):
    """An amount of each resource: 1000 `cpu_milli` are one core, 1000 `gpu_milli` one GPU."""

    cpu_milli: Amount = 0
    memory_mib: Amount = 0
    gpu_milli: Amount = 0

    def __add__(self, other: Resources) -> Resources:
        return Resources(
            self.cpu_milli + other.cpu_milli,
            self.memory_mib + other.memory_mib,
            self.gpu_milli + other.gpu_milli,
        )

    def __sub__(self, other: Resources) -> Resources:
        return Resources(
            self.cpu_milli - other.cpu_milli,
            self.memory_mib - other.memory_mib,
            self.gpu_milli - other.gpu_milli,
        )

    def __mul__(self, times: int) -> Resources:
        return Resources(self.cpu_milli * times, self.memory_mib * times, self.gpu_milli * times)

    def fits_in(self, room: Resources) -> bool:
        """Whether this amount is available in `room`, resource by resource."""
        return (
            self.cpu_milli <= room.cpu_milli and self.memory_mib <= room.memory_mib and self.gpu_milli <= room.gpu_milli
        )

    def is_negative(self) -> bool:
        """Whether any resource is below zero: something was promised twice."""
        return self.cpu_milli < 0 or self.memory_mib < 0 or self.gpu_milli < 0

    def dominant_share(self, capacity: Resources) -> float:
        """The largest fraction of `capacity` that this takes of any resource (DRF, Ghodsi et al.).

        A resource that the cluster does not have counts only when something is taken of it; then the share is infinite.
        """
        pairs = (
            (self.cpu_milli, capacity.cpu_milli),
            (self.memory_mib, capacity.memory_mib),
            (self.gpu_milli, capacity.gpu_milli),
        )
        return max(
            (taken / total if total else float("inf") for taken, total in pairs if taken),
            default=0.0,
        )

    def __str__(self) -> str:
        parts = [f"{self.cpu_milli / 1000:g} cpu", f"{self.memory_mib} MiB"]
        if self.gpu_milli:
            parts.append(f"{self.gpu_milli / 1000:g} gpu")
        return ", ".join(parts)


NOTHING = Resources()
"""No amount of anything."""


def total(amounts: list[Resources]) -> Resources:
    """The sum of `amounts`; nothing for an empty list."""
    result = Resources()
    for amount in amounts:
        result = result + amount
    return result


OVERDRAWN = sum(1 << (FIELD_BITS * field - 1) for field in (1, 2, 3))
"""The top bit of every field: an amount that has one of them is negative in some resource."""
_FIELD, _HALF = 1 << FIELD_BITS, 1 << (FIELD_BITS - 1)


def amount_of(resources: Resources) -> int:
    """The resources as one integer, for where they are added and compared a million times a second.

    Amounts add and subtract like the resources themselves, below zero too. Of two that are nowhere negative the smaller
    one has less of the scarcest kind: GPUs, then cores, then memory.
    """
    return (resources.gpu_milli << 2 * FIELD_BITS) + (resources.cpu_milli << FIELD_BITS) + resources.memory_mib


def resources_of(amount: int) -> Resources:
    """The resources that an amount stands for."""
    memory = (amount + _HALF) % _FIELD - _HALF
    amount = (amount - memory) >> FIELD_BITS
    cpu = (amount + _HALF) % _FIELD - _HALF
    return Resources(cpu, memory, (amount - cpu) >> FIELD_BITS)
