"""The policy that learns how fast jobs train and gives each slot to where that is worth most, read top to bottom.

It sees what the agent sees: declared epochs, progress, allocations, observed speeds, capacity. It has no window and no
weights to be trained by gradient; what it learns are sums (`fedsched.core.speeds`), which clusters can share.

1. *Listen*: what jobs showed since the last slot goes into the sums, each job once a cell.
2. *Believe*: a Gaussian process a class (`fedsched.policy.speed_model`) says how fast any allocation is and how sure
   that is. Allocations count as `explore` standard deviations faster than believed, so doubtful ones get tried.
3. *Weigh*: jobs with little left count more (remaining time to the power of -0.3; short jobs first, but not only), as
   do those that wait for long, and, with `fairness`, those that were slowed down most.
4. *Spend*: jumps of any size by marginal value (`fedsched.policy.marginal`). What a job has is worth some more than it
   yields, because a change costs a pause.

Details that matter:

* A job is believed what it showed itself: with an allocation it has tried its own rate stands for its class's.
* The first slot after a change says how fast the new allocation is only if slots are long against the change itself.
* A job that ends within a slot is heard of by the task-seconds it took, else short jobs would never be learned from.
* Ageing: once a job has held nothing for `patience_slots` its weight doubles every few slots, without bound, so some
  day it comes first. If running jobs keep their tasks it may still find no room, so after twice that long nobody else
  starts before it.

What was tried (mean JCT in slots of 20 minutes, DL2's 200 jobs on 80 servers, speeds as measured, arrivals of DL2's
list, three seeds that it was not trained on; the greedy that knows the true speeds: 27.6):

| variant | JCT |
|---|---|
| cold, exploring with 0.5 deviations while it is measured | 31.9 (on other arrivals, greedy there 29.0) |
| three runs of training, smooth kernel only (roughness 0.02): single measured peaks are missed | 28.8 |
| the same with roughness 0.08, so that each allocation may be peculiar: what it does now | 27.6 |
| a grant for each step, or all steps counted out first and one grant a job | 27.6 both; a quarter of the time |

Other loads and conditions, with training seeds and intervals: `fedsched train speeds EXPERIMENT FILE --held-out 5`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import exp, log
from typing import ClassVar

import msgspec
import numpy as np
from msgspec.structs import replace
from pydantic import Field

from fedsched.config import Tree
from fedsched.core.cluster import Node
from fedsched.core.decision import Budget, Decision, JobView, Observation
from fedsched.core.ids import JobId, NodeName, stream
from fedsched.core.job import NO_TASKS, Allocation, Range, allocation_of
from fedsched.core.packing import pack
from fedsched.core.record import Record
from fedsched.core.resources import Resources, total
from fedsched.core.speeds import NONE, SpeedCell, SpeedStatistics, SpeedSums, observed, problem_with
from fedsched.policy.heuristics import by_arrival
from fedsched.policy.marginal import (
    LEFT_MIN,
    Cell,
    Claim,
    Curve,
    Staircase,
    amounts,
    pause,
    per_unit,
    spend,
    staircase,
    urgency,
)
from fedsched.policy.optimus import EPOCHS_PER_S_MIN
from fedsched.policy.remembering import recall
from fedsched.policy.speed_model import FORGOTTEN, Belief, Floats, Kind, SpeedModel, Surface
from fedsched.policy.speed_trust import trusted

NEW_CELLS = 8
"""A class that was seen in fewer cells is new: it is explored twice as boldly."""
DOUBLING_SLOTS = 5
"""The weight of a job that has waited too long doubles in so many slots."""
WAITS_MAX = 400
"""Doublings that are told apart."""
SETTLING_SLOTS = 20
"""The first slot after a change counts if it is so many times as long as the change takes."""
REFITS = 2
"""Classes whose beliefs are brought up to date in one slot."""
KINDS_KEPT = 2_000
"""Kinds of jobs whose curves are remembered."""
CELLS_KEPT = 20_000
"""Cells that are remembered of what was seen here; with more, those of the oldest periods go first."""
SURE = 0.2
"""Noise between a class's jobs up to which the class says more of a job than one speed of its own does."""
OWN_WEIGHT = 2.0
"""How many speeds of its own a job must have shown to be believed half of what sets it apart from its class."""


