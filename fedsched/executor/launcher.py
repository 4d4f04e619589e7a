"""One launcher process per cluster: forks tasks from an interpreter that has torch loaded, and records how they end.

A fork costs milliseconds where importing torch costs seconds of processor time. The launcher runs in a session of its
own, so that it and the tasks survive the agent. It has a single thread and never initialises gRPC: both would not
survive a fork. One process per cluster holds the lock file; whoever starts a second one gets the first. It survives
upgrades of fedsched, too: what it has loaded is of the past then, so tasks get interpreters of their own, and it ends
as soon as it has none.
"""

from __future__ import annotations

import argparse
import fcntl
import gc
import importlib
import json
import logging
import os
import selectors
import signal
import socket
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import fedsched
from fedsched.core.job import Reason
from fedsched.executor import records, task
from fedsched.executor.cgroups import Cgroups, TaskGroup, below, candidates, oom_kills
from fedsched.executor.processes import adopt_orphans, end_children, identify
from fedsched.executor.records import ExitRecord, FenceRecord, LauncherRecord, Layout, TaskOrder, TaskRecord
from fedsched.runtime import codec

LOCK_WAIT_S = 10.0
"""How long a new launcher waits for an ending one to let go of the lock."""
SOCKET_PATH_MAX = 90
"""Unix socket addresses hold about 100 bytes."""
LOOK_EVERY_S = 1.0
"""A look at the files of fedsched costs a few milliseconds, and a job's tasks are started together."""
_PACKAGE = str(Path(fedsched.__file__).parent)

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Child:
    order: TaskOrder
    errors: int
    oom_kills: int
    group: TaskGroup | None


@dataclass(slots=True)
class _Client:
    connection: socket.socket
    waiting: bytearray = field(default_factory=bytearray)


