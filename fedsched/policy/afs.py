"""AFS-L (Hwang et al., NSDI 2021, "Elastic resource sharing for distributed deep learning"), one unit at a time.

The rule, for jobs of known length (section 4 of the paper): while there is room, fold over the jobs and keep the one
that should have the next unit. Two jobs without anything: the shorter one. Otherwise let a be the one that would end
sooner with what it has, b the other; with `p` the speed now and `p'` with one unit more,

    b wins if and only if (p_b' - p_b) / p_b' > (p_a' - p_a) / p_a.

It follows from the mean completion time of two jobs where the shorter one's units go to the longer when it is done.
Public copies that divide both sides by the new speed follow another rule. The relation is not transitive, so the order
of the fold counts: here it is that of arrival.

Departures, because this runs live:

* a unit is a step of the job: its minimum at first, then a worker with a parameter server beside it while it may have
  more of those;
* speeds come from the curves of `fedsched.policy.optimus`, fitted to what was observed, and lengths are as declared;
* a unit that makes a job no faster is not given;
* jobs of higher priority are served to the end before others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import ClassVar

from fedsched.core.decision import Budget, Decision, JobView, Observation
from fedsched.core.job import Allocation
from fedsched.policy.heuristics import by_arrival, next_step
from fedsched.policy.optimus import SpeedCurve, fit_types


@dataclass(frozen=True, slots=True)
class Contender:
    """A job, and what the next unit would do for it."""

    view: JobView
    step: Allocation
    speed: float
    """Epochs per second with what it has; zero with nothing."""
    next_speed: float
    """The same with one unit more."""

    @property
    def ends_in_s(self) -> float:
        """Seconds to its end with what it has; infinite with nothing."""
        return self.view.remaining_epochs / self.speed if self.speed else float("inf")

    @property
    def length_s(self) -> float:
        """Seconds to its end with its first unit: the length of a job that has nothing yet."""
        return self.view.remaining_epochs / self.next_speed


def preferred(one: Contender, other: Contender) -> Contender:
    """Which of the two should have the next unit; the first one where nothing speaks for either."""
    if not one.speed and not other.speed:
        return other if other.length_s < one.length_s else one
    sooner, later = (other, one) if other.ends_in_s < one.ends_in_s else (one, other)
    gain = (later.next_speed - later.speed) / later.next_speed
    return later if gain > (sooner.next_speed - sooner.speed) / sooner.speed else sooner


def chosen(candidates: Sequence[Contender]) -> int:
    """The position of the one that should have the next unit: what a fold over them in this order keeps."""
    best = 0
    for position in range(1, len(candidates)):
        if preferred(candidates[best], candidates[position]) is candidates[position]:
            best = position
    return best


class Afs:
    """The next unit to the job where it lowers the mean completion time most."""

    name: ClassVar[str] = "afs"
    version: ClassVar[int] = 0

    def decide(self, observation: Observation, budget: Budget) -> Decision:
        """Hand out units until nobody can take one more."""
        curves = fit_types(observation.jobs)
        views = sorted((view for view in by_arrival(observation.jobs) if not view.pinned), key=lambda v: -v.priority)
        for _, group in groupby(views, key=lambda view: view.priority):
            self._hand_out(list(group), curves, budget)
        return Decision(observation.slot, budget.allocations(), self.name)

    def _hand_out(self, views: Sequence[JobView], curves: dict[str, SpeedCurve], budget: Budget) -> None:
        found = (candidate(view, budget.allocation(view.job_id), curves[view.job_type]) for view in views)
        candidates = [entry for entry in found if entry]
        while candidates:
            best = chosen(candidates)
            view, step = candidates[best].view, candidates[best].step
            granted = budget.grant(view.job_id, step.workers, step.ps)
            after = candidate(view, budget.allocation(view.job_id), curves[view.job_type]) if granted else None
            # One that finds no room finds none later in this slot either.
            candidates[best : best + 1] = [after] if after else []


def candidate(view: JobView, have: Allocation, curve: SpeedCurve) -> Contender | None:
    """The job with its next unit; None where there is none, or none that makes it faster."""
    step = next_step(view, have)
    enough = have.workers >= view.minimum.workers and have.ps >= view.minimum.ps
    speed = curve(have) if enough else 0.0
    if not step or curve(have + step) <= speed:
        return None
    return Contender(view, step, speed, curve(have + step))
