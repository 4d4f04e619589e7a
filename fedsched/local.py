"""A whole federation on one machine: `up` starts its processes, `down` stops them, a state file says what runs."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import yaml

from fedsched.addresses import is_free, listen_problem
from fedsched.config import (
    COMBINED,
    AgentConfig,
    AggregatorConfig,
    ClusterConfig,
    ControllerConfig,
    FederationConfig,
    NodeConfig,
    PolicyConfig,
    TracingConfig,
)
from fedsched.detached import last_lines, spawn
from fedsched.errors import (
    AddressInUse,
    Conflict,
    FedschedError,
    InvalidConfiguration,
    InvalidInput,
    StartFailed,
    TimedOut,
    Unreachable,
)
from fedsched.files import write_whole
from fedsched.runtime import codec

STATE_FILE = "federation.json"
READY_S = 120.0
"""How long all processes may take to be ready; importing torch several times at once takes most of it."""
STOP_S = 15.0
"""How long a process may take to end before it is killed."""
LOG_LINES = 12
"""How much of a failed process's log is shown."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class StartedProcess:
    """A process that `up` started."""

    name: str
    pid: int
    created_s: float
    """Start time as the operating system tells it; pids are used again, pairs are not."""
    log: str


@dataclass(frozen=True, slots=True)
class LocalFederation:
    """What the state file holds."""

    name: str
    controller: str
    aggregator: str
    etcd: str
    clusters: tuple[str, ...]
    trace_endpoint: str
    trace_file: str
    config: str
    """The configuration as JSON, to tell whether `up` is asked for something else."""
    processes: tuple[StartedProcess, ...]

    def running(self) -> tuple[StartedProcess, ...]:
        """The processes that are alive."""
        return tuple(process for process in self.processes if _alive(process) is not None)


def home() -> Path:
    """Where federations of this user keep their state: $FEDSCHED_HOME, or ~/.fedsched."""
    return Path(os.environ.get("FEDSCHED_HOME") or Path.home() / ".fedsched").absolute()


def small() -> FederationConfig:
    """Two small clusters, for a first look."""
    return FederationConfig(
        clusters=tuple(
            ClusterConfig(name=name, nodes=tuple(NodeConfig(name=f"{name}-{n}", cpus=2) for n in (1, 2)))
            for name in ("east", "west")
        )
    )


def current() -> LocalFederation:
    """The one federation that runs on this machine.

    Raises:
        Unreachable: none runs.
        InvalidInput: several do.
    """
    known = _known()
    found = [state for state in known if state.running()]
    if not found:
        stopped = f"; stopped are {', '.join(state.name for state in known)}" if known else ""
        again = (
            "start one with `fedsched up`, a stopped one with `fedsched up FILE` and the file that it was started with"
        )
        raise Unreachable(
            f"no federation runs on this machine, and no controller is named{stopped}",
            f"{again if known else 'start one with `fedsched up`'}, or name one with --server or FEDSCHED_SERVER",
        )
    if len(found) > 1:
        names = ", ".join(f"{state.name} ({state.controller})" for state in found)
        raise InvalidInput(f"{len(found)} federations run on this machine: {names}", "choose one with --server")
    if not found[0].controller:
        raise InvalidInput(
            f"{home() / found[0].name / STATE_FILE} is damaged, and with it the address of the controller is lost",
            f"restart it (`fedsched down --name {found[0].name}`, then `up`), or name the controller with --server",
        )
    return found[0]


def trace_target() -> tuple[str, str]:
    """Endpoint and file that spans of a command go to: as the environment says, else where the federation's go."""
    endpoint, file = os.environ.get("FEDSCHED_TRACE_ENDPOINT", ""), os.environ.get("FEDSCHED_TRACE_FILE", "")
    if endpoint or file:
        return endpoint, file
    try:
        state = current()
    except FedschedError:
        return "", ""
    return state.trace_endpoint, state.trace_file


def runs(state_dir: Path) -> bool:
    """Whether any process of the federation with this state is alive."""
    state = _read(state_dir)
    return state is not None and bool(state.running())


