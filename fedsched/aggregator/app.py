"""The aggregator's process: leads or stands by, holds rounds while it leads, ends in order on SIGTERM."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time

from fedsched.adapters.election import Election
from fedsched.adapters.etcd import EtcdStore
from fedsched.addresses import is_free
from fedsched.aggregator.aggregator import Aggregator
from fedsched.aggregator.combined import combined
from fedsched.aggregator.policies import PolicyStore
from fedsched.config import AggregatorConfig
from fedsched.errors import AddressInUse, Conflict, StoreUnavailable
from fedsched.process import keep_to_one_core, on_signal
from fedsched.runtime import keys
from fedsched.runtime.ports import Store

_log = logging.getLogger(__name__)

ROLE = "aggregator"
"""What its processes are elected for."""
RETRY_S = 1.0
"""Pause after etcd or the leadership was lost while rounds were held."""


class Service:
    """Campaigns for the role, and holds rounds whenever it leads.

    Args:
        config: the process's configuration.
        store: etcd, or a memory store with the same behaviour.
    """

    def __init__(self, config: AggregatorConfig, store: Store) -> None:
        self._what = combined(config)
        self._config = config
        self._store = store
        self._changed = threading.Condition()
        self._stopping = False
        self._leading = False
        self._succeeds = False
        """Somebody led before, this process or one that it waited for: the address may be theirs for a moment yet."""
        self._aggregator: Aggregator | None = None
        self._election: Election | None = None

    @property
    def address(self) -> str:
        """Where agents connect; empty while standing by."""
        aggregator = self._aggregator
        return aggregator.address if aggregator is not None else ""

    def run(self) -> None:
        """Lead or stand by until `stop`.

        Raises:
            FedschedError: what keeps an aggregator from starting: see `Aggregator`.
        """
        self._store.get(keys.leader(ROLE))  # An etcd that is not there is reported at once.
        me = f"{socket.gethostname()}/{os.getpid()}/{time.time():.3f}"
        self._election = Election(self._store, ROLE, me, self._config.lease_ttl_s, self._on_change)
        try:
            while self._wait_to_lead():
                self._lead(self._election)
        finally:
            self._election.close()

    def stop(self) -> None:
        """End `run` soon. From any thread, not from a signal handler."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
            aggregator = self._aggregator
        if aggregator is not None:
            aggregator.close()

    def _on_change(self, leading: bool) -> None:
        with self._changed:
            self._leading = leading
            self._changed.notify_all()
            aggregator = self._aggregator
        if not leading and aggregator is not None:
            _log.warning("another process may lead now; this one stands by")
            # Not in this thread, which keeps the lease: ending the streams takes a moment.
            threading.Thread(target=aggregator.close, name="step-down", daemon=True).start()

    def _wait_to_lead(self) -> bool:
        with self._changed:
            decided = self._changed.wait_for(lambda: self._leading or self._stopping, RETRY_S)
            if not decided:
                _log.info("standing by until no other aggregator leads")
                self._succeeds = True
                self._changed.wait_for(lambda: self._leading or self._stopping)
            return not self._stopping

    def _lead(self, election: Election) -> None:
        config = self._config
        policies = PolicyStore(
            self._store,
            config.state_dir,
            config.policy.name,
            config.rounds.learning_rate,
            election.guard(),
            self._what.read,
        )
        try:
            self._hold_rounds(policies)
        except AddressInUse as problem:
            if not self._succeeds:
                raise
            self._wait_for_address(problem)
        except (Conflict, StoreUnavailable) as problem:
            _log.warning("%s", problem.message)
            # The election learns of it a little later than we do.
            with self._changed:
                self._changed.wait_for(lambda: self._stopping or not self._leading, RETRY_S)

    def _wait_for_address(self, problem: AddressInUse) -> None:
        """Return when it is free, or there is no use for it any more.

        Its holder may be an aggregator that hangs: it ends, or goes on and gives the address up. To end before it does
        would leave the federation without any.
        """
        _log.warning("%s; rounds are held as soon as it is free", problem.message)
        with self._changed:
            while self._leading and not self._stopping and not is_free(self._config.listen):
                self._changed.wait(RETRY_S)

    def _hold_rounds(self, policies: PolicyStore) -> None:
        aggregator = Aggregator(self._config, policies)
        self._succeeds = True
        try:
            with self._changed:
                self._aggregator = aggregator
                ended = self._stopping or not self._leading
            if not ended:
                aggregator.run()
        finally:
            with self._changed:
                self._aggregator = None
            aggregator.close()


def main(config: AggregatorConfig) -> int:
    """Run the process until SIGTERM or SIGINT.

    Raises:
        FedschedError: it cannot start, or no version of the policy is sound.
    """
    keep_to_one_core()  # steps over one small network
    store = EtcdStore(config.etcd)
    try:
        service = Service(config, store)
        with on_signal(service.stop):
            service.run()
        return 0
    finally:
        store.close()
