"""A policy that cannot be used, live: jobs run by the heuristic, and everybody who looks is told."""

from __future__ import annotations

import json
import os
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from fedsched.core.cluster import ClusterRecord
from fedsched.core.decision import Budget, Decision, Observation
from fedsched.core.events import PolicyDecided
from fedsched.core.explain import explain
from fedsched.core.ids import JobId
from fedsched.core.job import JobPhase, JobSpec
from fedsched.core.routing import CandidateCluster
from fedsched.core.views import Job
from fedsched.policy import registry
from fedsched.runtime import codec, journal, keys
from tests.agent.live_agent import LiveAgent, live_agent
from tests.waiting import eventually

pytestmark = [pytest.mark.live, pytest.mark.timeout(180)]


class Asleep:
    """A policy whose weights lie on a disk that has gone to sleep."""

    name = "asleep"
    version = 3

    def __init__(self) -> None:
        self.awake = threading.Event()

    def decide(self, observation: Observation, budget: Budget) -> Decision:
        """Answer when nobody waits for it any more."""
        self.awake.wait()
        return Decision(observation.slot, (), self.name, self.version)


class Gone(BaseException):
    """No `Exception`, as asyncio's cancellation is none."""


class Wild:
    """Does in turn all that should not be done, until it is well again."""

    name = "wild"

    def __init__(self) -> None:
        self.well = False
        self.turn = 0

    @property
    def version(self) -> Any:
        """Nothing to rely on."""
        return 1 if self.well else "newest"

    def decide(self, observation: Observation, budget: Budget) -> Any:
        """Spend nothing, or answer as the heuristic would."""
        good = registry.heuristic("drf").decide(observation, budget)
        if self.well:
            return structs.replace(good, policy=self.name, version=1)
        self.turn += 1
        match self.turn % 7:
            case 0:
                raise Gone("\ud800" * 10_000)
            case 1:
                sys.exit(3)
            case 2:
                return structs.replace(good, version=np.int64(3))
            case 3:
                return structs.replace(good, notes=((view.job_id, object()) for view in observation.jobs))
            case 4:
                return structs.replace(good, policy=None)
            case 5:
                if not os.fork():
                    return good
                raise MemoryError
            case _:
                return {"allocations": good.allocations}


def record_of(agent: LiveAgent) -> ClusterRecord:
    entry = agent.store.get(keys.cluster(agent.cluster))
    assert entry is not None
    return codec.loads(ClusterRecord, entry.value)


def test_a_policy_that_is_too_slow_is_told_of_in_the_cluster_and_with_its_jobs(
    etcd_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cluster that quietly runs on its heuristic for months is what federated learning was meant to end."""
    asleep = Asleep()
    monkeypatch.setattr(registry, "make", lambda config: asleep)
    slot = {"length_s": 0.5, "decision_s_max": 0.2}
    with ExitStack() as stack:
        agent = stack.enter_context(live_agent(etcd_address, tmp_path, "slow-policy", slot=slot))
        stack.callback(asleep.awake.set)  # before the agent ends, which waits for its policy
        agent.assign("one")
        agent.wait("one", JobPhase.RUNNING)
        eventually(lambda: record_of(agent).fallbacks > 1, "the cluster's record counts the heuristic's decisions")
        record = record_of(agent)
        assert record.policy == "asleep"
        assert record.fallback == "policy asleep (version 3) did not answer within 0.2 s"
        assert record.fallbacks == record.decisions

        entry = agent.store.get(keys.job_spec(JobId("slow-policy-one")))
        assert entry is not None
        job = Job(codec.loads(JobSpec, entry.value), agent.status("one"))
        evidence = explain(job, [job], [CandidateCluster(agent.cluster, record, True)], 0.0).evidence
        assert any(
            "the heuristic decided its newest slot: policy asleep (version 3) did not" in line for line in evidence
        )
        agent.cancel("one")
        agent.wait("one", JobPhase.CANCELLED)
    answers = [json.loads(line) for line in agent.journal.read_text().splitlines() if "PolicyDecided" in line]
    assert {answer["event"]["decision"]["policy"] for answer in answers} == {"drf"}


def test_an_agent_outlives_a_policy_that_does_all_it_should_not_and_follows_it_again_once_it_is_well(
    etcd_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that ended, or a line of the journal that cannot be written, would end the agent, at each restart."""
    wild = Wild()
    monkeypatch.setattr(registry, "make", lambda config: wild)
    with live_agent(etcd_address, tmp_path, "wild-policy") as agent:
        agent.assign("one")
        agent.wait("one", JobPhase.RUNNING)
        eventually(lambda: wild.turn > 8, "it has done all of it", 60.0)
        record = record_of(agent)
        assert record.fallbacks == record.decisions
        assert record.fallback.startswith("policy without a name (version 0): ")
        wild.well = True
        eventually(lambda: record_of(agent).fallback == "", "the agent follows it again")
        assert (record_of(agent).policy, record_of(agent).policy_version) == ("wild", 1)
        agent.cancel("one")
        agent.wait("one", JobPhase.CANCELLED)
    last = [step.event for step in journal.steps(agent.journal) if isinstance(step.event, PolicyDecided)][-1]
    assert last.decision.policy == "wild"
