"""Declared simulations: clusters, a workload and an experiment, in three files that are checked as one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    PrivateAttr,
    Tag,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from fedsched.config import COMBINED, CPUS_MAX, MEMORY_MAX_GB, Name, NodeConfig, PolicyConfig, Tree, load, parse, read
from fedsched.core.choosing import Rule
from fedsched.core.cluster import Node
from fedsched.core.job import LENGTH_MAX_S, Allocation
from fedsched.core.packing import pack
from fedsched.errors import InvalidConfiguration, InvalidInput, NotFound
from fedsched.policy import plugins
from fedsched.problems import KIND, LABEL, kind_or
from fedsched.sim.cluster import Rules
from fedsched.sim.datafiles import resolve
from fedsched.sim.dl2_workload import Dl2Workload, Dl2WorkloadConfig
from fedsched.sim.elastic_workload import ElasticWorkloadConfig
from fedsched.sim.federation_config import FederationSectionConfig
from fedsched.sim.local_workloads import LocalWorkloadsConfig
from fedsched.sim.ports import TrueSpeeds, Workload
from fedsched.sim.speeds.config import AnalyticConfig, ElasticSpeedsConfig, EstimatesConfig, SpeedsConfig
from fedsched.sim.speeds.costs import CostsConfig
from fedsched.sim.traces.config import FittedWorkloadConfig, TraceWorkloadConfig
from fedsched.sim.traces.names import TraceFormat
from fedsched.sim.traces.shaping import ElasticSpeed, RigidSpeed
from fedsched.sim.training_config import TrainingConfig
from fedsched.sim.workload import Mix, WorkloadConfig

Label = Annotated[str, Field(pattern=LABEL)]
SLOTS_MAX = 100_000_000
SEEDS_MAX = 100_000
FOLDER = "folder"
"""Where validators find the experiment file's folder, from which paths in it count."""


# Parts that lie in files of their own.


def _contents(value: Any, info: ValidationInfo) -> Any:
    """What the named file holds; a part that is written out in place stands for itself."""
    if not isinstance(value, str):
        return value
    path = _folder(info) / value
    if info.context:
        info.context[f"{FOLDER} of {info.field_name}"] = path.parent
    try:
        return read(path)
    except InvalidConfiguration as problem:
        raise ValueError(problem.message) from problem


def _beside(policies: dict[str, PolicyConfig], info: ValidationInfo) -> dict[str, PolicyConfig]:
    """The same policies with the paths of their checkpoints taken from the experiment's folder."""
    return {
        label: policy
        if policy.checkpoint in ("builtin", "scratch")
        else policy.model_copy(update={"checkpoint": str(_folder(info) / policy.checkpoint)})
        for label, policy in policies.items()
    }


def _folder(info: ValidationInfo) -> Path:
    return Path(info.context[FOLDER]) if info.context else Path()


# What is declared.


class NodesConfig(NodeConfig):
    """A node, or many that are alike."""

    count: int = Field(default=1, ge=1, le=100_000)
    """How many; where it is more than 1 their names are numbered."""

    def nodes(self) -> tuple[Node, ...]:
        """The nodes as the scheduler knows them."""
        if self.count == 1:
            return (self.node(),)
        return tuple(self.model_copy(update={"name": f"{self.name}-{index:05d}"}).node() for index in range(self.count))


class SimulatedClusterConfig(Tree):
    """One cluster of a clusters file."""

    name: Name
    nodes: tuple[NodesConfig, ...] = Field(min_length=1)
    policy: Label | None = None
    """Label of the policy that always decides here; the one that is compared where nothing is said."""

    @model_validator(mode="after")
    def _names_are_unique(self) -> SimulatedClusterConfig:
        _unique("node", [node.name for node in self.nodes])
        return self

    def all_nodes(self) -> tuple[Node, ...]:
        """Its nodes as the scheduler knows them."""
        return tuple(node for group in self.nodes for node in group.nodes())


def _clusters_are_unique(clusters: tuple[SimulatedClusterConfig, ...]) -> tuple[SimulatedClusterConfig, ...]:
    _unique("cluster", [cluster.name for cluster in clusters])
    return clusters


def _unique(what: str, names: list[str]) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{what} names must be unique; used more than once: {', '.join(twice)}")


