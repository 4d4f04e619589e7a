"""Small federations in which everything goes wrong, each drawn from a seed, under the eyes of all judges."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import structs

from fedsched.config import LearningConfig, OwnTrackConfig, PolicyConfig, PromotionConfig
from fedsched.core.decision import Policy
from fedsched.core.ids import ClusterName, JobId, stream
from fedsched.federation.loop import Combining, gradients
from fedsched.learn.kinds import first_weights, kind_of
from fedsched.learn.sharing import Sums
from fedsched.policy.checkpoint import Checkpoint
from fedsched.policy.dl2 import DL2
from fedsched.policy.learned_speed import LearnedSpeed, LearnedSpeedOptions
from fedsched.policy.registry import LEARNED_SPEED, heuristic
from fedsched.policy.speed_pool import Pool
from fedsched.runtime.loop import Observer
from fedsched.sim.cluster import Rules, Setup
from fedsched.sim.collecting import Collector
from fedsched.sim.faults import FaultPlan, Faults, FaultyPolicy, draw_plan
from fedsched.sim.federation import Federation, LearningMember, Member, Sharing, first_standing
from fedsched.sim.federation_config import AwayConfig, FederationSectionConfig, LinkConfig, MemberConfig, SpoilConfig
from fedsched.sim.federation_judges import FederationJudge, judge_versions
from fedsched.sim.federation_link import Errands
from fedsched.sim.judges import Judges
from fedsched.sim.ports import SimulatedJob
from fedsched.sim.seeds import apart
from fedsched.sim.speed import SPEEDS
from fedsched.sim.speeds.analytic import AnalyticSpeeds
from fedsched.sim.workload import Scenario, draw_scenario
from fedsched.sim.world import USUAL_COSTS, World

NAMES = ("east", "north", "south", "west")
PERIOD_S = 300.0
"""So short that statistics are forgotten within a run."""
SPOILS = ("nan", "huge", "dimensions", "stale", "noise", "reversed")

Draw = Callable[[], float]


def draw_section(seed: int, clusters: tuple[str, ...], until_s: float) -> FederationSectionConfig:
    """Rounds, a link, and clusters that leave, lag and send nonsense."""
    draw = stream(seed, "swarm/section").random
    return FederationSectionConfig(
        interval_s=20 + draw() * 100,
        quorum=1 + int(draw() * len(clusters)),
        deadline_s=1 + draw() * 40,
        batch_size=16 + int(draw() * 64),
        samples_min=1 + int(draw() * 40),
        learning_rate=1e-3,
        combine="weighted_mean" if draw() < 0.5 else "trimmed_mean",
        trim_fraction=draw() * 0.4,
        link=LinkConfig(delay_s=draw() * 3, jitter_s=draw() * 5, loss=draw() * 0.3, twice=draw() * 0.3),
        members={name: _draw_member(draw, until_s) for name in clusters},
        learning=LearningConfig(
            exploration=draw() < 0.5,
            replay=("prioritised", "plain", "off")[int(draw() * 3)],
            memory=16 + int(draw() * 500),
            baseline="value" if draw() < 0.7 else "mean",
        ),
        promotion=_draw_promotion(stream(seed, "swarm/promotion").random),
        seed=seed,
    )


def _draw_promotion(draw: Draw) -> PromotionConfig:
    """Versions that decide at once, are compared for a few slots first, or stand beside those of an own track."""
    least, kind = 2 + int(draw() * 8), draw()
    return PromotionConfig(
        accept="at_once" if kind < 0.3 else "shadow" if kind < 0.65 else "own_track",
        slots_min=least,
        slots_max=4 * least,
        margin=draw() * 0.2,
        own=OwnTrackConfig(batch_size=16, samples_min=4, learning_rate=0.01),
    )


def _draw_member(draw: Draw, until_s: float) -> MemberConfig:
    away, lags, spoils = draw() < 0.4, draw() < 0.3, draw() < 0.4
    every_s = 20 + draw() * until_s
    kind, share = SPOILS[int(draw() * len(SPOILS))], draw()
    return MemberConfig(
        compute_s=draw() * 60 if lags else 0.0,
        away=AwayConfig(first_s=draw() * until_s, for_s=every_s * (0.1 + 0.8 * draw()), every_s=every_s)
        if away
        else None,
        spoils=SpoilConfig(kind=kind, share=share) if spoils else None,  # type: ignore[arg-type]
    )


def run_federation(seed: int, rules: Rules, *, jobs: int, until_s: float, observers: tuple[Observer, ...]) -> str:
    """Draw clusters, jobs, fault plans and rounds, and run it all; returns a digest of everything that happened.

    Args:
        jobs: of each cluster.
        until_s: faults fall into the first so many seconds.
        observers: see every step of every cluster.

    Raises:
        BrokenPromise: a judge saw what must not happen.
    """
    names = NAMES[: 2 + int(stream(seed, "swarm/clusters").random() * 3)]
    section = draw_section(seed, names, until_s)
    sharing = stream(seed, "swarm/sharing").random() < 0.5
    first: Checkpoint | None = None if sharing else first_weights(DL2.name, "builtin", 0)
    combining: Combining = Sums(PERIOD_S) if first is None else gradients(section)
    standing = first_standing(LEARNED_SPEED if first is None else DL2.name, first or Pool(), section.learning_rate)
    judge, judges, collector = FederationJudge(standing, section, combining), Judges(), Collector()
    members, setups, coming = [], [], []
    for index, text in enumerate(names):
        name = ClusterName(text)
        own_seed = apart(seed, index + 1)
        scenario = draw_scenario(own_seed, jobs=jobs)
        own = _jobs(name, scenario)
        coming += own
        plan = draw_plan(own_seed, scenario.nodes, [job.spec for job in own], until_s)
        member = _member(name, section, plan, (seed + index, own_seed), first)
        members.append(member)
        watching = (
            *observers,
            judge.observe,
            *([] if member.versions is None else [member.versions.observe]),
            judges.on(name, scenario.nodes),
            collector.on(name, scenario.nodes),
        )
        setups.append(
            Setup(
                name,
                scenario.nodes,
                member.policy,
                heuristic("drf"),
                member.learner,
                Faults(plan),
                watching,
                member.restarted,
            )
        )
    coming.sort(key=lambda job: (job.spec.submitted_s, job.spec.job_id))
    speeds = AnalyticSpeeds(SPEEDS)
    world = World(setups, coming, speeds, rules, routing="origin", seed=seed, check=True, transcribe=True)
    federation = Federation(members, standing, section, seed=seed, combining=combining, judge=judge)
    federation.join(Errands(world.clock), world.clusters)
    world.run()
    federation.close()
    for member in members:
        if member.versions is None:
            continue  # what others have seen counts at once
        judge_versions(member.name, member.versions.orders, member.policy.version)
    judges.close(collector.jobs(world.clock.now_s), world.clock.now_s, submitted=len(coming))
    return f"{world.digest} {federation.loop.active.record.digest} {len(federation.records)}"


def _candidate(seed: int, section: FederationSectionConfig) -> Callable[[Checkpoint, int], Policy]:
    """Makes what runs in a cluster's shadow."""
    kind = kind_of(DL2.name)
    return lambda weights, version: kind.policy(PolicyConfig(seed=seed), weights, version, section.learning)


