"""The controller process: serves the Jobs and Agents services, and dispatches while it leads."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time

import grpc

from fedsched import __version__
from fedsched.adapters.election import Election
from fedsched.adapters.etcd import EtcdStore
from fedsched.adapters.lease import LeaseKeeper
from fedsched.adapters.rpc import serve
from fedsched.config import ControllerConfig
from fedsched.controller.admission import Admission
from fedsched.controller.cache import Cache
from fedsched.controller.dispatcher import Dispatcher
from fedsched.controller.history import History
from fedsched.controller.lines import Lines
from fedsched.controller.promoting import Promoting
from fedsched.controller.service import JobsService
from fedsched.core.cluster import ControllerRecord
from fedsched.errors import StoreUnavailable
from fedsched.pb.agents_pb2_grpc import add_AgentsServicer_to_server
from fedsched.pb.jobs_pb2_grpc import add_JobsServicer_to_server
from fedsched.process import on_signal
from fedsched.runtime import codec, keys
from fedsched.runtime.ports import Store

JOIN_S = 8.0
"""How long etcd may take to answer at the start; later it may be away for any time."""
WAITING_MAX = 2048
"""Calls that may wait for their turn: a sweep's submissions come all at once."""
GRACE_S = 2.0
"""How long calls may go on after the order to stop."""

_log = logging.getLogger(__name__)


class Controller:
    """All parts of one controller, running.

    Raises:
        AddressInUse: `config.listen` is taken.
        StoreUnavailable: etcd does not answer.
    """

    def __init__(self, config: ControllerConfig, store: Store) -> None:
        started_s = time.time()
        controller_id = f"{socket.gethostname()}-{os.getpid()}-{int(started_s * 1000)}"
        actor = f"controller/{controller_id}"
        with contextlib.ExitStack() as undo:
            history = History(config.state_dir / "history.sqlite")
            undo.callback(history.close)
            cache = Cache()
            watch = cache.follow(store)
            undo.callback(watch.close)
            lines = Lines()
            admission, promoting = Admission(store, cache, history, actor), Promoting(store, cache)
            service = JobsService(store, cache, history, admission, lines, promoting)

            def add_services(server: grpc.Server) -> None:
                add_JobsServicer_to_server(service, server)
                add_AgentsServicer_to_server(lines, server)

            server, self.address = serve(config.listen, add_services, waiting_max=WAITING_MAX)
            undo.callback(lambda: server.stop(GRACE_S).wait(2 * GRACE_S))
            undo.callback(lines.close)
            undo.callback(service.close)
            record = ControllerRecord(controller_id, self.address, __version__, started_s)
            keeper = LeaseKeeper(store, config.lease_ttl_s, {keys.controller(controller_id): codec.dumps(record)})
            keeper.start()
            undo.callback(keeper.close)
            election = Election(store, "controller", controller_id, config.lease_ttl_s, _tell)
            undo.callback(election.close)
            dispatcher = Dispatcher(store, cache, history, election, actor, config.history_after_s)
            dispatcher.start()
            undo.callback(dispatcher.close)
            self._parts = undo.pop_all()

    def close(self) -> None:
        """Stop everything, newest part first; the lead is given up so that another controller takes it at once."""
        self._parts.close()


def main(config: ControllerConfig) -> int:
    """Run a controller until the process is told to end.

    Raises:
        AddressInUse: `config.listen` is taken.
        StoreUnavailable: etcd does not answer at the start.
    """
    store = EtcdStore(config.etcd)
    ended = threading.Event()
    try:
        with on_signal(ended.set):
            _wait_for(store, ended)
            controller = Controller(config, store)
            _log.info("serving on %s", controller.address)
            ended.wait()
            _log.info("ending")
            controller.close()
        return 0
    finally:
        store.close()


def _tell(leading: bool) -> None:
    _log.info("this controller leads now" if leading else "this controller does not lead any more")


def _wait_for(store: EtcdStore, ended: threading.Event) -> None:
    deadline_s = time.monotonic() + JOIN_S
    while not ended.is_set():
        try:
            store.get(keys.JOB_COUNTER)
            return
        except StoreUnavailable:
            if time.monotonic() >= deadline_s:
                raise
            ended.wait(0.5)
