"""An aggregator and agents' clients over real gRPC in this process, for the tests of the rounds."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedsched.adapters.federation_client import FederationClient
from fedsched.aggregator.app import Service
from fedsched.config import AggregatorConfig, PolicyConfig, RoundConfig
from fedsched.core.ids import ClusterName
from fedsched.core.rounds import PolicyRecord, RoundRecord
from fedsched.federation.source import Arrays, Declined, Hello, PolicyOffer
from fedsched.policy import checkpoint
from fedsched.policy.checkpoint import Checkpoint
from fedsched.policy.dl2 import Dl2Shape, initial
from fedsched.runtime import codec, keys
from fedsched.runtime.ports import Store
from tests.waiting import eventually

SHAPE = Dl2Shape(window=3, hidden=(8,))
WAIT_S = 20.0


@dataclass(frozen=True, slots=True)
class Update:
    """What a learner gives."""

    gradients: Arrays
    samples: int
    loss: float = 0.5
    entropy: float = 1.5
    mean_reward: float = 0.25


def gradient_of(arrays: Arrays, seed: int) -> dict[str, np.ndarray]:
    """A gradient that depends on weights and seed, and on nothing else."""
    chance = np.random.default_rng(seed)
    return {
        name: (0.1 * arrays[name] + chance.normal(size=arrays[name].shape)).astype(np.float32)
        for name in sorted(arrays)
    }


class Learner:
    """Gives the gradient that a function of (weights, seed) says, and remembers what it was asked."""

    def __init__(self, samples: int, gradient: Callable[[Arrays, int], Arrays] = gradient_of) -> None:
        self.samples = samples
        self.asked: list[tuple[Arrays, int, int]] = []
        self._gradient = gradient

    def gradient(self, arrays: Arrays, batch_size: int, seed: int) -> Update:
        """The gradient; raises `Declined` without samples."""
        self.asked.append((arrays, batch_size, seed))
        if self.samples == 0:
            raise Declined("no decisions yet")
        return Update(self._gradient(arrays, seed), self.samples)


class Agent:
    """A client with the learner and the policy of one cluster."""

    def __init__(self, address: str, cluster: str, learner: Learner, *, version: int = 1, term: int = 1) -> None:
        self.cluster = ClusterName(cluster)
        self.learner = learner
        self.version = version
        self.term = term
        self.offers: list[PolicyOffer] = []
        self.refuse: str | None = None
        self.client = FederationClient(address, hello=self.hello, learner=learner, on_policy=self.take)

    def hello(self) -> Hello:
        """Who this is now."""
        return Hello(self.cluster, self.term, "0.1.0", "dl2", self.version, self.learner.samples)

    def take(self, offer: PolicyOffer) -> str | None:
        """Check the offer as an agent does."""
        self.offers.append(offer)
        if self.refuse is None:
            assert checkpoint.from_bytes(offer.checkpoint).digest == offer.digest
            self.version = offer.version
        return self.refuse


class Running:
    """A service in a thread, and what it has stored."""

    def __init__(self, config: AggregatorConfig, store: Store) -> None:
        self.config = config
        self.store = store
        self.service = Service(config, store)
        self.problem: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="aggregator")
        self._thread.start()

    def _run(self) -> None:
        try:
            self.service.run()
        except BaseException as problem:
            self.problem = problem

    @property
    def address(self) -> str:
        """Where it listens, once it does."""
        eventually(lambda: bool(self.service.address) or self.problem is not None, "the aggregator serves")
        assert self.problem is None, self.problem
        return self.service.address

    def rounds(self) -> list[RoundRecord]:
        """All round records, oldest first."""
        return [codec.loads(RoundRecord, entry.value) for entry in self.store.list(keys.ROUNDS).entries]

    def round(self, number: int) -> RoundRecord:
        """The record of a round, when it is there."""
        eventually(lambda: len(self.rounds()) >= number, f"round {number} is saved")
        return self.rounds()[number - 1]

    def policy(self, version: int) -> PolicyRecord:
        """The record of a version."""
        entry = self.store.get(keys.policy_version("dl2", version))
        assert entry is not None, f"there is no version {version}"
        return codec.loads(PolicyRecord, entry.value)

    def active(self) -> int:
        """The version in force."""
        entry = self.store.get(keys.policy_active("dl2"))
        return int(entry.value) if entry is not None else 0

    def file(self, version: int) -> Path:
        """Where a version's weights lie."""
        return self.config.state_dir / self.policy(version).location

    def stop(self) -> None:
        """End it as SIGTERM does."""
        self.service.stop()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive(), "the aggregator did not end"


@contextmanager
def aggregator(store: Store, state_dir: Path, rounds: RoundConfig, *, listen: str = "127.0.0.1:0") -> Iterator[Running]:
    """A running aggregator whose first checkpoint is small and the same each time."""
    state_dir.mkdir(exist_ok=True)
    first = state_dir / "first.safetensors"
    if not first.exists():
        Checkpoint(initial(SHAPE, 1), SHAPE, {"by": "test"}).save(first)
    config = AggregatorConfig(
        listen=listen,
        etcd="127.0.0.1:1",
        state_dir=state_dir,
        rounds=rounds,
        policy=PolicyConfig(checkpoint=str(first)),
        lease_ttl_s=2,
    )
    running = Running(config, store)
    try:
        yield running
    finally:
        running.stop()


@contextmanager
def agents(*started: Agent) -> Iterator[None]:
    """Close these at the end."""
    try:
        yield
    finally:
        for agent in started:
            agent.client.close()
