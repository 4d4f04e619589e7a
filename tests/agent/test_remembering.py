"""What the policy has learned outlives the agent's process, whole and once, or is not used at all."""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from fedsched.agent.remembering import SIZE_MAX_BYTES, PolicyMemory
from fedsched.config import PolicyConfig
from fedsched.core.cluster import Node
from fedsched.core.commands import AskPolicy
from fedsched.core.decision import Decision, JobView, Observation, Policy, SpeedSample
from fedsched.core.events import PolicyDecided
from fedsched.core.ids import JobId, NodeName
from fedsched.core.job import Allocation, Range
from fedsched.core.placement import TentativePlacement
from fedsched.core.resources import Resources
from fedsched.policy import guardrail, registry
from fedsched.policy.learned_speed import LearnedSpeed, LearnedSpeedOptions
from fedsched.policy.remembering import Remembering
from fedsched.runtime.codec import dump_tagged, load_tagged

ROOT = Path(__file__).parents[2]
SLOT_S = 600.0
SLOTS = 60
TYPES = ("scales", "does not", "in between")
CONFIGS = {
    "learned_speed": {"name": "learned_speed", "options": {"resize_s": 0.0, "period_s": 6000.0}},
    "gittins": {"name": "gittins", "options": {"limits": [1500.0], "promote_knob": 2.0, "memory": 20}},
    "las2d": {"name": "las2d", "options": {"limits": [1500.0], "promote_knob": 2.0}},
}


class Cluster:
    """The cluster outlives its agent: jobs come, train with what they were given, and end."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self._nodes = tuple(Node(NodeName(f"n{index}"), Resources(8000, 64_000, 4000)) for index in range(3))
        self._jobs: dict[JobId, JobView] = {}
        self._finished: list[tuple[JobId, float]] = []
        self._slot = 0

    def question(self, *, jobs_come: bool = True) -> AskPolicy:
        """The next slot's."""
        for number in range(2 if jobs_come and self._slot % 3 == 0 else 0):
            job_id = JobId(f"job-{self._slot:03d}-{number}")
            self._jobs[job_id] = JobView(
                job_id=job_id,
                job_type=self._chance.choice(TYPES),
                workers=Range(1, 6),
                ps=Range(0, 0),
                worker_demand=Resources(1000, 100, 1000),
                ps_demand=Resources(1000, 100),
                epochs=5 + self._chance.random() * 30,
                progress_epochs=0.0,
                arrived_s=self._slot * SLOT_S + number,
                waited_slots=0,
            )
        jobs = tuple(sorted(self._jobs.values(), key=lambda view: (view.arrived_s, view.job_id)))
        seen = Observation(self._slot, SLOT_S, self._nodes, jobs, self._slot * SLOT_S, tuple(self._finished))
        return AskPolicy(seen, keep_running=False)

    def train(self, question: AskPolicy, decision: Decision) -> None:
        """A slot passes."""
        budget = TentativePlacement(question.observation, keep_running=False)
        given = dict(decision.allocations)
        for job_id, held in decision.allocations:
            budget.grant(job_id, held.workers, held.ps)
        self._finished = []
        for job_id, view in list(self._jobs.items()):
            held = given.get(job_id, Allocation())
            power = {"scales": 0.9, "does not": -0.2, "in between": 0.5}[view.job_type]
            rate = held.workers**power / SLOT_S * (0.9 + 0.2 * self._chance.random()) if held else 0.0
            done, attained_s = view.progress_epochs + rate * SLOT_S, view.attained_s + held.workers * SLOT_S
            speeds = (*view.speeds, SpeedSample(held.workers, 0, rate)) if rate else view.speeds
            self._jobs[job_id] = replace(
                view,
                progress_epochs=done,
                placement=budget.placement(job_id),
                waited_slots=view.waited_slots + 1,
                attained_s=attained_s,
                speeds=speeds[-8:],
            )
            if done >= view.epochs:
                del self._jobs[job_id]
                self._finished.append((job_id, attained_s))
        self._slot += 1


