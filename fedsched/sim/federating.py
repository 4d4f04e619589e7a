"""Forms the federations of a run: which clusters learn together, with whose weights, and who judges them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from fedsched.config import PolicyConfig
from fedsched.core.ids import ClusterName
from fedsched.core.rounds import RoundRecord
from fedsched.federation.loop import BaseVersion, Combining, Standing, Weights, gradients
from fedsched.federation.source import Arrays
from fedsched.learn.kinds import TEACHABLE, first_weights, kind_of
from fedsched.learn.learner import ClusterLearner
from fedsched.learn.sharing import Sums
from fedsched.policy import registry
from fedsched.policy.checkpoint import Checkpoint
from fedsched.policy.registry import LEARNED_SPEED
from fedsched.policy.speed_pool import Pool
from fedsched.runtime.loop import Observer
from fedsched.sim.experiment import ExperimentConfig
from fedsched.sim.federation import Federation, Judge, LearningMember, Member, Sharing, first_standing
from fedsched.sim.federation_config import FederationSectionConfig, MemberConfig
from fedsched.sim.federation_judges import FederationJudge
from fedsched.sim.federation_link import Errands
from fedsched.sim.seeds import apart
from fedsched.sim.world import World


@dataclass(slots=True)
class School:
    """What clusters remember and where their rounds stand, from one run to the next."""

    learners: dict[ClusterName, ClusterLearner] = field(default_factory=dict)
    standings: list[Standing] = field(default_factory=list)
    """By federation, in the order in which they are formed."""
    deciding: dict[ClusterName, Checkpoint] = field(default_factory=dict)
    """By cluster that looks at versions before it lets them decide: what it decides with."""
    album: list[dict[ClusterName, Arrays]] = field(default_factory=list)
    """By moment of the last run that was to be kept, the weights in force by cluster."""


@dataclass(slots=True)
class _Group:
    """Clusters that learn together."""

    policy: PolicyConfig
    first: Checkpoint | None
    """Weights that agents begin with, where they have any."""
    combining: Combining
    standing: Standing
    judge: FederationJudge | None
    album: Album
    members: list[Member]


class Album(Judge):
    """Keeps the weights that were in force at some moments of a run.

    Args:
        moments_s: sorted.
    """

    def __init__(self, moments_s: Sequence[float]) -> None:
        self._moments_s = moments_s
        self.kept: list[Arrays] = []
        """By moment, those that have come."""

    def saved(self, record: RoundRecord, before: BaseVersion, after: BaseVersion | None) -> None:
        """A round ended, and with it perhaps the time of some weights."""
        self.keep(before.checkpoint.arrays, record.finished_s)

    def keep(self, arrays: Arrays, until_s: float) -> None:
        """These were in force until then."""
        while len(self.kept) < len(self._moments_s) and self._moments_s[len(self.kept)] < until_s:
            self.kept.append(arrays)


class Forming:
    """Makes the members of a run's federations while the clusters are set up, then has them join the world.

    Args:
        seed: of the run.
        judged: whether judges watch the rounds.
        moments_s: of the run; the weights in force then are kept in the school. Not together with judges.
        school: where to go on from; what is missing in it is put there.
        first: weights that agents begin with, in place of those of the policy's configuration.
    """

    def __init__(
        self,
        experiment: ExperimentConfig,
        seed: int,
        *,
        judged: bool,
        moments_s: Sequence[float] = (),
        school: School | None = None,
        first: Checkpoint | None = None,
    ) -> None:
        self._experiment = experiment
        self._seed = seed
        self._judged = judged
        self._moments_s = moments_s
        self._first = first
        self._school = school if school is not None else School()
        self._groups: list[_Group] = []
        self._albums: dict[ClusterName, Album] = {}
        """Of clusters that do not decide with all that their federation makes."""
        self._open: dict[str, _Group] = {}
        """By label, the group that the next cluster with that policy joins."""

    @property
    def _looks_first(self) -> bool:
        """Whether clusters compare versions with what they have before they let them decide."""
        section = self._experiment.federation
        return section is not None and section.promotion.accept != "at_once"

    def pupil(self, name: ClusterName, label: str, seed: int) -> Member | None:
        """A cluster's member; None where it does not learn.

        Raises:
            CorruptCheckpoint: the first weights cannot be used.
        """
        section = self._experiment.federation
        config = self._experiment.policies[label]
        if section is None or config.name not in (*TEACHABLE, LEARNED_SPEED):
            return None
        size = section.together.get(label, len(self._experiment.clusters))
        if size == 0:
            return None
        group = self._group(label, config, section, size)
        # Who learns alone sends nothing that could be late, lost or spoilt on its way.
        unusual = section.members.get(name, MemberConfig()) if size > 1 else MemberConfig()
        own = config.model_copy(update={"seed": config.seed + seed})
        member = self._member(name, own, section, group, unusual)
        group.members.append(member)
        return member

    def _member(
        self,
        name: ClusterName,
        config: PolicyConfig,
        section: FederationSectionConfig,
        group: _Group,
        unusual: MemberConfig,
    ) -> Member:
        if group.first is None:
            return Sharing(name, registry.make_learned_speed(config), unusual)
        active, kind = group.standing.active, kind_of(config.name)
        weights = self._school.deciding.get(name) or group.first.replaced(active.checkpoint.arrays, {})
        policy = kind.policy(config, weights, active.record.version, section.learning)
        learner = self._school.learners.get(name)
        if learner is None:
            learner = kind.pupil(group.first, section.learning, section.batch_size, section.promotion)
            self._school.learners[name] = learner
        member = LearningMember(
            name,
            policy,
            learner,
            unusual,
            weights,
            section.promotion.rule(),
            lambda weights, version: kind.policy(config, weights, version, section.learning),
        )
        if self._looks_first:
            self._albums[name] = album = Album(self._moments_s)
            member.versions.left = album.keep
        return member

    def _group(self, label: str, config: PolicyConfig, section: FederationSectionConfig, size: int) -> _Group:
        group = self._open.get(label)
        if group is not None and len(group.members) < size:
            return group
        first: Checkpoint | None = None
        weights: Weights
        combining: Combining
        if config.name == LEARNED_SPEED:
            combining, weights = Sums(registry.make_learned_speed(config).period_s), Pool()
        else:
            first = weights = self._first or first_weights(config.name, config.checkpoint, config.seed)
            combining = gradients(section)
        index = len(self._groups)
        if index == len(self._school.standings):
            self._school.standings.append(first_standing(config.name, weights, section.learning_rate))
        standing = self._school.standings[index]
        judge = FederationJudge(standing, section, combining) if self._judged else None
        album = Album(self._moments_s)
        self._open[label] = group = _Group(config, first, combining, standing, judge, album, [])
        self._groups.append(group)
        return group

    def observers(self, name: ClusterName) -> tuple[Observer, ...]:
        """Who has to see what the cluster does, to judge what leaves it and to ask what runs in its shadow."""
        groups = [group for group in self._groups if any(member.name == name for member in group.members)]
        members = [member for group in groups for member in group.members if member.name == name]
        judges = [group.judge.observe for group in groups if group.judge is not None]
        return (*judges, *(member.versions.observe for member in members if member.versions is not None))

    def join(self, world: World) -> None:
        """Let the federations begin in the world, before it runs."""
        section, errands = self._experiment.federation, Errands(world.clock)
        for index, group in enumerate(self._groups):
            assert section is not None
            federation = Federation(
                group.members,
                group.standing,
                section,
                seed=apart(self._seed, index),
                combining=group.combining,
                judge=group.judge or group.album,
            )
            federation.join(errands, world.clusters)
            world.federations.append(federation)

    def keep(self, world: World) -> None:
        """Put where the rounds stand after the run into the school."""
        self._school.standings[:] = [federation.standing() for federation in world.federations]
        for group, standing in zip(self._groups, self._school.standings, strict=True):
            group.album.keep(standing.active.checkpoint.arrays, math.inf)
        kept = {member.name: group.album.kept for group in self._groups for member in group.members}
        if self._looks_first:
            self._school.deciding = {
                name: member.versions.deciding
                for federation in world.federations
                for name, member in federation.members.items()
                if member.versions is not None
            }
            for name, album in self._albums.items():
                album.keep(self._school.deciding[name].arrays, math.inf)
                kept[name] = album.kept
        self._school.album = [
            {name: arrays[index] for name, arrays in kept.items()} for index in range(len(self._moments_s))
        ]
        for learner in self._school.learners.values():
            learner.abandon()
