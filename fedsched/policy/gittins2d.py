"""Tiresias's two-dimensional Gittins discipline (Gu et al., NSDI 2019, section 3.3): likely to end soon goes first.

Jobs fall through the queues of `las2d` by their GPU-seconds. Within a queue the one with the greatest Gittins index
(`policy/gittins.py`) goes first, ties by arrival: the chance to end within the next `delta` GPU-seconds per GPU-second
that they would cost, as jobs that have ended let one expect. These are the newest `memory` jobs that ended on this
cluster since the policy was made, and those that `sample` names; as long as there are none, all have index zero.
Without `limits` there is one queue, in which the index alone decides.

The authors' simulator computes its index from a file of 1000 durations with a denominator that counts service twice;
this is the paper's index. Everything else is as there.
"""

from __future__ import annotations

from collections import deque
from typing import ClassVar

import msgspec
import numpy as np
from pydantic import Field

from fedsched.core.decision import JobView, Observation
from fedsched.core.ids import JobId
from fedsched.core.record import Record
from fedsched.policy.disciplines import Key, devices
from fedsched.policy.gittins import Gittins
from fedsched.policy.las2d import Las2d, Las2dOptions, QueueMemory
from fedsched.policy.remembering import recall


class Gittins2dOptions(Las2dOptions):
    """Options of gittins."""

    sample: tuple[float, ...] = ()
    """GPU-seconds that such jobs are known to take."""
    delta: float = Field(default=3250.0, gt=0)
    """The quantum in GPU-seconds; the default is that of Tiresias's simulator."""
    memory: int = Field(default=1000, ge=0)
    """How many of the jobs that ended here count; 0: the sample only."""


class _Memory(Record, frozen=True):
    queues: QueueMemory
    seen: tuple[tuple[JobId, float], ...]
    devices: tuple[tuple[JobId, float], ...]


class Gittins2d(Las2d):
    """Queues by attained service; within a queue, by the Gittins index."""

    name = "gittins"
    Options: ClassVar[type[Gittins2dOptions]] = Gittins2dOptions

    def __init__(self, options: Gittins2dOptions | None = None) -> None:
        chosen = options or Gittins2dOptions()
        super().__init__(chosen)
        self._sample = chosen.sample
        self._delta = chosen.delta
        self._seen: deque[tuple[JobId, float]] = deque(maxlen=chosen.memory)
        """GPU-seconds of jobs that have ended here, oldest first."""
        self._devices: dict[JobId, float] = {}
        """GPUs per task of the jobs that are here."""
        self._index = Gittins(self._sample, self._delta)

    def state(self) -> bytes:
        """All that its next ranks depend on, besides its options."""
        return msgspec.msgpack.encode(_Memory(self._memory(), tuple(self._seen), tuple(self._devices.items())))

    def restore(self, state: bytes) -> None:
        """Go on from what `state` gave; of more jobs than it is to remember, with the newest.

        Raises:
            ValueError: it is no state of this policy with as many queues; nothing has changed.
        """
        memory = recall(state, _Memory)
        self._recall(memory.queues)
        self._seen.clear()
        self._seen.extend(memory.seen)
        self._devices = dict(memory.devices)
        self._index = self._indexed()

    def _indexed(self) -> Gittins:
        return Gittins([*self._sample, *(service for _, service in self._seen)], self._delta)

    def _keys(self, observation: Observation) -> list[Key]:
        self._learn(observation)
        return super()._keys(observation)

    def _learn(self, observation: Observation) -> None:
        known = {job_id for job_id, _ in self._seen}
        new = [
            (job_id, taken_s * self._devices.pop(job_id))
            for job_id, taken_s in observation.finished
            if job_id in self._devices and job_id not in known
        ]
        if new:
            self._seen.extend(new)
            self._index = self._indexed()
        here = {view.job_id for view in observation.jobs}
        for gone in self._devices.keys() - here:  # ended otherwise than by success, or moved to another cluster
            del self._devices[gone]
        for view in observation.jobs:
            if view.job_id not in self._devices:
                self._devices[view.job_id] = devices(view) / (view.minimum.workers + view.minimum.ps)

    def _arrange(self, views: dict[JobId, JobView]) -> None:
        jobs = list(views.values())
        indices = self._index(np.array([self._service(view) for view in jobs]))
        rank = {view.job_id: (-at, view.arrived_s) for view, at in zip(jobs, indices.tolist(), strict=True)}
        gone = (0.0, float("inf"))
        self._queues = [dict(sorted(queue.items(), key=lambda job: rank.get(job[0], gone))) for queue in self._queues]
