"""A TCP relay that a test can cut, or slow down: a network that fails, or is long, while both ends live."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from types import TracebackType


class Relay:
    """Forwards connections to `target` (host:port) until cut; listens at `address`.

    Args:
        delay_s: between the arrival of bytes and their way on, in both directions.
    """

    def __init__(self, target: str, delay_s: float = 0.0) -> None:
        self._delay_s = delay_s
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._cut = False
        self._start(self._accept)

    def __enter__(self) -> Relay:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cut()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in tuple(self._threads):
            thread.join(10)

    def cut(self) -> None:
        """Break all connections and refuse new ones."""
        with self._lock:
            self._cut = True
            for end in self._sockets:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def heal(self) -> None:
        """Let connections through again."""
        with self._lock:
            self._cut = False

    def _start(self, target: object, *arguments: object) -> None:
        assert callable(target)
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                if self._cut:
                    near.close()
                    continue
                try:
                    far = socket.create_connection(self._target, timeout=5)
                except OSError:
                    near.close()
                    continue
                self._sockets |= {near, far}
                pair = threading.Semaphore(0)
                self._start(self._pump, near, far, pair)
                self._start(self._pump, far, near, pair)
                self._start(self._close, near, far, pair)

    def _pump(self, source: socket.socket, sink: socket.socket, done: threading.Semaphore) -> None:
        with contextlib.suppress(OSError):
            source.settimeout(None)
            while data := source.recv(65536):
                time.sleep(self._delay_s)
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        done.release()

    def _close(self, near: socket.socket, far: socket.socket, done: threading.Semaphore) -> None:
        done.acquire()
        done.acquire()
        with self._lock:
            self._sockets -= {near, far}
        near.close()
        far.close()
