"""The versions of a simulated cluster's policy: the live agent's core and loop; memory instead of etcd and files.

The candidate is asked in virtual time, which passes for nobody, so it can be neither late nor in the way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fedsched.core.commands import AskPolicy, Command
from fedsched.core.decision import Policy
from fedsched.core.events import Event, PolicyDecided
from fedsched.core.ids import ClusterName
from fedsched.core.versions import (
    HISTORY_KEPT,
    OWN,
    AcceptRule,
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
    Version,
    Versions,
)
from fedsched.errors import CorruptCheckpoint
from fedsched.federation.source import Arrays
from fedsched.policy import checkpoint
from fedsched.policy.checkpoint import Checkpoint
from fedsched.policy.comparing import Model, compare, model
from fedsched.policy.installing import FROM_FILE, install
from fedsched.policy.learnable import Learnable
from fedsched.runtime.versioning import VersionLoop


class SimulatedVersions:
    """One cluster's versions and all that lives longer than its agent.

    Args:
        policy: decides in the cluster.
        first: weights that it begins with.
        make: makes a policy like it, of other weights and their version, to run in the shadow.
        now_s: virtual time.
    """

    def __init__(
        self,
        cluster: ClusterName,
        policy: Policy,
        first: Checkpoint,
        rule: AcceptRule,
        make: Callable[[Checkpoint, int], Policy],
        now_s: Callable[[], float],
    ) -> None:
        self._cluster = cluster
        self._policy = policy
        own = first.made.get("track") == OWN
        self._first = Version(policy.name, 0 if own else policy.version, first.digest, OWN if own else "")
        self._rule = rule
        self._make = make
        self._now_s = now_s
        self._weights = {first.digest: first.to_bytes()}
        self._newest: dict[bool, str] = {}
        """Digest of what the federation offered last, and the own track (under True): it may wait for its turn."""
        self.left: Callable[[Arrays, float], None] = lambda arrays, until_s: None
        """Hears of weights that decide no more, and until when they did."""
        self._installed = self._first
        self._orders: dict[int, Promotion] = {}
        self._wish: Candidate | None = None
        self.comparison: Comparison | None = None
        """The newest, running or not."""
        self._cases: tuple[Case, ...] = ()
        self._candidate: tuple[Candidate, Policy] | None = None
        self._question: AskPolicy | None = None
        self._failed: str | None = None
        self._model: Model | None = None
        self._loop = self._begin()

    @property
    def core(self) -> Versions:
        """Read only."""
        return self._loop.core

    @property
    def deciding(self) -> Checkpoint:
        """What the policy decides with now."""
        return checkpoint.from_bytes(self._weights[self._installed.digest], str(self._installed))

    @property
    def orders(self) -> tuple[Promotion, ...]:
        """As a store keeps them, oldest first."""
        return tuple(self._orders[seq] for seq in sorted(self._orders))

    def restarted(self) -> None:
        """The agent died and another one began: it has what was kept."""
        self._candidate = self._question = self._model = None
        self._loop = self._begin()

    def offered(self, version: Version, data: bytes) -> None:
        """The federation offers a version, or the cluster's own track does."""
        self._weights[version.digest] = data
        self._newest[version.own] = version.digest
        self._handle(Offered(self._now_s(), version))

    def order(self, promotion: Promotion) -> bool:
        """Somebody's order; False where another one came first with its number."""
        if promotion.seq in self._orders:
            return False
        self._orders[promotion.seq] = promotion
        self._handle(Ordered(self._now_s(), promotion))
        return True

    def name(self, candidate: Candidate | None, data: bytes = b"") -> None:
        """Somebody names what is to run in the shadow."""
        if candidate is not None and data:
            self._weights[candidate.version.digest] = data
        self._handle(Named(self._now_s(), candidate))

    def observe(self, event: Event, commands: Sequence[Command]) -> None:
        """See one step of the cluster's loop: what the policy was asked, and what it answered."""
        if isinstance(event, PolicyDecided) and self._question is not None and self._candidate is not None:
            question, decision = self._question, event.decision
            if decision.slot == question.observation.slot:
                named, policy = self._candidate
                if self._model is None:
                    self._model = model()
                case = compare(question, decision, 0.0, policy, lambda: 0.0, self._model)
                self._handle(Compared(self._now_s(), named, case))
        for command in commands:
            if isinstance(command, AskPolicy):
                self._question = None if command.ranks else command

    def _begin(self) -> VersionLoop:
        loop = VersionLoop(Versions(self._cluster, self._rule), self)
        compared = self.comparison
        going = compared.candidate if compared is not None and compared.running else None
        self._loop = loop
        loop.handle(Began(self._now_s(), self._first, self.orders, going, compared, self._cases))
        return loop

    def _handle(self, event: Offered | Ordered | Named | Compared) -> None:
        self._loop.handle(event)
        if self._failed is not None:
            why, self._failed = self._failed, None
            candidate = self._loop.core.candidate
            if candidate is not None:
                self._loop.handle(CandidateFailed(self._now_s(), candidate, why))

    # --- what the versions' loop orders

    def now_s(self) -> float:
        """Virtual time."""
        return self._now_s()

    def keep_promotion(self, promotion: Promotion) -> bool:
        """Keep it, as a guarded transaction would."""
        known = self._orders.get(promotion.seq)
        if known is not None and known.by != promotion.by:
            return False
        self._orders[promotion.seq] = promotion
        self._orders.pop(promotion.seq - HISTORY_KEPT, None)
        return True

    def install(self, version: Version) -> str:
        """Have the policy decide with it.

        Raises:
            ValueError: it cannot be used.
        """
        if version.same(self._installed) and version.version == self._policy.version:
            return self._installed.digest
        data = self._weights.get(version.digest)
        if data is None:
            raise ValueError(f"nobody has the weights of {version}")
        before = self.deciding.arrays
        digest = install(self._policy, version, data)
        self.left(before, self._now_s())
        self._installed = version
        used = {order.version.digest for order in self._orders.values()}
        keep = used | {self._first.digest, version.digest, *self._newest.values()}
        if self._candidate is not None:
            keep.add(self._candidate[0].version.digest)
        self._weights = {name: kept for name, kept in self._weights.items() if name in keep}
        return digest

    def run_shadow(self, candidate: Candidate | None) -> None:
        """Make a policy of the candidate; the next of its track takes its place, and its chance goes on."""
        before, self._candidate = self._candidate, None
        if candidate is None:
            return
        try:
            found = checkpoint.from_bytes(self._weights.get(candidate.version.digest, b""), str(candidate.version))
            policy = before[1] if before is not None and before[0].version.policy == candidate.version.policy else None
            if isinstance(policy, Learnable):
                policy.load(candidate.version.version or FROM_FILE, found.arrays)
            else:
                policy = self._make(found, candidate.version.version)
        except (CorruptCheckpoint, ValueError) as problem:
            self._failed = str(problem)
            return
        self._candidate = (candidate, policy)

    def keep_comparison(self, comparison: Comparison, cases: tuple[Case, ...]) -> None:
        """Keep it."""
        self.comparison, self._cases = comparison, cases
