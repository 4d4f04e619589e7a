"""How many slots clusters need until they know their jobs' speeds well enough, alone and when they share what they see.

Clusters begin with nothing and run the experiment's jobs, run after run. At some of each cluster's slots what it knows
by then is set aside. Afterwards the same held-out jobs are run with each of these, without exploring and without
learning, and compared with what the greedy policy makes of them that knows the true speeds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from fedsched.core.commands import Command
from fedsched.core.decision import Policy
from fedsched.core.events import Event, PolicyDecided
from fedsched.core.ids import ClusterName
from fedsched.core.speeds import SpeedStatistics
from fedsched.errors import InvalidInput
from fedsched.federation.loop import Standing
from fedsched.learn.sharing import Sums
from fedsched.policy import registry
from fedsched.policy.learned_speed import LearnedSpeed, LearnedSpeedOptions
from fedsched.policy.oracle_greedy import OracleGreedy, OracleGreedyOptions
from fedsched.policy.speed_pool import Pool
from fedsched.runtime.loop import Observer
from fedsched.sim.collecting import Collector
from fedsched.sim.comparing import Interval, interval
from fedsched.sim.experiment import ExperimentConfig
from fedsched.sim.federation import Federation, Sharing, first_standing
from fedsched.sim.federation_config import FederationSectionConfig, MemberConfig
from fedsched.sim.federation_link import Errands
from fedsched.sim.running import Request, build, run_whole
from fedsched.sim.seeds import apart
from fedsched.sim.world import World

MARKS = (2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64)
"""Slots of a cluster after which what it knows is looked at, up to the last that is asked for."""
SLOTS = 20
"""The last, where nothing is said."""
HELD_OUT = 500_000
"""Seeds of jobs that nobody learned from begin here."""
Tell = Callable[[str], None]


@dataclass(slots=True)
class _Cluster:
    policy: LearnedSpeed
    slots: int = 0
    known: dict[int, SpeedStatistics] = field(default_factory=dict)
    """By mark."""

    def observe(self, event: Event, commands: Sequence[Command]) -> None:
        """A slot may have been decided."""
        if isinstance(event, PolicyDecided):
            self.slots += 1
            if self.slots in MARKS:
                self.known[self.slots] = self.policy.statistics


class _Sharers:
    """Clusters that share in groups of so many, from one run to the next."""

    def __init__(self, experiment: ExperimentConfig, label: str, size: int, seed: int) -> None:
        section = experiment.federation
        assert section is not None, "whoever measures has looked"
        self._section: FederationSectionConfig = section
        self._label, self._size, self._seed = label, size, seed
        config = experiment.policies[label].model_copy(update={"checkpoint": "scratch"})
        names = [ClusterName(cluster.name) for cluster in experiment.clusters]
        self.clusters = {name: _Cluster(registry.make_learned_speed(config)) for name in names}
        self._groups = [names[first : first + size] for first in range(0, len(names), size)]
        self._standings: list[Standing] = [first_standing(config.name, Pool(), section.learning_rate)] * len(
            self._groups
        )
        self._members: dict[ClusterName, Sharing] = {}
        self._federations: list[Federation] = []

    def pupil(self, name: ClusterName, label: str, seed: int) -> Sharing | None:
        """The cluster as a member; who is alone sends nothing that could be late, lost or spoilt on its way."""
        if label != self._label:
            return None
        unusual = self._section.members.get(name, MemberConfig()) if self._size > 1 else MemberConfig()
        self._members[name] = Sharing(name, self.clusters[name].policy, unusual)
        return self._members[name]

    def observers(self, name: ClusterName) -> tuple[Observer, ...]:
        """Counts its slots."""
        return (self.clusters[name].observe,)

    def join(self, world: World) -> None:
        """Let the federations go on."""
        errands = Errands(world.clock)
        self._federations = [
            Federation(
                [self._members[name] for name in group],
                standing,
                self._section,
                seed=apart(self._seed, index),
                combining=Sums(self.clusters[group[0]].policy.period_s),
            )
            for index, (group, standing) in enumerate(zip(self._groups, self._standings, strict=True))
        ]
        for federation in self._federations:
            federation.join(errands, world.clusters)

    def run(self, experiment: ExperimentConfig, seed: int) -> None:
        """Run one workload.

        Raises:
            InvalidInput: it did not end.
        """
        _jcts_s(experiment, self._label, seed, teachers=self)
        self._standings = [federation.standing() for federation in self._federations]


def _jcts_s(
    experiment: ExperimentConfig,
    label: str,
    seed: int,
    *,
    teachers: _Sharers | None = None,
    policies: Mapping[ClusterName, Policy] | None = None,
) -> dict[ClusterName, float]:
    """Mean JCT of a run by cluster.

    Raises:
        InvalidInput: it did not end.
    """
    collector, request = Collector(), Request("sharing", experiment, label, seed)
    world = build(request, [collector.on], lambda event, commands: None, policies or {}, teachers=teachers)
    jobs = run_whole(world, collector, seed)
    sums: dict[ClusterName, list[float]] = {}
    for cluster, jct_s in zip(jobs.cluster, (jobs.finish_s - jobs.submit_s).tolist(), strict=True):
        sums.setdefault(ClusterName(cluster), []).append(jct_s)
    return {name: sum(values) / len(values) for name, values in sorted(sums.items())}


@dataclass(frozen=True, slots=True)
class LearningCurve:
    """How good what one cluster knew was, over its slots, in one training."""

    cluster: str
    together: int
    seed: int
    excess: tuple[float, ...]
    """By mark: mean JCT relative to the greedy's that knows the true speeds, less 1."""

    @property
    def last(self) -> int:
        """The last mark."""
        return MARKS[len(self.excess) - 1]

    def slots_to(self, tolerance: float) -> int | None:
        """After how many slots it stayed within `tolerance` of the greedy; None: never."""
        reached = None
        for mark, excess in zip(MARKS, self.excess, strict=False):
            if excess > tolerance:
                reached = None
            elif reached is None:
                reached = mark
        return reached


