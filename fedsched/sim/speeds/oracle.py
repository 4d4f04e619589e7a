"""Tells the policies that are declared to know them the true speeds, or what passes for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fedsched.core.decision import JobView
from fedsched.core.ids import JobId
from fedsched.core.job import Allocation
from fedsched.policy.reference import Oracle
from fedsched.sim.ports import Setting, SimulatedJob, TrueSpeeds


def oracle(model: TrueSpeeds, jobs: Mapping[JobId, SimulatedJob] | Callable[[JobId], SimulatedJob]) -> Oracle:
    """Speeds by `model` of jobs that have one node for themselves, as `Dl2Optimus` asks for them.

    Args:
        model: the world's own model or, for wrong estimates, `NoisySpeeds` around it.
        jobs: the job of an id.
    """
    job_of = jobs if callable(jobs) else jobs.__getitem__
    settings: dict[tuple[int, int, str], Setting] = {}

    def ask(view: JobView, workers: int, ps: int, elapsed_s: float) -> float:
        accelerator = view.accelerators[0] if view.accelerators else ""
        key = (workers, ps, accelerator)
        setting = settings.get(key)
        if setting is None:
            setting = settings[key] = Setting(Allocation(workers, ps), accelerator)
        return model.epochs(job_of(view.job_id), setting, elapsed_s)

    return ask
