"""A slot is decided once, by the policy in time or else by the heuristic."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from fedsched.agent.deciding import QUESTIONS_MAX, DecidingPolicy
from fedsched.core.commands import AskPolicy
from fedsched.core.decision import Budget, Decision, Observation
from fedsched.core.events import Event, PolicyDecided
from fedsched.policy.registry import heuristic
from tests.core.test_placement import view
from tests.core.world import node
from tests.waiting import eventually

WAIT_S = 10.0


class Slow:
    """A policy that answers when it is let to."""

    name = "slow"
    version = 3

    def __init__(self, wait: Callable[[], object]) -> None:
        self._wait = wait

    def decide(self, observation: Observation, budget: Budget) -> Decision:
        self._wait()
        budget.grant(observation.jobs[0].job_id, workers=1, ps=1)
        return Decision(observation.slot, budget.allocations(), self.name, self.version)


def question(slot: int) -> AskPolicy:
    return AskPolicy(Observation(slot, 1.0, (node("n", 4),), (view("a"),)), keep_running=True)


def decided(events: queue.Queue[Event]) -> Decision:
    event = events.get(timeout=WAIT_S)
    assert isinstance(event, PolicyDecided)
    return event.decision


def test_a_policy_that_is_in_time_decides() -> None:
    events: queue.Queue[Event] = queue.Queue()
    port = DecidingPolicy(events.put, Slow(lambda: None), heuristic("drf"), decision_s_max=WAIT_S)
    port.ask(question(5))
    answer = decided(events)
    assert (answer.slot, answer.policy, answer.version, answer.fallback) == (5, "slow", 3, "")
    port.close()


def test_a_policy_that_is_late_is_replaced_by_the_heuristic_and_its_late_answer_is_dropped() -> None:
    """A policy that hangs must not stop the cluster, and must not decide a slot that is over."""
    events: queue.Queue[Event] = queue.Queue()
    let_go = threading.Event()
    port = DecidingPolicy(events.put, Slow(let_go.wait), heuristic("drf"), decision_s_max=0.05)
    port.ask(question(5))
    answer = decided(events)
    assert answer.policy == "drf"
    assert answer.fallback == "policy slow (version 3) did not answer within 0.05 s"
    port.ask(question(6))
    assert decided(events).slot == 6
    let_go.set()
    port.close()
    assert events.empty()


def test_a_policy_that_hangs_for_good_costs_no_slot_and_no_memory() -> None:
    """Each slot's whole view of the cluster was kept for it, week after week."""
    events: queue.Queue[Event] = queue.Queue()
    let_go = threading.Event()
    port = DecidingPolicy(events.put, Slow(let_go.wait), heuristic("drf"), decision_s_max=0.05)
    for slot in range(4 * QUESTIONS_MAX):
        port.ask(question(slot))
        assert decided(events).slot == slot
    assert port._questions.qsize() <= QUESTIONS_MAX
    let_go.set()
    eventually(port._questions.empty, "what is over is passed over")
    port.ask(question(100))
    assert decided(events).slot == 100
    port.close()


def test_a_policy_that_fails_is_replaced_and_the_reason_is_told() -> None:
    events: queue.Queue[Event] = queue.Queue()

    def fail() -> None:
        raise RuntimeError("weights are gone")

    port = DecidingPolicy(events.put, Slow(fail), heuristic("drf"), decision_s_max=WAIT_S)
    port.ask(question(5))
    answer = decided(events)
    assert answer.policy == "drf"
    assert "weights are gone" in answer.fallback
    port.close()