class Launcher:
    """Takes orders over a unix socket, one JSON object per line, and answers each with one.

    Args:
        layout: the cluster's files.
        listener: the socket that orders come in on.
        lock: descriptor of the lock file, held.
        idle_s: ends by itself after this long without a child and without a connection.
        cgroups: what keeps tasks to what they were given, where there is something.
    """

    def __init__(
        self, layout: Layout, listener: socket.socket, lock: int, idle_s: float, cgroups: Cgroups | None = None
    ) -> None:
        self._sources = sources_stamp(_PACKAGE)
        self._is_of_the_past = False
        self._next_look_s = 0.0
        self._layout = layout
        self._listener = listener
        self._lock = lock
        self._idle_s = idle_s
        self._cgroups = cgroups
        self._term = (records.read(FenceRecord, layout.fence) or FenceRecord()).term
        self._children: dict[int, _Child] = {}
        self._clients: dict[int, _Client] = {}
        self._unrecorded: dict[Path, ExitRecord] = {}
        self._busy_s = time.monotonic()
        self._stopping = False
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._wake_out, self._wake_in = socket.socketpair()
        for end in (self._wake_out, self._wake_in):
            end.setblocking(False)
        self._selector.register(self._wake_out, selectors.EVENT_READ)
        signal.set_wakeup_fd(self._wake_in.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._end_soon)

    def serve(self) -> task.Fork | None:
        """Serve until told to end or idle for long. In a forked child: return what it shall become."""
        while not self._stopping and not self._is_idle():
            for key, _ in self._selector.select(timeout=0.5):
                fork = self._take(key.fd)
                if fork is not None:
                    return fork
            self._reap()
            self._record_exits()
        return None

    def leave(self) -> None:
        """End: remove the address first, then let a successor in."""
        self._reap()
        self._layout.launcher.unlink(missing_ok=True)
        address = Path(self._listener.getsockname())
        address.unlink(missing_ok=True)
        if address.parent != self._layout.root:
            with suppress(OSError):  # somebody else has put something there
                address.parent.rmdir()
        self._close_all()
        if self._cgroups is not None:
            self._cgroups.close()

    def _end_soon(self, *_: object) -> None:
        self._stopping = True

    def _is_idle(self) -> bool:
        owes_nothing = not self._children and not self._unrecorded
        if self._is_of_the_past and owes_nothing:
            return True  # the next order gets a launcher of today
        if self._clients or not owes_nothing:
            self._busy_s = time.monotonic()
        return time.monotonic() - self._busy_s > self._idle_s

    def _take(self, ready: int) -> task.Fork | None:
        if ready == self._listener.fileno():
            connection, _ = self._listener.accept()
            connection.settimeout(5.0)  # a peer that stops reading is dropped
            self._clients[connection.fileno()] = _Client(connection)
            self._selector.register(connection, selectors.EVENT_READ)
        elif ready == self._wake_out.fileno():
            with suppress(BlockingIOError):
                self._wake_out.recv(4096)
        elif ready in self._clients:
            return self._hear(self._clients[ready])
        return None

    def _hear(self, client: _Client) -> task.Fork | None:
        try:
            data = client.connection.recv(65536)
        except OSError:
            data = b""
        if not data:
            self._drop(client)
            return None
        client.waiting += data
        while b"\n" in client.waiting:
            line, _, rest = bytes(client.waiting).partition(b"\n")
            client.waiting[:] = rest
            try:
                answer = self._obey(json.loads(line))
            except Exception as problem:  # one bad order must not take all other jobs' launcher with it
                _log.exception("an order could not be carried out")
                answer = {"error": repr(problem)}
            if isinstance(answer, task.Fork):
                return answer
            try:
                client.connection.sendall(json.dumps(answer).encode() + b"\n")
            except OSError:
                self._drop(client)
                return None
        return None

    def _drop(self, client: _Client) -> None:
        self._selector.unregister(client.connection)
        del self._clients[client.connection.fileno()]
        client.connection.close()

    def _obey(self, request: dict[str, Any]) -> dict[str, Any] | task.Fork:
        if request["term"] < self._term:
            return {"error": f"the order is of term {request['term']}; this cluster already obeys term {self._term}"}
        self._term = request["term"]
        if request["op"] == "fence":
            return {"error": ""}
        try:
            answer = self._start(codec.loads(TaskOrder, json.dumps(request["order"])))
        except OSError as problem:
            return {"error": f"{problem.filename or 'fork'}: {problem.strerror}", "errno": problem.errno}
        return answer if isinstance(answer, task.Fork) else {"error": "", "record": json.loads(codec.dumps(answer))}

    def _start(self, order: TaskOrder) -> TaskRecord | task.Fork:
        if self._has_been_replaced():
            order = replace(order, fresh=True)
        attempt = order.attempt
        offset = attempt.begin(order.task)
        go_out, go_in = os.pipe()
        errors_out, errors_in = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                self._close_all()
                os.close(go_in)
                os.close(errors_out)
            except BaseException:
                os._exit(task.NOT_STARTED)  # never become a second launcher
            return task.Fork(order, str(attempt.log(order.task)), go_out, errors_in)
        os.close(go_out)
        os.close(errors_in)
        os.set_blocking(errors_out, False)
        self._children[pid] = _Child(order, errors_out, oom_kills(), self._group(pid, order))
        return self._let_go(pid, order, attempt.task(order.task), offset, go_in)

    def _has_been_replaced(self) -> bool:
        """Whether fedsched was installed anew since this process has loaded it."""
        if self._is_of_the_past or time.monotonic() < self._next_look_s:
            return self._is_of_the_past
        self._next_look_s = time.monotonic() + LOOK_EVERY_S
        if sources_stamp(_PACKAGE) != self._sources:
            self._is_of_the_past = True
            _log.warning("fedsched has changed: tasks load it themselves until the running ones have ended")
        return self._is_of_the_past

    def _group(self, pid: int, order: TaskOrder) -> TaskGroup | None:
        """A cgroup with the new task in it, before it has done anything."""
        attempt = order.attempt
        name = f"{attempt.job_dir.name}.{attempt.number}.{order.task}.{order.request[:8]}"
        group = self._cgroups.open(name, order.demand) if self._cgroups is not None else None
        if group is not None:
            try:
                group.add(pid)
            except OSError as problem:
                _log.warning("%s is not kept to what it was given: %s", name, problem)
        return group

    def _let_go(self, pid: int, order: TaskOrder, path: Path, offset: int, go: int) -> TaskRecord:
        """Put the start on record, and only then let the task run: no task ever exists that nobody knows of."""
        try:
            identity = identify(pid)
            started = identity.started if identity else ""
            record = TaskRecord(
                pid=pid,
                started=started,
                task=order.task,
                node=order.node,
                seq=order.seq,
                request=order.request,
                log_offset=offset,
                cores=order.cores,
                gpus=order.gpus,
            )
            records.write(path, record)
            with suppress(BrokenPipeError):
                os.write(go, b"!")
        finally:
            os.close(go)  # without the byte the child ends by itself
        return record

    def _reap(self) -> None:
        """Collect whatever has ended: tasks, and what tasks left behind, which fell to the launcher and was killed."""
        ended = False
        while (pid := _ended_child()) is not None:
            ended = True
            child = self._children.pop(pid, None)
            if child is not None:
                # Before the number is free again: whatever the task left behind in its group goes with it.
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            if child is not None:
                path = child.order.attempt.exit(child.order.task)
                self._unrecorded[path] = _exit_of(pid, status, child)
                os.close(child.errors)
                if child.group is not None:
                    child.group.end()
        if ended:
            end_children(self._children)

    def _record_exits(self) -> None:
        for path, record in list(self._unrecorded.items()):
            try:
                records.write(path, record)
            except FileNotFoundError:
                _log.warning("the directory of %s is gone; the exit is not recorded", path)
            except OSError as problem:
                _log.warning("cannot record an exit in %s, trying again: %s", path, problem)
                continue
            del self._unrecorded[path]

    def _close_all(self) -> None:
        """Let go of every descriptor, through the objects that own them: a stale owner would close a stranger's."""
        signal.set_wakeup_fd(-1)
        self._selector.close()
        for owner in (self._listener, self._wake_in, self._wake_out):
            owner.close()
        for client in self._clients.values():
            client.connection.close()
        for child in self._children.values():
            os.close(child.errors)
        os.close(self._lock)