class Dl2Config(Dl2WorkloadConfig):
    """The workload of DL2's research code."""

    kind: Literal["dl2"]

    def workload(self, base: Path = Path()) -> Workload:
        """The workload; it needs no files."""
        return Dl2Workload(self)


WorkloadFile = Annotated[
    Annotated[WorkloadConfig, Tag(f"{KIND}mix")]
    | Annotated[Dl2Config, Tag(f"{KIND}dl2")]
    | Annotated[ElasticWorkloadConfig, Tag(f"{KIND}elastic")]
    | Annotated[TraceWorkloadConfig, Tag(f"{KIND}trace")]
    | Annotated[FittedWorkloadConfig, Tag(f"{KIND}fitted")]
    | Annotated[LocalWorkloadsConfig, Tag(f"{KIND}local")],
    Discriminator(
        kind_or("mix"),
        custom_error_type="unknown_kind",
        custom_error_message="there is no such kind of workload; "
        "dl2, elastic, fitted, local, mix (or no kind) or trace was expected",
    ),
    BeforeValidator(_contents),
]
"""A workload file: its field `kind` says which of the classes it is."""


class ExperimentConfig(Tree):
    """An experiment file: which policies run which workload on which clusters."""

    shown_in: ClassVar[str] = "simulations/experiments/small.yaml"

    clusters: Annotated[
        tuple[SimulatedClusterConfig, ...],
        Field(min_length=1),
        AfterValidator(_clusters_are_unique),
        BeforeValidator(_contents),
    ]
    """Path of a clusters file, relative to this one; it holds a list of clusters."""
    workload: WorkloadFile
    """Path of a workload file, relative to this one."""
    speeds: SpeedsConfig | None = None
    """How fast jobs really train; where nothing is said it is what goes with the workload: made-up kinds of models for
    a mix, fitted coefficients for DL2's, the recorded durations for traces. Paths in it are relative to this file."""
    policies: Annotated[dict[Label, PolicyConfig], Field(min_length=1), AfterValidator(_beside)]
    """By the label that the results carry; paths of checkpoints are relative to this file."""
    seed: int = Field(default=0, ge=0)
    """Of the first run; the next run draws from the next seed."""
    seeds: int = Field(default=5, ge=1, le=SEEDS_MAX)
    """How many runs; each draws its jobs from a seed of its own, the same for every policy."""
    clock: Literal["slots", "exact"] = "slots"
    """Whether decisions are made at slot starts only, or whenever something happens."""
    slot_length_s: float = Field(default=10.0, ge=1e-3, le=LENGTH_MAX_S)
    slots_max: int = Field(default=5_000, ge=1, le=SLOTS_MAX)
    """After as many slots nothing new starts, and jobs that wait never end."""
    costs: CostsConfig = CostsConfig(start_s=1.0, scale_s=0.2, stop_s=0.5)
    """How long the scaling verbs take; a job makes no progress meanwhile."""
    estimates: EstimatesConfig = EstimatesConfig()
    """How wrong schedulers are about jobs."""
    keep_running: bool = True
    """A running job keeps at least its minimum; false lets the policy stop it for others."""
    placement: Rule = "spread"
    """How nodes are chosen for new tasks."""
    rebuild: bool = False
    """Every slot is placed anew on an empty cluster, as in DL2's research code; the policies dl2_* need that."""
    routing: Literal["best", "origin", "two_choices"] = "best"
    """Which cluster a job goes to: the best by the controller's own score, where it was submitted, or the better of two
    that are drawn, which costs the same for any number of clusters."""
    transfer_gib_per_s: float = Field(default=1.0, gt=0)
    """How fast a job's data moves to another cluster than its origin; it waits for that."""
    store_s: float = Field(default=0.01, ge=0)
    """How long the store takes to confirm what is written; orders wait for it."""
    on_bad_answer: Literal["stop", "fall_back"] = "stop"
    """What happens when a policy throws or its answer cannot be used: the run ends and counts as partial, so that no
    policy is praised for what its fallback did, or the fallback decides the slot, as it does live."""
    decision_s_max: float = Field(default=120.0, gt=0, le=LENGTH_MAX_S)
    """A policy that has not answered after so many real seconds has given no answer that can be used. Nothing else in a
    run depends on real time."""

    federation: FederationSectionConfig | None = None
    """How clusters with a learned policy learn together while they run; without it weights stay as they are."""
    training: TrainingConfig | None = None
    """Which policies are taught before they run, then to decide with what they learnt and learn no more."""

    _folders: dict[str, Path] = PrivateAttr(default_factory=dict)
    """Where relative paths start from, by field."""

    @model_validator(mode="before")
    @classmethod
    def _like_another(cls, value: Any, info: ValidationInfo) -> Any:
        """Sections that are not there are those of the experiment beside it that `like` names."""
        try:
            return _with_likeness(value, _folder(info))
        except InvalidConfiguration as problem:
            raise ValueError(problem.message) from problem

    def beside(self, name: str) -> str:
        """Where a file lies that the experiment names relative to its own."""
        return str(self._folders["speeds"] / name)

    def model_post_init(self, context: Any) -> None:
        """Remember where the files lie that this was read from."""
        here = Path(context[FOLDER]) if context else Path()
        there = (context or {}).get(f"{FOLDER} of workload", here)
        self._folders.update(speeds=here, workload=there)

    def jobs(self) -> Workload:
        """Where the jobs come from, with what they declare.

        Raises:
            NotFound: a file that it needs is not there.
            InvalidInput: a file cannot be used.
        """
        if isinstance(self.workload, WorkloadConfig):
            return self.estimates.declared(Mix(self.workload))
        return self.estimates.declared(self.workload.workload(self._folders["workload"]))

    def rules(self) -> Rules:
        """How time passes, and what things take."""
        return Rules(
            slot_length_s=self.slot_length_s,
            clock=self.clock,
            slots_max=self.slots_max,
            store_s=self.store_s,
            costs=self.costs.costs(),
            keep_running=self.keep_running,
            placement=self.placement,
            rebuild=self.rebuild,
            crowded=self.speeds is not None and self.speeds.interference is not None,
        )

    def speed_model(self, seed: int) -> TrueSpeeds:
        """How fast they really train.

        Raises:
            NotFound: a file that it needs is not there.
            InvalidInput: a file cannot be used.
        """
        if self.speeds is not None:
            return self.speeds.model(seed, self._folders["speeds"])
        match self.workload:
            case WorkloadConfig() | LocalWorkloadsConfig():
                return AnalyticConfig(form="analytic").model(seed)
            case Dl2Config():
                return AnalyticConfig(form="analytic", coefficients="dl2_fitted").model(seed)
            case ElasticWorkloadConfig():
                return ElasticSpeedsConfig(form="elastic").model(seed)
            case TraceWorkloadConfig() | FittedWorkloadConfig():
                elastic = self.workload.shape.elastic
                return RigidSpeed() if elastic is None else ElasticSpeed(elastic.exponent)

    def typical_speeds(self, seed: int) -> TrueSpeeds:
        """The same for jobs that are no different from others of their type.

        Raises:
            NotFound, InvalidInput: as `speed_model`.
        """
        if self.speeds is None:
            return self.speed_model(seed)
        return self.speeds.model_copy(update={"noise": 0.0, "stragglers": None}).model(seed, self._folders["speeds"])

    @model_validator(mode="after")
    def _slots_are_the_same(self) -> ExperimentConfig:
        if isinstance(self.workload, Dl2Config) and self.workload.slot_length_s != self.slot_length_s:
            raise ValueError(
                f"slot_length_s is {self.slot_length_s:g} here and {self.workload.slot_length_s:g} in the workload, "
                "whose jobs come at slot starts; the same was expected"
            )
        return self

    @model_validator(mode="after")
    def _rebuilding_has_slots(self) -> ExperimentConfig:
        if self.rebuild and self.clock == "exact":
            raise ValueError(
                "rebuild is true and clock is exact; a cluster is rebuilt at slot starts, so slots were expected"
            )
        return self

    @model_validator(mode="after")
    def _every_job_can_run(self) -> ExperimentConfig:
        if not isinstance(self.workload, WorkloadConfig):
            return self
        worker, ps = self.workload.largest_tasks
        rooms = [[node.capacity for node in cluster.all_nodes()] for cluster in self.clusters]
        if all(pack(room, worker, ps, Allocation(1, 1)) is None for room in rooms):
            raise ValueError(f"no cluster can hold the workload's largest worker ({worker}) and server ({ps})")
        return self

    @model_validator(mode="after")
    def _local_workloads_have_a_cluster(self) -> ExperimentConfig:
        if isinstance(self.workload, LocalWorkloadsConfig):
            known = [cluster.name for cluster in self.clusters]
            unknown = [name for name in self.workload.clusters if name not in known]
            if unknown:
                raise ValueError(f"the workload names {', '.join(unknown)}; clusters are {', '.join(known)}")
        return self

    @model_validator(mode="after")
    def _federation_fits(self) -> ExperimentConfig:
        if self.federation is None:
            return self
        names = [cluster.name for cluster in self.clusters]
        for what, given, known in (
            ("members", self.federation.members, names),
            ("together", self.federation.together, list(self.policies)),
        ):
            unknown = [name for name in given if name not in known]
            if unknown:
                raise ValueError(f"federation.{what} names {', '.join(unknown)}; known are {', '.join(known)}")
        for label in self.federation.together:
            name = self.policies[label].name
            if name not in COMBINED:
                raise ValueError(
                    f"federation.together names {label}, which is {name} and learns nothing; {', '.join(COMBINED)} do"
                )
        return self

    @model_validator(mode="after")
    def _training_fits(self) -> ExperimentConfig:
        if self.training is None:
            return self
        unknown = [label for label in self.training.policies if label not in self.policies]
        if unknown:
            raise ValueError(f"training.policies names {', '.join(unknown)}; policies are {', '.join(self.policies)}")
        for label in self.training.policies:
            name = self.policies[label].name
            if name not in COMBINED:
                raise ValueError(
                    f"training.policies names {label}, which is {name} and learns nothing; {', '.join(COMBINED)} do"
                )
        if len(self.clusters) > 1 and self.federation is None:
            raise ValueError(
                f"training is about {len(self.clusters)} clusters, which are taught together; "
                "a section `federation` was expected"
            )
        for label in self.training.policies if self.federation is not None else ():
            if self.policies[label].name == "learned_speed":
                raise ValueError(
                    f"training.policies names {label}, which is learned_speed and learns within the federation's runs; "
                    "leave it out"
                )
        if self.training.look_slots and self.federation is None:
            raise ValueError("training.look_slots is given, and there is no section `federation`")
        for label, lesson in self.training.policies.items() if self.federation is None else ():
            told = [name for name in ("together", "promotion") if getattr(lesson, name) is not None]
            if told:
                raise ValueError(f"training.policies.{label}.{told[0]} is given, and there is no section `federation`")
        return self

    @model_validator(mode="after")
    def _own_policies_exist(self) -> ExperimentConfig:
        for cluster in self.clusters:
            if cluster.policy is not None and cluster.policy not in self.policies:
                known = ", ".join(self.policies)
                raise ValueError(f"cluster {cluster.name} has policy {cluster.policy}; policies are {known}")
        return self


