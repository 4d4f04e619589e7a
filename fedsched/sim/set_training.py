"""Trains the `set` policy: it imitates a teacher, then improves on what its own slots bring, and must do no harm.

Training runs in the light environment of `fluid.py`, on many clusters of drawn sizes at once, crowded and empty ones,
because a policy that never saw small allocations has no idea what they are worth. Some jobs are shown without their
type, so that it learns what to do with types that it does not know.

An improvement counts if clusters that are not trained on say so: every few steps they are run, and where the policy got
no better it goes back to the best weights so far, at half the learning rate. So the last weights are the best ones.
Claims are made elsewhere, in the world and on jobs that neither training nor this saw.

What was tried, one training seed each; average JCT in slots on validation clusters of 500, 80 and 40 servers with DL2's
jobs (greedy with full knowledge: 21.82, 26.63, 36.51; first and last row: three of the four seeds), and in the
world on held-out seeds 20 to 24 (greedy 22.18, 27.21, 37.51):

| teacher: learned_speed after | its own | rounds | the student's | in the world |
|---|---|---|---|---|
| 5 runs, exploring with 0.5 deviations | 22.2, 27.6, 37.9 | 12, one learning rate | 22.4, 28.3, 38.7 | |
| the same | the same | 16 of both workloads, falling rate | 22.2, 28.3, 38.6 | 22.6, 29.1, 39.8 |
| 5 runs, exploring with 1: as shipped | 21.8, 26.6, 36.5 | the same | 21.8, 27.1, 37.1 | 22.2, 27.6, 38.6 |
| 10 or 15 runs, exploring with 1 | the same | | | |
| the greedy itself: no black box | 21.8, 26.6, 36.5 | 5 after 7 of the first | 22.3, 27.4, 37.6 | 22.5, 27.6, 38.6 |

Six rounds of improvement on what ships, at the rate of 1e-4, came to 27.11 and 37.12 in place of 27.09 and 37.06 on 80
and 40 servers, and were taken back: a student of so good a teacher has little to gain from its own slots.
Sixty rounds on both workloads (64,512 slots, 176 s of CPU, one seed) did neither good nor harm: the best look, after
36, came to 27.01 and 37.09 there. In the world, on 80 servers and held-out seeds, what counted after 0, 6, 18 and 36
rounds came to 27.58, 27.62, 27.62 and 27.60. No look, not even of those that were taken back, had a mean over all
validation clusters more than 0.12 % above the best one's.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from itertools import pairwise
from random import Random
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedsched.core.commands import RewardSlot
from fedsched.core.decision import Decision, Policy
from fedsched.core.ids import JobId, stream
from fedsched.core.job import Allocation
from fedsched.core.resources import Resources, total
from fedsched.learn.clipped import Improved, Improver, Lived, Paces
from fedsched.learn.imitation import Demonstration, demonstration, imitate
from fedsched.policy.checkpoint import Checkpoint
from fedsched.policy.learnable import Array, Arrays
from fedsched.policy.set import UNKNOWN, Set, SetOptions, SetShape, initial
from fedsched.sim.experiment import ExperimentConfig
from fedsched.sim.fluid import Fluid, FluidBudget
from fedsched.sim.ports import TrueSpeeds, Workload
from fedsched.sim.training_state import Kept, taken_apart, under, weights

Tell = Callable[[str], None]
SEED_STRIDE = 1_000_000
TRAINING_SEEDS = 1_000
"""Workloads are drawn from this seed on; those below are for validation and for whoever makes claims."""
VALIDATION_SEEDS = (900, 901, 902, 903)
SIZES = (1.0, 0.16, 0.08)
"""Clusters that training is judged on if nothing else is said, as shares of the declared one."""
BEYOND = (0.75, 1.1)
"""Training draws its clusters from this much of the smallest such share to this much of the largest."""
TEACHER_EXPLORES = 1.0
"""Standard deviations; with half as many it missed sizes that no run tried, and taught 2 to 4 % worse than it could."""
HIDDEN_SHARE = 0.03
"""Of the jobs that are shown without their type."""
IMPROVEMENT_DRAWS = 500_000
"""Improvement draws its clusters from here on, whatever went before it."""


@dataclass(frozen=True, slots=True, eq=False)
class Ground:
    """What is trained on."""

    name: str
    capacity: Resources
    workload: Workload
    speeds: TrueSpeeds
    slot_length_s: float
    sizes: tuple[float, ...] = SIZES
    """Clusters that training is judged on, as shares of the whole one."""

    @classmethod
    def of(cls, name: str, experiment: ExperimentConfig, sizes: tuple[float, ...] = SIZES) -> Ground:
        """The experiment's jobs and speeds on clusters of shares of its first one's size."""
        capacity = total([node.capacity for node in experiment.clusters[0].all_nodes()])
        return cls(name, capacity, experiment.jobs(), experiment.speed_model(0), experiment.slot_length_s, sizes)

    def part(self, share: float) -> Resources:
        """So much of the cluster."""
        whole = self.capacity
        return Resources(
            round(whole.cpu_milli * share), round(whole.memory_mib * share), round(whole.gpu_milli * share)
        )

    def drawn(self, chance: float) -> Resources:
        """A cluster to train on: its size is drawn evenly by its logarithm, with a number from 0 to 1."""
        low, high = (math.log(share) for share in (BEYOND[0] * min(self.sizes), BEYOND[1] * max(self.sizes)))
        return self.part(math.exp(low + (high - low) * chance))

    def refuse_too_small(self) -> None:
        """Look at the smallest cluster that training may draw, before hours are spent on larger ones.

        Raises:
            InvalidInput: jobs of a validation workload could not run on it.
        """
        for seed in VALIDATION_SEEDS:
            Fluid(self.drawn(0.0), self.workload.draw(seed), self.speeds, self.slot_length_s)

    @property
    def cases(self) -> tuple[str, ...]:
        """Names of the clusters that training is judged on."""
        return tuple(_case(self, share) for share in self.sizes)

    def jct_slots(self, share: float, seed: int, policy: Policy) -> float:
        """Average completion time of the jobs of this seed on so much of the cluster, in slots."""
        cluster = Fluid(self.part(share), self.workload.draw(seed), self.speeds, self.slot_length_s)
        return cluster.run(policy) / self.slot_length_s


Teaching = Callable[[Ground], Policy]
"""Makes a new teacher for a cluster of this ground."""


@dataclass(frozen=True, slots=True)
class Hyperparameters:
    """How long and how fast it learns."""

    seed: int = 0
    environments: int = 16
    """Clusters that run beside each other."""
    slots: int = 64
    """That each of them runs before the policy learns from them."""
    lessons: int = 16
    """Rounds of imitation; 0: none, it starts from weights that know nothing."""
    passes: int = 4
    """Over all lessons so far, after each of the first rounds; fewer later, when there are more of them."""
    last_passes: int = 12
    """Over all lessons, after the last round, with a falling learning rate."""
    imitation_rate: float = 1e-3
    improvements: int = 30
    improvement_rate: float = 1e-4
    check_every: int = 6
    """Improvements between two validations."""
    value_warm_up: int = 3
    """Rounds in which only the value network learns, because the policy must not follow its first errors."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A point of the learning curve."""

    stage: str
    slots: int
    cpu_s: float
    jct_slots: tuple[float, ...]
    """Average completion times of the validation clusters, in slots, in the order of `cases`."""
    held_out_jct_slots: tuple[float, ...] = ()
    """The same in whole experiments that decide nothing, where somebody asked for them."""

    @property
    def score(self) -> float:
        """Geometric mean; less is better."""
        return math.exp(sum(math.log(jct) for jct in self.jct_slots) / len(self.jct_slots))


