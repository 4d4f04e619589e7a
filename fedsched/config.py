"""One frozen configuration tree per process, read once; every problem is reported together, with its path."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic_core import PydanticCustomError

from fedsched import yamlfile
from fedsched.core.cluster import Node
from fedsched.core.gate import GateRule
from fedsched.core.ids import NodeName
from fedsched.core.resources import Resources
from fedsched.core.rounds import RoundRules
from fedsched.core.versions import AcceptRule
from fedsched.errors import InvalidConfiguration
from fedsched.policy import plugins
from fedsched.problems import ABSOLUTE, ABSOLUTE_OR_EMPTY, ADDRESS, KIND, NAME, NODE, kind_or, problems

Name = Annotated[str, Field(pattern=NAME)]
NodeText = Annotated[str, Field(pattern=NODE)]
"""Clusters name their nodes by themselves: host names and addresses are among them."""
PORT_MAX = 65535


def _port_exists(address: str) -> str:
    port = int(address.rpartition(":")[2])
    if port > PORT_MAX:
        raise ValueError(f"port {port} does not exist; at most {PORT_MAX} was expected")
    return address


Address = Annotated[str, Field(pattern=ADDRESS), AfterValidator(_port_exists)]
LeaseLength = Annotated[int, Field(ge=2, le=3600)]
"""Seconds; etcd takes no more than some years, and nobody waits for an hour."""
CPUS_MAX, MEMORY_MAX_GB, GPUS_MAX = 100_000.0, 1e9, 100_000.0


class Tree(BaseModel):
    """A part of the configuration: frozen, and unknown fields are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    shown_in: ClassVar[str] = ""
    """A file of the repository to compare with, for what is a whole file."""


class NodeConfig(Tree):
    """What one node offers; with the local executor a named share of this machine."""

    name: NodeText
    cpus: float = Field(gt=0, le=CPUS_MAX)
    memory_gb: float = Field(default=4.0, gt=0, le=MEMORY_MAX_GB)
    gpus: float = Field(default=0.0, ge=0, le=GPUS_MAX)
    accelerator: str = ""

    def node(self) -> Node:
        """The node as the scheduler knows it."""
        capacity = Resources(
            cpu_milli=round(self.cpus * 1000),
            memory_mib=round(self.memory_gb * 1024),
            gpu_milli=round(self.gpus * 1000),
        )
        return Node(NodeName(self.name), capacity, self.accelerator)


def _names_are_unique(nodes: tuple[NodeConfig, ...]) -> tuple[NodeConfig, ...]:
    names = [node.name for node in nodes]
    for name in sorted(set(names)):
        if names.count(name) > 1:
            raise ValueError(f"node {name} is defined {names.count(name)} times; names must be unique")
    return nodes


Nodes = Annotated[tuple[NodeConfig, ...], Field(min_length=1), AfterValidator(_names_are_unique)]


class SlotConfig(Tree):
    """The scheduling interval."""

    length_s: float = Field(default=10.0, gt=0)
    """How long one slot lasts."""
    decision_s_max: float = Field(default=1.0, gt=0)
    """The policy must answer within this; after it the heuristic decides."""

    @model_validator(mode="after")
    def _decision_fits(self) -> SlotConfig:
        if self.decision_s_max >= self.length_s:
            raise ValueError(f"decision_s_max is {self.decision_s_max}; it must be below length_s ({self.length_s})")
        return self


class RetryConfig(Tree):
    """How long the attempt after a failed one is held back; its job holds no place meanwhile."""

    first_s: float = Field(default=2.0, gt=0)
    """Longest after a first failure; drawn from the upper half, and doubled with each failure in a row."""
    max_s: float = Field(default=300.0, gt=0)
    """Longest of all."""

    @model_validator(mode="after")
    def _grows(self) -> RetryConfig:
        if self.max_s < self.first_s:
            raise ValueError(f"max_s is {self.max_s}; it must not be below first_s ({self.first_s})")
        return self


def _policy_exists(name: str) -> str:
    if name not in plugins.available():
        raise PydanticCustomError("unknown_policy", "{problem}", {"problem": plugins.unknown(name)})
    return name