def _with_likeness(plain: Any, folder: Path) -> Any:
    """An experiment's plain data, with what it lacks taken from the one that it is like.

    Raises:
        InvalidConfiguration: there is no such file beside it, or it is like another itself.
    """
    if not isinstance(plain, Mapping) or "like" not in plain:
        return plain
    name = plain["like"]
    if not isinstance(name, str) or name != Path(name).name:
        raise InvalidConfiguration(f"like is {name!r}", "name a file in the same folder")
    other = read(folder / name)
    if not isinstance(other, Mapping) or "like" in other:
        wrong = "is like another itself" if isinstance(other, Mapping) else "is no experiment"
        raise InvalidConfiguration(f"like is {name}, which {wrong}", "name a whole experiment")
    return {**other, **{section: own for section, own in plain.items() if section != "like"}}


def load_experiment(path: Path) -> ExperimentConfig:
    """Read an experiment and the files that it names.

    Raises:
        InvalidConfiguration: there are problems in any of them; all are listed.
    """
    return load(ExperimentConfig, path, {FOLDER: path.parent})


def files_of(path: Path) -> tuple[Path, ...]:
    """An experiment's file and all that are named in it and in its workload: nothing may be written over them.

    Raises:
        InvalidConfiguration: one of the two is no YAML.
    """
    plain = read(path)
    found = [path, *_files_named(plain, path.parent, set())]
    whole = _with_likeness(plain, path.parent)
    if whole is not plain:
        found += _files_named(whole, path.parent, set())
    workload = whole.get("workload") if isinstance(whole, Mapping) else None
    if isinstance(workload, str):
        file = path.parent / workload
        found += _files_named(read(file), file.parent, set())
    return tuple(found)


