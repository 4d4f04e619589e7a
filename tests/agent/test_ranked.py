"""Every discipline live: the agent as it is composed, with etcd and real processes, keeps jobs in the order it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedsched.core.commands import AskPolicy
from fedsched.core.events import PolicyDecided
from fedsched.core.job import JobPhase, Reason
from fedsched.policy import plugins
from fedsched.policy.disciplines import Discipline
from fedsched.runtime import journal
from tests.agent.live_agent import LiveAgent, live_agent

pytestmark = [pytest.mark.live, pytest.mark.timeout(180)]

Job = dict[str, Any]
FIRST: dict[str, tuple[dict[str, Any], Job, Job]] = {
    # Of two jobs that wait, by options of the policy and what is said of the jobs, the second starts first.
    "sjf": ({}, {"expected_s": 900.0}, {"expected_s": 90.0}),
    "edf": ({}, {"deadline_s": 4e9}, {"deadline_s": 3e9}),
    "smallest": ({}, {"workers": (2, 2)}, {"workers": (1, 1)}),
}
STOPS: dict[str, tuple[dict[str, Any], Job, Job]] = {
    # The second takes the place of the first, which runs.
    "srtf": ({}, {"expected_s": 900.0}, {"expected_s": 90.0}),
    "srsf": ({}, {"expected_s": 900.0}, {"expected_s": 90.0}),
    "las": ({}, {}, {}),
    "las2d": ({"limits": [1.0]}, {}, {}),
    "gittins": ({"limits": [1.0], "sample": [2.0, 50.0]}, {}, {}),
    "edf": ({}, {"deadline_s": 4e9}, {"deadline_s": 3e9}),
    "smallest": ({}, {"workers": (2, 2)}, {"workers": (1, 1)}),
}


def test_every_discipline_is_tried_here() -> None:
    """One that is added must be shown to work live, too."""
    names = {name for name in plugins.available() if issubclass(plugins.load(name), Discipline)}
    assert names == {"fifo", *FIRST, *STOPS}


def asked_for_ranks_only(agent: LiveAgent) -> None:
    """What was asked and answered, by the agent's own journal."""
    steps = journal.steps(agent.journal)
    asked = [command for step in steps for command in step.commands if isinstance(command, AskPolicy)]
    assert asked
    assert all(question.ranks for question in asked)
    answers = [step.event.decision for step in steps if isinstance(step.event, PolicyDecided)]
    assert all(answer.ranking is not None and not answer.fallback for answer in answers)


@pytest.mark.parametrize("policy", ["fifo", *FIRST])
def test_the_first_in_order_starts_when_a_place_is_free(etcd_address: str, tmp_path: Path, policy: str) -> None:
    """The order of a queue is what users of such a policy count on; and each that waits is told why."""
    options, one, other = FIRST.get(policy, ({}, {}, {}))
    config: dict[str, Any] = {"policy": {"name": policy, "options": options}}
    with live_agent(etcd_address, tmp_path, f"first-{policy}", **config) as agent:
        # `smallest` looks at sizes only, so the one that holds the place must be the smallest of all.
        agent.assign("holder", workers=(2, 2) if policy != "smallest" else (1, 1), expected_s=1.0, deadline_s=1.0)
        agent.wait("holder", JobPhase.RUNNING)
        agent.assign("one", **({"workers": (2, 2)} | one))
        agent.assign("other", **({"workers": (2, 2)} | other))
        for name in ("one", "other") if policy != "smallest" else ("one",):
            said = agent.wait(name, JobPhase.DISPATCHED)
            while said.reason is not Reason.WAITING_FOR_CAPACITY:
                said = agent.wait(name, JobPhase.DISPATCHED)
            assert "free:" in said.message
        first, second = ("one", "other") if policy == "fifo" else ("other", "one")
        agent.cancel("holder")
        agent.wait(first, JobPhase.RUNNING)
        assert agent.status(second).phase is JobPhase.DISPATCHED
        asked_for_ranks_only(agent)


@pytest.mark.parametrize("policy", STOPS)
def test_who_comes_first_takes_the_place_of_who_runs(etcd_address: str, tmp_path: Path, policy: str) -> None:
    """With `preempt` a discipline does live what it does in simulation: stop, keep the checkpoint, start the other."""
    options, one, other = STOPS[policy]
    config: dict[str, Any] = {"policy": {"name": policy, "options": options}, "preempt": True}
    with live_agent(etcd_address, tmp_path, f"stops-{policy}", **config) as agent:
        agent.assign("one", **({"workers": (2, 2)} | one))
        agent.wait("one", JobPhase.RUNNING)
        agent.assign("other", **({"workers": (2, 2)} | other))
        agent.wait("other", JobPhase.RUNNING)
        why = [step for step in agent.transitions("one") if step.target is JobPhase.PREEMPTING]
        assert [step.reason for step in why] == [Reason.PREEMPTED]
        assert agent.status("one").failures == 0
        asked_for_ranks_only(agent)