@dataclass(frozen=True, slots=True, eq=False)
class Trained:
    """What came of it."""

    checkpoint: Checkpoint
    cases: tuple[str, ...]
    """Names of the validation clusters."""
    curve: tuple[Mark, ...]

    @property
    def in_use(self) -> tuple[Mark, ...]:
        """After each look the weights that counted then."""
        used = [self.curve[0]]
        for mark in self.curve[1:]:
            used.append(mark if mark.score < used[-1].score else used[-1])
        return tuple(used)


Judge = Callable[[Arrays], tuple[float, ...]]
"""Runs whole experiments with these weights; average completion times in slots."""
Keep = Callable[[Kept, Sequence[Mark]], None]
"""Hears of all that the training goes on from, and of its curve so far."""
Drawn = tuple[Any, ...]
"""State of a stream of chance."""


def train(
    grounds: Sequence[Ground],
    plan: Hyperparameters,
    *,
    teacher: Teaching | None,
    options: SetOptions,
    command: str,
    first: Arrays | None = None,
    recipe: Mapping[str, Any] | None = None,
    begun: Kept | None = None,
    judge: Judge = lambda arrays: (),
    keep: Keep = lambda kept, curve: None,
    tell: Tell = lambda _: None,
) -> Trained:
    """Train and judge. The same arguments give the same checkpoints, byte for byte.

    Args:
        grounds: what is trained on, in turn.
        plan: how long; `lessons` need a teacher.
        teacher: None: nobody is imitated.
        options: that the policy decides with, in training as later.
        command: what a user types for this; it goes into the checkpoint.
        first: weights to begin with. With those that an imitation of this seed ended with, improvement alone gives
            the same as imitation and improvement in one go.
        recipe: all that decides what is made, as plain data; it goes into what is kept.
        begun: where an interrupted training goes on from. Within imitation there is no such place: that begins anew.
        judge: asked at every look, and not heeded: shows what the weights are worth on jobs that had no say.
        keep: hears of every point of the curve.
        tell: hears how it goes.

    Raises:
        InvalidInput: a cluster that is trained on could be too small for a job.
    """
    return _Training(grounds, plan, options, tell, recipe or {}, judge, keep).run(teacher, command, first, begun)


