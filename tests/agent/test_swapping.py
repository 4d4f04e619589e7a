"""Two jobs that fill a cluster change accelerator types live: stopped with a checkpoint, and started again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedsched.core.job import JobPhase, Reason
from fedsched.sim.replaying import replay
from tests.agent.live_agent import live_agent
from tests.waiting import eventually

pytestmark = [pytest.mark.live, pytest.mark.timeout(180)]


def test_gavels_rounds_swap_two_rigid_jobs_between_types(etcd_address: str, tmp_path: Path) -> None:
    """Both have half of the time on each type; without a swap each would stay for good where it began."""
    config: dict[str, Any] = {
        "policy": {"name": "gavel_maxmin", "options": {"aware": False}},
        "preempt": True,
        "nodes": [
            {"name": kind, "cpus": 1, "memory_gb": 4, "accelerator": kind, "gpus": 1} for kind in ("k80", "v100")
        ],
        "slot": {"length_s": 3.0, "decision_s_max": 1.0},
    }
    with live_agent(etcd_address, tmp_path, "swapping", **config) as agent:
        for name in "ab":
            agent.assign(name)
        for name in "ab":
            agent.wait(name, JobPhase.RUNNING)
        first = {name: agent.status(name).placement[0].node for name in "ab"}
        assert sorted(first.values()) == ["k80", "v100"]

        def swapped() -> bool:
            now = {name: agent.status(name) for name in "ab"}
            return all(
                status.phase is JobPhase.RUNNING and status.placement[0].node != first[name]
                for name, status in now.items()
            )

        eventually(swapped, "both run on the other type", 60.0)
        for name in "ab":
            stops = [step for step in agent.transitions(name) if step.target is JobPhase.PREEMPTING]
            assert stops[0].reason is Reason.PREEMPTED
            assert "where others leave for its own place" in stops[0].message
            assert agent.status(name).failures == 0
        recorded = agent.journal
    assert replay(recorded).skipped == 0