def _files_named(plain: Any, base: Path, seen: set[int]) -> Iterator[Path]:
    """Texts that are paths of files; aliases are followed once, however often they stand there."""
    if isinstance(plain, str):
        with suppress(NotFound, OSError, ValueError, RuntimeError):  # most texts are no paths at all
            yield resolve(plain, base)
    elif isinstance(plain, Mapping | list) and id(plain) not in seen:
        seen.add(id(plain))
        for part in plain.values() if isinstance(plain, Mapping) else plain:
            yield from _files_named(part, base, seen)


POOLED = frozenset({TraceFormat.CSV, TraceFormat.TIRESIAS, TraceFormat.GAVEL})
"""Formats of simulators that count GPUs, wherever they are."""


def trace_experiment(
    file: Path,
    form: TraceFormat,
    *,
    nodes: int,
    gpus_per_node: int,
    clock: Literal["slots", "exact"],
    slot_length_s: float,
    pooled: bool | None = None,
) -> ExperimentConfig:
    """A trace on one cluster of equal nodes, without any file but the trace: rigid jobs, and verbs that cost nothing.

    Only GPUs are scarce there.

    Args:
        pooled: whether GPUs count for the whole cluster, or jobs need room on nodes. None: as is usual with the format.
    """
    counted = form in POOLED if pooled is None else pooled
    machine = {"cpus": CPUS_MAX, "memory_gb": MEMORY_MAX_GB}
    group = (
        {"name": "pool", "gpus": nodes * gpus_per_node, **machine}
        if counted
        else {"name": "node", "gpus": gpus_per_node, "count": nodes, **machine}
    )
    plain = {
        "clusters": [{"name": "trace", "nodes": [group]}],
        "workload": {
            "kind": "trace",
            "file": str(file.absolute()),
            "format": form,
            "shape": {"gpus_per_node": None if counted else gpus_per_node},
        },
        # Nobody passes who does not fit, as those simulators have it. Disciplines of the remaining time preempt.
        "policies": {name: {"name": name, "options": {"blocking": True}} for name in ("fifo", "sjf")},
        "keep_running": False,
        "placement": "consolidate",
        "seeds": 1,
        "clock": clock,
        "slot_length_s": slot_length_s,
        "slots_max": SLOTS_MAX,
        "costs": {"preset": "free"},
        "store_s": 0.0,
    }
    return parse(ExperimentConfig, plain, "the simulation")


