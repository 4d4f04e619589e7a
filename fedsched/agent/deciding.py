"""Has the policy decide each slot within its deadline; past it the heuristic answers, and the answer says so."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress

from opentelemetry.trace import Span

from fedsched import tracing
from fedsched.core.commands import AskPolicy, RewardSlot
from fedsched.core.decision import Decision, Policy
from fedsched.core.events import PolicyDecided
from fedsched.learn.learner import ClusterLearner
from fedsched.policy import guardrail
from fedsched.policy.learnable import Learnable
from fedsched.runtime.ports import Post

QUESTIONS_MAX = 16
"""Slots that may wait for a policy that is still busy with an older one; each holds all that it would be shown."""

_log = logging.getLogger(__name__)


class DecidingPolicy:
    """The live policy port: one thread decides, a timer per open question watches the clock.

    Args:
        policy: the configured one, bare.
        fallback: the heuristic that answers when it is late, fails, or cannot be used.
        decision_s_max: how long a decision may take.
        learner: hears of the policy's choices and of what they brought; None where it cannot be taught.
        remember: called after the policy was asked and before its answer is given.
        shadow: sees each slot that was decided, how, and how long the policy took; must be quick.
    """

    def __init__(
        self,
        post: Post,
        policy: Policy,
        fallback: Policy,
        *,
        decision_s_max: float,
        learner: ClusterLearner | None = None,
        remember: Callable[[], None] = lambda: None,
        shadow: Callable[[AskPolicy, Decision, float], None] = lambda question, decision, took_s: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._post = post
        self._remember = remember
        self._policy = policy
        self._fallback = fallback
        self._decision_s_max = decision_s_max
        self._learner = learner
        self._shadow = shadow
        self._clock = clock
        self._questions: queue.Queue[AskPolicy | None] = queue.Queue(QUESTIONS_MAX)
        self._lock = threading.Lock()
        self._watchdogs: dict[int, threading.Timer] = {}
        self.last_span = ""
        """Traceparent of the newest slot's decision, for links from the orders that came of it."""
        self._thread = threading.Thread(target=self._run, name="policy", daemon=True)
        self._thread.start()

    def ask(self, question: AskPolicy) -> None:
        """Decide this slot; a question that is still open is answered by the fallback at its deadline."""
        slot = question.observation.slot
        watchdog = threading.Timer(self._decision_s_max, self._too_late, [question])
        watchdog.daemon = True
        with self._lock:
            self._watchdogs[slot] = watchdog
        watchdog.start()
        with suppress(queue.Full):  # then it hangs, and the fallback answers at the deadline
            self._questions.put_nowait(question)

    def reward(self, reward: RewardSlot) -> None:
        """Tell the learner what a slot brought."""
        if self._learner is not None:
            self._learner.reward(reward)

    def close(self) -> None:
        """End the threads; open questions stay unanswered."""
        with self._lock:
            for watchdog in self._watchdogs.values():
                watchdog.cancel()
            self._watchdogs.clear()
        with suppress(queue.Full):
            self._questions.put_nowait(None)
        self._thread.join(self._decision_s_max)

    def _run(self) -> None:
        while (question := self._questions.get()) is not None:
            slot = question.observation.slot
            with self._lock:
                late = slot not in self._watchdogs
            if late:
                continue  # the fallback has answered while an older question was still being decided
            began_s = time.monotonic()
            with self._deciding(question) as span:
                decision = guardrail.decide(question, self._policy, self._fallback)
                took_s = time.monotonic() - began_s
                self._remember()
                traceparent = _described(span, decision)
            learning = self._learner is not None and not decision.fallback
            trace = self._policy.last_trace() if learning and isinstance(self._policy, Learnable) else ()
            if not self._claim(slot):
                _log.warning("slot %d: the policy's answer came too late and is not used", slot)
                continue
            self.last_span = traceparent
            if self._learner is not None and trace:
                self._learner.record(slot, trace)
            self._answer(decision)
            self._shadow(question, decision, took_s)

    def _too_late(self, question: AskPolicy) -> None:
        if not self._claim(question.observation.slot):
            return
        reason = f"{guardrail.title(self._policy)} did not answer within {self._decision_s_max:g} s"
        # A span of its own: that of the late answer ends when it ends, and tells of a decision that nobody used.
        with self._deciding(question) as span:
            decision = guardrail.fall_back(question, self._fallback, reason)
            self.last_span = _described(span, decision)
        self._answer(decision)
        self._shadow(question, decision, self._decision_s_max)

    def _deciding(self, question: AskPolicy) -> AbstractContextManager[Span]:
        observation = question.observation
        return tracing.span("agent.decide", attributes={"slot": observation.slot, "jobs": len(observation.jobs)})

    def _claim(self, slot: int) -> bool:
        """Whether the caller is the first to answer this slot."""
        with self._lock:
            watchdog = self._watchdogs.pop(slot, None)
        if watchdog is None:
            return False
        watchdog.cancel()
        return True

    def _answer(self, decision: Decision) -> None:
        if decision.fallback:
            _log.warning("slot %d: %s decided: %s", decision.slot, decision.policy, decision.fallback)
        self._post(PolicyDecided(self._clock(), decision))


def _described(span: Span, decision: Decision) -> str:
    """Say in the span who decided and why; its traceparent."""
    span.set_attributes({"policy": decision.policy, "version": decision.version, "fallback": decision.fallback})
    return tracing.traceparent(span)