def speed_teacher(grounds: Sequence[Ground], tell: Tell = lambda _: None) -> Teaching:
    """Makes teachers that have learned the grounds' speeds as `learned_speed` does: from progress that they saw."""
    from fedsched.core.speeds import SpeedStatistics
    from fedsched.policy.learned_speed import LearnedSpeed, LearnedSpeedOptions

    learned: dict[Ground, SpeedStatistics] = {}
    for ground in grounds:
        statistics = SpeedStatistics()
        for number, share in enumerate(_and_between(ground.sizes)):
            learning = LearnedSpeed(LearnedSpeedOptions(explore=TEACHER_EXPLORES), statistics)
            jct_slots = ground.jct_slots(share, TRAINING_SEEDS + number, learning)
            statistics = statistics.merged([learning.observed])
            tell(f"the teacher learns on {_case(ground, share)}: average JCT {jct_slots:.2f} slots")
        learned[ground] = statistics
    # Nobody ages at the teacher's: that is a rule of the student's own.
    frozen = LearnedSpeedOptions(explore=0.0, learn=False, patience_slots=1_000_000)
    return lambda ground: LearnedSpeed(frozen, learned[ground])


def _and_between(sizes: tuple[float, ...]) -> tuple[float, ...]:
    """The sizes and, between each and the next, their geometric mean."""
    return (*sizes, *(math.sqrt(one * other) for one, other in pairwise(sizes)))


def _case(ground: Ground, share: float) -> str:
    return f"{ground.name} at {share:.3g}"


class _Episode:
    """One cluster with its jobs, its teacher and the paces of its ground.

    What was drawn for it, and what it has lived through, is all that it takes to have it again.
    """

    def __init__(self, number: int, chance: Drawn, fluid: Fluid, teacher: Policy | None, paces: Paces) -> None:
        self.number = number
        self.chance = chance
        self.fluid = fluid
        self.teacher = teacher
        self.paces = paces
        self.lived: list[Decision] = []

    def live_through(self, decision: Decision) -> RewardSlot:
        """Give the jobs what was decided, and let the slot pass."""
        self.lived.append(decision)
        return self.fluid.live_through(decision)


