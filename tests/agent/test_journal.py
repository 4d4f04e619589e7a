"""What an agent records of a live run, the simulator repeats: the same core and loop in virtual time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedsched.core.commands import ScaleJob
from fedsched.core.job import JobPhase
from fedsched.runtime import journal
from fedsched.sim.replaying import replay
from tests.agent.live_agent import live_agent

pytestmark = [pytest.mark.live, pytest.mark.timeout(180)]


def test_a_live_run_is_repeated_in_virtual_time_to_the_last_command(etcd_address: str, tmp_path: Path) -> None:
    """One core, one loop: what was simulated is what is deployed. Jobs come, grow, shrink, end and are cancelled, and
    the agent is restarted in between."""
    config: dict[str, Any] = {
        "policy": {"name": "optimus"},
        "nodes": [{"name": name, "cpus": 3, "memory_gb": 4} for name in ("n1", "n2")],
    }
    with live_agent(etcd_address, tmp_path, "journal", steps=100, **config) as agent:
        agent.assign("a", workers=(1, 4), ps=(1, 2))
        agent.wait("a", JobPhase.RUNNING)
        agent.assign("b", workers=(1, 4), ps=(1, 2))
        agent.wait("b", JobPhase.RUNNING)
        agent.assign("c", workers=(2, 2))
        agent.cancel("c")
        agent.wait("c", JobPhase.CANCELLED)
        assert agent.wait("a", JobPhase.SUCCEEDED).resizes
    with live_agent(etcd_address, tmp_path, "journal", steps=100, **config) as agent:
        agent.wait("b", JobPhase.SUCCEEDED)
        recorded = agent.journal
    commands = [command for step in journal.steps(recorded) for command in step.commands]
    assert any(isinstance(command, ScaleJob) for command in commands)

    found = replay(recorded)
    assert (found.agents, found.skipped) == (2, 0)
    assert found.commands == len(commands)
    assert found.decisions > 3


def test_a_live_run_of_ranks_with_preemption_is_repeated(etcd_address: str, tmp_path: Path) -> None:
    config: dict[str, Any] = {"policy": {"name": "las2d", "options": {"limits": [0.5, 1.5]}}, "preempt": True}
    with live_agent(etcd_address, tmp_path, "journal-ranks", steps=25, **config) as agent:
        for name in "abc":
            agent.assign(name, workers=(2, 2))
        for name in "abc":
            agent.wait(name, JobPhase.SUCCEEDED)
        assert any(step.target is JobPhase.PREEMPTING for name in "abc" for step in agent.transitions(name))
        recorded = agent.journal
    assert replay(recorded).skipped == 0
