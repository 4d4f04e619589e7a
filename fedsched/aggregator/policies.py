"""Policy versions and round records: the weights in files, all that is known of them in etcd, changed in one step."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from fedsched.core.rounds import NewWeights, PolicyRecord, RoundRecord
from fedsched.errors import Conflict, CorruptCheckpoint, CorruptRecord, NotFound
from fedsched.federation.loop import BaseVersion, Standing, Weights
from fedsched.federation.optimiser import ServerOptimiser, digest_of
from fedsched.files import write_whole
from fedsched.policy import checkpoint
from fedsched.runtime import codec, keys, stored
from fedsched.runtime.ports import Delete, Entry, Guard, Put, RevisionIs, Store, Write

_log = logging.getLogger(__name__)

ROUNDS_KEPT = 1000
"""Older round records are removed, so that etcd stays small."""
VERSIONS_KEPT = 50
"""Older policy versions are removed, records and files."""


class PolicyStore:
    """One policy's versions and rounds.

    Args:
        store: holds the records.
        state_dir: the files lie under `policies/<name>` in it.
        name: the policy.
        learning_rate: of the server optimiser.
        read: a version's file, or the one to begin with.
        guard: must hold for every write: that this process leads as it did when the store was made. One that leads
            anew makes a new store, for somebody else may have written in between.
    """

    def __init__(
        self,
        store: Store,
        state_dir: Path,
        name: str,
        learning_rate: float,
        guard: Guard,
        read: Callable[[Path], Weights] = checkpoint.load,
    ) -> None:
        self._store = store
        self._state_dir = state_dir
        self._name = name
        self._learning_rate = learning_rate
        self._guard = guard
        self._read_weights = read

    def load(self, first: Path) -> Standing:
        """Where the rounds stand; when there is no version yet, the checkpoint `first` becomes version 1.

        A version whose file is missing or damaged is marked in its record, and the newest sound one before it is put
        in force instead.

        Raises:
            CorruptCheckpoint: no version is sound, or `first` is not.
            Conflict: another process leads meanwhile.
            StoreUnavailable: etcd does not answer.
        """
        found = self._entries()
        number_last = max(stored.numbered(self._store.list(keys.ROUNDS).entries, keys.ROUNDS), default=0)
        if not found:
            return Standing(self._register(first), 1, number_last)
        version_last = max(found)
        wanted = self._in_force()
        within = {version: at for version, at in found.items() if wanted is None or version <= wanted}
        # Who has written something else under a version's key has taken that version, not all.
        newest_first = stored.readable(PolicyRecord, (within[version] for version in sorted(within, reverse=True)))
        active, damaged = self._newest_sound(newest_first)
        if active.record.version != wanted:
            self._fall_back(active.record.version, damaged)
        return Standing(active, version_last, number_last)

    def _in_force(self) -> int | None:
        """The version that is to be in force; None where that was never said, or cannot be read."""
        entry = self._store.get(keys.policy_active(self._name))
        try:
            return stored.number(entry) if entry is not None else None
        except CorruptRecord as problem:
            _log.error("%s; the newest sound version is taken", problem.message)
            return None

    def read(self, number: int) -> BaseVersion:
        """A version, whether or not it is in force.

        Raises:
            NotFound: there is none of that number any more.
            CorruptCheckpoint: its file is damaged or gone.
            CorruptRecord: its record cannot be read.
            StoreUnavailable: etcd does not answer.
        """
        entry = self._store.get(keys.policy_version(self._name, number))
        if entry is None:
            raise NotFound(
                f"policy {self._name} has no version {number}; the newest {VERSIONS_KEPT} are kept",
                "list them with `fedsched policy list`",
            )
        return self._read(stored.record(PolicyRecord, entry))

    def write(self, version: int, digest: str, data: bytes, optimiser: ServerOptimiser) -> NewWeights:
        """Make a version's files durable; nobody sees them before `save`.

        Args:
            version: its number.
            digest: of the checkpoint's arrays.
            data: the checkpoint's file.
            optimiser: its state after the step that made the version.

        Raises:
            OSError: the disk is full, or the like.
        """
        state = optimiser.to_bytes()
        location = f"policies/{self._name}/{version:06d}.safetensors"
        optimiser_location = f"policies/{self._name}/{version:06d}.optimiser.safetensors"
        (self._state_dir / location).parent.mkdir(parents=True, exist_ok=True)
        write_whole(self._state_dir / location, data, durable=True)
        write_whole(self._state_dir / optimiser_location, state, durable=True)
        return NewWeights(digest, location, len(data), optimiser_location, digest_of(state))

    def save(self, record: RoundRecord, policy: PolicyRecord | None) -> None:
        """Write the round's record and, if it made one, the new version and that it is in force: one transaction.

        May be called again with the same arguments when it is not known whether the first call had an effect.

        Raises:
            Conflict: another process leads meanwhile; nothing was written.
            StoreUnavailable: etcd does not answer; it may or may not have been written.
        """
        key = keys.round_record(record.number)
        value = codec.dumps(record)
        writes: list[Write] = [Put(key, value)]
        if record.number > ROUNDS_KEPT:
            writes.append(Delete(keys.round_record(record.number - ROUNDS_KEPT)))
        if policy is not None:
            writes += self._activate(policy)
        outcome = self._store.commit((self._guard, RevisionIs(key, 0)), tuple(writes))
        if not outcome.ok:
            found = self._store.get(key)
            if found is None or found.value != value:
                raise _superseded(f"round {record.number} was not saved")
        if policy is not None:
            self._remove_files(policy.version - VERSIONS_KEPT)

    def _activate(self, policy: PolicyRecord) -> list[Write]:
        writes: list[Write] = [
            Put(keys.policy_version(self._name, policy.version), codec.dumps(policy)),
            Put(keys.policy_active(self._name), str(policy.version).encode()),
        ]
        if policy.version > VERSIONS_KEPT:
            writes.append(Delete(keys.policy_version(self._name, policy.version - VERSIONS_KEPT)))
        return writes

    def _entries(self) -> dict[int, Entry]:
        prefix = keys.policy_versions(self._name)
        return stored.numbered(self._store.list(prefix).entries, prefix)

    def _register(self, first: Path) -> BaseVersion:
        """Make the configured checkpoint version 1."""
        weights = self._read_weights(first)
        optimiser = ServerOptimiser(self._learning_rate)
        data = weights.to_bytes()
        made = self.write(1, weights.digest, data, optimiser)
        record = PolicyRecord(
            name=self._name,
            version=1,
            digest=made.digest,
            location=made.location,
            size_bytes=made.size_bytes,
            created_s=(self._state_dir / made.location).stat().st_mtime,
            optimiser_location=made.optimiser_location,
            optimiser_digest=made.optimiser_digest,
        )
        guards = (self._guard, RevisionIs(keys.policy_active(self._name), 0))
        if not self._store.commit(guards, tuple(self._activate(record))).ok:
            raise _superseded("the first version was not registered")
        _log.info("policy %s version 1 is %s", self._name, first)
        return BaseVersion(record, weights, data, optimiser)

    def _newest_sound(self, newest_first: list[PolicyRecord]) -> tuple[BaseVersion, list[tuple[PolicyRecord, str]]]:
        damaged: list[tuple[PolicyRecord, str]] = []
        for record in newest_first:
            try:
                return self._read(record), damaged
            except CorruptCheckpoint as problem:
                _log.error("policy %s version %d cannot be used: %s", self._name, record.version, problem)
                damaged.append((record, problem.message))
        raise CorruptCheckpoint(
            f"none of the {len(damaged)} versions of policy {self._name} in {self._state_dir / 'policies'} is sound; "
            f"of the newest: {damaged[0][1] if damaged else 'there is none'}",
            "restore that directory from a backup; the records in etcd name each file and its digest",
        )

    def _read(self, record: PolicyRecord) -> BaseVersion:
        path = self._state_dir / record.location
        weights = self._read_weights(path)
        if weights.digest != record.digest:
            raise CorruptCheckpoint(
                f"{path} holds weights with digest {weights.digest[:12]}; the record says {record.digest[:12]}",
                "restore the file from a backup",
            )
        return BaseVersion(record, weights, path.read_bytes(), self._read_optimiser(record))

    def _read_optimiser(self, record: PolicyRecord) -> ServerOptimiser:
        path = self._state_dir / record.optimiser_location
        try:
            return ServerOptimiser.from_bytes(self._learning_rate, path.read_bytes(), record.optimiser_digest)
        except (OSError, CorruptCheckpoint) as problem:
            # The weights are what counts; without its moments Adam only takes a few rounds to find its pace again.
            _log.error("the optimiser of version %d starts anew, its state is lost: %s", record.version, problem)
            return ServerOptimiser(self._learning_rate)

    def _fall_back(self, version: int, damaged: list[tuple[PolicyRecord, str]]) -> None:
        writes: list[Write] = [Put(keys.policy_active(self._name), str(version).encode())]
        for record, why in damaged:
            marked = replace(record, message=f"its file is corrupt, version {version} is in force instead: {why}")
            writes.append(Put(keys.policy_version(self._name, record.version), codec.dumps(marked)))
        if not self._store.commit((self._guard,), tuple(writes)).ok:
            raise _superseded(f"falling back to version {version} was not recorded")
        _log.error("policy %s falls back to version %d", self._name, version)

    def _remove_files(self, version: int) -> None:
        folder = self._state_dir / "policies" / self._name
        for suffix in ("safetensors", "optimiser.safetensors"):
            (folder / f"{version:06d}.{suffix}").unlink(missing_ok=True)


def _superseded(what: str) -> Conflict:
    return Conflict(f"{what}: another aggregator leads now", "nothing, if that was meant; else stop one of the two")
