"""An agent as it is composed for real, in a thread of the test: etcd, local processes, threads, clocks.

Only the programs inside a job are small stand-ins, which start in a moment.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedsched.adapters.etcd import EtcdStore
from fedsched.agent.app import Agent
from fedsched.agent.inbox import Inbox, Stop
from fedsched.config import AgentConfig, parse
from fedsched.core.cluster import Assignment
from fedsched.core.decision import Policy
from fedsched.core.ids import ClusterName, JobId
from fedsched.core.job import JobPhase, JobSpec, JobStatus, Range, Transition
from fedsched.core.resources import Resources
from fedsched.executor.local import shut_down
from fedsched.runtime import codec, keys
from fedsched.runtime.ports import Put
from tests.executor.cluster import STAND_IN, stand_in_programs
from tests.waiting import eventually

WAIT_S = 40.0


class LiveAgent:
    """A running agent, and what the controller would write for it and read of it."""

    def __init__(self, store: EtcdStore, config: AgentConfig, prefix: str, steps: int) -> None:
        self.store = store
        self.cluster = ClusterName(config.cluster)
        self.journal = config.state_dir / "journal.jsonl"
        self._prefix = prefix
        self._inbox = Inbox()
        self._agent = Agent(config, store, self._inbox, stand_in_programs(steps))
        self._ended: list[Stop] = []
        self._thread = threading.Thread(target=self._run, name="live agent")
        self._thread.start()

    @property
    def policy(self) -> Policy:
        """What decides in the agent."""
        return self._agent.policy

    def _run(self) -> None:
        self._ended.append(self._agent.run())

    def assign(
        self, name: str, *, workers: tuple[int, int] = (1, 1), ps: tuple[int, int] = (0, 0), **fields: Any
    ) -> None:
        """Give the cluster a job, as the controller does."""
        job_id = JobId(f"{self._prefix}{name}")
        values: dict[str, Any] = {
            "job_id": job_id,
            "name": name,
            "run": f"python {STAND_IN} member",
            "workers": Range(*workers),
            "ps": Range(*ps),
            "worker_demand": Resources(1000, 64),
            "ps_demand": Resources(1000, 64),
            "epochs": 1000.0,
            "grace_s": 2.0,
            "submitted_s": time.time(),
        }
        spec = JobSpec(**(values | fields))
        status = JobStatus(job_id, JobPhase.DISPATCHED, cluster=self.cluster, seq=2)
        writes = (
            Put(keys.job_spec(job_id), codec.dumps(spec)),
            Put(keys.job_status(job_id), codec.dumps(status)),
            Put(keys.assignment(self.cluster, job_id), codec.dumps(Assignment(job_id))),
        )
        assert self.store.commit((), writes).ok

    def cancel(self, name: str) -> None:
        """The user wants the job's end."""
        job_id = JobId(f"{self._prefix}{name}")
        assignment = codec.dumps(Assignment(job_id, cancel=True))
        assert self.store.commit((), (Put(keys.assignment(self.cluster, job_id), assignment),)).ok

    def status(self, name: str) -> JobStatus:
        """As the store has it."""
        entry = self.store.get(keys.job_status(JobId(f"{self._prefix}{name}")))
        assert entry is not None
        return codec.loads(JobStatus, entry.value)

    def transitions(self, name: str) -> list[Transition]:
        """The job's life, as `fedsched events` shows it."""
        prefix = keys.job_transition(JobId(f"{self._prefix}{name}"), 0).rsplit("/", 1)[0] + "/"
        return [codec.loads(Transition, entry.value) for entry in self.store.list(prefix).entries]

    def wait(self, name: str, *phases: JobPhase) -> JobStatus:
        """The job's status once it is in one of these phases."""
        eventually(lambda: self.status(name).phase in phases, f"{name} is {' or '.join(phases)}", WAIT_S)
        return self.status(name)

    def stop(self) -> None:
        """End the agent as a signal does; its jobs run on."""
        self._inbox.post(Stop())
        self._thread.join(WAIT_S)
        self._agent.close()
        assert not self._thread.is_alive()
        assert [end.error for end in self._ended] == [None]


@contextmanager
def live_agent(
    etcd_address: str, home: Path, cluster: str, *, steps: int = 100_000, **config: Any
) -> Iterator[LiveAgent]:
    """An agent of this cluster, one node of two cores unless `config` says otherwise; its jobs end with it.

    Args:
        steps: after as many of its own steps, 20 a second, a job is done.
    """
    plain = {
        "cluster": cluster,
        "state_dir": str(home),
        "etcd": etcd_address,
        "nodes": [{"name": "n1", "cpus": 2, "memory_gb": 4}],
        "slot": {"length_s": 0.5, "decision_s_max": 0.4},
        "lease_ttl_s": 5,
        **config,
    }
    store = EtcdStore(etcd_address)
    try:
        agent = LiveAgent(store, parse(AgentConfig, plain, "the test"), f"{cluster}-", steps)
        try:
            yield agent
        finally:
            agent.stop()
            shut_down(home / "executor", grace_s=1.0)
    finally:
        store.close()