class LearnedSpeedOptions(Tree):
    """How it decides."""

    explore: float = Field(default=0.5, ge=0, le=10)
    """Standard deviations by which doubtful allocations count as faster than believed; 0: no exploration."""
    learn: bool = True
    """Whether it goes on learning; without it, it decides by what it was given."""
    stay: float = Field(default=0.03, ge=0, le=10)
    """By how much what a job has counts as faster than it is, for a change that nobody needs."""
    resize_s: float = Field(default=5.0, ge=0)
    """What a change is reckoned to cost, in seconds of training."""
    fairness: float = Field(default=0.0, ge=0, le=10)
    """To this power of how much longer than alone a job takes so far its weight grows; 0: only the mean counts."""
    patience_slots: int = Field(default=50, ge=1, le=1_000_000)
    """Slots without anything after which a job's weight grows."""
    period_s: float = Field(default=7 * 86400.0, gt=0)
    """What was observed counts half when it is so old."""


_Alike = tuple[Kind, Range, Range, Resources, Resources]
"""What jobs that share a curve have in common."""


_Like = tuple[Surface, Curve]
"""What is believed of all jobs that are like one."""


@dataclass(frozen=True, slots=True, eq=False)
class _Known:
    """What is believed of one job; made anew only when it has shown something, or its like have."""

    like: _Like
    own: dict[Cell, float]
    """The rates that it has shown itself."""
    scale: float
    """How much faster than its like it is elsewhere."""
    best: float
    """Its highest rate."""
    said: tuple[float, float | None]
    """Declared epochs and how long its user expects them to take."""

    @property
    def curve(self) -> Curve:
        """Of its like."""
        return self.like[1]

    def rate(self, cell: Cell) -> float:
        """With this allocation."""
        return self.own.get(cell) or float(self.curve.rates[self.curve.index(cell)]) * self.scale


@dataclass(slots=True)
class _Memory:
    """What is remembered of a job that is there."""

    shown: dict[tuple[int, int, str], tuple[float, SpeedCell, SpeedSums]] = field(default_factory=dict)
    """By workers, parameter servers and accelerator: the speed, and what it counts for."""
    progress: float = 0.0
    attained_s: float = 0.0
    time_s: float = 0.0
    asked: Allocation = NO_TASKS
    """What it was given in the slot before."""
    idle_slots: int = 0
    stairs: Staircase | None = None
    stairs_of: tuple[_Known, Allocation, float, Allocation] | None = None
    """What they were made of: beliefs, what it runs with, what staying is worth, what is granted."""
    view: JobView | None = None
    like_of: tuple[object, ...] = ()
    """What `like` follows from."""
    like: _Like | None = None
    known: _Known | None = None
    """None once it has shown something else."""


class _SavedJob(Record, frozen=True):
    """What the policy remembers of a job, to go on from."""

    shown: tuple[tuple[tuple[int, int, str], float, SpeedCell, SpeedSums], ...]
    progress: float
    attained_s: float
    time_s: float
    asked: Allocation
    idle_slots: int
    view: JobView | None


class Lessons(Record, frozen=True):
    """All that the next decisions depend on, besides what the policy was made of."""

    period_s: float
    base: str
    """Digest of what it was made with."""
    observed: tuple[tuple[SpeedCell, SpeedSums], ...]
    jobs: tuple[tuple[JobId, _SavedJob], ...]
    heard: tuple[int, float] | None
    belief: Belief
    epoch: int
    number: int
    taken: int
    others: tuple[tuple[SpeedCell, SpeedSums], ...]


