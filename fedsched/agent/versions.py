"""The live edges of a cluster's policy versions: orders in etcd, weights in files, the candidate in a process.

One thread of its own does all of it, so a store that is away or a slow disk holds up no decision.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from msgspec.structs import replace

from fedsched.agent.shadow import ShadowRunner, ShadowSpec
from fedsched.config import AgentConfig, PolicyConfig
from fedsched.core.commands import AskPolicy
from fedsched.core.decision import Decision, Policy
from fedsched.core.ids import ClusterName
from fedsched.core.record import Record
from fedsched.core.versions import (
    HISTORY_KEPT,
    Arrived,
    Began,
    Candidate,
    CandidateFailed,
    Case,
    Compared,
    Comparison,
    Named,
    Offered,
    Ordered,
    Promotion,
    State,
    Version,
    VersionEvent,
    Versions,
    Wish,
)
from fedsched.errors import StoreUnavailable
from fedsched.federation.source import PolicyOffer
from fedsched.files import read_whole, write_whole
from fedsched.policy import checkpoint, registry, speed_checkpoint
from fedsched.policy.installing import install
from fedsched.runtime import codec, keys
from fedsched.runtime.backoff import Backoff
from fedsched.runtime.ports import Delete, Entry, Put, RevisionIs, Snapshot, Store, ValueIs, Write
from fedsched.runtime.versioning import NotHere, VersionLoop

_log = logging.getLogger(__name__)

BACKOFF_S = (0.2, 2.0)
"""First and longest pause before an order is kept again while the store is away."""


class _Kept(Record, frozen=True):
    """What a restarted agent goes on from: a file beside its journal."""

    revision: int = 0
    """Of the newest wish that was taken up."""
    comparison: Comparison | None = None
    cases: tuple[Case, ...] = ()


class LiveVersions:
    """One agent's.

    The version that was in force before a restart decides again when the constructor returns.

    Args:
        policy: decides now, with the configured weights.
        term: guards every write.

    Raises:
        StoreUnavailable: etcd does not answer.
    """

    def __init__(
        self, config: AgentConfig, store: Store, policy: Policy, term: int, clock: Callable[[], float] = time.time
    ) -> None:
        self._config = config
        self._store = store
        self._policy = policy
        self._cluster = ClusterName(config.cluster)
        self._guard = ValueIs(keys.term(self._cluster), str(term).encode())
        self._clock = clock
        self._folder = config.state_dir / "versions"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._file = config.state_dir / "shadow.json"
        self._kept = self._read_kept()
        self._revision = self._kept.revision
        self._asked: set[int] = set()
        """Versions that the federation is to send."""
        self._configured = self._first()
        self._decides = self._configured
        self._request: Callable[[int], None] | None = None
        self._runner: tuple[Candidate, ShadowRunner] | None = None
        self._awaited: Candidate | None = None
        """To run as soon as its weights have come."""
        self._events: queue.Queue[VersionEvent | _Received | None] = queue.Queue()
        self._closing = threading.Event()
        self._loop = VersionLoop(Versions(self._cluster, config.promotion.rule()), self)
        history: list[Promotion] = []
        for entry in store.list(keys.promotions(self._cluster)).entries:
            with _readable(entry):
                history.append(codec.loads(Promotion, entry.value))
        kept, wanted = self._kept, self._wanted()
        self._loop.handle(Began(self.now_s(), self._configured, tuple(history), wanted, kept.comparison, kept.cases))
        self._thread = threading.Thread(target=self._run, name="versions", daemon=True)
        self._thread.start()
        self._watches = [
            store.watch(keys.promotions(self._cluster), self._on_orders, lambda change: self._on_order(change.entry)),
            store.watch(keys.candidate(self._cluster), self._on_wishes, lambda change: self._on_wish(change.entry)),
        ]

    def take_requests(self, request: Callable[[int], None]) -> None:
        """How to ask the federation for a version; `requested` takes the answer."""
        self._request = request
        for number in sorted(self._asked):
            request(number)

    def offered(self, version: Version, data: bytes) -> None:
        """The federation has made a version, or the own track has; from any thread."""
        self._events.put(_Received(version, data, "", offered=True))

    def requested(self, offer: PolicyOffer, missing: str) -> None:
        """A version that was asked for, or why there is none; from any thread."""
        version = Version(offer.name, offer.version, offer.digest)
        self._events.put(_Received(version, offer.checkpoint, missing, offered=False))

    def look(self, question: AskPolicy, decision: Decision, took_s: float) -> None:
        """Show the candidate a slot that was decided; from the policy's threads, and at once."""
        runner = self._runner
        if runner is not None and not question.ranks:
            runner[1].look(question, decision, took_s)

    def close(self) -> None:
        """End the candidate and the thread; what was kept stays."""
        for watch in self._watches:
            watch.close()
        self._closing.set()
        self._events.put(None)
        self._thread.join()
        self._stop_runner()

    # --- what comes in

    def _on_orders(self, snapshot: Snapshot) -> None:
        for entry in snapshot.entries:
            self._on_order(entry)

    def _on_order(self, entry: Entry | None) -> None:
        if entry is not None:
            with _readable(entry):
                self._events.put(Ordered(self.now_s(), codec.loads(Promotion, entry.value)))

    def _on_wishes(self, snapshot: Snapshot) -> None:
        for entry in snapshot.entries:
            self._on_wish(entry)

    def _on_wish(self, entry: Entry | None) -> None:
        # The prefix may match other clusters too, and a snapshot tells again what was told before.
        if entry is None or entry.key != keys.candidate(self._cluster) or entry.mod_revision <= self._revision:
            return
        with _readable(entry):
            wish = codec.loads(Wish, entry.value)
            self._revision = entry.mod_revision
            self._events.put(Named(self.now_s(), wish.candidate))

    def _wanted(self) -> Candidate | None:
        """What is to run in the shadow at the start: what somebody wished meanwhile, or what ran before."""
        compared = self._kept.comparison
        entry = self._store.get(keys.candidate(self._cluster))
        if entry is not None and entry.mod_revision > self._revision:
            with _readable(entry):
                wish = codec.loads(Wish, entry.value)
                self._revision = entry.mod_revision
                return wish.candidate
        return compared.candidate if compared is not None and compared.running else None

    def _run(self) -> None:
        while (event := self._events.get()) is not None:
            if isinstance(event, _Received):
                self._receive(event)
            else:
                self._loop.handle(event)

    def _receive(self, received: _Received) -> None:
        version, missing = received.version, received.missing or self._keep_received(received)
        self._asked.discard(version.version)
        now_s = self.now_s()
        if received.offered and not missing:
            self._loop.handle(Offered(now_s, version))
            if version.own:
                self._tidy()  # one comes in every slot, and few of them ever decide
        else:
            # An order that waited for what came and cannot be kept is refused: nobody would send it again.
            self._loop.handle(Arrived(now_s, version, missing))
        awaited = self._awaited
        if awaited is not None and awaited.version.version == version.version:
            if missing:
                self._events.put(CandidateFailed(now_s, awaited, missing))
            else:
                self.run_shadow(awaited)

    def _keep_received(self, received: _Received) -> str:
        """Write the version's file; what keeps it from being kept, or nothing."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)  # it may have been deleted since the start
            write_whole(self._place(received.version.digest), received.data)
        except OSError as problem:
            _log.error("%s cannot be kept: %s", received.version, problem)
            return f"it cannot be kept here: {problem.strerror}"
        return ""

    # --- what the versions' loop orders

    def now_s(self) -> float:
        """Unix time."""
        return self._clock()

    def keep_promotion(self, promotion: Promotion) -> bool:
        """Write it, waiting as long as etcd is away; False where another order has its number, or the agent ends."""
        key = keys.promotion(self._cluster, promotion.seq)
        is_new = promotion.state is State.PENDING and not promotion.message
        guards = (self._guard, RevisionIs(key, 0)) if is_new else (self._guard,)
        writes: tuple[Write, ...] = (Put(key, codec.dumps(promotion)),)
        if is_new and promotion.seq > HISTORY_KEPT:
            writes += (Delete(keys.promotion(self._cluster, promotion.seq - HISTORY_KEPT)),)
        backoff = Backoff(*BACKOFF_S)
        while True:
            try:
                if self._store.commit(guards, writes).ok:
                    _log.info("%s: %s %s: %s", promotion.version, promotion.action, promotion.state, promotion.why)
                    return True
                entry = self._store.get(key) if is_new else None
                return entry is not None and entry.value == writes[0].value  # type: ignore[union-attr]  # our own, retried
            except StoreUnavailable as problem:
                _log.warning("%s waits to be kept: %s", promotion.version, problem.message)
                if self._closing.wait(backoff.pause_s()):
                    return False

    def install(self, version: Version) -> str:
        """Have the policy decide with these weights.

        Raises:
            NotHere: the federation has been asked for them.
            ValueError: they cannot be used.
        """
        if version.same(self._decides) and version.checkpoint == self._decides.checkpoint:
            return self._decides.digest
        path = self._find(version)
        try:
            data = read_whole(path, checkpoint.BYTES_MAX)
        except (OSError, ValueError) as problem:
            why = problem.strerror if isinstance(problem, OSError) else problem
            raise ValueError(f"cannot read {path}: {why}") from problem
        digest = install(self._policy, version, data)
        if path.parent != self._folder:
            with contextlib.suppress(OSError):  # a copy only: that the file may be deleted
                write_whole(self._place(digest), data)
        self._decides = replace(version, digest=digest)
        self._tidy()
        return digest

    def run_shadow(self, candidate: Candidate | None) -> None:
        """Start this candidate's process in place of the one before."""
        self._stop_runner()
        self._awaited = None
        if candidate is None:
            return
        version = candidate.version
        try:
            config = self._candidate_config(version)
        except NotHere as problem:
            _log.info("%s runs in the shadow as soon as it is here: it %s", version, problem)
            self._awaited = candidate
            return
        except ValueError as problem:
            self._events.put(CandidateFailed(self.now_s(), candidate, str(problem)))
            return
        explores = self._config.aggregator is not None and self._config.learning.exploration
        runner = ShadowRunner(
            ShadowSpec(config, version.version or 1, explores),
            self._config.slot.decision_s_max,
            lambda case: self._events.put(Compared(self.now_s(), candidate, case)),
            lambda why: self._events.put(CandidateFailed(self.now_s(), candidate, why)),
        )
        self._runner = (candidate, runner)

    def keep_comparison(self, comparison: Comparison, cases: tuple[Case, ...]) -> None:
        """Write it to the store and, with its cases, to the disk."""
        try:
            write_whole(self._file, codec.dumps(_Kept(self._revision, comparison, cases)))
        except OSError as problem:
            _log.error("the comparison cannot be kept for a restart: %s", problem)
        try:
            self._store.commit((self._guard,), (Put(keys.comparison(self._cluster), codec.dumps(comparison)),))
        except StoreUnavailable as problem:
            _log.warning("the comparison is shown later: %s", problem.message)

    # --- files

    def _read_kept(self) -> _Kept:
        try:
            return codec.loads(_Kept, self._file.read_bytes())
        except FileNotFoundError:
            return _Kept()
        except (OSError, ValueError) as problem:
            _log.error("the comparison with the candidate begins anew, %s cannot be read: %s", self._file, problem)
            return _Kept()

    def _first(self) -> Version:
        """What the agent is configured for."""
        config = self._config.policy
        if config.name in registry.BUILTINS:
            return Version(config.name, 0, registry.weights(config.name, config.checkpoint).digest, config.checkpoint)
        if config.name == registry.LEARNED_SPEED:
            path = speed_checkpoint.BUILTIN if config.checkpoint == "builtin" else Path(config.checkpoint)
            return Version(config.name, 0, speed_checkpoint.load(path).digest, config.checkpoint)
        return Version(config.name)

    def _place(self, digest: str) -> Path:
        return self._folder / f"{digest}.safetensors"

    def _find(self, version: Version) -> Path:
        """The file of a version's weights.

        Raises:
            NotHere: the federation has been asked for them.
            ValueError: nobody has them.
        """
        if version.digest and self._place(version.digest).exists():
            return self._place(version.digest)
        if version.own:
            raise ValueError(f"{version} is not here any more, and nobody else ever had it")
        if version.checkpoint:
            return _shipped(version.policy) if version.checkpoint == "builtin" else Path(version.checkpoint)
        if not version.version:
            raise ValueError(f"policy {version.policy} has no weights that could be replaced")
        if self._config.aggregator is None:
            raise ValueError(f"{version} is not here, and this agent takes part in no federation that could send it")
        self._asked.add(version.version)
        if self._request is not None:
            self._request(version.version)
        raise NotHere(f"waits for the aggregator to send {version}")

    def _candidate_config(self, version: Version) -> PolicyConfig:
        own = self._config.policy
        base = own if version.policy == own.name else PolicyConfig(name=version.policy, explore=own.explore)
        if version.version or version.checkpoint not in ("", "builtin"):
            # Its chance is its own: candidates of one track follow each other slot by slot.
            seed = int(version.digest[:8] or "0", 16)
            return base.model_copy(update={"checkpoint": str(self._copied(version)), "seed": seed})
        return base.model_copy(update={"checkpoint": "builtin"})

    def _copied(self, version: Version) -> Path:
        """A copy of its own of the candidate's file, so that it can be deleted while the candidate runs."""
        path = self._find(version)
        if path.parent == self._folder:
            return path
        copy = self._folder / "candidate.safetensors"
        try:
            write_whole(copy, read_whole(path, checkpoint.BYTES_MAX))
        except (OSError, ValueError) as problem:
            why = problem.strerror if isinstance(problem, OSError) else problem
            raise ValueError(f"cannot copy {path} to {copy}: {why}") from problem
        return copy

    def _tidy(self) -> None:
        """Remove weights that nobody can return to any more."""
        history = self._loop.core.history
        keep = {self._place(order.version.digest) for order in history} | {self._place(self._decides.digest)}
        candidate = self._loop.core.candidate
        if candidate is not None:
            keep |= {self._place(candidate.version.digest), self._folder / "candidate.safetensors"}
        with contextlib.suppress(OSError):  # somebody else deletes there, too; the next version has it tidied again
            found = set(self._folder.glob("*.safetensors"))
            newest = sorted(found, key=lambda path: path.stat().st_mtime)[-2:]
            for path in found - keep - set(newest):
                path.unlink(missing_ok=True)

    def _stop_runner(self) -> None:
        runner, self._runner = self._runner, None
        if runner is not None:
            runner[1].close()


class _Received(Record, frozen=True):
    """A version came from the federation."""

    version: Version
    data: bytes
    missing: str
    offered: bool


def _shipped(policy: str) -> Path:
    """The file of the weights that ship with the package."""
    return speed_checkpoint.BUILTIN if policy == registry.LEARNED_SPEED else registry.weights_file(policy, "builtin")


@contextlib.contextmanager
def _readable(entry: Entry) -> Iterator[None]:
    try:
        yield
    except ValueError as problem:
        _log.error("%s is unreadable; ignored: %s", entry.key, problem)