@dataclass(slots=True)
class _Improving:
    """How far improvement is."""

    lessons: int
    """Of the imitation before it."""
    arrays: dict[str, Array]
    """The best weights so far."""
    mark: Mark
    """Theirs."""
    rate: float
    number: int = 0
    """Improvements that are done."""
    improver: Improver | None = None
    """None: not begun."""
    episodes: list[_Episode] = field(default_factory=list)


@dataclass
class _Training:
    grounds: Sequence[Ground]
    plan: Hyperparameters
    options: SetOptions
    tell: Tell
    recipe: Mapping[str, Any]
    judge: Judge
    keep: Keep
    slots: int = 0
    curve: list[Mark] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._begun_s = time.process_time()
        self._chance: Random = stream(self.plan.seed, "set/training")
        self._shape = SetShape()
        self._paces = {ground: Paces() for ground in self.grounds}
        self._drawn = 0
        self._cases = [(ground, share) for ground in self.grounds for share in ground.sizes]

    def run(self, teacher: Teaching | None, command: str, first: Arrays | None, begun: Kept | None) -> Trained:
        plan = self.plan
        if begun is None:
            at = self._imitated(teacher, first)
            self._save(at)
        else:
            with taken_apart():
                at = self._again(begun)
        if plan.improvements:
            self._improve(at)
        made: dict[str, str | int | float] = {
            "command": command,
            "seed": plan.seed,
            "lessons": at.lessons,
            "slots": self.slots,
            "torch": version("torch").split("+")[0],
            "numpy": version("numpy"),
        }
        cases = tuple(case for ground in self.grounds for case in ground.cases)
        return Trained(
            Checkpoint(at.arrays, self._shape, {**made, **_told(cases, self.curve[-1])}),
            cases,
            tuple(self.curve),
        )

    # --- imitation

    def _imitated(self, teacher: Teaching | None, first: Arrays | None) -> _Improving:
        """Weights that imitate the teacher, if there is one."""
        plan, lessons = self.plan, 0
        improver = Improver(first or initial(self._shape, plan.seed), learning_rate=plan.imitation_rate, seed=plan.seed)
        if teacher is not None and plan.lessons:
            lessons = self._imitate(improver, teacher, begin_with_teacher=first is None)
        arrays = improver.arrays()
        mark = self._mark("imitation" if lessons else "start", arrays)
        return _Improving(lessons, arrays, mark, plan.improvement_rate)

    def _imitate(self, improver: Improver, teacher: Teaching, *, begin_with_teacher: bool) -> int:
        """The student decides, but for the first round of one that knows nothing; the teacher comments on all slots."""
        plan, lessons = self.plan, list[Demonstration]()
        episodes = [self._episode(teacher) for _ in range(plan.environments)]
        for number in range(plan.lessons):
            student = self._policy(improver.arrays(), 0, explore=False)
            for index in range(plan.environments):
                for _ in range(plan.slots):
                    if episodes[index].fluid.over:
                        episodes[index] = self._episode(teacher)
                    lessons.append(
                        _taught(episodes[index], student, teacher_decides=begin_with_teacher and number == 0)
                    )
            self.slots += plan.environments * plan.slots
            if number < plan.lessons - 1:
                loss = imitate(improver, lessons, passes=min(plan.passes, math.ceil(2 * plan.passes / (number + 1))))
            else:
                loss = imitate(improver, lessons, passes=plan.last_passes, settle=True)
            self.tell(f"imitation {number + 1}/{plan.lessons}: {len(lessons)} slots, loss {loss:.3f}, {self._cpu()}")
        return len(lessons)

    # --- improvement

    def _improve(self, at: _Improving) -> None:
        """Find better weights, or stay with these."""
        plan = self.plan
        improver = at.improver = at.improver or self._warmed_up(at)
        for number in range(at.number + 1, plan.improvements + 1):
            report = improver.improve(self._live(at.episodes, improver.arrays(), plan.value_warm_up + number))
            if number % plan.check_every and number < plan.improvements:
                continue
            now = self._mark(f"improvement {number}", improver.arrays(), report)
            if now.score < at.mark.score:
                at.mark, at.arrays = now, improver.arrays()
            else:
                at.rate /= 2
                self.tell(f"no better: back to the weights of {at.mark.stage}, at rate {at.rate:.1e}")
                improver.go_back(at.arrays, at.rate)
                self.curve.append(at.mark)
            at.number = number
            self._save(at)

    def _warmed_up(self, at: _Improving) -> Improver:
        """Before the first improvement: clusters to live in, and values that know what to expect in them."""
        plan = self.plan
        improver = Improver(at.arrays, learning_rate=at.rate, seed=plan.seed)
        self._chance, self._drawn = stream(plan.seed, "set/improvement"), IMPROVEMENT_DRAWS
        with torch.no_grad():
            # As wide as at first: narrow urgencies make steep gradients, which did harm in every run.
            improver.weights["policy.urgency.deviation"].fill_(0.0)
        at.episodes += [self._episode(None) for _ in range(plan.environments)]
        for number in range(plan.value_warm_up):
            improver.fit_values(self._live(at.episodes, improver.arrays(), number))
        return improver

    def _live(self, episodes: list[_Episode], arrays: dict[str, Array], number: int) -> list[Lived]:
        """The policy decides the next slots of all clusters, exploring."""
        plan, lived = self.plan, list[Lived]()
        for index in range(plan.environments):
            seed = plan.seed * SEED_STRIDE + number * plan.environments + index
            policy = self._policy(arrays, seed, explore=True)
            for _ in range(plan.slots):
                if episodes[index].fluid.over:
                    episodes[index] = self._episode(None)
                episode = episodes[index]
                observation = episode.fluid.observe()
                decision = policy.decide(observation, FluidBudget(observation))
                (sample,) = policy.last_trace()
                reward = episode.live_through(decision)
                lived.append(Lived(sample, episode.paces.rewards(sample, dict(reward.progress))))
        self.slots += plan.environments * plan.slots
        return lived

    # --- parts

    def _episode(self, teacher: Teaching | None) -> _Episode:
        """The next cluster."""
        self._drawn += 1
        return self._cluster(self._drawn, self._chance, teacher)

    def _cluster(self, number: int, chance: Random, teacher: Teaching | None) -> _Episode:
        """A drawn size, the jobs of this number, some of them shown without their type."""
        before = chance.getstate()
        seed = TRAINING_SEEDS + self.plan.seed * SEED_STRIDE + number
        ground = self.grounds[number % len(self.grounds)]
        capacity = ground.drawn(chance.random())
        jobs = list(ground.workload.draw(seed))
        hidden: dict[JobId, str] = {job.spec.job_id: UNKNOWN for job in jobs if chance.random() < HIDDEN_SHARE}
        fluid = Fluid(capacity, jobs, ground.speeds, ground.slot_length_s, shown=hidden)
        return _Episode(number, before, fluid, teacher(ground) if teacher is not None else None, self._paces[ground])

    def _policy(self, arrays: dict[str, Array], seed: int, *, explore: bool) -> Set:
        return Set(arrays, shape=self._shape, seed=seed, explore=explore, options=self.options)

    def _mark(self, stage: str, arrays: dict[str, Array], report: Improved | None = None) -> Mark:
        """Run the validation clusters with these weights."""
        jct_slots = tuple(
            sum(ground.jct_slots(share, seed, self._policy(arrays, 0, explore=False)) for seed in VALIDATION_SEEDS)
            / len(VALIDATION_SEEDS)
            for ground, share in self._cases
        )
        mark = Mark(stage, self.slots, time.process_time() - self._begun_s, jct_slots, self.judge(arrays))
        self.curve.append(mark)
        average = " / ".join(f"{jct:.2f}" for jct in jct_slots)
        how = "" if report is None else f", entropy {report.entropy:.2f}, values explain {report.explained:.2f}"
        self.tell(
            f"{stage}: average JCT {average} slots on validation clusters, {self.slots} slots{how}, {self._cpu()}"
        )
        return mark

    # --- what is kept

    def _save(self, at: _Improving) -> None:
        arrays = {f"best/{name}": array for name, array in at.arrays.items()}
        arrays["chance"] = _words(self._chance.getstate())
        for index, ground in enumerate(self.grounds):
            arrays.update({f"paces.{index}/{name}": array for name, array in self._paces[ground].state().items()})
        if at.improver is not None:
            arrays.update({f"now/{name}": array for name, array in at.improver.state().items()})
        arrays.update({f"episode.{index}": _words(one.chance) for index, one in enumerate(at.episodes)})
        rest = {
            "lessons": at.lessons,
            "mark": asdict(at.mark),
            "rate": at.rate,
            "number": at.number,
            "slots": self.slots,
            "drawn": self._drawn,
            "cpu_s": time.process_time() - self._begun_s,
            "curve": [asdict(mark) for mark in self.curve],
            "episodes": [{"number": one.number, "lived": [_plain(each) for each in one.lived]} for one in at.episodes],
        }
        self.keep(Kept(self.recipe, arrays, rest), self.curve)

    def _again(self, kept: Kept) -> _Improving:
        """Where a training was when this was kept; its clusters live once more through what was decided in them."""
        arrays, rest = kept.arrays, kept.rest
        self._chance.setstate(_state(arrays["chance"]))
        self._drawn, self.slots = rest["drawn"], rest["slots"]
        self._begun_s -= rest["cpu_s"]
        self.curve += [_mark_of(mark) for mark in rest["curve"]]
        for index, ground in enumerate(self.grounds):
            self._paces[ground].restore(under(arrays, f"paces.{index}/"))
        best = weights(arrays, "best/", self._shape.layers())
        at = _Improving(rest["lessons"], dict(best), _mark_of(rest["mark"]), rest["rate"], rest["number"])
        now = under(arrays, "now/")
        if now:
            weights(now, "weights/", self._shape.layers())
            at.improver = Improver(at.arrays, learning_rate=at.rate, seed=self.plan.seed)
            at.improver.restore(now, at.rate)
        for index, told in enumerate(rest["episodes"]):
            chance = Random()
            chance.setstate(_state(arrays[f"episode.{index}"]))
            episode = self._cluster(told["number"], chance, None)
            for allocations in told["lived"]:
                slot = episode.fluid.observe().slot
                episode.live_through(_decision(slot, allocations))
            at.episodes.append(episode)
        return at

    def _cpu(self) -> str:
        return f"{time.process_time() - self._begun_s:.0f} s CPU"