class _Cluster:
    """What is asked of the nodes again and again."""

    def __init__(self, nodes: tuple[Node, ...]) -> None:
        self.nodes = nodes
        there = [node for node in nodes if node.schedulable]
        self.capacity = total([node.capacity for node in there])
        self._of: dict[NodeName, str] = {node.name: node.accelerator for node in nodes}
        counted = Counter(node.accelerator for node in there)
        self._common = [kind for kind, _ in sorted(counted.items(), key=lambda entry: (-entry[1], entry[0]))]

    def accelerator(self, view: JobView) -> str:
        """The type that the job's tasks are on or, where that is none or several, would most likely be on."""
        if len(self._common) == 1:
            return self._common[0]
        held = {self._of[entry.node] for entry in view.placement if entry.node in self._of}
        if len(held) == 1:
            return held.pop()
        wanted = [kind for kind in self._common if not view.accelerators or kind in view.accelerators]
        return wanted[0] if wanted else ""

    def holds(self, most: int, demand: Resources) -> int:
        """So many tasks at most, or as many as all nodes together could hold if they are fewer."""
        pairs = zip(amounts(demand), amounts(self.capacity), strict=True)
        return min([most, *(int(whole // part) for part, whole in pairs if part)])


class LearnedSpeed:
    """Black-box policy: learned speeds, marginal value.

    Args:
        options: how it decides.
        statistics: what is known beforehand; they are not changed.
        version: theirs.
    """

    name: ClassVar[str] = "learned_speed"
    Options = LearnedSpeedOptions

    def __init__(
        self,
        options: LearnedSpeedOptions | None = None,
        statistics: SpeedStatistics | None = None,
        version: int = 0,
    ) -> None:
        self._options = options or LearnedSpeedOptions()
        self.version = version
        self.epoch = 0
        """The agent's term in which it began to remember; 0 before it takes part in a federation."""
        self.explorer = ""
        """Whose liking it has for what is worth a try, where others explore too."""
        self._number = 0
        """Grows with all that it sees."""
        self._taken = 0
        """Version of what the other clusters have seen; 0 before any was taken."""
        self._offered: tuple[int, tuple[SpeedStatistics, ...]] | None = None
        """Taken with the next slot; set by another thread, and never by the one that decides: it could lose a newer."""
        self._heeded: tuple[int, tuple[SpeedStatistics, ...]] | None = None
        """Of what was offered, what is taken."""
        self._others = SpeedStatistics()
        """What is used of it."""
        self._shown: tuple[int, SpeedStatistics] = (0, SpeedStatistics())
        """What was observed by the end of the last slot, and its number."""
        self._cluster = _Cluster(())
        self._observed = SpeedStatistics()
        self._jobs: dict[JobId, _Memory] = {}
        self._heard: tuple[int, float] | None = None
        self._forgot = -1
        """The period in which it last looked for what may be forgotten."""
        self._curves: dict[_Alike, _Like] = {}
        self._most: dict[_Alike, tuple[int, int]] = {}
        """Workers and parameter servers that jobs of a kind can have at most on this cluster."""
        self._base = self._loaded = (statistics or SpeedStatistics()).merged(())
        """What decisions are made of, and what those from the next slot on are; the latter may be set by any thread."""
        self._build()

    @property
    def observed(self) -> SpeedStatistics:
        """What it has seen itself since it was made, without what it was given: a cluster's contribution to others."""
        return self._observed.merged(())

    @property
    def statistics(self) -> SpeedStatistics:
        """All that is known by now."""
        return self._given.merged([self._observed])

    @property
    def period_s(self) -> float:
        """Length of the periods that its cells name."""
        return self._options.period_s

    @property
    def taken(self) -> int:
        """Version of the other clusters' statistics that the next slot is decided with; 0: of none."""
        offered = self._offered
        return self._taken if offered is None or offered is self._heeded else offered[0]

    @property
    def base(self) -> SpeedStatistics:
        """What it was made with or told to `load`."""
        return self._loaded

    def shown(self) -> tuple[int, SpeedStatistics]:
        """What was seen by the end of the last slot, and a number that has grown with it. From any thread."""
        return self._shown

    def take(self, version: int, parts: Sequence[SpeedStatistics]) -> None:
        """From the next slot on know what is used of these (`fedsched.policy.speed_trust`). From any thread.

        Args:
            version: of the parts; they take the place of those taken before.
            parts: what other clusters have seen, each by itself.
        """
        self._offered = (version, tuple(parts))

    def state(self) -> bytes:
        """All that its next decisions depend on, besides what it was made of."""
        jobs = tuple(
            (
                job_id,
                _SavedJob(
                    tuple((at, *known) for at, known in memory.shown.items()),
                    memory.progress,
                    memory.attained_s,
                    memory.time_s,
                    memory.asked,
                    memory.idle_slots,
                    None if memory.view is None else replace(memory.view, speeds=()),
                ),
            )
            for job_id, memory in self._jobs.items()
        )
        lessons = Lessons(
            self._options.period_s,
            self._base.digest,
            tuple(self._observed),
            jobs,
            self._heard,
            self._model.belief,
            self.epoch,
            self._number,
            self._taken,
            tuple(self._others),
        )
        return msgspec.msgpack.encode(lessons)

    def restore(self, state: bytes) -> None:
        """Go on from what `state` gave: the next decisions are those of the policy that gave it.

        Where it was made with other statistics or by another version of the model, what was seen counts all the same.

        Raises:
            ValueError: it is no state of this policy, or of one that counts in other periods; nothing has changed.
        """
        lessons = recall(state, Lessons)
        if lessons.period_s != self._options.period_s:
            raise ValueError(f"its periods last {lessons.period_s:g} s; {self._options.period_s:g} s were expected")
        observed, others = SpeedStatistics(lessons.observed), SpeedStatistics(lessons.others)
        problem = problem_with(observed) or problem_with(others)
        if problem:
            raise ValueError(problem)
        jobs = {
            job_id: _Memory(
                {at: (rate, cell, sums) for at, rate, cell, sums in saved.shown},
                saved.progress,
                saved.attained_s,
                saved.time_s,
                saved.asked,
                saved.idle_slots,
                view=saved.view,
            )
            for job_id, saved in lessons.jobs
        }
        self._observed, self._jobs, self._heard = observed, jobs, lessons.heard
        self._shown = (lessons.number, observed.merged(()))
        self.epoch, self._number, self._taken, self._others = lessons.epoch, lessons.number, lessons.taken, others
        self.version = lessons.taken or self.version
        self._base = self._loaded
        self._given = self._base.merged([others])
        self._model = self._believing(lessons)
        self._curves.clear()

    def _believing(self, lessons: Lessons) -> SpeedModel:
        known = self.statistics
        if lessons.base == self._base.digest:
            try:
                return SpeedModel(known, lessons.belief)
            except ValueError:
                pass  # Surfaces of another version of the model; they follow from what was seen.
        return SpeedModel(known)

    def load(self, statistics: SpeedStatistics) -> None:
        """From the next slot on know this, besides what was seen here; it takes the place of what was given before.

        From any thread.
        """
        self._loaded = statistics.merged(())

    def _build(self) -> None:
        """Believe what is known, after some of it was replaced."""
        self._given = self._base.merged([self._others])
        self._model = SpeedModel(self.statistics)
        self._curves.clear()

    def decide(self, observation: Observation, budget: Budget) -> Decision:
        """Listen, believe, weigh, spend. Asked again about the same moment it answers the same."""
        self._attend(observation)
        views = [view for view in by_arrival(observation.jobs) if not view.pinned]
        first = self._starved(observation, views)
        wishes = [
            self._wish(view, observation, budget)
            for view in views
            if first is None or view.placement or view.job_id == first.job_id
        ]
        spend(wishes, observation.jobs, self._cluster.capacity, budget)
        decision = Decision(observation.slot, budget.allocations(), self.name, self.version)
        given = dict(decision.allocations)
        for view in views:
            self._jobs[view.job_id].asked = given.get(view.job_id, NO_TASKS)
        return decision

    def worth(self, observation: Observation, allocations: Iterable[tuple[JobId, Allocation]]) -> float:
        """What anybody's answer to the slot is worth by what is believed: the share of its best speed that each job
        gets, weighed as for a decision of its own but for fairness and ageing, and added up. Never negative."""
        self._attend(observation)
        given = dict(allocations)
        total = 0.0
        for view in observation.jobs:
            size = given.get(view.job_id, NO_TASKS)
            if not size.workers:
                continue
            known = self._believe(view)
            left_s = max(view.remaining_epochs, LEFT_MIN * view.epochs) / known.best
            share = known.rate((size.workers, size.ps)) / known.best
            total += min(1.0, share) * urgency(left_s / observation.slot_length_s)
        return total

    # --- Listen

    def _attend(self, observation: Observation) -> None:
        if observation.nodes != self._cluster.nodes or len(self._most) > KINDS_KEPT:
            self._cluster = _Cluster(observation.nodes)
            self._curves.clear()
            self._most.clear()
        moment = (observation.slot, observation.time_s)
        loaded = self._loaded
        if loaded is not self._base:
            self._base = loaded
            self._build()
        if moment != self._heard:
            self._listen(observation)
            self._heard = moment
            self._exchange(observation)

    def _listen(self, observation: Observation) -> None:
        finished = dict(observation.finished)
        here = {view.job_id for view in observation.jobs}
        for job_id in sorted(set(self._jobs) - here):
            gone = self._jobs.pop(job_id)
            if self._options.learn and job_id in finished:
                self._hear_last(gone, finished[job_id], observation)
        for view in sorted(observation.jobs, key=lambda view: view.job_id):
            memory = self._jobs.get(view.job_id)
            if memory is None:
                memory = self._jobs[view.job_id] = _Memory()
            elif view.placement or memory.asked:
                memory.idle_slots = 0
            else:
                memory.idle_slots += 1
            if self._options.learn:
                self._hear(memory, view, observation)
            memory.progress, memory.attained_s = view.progress_epochs, view.attained_s
            memory.time_s, memory.view = observation.time_s, view
        self._forget(observation.time_s)
        self._model.refresh(REFITS)

    def _exchange(self, observation: Observation) -> None:
        """Show the other clusters what was seen here, and take what they have shown."""
        if self._number != self._shown[0]:
            self._shown = (self._number, self._observed.merged(()))
        offered = self._offered
        if offered is None or offered is self._heeded:
            return
        self._heeded = offered
        # A calendar may be a little ahead of ours.
        last = self._period(observation.time_s) + 1
        self._taken, parts = offered
        self.version = self._taken
        others = trusted(self._observed, parts, last)
        if others != self._others:
            self._others = others
            self._build()

    def _forget(self, time_s: float) -> None:
        """Let go of what weighs nothing any more, and of what is too much to keep."""
        period = self._period(time_s)
        if period == self._forgot and len(self._observed) <= CELLS_KEPT:
            return
        self._forgot = period
        newest: dict[Kind, int] = {}
        gone: set[SpeedCell] = set()
        cells = sorted((cell for cell, _ in self._observed), key=lambda cell: (-cell.period, cell))
        for number, cell in enumerate(cells):
            last = newest.setdefault((cell.job_type, cell.accelerator), cell.period)
            if last - cell.period >= FORGOTTEN or number >= CELLS_KEPT:
                gone.add(cell)
                self._number += 1
                self._observed.replace(cell, self._observed.at(cell), NONE)
                self._model.touch(cell, self._given.at(cell))
        for memory in self._jobs.values() if gone else ():
            for at, (rate, cell, _) in memory.shown.items():
                if cell in gone:
                    memory.shown[at] = (rate, cell, NONE)

    def _period(self, time_s: float) -> int:
        return max(0, int(time_s / self._options.period_s))

    def _hear(self, memory: _Memory, view: JobView, observation: Observation) -> None:
        before = memory.view
        if before is None or before.speeds != view.speeds:
            for sample in view.speeds:
                if sample.workers and sample.epochs_per_s >= EPOCHS_PER_S_MIN:
                    at = (sample.workers, sample.ps, sample.accelerator)
                    known = memory.shown.get(at)
                    if known is None or known[0] != sample.epochs_per_s:
                        self._count(memory, view.job_type, at, sample.epochs_per_s, observation.time_s)
        passed_s, done = observation.time_s - memory.time_s, view.progress_epochs - memory.progress
        if before is None or done <= 0 or not self._long(passed_s):
            return
        held = allocation_of(view.placement)
        if held != memory.asked or not held.workers:
            return
        at = (held.workers, held.ps, self._cluster.accelerator(view))
        if at not in memory.shown and done / passed_s >= EPOCHS_PER_S_MIN:
            self._count(memory, view.job_type, at, done / passed_s, observation.time_s)

    def _hear_last(self, memory: _Memory, taken_s: float, observation: Observation) -> None:
        """The job has finished since: the time that it still took tells its last speed, if it was long enough."""
        view, asked = memory.view, memory.asked
        if view is None or not asked.workers:
            return
        trained_s = (taken_s - memory.attained_s) / (asked.workers + asked.ps)
        at = (asked.workers, asked.ps, self._cluster.accelerator(view))
        left = view.remaining_epochs
        if at not in memory.shown and self._long(trained_s) and left >= view.epochs / 2:
            self._count(memory, view.job_type, at, left / trained_s, observation.time_s)

    def _long(self, time_s: float) -> bool:
        return time_s > 0 and time_s >= SETTLING_SLOTS * self._options.resize_s

    def _count(self, memory: _Memory, job_type: str, at: tuple[int, int, str], rate: float, time_s: float) -> None:
        """The job has shown this speed, which it has not shown with these tasks before."""
        before = memory.shown.get(at)
        self._number += 1
        workers, ps, accelerator = at
        sums, period = observed(rate), self._period(time_s)
        if before is not None and before[1].period == period:
            cell = before[1]
            self._observed.replace(cell, before[2], sums)
        else:
            cell = SpeedCell(job_type, accelerator, workers, ps, period)
            self._observed.add(cell, sums)
        self._model.touch(cell, self._given.at(cell) + self._observed.at(cell))
        memory.shown[at], memory.known = (rate, cell, sums), None

    # --- Believe

    def _like(self, memory: _Memory, view: JobView) -> _Like:
        """What is believed of this job's like; looked up anew only where something of that has changed."""
        accelerator = self._cluster.accelerator(view)
        of = (
            *(self._model, self._model.changes, self._cluster, view.job_type, accelerator),
            *(view.workers, view.ps, view.worker_demand, view.ps_demand),
        )
        if memory.like is None or memory.like_of != of:
            memory.like_of, memory.like = of, self._curve(view, accelerator)
        return memory.like

    def _curve(self, view: JobView, accelerator: str) -> _Like:
        """What is believed of jobs like this one."""
        kind: Kind = (view.job_type, accelerator)
        key = (kind, view.workers, view.ps, view.worker_demand, view.ps_demand)
        most = self._most.get(key)
        if most is None:
            holds = self._cluster.holds
            workers, ps = holds(view.workers.maximum, view.worker_demand), holds(view.ps.maximum, view.ps_demand)
            most = self._most[key] = (max(1, workers), max(1, ps) if view.ps.maximum else 0)
        surface = self._model.surface(kind, *most)
        found = self._curves.get(key)
        if found is None or found[0] is not surface:
            found = self._curves[key] = (surface, self._curve_of(view, kind, surface))
        return found

    def _curve_of(self, view: JobView, kind: Kind, surface: Surface) -> Curve:
        beta: float | Floats = self._options.explore * (2 if surface.cells < NEW_CELLS else 1)
        least, on, capacity = view.minimum, surface.grid, self._cluster.capacity
        if len(self._others):
            beta = beta * self._share(kind, len(on.workers))
        rates = believed = surface.rates(beta)
        allowed = (on.workers >= least.workers) & (on.workers <= view.workers.maximum)
        allowed &= (on.ps >= least.ps) & (on.ps <= view.ps.maximum)
        workers, ps, rates = on.workers[allowed], on.ps[allowed], rates[allowed]
        # The job's own limits may lie between what the grid tells apart.
        for cell in {(least.workers, least.ps), (view.workers.maximum, view.ps.maximum)}:
            if cell[0] >= 1 and not ((workers == cell[0]) & (ps == cell[1])).any():
                at = on.nearest(*cell)
                workers, ps = np.append(workers, cell[0]), np.append(ps, cell[1])
                rates = np.append(rates, believed[at])
        return Curve(workers, ps, rates, per_unit(view.worker_demand, capacity), per_unit(view.ps_demand, capacity))

    def _share(self, kind: Kind, cells: int) -> Floats:
        """This cluster's share of the exploration of each allocation; the mean over clusters is 1.

        Clusters that know the same would try the same in the same slot, and learn from eight what one could have shown.
        So each has a liking of its own, which stays (Dimakopoulou and Van Roy, ICML 2018: concurrent explorers need
        to be different and to stick to it).
        """
        chance = stream(0, "/".join((self.explorer, *kind))).random
        return np.array([2 * chance() for _ in range(cells)])

    # --- Weigh

    def _wish(self, view: JobView, observation: Observation, budget: Budget) -> Claim:
        memory, slot_s = self._jobs[view.job_id], observation.slot_length_s
        known = self._believe(view)
        left_s = max(view.remaining_epochs, LEFT_MIN * view.epochs) / known.best
        weight = urgency(left_s / slot_s)
        if self._options.fairness:
            alone_s = max(slot_s, view.epochs / known.best)
            weight *= max(1.0, (observation.time_s - view.arrived_s + left_s) / alone_s) ** self._options.fairness
        late = memory.idle_slots - self._options.patience_slots
        if late > 0:
            weight *= 2.0 ** min(late / DOUBLING_SLOTS, WAITS_MAX)
        stay = 1 + self._options.stay + pause(self._options.resize_s, slot_s, left_s / slot_s)
        held = allocation_of(view.placement)
        stairs_of = (known, held, stay, budget.allocation(view.job_id))
        if memory.stairs is None or memory.stairs_of != stairs_of:
            memory.stairs_of, memory.stairs = stairs_of, _stairs(*stairs_of)
        return Claim(view, known.curve, weight, memory.stairs, held)

    def _believe(self, view: JobView) -> _Known:
        memory = self._jobs[view.job_id]
        like, known, said = self._like(memory, view), memory.known, (view.epochs, view.expected_s)
        if known is not None and known.like is like and known.said == said:
            return known
        (surface, curve), (own, scale) = like, self._own(memory, like[0])
        if not surface.cells and not own and view.expected_s:
            # Nobody has seen the class; what its user says of the job sets the level.
            least = curve.index((view.minimum.workers, view.minimum.ps))
            scale = view.epochs / view.expected_s / float(curve.rates[least])
        best = max([curve.best * scale, *own.values()])
        known = memory.known = _Known(like, own, scale, best, said)
        return known

    def _own(self, memory: _Memory, surface: Surface) -> tuple[dict[Cell, float], float]:
        """What the job itself showed, and how much faster it is than its class where it was not seen."""
        own: dict[Cell, float] = {}
        apart = 0.0
        for (workers, ps, _), (rate, _, _) in memory.shown.items():
            own[workers, ps] = rate
            apart += log(rate) - float(surface.mean[surface.grid.nearest(workers, ps)])
        if not own:
            return own, 1.0
        doubt = OWN_WEIGHT * min(1.0, (SURE / max(surface.noise, 1e-9)) ** 2)
        return own, exp(apart / (len(own) + doubt))

    # --- Ageing

    def _starved(self, observation: Observation, views: Sequence[JobView]) -> JobView | None:
        """The job that has waited longest of those that have waited far too long and could run on an empty cluster."""
        waited = [
            (-self._jobs[view.job_id].idle_slots, view.arrived_s, view.job_id, view)
            for view in views
            if self._jobs[view.job_id].idle_slots > 2 * self._options.patience_slots
        ]
        for *_, view in sorted(waited, key=lambda entry: entry[:3]):
            rooms = [
                node.capacity
                for node in observation.nodes
                if node.schedulable and (not view.accelerators or node.accelerator in view.accelerators)
            ]
            if pack(rooms, view.worker_demand, view.ps_demand, view.minimum) is not None:
                return view
        return None


def _stairs(known: _Known, held: Allocation, stay: float, have: Allocation) -> Staircase:
    """The staircase of a job from what it is granted already; what it holds is so much faster than it is."""
    own = known.own
    if held.workers:
        cell = (held.workers, held.ps)
        own = {**own, cell: known.rate(cell) * stay}
    return staircase(known.curve, own, known.scale, (have.workers, have.ps))
