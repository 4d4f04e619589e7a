"""What an agent learns alone runs in its shadow, decides where the federation's version does harm, and is tidied up."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from fedsched.agent.versions import LiveVersions
from fedsched.config import LearningConfig, parse
from fedsched.core.commands import AskPolicy
from fedsched.core.decision import Decision
from fedsched.core.versions import OWN, Action, Comparison, Promotion, State, Version
from fedsched.learn import kinds
from fedsched.learn.own_track import OwnTrack
from fedsched.policy import checkpoint, registry
from fedsched.policy.checkpoint import Checkpoint
from fedsched.policy.dl2 import DL2, initial
from fedsched.runtime import codec, keys
from fedsched.runtime.ports import Put
from tests.agent.test_versions import EAST, SHIPPED, Fickle, config_of, orders
from tests.policy.observations import job, node, observation
from tests.waiting import eventually

pytestmark = [pytest.mark.live, pytest.mark.timeout(180)]

START_S = 100.0
"""The candidate's process on a busy machine."""


@pytest.fixture
def store() -> Iterator[Fickle]:

    memory = Fickle()
    memory.commit((), (Put(keys.term(EAST), b"3"),))
    yield memory
    memory.close()


class Agent:
    """The part of an agent that has to do with versions, and takes a version of the federation at once."""

    def __init__(self, store: Fickle, home: Path) -> None:
        promotion = {"accept": "own_track", "slots_min": 2}
        config = parse(type(config_of(home)), {**config_of(home).model_dump(mode="json"), "promotion": promotion}, "x")
        policy = registry.make(config.policy)
        assert isinstance(policy, DL2)
        self.policy, self.store, self.home = policy, store, home
        self.versions = LiveVersions(config, store, policy, 3)
        self._slots = count(1)

    @property
    def digest(self) -> str:
        return checkpoint.digest(self.policy.weights)

    def offer(self, number: int, *, own: bool) -> str:
        made = Checkpoint(initial(SHIPPED.shape, number), SHIPPED.shape, {})
        version = Version("dl2", 0 if own else number, made.digest, OWN if own else "")
        self.versions.offered(version, made.to_bytes())
        return made.digest

    def decide_badly(self) -> None:
        """A slot in which what decides gives nothing to anybody."""
        seen = observation([node("n", 8)], [job("a"), job("b")], slot=next(self._slots))
        self.versions.look(AskPolicy(seen, True), Decision(seen.slot, (), "dl2"), 0.001)

    @property
    def compared(self) -> Comparison | None:
        entry = self.store.get(keys.comparison(EAST))
        return codec.loads(Comparison, entry.value) if entry is not None else None

    @property
    def last(self) -> Promotion:
        return orders(self.store)[-1]


def test_what_was_learned_alone_decides_once_the_federations_version_is_seen_to_do_harm(
    store: Fickle, tmp_path: Path
) -> None:
    agent = Agent(store, tmp_path)
    together = agent.offer(2, own=False)
    eventually(lambda: agent.digest == together, "the federation's version decides at once")
    alone = agent.offer(3, own=True)
    eventually(lambda: agent.compared, "the own one is in the shadow")
    assert agent.digest == together
    assert agent.compared is not None
    assert agent.compared.candidate.version.own

    def decided() -> bool:
        agent.decide_badly()
        return agent.digest == alone

    eventually(decided, "the own one decides", START_S)
    eventually(lambda: agent.last.state is State.ACTIVE, "and that is written down")
    assert (agent.last.action, agent.last.version) == (Action.ACCEPTED, Version("dl2", 0, alone, OWN))
    agent.versions.close()

    again = Agent(store, tmp_path)
    assert again.digest == alone, "it decides again after a restart"
    again.versions.close()


def test_a_version_of_every_slot_does_not_fill_the_disk(store: Fickle, tmp_path: Path) -> None:
    """Weights of each slot come in while the federation, which nobody hears of for days, decides."""
    agent = Agent(store, tmp_path)
    made = [agent.offer(number, own=True) for number in range(10, 22)]
    eventually(lambda: (tmp_path / "versions" / f"{made[-1]}.safetensors").exists(), "the last one has come")
    agent.versions.close()
    files = sorted(path.stem for path in (tmp_path / "versions").glob("*.safetensors"))
    assert len(files) <= 5, "what decides, the one in the shadow and the newest"
    assert made[-1] in files


def test_an_own_version_whose_file_is_gone_is_refused_and_it_says_why(store: Fickle, tmp_path: Path) -> None:

    agent = Agent(store, tmp_path)
    order = Promotion(EAST, 2, Version("dl2", 0, "0" * 64, OWN), Action.ROLLED_BACK, "ana", 0.0, back_to=1)
    store.commit((), (Put(keys.promotion(EAST, 2), codec.dumps(order)),))
    eventually(lambda: agent.last.state is State.REFUSED, "it is refused")
    assert agent.last.message == "dl2 of its own track is not here any more, and nobody else ever had it"
    assert agent.digest == SHIPPED.digest
    agent.versions.close()


def test_an_agent_learns_alone_from_what_decides_when_it_starts() -> None:
    promotion = kinds.AT_ONCE.model_copy(update={"accept": "own_track"})
    policy = registry.make(config_of(Path("x")).policy)
    assert isinstance(policy, DL2)
    policy.load(7, initial(SHIPPED.shape, 7))
    learner = kinds.learner_for(policy, LearningConfig(), 8, promotion)
    assert isinstance(learner, OwnTrack)
    assert learner.weights.digest == checkpoint.digest(policy.weights)