def with_policies(experiment: ExperimentConfig, labels: Sequence[str]) -> tuple[ExperimentConfig, tuple[str, ...]]:
    """The experiment, and the labels of the policies to compare, in order; all of its own if `labels` is empty.

    Args:
        labels: of the experiment's policies, or names of any policy, which is then added with its defaults.

    Raises:
        InvalidInput: a label is neither.
    """
    wanted = tuple(dict.fromkeys(labels)) or tuple(experiment.policies)
    added = {label: _by_name(label) for label in wanted if label not in experiment.policies}
    known = {label: policy for label, policy in added.items() if policy is not None}
    unknown = [label for label in added if label not in known]
    if unknown:
        near = _nearest(unknown, experiment.policies) or _nearest(unknown, plugins.available())
        raise InvalidInput(
            f"there is no policy {', '.join(unknown)}; the experiment has {', '.join(experiment.policies)}",
            f"did you mean {', '.join(near)}?" if near else "name some of these, or any of `fedsched policy list`",
        )
    return experiment.model_copy(update={"policies": {**experiment.policies, **known}}), wanted


def _nearest(unknown: Iterable[str], known: Iterable[str]) -> list[str]:
    return [name for label in unknown for name in difflib.get_close_matches(label, list(known), n=1)]


def _by_name(name: str) -> PolicyConfig | None:
    try:
        return PolicyConfig.model_validate({"name": name})
    except ValidationError:
        return None