class Agent:
    """An agent's deciding part in a process of its own."""

    def __init__(self, path: Path, config: dict[str, Any]) -> None:
        program = [sys.executable, "-m", "tests.agent.remembering_agent", str(path), json.dumps(config)]
        self._process = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        assert self._line() == "ready"

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().rstrip("\n")

    def ask(self, question: AskPolicy, *, killed_after_s: float | None = None) -> Decision | None:
        """The decision; None where the agent was killed before it answered."""
        assert self._process.stdin is not None
        watchdog = threading.Timer(killed_after_s or 0.0, self._process.kill)
        if killed_after_s is not None:
            watchdog.start()
        try:
            self._process.stdin.write(json.dumps(dump_tagged(question)) + "\n")
            self._process.stdin.flush()
            line = self._line()
        except BrokenPipeError:
            line = ""
        watchdog.cancel()
        if not line.endswith("}"):
            return None
        event = load_tagged(json.loads(line))
        assert isinstance(event, PolicyDecided)
        return event.decision

    def kill(self) -> None:
        """kill -9."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()


def undisturbed(config: dict[str, Any], seed: int) -> list[Decision]:
    """What an agent decides that nobody kills."""
    policy, cluster = registry.make(PolicyConfig.model_validate(config)), Cluster(seed)
    decisions = []
    for _ in range(SLOTS):
        question = cluster.question()
        decisions.append(guardrail.decide(question, policy, registry.heuristic("fifo")))
        cluster.train(question, decisions[-1])
    return decisions


@pytest.mark.parametrize(("name", "seed"), [("learned_speed", 1), ("gittins", 3)])
def test_an_agent_that_is_killed_at_any_moment_decides_on_as_if_it_never_was(
    tmp_path: Path, name: str, seed: int
) -> None:
    """Whoever restarts an agent must not pay for its lessons again, nor count them twice."""
    config, chance = CONFIGS[name], random.Random(seed)
    expected, cluster = undisturbed(config, seed), Cluster(seed)
    agent, kills, unanswered = Agent(tmp_path / "state", config), 0, 0
    for slot in range(SLOTS):
        question = cluster.question()
        decision = None
        if kills < 4 and chance.random() < 0.2:
            decision = agent.ask(question, killed_after_s=chance.random() * 0.012)
            agent.kill()
            kills += 1
            unanswered += decision is None
            agent = Agent(tmp_path / "state", config)
        if decision is None:
            decision = agent.ask(question)
        assert decision == expected[slot], f"slot {slot}, after {kills} kills"
        cluster.train(question, decision)
    agent.kill()
    assert kills == 4
    left = sorted(path.name for path in tmp_path.iterdir() if not path.name.startswith("."))
    assert left == ["state"]


def taught(slots: int, options: LearnedSpeedOptions | None = None) -> tuple[LearnedSpeed, Cluster]:
    """A policy with some experience."""
    policy, cluster = LearnedSpeed(options or LearnedSpeedOptions(resize_s=0.0, period_s=6000.0)), Cluster(7)
    for _ in range(slots):
        question = cluster.question()
        cluster.train(question, guardrail.decide(question, policy, registry.heuristic("fifo")))
    return policy, cluster


def fresh() -> LearnedSpeed:
    return LearnedSpeed(LearnedSpeedOptions(resize_s=0.0, period_s=6000.0))


@pytest.mark.parametrize("fault", ["cut", "flipped", "other policy", "other format", "empty", "not ours"])
def test_a_file_that_is_not_whole_is_told_and_begun_anew(
    tmp_path: Path, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Half a memory is worse than none: it would decide by numbers that nobody ever saw."""
    policy, _ = taught(20)
    path = tmp_path / "state"
    PolicyMemory(path, policy).keep()
    data = path.read_bytes()
    spoilt = {
        "cut": data[: len(data) // 2],
        "flipped": data[:-9] + bytes([data[-9] ^ 1]) + data[-8:],
        "other policy": data.replace(b" learned_speed ", b" gittins ", 1),
        "other format": data.replace(b"policy-state 1", b"policy-state 2", 1),
        "empty": b"",
        "not ours": b"something else\n",
    }[fault]
    path.write_bytes(spoilt)
    caplog.clear()

    begun = fresh()
    PolicyMemory(path, begun)

    assert not begun.observed.observations
    assert "policy learned_speed begins anew" in caplog.text
    assert (tmp_path / "state.refused").read_bytes() == spoilt
    assert not path.exists()


def test_a_policy_with_other_periods_begins_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    policy, _ = taught(20)
    PolicyMemory(tmp_path / "state", policy).keep()
    other = LearnedSpeed(LearnedSpeedOptions(period_s=60.0))
    PolicyMemory(tmp_path / "state", other)
    assert not other.observed.observations
    assert "its periods last 6000 s; 60 s were expected" in caplog.text


def test_what_was_seen_counts_though_what_was_given_has_changed() -> None:
    """An upgrade ships other statistics; what a cluster saw itself is as true as before."""
    policy, _ = taught(20)
    upgraded = LearnedSpeed(LearnedSpeedOptions(resize_s=0.0, period_s=6000.0), policy.observed)
    upgraded.restore(policy.state())
    assert upgraded.observed == policy.observed
    assert upgraded.statistics.observations == 2 * policy.observed.observations


def test_a_disk_that_is_full_costs_the_memory_and_not_the_decision(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    policy, _ = taught(5)
    (tmp_path / "state").mkdir()
    memory = PolicyMemory(tmp_path / "state", policy)
    memory.keep()
    memory.keep()
    assert caplog.text.count("is not kept for the agent's next process") == 1


def test_a_memory_that_fails_or_is_too_large_costs_no_decision(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A policy can be anybody's."""

    class Large(LearnedSpeed):
        def state(self) -> bytes:
            return bytes(SIZE_MAX_BYTES + 1)

    class Broken(LearnedSpeed):
        def state(self) -> bytes:
            raise RuntimeError("lost it")

    for kind, why in ((Large, "bytes; 67,108,864 at most are kept"), (Broken, "RuntimeError: lost it")):
        caplog.clear()
        PolicyMemory(tmp_path / kind.__name__, kind()).keep()
        assert why in caplog.text
        assert not (tmp_path / kind.__name__).exists()


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_what_is_remembered_does_not_grow_with_the_jobs_that_have_gone(name: str) -> None:
    """An agent runs for months: its file must not grow with every job there ever was."""
    policy, cluster = registry.make(PolicyConfig.model_validate(CONFIGS[name])), Cluster(11)
    assert isinstance(policy, Remembering)
    sizes = []
    for slot in range(400):
        question = cluster.question(jobs_come=slot % 200 < 100)
        cluster.train(question, guardrail.decide(question, policy, registry.heuristic("fifo")))
        if slot % 200 == 199:
            assert not question.observation.jobs
            sizes.append(len(policy.state()))
    assert sizes[1] <= 1.2 * sizes[0]


def test_other_policies_need_no_file(tmp_path: Path) -> None:
    policy: Policy = registry.heuristic("drf")
    PolicyMemory(tmp_path / "state", policy).keep()
    assert not (tmp_path / "state").exists()
