"""What a simulated world is given: jobs with their truth beside their declaration, and how fast they train."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from fedsched.core.job import Allocation, JobSpec
from fedsched.core.record import Record


class SimulatedJob(Record, frozen=True):
    """A job and what nobody knows beforehand. `spec.submitted_s` is its arrival in virtual seconds."""

    spec: JobSpec
    epochs: float
    """How many it really takes; `spec.epochs` is what was declared, so schedulers never see this."""
    origin: str = ""
    """Cluster where it was submitted and where its data lies; empty where that does not matter."""
    data_gib: float = 0.0
    """What must be moved before it can start in another cluster than `origin`."""


class Setting(Record, frozen=True):
    """All that a job's speed depends on while its tasks stay as they are."""

    allocation: Allocation
    accelerator: str = ""
    """Type of the GPUs under its tasks, the slowest if they differ; empty without GPUs."""
    nodes: int = 1
    """Nodes that its tasks are spread over."""
    neighbours: int = 0
    """Tasks of other jobs on those nodes."""


class TrueSpeeds(Protocol):
    """The truth about speeds. Policies never see it, but for those that are declared to (oracles)."""

    def epochs(self, job: SimulatedJob, setting: Setting, elapsed_s: float) -> float:
        """Epochs that the job trains in `elapsed_s` seconds of an unchanged setting; 0 where it cannot train."""


class Workload(Protocol):
    """Where jobs come from."""

    def draw(self, seed: int) -> Iterable[SimulatedJob]:
        """The jobs of one run in order of arrival, the same for the same seed; may be lazy, for millions of them."""
