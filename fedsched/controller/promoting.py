"""Writes down which version of its policy is to decide in a cluster, and which one is to run in its shadow.

The order itself is carried out by the cluster's agent. What is known to be impossible is refused here already.
"""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable

from fedsched.config import COMBINED, SIMULATED
from fedsched.controller.cache import Cache
from fedsched.core.cluster import ClusterRecord
from fedsched.core.ids import ClusterName
from fedsched.core.rounds import PolicyRecord
from fedsched.core.versions import Action, Candidate, Comparison, Promotion, Version, VersionName, Wish, earlier
from fedsched.errors import Conflict, InvalidInput, NotFound
from fedsched.policy import plugins
from fedsched.runtime import codec, keys, stored
from fedsched.runtime.ports import Entry, Put, RevisionIs, Store


class Promoting:
    """What an operator may order of a cluster's policy.

    Args:
        clock: unix time.
    """

    def __init__(self, store: Store, cache: Cache, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._cache = cache
        self._clock = clock

    def promote(self, cluster: ClusterName, weights: VersionName, by: str, why: str) -> Promotion:
        """Order that these weights decide.

        Raises:
            NotFound: there is no such cluster or version.
            InvalidInput: they are not of the policy that the cluster runs, or it has none.
            Conflict: another order came in between.
            CorruptRecord: what etcd holds of the version cannot be read.
        """
        record = self._cluster(cluster)
        if weights.policy and weights.policy != record.policy:
            raise InvalidInput(
                f"cluster {cluster} runs policy {record.policy}; weights of {weights.policy} do not fit",
                f"set policy.name to {weights.policy} in its agent's configuration, or compare the two first: "
                f"fedsched policy shadow {cluster} --policy {weights.policy}",
            )
        if record.policy not in COMBINED:
            raise InvalidInput(
                f"cluster {cluster} runs policy {record.policy}, which has no weights to promote",
                f"compare another policy first: fedsched policy shadow {cluster} --policy {COMBINED[1]}; then set "
                "policy.name in its agent's configuration",
            )
        version = self._version(record.policy, weights)
        return self._order(cluster, version, Action.PROMOTED, by, why, pinned=not weights.newest)

    def rollback(self, cluster: ClusterName, by: str, why: str) -> Promotion:
        """Order that what decided before decide again.

        Raises:
            NotFound: there is no such cluster, or nothing decided before.
            InvalidInput: what decided before was another policy.
            Conflict: another order came in between.
        """
        record = self._cluster(cluster)
        history = self.history(cluster)
        target = earlier(history)
        if target is None:
            raise NotFound(
                f"no version decided in cluster {cluster} before the one that decides now",
                f"see `fedsched policy history {cluster}`; `fedsched policy promote {cluster} VERSION` names one",
            )
        if target.version.policy != record.policy:
            raise InvalidInput(
                f"{target.version} decided in cluster {cluster} before, which runs policy {record.policy} now",
                "set policy.name in its agent's configuration to go back to the other policy",
            )
        return self._order(cluster, target.version, Action.ROLLED_BACK, by, why, pinned=True, back_to=target.seq)

    def shadow(self, cluster: ClusterName, weights: VersionName | None, by: str, promote: bool) -> Candidate | None:
        """Name what is to run in the shadow; None ends what does.

        Raises:
            NotFound: there is no such cluster or version.
            InvalidInput: there is no such policy, it is for simulations only, or it could never be promoted though that
                is wanted.
            CorruptRecord: what etcd holds of the version cannot be read.
        """
        record = self._cluster(cluster)
        candidate = None
        if weights is not None:
            policy = weights.policy or record.policy
            if policy not in plugins.available():
                raise InvalidInput(plugins.unknown(policy), "list them with `fedsched policy list`")
            if policy in SIMULATED:
                raise InvalidInput(
                    f"policy {policy} is for simulations only, and could answer in no slot of {cluster}",
                    "compare it there: fedsched sim compare EXPERIMENT",
                )
            if promote and policy != record.policy:
                raise InvalidInput(
                    f"cluster {cluster} runs policy {record.policy}; {policy} cannot be promoted there",
                    "compare the two without --accept",
                )
            candidate = Candidate(self._version(policy, weights), by, self._clock(), promote)
        self._store.commit((), (Put(keys.candidate(cluster), codec.dumps(Wish(candidate))),))
        return candidate

    def history(self, cluster: ClusterName) -> list[Promotion]:
        """All orders of a cluster, oldest first; one that cannot be read is left out, as its agent does."""
        return stored.readable(Promotion, self._orders(cluster).values())

    def comparisons(self, cluster: ClusterName | None) -> list[Comparison]:
        """How candidates stand, by cluster.

        Raises:
            CorruptRecord: the one that is asked for cannot be read; among all it is left out.
        """
        if cluster is None:
            return stored.readable(Comparison, self._store.list(keys.COMPARISONS).entries)
        entry = self._store.get(keys.comparison(cluster))
        return [stored.record(Comparison, entry)] if entry is not None else []

    def check(self, cluster: ClusterName) -> None:
        """Refuse a cluster that never was.

        Raises:
            NotFound: there is no such cluster.
        """
        self._cluster(cluster)

    def _cluster(self, name: ClusterName) -> ClusterRecord:
        views = {view.name: view.record for view in self._cache.clusters()}
        record = views.get(name)
        if record is None:
            near = difflib.get_close_matches(name, sorted(views), n=1)
            if name in views:
                raise NotFound(
                    f"the agent of cluster {name} was not seen since this controller started; its policy is not known",
                    "start that agent",
                )
            raise NotFound(
                f"there is no cluster {name}",
                f"did you mean {near[0]}?" if near else "list them with `fedsched info`",
            )
        return record

    def _version(self, policy: str, weights: VersionName) -> Version:
        named = [bool(weights.version), weights.newest, bool(weights.checkpoint)]
        if sum(named) > 1:
            raise InvalidInput("a version and a checkpoint are named; one of them was expected", "leave one out")
        if weights.checkpoint or not any(named):
            return Version(policy, checkpoint=weights.checkpoint or "builtin")
        number = weights.version
        if weights.newest:
            entry = self._store.get(keys.policy_active(policy))
            number = stored.number(entry) if entry is not None else 0
        entry = self._store.get(keys.policy_version(policy, number)) if number > 0 else None
        if entry is None:
            raise NotFound(*self._no_version(policy, number))
        record = stored.record(PolicyRecord, entry)
        return Version(policy, record.version, record.digest)

    def _orders(self, cluster: ClusterName) -> dict[int, Entry]:
        """The keys of a cluster's orders by number, oldest first."""
        prefix = keys.promotions(cluster)
        return stored.numbered(self._store.list(prefix).entries, prefix)

    def _no_version(self, policy: str, number: int) -> tuple[str, str]:
        prefix = keys.policy_versions(policy)
        known = list(stored.numbered(self._store.list(prefix).entries, prefix))
        if not known:
            why = f"the federation has no versions of policy {policy}"
            return why, "name a checkpoint with --checkpoint, or wait for the first round"
        why = f"policy {policy} has no version {number}; there are {known[0]} to {known[-1]}"
        return why, "see `fedsched policy list`"

    def _order(
        self,
        cluster: ClusterName,
        version: Version,
        action: Action,
        by: str,
        why: str,
        *,
        pinned: bool,
        back_to: int = 0,
    ) -> Promotion:
        seq = max(self._orders(cluster), default=0) + 1
        promotion = Promotion(cluster, seq, version, action, by, self._clock(), why, pinned, back_to)
        key = keys.promotion(cluster, seq)
        if not self._store.commit((RevisionIs(key, 0),), (Put(key, codec.dumps(promotion)),)).ok:
            entry = self._store.get(key)
            other = stored.record(Promotion, entry) if entry is not None else None
            raise Conflict(
                f"{other.by} ordered {other.version} for cluster {cluster} in the same moment"
                if other is not None
                else f"another order for cluster {cluster} came in the same moment",
                f"look at `fedsched policy history {cluster}`, then try again if it is still wanted",
            )
        return promotion