def named(name: str) -> Path:
    """State directory of the federation that `down` means.

    Raises:
        InvalidInput: none has this name, or several could be meant.
    """
    known = _known()
    if name:
        if not (home() / name / STATE_FILE).exists():
            names = ", ".join(state.name for state in known) or "none"
            raise InvalidInput(f"there is no federation {name} on this machine; known: {names}", "check the name")
        return home() / name
    running = [state for state in known if state.running()]
    found = running or known
    if len(found) > 1:
        names = ", ".join(state.name for state in found)
        if running:
            raise InvalidInput(f"{len(found)} federations run on this machine: {names}", "choose one with --name")
        raise InvalidInput(
            f"no federation runs on this machine; stopped are {names}",
            "nothing has to be stopped; to delete what one has left, name it: --name NAME --purge",
        )
    if not found:
        raise InvalidInput("no federation was started on this machine", "nothing has to be stopped")
    return home() / found[0].name


def up(config: FederationConfig, state_dir: Path, say: Say) -> LocalFederation:
    """Start what does not run yet and wait until everything is ready; on failure stop what was started here.

    Raises:
        AddressInUse: another process listens on a configured address.
        StoreUnavailable: a configured etcd does not answer.
        StartFailed: a process ended, or was not ready in time.
        Conflict: the federation runs with another configuration, or another `up` or `down` is at work.
    """
    state_dir.mkdir(parents=True, exist_ok=True)
    with _locked(state_dir):
        before = _read(state_dir)
        wanted = config.model_dump_json()
        _stop(_strays(state_dir, before), say)
        running = before.running() if before is not None else ()
        if before is not None and running and before.config != wanted:
            raise Conflict(
                f"federation {config.name} runs with another configuration", "stop it first with `fedsched down`"
            )
        return _Start(config, state_dir, before, running, say).run()


def down(state_dir: Path, purge: bool, say: Say) -> tuple[StartedProcess, ...]:
    """Stop every process and every task, and return the processes that ran.

    What they stored stays for the next `up` unless `purge`.

    Raises:
        Conflict: another `up` or `down` is at work.
    """
    from fedsched.executor.local import shut_down

    state = _read(state_dir)
    running: tuple[StartedProcess, ...] = ()
    if state is not None:
        with _locked(state_dir):
            running = (*state.running(), *_strays(state_dir, state))
            # Agents go first: an agent that saw its tasks end would think that they had failed.
            _stop([process for process in running if process.name.startswith("agent ")], say)
            for cluster in state.clusters:
                tasks = shut_down(_agent_dir(state_dir, cluster) / "executor")
                if tasks:
                    say(f"stopped {tasks} tasks of {cluster}; their jobs go on after the next `fedsched up`")
            for name in ("aggregator", "controller", "etcd"):
                _stop([process for process in running if process.name == name], say)
            _write(state_dir, replace(state, processes=()))
    if purge:
        shutil.rmtree(state_dir, ignore_errors=True)
        say(f"deleted {state_dir}")
    return running


