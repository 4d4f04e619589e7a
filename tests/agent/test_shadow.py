"""A candidate can do nothing to the cluster that it is tried in: whatever it does, only its own record shows it."""

from __future__ import annotations

import os
import queue
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from fedsched.agent.deciding import DecidingPolicy
from fedsched.agent.shadow import ShadowRunner, ShadowSpec
from fedsched.config import PolicyConfig
from fedsched.core.commands import AskPolicy
from fedsched.core.decision import Decision
from fedsched.core.events import Event, PolicyDecided
from fedsched.core.placement import TentativePlacement
from fedsched.core.versions import Case
from fedsched.policy.registry import heuristic
from tests.policy.observations import job, node, observation
from tests.waiting import eventually, soon

pytestmark = [pytest.mark.live, pytest.mark.timeout(180)]

START_S = 60.0
"""A process on a busy machine."""

BAD = """
import ctypes, os, time
from fedsched.core.decision import Decision

class Bad:
    name, version = "bad", 1

    def decide(self, observation, budget):
        match observation.slot % 10:
            case 2:
                while True: pass
            case 3: os._exit(9)
            case 4: ctypes.string_at(0)
            case 5: raise ValueError("no idea")
            case 6: return Decision(observation.slot, ((observation.jobs[0].job_id, float("nan")),), self.name)
            case 7: return None
        for view in observation.jobs:
            budget.grant(view.job_id, view.minimum.workers, view.minimum.ps)
        return Decision(observation.slot, budget.allocations(), self.name)

class Broken(Bad):
    def __init__(self):
        raise OSError("its library is missing")
"""


@pytest.fixture
def bad_policies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody's package is installed, with policies that do all that they should not."""
    (tmp_path / "bad_policies.py").write_text(BAD)
    info = tmp_path / "bad_policies-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bad-policies\nVersion: 1.0\n")
    points = "[fedsched.policies]\nbad = bad_policies:Bad\nbroken = bad_policies:Broken\n"
    (info / "entry_points.txt").write_text(points)
    monkeypatch.syspath_prepend(tmp_path)


def question(slot: int) -> AskPolicy:
    return AskPolicy(observation([node("n", 8)], [job("a"), job("b")], slot=slot), True)


def answer(asked: AskPolicy) -> Decision:
    return heuristic("drf").decide(asked.observation, TentativePlacement(asked.observation))


class Shadow:
    """A runner and what it told."""

    def __init__(self, policy: str, decision_s_max: float) -> None:
        self.cases: queue.Queue[Case] = queue.Queue()
        self.problems: queue.Queue[str] = queue.Queue()
        recipe = ShadowSpec(PolicyConfig(name=policy), 1, False)
        self.runner = ShadowRunner(recipe, decision_s_max, self.cases.put, self.problems.put)

    def case(self, slot: int) -> Case:
        """The slot decided by both."""
        asked = question(slot)
        self.runner.look(asked, answer(asked), 0.001)
        return self.cases.get(timeout=START_S)


@contextmanager
def shadow(policy: str, decision_s_max: float = 20.0) -> Iterator[Shadow]:
    made = Shadow(policy, decision_s_max)
    try:
        yield made
    finally:
        made.runner.close()