def curves(
    experiment: ExperimentConfig,
    label: str,
    *,
    sizes: Sequence[int],
    seeds: Sequence[int],
    held_out: int,
    slots: int = SLOTS,
    tell: Tell = lambda _: None,
) -> list[LearningCurve]:
    """The curves of all clusters.

    Args:
        label: of a policy `learned_speed` of the experiment.
        sizes: how many share with each other.
        seeds: of the trainings.
        held_out: workloads that each set of knowledge is judged on.
        slots: of each cluster; what it knows is looked at until then.

    Raises:
        InvalidInput: a run did not end, or the experiment has no federation.
    """
    if experiment.federation is None or experiment.policies[label].name != registry.LEARNED_SPEED:
        raise InvalidInput(
            f"policy {label} of the experiment is no {registry.LEARNED_SPEED} that learns together with others",
            "give the experiment a section `federation`, see simulations/experiments/federated_speeds.yaml",
        )
    options = LearnedSpeedOptions.model_validate(experiment.policies[label].options)
    judged = _Judging(experiment.model_copy(update={"federation": None}), label, options, held_out)
    marks = [mark for mark in MARKS if mark <= slots]
    found = []
    for seed in seeds:
        for size in sizes:
            sharers = _Sharers(experiment, label, size, seed)
            run = 0
            while min(cluster.slots for cluster in sharers.clusters.values()) < marks[-1]:
                sharers.run(experiment, apart(seed, run))
                run += 1
            excess = [
                judged.excess({name: one.known[mark] for name, one in sharers.clusters.items()}) for mark in marks
            ]
            for name in sharers.clusters:
                found.append(LearningCurve(name, size, seed, tuple(at[name] for at in excess)))
            tell(f"training {seed}, {size} together: {run} runs")
    return found


class _Judging:
    """Held-out workloads, and what the greedy makes of them."""

    def __init__(self, experiment: ExperimentConfig, label: str, options: LearnedSpeedOptions, held_out: int) -> None:
        self._experiment, self._label = experiment, label
        self._frozen = options.model_copy(update={"explore": 0.0, "learn": False})
        self._seeds = [HELD_OUT + number for number in range(held_out)]
        greedy = OracleGreedyOptions(stay=options.stay, resize_s=options.resize_s)
        names = [ClusterName(cluster.name) for cluster in experiment.clusters]
        self._best = [
            _jcts_s(experiment, label, seed, policies={name: OracleGreedy(greedy) for name in names})
            for seed in self._seeds
        ]

    def excess(self, known: Mapping[ClusterName, SpeedStatistics]) -> dict[ClusterName, float]:
        """By cluster: mean JCT with this knowledge relative to the greedy's, less 1."""
        sums = dict.fromkeys(known, 0.0)
        for seed, best in zip(self._seeds, self._best, strict=True):
            policies = {name: LearnedSpeed(self._frozen, statistics) for name, statistics in known.items()}
            for name, jct_s in _jcts_s(self._experiment, self._label, seed, policies=policies).items():
                sums[name] += jct_s / best[name] - 1
        return {name: total / len(self._seeds) for name, total in sums.items()}


@dataclass(frozen=True, slots=True)
class Speedup:
    """What sharing does for clusters, over trainings."""

    together: int
    slots: Interval
    """Mean over clusters of the slots to the quality; who never reached it counts with twice the last mark."""
    to_alone: Interval
    """The same, relative to the clusters alone, training by training."""
    reached: float
    """Share of the clusters that did."""
    excess: Interval
    """Mean over clusters at the last mark."""
    worst: Interval
    """Of all clusters the largest difference of that to the same cluster alone: above zero it ended worse."""
    worst_cluster: str


def summary(found: Sequence[LearningCurve], tolerance: float) -> list[Speedup]:
    """By how many share, against those that are alone.

    Args:
        found: of all clusters, with those alone among them.
    """
    alone = {(curve.cluster, curve.seed): curve.excess[-1] for curve in found if curve.together == 1}
    seeds = sorted({curve.seed for curve in found})
    slots_alone = [
        _mean_slots([curve for curve in found if curve.together == 1 and curve.seed == seed], tolerance)
        for seed in seeds
    ]
    speedups = []
    for size in sorted({curve.together for curve in found}):
        own = [curve for curve in found if curve.together == size]
        by_seed = [[curve for curve in own if curve.seed == seed] for seed in seeds]
        slots = [_mean_slots(part, tolerance) for part in by_seed]
        differences = {
            name: interval([curve.excess[-1] - alone[name, curve.seed] for curve in own if curve.cluster == name])
            for name in sorted({curve.cluster for curve in own})
        }
        worst = max(differences, key=lambda name: differences[name].mean)
        speedups.append(
            Speedup(
                size,
                interval(slots),
                interval([here / there for here, there in zip(slots, slots_alone, strict=True)]),
                sum(curve.slots_to(tolerance) is not None for curve in own) / len(own),
                interval([sum(curve.excess[-1] for curve in part) / len(part) for part in by_seed]),
                differences[worst],
                worst,
            )
        )
    return speedups


def _mean_slots(own: Sequence[LearningCurve], tolerance: float) -> float:
    """Over clusters, of the slots to the quality."""
    return sum(curve.slots_to(tolerance) or 2 * curve.last for curve in own) / len(own)
