"""Tiresias's `dlas` loop written anew for comparisons: whole seconds, lists, and nothing of this product.

Source: `dlas_sim_jobs` of the simulator that its authors published (NSDI 2019), with GPUs counted. Jobs that end come
before jobs that arrive; whoever ends last at one time is looked for again at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

Index = Callable[[int], float]
"""Rank by GPU-seconds received, greatest first."""


@dataclass(slots=True)
class LoopJob:
    """A line of the trace and what became of it."""

    name: str
    gpus: int
    submit_s: int
    duration_s: int
    ran_s: int = 0
    running: bool = False
    level: int = 0
    end_s: int | None = None

    @property
    def service(self) -> int:
        return self.ran_s * self.gpus


def run(jobs: Sequence[LoopJob], gpus: int, limits: Sequence[int], index: Index | None = None) -> dict[str, float]:
    """Completion time of each job."""
    queues: list[list[LoopJob]] = [[] for _ in (*limits, 0)]
    arriving = sorted(jobs, key=lambda job: job.submit_s)
    now_s, look_s = 0, None
    while arriving or any(queues):
        ending = [now_s + job.duration_s - job.ran_s for queue in queues for job in queue if job.running]
        times_s = [*ending, *(job.submit_s for job in arriving[:1]), *([] if look_s is None else [look_s])]
        before_s, now_s = now_s, min(times_s)
        _pass_time(queues, now_s - before_s)
        for queue in queues:
            for job in [job for job in queue if job.ran_s == job.duration_s]:
                queue.remove(job)
                job.end_s = now_s
        while arriving and arriving[0].submit_s == now_s:
            queues[0].append(arriving.pop(0))
        _demote(queues, limits, jobs)
        _schedule(queues, gpus, index)
        jumps_s = [
            now_s + max(1, (limits[job.level] - job.ran_s) // job.gpus)
            for queue in queues[:-1]
            for job in queue
            if job.running
        ]
        look_s = min(jumps_s, default=None)
    return {job.name: float(job.end_s - job.submit_s) for job in jobs if job.end_s is not None}


def _pass_time(queues: list[list[LoopJob]], elapsed_s: int) -> None:
    for queue in queues:
        for job in queue:
            job.ran_s += elapsed_s * job.running


def _demote(queues: list[list[LoopJob]], limits: Sequence[int], jobs: Sequence[LoopJob]) -> None:
    """One queue down at most; in the order in which jobs came, which is that of the trace."""
    for job in jobs:
        if job.running and job.end_s is None and job.level < len(limits) and job.service >= limits[job.level]:
            queues[job.level].remove(job)
            job.level += 1
            queues[job.level].append(job)


def _schedule(queues: list[list[LoopJob]], gpus: int, index: Index | None) -> None:
    free = gpus
    for level, queue in enumerate(queues):
        if index is not None:
            queue.sort(key=lambda job: (-index(job.service), job.submit_s))
        for job in queue:
            job.running = job.gpus <= free
            free -= job.gpus * job.running
        queues[level] = [job for job in queue if job.running] + [job for job in queue if not job.running]