def _member(
    name: ClusterName,
    section: FederationSectionConfig,
    plan: FaultPlan,
    seeds: tuple[int, int],
    first: Checkpoint | None,
) -> Member:
    """A cluster's end: of a federation that shares weights or, without any, of one that shares what it sees."""
    unusual = section.members[name]
    if first is None:
        speeds = LearnedSpeed(LearnedSpeedOptions(resize_s=0.1, period_s=PERIOD_S))
        return Sharing(name, speeds, unusual, FaultyPolicy(speeds, plan))
    kind, config = kind_of(DL2.name), PolicyConfig(name=DL2.name, seed=seeds[0])
    policy = FaultyPolicy(kind.policy(config, first, 1, section.learning), plan)
    learner = kind.pupil(first, section.learning, section.batch_size, section.promotion)
    rule = section.promotion.rule()
    return LearningMember(name, policy, learner, unusual, first, rule, _candidate(seeds[1], section))


def _jobs(cluster: ClusterName, scenario: Scenario) -> list[SimulatedJob]:
    """The scenario's jobs under ids of their own, all submitted where they run."""
    return [
        SimulatedJob(structs.replace(spec, job_id=JobId(f"{cluster}-{spec.job_id}")), spec.epochs, origin=cluster)
        for spec in scenario.jobs
    ]


def usual_rules(draw: Draw, slots_max: int) -> Rules:
    """How time passes."""
    return Rules(10.0, slots_max=slots_max, costs=USUAL_COSTS, keep_running=draw() < 0.5)
