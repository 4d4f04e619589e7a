"""Wrong declarations: users who do not know how long their jobs take."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from fedsched.core.ids import stream
from fedsched.sim.ports import SimulatedJob, Workload


class Misdeclared:
    """A workload whose jobs take as long as before, but declare lengths that are off by up to `error`.

    Args:
        workload: the jobs; what they declare now counts as right.
        error: largest deviation as a fraction, at least 0 and below 1.
    """

    def __init__(self, workload: Workload, error: float) -> None:
        self._workload = workload
        self._error = error

    def draw(self, seed: int) -> Iterator[SimulatedJob]:
        """The jobs, one by one."""
        draw = stream(seed, "declared").random
        for job in self._workload.draw(seed):
            epochs = job.spec.epochs * (1 + self._error * (2 * draw() - 1))
            yield SimulatedJob(replace(job.spec, epochs=epochs), job.epochs, job.origin, job.data_gib)