class _Start:
    """One run of `up`."""

    def __init__(
        self,
        config: FederationConfig,
        state_dir: Path,
        before: LocalFederation | None,
        running: tuple[StartedProcess, ...],
        say: Say,
    ) -> None:
        self._config = config
        self._dir = state_dir
        self._say = say
        self._running = {process.name: process for process in running}
        self._new: list[StartedProcess] = []
        tracing = config.tracing
        if not tracing.endpoint and not tracing.file:
            tracing = TracingConfig(file=str(state_dir / "trace.jsonl"))
        self._tracing = tracing
        self._state = LocalFederation(
            name=config.name,
            controller=config.controller,
            aggregator=config.aggregator,
            etcd=config.etcd.address or (before.etcd if before is not None and running else ""),
            clusters=tuple(cluster.name for cluster in config.clusters),
            trace_endpoint=tracing.endpoint,
            trace_file=tracing.file,
            config=config.model_dump_json(),
            processes=running,
        )

    def run(self) -> LocalFederation:
        """Start, wait, and undo it all if that fails; what runs then."""
        begun_s = time.monotonic()
        _write(self._dir, self._state)  # whatever ends this process, `down` finds the federation
        try:
            self._check_addresses()
            self._start_etcd()
            for name, module, body in servers(self._config, self._dir, self._state.etcd, self._tracing):
                if name not in self._running:
                    self._spawn(name, module, body)
            if not self._new:
                self._say(f"federation {self._state.name} runs already; controller at {self._state.controller}")
                return self._state
            self._wait(begun_s)
        except BaseException:
            self._undo()
            raise
        self._say(
            f"federation {self._state.name} is up after {time.monotonic() - begun_s:.1f} s; "
            f"controller at {self._state.controller}, state in {self._dir}"
        )
        for told in filter(None, (said_of_apart(self._config), said_of_quorum(self._config))):
            self._say(told)
        return self._state

    def _check_addresses(self) -> None:
        for name, address in (("controller", self._config.controller), ("aggregator", self._config.aggregator)):
            problem = None if name in self._running else listen_problem(address)
            if problem is None:
                continue
            if problem.errno == errno.EADDRINUSE:
                raise AddressInUse(
                    f"the {name} cannot listen on {address}: another process does",
                    f"stop that process, or set `{name}` to another address in the federation file",
                )
            raise InvalidConfiguration(
                f"the {name} cannot listen on {address}: {problem.strerror}",
                f"set `{name}` to an address of this machine in the federation file",
            )

    def _start_etcd(self) -> None:
        from fedsched.adapters import etcd_server
        from fedsched.adapters.etcd import EtcdStore

        if self._config.etcd.address is not None:
            store = EtcdStore(self._config.etcd.address)
            try:
                store.get("/")
            finally:
                store.close()
            self._say(f"etcd at {self._config.etcd.address} answers")
        elif "etcd" not in self._running:
            log = self._log("etcd")
            server = etcd_server.start(_etcd_data(self._dir), self._state.etcd or None, log)
            self._keep(StartedProcess("etcd", server.pid, psutil.Process(server.pid).create_time(), str(log)))
            self._state = replace(self._state, etcd=server.address)
            _write(self._dir, self._state)
            self._say(f"etcd answers at {server.address}")

    def _spawn(self, name: str, module: str, body: Any) -> None:
        body.state_dir.mkdir(parents=True, exist_ok=True)
        config_file = self._dir / f"{name.replace(' ', '-')}.yaml"
        config_file.write_text(yaml.safe_dump(body.model_dump(mode="json"), sort_keys=False))
        log = self._log(name)
        # -P: what lies in the caller's directory must not take the place of installed modules.
        pid = spawn([sys.executable, "-P", "-m", module, "--config", str(config_file)], log, os.environ)
        self._keep(StartedProcess(name, pid, psutil.Process(pid).create_time(), str(log)))

    def _log(self, name: str) -> Path:
        log = _log_file(self._dir, name)
        log.parent.mkdir(parents=True, exist_ok=True)
        return log

    def _keep(self, process: StartedProcess) -> None:
        """Note the process at once: whatever happens next, `down` finds it."""
        self._new.append(process)
        kept = [old for old in self._state.processes if old.name != process.name]
        self._state = replace(self._state, processes=(*kept, process))
        _write(self._dir, self._state)

    def _wait(self, begun_s: float) -> None:
        ready = {"etcd"}
        while True:
            for process in self._new:
                if process.name not in ready and _alive(process) is None:
                    raise StartFailed(f"{process.name} ended at once; the end of {process.log}:\n{_end(process)}")
            now_ready = self._ready()
            for process in self._new:
                if process.name in now_ready and process.name not in ready:
                    self._say(f"{process.name} is ready ({time.monotonic() - begun_s:.1f} s)")
            ready |= now_ready
            late = [process for process in self._new if process.name not in ready]
            if not late:
                return
            if time.monotonic() - begun_s > READY_S:
                raise StartFailed(
                    f"{', '.join(process.name for process in late)} not ready after {READY_S:.0f} s; "
                    f"the end of {late[0].log}:\n{_end(late[0])}"
                )
            time.sleep(0.2)

    def _ready(self) -> set[str]:
        """Names of the processes that serve: they are in etcd, under leases that are theirs."""
        from fedsched.adapters.rpc import JobsClient

        pids = {process.name: process.pid for process in (*self._running.values(), *self._new)}
        found: set[str] = set()
        with contextlib.suppress(Unreachable, TimedOut), JobsClient(self._state.controller, timeout_s=2.0) as client:
            for view in client.clusters():
                name = f"agent {view.name}"
                if view.reachable and view.record is not None and view.record.pid == pids.get(name):
                    found.add(name)
            found.add("controller")
        if not is_free(self._state.aggregator):
            found.add("aggregator")
        return found

    def _undo(self) -> None:
        _stop(list(reversed(self._new)), self._say)
        gone = {process.name for process in self._new}
        kept = tuple(process for process in self._state.processes if process.name not in gone)
        _write(self._dir, replace(self._state, processes=kept))