def sources_stamp(root: str) -> str:
    """Names, sizes and times of all Python modules below a directory, in short; empty while they are being replaced."""
    known: list[tuple[str, int, int]] = []
    try:
        for directory, _, _ in os.walk(root):
            with os.scandir(directory) as entries:
                modules = [(entry.path, entry.stat()) for entry in entries if entry.name.endswith(".py")]
            known += [(path, at.st_size, at.st_mtime_ns) for path, at in modules]
    except FileNotFoundError:
        return ""
    return sha256(repr(sorted(known)).encode()).hexdigest()


def _ended_child() -> int | None:
    """A child that has ended and is still to be reaped."""
    try:
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return found.si_pid if found is not None else None


def _exit_of(pid: int, status: int, child: _Child) -> ExitRecord:
    error = b""
    with suppress(BlockingIOError):
        error = os.read(child.errors, 4096)
    code = os.waitstatus_to_exitcode(status)
    over_its_own = child.group is not None and child.group.oom_kills() > 0
    given = f"{child.order.demand.memory_mib} MiB"
    return ExitRecord.of_process(
        pid,
        child.order.request,
        code,
        start_error=error.decode(errors="replace"),
        oom_killed=code == -signal.SIGKILL and oom_kills() > child.oom_kills,
        reason=Reason.OUT_OF_MEMORY if over_its_own else Reason.NONE,
        message=f"used more memory than the {given} that it was given" if over_its_own else "",
    )


def main(arguments: list[str]) -> None:
    """Run a cluster's launcher, detached, unless it has one."""
    parser = argparse.ArgumentParser(prog="python -m fedsched.executor.launcher")
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--idle-s", type=float, required=True)
    parser.add_argument("--cgroup", default="")
    parser.add_argument("--preload", nargs="*", default=[])
    options = parser.parse_args(arguments)
    if os.fork():
        os._exit(0)  # the agent does not become the parent: it would have to reap, and could not after a restart
    os.setsid()
    adopt_orphans()
    # Tasks find the path of an interpreter that was started for them, without the launcher's working directory.
    sys.path[:] = [entry for entry in sys.path if entry not in ("", os.getcwd())]
    _log_to_stderr()
    layout = Layout(options.root)
    lock = _lock(layout)
    if lock is None:
        return
    listener = _listen(layout)  # before loading: orders wait in line, and nobody starts another launcher meanwhile
    for module in options.preload:
        with suppress(ModuleNotFoundError):
            importlib.import_module(module)
    cgroups = below([Path(options.cgroup)] if options.cgroup else candidates(), layout.root)
    gc.freeze()  # what is loaded stays shared with the forks: the collector leaves its pages alone
    launcher = Launcher(layout, listener, lock, options.idle_s, cgroups)
    fork = launcher.serve()
    if fork is None:
        launcher.leave()
    else:
        task.become(fork)


def _log_to_stderr() -> None:
    """Through a handler of its own: the root logger belongs to the tasks."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    for log in (_log, logging.getLogger(below.__module__)):
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        log.propagate = False


def _lock(layout: Layout) -> int | None:
    """Become the cluster's only launcher; None when another one stays."""
    descriptor = os.open(layout.launcher_lock, os.O_RDWR | os.O_CREAT, 0o600)
    until_s = time.monotonic() + LOCK_WAIT_S
    while time.monotonic() < until_s:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError:
            time.sleep(0.05)
    return None


def _listen(layout: Layout) -> socket.socket:
    path = layout.root / "launcher.sock"
    if len(os.fsencode(path)) > SOCKET_PATH_MAX:
        digest = sha256(os.fsencode(layout.root)).hexdigest()[:16]
        directory = Path(tempfile.gettempdir(), f"fedsched-{os.getuid()}-{digest}")
        directory.mkdir(mode=0o700, exist_ok=True)
        if directory.lstat().st_uid != os.getuid() or directory.is_symlink():
            raise PermissionError(f"{directory} belongs to somebody else")
        path = directory / "launcher.sock"
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    umask = os.umask(0o177)  # whoever can connect can run programs as this user
    listener.bind(str(path))
    os.umask(umask)
    listener.listen()
    identity = identify(os.getpid())
    if identity is None:
        raise RuntimeError("this process does not exist")
    records.write(layout.launcher, LauncherRecord(identity.pid, identity.started, str(path)))
    return listener


if __name__ == "__main__":
    main(sys.argv[1:])
