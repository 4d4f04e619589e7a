"""One cluster's agent: puts the scheduling core and its loop between the live edges and keeps them running."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from fedsched import __version__
from fedsched.adapters.attach import AttachClient, ReadLogs
from fedsched.adapters.etcd import EtcdStore
from fedsched.adapters.lease import LeaseKeeper
from fedsched.agent.assignments import AssignmentWatch, assigned
from fedsched.agent.deciding import DecidingPolicy
from fedsched.agent.inbox import Inbox, Stop
from fedsched.agent.ledger import StoreLedger, taken_over
from fedsched.agent.logs import read_logs
from fedsched.agent.membership import agent_id, take_term
from fedsched.agent.nodes import NodeWatch
from fedsched.agent.remembering import PolicyMemory
from fedsched.agent.ticking import Ticker
from fedsched.agent.tracing import JobTraces
from fedsched.agent.versions import LiveVersions
from fedsched.config import AgentConfig, RoundConfig
from fedsched.core.cluster import ClusterRecord
from fedsched.core.commands import Command, SaveJob
from fedsched.core.decision import Policy
from fedsched.core.events import (
    Event,
    JobAdopted,
    JobAssigned,
    LeaseLost,
    LeaseRegained,
    PolicyDecided,
    SlotStarted,
    TermTaken,
)
from fedsched.core.ids import ClusterName, JobId
from fedsched.core.job import ACTIVE
from fedsched.core.scheduler import Scheduler
from fedsched.core.state import SchedulerConfig
from fedsched.executor import backends
from fedsched.executor.jobs import JobExecutor
from fedsched.executor.orders import Programs
from fedsched.federation.source import Hello
from fedsched.learn import kinds
from fedsched.learn.contributing import ClusterLearning
from fedsched.learn.learner import ClusterLearner
from fedsched.policy import guardrail, registry
from fedsched.policy.disciplines import ranks
from fedsched.policy.learnable import Learnable
from fedsched.process import keep_to_one_core, on_signal
from fedsched.runtime import codec, keys
from fedsched.runtime.journal import Journal
from fedsched.runtime.loop import Loop
from fedsched.runtime.ports import LogPiece, ValueIs

if TYPE_CHECKING:
    from fedsched.adapters.federation_client import FederationClient
    from fedsched.learn.sharing import SpeedSharing

_log = logging.getLogger(__name__)


def main(config: AgentConfig) -> int:
    """Serve the cluster until a signal ends the process; its jobs keep running after that.

    Raises:
        StoreUnavailable: etcd does not answer at the start.
        Conflict: another agent serves the cluster, now or since.
        CorruptCheckpoint: the policy's weights cannot be used.
    """
    store = EtcdStore(config.etcd)
    inbox = Inbox()
    try:
        with on_signal(lambda: inbox.post(Stop())):
            agent = Agent(config, store, inbox)
            keep_to_one_core()  # by now the policy has loaded what it computes with
            try:
                stop = agent.run()
            finally:
                agent.close()
    finally:
        store.close()
    if stop.error is not None:
        raise stop.error
    return 0


class Agent:
    """All parts of one agent. `run` owns the loop; `close` lets go of the jobs without touching them.

    Args:
        programs: what the executor runs beside the users' commands; by default the product's own.
    """

    def __init__(self, config: AgentConfig, store: EtcdStore, inbox: Inbox, programs: Programs | None = None) -> None:
        self._config = config
        self._programs = programs or Programs()
        self._cluster = ClusterName(config.cluster)
        self._inbox = inbox
        # Who does not learn has no reason to explore.
        learns = config.aggregator is not None
        policy = kinds.make(config.policy, config.learning) if learns else registry.make(config.policy)
        self._policy = policy
        nodes = tuple(node.node() for node in config.nodes)
        self.scheduler = Scheduler(
            SchedulerConfig(
                self._cluster,
                config.slot.length_s,
                keep_running=not config.preempt,
                ranked=ranks(policy),
                retry_first_s=config.retry.first_s,
                retry_max_s=config.retry.max_s,
            ),
            nodes,
        )
        self._agent_id = agent_id()
        self._started_s = time.time()
        self._decisions, self._fallbacks, self._fallback = 0, 0, ""
        self._term = take_term(store, self._cluster, lease_ttl_s=config.lease_ttl_s)
        _log.info("serving cluster %s under term %d with policy %s", self._cluster, self._term, policy.name)
        with contextlib.ExitStack() as undo:
            self._build(config, store, policy, undo)
            self._parts = undo.pop_all()

    @property
    def policy(self) -> Policy:
        """What decides, bare."""
        return self._policy

    def run(self) -> Stop:
        """Drive the loop until the agent is told to stop."""
        return self._inbox.drain(self._loop)

    def close(self) -> None:
        """Stop all parts, newest first."""
        self._parts.close()

    def _build(self, config: AgentConfig, store: EtcdStore, policy: Policy, undo: contextlib.ExitStack) -> None:
        ledger = StoreLedger(store, self._cluster, self._term, self._inbox)
        undo.callback(ledger.close)
        versions = LiveVersions(config, store, policy, self._term)
        undo.callback(versions.close)
        learner = self._teacher(policy, versions)
        deciding = DecidingPolicy(
            self._inbox.post,
            policy,
            registry.heuristic(config.policy.fallback),
            decision_s_max=config.slot.decision_s_max,
            learner=learner,
            remember=PolicyMemory(config.state_dir / "policy-state", policy).keep,
            shadow=versions.look,
        )
        undo.callback(deciding.close)
        root = backends.directory(config)
        executor = JobExecutor(
            post=self._inbox.post,
            clock=time.time,
            root=root,
            tasks=backends.open_tasks(config.executor, config.cluster, root, self._programs),
            trace_file=config.tracing.file,
            trace_endpoint=config.tracing.endpoint,
            join_deadline_s=config.executor.start_s_max,
            scale_deadline_s=config.executor.resize_s_max,
            programs=self._programs,
        )
        undo.callback(executor.close)
        self._coordinator = executor.coordinator
        journal = Journal(config.state_dir / "journal.jsonl")
        undo.callback(journal.close)
        journal.begin(self.scheduler.state.config, tuple(self.scheduler.state.nodes.values()))
        self._loop = Loop(
            self.scheduler,
            ledger,
            executor,
            deciding,
            journal,
            observers=(JobTraces(self._cluster, lambda: deciding.last_span), self._count, self._publish),
        )
        self._keeper = self._register(store)
        undo.callback(self._keeper.close)
        self._loop.step(TermTaken(time.time(), self._term, assigned(store, self._cluster, executor.taken)))
        undo.callback(AssignmentWatch(store, self._cluster, executor.taken, self._inbox.post).close)
        undo.callback(NodeWatch(tuple(self.scheduler.state.machines), executor.closed, self._inbox.post).close)
        undo.callback(AttachClient(store, self._cluster, self._agent_id, self._read_logs(executor)).close)
        exchange = self._exchange(policy, learner, versions)
        if exchange is not None and config.aggregator is not None:
            undo.callback(self._join_federation(config.aggregator, exchange, versions).close)
        undo.callback(Ticker(config.slot.length_s, self._inbox.post).close)

    def _register(self, store: EtcdStore) -> LeaseKeeper:
        key = keys.cluster(self._cluster)
        keeper = LeaseKeeper(
            store,
            self._config.lease_ttl_s,
            {key: codec.dumps(self._record())},
            guards=(ValueIs(keys.term(self._cluster), str(self._term).encode()),),
            on_lost=self._on_lost,
            on_regained=lambda: self._inbox.post(LeaseRegained(time.time())),
        )
        keeper.start()
        return keeper

    def _on_lost(self) -> None:
        if self._keeper.refused:
            self._inbox.post(Stop(taken_over(self._cluster, self._term)))
        else:
            _log.warning("the cluster's lease is lost: what runs goes on, nothing new is placed until etcd is back")
            self._inbox.post(LeaseLost(time.time()))

    def _count(self, event: Event, commands: Sequence[Command]) -> None:
        """Note who decides."""
        if isinstance(event, PolicyDecided):
            self._decisions += 1
            self._fallbacks += bool(event.decision.fallback)
            self._fallback = event.decision.fallback

    def _publish(self, event: Event, commands: Sequence[Command]) -> None:
        """What the federation may know of this cluster: at every slot, and at once when a job changes its size.

        A controller that places by an old record sends two jobs to the place of one.
        """
        moved = any(isinstance(command, SaveJob) and command.transition for command in commands)
        fell_back = isinstance(event, PolicyDecided) and bool(event.decision.fallback)
        if moved or fell_back or isinstance(event, SlotStarted | JobAssigned | TermTaken | JobAdopted):
            self._keeper.update(keys.cluster(self._cluster), codec.dumps(self._record()))

    def _record(self) -> ClusterRecord:
        state = self.scheduler.state
        jobs = list(state.jobs.values())
        running = sum(1 for job in jobs if job.status.phase in ACTIVE)
        host, pid, _ = self._agent_id.split("/", 2)
        policy, policy_version = guardrail.identity(self._policy)
        return ClusterRecord(
            name=self._cluster,
            term=self._term,
            agent_id=self._agent_id,
            agent_version=__version__,
            host=host,
            pid=int(pid),
            nodes=state.machines,
            usage=state.usage(),
            queued=len(jobs) - running,
            running=running,
            policy=policy,
            policy_version=policy_version,
            slot=state.slot,
            started_s=self._started_s,
            labels=tuple(sorted(self._config.labels.items())),
            decisions=self._decisions,
            fallbacks=self._fallbacks,
            fallback=self._fallback,
            coordinator=self._coordinator,
        )

    def _read_logs(self, executor: JobExecutor) -> ReadLogs:
        def read(job_id: JobId, follow: bool, before: Mapping[str, int]) -> Iterator[LogPiece]:
            is_live = partial(self.scheduler.state.jobs.__contains__, job_id)
            return read_logs(partial(executor.log_files, job_id), is_live, follow, before)

        return read

    def _teacher(self, policy: Policy, versions: LiveVersions) -> ClusterLearner | None:
        """What learns from this cluster's slots."""
        config = self._config
        # Who takes part in no federation has nothing to learn beside.
        promotion = config.promotion if config.aggregator is not None else kinds.AT_ONCE
        learner = kinds.learner_for(policy, config.learning, RoundConfig().batch_size, promotion)
        if learner is not None and promotion.accept == "own_track":
            from fedsched.learn.own_track import OwnTrack  # torch takes seconds to load

            if isinstance(learner, OwnTrack) and isinstance(policy, Learnable):
                learner.join(policy, versions.offered)
        return learner

    def _exchange(
        self, policy: Policy, learner: ClusterLearner | None, versions: LiveVersions
    ) -> ClusterLearning | SpeedSharing | None:
        """What this cluster can give to others and take from them."""
        if isinstance(policy, Learnable) and learner is not None:
            return ClusterLearning(self._cluster, policy, learner, versions.offered)
        if policy.name == registry.LEARNED_SPEED:
            from fedsched.learn.sharing import SpeedSharing  # its policy's solver takes seconds to load
            from fedsched.policy.learned_speed import LearnedSpeed

            assert isinstance(policy, LearnedSpeed), "the name is this class's"
            return SpeedSharing(self._cluster, policy, self._term)
        return None

    def _join_federation(
        self, aggregator: str, exchange: ClusterLearning | SpeedSharing, versions: LiveVersions
    ) -> FederationClient:
        from fedsched.adapters.federation_client import FederationClient  # Flower takes a second to load

        def hello() -> Hello:
            return Hello(self._cluster, self._term, __version__, self._policy.name, exchange.version, exchange.samples)

        client = FederationClient(
            aggregator, hello=hello, learner=exchange, on_policy=exchange.take, on_requested=versions.requested
        )
        versions.take_requests(client.request)
        return client