def _taught(episode: _Episode, student: Set, *, teacher_decides: bool) -> Demonstration:
    """One slot of an episode, commented on by the teacher."""
    assert episode.teacher is not None
    observation = episode.fluid.observe()
    decision = student.decide(observation, FluidBudget(observation))
    (sample,) = student.last_trace()
    taught = episode.teacher.decide(observation, FluidBudget(observation))
    episode.live_through(taught if teacher_decides else decision)
    return demonstration(sample, dict(taught.allocations))


def _told(cases: Sequence[str], mark: Mark) -> dict[str, str]:
    """A point of the curve for the checkpoint's story."""
    told = (f"{case}: {jct:.2f}" for case, jct in zip(cases, mark.jct_slots, strict=True))
    return {"stage": mark.stage, "validation_jct_slots": ", ".join(told)}


def _words(state: Drawn) -> NDArray[Any]:
    """State of a stream as an array."""
    return np.array(state[1], dtype=np.uint32)


def _state(words: NDArray[Any]) -> Drawn:
    return (Random.VERSION, tuple(words.tolist()), None)


def _mark_of(plain: Mapping[str, Any]) -> Mark:
    figures = tuple(plain["jct_slots"]), tuple(plain["held_out_jct_slots"])
    return Mark(plain["stage"], plain["slots"], plain["cpu_s"], *figures)


def _plain(decision: Decision) -> list[tuple[str, int, int]]:
    return [(job_id, allocation.workers, allocation.ps) for job_id, allocation in decision.allocations]


def _decision(slot: int, plain: Sequence[tuple[str, int, int]]) -> Decision:
    return Decision(slot, tuple((JobId(job_id), Allocation(workers, ps)) for job_id, workers, ps in plain), Set.name)