def servers(
    config: FederationConfig, state_dir: Path, etcd: str, tracing: TracingConfig
) -> Iterator[tuple[str, str, ControllerConfig | AggregatorConfig | AgentConfig]]:
    """What is started beside etcd, in this order: name, module and configuration of each process."""
    together = _learned_together(config)
    yield (
        "controller",
        "fedsched.controller",
        ControllerConfig(
            listen=config.controller,
            etcd=etcd,
            state_dir=state_dir / "controller",
            tracing=tracing,
            lease_ttl_s=config.lease_ttl_s,
        ),
    )
    yield (
        "aggregator",
        "fedsched.aggregator",
        AggregatorConfig(
            listen=config.aggregator,
            etcd=etcd,
            state_dir=state_dir / "aggregator",
            rounds=config.rounds,
            policy=together,
            tracing=tracing,
            lease_ttl_s=config.lease_ttl_s,
        ),
    )
    for cluster in config.clusters:
        yield (
            f"agent {cluster.name}",
            "fedsched.agent",
            AgentConfig(
                cluster=cluster.name,
                state_dir=_agent_dir(state_dir, cluster.name),
                etcd=etcd,
                # It would be refused, and explore for lessons that nobody draws.
                aggregator=None if _learns_apart(cluster, together.name) else config.aggregator,
                nodes=cluster.nodes,
                slot=config.slot,
                policy=cluster.policy,
                learning=config.learning,
                promotion=config.promotion,
                tracing=tracing,
                lease_ttl_s=config.lease_ttl_s,
                labels=cluster.labels,
            ),
        )


def _learned_together(config: FederationConfig) -> PolicyConfig:
    """The policy that the aggregator combines: the first cluster's that can be."""
    return next((cluster.policy for cluster in config.clusters if cluster.policy.name in COMBINED), PolicyConfig())


def _learns_apart(cluster: ClusterConfig, together: str) -> bool:
    """Whether its policy could be learned together with others, but is not the one that is."""
    return cluster.policy.name in COMBINED and cluster.policy.name != together


def said_of_apart(config: FederationConfig) -> str:
    """What becomes of clusters whose policy is not the one that is combined: a sentence; empty where there are none."""
    together = _learned_together(config).name
    apart = [
        f"{cluster.name} ({cluster.policy.name})" for cluster in config.clusters if _learns_apart(cluster, together)
    ]
    if not apart:
        return ""
    whose = next(cluster.name for cluster in config.clusters if cluster.policy.name == together)
    return (
        f"the aggregator combines {together}, the policy of {whose}; no part in that: {', '.join(apart)}, "
        "whose policy gives no updates and is offered no versions (set policy.name alike where clusters are to learn "
        "together)"
    )


def said_of_quorum(config: FederationConfig) -> str:
    """That too few clusters learn for a round to count: a sentence; empty if nobody learns, or there are enough."""
    together = _learned_together(config).name
    learning = [cluster.name for cluster in config.clusters if cluster.policy.name == together]
    if not learning or len(learning) >= config.rounds.quorum:
        return ""
    return (
        f"no rounds are held: they need {config.rounds.quorum} clusters, and {together} runs in {', '.join(learning)} "
        f"only (set rounds.quorum to {len(learning)} to have them anyway)"
    )


def _agent_dir(state_dir: Path, cluster: str) -> Path:
    return state_dir / "clusters" / cluster


def _etcd_data(state_dir: Path) -> Path:
    return state_dir / "etcd" / "data"