def _options_fit(options: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
    """Checked here, so that a mistake is found when the file is read; without options no policy is imported."""
    name = info.data.get("name")
    if options and name is not None:
        try:
            plugins.options_of(name, options)
        except InvalidConfiguration as problem:
            raise ValueError(problem.message) from problem
    return options


def _checkpoint_fits(checkpoint: str, info: ValidationInfo) -> str:
    """Of a policy that starts from nothing a checkpoint would be ignored, and who named it would not know."""
    name = info.data.get("name")
    if checkpoint != "builtin" and name is not None and name not in COMBINED:
        raise ValueError(f"policy {name} starts from no checkpoint; {', '.join(COMBINED)} do")
    return checkpoint


class PolicyConfig(Tree):
    """Which policy decides."""

    name: Annotated[str, AfterValidator(_policy_exists)] = "dl2"
    """As `fedsched policy list` shows it; any installed package can add to those."""
    options: Annotated[dict[str, Any], AfterValidator(_options_fit)] = {}
    """What the policy itself can be told; each has options of its own, or none."""
    checkpoint: Annotated[str, AfterValidator(_checkpoint_fits)] = "builtin"
    """Path of the first weights, or `builtin` for those that ship with the package; for `learned_speed` of its first
    statistics of speeds, and with `scratch` it begins with none."""
    fallback: Literal["drf", "fifo", "srtf", "optimus"] = "drf"
    """Decides when the policy is late or its answer cannot be used."""
    seed: int = 0
    explore: bool = True
    """Sample actions (needed to learn on line) instead of taking the likeliest."""


class OwnTrackConfig(Tree):
    """How a cluster learns by itself beside the federation: the same words as for rounds, see `RoundConfig`."""

    batch_size: int = Field(default=256, ge=1)
    samples_min: int = Field(default=32, ge=1)
    learning_rate: float = Field(default=1e-4, gt=0)
    half_after: float | None = Field(default=None, gt=0)


SIMULATED = ("dl2_drf", "dl2_fifo", "dl2_optimus", "dl2_srtf", "dl2_tetris", "lower_bound", "oracle_greedy")
"""Policies that only simulations can ask: they know the true speeds, or fill an empty cluster in every slot."""


def _decides_live(policy: PolicyConfig) -> PolicyConfig:
    """Asked live, such a policy answers in no slot, and who compares it with others sees its fallback."""
    if policy.name in SIMULATED:
        raise ValueError(f"policy {policy.name} is for simulations only; `fedsched policy list` shows which are not")
    return policy


LivePolicy = Annotated[PolicyConfig, AfterValidator(_decides_live)]
"""Of an agent."""


class PromotionConfig(Tree):
    """What an agent does with new versions that the federation makes of its policy."""

    accept: Literal["shadow", "at_once", "own_track"] = "shadow"
    """`shadow`: compare each with the one that decides, and promote it if it does no harm; `at_once`: promote all;
    `own_track`: promote all, and learn alone beside it: what was learnt alone decides where the federation's does harm
    compared with it. For `dl2` and `set`; any other policy takes it for `at_once`."""
    own: OwnTrackConfig = OwnTrackConfig()
    """How the cluster learns alone, with `own_track`."""
    margin: float = Field(default=0.02, ge=0, lt=1)
    """So much worse, by estimated progress, still counts as no harm."""
    slots_min: int = Field(default=20, ge=2)
    """Slots in which both were asked, before anything is concluded."""
    slots_max: int = Field(default=320, ge=2)
    """What has not shown by then that it does no harm is refused; with `own_track` whichever was better until then, by
    estimate, decides."""

    @model_validator(mode="after")
    def _slots_fit(self) -> PromotionConfig:
        if self.slots_max < self.slots_min:
            raise ValueError(f"slots_max is {self.slots_max}; it must be at least slots_min ({self.slots_min})")
        return self

    def rule(self) -> AcceptRule:
        """The same for the core."""
        by_estimate = self.accept == "own_track"
        return AcceptRule(self.accept, GateRule(self.margin, self.slots_min, self.slots_max, by_estimate=by_estimate))


class TracingConfig(Tree):
    """Where spans go: to an OTLP endpoint when one is set, else to a JSON-lines file."""

    endpoint: Address | Literal[""] = ""
    file: str = ""


class StoreConfig(Tree):
    """The etcd server; without an address `up` starts one."""

    address: Address | None = None


COMBINED = ("dl2", "learned_speed", "set")
"""The policies that clusters can learn together: by gradients of weights; `learned_speed` by statistics of speeds."""


class RoundConfig(Tree):
    """When and how clusters' gradients are combined."""

    interval_s: float = Field(default=60.0, gt=0)
    quorum: int = Field(default=1, ge=1)
    """Fewest updates that make a round count."""
    asked_max: int | None = Field(default=None, ge=1)
    """Most clusters that one round asks, in turn; all unless it is given. With 1, and as many times the rounds, every
    cluster's gradient is a step of its own: more steps from the same decisions, each of them less sure."""
    deadline_s: float = Field(default=10.0, gt=0)
    """After it the round closes with what has come."""
    batch_size: int = Field(default=256, ge=1)
    """Decisions that each agent's gradient is computed from."""
    samples_min: int = Field(default=32, ge=1)
    """The very first round is held as soon as a quorum of agents has so many; later ones follow the interval."""
    learning_rate: float = Field(default=1e-4, gt=0)
    half_after: float | None = Field(default=None, gt=0)
    """Where it is given, the learning rate is that of one cluster's gradient: a round of eight steps eight times as
    far, and after so many gradients half as far, after twice as many a third, and so on. None: all rounds step alike.
    """
    norm_max: float = Field(default=100.0, gt=0)
    """An update whose gradient norm is above this is refused."""
    combine: Literal["weighted_mean", "trimmed_mean"] = "weighted_mean"
    """How gradients become one; the trimmed mean bears a few clusters that send nonsense."""
    trim_fraction: float = Field(default=0.2, ge=0, lt=0.5)
    """Share of the updates that the trimmed mean leaves out at either end of each coordinate."""

    @model_validator(mode="after")
    def _a_quorum_is_asked(self) -> RoundConfig:
        if self.asked_max is not None and self.asked_max < self.quorum:
            raise ValueError(f"asked_max is {self.asked_max}; it must be at least quorum ({self.quorum})")
        return self

    def rules(self, samples_min: int) -> RoundRules:
        """The same for the core.

        Args:
            samples_min: that what is combined asks for.
        """
        return RoundRules(
            self.interval_s, self.quorum, self.deadline_s, samples_min, self.norm_max, asked_max=self.asked_max
        )


class CoordinatorConfig(Tree):
    """What the coordinator of each job takes of a node, beside the job's own tasks. It keeps books and moves no
    parameters."""

    cpus: float = Field(default=0.1, ge=0, le=CPUS_MAX)
    """Slurm gives whole processors, so there it is one at least."""
    memory_gb: float = Field(default=0.5, ge=0, le=MEMORY_MAX_GB)

    def needs(self) -> Resources:
        """As the scheduler counts it."""
        return Resources(cpu_milli=round(self.cpus * 1000), memory_mib=round(self.memory_gb * 1024))


class AnyExecutorConfig(Tree):
    """What is said of every kind. How long a job's tasks may take to begin includes what they load before, libraries
    and data."""

    start_s_max: float = Field(default=300.0, gt=0)
    """From a job's start until its tasks train together, waiting for a place and pulling an image included."""
    resize_s_max: float = Field(default=120.0, gt=0)
    """From the order of a resize until it is carried out; then it is rolled back."""
    coordinator: CoordinatorConfig = CoordinatorConfig()


class LearningConfig(Tree):
    """How DL2 learns from its own decisions, with a switch for each of its paper's ablations.

    The policy `set` has a recipe of its own, of which only the memory can be chosen.
    """

    exploration: bool = True
    """Whether job-aware rules choose in the network's place now and then, while it learns."""
    replay: Literal["prioritised", "plain", "off"] = "prioritised"
    """How the batch is drawn from what is remembered: by surprise, evenly, or only the newest of it is remembered."""
    memory: int = Field(default=8192, ge=1, le=1_000_000)
    """Decisions that are remembered."""
    baseline: Literal["value", "mean"] = "value"
    """What a reward is compared with: the value network's guess, or the mean of what is remembered."""
    entropy_weight: float = Field(default=0.1, ge=0)
    """Of the bonus for staying undecided, which is a mean over all actions."""
    reward: Literal["slot", "job"] = "slot"
    """What a choice earns: the progress of all jobs in its slot, or of the job that it was about; void then earns the
    mean over jobs."""
    discount: float = Field(default=0.0, ge=0, lt=1)
    """What a later slot's reward counts, per slot; 0, as in DL2's code: a choice earns what its own slot brings."""

    def capacity(self, batch_size: int) -> int:
        """Decisions to remember where gradients are over `batch_size`."""
        return min(self.memory, batch_size) if self.replay == "off" else self.memory


class LocalExecutorConfig(AnyExecutorConfig):
    """Tasks are processes of the agent's machine; its nodes are named shares of it."""

    kind: Literal["local"] = "local"
    pin_cores: bool = False
    """Keep each task to as many cores as it was given; for a cluster that has the machine to itself."""
    gpus: tuple[Annotated[int, Field(ge=0)], ...] | None = None
    """The machine's GPUs that the cluster may use, by number; all unless they are given."""
    cgroup: str = Field(default="", pattern=ABSOLUTE_OR_EMPTY)
    """Directory of the cgroup (version 2) below which each task gets one with its limits; without it the agent's own,
    or the one around it, if one of them may be used so."""
    start_s_max: float = Field(default=120.0, gt=0)
    resize_s_max: float = Field(default=60.0, gt=0)
    coordinator: CoordinatorConfig = CoordinatorConfig(cpus=0.0, memory_gb=0.0)
    """Not counted unless it is given: coordinators are processes beside the agent, as the agent itself is."""


class SlurmExecutorConfig(AnyExecutorConfig):
    """Each task is a batch job; nodes bear the names that Slurm gives them."""

    kind: Literal["slurm"]
    directory: Path
    """Lies on a file system that all nodes share: orders, logs and checkpoints."""
    partition: str = ""
    account: str = ""
    options: tuple[str, ...] = ()
    """Further options of `sbatch`, as they are."""
    python: str = ""
    """The interpreter that has fedsched, on the nodes; the agent's own unless it is given."""


class TolerationConfig(Tree):
    """As in a pod: which taints of nodes do not keep tasks away. Without a key, or an effect, it is any."""

    key: str = ""
    operator: Literal["Equal", "Exists"] = "Equal"
    value: str = ""
    effect: Literal["", "NoSchedule", "PreferNoSchedule", "NoExecute"] = ""

    @model_validator(mode="after")
    def _says_something(self) -> TolerationConfig:
        if self.operator == "Exists" and self.value:
            raise ValueError("operator Exists takes no value")
        if self.operator == "Equal" and not self.key:
            raise ValueError("it needs a key, or operator Exists for all of them")
        return self


class KubernetesExecutorConfig(AnyExecutorConfig):
    """Each task is a pod; nodes bear the names of their label `kubernetes.io/hostname`."""

    kind: Literal["kubernetes"]
    image: str = Field(min_length=1)
    """Holds fedsched and what the jobs need."""
    directory: Path
    """Lies on the volume, which the agent has mounted at the same place: orders, logs and checkpoints."""
    namespace: str = "default"
    claim: str = ""
    """The persistent volume claim with the directory; without one `mount` is a directory of every node."""
    mount: str = Field(pattern=ABSOLUTE)
    """Where the volume is mounted, in pods as for the agent."""
    kubeconfig: str = ""
    """Leads to the cluster; without it the one that the agent runs in, or else kubectl's own."""
    context: str = ""
    python: str = "python"
    """The interpreter in the image."""
    service_account: str = ""
    node_selector: dict[str, str] = {}
    tolerations: tuple[TolerationConfig, ...] = ()
    """Nodes with other taints NoSchedule or NoExecute get no tasks, and are not counted."""

    @model_validator(mode="after")
    def _directory_is_mounted(self) -> KubernetesExecutorConfig:
        if not self.directory.is_relative_to(self.mount):
            raise ValueError(
                f"directory is {self.directory}; it must lie below mount ({self.mount}), or pods do not see it"
            )
        return self


class RayExecutorConfig(AnyExecutorConfig):
    """Each task is an actor; nodes bear the names, host names or addresses that Ray gives them."""

    kind: Literal["ray"]
    directory: Path
    """Lies on a file system that all nodes share: orders, logs and checkpoints."""
    address: str = "auto"
    """`host:port` of the head, or `auto` for the Ray cluster that the agent's machine is part of."""


ExecutorConfig = Annotated[
    Annotated[LocalExecutorConfig, Tag(f"{KIND}local")]
    | Annotated[SlurmExecutorConfig, Tag(f"{KIND}slurm")]
    | Annotated[KubernetesExecutorConfig, Tag(f"{KIND}kubernetes")]
    | Annotated[RayExecutorConfig, Tag(f"{KIND}ray")],
    Discriminator(
        kind_or("local"),
        custom_error_type="unknown_kind",
        custom_error_message="there is no such kind of executor; kubernetes, local, ray or slurm was expected",
    ),
]
"""Where a cluster's tasks run; `kind` says which of the classes it is."""


class AgentConfig(Tree):
    """One agent process."""

    shown_in: ClassVar[str] = "deployments/local/agent.yaml"

    cluster: Name
    state_dir: Path
    etcd: Address
    aggregator: Address | None = None
    nodes: Nodes
    executor: ExecutorConfig = LocalExecutorConfig()
    slot: SlotConfig = SlotConfig()
    retry: RetryConfig = RetryConfig()
    policy: LivePolicy = PolicyConfig()
    learning: LearningConfig = LearningConfig()
    """Where an aggregator is named, and the policy can be taught."""
    promotion: PromotionConfig = PromotionConfig()
    tracing: TracingConfig = TracingConfig()
    lease_ttl_s: LeaseLength = 10
    preempt: bool = False
    """Whether a running job may be stopped to make room; else it keeps at least its minimum."""
    labels: dict[str, str] = {}


class ControllerConfig(Tree):
    """One controller process."""

    shown_in: ClassVar[str] = "deployments/local/controller.yaml"

    listen: Address
    etcd: Address
    state_dir: Path
    tracing: TracingConfig = TracingConfig()
    lease_ttl_s: LeaseLength = 10
    history_after_s: float = Field(default=3600.0, ge=0)
    """A job that ended longer ago than this moves from etcd to the history file."""


class AggregatorConfig(Tree):
    """One aggregator process."""

    shown_in: ClassVar[str] = "deployments/local/aggregator.yaml"

    listen: Address
    etcd: Address
    state_dir: Path
    rounds: RoundConfig = RoundConfig()
    policy: PolicyConfig = PolicyConfig()
    tracing: TracingConfig = TracingConfig()
    lease_ttl_s: LeaseLength = 10


class ClusterConfig(Tree):
    """One cluster of a local federation."""

    name: Name
    nodes: Nodes
    policy: LivePolicy = PolicyConfig()
    labels: dict[str, str] = {}


class FederationConfig(Tree):
    """A whole federation on this machine, as `fedsched up` starts it."""

    shown_in: ClassVar[str] = "deployments/local/federation.yaml"

    name: Name = "local"
    controller: Address = "127.0.0.1:7480"
    aggregator: Address = "127.0.0.1:7481"
    etcd: StoreConfig = StoreConfig()
    slot: SlotConfig = SlotConfig(length_s=2.0, decision_s_max=1.0)
    rounds: RoundConfig = RoundConfig(interval_s=20.0, quorum=2)
    learning: LearningConfig = LearningConfig()
    promotion: PromotionConfig = PromotionConfig()
    tracing: TracingConfig = TracingConfig()
    lease_ttl_s: LeaseLength = 5
    clusters: tuple[ClusterConfig, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _names_are_unique(self) -> FederationConfig:
        names = [cluster.name for cluster in self.clusters]
        for name in sorted(set(names)):
            if names.count(name) > 1:
                raise ValueError(f"cluster {name} is defined {names.count(name)} times; names must be unique")
        return self

    @model_validator(mode="after")
    def _addresses_can_be_found(self) -> FederationConfig:
        addresses = [self.controller, self.aggregator, *filter(None, [self.etcd.address])]
        for address in addresses:
            if address.endswith(":0"):
                raise ValueError(f"{address} names no port; clients must know where to find it")
            if addresses.count(address) > 1:
                raise ValueError(f"{address} is given {addresses.count(address)} times; each process needs its own")
        return self


C = TypeVar("C", bound=BaseModel)


def load(kind: type[C], path: Path, context: Mapping[str, Any] | None = None) -> C:
    """Read a YAML file as `kind`; its validators may look at `context`.

    Raises:
        InvalidConfiguration: the file cannot be read or has problems; all of them are listed.
    """
    return parse(kind, read(path), str(path), context)


def read(path: Path) -> Any:
    """The plain data in a YAML file; an empty mapping where the file is empty.

    Raises:
        InvalidConfiguration: it cannot be read.
    """
    plain = yamlfile.read(path)
    return plain if plain is not None else {}


def parse(kind: type[C], plain: Any, origin: str, context: Mapping[str, Any] | None = None) -> C:
    """Turn plain data into `kind`; `origin` names it in errors, `context` is for its validators.

    Raises:
        InvalidConfiguration: there are problems; all of them are listed.
    """
    try:
        return kind.model_validate(plain, context=dict(context or {}))
    except ValidationError as problem:
        lines = problems(kind, problem)
        raise InvalidConfiguration(
            f"{origin} has {len(lines)} problem(s):\n" + "\n".join(f"  - {line}" for line in lines),
            f"correct the lines above{_compare(kind)}",
        ) from problem


def _compare(kind: type[BaseModel]) -> str:
    return f"; {kind.shown_in} is such a file" if issubclass(kind, Tree) and kind.shown_in else ""
