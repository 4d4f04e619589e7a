"""Resource vectors in whole units, so that sums are exact in every order."""

from __future__ import annotations

from fedsched.core.record import Record


class Resources(Record, frozen=True):
    """An amount of each resource: 1000 `cpu_milli` are one core, 1000 `gpu_milli` one GPU."""

    cpu_milli: int = 0
    memory_mib: int = 0
    gpu_milli: int = 0

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


def total(amounts: list[Resources]) -> Resources:
    """The sum of `amounts`; nothing for an empty list."""
    result = Resources()
    for amount in amounts:
        result = result + amount
    return result