def _log_file(state_dir: Path, name: str) -> Path:
    return state_dir / "logs" / f"{name.replace(' ', '-')}.log"


def _known() -> list[LocalFederation]:
    """All federations with a state file, by name."""
    if not home().is_dir():
        return []
    found = [_read(folder) for folder in sorted(home().iterdir()) if folder.is_dir()]
    return [state for state in found if state is not None]


def _read(state_dir: Path) -> LocalFederation | None:
    try:
        return codec.loads(LocalFederation, (state_dir / STATE_FILE).read_bytes())
    except FileNotFoundError:
        return None
    except (ValueError, OSError):
        return _recognised(state_dir)


def _recognised(state_dir: Path) -> LocalFederation:
    """What is left to know of a federation whose state file is damaged: enough to stop it, and then to start it again.

    Its processes are recognised by the files that they were started with.
    """
    return LocalFederation(
        name=state_dir.name,
        controller="",
        aggregator="",
        etcd="",
        clusters=tuple(sorted(folder.name for folder in (state_dir / "clusters").glob("*"))),
        trace_endpoint="",
        trace_file="",
        config="",
        processes=_found(state_dir),
    )


def _strays(state_dir: Path, state: LocalFederation | None) -> list[StartedProcess]:
    """Processes of a federation that its state does not name: an `up` that was killed had not yet noted them."""
    known = {process.pid for process in state.running()} if state is not None else set()
    return [process for process in _found(state_dir) if process.pid not in known]


def _found(state_dir: Path) -> tuple[StartedProcess, ...]:
    """The processes of a federation that are alive, by what they were started with."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            name = _name_in(process.cmdline(), state_dir)
            if name:
                found.append(StartedProcess(name, process.pid, process.create_time(), str(_log_file(state_dir, name))))
    return tuple(found)


def _name_in(command: list[str], state_dir: Path) -> str:
    """The name of a federation's process with this command line; empty when it is none."""
    if f"--data-dir={_etcd_data(state_dir)}" in command:
        return "etcd"
    for word, following in itertools.pairwise(command):
        file = Path(following)
        if word == "--config" and file.parent == state_dir and file.suffix == ".yaml":
            return file.stem.replace("-", " ", 1) if file.stem.startswith("agent-") else file.stem
    return ""


def _write(state_dir: Path, state: LocalFederation) -> None:
    write_whole(state_dir / STATE_FILE, json.dumps(asdict(state), indent=2).encode())


@contextlib.contextmanager
def _locked(state_dir: Path) -> Iterator[None]:
    """One `up` or `down` of a federation at a time."""
    with (state_dir / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Conflict(
                f"another `fedsched up` or `down` works on {state_dir.name}", "wait until it has ended"
            ) from None
        yield


def _alive(process: StartedProcess) -> psutil.Process | None:
    try:
        found = psutil.Process(process.pid)
        # Start times are rounded differently from boot to boot of the reading, never by as much as a second.
        if abs(found.create_time() - process.created_s) < 1.0 and found.status() != psutil.STATUS_ZOMBIE:
            return found
    except psutil.NoSuchProcess:
        pass
    return None


def _stop(processes: list[StartedProcess], say: Say) -> None:
    """End the processes: all asked at once, then killed if they do not end."""
    alive = [(process, found) for process in processes if (found := _alive(process)) is not None]
    for number, wait_s in ((signal.SIGTERM, STOP_S), (signal.SIGKILL, STOP_S)):
        for _, found in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                found.send_signal(number)
        gone, _ = psutil.wait_procs([found for _, found in alive], timeout=wait_s)
        for process, found in alive:
            if found in gone:
                say(f"{process.name} {'ended' if number is signal.SIGTERM else 'was killed'}")
        alive = [(process, found) for process, found in alive if found not in gone]
    for process in processes:
        # A process that ended before is still to be collected if it is a child of ours.
        with contextlib.suppress(psutil.NoSuchProcess, psutil.TimeoutExpired):
            if _alive(process) is None:
                psutil.Process(process.pid).wait(0)


def _end(process: StartedProcess) -> str:
    """What a process said last, indented."""
    return "\n".join(f"  {line}" for line in last_lines(Path(process.log), LOG_LINES).splitlines())