def children() -> set[int]:
    """Candidates' processes of this test. Other tests leave dead ones that nobody has asked about yet."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # or a zombie
            if "spawn_main" in " ".join(process.cmdline()):
                found.add(process.pid)
    return found


def test_a_candidate_that_answers_as_the_active_policy_does_is_worth_as_much_and_agrees() -> None:
    with shadow("drf") as made:
        case = made.case(8)
        assert (case.problem, case.agreement) == ("", 1.0)
        assert case.candidate_worth == case.active_worth != 0.0
        assert case.candidate_s > 0
        assert made.case(9).slot == 9, "the same process decides the next slot"
    assert children() == set()


@pytest.mark.parametrize(
    ("slot", "why"),
    [
        (2, "it did not answer within 1 s"),
        (3, "its process ended with exit code 9"),
        (4, "its process was killed by SIGSEGV"),
    ],
    ids=["loops", "exits", "crashes"],
)
@pytest.mark.usefixtures("bad_policies")
def test_a_candidate_that_dies_or_hangs_is_told_of_and_the_next_slot_is_asked_again(slot: int, why: str) -> None:
    with shadow("bad", decision_s_max=1.0) as made:
        case = made.case(slot)
        assert why in case.problem
        assert case.candidate_worth is None
        # A machine that is busy with other things may need a second try.
        assert any(made.case(8).candidate_worth is not None for _ in range(3))
    assert children() == set()


@pytest.mark.usefixtures("bad_policies")
def test_an_answer_that_cannot_be_used_costs_the_candidate_a_case_and_nobody_else_anything() -> None:
    with shadow("bad") as made:
        for slot, why in ((5, "ValueError: no idea"), (6, "Expected `object`"), (7, "a Decision was expected")):
            case = made.case(slot)
            assert why in case.problem
            assert case.candidate_worth is None
            assert case.active_worth is not None
        assert made.case(8).problem == ""


@pytest.mark.usefixtures("bad_policies")
def test_a_candidate_that_cannot_be_made_is_told_of_once() -> None:
    with shadow("broken") as made:
        why = made.problems.get(timeout=START_S)
        assert "policy broken cannot be made: OSError: its library is missing" in why
        made.runner.look(question(8), answer(question(8)), 0.001)
    assert made.cases.empty()
    assert children() == set()


@pytest.mark.usefixtures("bad_policies")
def test_a_candidate_that_is_killed_comes_back() -> None:
    """The kernel kills what takes too much memory."""
    with shadow("bad") as made:
        assert made.case(8).problem == ""
        (pid,) = children()
        os.kill(pid, signal.SIGKILL)
        assert made.case(9).problem == "its process was killed by SIGKILL"
        assert made.case(8).problem == ""


@pytest.mark.usefixtures("bad_policies")
def test_a_runner_can_be_closed_at_any_moment() -> None:
    """While it starts, while it hangs, while it does nothing."""
    for has_begun, then in ((False, None), (True, None), (True, 2)):
        with ExitStack() as closing:
            made = closing.enter_context(shadow("bad", decision_s_max=600.0))
            if has_begun:
                assert made.case(8).problem == ""
            if then is not None:
                made.runner.look(question(then), answer(question(then)), 0.001)
            with soon("closing does not wait for an answer"):
                closing.close()
    assert children() == set()


@pytest.mark.usefixtures("bad_policies")
def test_decisions_do_not_wait_for_a_candidate_that_hangs() -> None:
    """It takes a whole core, in its own process; the active policy must decide as if it were not there."""
    events: queue.Queue[Event] = queue.Queue()
    with shadow("bad", decision_s_max=600.0) as made:
        made.runner.look(question(8), answer(question(8)), 0.001)
        made.cases.get(timeout=START_S)
        made.runner.look(question(2), answer(question(2)), 0.001)
        port = DecidingPolicy(
            events.put, heuristic("drf"), heuristic("fifo"), decision_s_max=30.0, shadow=made.runner.look
        )
        for slot in range(100, 140):
            port.ask(question(slot))
            event = events.get(timeout=30.0)
            assert isinstance(event, PolicyDecided)
            assert (event.decision.slot, event.decision.fallback) == (slot, "")
        assert made.cases.empty(), "all are decided while the candidate still hangs"
        port.close()


def test_a_candidate_ends_with_its_agent(tmp_path: Path) -> None:
    """A killed agent says nothing to anybody."""
    pid = os.fork()
    if pid == 0:  # pragma: no cover
        os._exit(_agent_that_is_killed(tmp_path / "candidate"))
    eventually(lambda: (tmp_path / "candidate").exists(), "the candidate runs", START_S)
    candidate = int((tmp_path / "candidate").read_text())
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    eventually(lambda: not psutil.pid_exists(candidate) or _is_over(candidate), "the candidate ends", 20.0)


def _agent_that_is_killed(told: Path) -> int:
    made = Shadow("drf", 20.0)
    made.case(8)
    process = made.runner._process
    assert process is not None
    told.with_suffix(".new").write_text(str(process.pid))
    told.with_suffix(".new").rename(told)
    threading.Event().wait()
    return 0


def _is_over(pid: int) -> bool:
    return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
