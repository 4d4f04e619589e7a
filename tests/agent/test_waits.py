"""How long a cluster's tasks may take to begin is its operator's word: the agent passes it on to what starts them."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedsched.core.job import JobPhase, Reason
from tests.agent.live_agent import live_agent
from tests.executor.cluster import STAND_IN

pytestmark = [pytest.mark.live, pytest.mark.timeout(180)]


def test_a_job_that_does_not_begin_in_time_fails_and_names_the_setting(etcd_address: str, tmp_path: Path) -> None:
    """A script that loads for longer than its cluster waits must not be hunted for a fault that it does not have."""
    executor = {"start_s_max": 3, "resize_s_max": 2}
    with live_agent(etcd_address, tmp_path, "waits", executor=executor) as agent:
        agent.assign("late", run=f"python {STAND_IN} never-join", max_attempts=1)
        failed = agent.wait("late", JobPhase.FAILED)

    assert failed.reason is Reason.START_FAILED
    assert "worker-0 did not join the job within 3 s" in failed.message
    assert "executor.start_s_max" in failed.message


def test_a_worker_that_comes_too_late_is_given_up_and_the_job_trains_on(etcd_address: str, tmp_path: Path) -> None:
    executor = {"start_s_max": 60, "resize_s_max": 2}
    with live_agent(etcd_address, tmp_path, "waits", executor=executor, policy={"name": "drf"}) as agent:
        agent.assign("first")
        agent.wait("first", JobPhase.RUNNING)
        agent.assign("grows", run=f"python {STAND_IN} never-join-if-added", workers=(1, 2))
        agent.wait("grows", JobPhase.RUNNING)
        agent.cancel("first")
        agent.wait("grows", JobPhase.RESIZING)
        running = agent.wait("grows", JobPhase.RUNNING)
        told = agent.transitions("grows")[-1]

    assert (running.attempt, running.allocation.workers, running.resizes) == (1, 1, 0)
    assert told.source is JobPhase.RESIZING
    assert "not all joined in time" in told.message, told
